"""Squared norms of tensors as numbers that keep their digits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.measure.dots import ProductsPass
from equilibria.measure.layout import matrix


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The squared Euclidean norm of all tensors together, added up in float64."""
    sums = torch.zeros(len(tensors), 6, dtype=torch.float64, device=tensors[0].device)
    reading = ProductsPass(sums)
    for at, tensor in enumerate(tensors):
        flat = matrix(tensor.detach(), axis=None, like=tensor.detach())
        reading.add(at, flat, flat, None)
    reading.run()
    return float(sums[:, 0].sum())
