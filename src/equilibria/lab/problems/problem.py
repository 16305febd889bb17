"""What a problem is: a loss with its derivatives in closed form, for many trials at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError
from equilibria.theory._reals import reals

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]


class Problem(ABC):
    """A loss of named parameters, laid side by side in one vector of ``size`` numbers, trial by trial.

    Weights are arrays (trials, size). A stochastic problem's loss depends on standard normal numbers, (trials, draws)
    of them per step. Everything is float64.

    Those of this package have a compiled gradient for the engine; one of your own needs the abstract methods only, and
    the engine steps all its trials at once through `gradient`.

    Attributes:
        kind: the number of the compiled gradient; None if there is none.
    """

    kind: ClassVar[int | None] = None

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of each parameter of one trial."""

    @property
    def invariant(self) -> bool:
        """Whether the loss depends on the direction of the weight only."""
        return True

    @property
    def draws(self) -> int:
        """Standard normal numbers that one step of one trial uses; 0 for a deterministic loss."""
        return 0

    @property
    def trials(self) -> int | None:
        """How many losses (data sets) this is, one per trial; None if every trial has the same."""
        return None

    @property
    def room(self) -> int:
        """Numbers of scratch that the compiled gradient needs."""
        return 0

    @cached_property
    def size(self) -> int:
        """Numbers per trial."""
        return sum(prod(shape) for shape in self.shapes.values())

    @abstractmethod
    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The loss, (trials,); without ``draws`` that of a stochastic problem without its noise."""

    @abstractmethod
    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """Its gradient, (trials, size)."""

    @abstractmethod
    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """Its Hessian times one vector per trial, (trials, size)."""

    @abstractmethod
    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same loss of one trial, computed by torch from tensors of the shapes in `shapes`.

        For `equilibria.Objective(lambda params, batch: problem.torch_loss(params), params)`. Of a problem with several
        data sets `take` one first.
        """

    def hessian(self, weights: Array, *, draws: Array | None = None) -> Array:
        """The Hessian, (trials, size, size)."""
        columns = [self.hvp(weights, np.broadcast_to(row, weights.shape), draws=draws) for row in np.eye(self.size)]
        return np.stack(columns, axis=-1)

    def sharpness(self, weights: Array) -> Array:
        """Top eigenvalue of the Hessian at w/|w|, (trials,): the spherical sharpness; at w if not scale-invariant."""
        top = np.asarray(np.linalg.eigvalsh(self.hessian(weights))[:, -1], np.float64)
        return top * np.einsum("ti,ti->t", weights, weights) if self.invariant else top

    def risk(self, weights: Array) -> Array:
        """How far the weights are from what the problem asks for, (trials,)."""
        raise EquilibriaError(f"got a request for the risk of {type(self).__name__}; expected a problem that has one")

    def take(self, first: int, last: int) -> Self:
        """The problem of the trials from ``first`` up to, not including, ``last``."""
        if self.trials is not None:
            raise NotImplementedError(f"{type(self).__name__} has data per trial and must say how to take some")
        return self

    def data(self) -> Array:
        """What the compiled gradient reads, (trials or 1, k)."""
        return np.zeros((1, 1))

    def split(self, weights: Array) -> dict[str, Array]:
        """Name -> parameter, (trials, *shape), as views."""
        parts, begin = {}, 0
        for name, shape in self.shapes.items():
            parts[name] = weights[:, begin : begin + prod(shape)].reshape(len(weights), *shape)
            begin += prod(shape)
        return parts

    def weights(self, start: ArrayLike) -> Array:
        """``start`` as fresh weights (trials, size), checked: one vector, or one per trial."""
        weights = np.atleast_2d(reals("start", start)).copy()
        rows = "any number of trials" if self.trials is None else f"{self.trials} trials"
        count = len(weights)
        if weights.ndim != 2 or weights.shape[1] != self.size or self.trials not in (None, count) or not count:
            raise EquilibriaError(f"got start of shape {np.shape(start)}; expected {rows} of {self.size} numbers")
        if self.invariant and not np.all(np.any(weights, axis=1)):
            raise EquilibriaError("got a start of norm 0; expected a direction: the loss is not defined at 0")
        return weights


def lengths(weights: Array) -> Array:
    """Norm of every row, as a column."""
    norm: Array = np.sqrt(np.einsum("ti,ti->t", weights, weights))[:, None]
    return norm


def rows_dot(first: Array, second: Array) -> Array:
    """Inner products row by row, as a column."""
    product: Array = np.einsum("ti,ti->t", first, second)[:, None]
    return product


def slope_of_cosine(vectors: Array, weights: Array) -> Array:
    """Gradient of e.w/|w| in w, row by row."""
    norm = lengths(weights)
    unit = weights / norm
    slope: Array = (vectors - rows_dot(vectors, unit) * unit) / norm
    return slope


def curvature_of_cosine(vectors: Array, weights: Array, directions: Array) -> Array:
    """Hessian of e.w/|w| in w, times a direction, row by row."""
    norm = lengths(weights)
    unit = weights / norm
    along, across = rows_dot(vectors, unit), rows_dot(unit, directions)
    turned = vectors * across + unit * rows_dot(vectors, directions) + along * directions
    curved: Array = (3 * along * across * unit - turned) / norm**2
    return curved
