"""Completion of a low-rank matrix by two full-rank factors with BatchNorm at the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh

from equilibria.errors import EquilibriaError, whole, within
from equilibria.lab.problems import _loops, _standardised
from equilibria.lab.problems.problem import Array, Problem
from equilibria.theory._reals import positive_reals, reals

if TYPE_CHECKING:
    from torch import Tensor

_ACCURACY = 1e-9  # relative, of the sharpness


@dataclass(frozen=True, eq=False)
class Completion(Problem):
    """``mean over observed entries of (scale a/s - M)^2``, a = UV', s and scale the root mean squares of a and M there.

    Matrix completion of Lyu, Li and Arora (Appendix P.1), invariant in U and in V. The weights are U, then V, row by
    row.

    Attributes:
        matrix: (trials, d, d), the matrix M to recover.
        observed: (trials, N) positions i d + j of the observed entries, ascending.
        initial: (trials, 2 d^2) weights to start from.

    Example:
        >>> problem = Completion.generate([0], dim=10, observed=40)
        >>> problem.shapes
        {'U': (10, 10), 'V': (10, 10)}
        >>> round(float(np.mean(problem.matrix**2)), 12)
        1.0
    """

    matrix: Array
    observed: NDArray[np.int64]
    initial: Array

    kind: ClassVar[int | None] = _loops.COMPLETION

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", reals("matrix", self.matrix))
        object.__setattr__(self, "initial", reals("initial", self.initial))
        shape, places = self.matrix.shape, np.asarray(self.observed)
        if len(shape) != 3 or shape[1] != shape[2] or not shape[0]:
            raise EquilibriaError(f"got a matrix of shape {shape}; expected (trials, d, d)")
        if self.initial.shape != (shape[0], 2 * shape[1] ** 2):
            raise EquilibriaError(
                f"got initial of shape {self.initial.shape}; expected {(shape[0], 2 * shape[1] ** 2)}"
            )
        good = places.ndim == 2 and len(places) == shape[0] and places.shape[1] and places.dtype.kind == "i"
        if not good or places.min() < 0 or places.max() >= shape[1] ** 2 or np.any(np.diff(places) <= 0):
            raise EquilibriaError(
                f"got observed of shape {places.shape}, {places.dtype}; expected (trials, N) different positions "
                f"0 ... {shape[1] ** 2 - 1} of entries, ascending"
            )
        object.__setattr__(self, "observed", places.astype(np.int64))
        positive_reals("mean square of the observed entries", self._scale)

    @classmethod
    def generate(cls, seeds: Iterable[int], *, dim: int = 50, rank: int = 2, observed: int = 800) -> Self:
        """The paper's data (Appendix P.1), one matrix and one set of observed entries per seed.

        M is a product of factors with entries uniform in [-1, 1], scaled to mean square 1; the start has entries
        N(0, 1)/sqrt(d), which the paper does not state.
        """
        d, r = whole("dim", dim, low=1), whole("rank", rank, low=1)
        count = int(within("observed", whole("observed", observed, low=2), high=d * d))
        sets = [_draw(whole("seed", seed), d, r, count) for seed in seeds]
        if not sets:
            raise EquilibriaError("got no seeds; expected at least one")
        matrix, places, initial = (np.stack(part) for part in zip(*sets, strict=True))
        return cls(matrix, places, initial)

    @property
    def dim(self) -> int:
        """d."""
        return len(self.matrix[0])

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The factors ``U`` and ``V``."""
        return {"U": (self.dim, self.dim), "V": (self.dim, self.dim)}

    @property
    def trials(self) -> int:
        """Matrices."""
        return len(self.matrix)

    @property
    def room(self) -> int:
        """One number per observed entry."""
        return len(self.observed[0])

    def take(self, first: int, last: int) -> Self:
        """The matrices from ``first`` up to, not including, ``last``."""
        rows = slice(first, last)
        return type(self)(self.matrix[rows], self.observed[rows], self.initial[rows])

    def data(self) -> Array:
        """Dimension, observations, scale, targets, rows, columns."""
        sizes = np.tile([float(self.dim), float(self.room)], (self.trials, 1))
        return np.hstack([sizes, self._scale, self._targets, *np.divmod(self.observed, self.dim)])

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The training loss."""
        return _standardised.loss(self._outputs(weights), self._scale, self._targets)

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``G V`` and ``G'U``, G the slope in the observed entries."""
        u, v = self.split(weights).values()
        g = self._scattered(_standardised.slope(self._outputs(weights), self._scale, self._targets))
        return _joined(g @ v, g.transpose(0, 2, 1) @ u)

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``dG V + G dV`` and ``dG'U + G'dU``."""
        (u, v), (du, dv) = self.split(weights).values(), self.split(np.asarray(vectors)).values()
        outputs = self._outputs(weights)
        moved = self._observed(du @ v.transpose(0, 2, 1) + u @ dv.transpose(0, 2, 1))
        g = self._scattered(_standardised.slope(outputs, self._scale, self._targets))
        dg = self._scattered(_standardised.curvature(outputs, self._scale, self._targets, direction=moved))
        return _joined(dg @ v + g @ dv, dg.transpose(0, 2, 1) @ u + g.transpose(0, 2, 1) @ du)

    def sharpness(self, weights: Array) -> Array:
        """Spherical sharpness of U and V together, (trials,), by Lanczos."""
        parts = [self.take(k, k + 1) for k in range(self.trials)]
        return np.array([_top(part, row[None]) for part, row in zip(parts, weights, strict=True)])

    def prediction(self, weights: Array) -> Array:
        """The recovered matrices, (trials, d, d)."""
        u, v = self.split(weights).values()
        factor = self._scale / _standardised.root_mean_square(self._outputs(weights))
        recovered: Array = factor[..., None] * (u @ v.transpose(0, 2, 1))
        return recovered

    def singular_values(self, weights: Array) -> Array:
        """Those of the recovered matrices, descending, (trials, d)."""
        return np.asarray(np.linalg.svd(self.prediction(weights), compute_uv=False), np.float64)

    def risk(self, weights: Array) -> Array:
        """The test loss: mean square error over all entries."""
        error: Array = ((self.prediction(weights) - self.matrix) ** 2).mean(axis=(1, 2))
        return error

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch; of one matrix."""
        if self.trials != 1:
            raise EquilibriaError(f"got {self.trials} matrices; expected one: take(k, k + 1) the one you want")
        u, v = params["U"], params["V"]
        targets = u.new_tensor(self._targets[0])
        a = (u @ v.T).flatten().take(u.new_tensor(self.observed[0]).long())
        return (a * (targets.square().mean() / a.square().mean()).sqrt() - targets).square().mean()

    @cached_property
    def _targets(self) -> Array:
        return self._observed(self.matrix)

    @cached_property
    def _scale(self) -> Array:
        return _standardised.root_mean_square(self._targets)

    def _outputs(self, weights: Array) -> Array:
        u, v = self.split(weights).values()
        return self._observed(u @ v.transpose(0, 2, 1))

    def _observed(self, matrices: Array) -> Array:
        return np.take_along_axis(matrices.reshape(len(matrices), -1), self.observed, axis=1)

    def _scattered(self, entries: Array) -> Array:
        matrices = np.zeros((self.trials, self.dim**2))
        np.put_along_axis(matrices, self.observed, entries, axis=1)
        return matrices.reshape(self.trials, self.dim, self.dim)


def _joined(u: Array, v: Array) -> Array:
    return np.hstack([u.reshape(len(u), -1), v.reshape(len(v), -1)])


def _top(problem: Completion, weights: Array) -> float:
    unit = weights / np.linalg.norm(weights)
    operator = LinearOperator(
        (problem.size, problem.size), matvec=lambda x: problem.hvp(unit, x.reshape(1, -1))[0], dtype=np.float64
    )
    guess = np.random.default_rng(0).standard_normal(problem.size)  # the same numbers on every call
    return float(eigsh(operator, k=1, which="LA", v0=guess, tol=_ACCURACY, return_eigenvectors=False)[0])


def _draw(seed: int, dim: int, rank: int, observed: int) -> tuple[Array, NDArray[np.int64], Array]:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1, 1, (dim, rank)) @ rng.uniform(-1, 1, (dim, rank)).T
    matrix *= dim / np.linalg.norm(matrix)
    places = np.sort(rng.choice(dim * dim, observed, replace=False))
    return matrix, places, rng.standard_normal(2 * dim * dim) / np.sqrt(dim)
