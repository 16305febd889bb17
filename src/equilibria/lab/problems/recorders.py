"""What can be recorded of a simulation, by name; anything else is a function of a `Moment`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of
from equilibria.lab.problems.problem import Problem, lengths, rows_dot

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moment:
    """One step of all trials.

    Attributes:
        problem: what is trained.
        step: its number, from 0.
        weights: (trials, size) before the step.
        after: (trials, size) after it.
        lr: learning rate of the step.
        weight_decay: weight decay of the step.
    """

    problem: Problem
    step: int
    weights: Array
    after: Array
    lr: float
    weight_decay: float

    @cached_property
    def norm(self) -> Array:
        """Euclidean norm of the weights before the step, (trials,)."""
        return lengths(self.weights)[:, 0]

    @cached_property
    def unit(self) -> Array:
        """Their direction, (trials, size)."""
        return self.weights / self.norm[:, None]

    @cached_property
    def unit_after(self) -> Array:
        """The direction after the step."""
        return self.after / lengths(self.after)


Recorder: TypeAlias = Callable[[Moment], Array]


def _norm(moment: Moment) -> Array:
    """Euclidean norm before the step."""
    return moment.norm


def _angle(moment: Moment) -> Array:
    """Radians that the step turns the weight; from the chord, which keeps all digits of a small angle."""
    chord = lengths(moment.unit_after - moment.unit)[:, 0]
    turned: Array = 2 * np.arcsin(np.minimum(chord / 2, 1.0))
    return turned


def _loss(moment: Moment) -> Array:
    """The loss before the step, without noise."""
    return moment.problem.value(moment.weights)


def _risk(moment: Moment) -> Array:
    """`Problem.risk` before the step: test loss, or what the problem calls so."""
    return moment.problem.risk(moment.weights)


def _gradient_norm(moment: Moment) -> Array:
    """Norm of the gradient at w/|w|, without noise."""
    return lengths(moment.problem.gradient(moment.unit))[:, 0]


def _sharpness(moment: Moment) -> Array:
    """`Problem.sharpness` before the step: exact, and so the most expensive."""
    return moment.problem.sharpness(moment.weights)


def _secant_sharpness(moment: Moment) -> Array:
    """Curvature along the step at unit norm, from two gradients: near the sharpness at the edge of stability only."""
    moved = moment.unit_after - moment.unit
    bent = moment.problem.gradient(moment.unit_after) - moment.problem.gradient(moment.unit)
    curvature: Array = (rows_dot(bent, moved) / rows_dot(moved, moved))[:, 0]
    return curvature


def _effective_lr(moment: Moment) -> Array:
    """``lr/((1 - lr wd) |w|^2)``: the learning rate of the direction, for descent without momentum."""
    rate: Array = moment.lr / ((1 - moment.lr * moment.weight_decay) * moment.norm**2)
    return rate


def _weights(moment: Moment) -> Array:
    """All weights before the step, (trials, size)."""
    return moment.weights.copy()


RECORDERS: dict[str, Recorder] = {
    "norm": _norm,
    "angle": _angle,
    "loss": _loss,
    "risk": _risk,
    "gradient_norm": _gradient_norm,
    "sharpness": _sharpness,
    "secant_sharpness": _secant_sharpness,
    "effective_lr": _effective_lr,
    "weights": _weights,
}


def recorders_of(record: Iterable[str] | Mapping[str, str | Recorder]) -> dict[str, Recorder]:
    """Recorders by name: names of known ones, or a mapping whose values are names or functions of a `Moment`."""
    if isinstance(record, str):
        record = [record]
    if not isinstance(record, Mapping):
        record = {name: name for name in record}
    recorders: dict[str, Recorder] = {}
    for name, value in record.items():
        if isinstance(value, str):
            recorders[name] = RECORDERS[one_of("record", value, RECORDERS)]
        elif callable(value):
            recorders[name] = value
        else:
            raise EquilibriaError(f"got record[{name!r}]={value!r}; expected a name or a function of a Moment")
    return recorders
