"""Squared norms of tensors as numbers that keep their digits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equilibria.measure.dots import products_of
from equilibria.measure.layout import flat


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all tensors together, added up in float64."""
    vectors = (flat(tensor.detach()) for tensor in tensors)
    return sum(products_of(vector, vector)[0] for vector in vectors)
