"""Hessian-vector products from differences of gradients, with an estimate of their error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SPREAD = 4.0  # between the steps that are tried


class GradientDifferences:
    """Central differences of a gradient: ``(g(w + h v) - g(w - h v)) / 2h``.

    The step h is chosen at the first product: of three that lie a factor of 4 apart, the one that agrees best with its
    neighbour. A short step drowns in rounding, a long one in the third derivative; the disagreement estimates both.

    Args:
        gradient: the gradient at a flat point.
        point: where the Hessian is taken.

    Attributes:
        relative_error: of a product, as estimated from the first one; infinite before.
    """

    def __init__(self, gradient: Callable[[Tensor], Tensor], point: Tensor) -> None:
        self._gradient, self._point = gradient, point
        self._length = 0.0
        self.relative_error = float("inf")

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with a flat vector."""
        norm = float(vector.norm())
        if norm == 0.0:
            return torch.zeros_like(self._point)
        unit = vector.to(self._point) / norm
        if self._length == 0.0:
            return self._first(unit).mul_(norm)
        return self._difference(unit, self._length).mul_(norm)

    def _first(self, unit: Tensor) -> Tensor:
        # Rounding eps/h and truncation h^2 balance at the cube root of eps, at the scale of the weights.
        scale = max(float(self._point.norm()), 1e-3 * self._point.numel() ** 0.5)
        middle = float(torch.finfo(self._point.dtype).eps) ** (1 / 3) * scale
        steps = [middle / _SPREAD, middle, middle * _SPREAD]
        found = [self._difference(unit, step) for step in steps]
        apart = [float((found[index + 1] - found[index]).norm()) for index in (0, 1)]
        best = min((0, 1), key=apart.__getitem__)
        self._length = steps[best + 1]  # the disagreement bounds the error of the longer of the two steps
        size = float(found[best + 1].norm())
        self.relative_error = apart[best] / size if size else 0.0
        return found[best + 1]

    def _difference(self, unit: Tensor, step: float) -> Tensor:
        ahead = self._gradient(self._point + step * unit)
        return ahead.sub_(self._gradient(self._point - step * unit)).div_(2 * step)
