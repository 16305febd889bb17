"""What one search for eigenvalues leaves to the next: a space, the matrix in it, and how old that knowledge is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BESIDE = 7  # directions that are remembered beside those of the eigenvalues asked for
FIRST_DOUBT = 0.05  # what eigenvalues are taken to move by, before any was seen to

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A space of directions near one end of the spectrum, the largest Ritz value first.

    Attributes:
        vectors: orthonormal, one per row.
        matrix: the matrix in their space, as it was when it was measured.
        age: a quadratic form: how many searches ago the matrix was measured along a direction of the space.
        doubt: by how much, relative to the largest eigenvalue, others were seen to rise from search to search.
    """

    vectors: Tensor
    matrix: Matrix
    age: Matrix
    doubt: float = FIRST_DOUBT
