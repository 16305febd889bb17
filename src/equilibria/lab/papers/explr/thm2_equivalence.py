"""explr-equivalence: a small BatchNorm network trained with weight decay, and without it at the folded lr."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.theory.exponential import constant_schedule, decay_roots, overflow_horizon, power_schedule
from equilibria.theory.folding import fold

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes


SCHEDULES = {
    "constant": "constant",
    "step": "step decay",
    "cosine": "cosine",
    "warm-up": "warm-up from 0",
    "decay": "varying weight decay",
    "momentum": "varying momentum",
}
TINY_EPS = 1e-30  # exact scale invariance needs 0, for which torch's BatchNorm raises
_CLASSES = 5
_BLOCK = 100  # steps whose losses are averaged


@dataclass(frozen=True)
class Config:
    """Settings of SGD in float64, and of the long float32 run, whose lr overflows after some thousand steps."""

    lr: float = 0.1
    weight_decay: float = 5e-3
    momentum: float = 0.9
    steps: int = 500
    power_steps: int = 200
    long_decay: float = 0.02
    long_momentum: float = 0.9
    long_steps: int = 30_000
    widths: tuple[int, ...] = (10, 16, 16, 16)
    batches: int = 20
    batch_size: int = 32
    seed: int = 0


def tasks(config: Config) -> dict[str, str]:
    """Runs with each schedule, the paper's purely exponential schedule, and the long run."""
    return {name: name for name in (*SCHEDULES, "power", "float32")}


def run_task(config: Config, name: str) -> Arrays:
    """Run one of these."""
    import torch

    torch.set_num_threads(1)
    if name == "float32":
        return _forever(config)
    return _power(config) if name == "power" else _pair(config, name)


class _Run:
    """A network in training on a cycle of batches.

    With ``head=False``, as in the paper, BatchNorm's scale and shift and the last layer are not trained.
    """

    def __init__(
        self, config: Config, *, weight_decay: float, momentum: float, dtype: torch.dtype, head: bool = True
    ) -> None:
        import torch

        generator = torch.Generator().manual_seed(config.seed)
        inputs = torch.randn(config.batches, config.batch_size, config.widths[0], generator=generator)
        self.labels = torch.randint(0, _CLASSES, (config.batches, config.batch_size), generator=generator)
        self.inputs = inputs.to(dtype)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.net = _network(config).to(dtype)
        params = dict(self.net.named_parameters())
        last = list(params)[-2:]
        self.invariant = {name: p for name, p in params.items() if p.ndim == 2 and name not in last}
        others = [p for name, p in params.items() if name not in self.invariant]
        groups = [{"params": list(self.invariant.values())}, *([{"params": others}] if head else [])]
        self.optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=momentum, weight_decay=weight_decay)
        self.loss = math.nan

    def logits(self, step: int) -> torch.Tensor:
        """Take a step on its batch; return the outputs before it."""
        from torch.nn import functional

        batch = step % len(self.inputs)
        self.optimizer.zero_grad()
        logits: torch.Tensor = self.net(self.inputs[batch])
        loss = functional.cross_entropy(logits, self.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = loss.item()
        return logits.detach()

    def evaluated(self) -> torch.Tensor:
        """Outputs in eval mode, from the running statistics."""
        import torch

        self.net.eval()
        with torch.no_grad():
            logits: torch.Tensor = self.net(self.inputs[0])
        self.net.train()
        return logits


def _network(config: Config) -> torch.nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(config.widths):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside, eps=TINY_EPS), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(config.widths[-1], _CLASSES))


def scheduler(name: str, optimizer: Any, *, steps: int, lr: float, weight_decay: float) -> Any:
    """The schedule of this name, of lr, weight decay or momentum."""
    from torch.optim import lr_scheduler

    from equilibria.control import WeightDecayScheduler

    if name == "step":
        return lr_scheduler.MultiStepLR(optimizer, [2 * steps // 5, 7 * steps // 10], gamma=0.1)
    if name == "warm-up":
        return lr_scheduler.LambdaLR(optimizer, lambda t: min(10 * t / steps, 1.0))
    if name == "momentum":
        return lr_scheduler.OneCycleLR(optimizer, lr, steps, base_momentum=0.6, max_momentum=0.95)
    if name == "constant":
        return lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if name == "exponential":
        return lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / steps))
    if name == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=steps // 20)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if name == "cosine":
        return cosine
    return WeightDecayScheduler(cosine, lambda t: weight_decay * (1 + math.sin(t / 17)))


def _pair(config: Config, name: str) -> Arrays:
    """Compare runs with and without weight decay, and one with an additional rounding of the weights per step."""
    import torch

    from equilibria.control import FoldedWeightDecay

    plain, folded, rounded = (
        _Run(config, weight_decay=config.weight_decay, momentum=config.momentum, dtype=torch.float64)
        for _ in ("plain", "folded", "rounded")
    )
    settings: dict[str, Any] = {"steps": config.steps, "lr": config.lr, "weight_decay": config.weight_decay}
    schedulers = [scheduler(name, run.optimizer, **settings) for run in (plain, folded, rounded)]
    control = FoldedWeightDecay(schedulers[1], model=folded.net, invariant=list(folded.invariant))
    schedulers[1] = control
    series: dict[str, list[float]] = {key: [] for key in ("train", "eval", "rounded", "lr", "folded_lr")}
    nudge = _nudge(config, rounded)
    for step in range(config.steps):
        if step:
            for schedule in schedulers:
                schedule.step()
        exponent = folded.optimizer.param_groups[0].get("fold_exponent", 0)  # before the step
        original = float(plain.optimizer.param_groups[0]["lr"])
        reference = plain.logits(step)
        series["train"].append(deviation(reference, folded.logits(step)))
        series["rounded"].append(deviation(reference, rounded.logits(step)))
        next(nudge)
        if step % 5 == 4:
            series["eval"].append(deviation(plain.evaluated(), folded.evaluated()))
        series["lr"].append(original)
        series["folded_lr"].append(float(control.get_last_lr()[0]) * 4.0**exponent)
    return {key: np.array(values) for key, values in series.items()}


def _nudge(config: Config, run: _Run) -> Iterator[None]:
    """At every ``next``, change every invariant weight by one rounding, up or down."""
    import torch

    generator = torch.Generator().manual_seed(config.seed + 1)
    while True:
        for weight in run.invariant.values():
            signs = 2 * torch.randint(0, 2, weight.shape, generator=generator).to(weight.dtype) - 1
            weight.data.mul_(1 + torch.finfo(weight.dtype).eps * signs)
        yield


def deviation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Relative distance of two outputs."""
    return float((first - second).norm() / first.norm())


def _power(config: Config) -> Arrays:
    """Compare a run whose lr grows by one factor per step, with and without the starting buffer that this needs."""
    import torch

    schedule = power_schedule(
        config.lr, config.weight_decay, step=np.arange(config.power_steps), momentum=config.momentum
    )
    deviations = {}
    for name, share in (("with_buffer", schedule.start_buffer), ("without_buffer", 0.0)):
        plain, grown = (
            _Run(config, weight_decay=config.weight_decay, momentum=config.momentum, dtype=torch.float64)
            for _ in ("plain", "grown")
        )
        grown.optimizer.param_groups[0]["weight_decay"] = 0.0
        for weight in grown.invariant.values():
            grown.optimizer.state[weight]["momentum_buffer"] = share * weight.detach().clone()
        apart = []
        for step, lr in enumerate(schedule.lr.tolist()):
            grown.optimizer.param_groups[0]["lr"] = lr
            apart.append(deviation(plain.logits(step), grown.logits(step)))
        deviations[name] = np.array(apart)
    return deviations


def _forever(config: Config) -> Arrays:
    """Run for long in float32: with weight decay, folded, and folded without renormalisation until it overflows."""
    import torch

    from equilibria.control import FoldedWeightDecay

    settings: dict[str, Any] = {
        "weight_decay": config.long_decay,
        "momentum": config.long_momentum,
        "dtype": torch.float32,
    }
    plain, folded, bare = (_Run(config, **settings, head=False) for _ in ("plain", "folded", "bare"))
    FoldedWeightDecay(folded.optimizer, model=folded.net, invariant=list(folded.invariant))
    FoldedWeightDecay(bare.optimizer, model=bare.net, invariant=list(bare.invariant), renormalise=False)
    before, clean = _until_it_breaks(bare, config.long_steps)
    group, weight = folded.optimizer.param_groups[0], next(iter(folded.invariant.values()))
    losses, norms, scales, different = np.empty((2, config.long_steps)), [], [], 0
    for step in range(config.long_steps):
        outputs = folded.logits(step)
        plain.logits(step)
        losses[:, step] = plain.loss, folded.loss
        different += step < clean and not torch.equal(outputs, before[step])
        norms.append(float(weight.detach().norm()))
        scales.append(float(group["fold_log_scale"]))
    shown = slice(_BLOCK - 1, None, _BLOCK)
    return {
        "losses": losses.reshape(2, -1, _BLOCK).mean(axis=2),
        "finite": np.asarray(np.isfinite(losses).all()),
        "broken": np.asarray(len(before)),
        "clean": np.asarray(clean),
        "different": np.asarray(different),
        "norm": np.array(norms)[shown],
        "log_scale": np.array(scales)[shown],
    }


def _until_it_breaks(run: _Run, steps: int) -> tuple[list[torch.Tensor], int]:
    """Outputs of all steps before the lr overflows float32, and the number of steps before a variance does."""
    outputs: list[torch.Tensor] = []
    clean = 0
    for step in range(steps):
        try:
            logits = run.logits(step)
        except (RuntimeError, EquilibriaError):
            break
        outputs.append(logits)
        clean += clean == step and all(bool(buffer.isfinite().all()) for buffer in run.net.buffers())
    return outputs, clean


_EXACT = Source(
    "explr",
    "Theorem 2.5",
    corrected="indices, and the sign of the starting velocity; our recursion has no division by lr and allows lr = 0",
    law="folding.fold",
)
_POWER = Source(
    "explr",
    "Theorem 2.1",
    corrected="from an empty buffer the lr is not a pure power alpha^(-2t-1); that needs the buffer w_0 (1-1/alpha)/lr",
    law="exponential.power_schedule",
)
_EPOCH = Source("explr", "Section 2.1, PreResNet32", law="exponential.decay_roots")
_FLOAT32 = Source("", "explr Theorem 2.5, beyond", law="switching.renormalisation")
FEW = 10  # deviations of two runs that differ by rounding alone have no sharper law than their order of magnitude


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge that the network function is the same under every schedule, the pure power, and the long run."""
    rounding = max(float(results[name]["rounded"].max()) for name in SCHEDULES)
    claims = [
        *(_judge_schedule(name, results[name]) for name in SCHEDULES),
        *_judge_power(config, results["power"], rounding),
        *_judge_long(config, results["float32"]),
    ]
    numbers = {
        name: {
            "largest_deviation_in_train_mode": float(results[name]["train"].max()),
            "largest_deviation_in_eval_mode": float(results[name]["eval"].max()),
            "the_same_of_one_more_rounding": float(results[name]["rounded"].max()),
            "last_folded_lr": float(results[name]["folded_lr"][-1]),
        }
        for name in SCHEDULES
    }
    return Outcome(claims, numbers)


def _judge_schedule(name: str, run: Arrays) -> Claim:
    return _EXACT.says(
        f"{SCHEDULES[name].capitalize()}: largest relative deviation of the logits, train and eval mode, "
        f"within {FEW} times the effect of one more rounding of the weights per step"
    ).at_most(FEW * float(run["rounded"].max()), max(float(run["train"].max()), float(run["eval"].max())))


def _judge_power(config: Config, power: Arrays, rounding: float) -> list[Claim]:
    steps = np.arange(config.steps)
    closed = constant_schedule(config.lr, config.weight_decay, step=steps, momentum=config.momentum)
    recursion = fold(np.full(config.steps, config.lr), weight_decay=config.weight_decay, momentum=config.momentum)
    growth = float(decay_roots(0.1, 5e-4, momentum=0.9).z1) ** (-2 * 391)
    return [
        _POWER.says("lr growing by one factor, with the buffer it needs: largest deviation of the logits").at_most(
            FEW * rounding, float(power["with_buffer"].max())
        ),
        _POWER.says(
            "lr growing by one factor from an empty buffer: another run: largest deviation of the logits"
        ).at_least(1e6 * rounding, float(power["without_buffer"].max())),
        Source("explr", "Theorem 2.1", law="exponential.constant_schedule")
        .says("Constant lr: closed form of the folded lr against the recursion, largest relative difference")
        .to_rounding(float(np.max(np.abs(closed.lr / recursion.lr - 1))), operations=10 * config.steps),
        _EPOCH.says(
            "PreResNet32 (lr 0.1, weight decay 5e-4, momentum 0.9, 391 steps): growth of the lr per epoch"
        ).near(1.481, growth, absolute=0.0005),
    ]


def _judge_long(config: Config, run: Arrays) -> list[Claim]:
    horizon = overflow_horizon(config.lr, config.long_decay, momentum=config.long_momentum)
    assert horizon.lr is not None
    clean = int(run["clean"])
    plain, folded = run["losses"][:, run["losses"].shape[1] // 4 :]
    error = math.hypot(plain.std(ddof=1), folded.std(ddof=1)) / math.sqrt(len(plain)) / plain.mean()
    return [
        Source("", "explr Theorem 2.1, beyond", law="exponential.overflow_horizon")
        .says("float32 without renormalisation: steps until the lr is too large for the type")
        .near(horizon.lr, float(run["broken"]), absolute=1, unit="steps"),
        _FLOAT32.says(
            f"float32 with powers of two divided out: steps whose logits differ in any bit, of the first {clean:,}, "
            "after which a variance overflows without"
        ).at_most(0, float(run["different"]), unit="steps"),
        _FLOAT32.says(
            "float32: growth of the weights by the end had they not been renormalised, as a power of ten"
        ).at_least(
            math.log10(float(np.finfo(np.float32).max)),
            float(run["log_scale"][-1]) / math.log(10) if run["finite"] else math.nan,
        ),
        _FLOAT32.says(
            "float32: mean loss of the folded run over that of the run with weight decay, after the first quarter"
        ).near(1.0, float(folded.mean() / plain.mean()), absolute=4 * error),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw deviations, folded lrs, and scale and loss of the long run."""
    figure, (apart, rates, scales, losses) = panels(2, 2)
    for (name, label), colour in zip(SCHEDULES.items(), COLOURS, strict=False):
        run = results[name]
        steps = np.arange(len(run["lr"]))
        apart.plot(steps, run["train"], color=colour, lw=0.7)
        rates.plot(steps, np.where(run["folded_lr"] > 0, run["folded_lr"], np.nan), color=colour, label=label)
    rounding = np.max([results[name]["rounded"] for name in SCHEDULES], axis=0)
    apart.plot(rounding, color=THEORY, ls="--", lw=0.9, label="one more rounding per step (largest)")
    apart.plot(results["power"]["without_buffer"], color=COLOURS[6], lw=0.9, label="pure power, empty buffer")
    apart.set(yscale="log", xlabel="step", ylabel="relative deviation of the logits", ylim=(1e-17, None))
    label_panel(apart, "a", "with weight decay against without, float64", legend=True)
    closed = constant_schedule(config.lr, config.weight_decay, step=np.arange(config.steps), momentum=config.momentum)
    rates.plot(closed.lr, color=THEORY, ls="--", lw=0.9, label="closed form, constant")
    rates.set(yscale="log", xlabel="step", ylabel="lr without weight decay", ylim=(1e-6, None))
    rates.legend()
    label_panel(rates, "b", "the lr that replaces weight decay")
    _draw_long(scales, losses, config, results["float32"])
    return {"theorem-2-5": figure}


def _draw_long(scales: Axes, losses: Axes, config: Config, run: Arrays) -> None:
    steps = (np.arange(len(run["norm"])) + 1) * config.long_steps / len(run["norm"])
    scales.plot(steps, run["log_scale"] / math.log(10), color=COLOURS[1], label="growth $P$ (never stored)")
    scales.plot(steps, np.log10(run["norm"]), color=COLOURS[0], label="norm of the stored weights")
    scales.axhline(math.log10(np.finfo(np.float32).max), color=THEORY, lw=0.8, ls=":", label="largest float32")
    scales.axvline(float(run["broken"]), color=COLOURS[2], lw=0.9, ls="--", label="breaks without renormalisation")
    scales.set(xlabel="step", ylabel="$\\log_{10}$")
    label_panel(scales, "c", "long float32 run", legend=True)
    for values, colour, label in zip(run["losses"], COLOURS, ("with weight decay", "folded"), strict=False):
        losses.plot(steps, values, color=colour, lw=0.8, alpha=0.8, label=label)
    losses.set(xlabel="step", ylabel="training loss, mean of 100 steps")
    losses.legend()
    label_panel(losses, "d", "float32: the two runs")


EXPERIMENT = Experiment(
    id="explr-equivalence",
    title="Weight decay is a growing learning rate, exactly and for any schedule",
    source="explr thm. 2.1, 2.5",
    scales={
        "smoke": Config(steps=60, power_steps=60, long_decay=0.5, long_momentum=0.5, long_steps=800),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
