"""Linear regression and matrix completion with BatchNorm at the output.

Both have the mean square error of outputs that are scaled to a given second moment: outputs ``a`` become ``f = a/s``
with ``s^2 = mean(a^2)``; the loss is ``mean((scale f - targets)^2)`` with ``scale^2 = mean(targets^2)``. Arrays are
(trials, n); ``scale`` is a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh

from equilibria.errors import EquilibriaError, whole, within
from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Array, Problem
from equilibria.theory._reals import positive_reals, reals
from equilibria.theory.flow_examples import regression_geometry

if TYPE_CHECKING:
    from torch import Tensor


def _mean(x: Array) -> Array:
    mean: Array = x.mean(axis=1, keepdims=True)
    return mean


def root_mean_square(a: Array) -> Array:
    """s, a column."""
    return np.sqrt(_mean(a * a))


def standardised_loss(a: Array, scale: Array, targets: Array) -> Array:
    """The loss, (trials,)."""
    residual = scale * (a / root_mean_square(a)) - targets
    return _mean(residual * residual)[:, 0]


def standardised_slope(a: Array, scale: Array, targets: Array) -> Array:
    """Its gradient in a, from the residual: no digits are lost near a minimum."""
    s = root_mean_square(a)
    f = a / s
    residual = scale * f - targets
    gradient: Array = 2 * scale / (a.shape[1] * s) * (residual - f * _mean(f * residual))
    return gradient


def standardised_curvature(a: Array, scale: Array, targets: Array, *, direction: Array) -> Array:
    """Its Hessian in a times a direction: that of ``-2 scale mean(f targets)``, the part that is not constant."""
    s = root_mean_square(a)
    f = a / s
    fit, across = _mean(f * targets), _mean(f * direction)
    turned = targets * across + f * _mean(targets * direction) + fit * direction
    bent: Array = 2 * scale / (a.shape[1] * s**2) * (turned - 3 * fit * across * f)
    return bent


@dataclass(frozen=True, eq=False)
class Regression(Problem):
    """``mean((std(y) a/std(a) - (y - mean(y)))^2)``, ``a = (X - mean) w``: fixed affine part, w scale-invariant.

    Laws of it: `theory.flow_examples.regression_geometry`, `regression_flow`.

    Attributes:
        inputs: (trials, n, d), one data set per trial.
        targets: (trials, n).
        truth: (trials, d) coefficients that the targets come from.
        bias: (trials,) intercepts likewise.
        covariance: (d,) variances of the coordinates of an input, for the test loss; inputs have mean 0.
        initial: (trials, d) weights to start from.

    Example:
        >>> problem = Regression.generate([0, 1])
        >>> problem.trials, problem.size, problem.initial.shape
        (2, 40, (2, 40))
    """

    inputs: Array
    targets: Array
    truth: Array
    bias: Array
    covariance: Array
    initial: Array

    kind: ClassVar[int | None] = _loops.REGRESSION

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "truth", "bias", "covariance", "initial"):
            object.__setattr__(self, name, reals(name, getattr(self, name)))
        trials, n, dim = self.inputs.shape if self.inputs.ndim == 3 else (0, 0, 0)
        expected = {"targets": (trials, n), "truth": (trials, dim), "bias": (trials,), "covariance": (dim,)}
        for name, shape in {**expected, "initial": (trials, dim)}.items():
            if getattr(self, name).shape != shape or not trials or n < 2:
                raise EquilibriaError(
                    f"got inputs {self.inputs.shape} and {name} {getattr(self, name).shape}; expected "
                    f"inputs (trials, n, d) and {name} {shape}"
                )
        positive_reals("variance of targets", self.targets.var(axis=1))

    @classmethod
    def generate(cls, seeds: Iterable[int], *, samples: int = 20, dim: int = 40) -> Self:
        """The paper's data (Appendix Q.2), one data set per seed.

        Ground truth uniform on the unit sphere, bias of standard deviation 0.1, inputs N(0, diag(1/d, 2/d, ..., 1));
        the start is uniform on the unit sphere too, which the paper does not state.
        """
        n, d = whole("samples", samples, low=2), whole("dim", dim, low=2)
        variances = np.arange(1, d + 1) / d
        sets = [_draw_regression(whole("seed", seed), n, variances) for seed in seeds]
        if not sets:
            raise EquilibriaError("got no seeds; expected at least one")
        inputs, truth, bias, initial = (np.stack(part) for part in zip(*sets, strict=True))
        targets = np.einsum("tni,ti->tn", inputs, truth) + bias[:, None]
        return cls(inputs, targets, truth, bias, variances, initial)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w``."""
        return {"w": (self.inputs.shape[2],)}

    @property
    def trials(self) -> int:
        """Data sets."""
        return len(self.inputs)

    @property
    def room(self) -> int:
        """One number per sample."""
        return len(self.targets[0])

    def take(self, first: int, last: int) -> Self:
        """The data sets from ``first`` up to, not including, ``last``."""
        rows = slice(first, last)
        data = (self.inputs[rows], self.targets[rows], self.truth[rows], self.bias[rows])
        return type(self)(*data, self.covariance, self.initial[rows])

    def data(self) -> Array:
        """Samples, standard deviation, centred targets, centred inputs."""
        n = self.inputs.shape[1]
        head = np.column_stack([np.full(self.trials, float(n)), self._scale])
        return np.hstack([head, self._aims, self._centred.reshape(self.trials, -1)])

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The training loss."""
        return standardised_loss(self._outputs(weights), self._scale, self._aims)

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``X' (slope in the outputs)``."""
        return self._back(standardised_slope(self._outputs(weights), self._scale, self._aims))

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``X' (curvature in the outputs) X v``."""
        outputs, direction = self._outputs(weights), self._outputs(vectors)
        return self._back(standardised_curvature(outputs, self._scale, self._aims, direction=direction))

    def coefficients(self, weights: Array) -> Array:
        """The linear model that the network is: ``std(y) w/std(a)``, (trials, d)."""
        scaled: Array = self._scale * weights / root_mean_square(self._outputs(weights))
        return scaled

    def null_part(self, vectors: Array) -> Array:
        """The part of one vector per trial that no training sample sees, (trials, d)."""
        seen = np.matmul(self._pseudo_inverse, self._outputs(vectors)[..., None])[..., 0]
        unseen: Array = vectors - seen
        return unseen

    @cached_property
    def flattest(self) -> Array:
        """Coefficients of the flattest minimum, the interpolant of least norm, (trials, d)."""
        minima = [regression_geometry(x, y).min_norm_weight for x, y in zip(self.inputs, self.targets, strict=True)]
        return np.stack(minima)

    def risk(self, weights: Array) -> Array:
        """The test loss: expected square error on new inputs, in closed form."""
        coefficients = self.coefficients(weights)
        off = coefficients - self.truth
        means = self.targets.mean(axis=1) - np.einsum("ti,ti->t", coefficients, self.inputs.mean(axis=1))
        loss: Array = (off * off) @ self.covariance + (means - self.bias) ** 2
        return loss

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch, from inputs and targets as they are; of one data set."""
        if self.trials != 1:
            raise EquilibriaError(f"got {self.trials} data sets; expected one: take(k, k + 1) the one you want")
        w = params["w"]
        inputs, targets = w.new_tensor(self.inputs[0]), w.new_tensor(self.targets[0])
        outputs = inputs @ w
        outputs = (outputs - outputs.mean()) / outputs.var(correction=0).sqrt()
        return (outputs * targets.std(correction=0) + targets.mean() - targets).square().mean()

    @cached_property
    def _centred(self) -> Array:
        centred: Array = self.inputs - self.inputs.mean(axis=1, keepdims=True)
        return centred

    @cached_property
    def _turned(self) -> Array:
        return np.ascontiguousarray(self._centred.transpose(0, 2, 1))

    @cached_property
    def _pseudo_inverse(self) -> Array:
        return np.asarray(np.linalg.pinv(self._centred), np.float64)

    @cached_property
    def _scale(self) -> Array:
        scale: Array = self.targets.std(axis=1, keepdims=True)
        return scale

    @cached_property
    def _aims(self) -> Array:
        aims: Array = self.targets - self.targets.mean(axis=1, keepdims=True)
        return aims

    def _outputs(self, vectors: Array) -> Array:
        outputs: Array = np.matmul(self._centred, vectors[..., None])[..., 0]
        return outputs

    def _back(self, slope: Array) -> Array:
        back: Array = np.matmul(self._turned, slope[..., None])[..., 0]
        return back


def _draw_regression(seed: int, n: int, variances: Array) -> tuple[Array, Array, float, Array]:
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(variances.size)
    bias = 0.1 * rng.standard_normal()
    inputs = rng.standard_normal((n, variances.size)) * np.sqrt(variances)
    initial = rng.standard_normal(variances.size)
    return inputs, truth / np.linalg.norm(truth), bias, initial / np.linalg.norm(initial)


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
        sets = [_draw_completion(whole("seed", seed), d, r, count) for seed in seeds]
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
        return standardised_loss(self._outputs(weights), self._scale, self._targets)

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``G V`` and ``G'U``, G the slope in the observed entries."""
        u, v = self.split(weights).values()
        g = self._scattered(standardised_slope(self._outputs(weights), self._scale, self._targets))
        return _joined(g @ v, g.transpose(0, 2, 1) @ u)

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``dG V + G dV`` and ``dG'U + G'dU``."""
        (u, v), (du, dv) = self.split(weights).values(), self.split(np.asarray(vectors)).values()
        outputs = self._outputs(weights)
        moved = self._observed(du @ v.transpose(0, 2, 1) + u @ dv.transpose(0, 2, 1))
        g = self._scattered(standardised_slope(outputs, self._scale, self._targets))
        dg = self._scattered(standardised_curvature(outputs, self._scale, self._targets, direction=moved))
        return _joined(dg @ v + g @ dv, dg.transpose(0, 2, 1) @ u + g.transpose(0, 2, 1) @ du)

    def sharpness(self, weights: Array) -> Array:
        """Spherical sharpness of U and V together, (trials,), by Lanczos."""
        parts = [self.take(k, k + 1) for k in range(self.trials)]
        return np.array([_top(part, row[None]) for part, row in zip(parts, weights, strict=True)])

    def prediction(self, weights: Array) -> Array:
        """The recovered matrices, (trials, d, d)."""
        u, v = self.split(weights).values()
        factor = self._scale / root_mean_square(self._outputs(weights))
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
        return root_mean_square(self._targets)

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


def _draw_completion(seed: int, dim: int, rank: int, observed: int) -> tuple[Array, NDArray[np.int64], Array]:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1, 1, (dim, rank)) @ rng.uniform(-1, 1, (dim, rank)).T
    matrix *= dim / np.linalg.norm(matrix)
    places = np.sort(rng.choice(dim * dim, observed, replace=False))
    return matrix, places, rng.standard_normal(2 * dim * dim) / np.sqrt(dim)
