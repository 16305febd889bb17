"""Networks with jointly invariant sets, in float64 with a negligible eps, on a cycle of batches of digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
)

import equilibria as eq
from equilibria.lab.data import load_digits
from equilibria.lab.nets import PreActivationResNet
from equilibria.symmetry import Symmetries
from tests.helpers.bn_worlds import TINY_EPS, deviation

_DIGITS = load_digits()
IMAGES = _DIGITS.train_images[: 40 * 32].double().reshape(40, 32, 1, 8, 8)
LABELS = _DIGITS.train_labels[: 40 * 32].reshape(40, 32)
LR, DECAY = 0.1, 2.5e-3

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], LRScheduler]] = {
    "constant": lambda optimizer, steps: LambdaLR(optimizer, lambda t: 1.0),
    "step": lambda optimizer, steps: MultiStepLR(optimizer, [2 * steps // 5, 7 * steps // 10], gamma=0.1),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
    "warm-up": lambda optimizer, steps: LambdaLR(optimizer, lambda t: min(10 * t / steps, 1.0)),
    "exponential": lambda optimizer, steps: ExponentialLR(optimizer, 0.1 ** (1 / steps)),
    "plateau": lambda optimizer, steps: ReduceLROnPlateau(optimizer, factor=0.5, patience=steps // 20),
}


def preresnet(depth: int = 8, width: int = 2) -> nn.Module:
    """The scale-invariant form: all parameters may be scaled by one factor."""
    return PreActivationResNet(depth, width, scale_invariant=True, in_channels=1, classes=10)


def convolutional(norm: Callable[[int], nn.Module], *, bias: bool = False) -> nn.Module:
    """Two normalised convolutions and a linear layer: the first scale and shift are invariant jointly."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2, bias=bias),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=bias),
        norm(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def layer_norms() -> nn.Module:
    """Weight and bias in front of a LayerNorm are invariant jointly; so are scale and shift where no bias follows."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.LayerNorm(12),
        nn.ReLU(),
        nn.Linear(12, 12, bias=False),
        nn.LayerNorm(12),
        nn.ReLU(),
        nn.Linear(12, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "PreResNet": preresnet,
    "BatchNorm": lambda: convolutional(nn.BatchNorm2d),
    "GroupNorm": lambda: convolutional(lambda channels: nn.GroupNorm(2, channels)),
    "InstanceNorm": lambda: convolutional(
        lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)
    ),
    "LayerNorm": layer_norms,
}


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().double()
    for module in net.modules():
        if hasattr(module, "eps"):
            module.eps = TINY_EPS
    return net


@functools.cache
def symmetries_of(make: Callable[[], nn.Module]) -> Symmetries:
    batches = [(IMAGES[0], LABELS[0]), (IMAGES[1], LABELS[1])]
    return eq.symmetries(eq.objective(made(make), functional.cross_entropy), batches)


def joint_names(sym: Symmetries) -> list[tuple[str, ...]]:
    return [names for names in sym.uniform_sets() if len(names) > 1]


@dataclass
class Run:
    """A network in training; all that may be scaled together decays, and the rest decays too, in another group."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    @classmethod
    def of(cls, make: Callable[[], nn.Module], schedule: str = "constant", steps: int = 100) -> Run:
        net, uniform = made(make), symmetries_of(make).largest_uniform()
        groups = [
            {"params": [param for name, param in net.named_parameters() if (name in uniform) is inside]}
            for inside in (True, False)
        ]
        optimizer = torch.optim.SGD(
            [group for group in groups if group["params"]], lr=LR, momentum=0.9, weight_decay=DECAY
        )
        return cls(net, optimizer, SCHEDULES[schedule](optimizer, steps))

    def step(self, step: int) -> Tensor:
        """One step on a fixed batch; the logits before it."""
        self.optimizer.zero_grad()
        logits = self.net(IMAGES[step % 40])
        loss = functional.cross_entropy(logits, LABELS[step % 40])
        loss.backward()
        self.optimizer.step()
        inner = getattr(self.scheduler, "scheduler", self.scheduler)
        self.scheduler.step(*([loss.detach()] if isinstance(inner, ReduceLROnPlateau) else []))
        return logits.detach()

    @torch.no_grad()
    def evaluated(self) -> Tensor:
        """Logits in eval mode."""
        self.net.eval()
        logits = self.net(IMAGES[0])
        self.net.train()
        return logits

    @torch.no_grad()
    def one_ulp_apart(self, seed: int) -> Run:
        """Itself, with every weight moved to the next number, up or down."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.net.parameters():
            towards = torch.where(torch.rand(param.shape, generator=generator) < 0.5, -torch.inf, torch.inf)
            param.copy_(torch.nextafter(param, towards.to(param)))
        return self


def largest_deviations(runs: tuple[Run, ...], steps: range, *, evaluate_every: int = 5) -> list[list[float]]:
    """For each further run, the largest deviation from the first up to every step, in train and eval mode."""
    largest = [[0.0] for _ in runs[1:]]
    for step in steps:
        logits = [run.step(step) for run in runs]
        if step % evaluate_every == evaluate_every - 1:
            logits = [torch.cat(pair) for pair in zip(logits, (run.evaluated() for run in runs), strict=True)]
        for series, other in zip(largest, logits[1:], strict=True):
            series.append(max(series[-1], deviation(logits[0], other)))
    return [series[1:] for series in largest]
