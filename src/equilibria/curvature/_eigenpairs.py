"""Eigenpairs at one end of a spectrum, as every search returns them, and the direct computation for small matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.errors import EquilibriaError, one_of, positive, whole

Matrix: TypeAlias = NDArray[np.float64]
Product: TypeAlias = Callable[[Tensor], Tensor]
SpectrumEnd: TypeAlias = Literal["top", "bottom"]

EXTRA_DIRECTIONS = 7  # that a warm start remembers besides the eigenvectors
_FIRST_DOUBT = 0.05  # assumed relative rise of eigenvalues between two searches, before any was observed

WITHIN_TOLERANCE = "every bound is within the tolerance"
EXHAUSTED = "nothing is left to search: the products stay in the space that was searched"
AT_ROUNDING = "the rounding of the products does not allow a better bound"
NOT_TOGETHER = "each value was within the tolerance by itself, but they are not together: ask for a smaller tol"


@dataclass(frozen=True, slots=True, eq=False)
class WarmStart:
    """Directions near one end of the spectrum, where the next search begins; the largest Ritz value first.

    Attributes:
        vectors: orthonormal, one per row.
        matrix: the matrix in their space, as last measured.
        age: a quadratic form: how many searches ago the matrix was measured along a direction of the space.
        doubt: largest recent rise of an eigenvalue between two searches, relative to the largest eigenvalue.
    """

    vectors: Tensor
    matrix: Matrix
    age: Matrix
    doubt: float = _FIRST_DOUBT


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues at one end of a spectrum.

    Attributes:
        values: from the end inwards: the largest first, or the smallest first. In exact arithmetic the largest is never
            overestimated, nor the smallest underestimated.
        vectors: unit eigenvectors, one per row.
        residuals: ``|A v - value v|`` of each: an eigenvalue lies within this distance.
        bound: of the relative error of each value. If ``certified``, it holds with a probability of 99.9 % per value
            over the random start, whatever the matrix; if not, it is an estimate, see `update_eigenpairs`.
        hvps: number of products.
        converged: whether every bound is within the tolerance.
        reason: why the search stopped.
        certified: whether the search began at random (cold), so that it misses an eigenvalue beyond only by bad luck.
        followed: number of warm searches since the last cold one.
        memory: where the next warm search begins.
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
    memory: WarmStart = field(repr=False)


def dense_eigenpairs(
    matrix: Tensor, *, k: int, end: SpectrumEnd, tol: float, noise: float, asymmetry: float = 0.0
) -> Eigenpairs:
    """Compute the k largest or smallest eigenvalues of a symmetric matrix, exact up to the rounding of its entries.

    Rounding inside the loss counts as far as it makes the matrix asymmetric; its symmetric part stays invisible.

    Args:
        matrix: symmetric; every row counts as one product.
        k: number of eigenvalues.
        end: "top" or "bottom".
        tol: largest bound of the relative errors that counts as converged.
        noise: relative error of a row.
        asymmetry: norm of the antisymmetric part of the rows as they were computed: measured rounding.

    Example:
        >>> dense_eigenpairs(torch.diag(torch.tensor([1.0, 3.0, 2.0])), k=2, end="top", tol=1e-2, noise=1e-7).values
        (3.0, 2.0)
    """
    double, sign = matrix.double(), 1.0 if end == "top" else -1.0
    values, columns = torch.linalg.eigh(sign * double)
    values, vectors = values.flip(0), columns.flip(1).T
    residuals = torch.linalg.vector_norm(vectors @ double - sign * values[:, None] * vectors, dim=1)
    rounding = noise * len(matrix) * float(values.abs().max()) + asymmetry
    bound = tuple(relative(rounding, value) for value in values[:k].tolist())
    kept = k + EXTRA_DIRECTIONS
    return Eigenpairs(
        values=tuple(sign * value for value in values[:k].tolist()),
        vectors=vectors[:k].to(matrix.dtype),
        residuals=tuple(residuals[:k].tolist()),
        bound=bound,
        hvps=len(matrix),
        converged=max(bound) <= tol,
        reason=EXHAUSTED,
        certified=True,
        followed=0,
        memory=WarmStart(
            vectors[:kept].to(matrix.dtype),
            np.diag(values[:kept].numpy(force=True)),
            np.zeros((min(kept, len(matrix)),) * 2),
        ),
    )


def check_request(size: int, *, k: int, end: SpectrumEnd, tol: float, budget: int) -> tuple[int, int]:
    """Return k and the budget; raise EquilibriaError if a setting is impossible for a matrix of this size."""
    one_of("end", end, ["top", "bottom"])
    positive("tol", tol)
    if whole("k", k, low=1) > size:
        raise EquilibriaError(f"got k={k}; expected at most {size}, the number of selected parameters", argument="k")
    return k, whole("budget", budget, low=k)


def check_finite(image: Tensor) -> Tensor:
    """Return the product of the matrix with a vector; raise EquilibriaError if it is not finite."""
    if not bool(torch.isfinite(image).all()):
        raise EquilibriaError("got a product of the matrix with a unit vector that is not finite; expected numbers")
    return image


def relative(distance: float, value: float) -> float:
    """A distance as a fraction of a value; infinite if only the value is zero."""
    if distance == 0.0:
        return 0.0
    return distance / abs(value) if value else float("inf")


def unit_vector(vector: Tensor) -> Tensor:
    """The vector divided by its norm."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length
