"""A small BatchNorm network trained with weight decay and without it at the folded lr, for explr-equivalence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.experiments.experiment import Arrays
from equilibria.theory.exponential import power_schedule

if TYPE_CHECKING:
    import torch

SCHEDULES = {
    "constant": "constant",
    "step": "step decay",
    "cosine": "cosine",
    "warm-up": "warm-up from 0",
    "decay": "varying weight decay",
    "momentum": "varying momentum",
}
_TINY_EPS = 1e-30  # torch's BatchNorm refuses 0, which is what scale invariance needs
_CLASSES = 5
_BLOCK = 100  # steps whose losses are averaged


@dataclass(frozen=True)
class Config:
    """Settings of SGD in float64; those of the long run in float32, whose lr overflows after some thousand steps."""

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
    """A pair of runs per schedule, the paper's purely exponential schedule, and the long run."""
    return {name: name for name in (*SCHEDULES, "power", "float32")}


def run_task(config: Config, name: str) -> Arrays:
    """One of them."""
    import torch

    torch.set_num_threads(1)
    if name == "float32":
        return _forever(config)
    return _power(config) if name == "power" else _pair(config, name)


class _Run:
    """One network under training on batches that come round and round; without ``head`` as in the paper.

    There BatchNorm's scale and shift and the last layer stay as they were.
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
        """Train on the batch of a step; the outputs before it."""
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
        """Outputs in eval mode, with the running statistics."""
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
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside, eps=_TINY_EPS), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(config.widths[-1], _CLASSES))


def _scheduler(config: Config, name: str, optimizer: Any) -> Any:
    """The schedule of that name, of lr, weight decay or momentum."""
    from torch.optim import lr_scheduler

    from equilibria.control import WeightDecayScheduler

    steps = config.steps
    if name == "step":
        return lr_scheduler.MultiStepLR(optimizer, [2 * steps // 5, 7 * steps // 10], gamma=0.1)
    if name == "warm-up":
        return lr_scheduler.LambdaLR(optimizer, lambda t: min(10 * t / steps, 1.0))
    if name == "momentum":
        return lr_scheduler.OneCycleLR(optimizer, config.lr, steps, base_momentum=0.6, max_momentum=0.95)
    if name == "constant":
        return lr_scheduler.ConstantLR(optimizer, factor=1.0)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if name == "cosine":
        return cosine
    return WeightDecayScheduler(cosine, lambda t: config.weight_decay * (1 + math.sin(t / 17)))


def _pair(config: Config, name: str) -> Arrays:
    """Runs with and without weight decay, and one with weight decay whose weights are rounded once more."""
    import torch

    from equilibria.control import FoldedWeightDecay

    plain, folded, rounded = (
        _Run(config, weight_decay=config.weight_decay, momentum=config.momentum, dtype=torch.float64)
        for _ in ("plain", "folded", "rounded")
    )
    schedulers = [_scheduler(config, name, run.optimizer) for run in (plain, folded, rounded)]
    control = FoldedWeightDecay(schedulers[1], folded.net, invariant=list(folded.invariant))
    schedulers[1] = control
    found: dict[str, list[float]] = {key: [] for key in ("train", "eval", "rounded", "lr", "folded_lr")}
    nudge = _nudge(config, rounded)
    for step in range(config.steps):
        if step:
            for scheduler in schedulers:
                scheduler.step()
        exponent = folded.optimizer.param_groups[0].get("fold_exponent", 0)  # before the step
        original = float(plain.optimizer.param_groups[0]["lr"])
        reference = plain.logits(step)
        found["train"].append(_apart(reference, folded.logits(step)))
        found["rounded"].append(_apart(reference, rounded.logits(step)))
        next(nudge)
        if step % 5 == 4:
            found["eval"].append(_apart(plain.evaluated(), folded.evaluated()))
        found["lr"].append(original)
        found["folded_lr"].append(float(control.get_last_lr()[0]) * 4.0**exponent)
    return {key: np.array(values) for key, values in found.items()}


def _nudge(config: Config, run: _Run) -> Iterator[None]:
    """Change every invariant weight by one rounding, up or down, each time."""
    import torch

    generator = torch.Generator().manual_seed(config.seed + 1)
    while True:
        for weight in run.invariant.values():
            signs = 2 * torch.randint(0, 2, weight.shape, generator=generator).to(weight.dtype) - 1
            weight.data.mul_(1 + torch.finfo(weight.dtype).eps * signs)
        yield


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / first.norm())


def _power(config: Config) -> Arrays:
    """lr growing by the same factor at each step, with and without the buffer that it needs at the start."""
    import torch

    schedule = power_schedule(
        config.lr, config.weight_decay, step=np.arange(config.power_steps), momentum=config.momentum
    )
    found = {}
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
            apart.append(_apart(plain.logits(step), grown.logits(step)))
        found[name] = np.array(apart)
    return found


def _forever(config: Config) -> Arrays:
    """float32: with weight decay; folded; folded without renormalisation, until that breaks."""
    import torch

    from equilibria.control import FoldedWeightDecay

    settings: dict[str, Any] = {
        "weight_decay": config.long_decay,
        "momentum": config.long_momentum,
        "dtype": torch.float32,
    }
    plain, folded, bare = (_Run(config, **settings, head=False) for _ in ("plain", "folded", "bare"))
    FoldedWeightDecay(folded.optimizer, folded.net, invariant=list(folded.invariant))
    FoldedWeightDecay(bare.optimizer, bare.net, invariant=list(bare.invariant), renormalise=False)
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
    """Outputs of all steps before the one whose lr is no float32; how many before a variance overflows."""
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
