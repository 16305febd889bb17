"""Squared norms of tensors as numbers that keep their digits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equilibria.measure.dots import dots
from equilibria.measure.layout import flat


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all tensors together, added up in float64."""
    return sum(float(dots([flat(tensor.detach())], products=[(0, 0)])[0]) for tensor in tensors)
