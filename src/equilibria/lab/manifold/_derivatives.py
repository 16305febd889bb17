"""Loss, gradient, Hessian and one third derivative of a loss at many points: together where torch can, else in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from equilibria.curvature import HessianProducts
from equilibria.curvature._hvp import bends_by_differences
from equilibria.objectives._objective import Objective

_NUMBERS_AT_ONCE = 2**20  # in the Hessians of one pass: 8 MB, and some times that behind them
_STEP = torch.finfo(torch.float64).eps ** 0.2  # of differences of fourth order, relative to the norm of the point
_SAME = 1e-8  # relative difference of two Hessians that rounding may explain

Rows = Callable[..., Tensor]


class Derivatives:
    """Derivatives of a float64 loss of named tensors, as functions of the rows of a matrix of flat points.

    Rows are stacked by ``torch.func.vmap`` if the loss allows it (BatchNorm that keeps running statistics does not) and
    one Hessian agrees with that by itself; else, and for a single row, they are those of `HessianProducts`.

    Args:
        objective: the loss; it takes no batch.

    Raises:
        EquilibriaError: if the loss cannot be computed, is not finite or does not use a parameter.
    """

    def __init__(self, objective: Objective) -> None:
        example = HessianProducts(objective, None)
        self._objective, self._named = objective, example.named
        self._values = vmap(self._value)
        self._gradients = vmap(grad(self._value))
        self._hessians = vmap(jacrev(grad(self._value)), chunk_size=max(1, _NUMBERS_AT_ONCE // example.size**2))
        self._products = vmap(self._product)
        self._together = self._can_go_together(example.point.repeat(2, 1))

    def values(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        if self._stacked(points):
            return self._run(self._values, points)
        return torch.stack([self._value(point).detach() for point in points])

    def gradients(self, points: Tensor) -> Tensor:
        """Its gradient at every row."""
        if self._stacked(points):
            return self._run(self._gradients, points)
        return torch.stack([self._gradient(point) for point in points])

    def hessians(self, points: Tensor) -> Tensor:
        """Its Hessian at every row, symmetric to the last bit."""
        if self._stacked(points):
            found = self._run(self._hessians, points)
            return (found + found.mT) / 2
        return torch.stack([self._at(point).dense() for point in points])

    def bends(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of ``v' H(w) v`` in ``w`` at fixed unit ``v``, for every row of points and directions; its error.

        By differences of ``H v`` along ``v``, as in `HessianProducts.curvature_gradient`: the third derivatives of
        torch's fused normalisations are wrong.
        """
        if not self._stacked(points):
            found = [self._at(point).bend(direction) for point, direction in zip(points, directions, strict=True)]
            return torch.stack([bend for bend, _ in found]), points.new_tensor([error for _, error in found])

        def change(steps: Tensor) -> Tensor:
            ahead, behind = (points + sign * steps * directions for sign in (1.0, -1.0))
            return self._run(self._products, ahead, directions) - self._run(self._products, behind, directions)

        return bends_by_differences(change, _STEP * points.norm(dim=-1, keepdim=True).clamp_min(1e-3))

    def _value(self, point: Tensor) -> Tensor:
        return self._objective(self._named(point), None)

    def _gradient(self, point: Tensor) -> Tensor:
        leaf = point.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self._value(leaf), leaf)
        return found

    def _product(self, point: Tensor, direction: Tensor) -> Tensor:
        found: Tensor = grad(lambda at: grad(self._value)(at) @ direction)(point)
        return found

    def _at(self, point: Tensor) -> HessianProducts:
        return HessianProducts(self._objective, None, at=self._named(point))

    def _stacked(self, points: Tensor) -> bool:
        return self._together and len(points) > 1

    def _can_go_together(self, examples: Tensor) -> bool:
        try:
            stacked = self._run(self._hessians, examples)[0]
        except Exception:  # torch has no exception of its own for this; the loss itself is known to be good
            return False
        alone = self._at(examples[0]).dense()  # torch.func has been seen to give wrong derivatives of fused operations
        return bool((stacked - alone).norm() <= _SAME * alone.norm())

    def _run(self, function: Rows, *rows: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated twice
            return function(*rows).detach()
