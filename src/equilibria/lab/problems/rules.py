"""Optimizers that the engine runs: torch's SGD as `theory.SGD` describes it, and scalar RMSprop."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive, within
from equilibria.lab.problems import _loops
from equilibria.theory._reals import positive_reals
from equilibria.theory.rules import SGD

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScalarRMSprop:
    """``w' = w - lr g/sqrt(v)``, ``v' = decay v + (1-decay) |g|^2``: one second moment for the whole weight.

    Lyu, Li and Arora (Definition B.1; projected to the sphere: Definition B.3). The old v is used in the step.

    Attributes:
        lr: learning rate.
        decay: of the second moment per step, 0 < decay < 1.
        second_moment: v to start from, one number or one per trial. ``v = (lr sharpness/2)^2`` starts at the edge of
            stability.
    """

    lr: float
    _: KW_ONLY
    decay: float
    second_moment: ArrayLike

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        within("decay", self.decay, above=0, below=1)
        positive_reals("second_moment", self.second_moment)


Rule: TypeAlias = SGD | ScalarRMSprop


def settings_of(rule: Rule, *, projected: bool) -> Array:
    """A rule as the compiled loop reads it."""
    settings = np.zeros(6)
    settings[_loops.PROJECTED] = projected
    if isinstance(rule, ScalarRMSprop):
        settings[_loops.ADAPTIVE], settings[_loops.MOMENT_DECAY] = 1.0, rule.decay
        return settings
    if not isinstance(rule, SGD):
        raise EquilibriaError(f"got rule={rule!r}; expected theory.SGD or problems.ScalarRMSprop")
    if projected and rule.momentum:
        raise EquilibriaError(f"got projected=True with momentum={rule.momentum:g}; expected momentum = 0")
    settings[_loops.MOMENTUM], settings[_loops.KEPT] = rule.momentum, 1 - rule.dampening
    settings[_loops.NESTEROV] = rule.nesterov
    return settings


def starting_moment(rule: Rule, trials: int) -> Array:
    """The second moment of every trial at the start, (trials, 1); zeros for SGD, which has none."""
    if isinstance(rule, SGD):
        return np.zeros((trials, 1))
    given = positive_reals("second_moment", rule.second_moment)
    if given.shape not in ((), (trials,)):
        raise EquilibriaError(f"got second_moment of shape {given.shape}; expected one number or {trials}")
    return np.array(np.broadcast_to(given, trials)).reshape(trials, 1)
