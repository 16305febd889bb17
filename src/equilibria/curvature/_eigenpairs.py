"""What a search for eigenvalues found, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
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


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues at one end of a spectrum.

    Attributes:
        values: from the end inwards: the largest first, or the smallest first. In exact arithmetic the largest is never
            overestimated, nor the smallest underestimated.
        vectors: unit eigenvectors, one per row.
        residuals: ``|A v - value v|`` of each: an eigenvalue lies within this distance.
        bound: of the relative error of each value. If ``certified``, it holds with a probability of 99.9 % per value
            over the random start, whatever the matrix; if not, it is an estimate, see `follow`.
        hvps: how many products were taken.
        converged: whether every bound is within the tolerance.
        reason: why the search stopped.
        certified: whether the search began at random (cold), so that no eigenvalue beyond can have been missed but by
            bad luck.
        followed: how many searches ago that was the case.
        memory: where to begin next time.
    """

    values: tuple[float, ...]
    vectors: Tensor
    residuals: tuple[float, ...]
    bound: tuple[float, ...]
    hvps: int
    converged: bool
    reason: str
    certified: bool
    followed: int
    memory: Memory = field(repr=False)


def relative(distance: float, value: float) -> float:
    """A distance from a value as a part of the value; infinite beside zero."""
    if distance == 0.0:
        return 0.0
    return distance / abs(value) if value else float("inf")


def kato_temple(residual: float, gap: float) -> float:
    """How far a Ritz value is from its eigenvalue, at most, if no other one lies within ``gap``."""
    return min(residual, residual**2 / gap) if gap > 0 else residual


def unit(vector: Tensor) -> Tensor:
    """A vector of length 1 in this direction."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length
