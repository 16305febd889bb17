"""The training that every watcher is measured in: a BatchNorm ResNet, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.nets import BasicBlockResNet

Step = Callable[[], None]


@dataclass
class Bench:
    """A network, its optimizer and its images; targets are new at every step, so that gradients do not vanish."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor

    def targets(self) -> Tensor:
        return torch.randint(0, 10, (len(self.inputs),))

    def step(self) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.inputs), self.targets()).backward()
        self.optimizer.step()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self.model.named_parameters() if param.ndim >= 2}


Watcher = Callable[[Bench], AbstractContextManager[Step]]
"""Attaches itself and gives the step to call."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05),
}


def resnet_bench(optimizer: str) -> Bench:
    """ResNet-18 of width 16 on 64 images of 32x32."""
    torch.manual_seed(0)
    model = BasicBlockResNet(16, (2, 2, 2, 2), in_channels=3)
    return Bench(model, OPTIMIZERS[optimizer](model), torch.randn(64, 3, 32, 32))


def plain(bench: Bench) -> AbstractContextManager[Step]:
    """Nobody watches."""
    return nullcontext(bench.step)
