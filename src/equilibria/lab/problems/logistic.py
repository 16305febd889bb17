"""Logistic regression on one Gaussian sample per step, with or without normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Array, Problem, curvature_of_cosine, lengths, rows_dot, slope_of_cosine

if TYPE_CHECKING:
    from torch import Tensor

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class LogisticToy(Problem):
    """``ln(1 + exp(-label u))`` on one sample ``x ~ N(0, I)`` per step, label sign(x_1); u = x.w/|w|, or x.w.

    The toy of Li and Arora (Section 3, Theorem 3.1): with normalisation and weight decay the angle to e_1 does not
    settle. The draws of a step are its sample.

    Attributes:
        dim: numbers per sample.
        normalised: whether u is divided by the norm of w.

    Example:
        >>> toy = LogisticToy(2)
        >>> toy.risk(np.array([[1.0, 1.0]])).tolist()  # an eighth of a turn off, of half a turn
        [0.25]
    """

    dim: int = 2
    _: KW_ONLY
    normalised: bool = True

    kind: ClassVar[int | None] = _loops.LOGISTIC

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", whole("dim", self.dim, low=2))

    @property
    def invariant(self) -> bool:
        """Whether the loss depends on the direction of the weight only."""
        return self.normalised

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w``."""
        return {"w": (self.dim,)}

    @property
    def draws(self) -> int:
        """One sample."""
        return self.dim

    def data(self) -> Array:
        """Whether it is normalised."""
        return np.array([[float(self.normalised)]])

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The loss on the sample."""
        samples = _needed(draws)
        loss: Array = np.logaddexp(0.0, -_labels(samples) * self._outputs(weights, samples))[:, 0]
        return loss

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``-label/(1 + exp(label u))`` times the gradient of u."""
        samples = _needed(draws)
        labels = _labels(samples)
        push = -labels * _sigmoid(-labels * self._outputs(weights, samples))
        slope: Array = push * (slope_of_cosine(samples, weights) if self.normalised else samples)
        return slope

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """By the chain rule."""
        samples = _needed(draws)
        labels = _labels(samples)
        wrong = _sigmoid(-labels * self._outputs(weights, samples))
        slope = slope_of_cosine(samples, weights) if self.normalised else samples
        curved: Array = wrong * (1 - wrong) * rows_dot(slope, vectors) * slope
        return curved - labels * wrong * curvature_of_cosine(samples, weights, vectors) if self.normalised else curved

    def sharpness(self, weights: Array) -> Array:
        """Depends on the sample: not defined here."""
        raise EquilibriaError("got a request for the sharpness of LogisticToy; expected a loss without samples")

    def risk(self, weights: Array) -> Array:
        """Share of samples with the wrong sign: the angle to e_1 over pi."""
        share: Array = np.arctan2(np.linalg.norm(weights[:, 1:], axis=1), weights[:, 0]) / np.pi
        return share

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch, on the sample ``draws``."""
        w, sample = params["w"], _needed(draws)
        output = (sample * w).sum()
        if self.normalised:
            output = output / w.square().sum().sqrt()
        label = 1.0 if sample[0] >= 0 else -1.0
        return (-label * output).logaddexp(output.new_zeros(()))

    def _outputs(self, weights: Array, samples: Array) -> Array:
        along = rows_dot(samples, weights)
        outputs: Array = along / lengths(weights) if self.normalised else along
        return outputs


def _needed(draws: Sample | None) -> Sample:
    if draws is None:
        raise EquilibriaError("got no draws; expected one sample per trial: the loss is that of a sample")
    return draws


def _labels(samples: Array) -> Array:
    return np.where(samples[:, :1] >= 0, 1.0, -1.0)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))
