"""Linear regression with BatchNorm at the output, overparameterised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.problems import _loops, _standardised
from equilibria.lab.problems.problem import Array, Problem
from equilibria.theory._reals import positive_reals, reals
from equilibria.theory.flow_examples import regression_geometry

if TYPE_CHECKING:
    from torch import Tensor


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
        sets = [_draw(whole("seed", seed), n, variances) for seed in seeds]
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
        return _standardised.loss(self._outputs(weights), self._scale, self._aims)

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``X' (slope in the outputs)``."""
        return self._back(_standardised.slope(self._outputs(weights), self._scale, self._aims))

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``X' (curvature in the outputs) X v``."""
        outputs, direction = self._outputs(weights), self._outputs(vectors)
        return self._back(_standardised.curvature(outputs, self._scale, self._aims, direction=direction))

    def coefficients(self, weights: Array) -> Array:
        """The linear model that the network is: ``std(y) w/std(a)``, (trials, d)."""
        scaled: Array = self._scale * weights / _standardised.root_mean_square(self._outputs(weights))
        return scaled

    def null_part(self, vectors: Array) -> Array:
        """The part of one vector per trial that no training sample sees, (trials, d)."""
        seen = np.matmul(self._pseudo_inverse, self._outputs(vectors)[..., None])[..., 0]
        unseen: Array = vectors - seen
        return unseen

    @cached_property
    def flattest(self) -> Array:
        """Coefficients of the flattest minimum, the interpolant of least norm, (trials, d)."""
        found = [regression_geometry(x, y).min_norm_weight for x, y in zip(self.inputs, self.targets, strict=True)]
        return np.stack(found)

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


def _draw(seed: int, n: int, variances: Array) -> tuple[Array, Array, float, Array]:
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(variances.size)
    bias = 0.1 * rng.standard_normal()
    inputs = rng.standard_normal((n, variances.size)) * np.sqrt(variances)
    initial = rng.standard_normal(variances.size)
    return inputs, truth / np.linalg.norm(truth), bias, initial / np.linalg.norm(initial)
