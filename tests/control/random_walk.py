"""The random-walk model: gradients are Gaussian, tangent to the weight and inverse to its norm."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from equilibria.measure.laws import law_of

REPLICAS, ENTRIES = 300, 300


class RandomWalk(nn.Module):
    """Many scale-invariant weights of unit L, one per row, under one real optimizer.

    The root mean square angle over the rows scatters by 1/sqrt(2 rows entries) = 0.24 % per step.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)
        start = self._noise()
        self.weight = nn.Parameter(start / start.norm(dim=1, keepdim=True))
        self.optimizer = kind([self.weight], **settings)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def copy(self) -> RandomWalk:
        return copy.deepcopy(self)

    def rule(self) -> Any:
        return law_of(self.optimizer, self.optimizer.param_groups[0]).rule

    @torch.no_grad()
    def settle(self, steps: int) -> None:
        """Start at the equilibrium norm, with a second moment that has seen it for long, and let momentum build up."""
        norm = self.rule().equilibrium(unit_grad_sq=1.0, dim=ENTRIES).norm
        self.weight.mul_(norm)
        self.take_step()
        state = self.optimizer.state[self.weight]
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].fill_(1 / norm**2 / ENTRIES)
            state["step"].fill_(1e6)
        self.weight.mul_(norm / self.weight.norm(dim=1, keepdim=True))
        for _ in range(steps):
            self.take_step()
            self.weight.mul_(norm / self.weight.norm(dim=1, keepdim=True))

    @torch.no_grad()
    def take_step(self) -> float:
        """One step; the root mean square angle over the rows, in radians."""
        norms = self.weight.norm(dim=1, keepdim=True)
        before = self.weight / norms
        noise = self._noise()
        tangent = noise - (noise * before).sum(1, keepdim=True) * before
        self.weight.grad = tangent / norms / (ENTRIES - 1) ** 0.5
        self.optimizer.step()
        after = self.weight / self.weight.norm(dim=1, keepdim=True)
        chord = (after - before).norm(dim=1)
        return float((2 * torch.asin(chord / 2)).square().mean().sqrt())

    def _noise(self) -> torch.Tensor:
        return torch.randn(REPLICAS, ENTRIES, generator=self._generator, dtype=torch.float64)
