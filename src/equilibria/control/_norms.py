"""Squared norms of tensors as numbers that keep their digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.measure.dots import products_of
from equilibria.measure.layout import flat, is_sharded


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all tensors together, added up in float64; of a sharded one by all processes."""
    return sum(_square(tensor.detach()) for tensor in tensors)


def _square(tensor: Any) -> float:
    if is_sharded(tensor):
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).full_tensor()) ** 2
    vector = flat(tensor)
    return products_of(vector, vector)[0]
