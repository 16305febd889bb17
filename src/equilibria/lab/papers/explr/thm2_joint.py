"""explr-joint: whole networks whose weights are scale-invariant jointly, all of them decaying, and folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.explr.thm2_equivalence import FEW, TINY_EPS, deviation, scheduler

if TYPE_CHECKING:
    import torch
    from torch import nn

    from equilibria.lab.data import ImageSet
    from equilibria.symmetry import Symmetries

PRERESNET = "preresnet"
NETWORKS = {
    PRERESNET: "PreResNet, all of it",
    "group": "GroupNorm",
    "layer": "LayerNorm, biases included",
    "instance": "InstanceNorm",
}
SCHEDULES = {
    "constant": "constant",
    "step": "step decay",
    "cosine": "cosine",
    "warm-up": "warm-up from 0",
    "exponential": "exponential decay",
    "plateau": "lr halved on a plateau of the loss",
}
_NEARLY = "texp"  # the approximate schedule of the paper, which the measure has to tell from the exact one


@dataclass(frozen=True)
class Config:
    """Settings of SGD in float64 on a cycle of batches of digits, with BatchNorm's eps at 1e-30.

    The paper's lr and momentum; five times its weight decay, so that the weights double within the run and are halved.
    """

    lr: float = 0.1
    weight_decay: float = 2.5e-3
    momentum: float = 0.9
    steps: int = 500
    depth: int = 32
    width: int = 4
    batches: int = 40
    batch_size: int = 32
    twins: int = 4
    seed: int = 0


def load(config: Config) -> ImageSet:
    """Load the digits."""
    from equilibria.lab.data import load_digits

    return load_digits()


def tasks(config: Config) -> dict[str, tuple[str, str]]:
    """Network and schedule."""
    pairs = [(network, schedule) for network in NETWORKS for schedule in SCHEDULES]
    return {f"{network}-{schedule}": (network, schedule) for network, schedule in [*pairs, (PRERESNET, _NEARLY)]}


def run_task(config: Config, task: tuple[str, str]) -> Arrays:
    """Train with weight decay, folded, and with first weights one ulp apart: deviations from the first of these."""
    import torch

    from equilibria.control import FoldedWeightDecay, TaperedExponential

    torch.set_num_threads(1)
    network, schedule = task
    plain = _Run(config, network, "step" if schedule == _NEARLY else schedule)
    folded, *twins = (_Run(config, network, plain.schedule, plain.symmetries) for _ in range(1 + config.twins))
    kind = TaperedExponential if schedule == _NEARLY else FoldedWeightDecay
    folded.scheduler = kind(folded.scheduler, model=folded.net, invariant=plain.symmetries)
    for number, twin in enumerate(twins):
        twin.round_weights(config.seed + 1 + number)
    largest = np.zeros((config.steps, 1 + config.twins))
    rates = np.empty((config.steps, 2))
    for step in range(config.steps):
        exponent = folded.optimizer.param_groups[0].get("fold_exponent", 0)  # before the step
        rates[step, 0] = float(plain.optimizer.param_groups[0]["lr"])
        expected = plain.outputs(step)
        largest[step] = [deviation(expected, run.outputs(step)) for run in (folded, *twins)]
        rates[step, 1] = float(folded.scheduler.get_last_lr()[0]) * 4.0**exponent
    largest = np.maximum.accumulate(largest)
    return {"folded": largest[:, 0], "rounded": largest[:, 1:], "lr": rates[:, 0], "folded_lr": rates[:, 1]}


class _Run:
    """A network in training; all parameters decay, those that may be scaled together in one group."""

    def __init__(self, config: Config, network: str, schedule: str, symmetries: Symmetries | None = None) -> None:
        import torch

        self._config, self.schedule = config, schedule
        digits, used = load(config), config.batches * config.batch_size
        shape = (config.batches, config.batch_size)
        self._images = digits.train_images[:used].double().reshape(*shape, *digits.train_images.shape[1:])
        self._labels = digits.train_labels[:used].reshape(shape)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.net = _network(config, network).double()
        for module in self.net.modules():
            if hasattr(module, "eps"):
                module.eps = TINY_EPS  # type: ignore[assignment]
        self.symmetries = symmetries or self._search()
        together = self.symmetries.largest_uniform()
        groups = [
            {"params": [param for name, param in self.net.named_parameters() if (name in together) is inside]}
            for inside in (True, False)
        ]
        self.optimizer = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        self.scheduler = scheduler(
            schedule, self.optimizer, steps=config.steps, lr=config.lr, weight_decay=config.weight_decay
        )

    def _search(self) -> Symmetries:
        from torch.nn.functional import cross_entropy

        from equilibria.objectives._objective import objective
        from equilibria.symmetry import symmetries

        batches = [(self._images[place], self._labels[place]) for place in (0, 1)]
        return symmetries(objective(self.net, cross_entropy), batches)

    def outputs(self, step: int) -> torch.Tensor:
        """Take a step on its batch; the outputs before it, and at every fifth step those in eval mode after it."""
        import torch
        from torch.nn.functional import cross_entropy

        batch = step % self._config.batches
        self.optimizer.zero_grad()
        logits: torch.Tensor = self.net(self._images[batch])
        loss = cross_entropy(logits, self._labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step(*([loss.detach()] if self.schedule == "plateau" else []))
        if step % 5 < 4:
            return logits.detach()
        self.net.eval()
        with torch.no_grad():
            evaluated = self.net(self._images[0])
        self.net.train()
        return torch.cat([logits.detach(), evaluated])

    def round_weights(self, seed: int) -> None:
        """Move every weight to the next number, up or down."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.net.parameters():
                towards = torch.where(torch.rand(param.shape, generator=generator) < 0.5, -torch.inf, torch.inf)
                param.copy_(torch.nextafter(param, towards.to(param)))


def _network(config: Config, kind: str) -> nn.Module:
    from torch import nn

    from equilibria.lab.nets import PreActivationResNet

    if kind == PRERESNET:
        return PreActivationResNet(config.depth, config.width, scale_invariant=True, in_channels=1)
    return nn.Sequential(*_layers(kind), nn.Flatten(), nn.Linear(64, 10))


def _layers(kind: str) -> Iterator[nn.Module]:
    """Three convolutions of 8x8 images, each with norm and ReLU; LayerNorm over channels and places, behind biases."""
    from torch import nn

    for inside, outside, stride in ((1, 4, 1), (4, 4, 2), (4, 4, 1)):
        yield nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=kind == "layer")
        if kind == "instance":
            yield nn.InstanceNorm2d(outside, affine=True, track_running_stats=True)
        else:
            yield nn.GroupNorm(1 if kind == "layer" else 2, outside)
        yield nn.ReLU()


# ---- claims


_EXACT = Source("explr", "Theorem 2.5", law="folding.fold")
_OTHER_NORMS = Source("explr", "Section 1, other normalisation layers", law="folding.fold")


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge that a folded run deviates as runs do that start one ulp apart, and that T-EXP does not."""
    worst = {name: ratio(run) for name, run in results.items()}
    measure = (
        "largest deviation of the logits up to any step, in train and eval mode, over that of the farthest of "
        f"{config.twins} runs with weight decay whose first weights are one ulp apart"
    )
    claims: list[Claim] = [
        _EXACT.says(f"PreResNet-{config.depth}, all of it decaying and folded, {label}: {measure}").at_most(
            FEW, worst[f"{PRERESNET}-{name}"]
        )
        for name, label in SCHEDULES.items()
    ]
    claims += [
        _OTHER_NORMS.says(f"{label}, the worst of {len(SCHEDULES)} schedules: {measure}").at_most(
            FEW, max(worst[f"{network}-{name}"] for name in SCHEDULES)
        )
        for network, label in NETWORKS.items()
        if network != PRERESNET
    ]
    claims.append(
        Source("explr", "Theorem 2.4", law="texp.texp")
        .says(f"PreResNet-{config.depth}, T-EXP instead, which shows that the measure detects it: {measure}")
        .at_least(1e6, worst[f"{PRERESNET}-{_NEARLY}"])
    )
    numbers = {
        name: {
            "largest_deviation": float(run["folded"][-1]),
            "of_runs_one_ulp_apart": run["rounded"][-1].tolist(),
            "last_folded_lr_over_lr": float(run["folded_lr"][-1] / run["lr"][-1]),
        }
        for name, run in results.items()
    }
    return Outcome(claims, numbers)


def ratio(run: Mapping[str, NDArray[Any]]) -> float:
    """The largest deviation up to any step over that of the farthest twin up to it, at its largest."""
    return float((run["folded"] / run["rounded"].max(axis=1)).max())


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw deviations beside those of one ulp, for the PreResNet and the other norms, and the folded lr."""
    figure, (whole, norms, rates) = panels(1, 3, width=2.6, height=2.9)
    for (name, label), colour in zip(SCHEDULES.items(), COLOURS, strict=False):
        run = results[f"{PRERESNET}-{name}"]
        whole.plot(run["folded"], color=colour, lw=1.0, label=label)
        whole.plot(run["rounded"].max(axis=1), color=colour, lw=0.9, ls=":")
        rates.plot(np.where(run["folded_lr"] > 0, run["folded_lr"], np.nan), color=colour)
    whole.plot(results[f"{PRERESNET}-{_NEARLY}"]["folded"], color=THEORY, lw=0.9, label="T-EXP, step decay")
    whole.plot([], [], color=THEORY, lw=0.9, ls=":", label="one ulp apart, in (a) and (b)")
    others = {network: label for network, label in NETWORKS.items() if network != PRERESNET}
    for (network, label), colour in zip(others.items(), COLOURS, strict=False):
        for name in SCHEDULES:
            run = results[f"{network}-{name}"]
            norms.plot(run["folded"], color=colour, lw=0.9, label=label if name == "constant" else None)
            norms.plot(run["rounded"].max(axis=1), color=colour, lw=0.8, ls=":")
    for axes in (whole, norms):
        axes.set(yscale="log", xlabel="step", ylabel="relative deviation of the logits", ylim=(1e-16, 1e1))
    rates.set(yscale="log", xlabel="step", ylabel="lr without weight decay")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    label_panel(whole, "a", f"PreResNet-{config.depth}, all folded")
    label_panel(norms, "b", "other norms, all schedules", legend=True)
    label_panel(rates, "c", "lr of (a) in place of decay")
    return {"theorem-2-5-jointly": figure}


EXPERIMENT = Experiment(
    id="explr-joint",
    title="Whole networks that are scale-invariant jointly: weight decay is a growing learning rate",
    source="explr thm. 2.5",
    scales={
        "smoke": Config(steps=30, depth=8, width=2, twins=2),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
    needs=load,
)
