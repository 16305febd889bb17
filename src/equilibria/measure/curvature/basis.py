"""An orthonormal basis that grows, kept in the type of its vectors and summed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 16  # vectors that are allocated at once, if they are short
_NUMBERS = 1 << 26  # that are allocated at once at most, if one vector is not longer
_COLUMNS = 1 << 15  # of the basis, as many as are converted to float64 at once: they fit into the cache


class Basis:
    """Orthonormal vectors, the rows of a matrix that grows.

    Args:
        size: length of the vectors.
        dtype: in which they are kept. Whatever is summed over their entries is summed in float64.
        device: where they are kept.
    """

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._rows = max(1, min(_ROWS, _NUMBERS // size))
        self._blocks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: Tensor) -> Tensor:
        """Take a vector in, which must be orthonormal to the others; returns it as it is kept."""
        if self._count % self._rows == 0:
            self._blocks.append(torch.empty(self._rows, self._size, dtype=self._dtype, device=self._device))
        row = self._blocks[-1][self._count % self._rows]
        row.copy_(vector)
        self._count += 1
        return row

    def coefficients(self, vector: Tensor) -> Tensor:
        """The inner products with a float64 vector, in float64."""
        found = torch.zeros(self._count, dtype=torch.float64, device=vector.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                found[first : first + len(rows)] += rows[:, columns].double() @ vector[columns]
        return found

    def combined(self, coefficients: Tensor) -> Tensor:
        """The float64 vector with these coefficients."""
        found = torch.zeros(self._size, dtype=torch.float64, device=coefficients.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                found[columns] += coefficients[first : first + len(rows)] @ rows[:, columns].double()
        return found

    def remainder(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of a float64 vector outside of the basis, and its coefficients inside."""
        coefficients = self.coefficients(vector)
        left = vector - self.combined(coefficients)
        again = self.coefficients(left)  # once more: rounding of a long vector would leave a short one oblique
        left -= self.combined(again)
        return left, coefficients + again

    def _filled(self) -> list[tuple[int, Tensor]]:
        return [
            (self._rows * index, block[: min(self._rows, self._count - self._rows * index)])
            for index, block in enumerate(self._blocks)
        ]


def _slices(size: int) -> list[slice]:
    return [slice(first, first + _COLUMNS) for first in range(0, size, _COLUMNS)]
