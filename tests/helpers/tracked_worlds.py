"""Small losses that gradient descent with weight decay brings to the edge of stability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from equilibria.lab.problems import Completion, Sphere3D
from equilibria.objectives._objective import Objective


@dataclass
class World:
    """A loss, the tensors it is of, and how to train them."""

    loss: Callable[[dict[str, Tensor]], Tensor]
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer

    @property
    def objective(self) -> Objective:
        return Objective(lambda params, _batch: self.loss(params), self.params)

    def flat(self) -> np.ndarray:
        return np.concatenate([param.detach().numpy().ravel() for param in self.params.values()])

    def train(self, steps: int) -> Iterator[int]:
        """Step by step: before each step its gradient is there."""
        for step in range(steps):
            self.optimizer.zero_grad()
            self.loss(dict(self.params)).backward()
            yield step
            self.optimizer.step()


def completion(*, lr: float = 0.1, weight_decay: float = 0.01) -> tuple[World, Completion]:
    """Matrix completion with BatchNorm (fig. 1 of the paper on sharpness reduction): 800 entries, seed 0."""
    problem = Completion.generate([0])
    start = torch.tensor(problem.initial[0]).reshape(2, 50, 50)
    params = {name: nn.Parameter(start[index].clone()) for index, name in enumerate(("U", "V"))}
    return World(
        problem.torch_loss, params, torch.optim.SGD(params.values(), lr=lr, weight_decay=weight_decay)
    ), problem


def sphere(*, intrinsic: float = 1e-3, z: float = 0.6, ratio: float = 0.5) -> tuple[World, Sphere3D]:
    """The 3-D loss, rotated, at a minimiser at which R has this value."""
    problem, lr = Sphere3D(rotation_seed=1), 0.1
    decay = intrinsic / lr
    norm_sq = lr / (1 - intrinsic) * 6 / (1 - z**2) / (2 * ratio)
    params = {"w": nn.Parameter(torch.tensor(np.sqrt(norm_sq) * problem.minimiser([z])[0]))}
    return World(problem.torch_loss, params, torch.optim.SGD(params.values(), lr=lr, weight_decay=decay)), problem
