"""Laws of angles turned around: the step's angle from an epoch's, the weight decay from an angle."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from equilibria.errors import within
from equilibria.theory.angles import n_step_angles
from equilibria.theory.rules import AdamL2, AdamW, Rule

_SMALL = 1e-10  # lr * wd at which angles are so small that only their ratio is left


def step_angle(rule: Rule, angle: float, *, steps: int) -> float:
    """The angle of one step such that ``steps`` of them turn by ``angle``, in radians.

    Cosines multiply where gradients are noise: ``ln cos(angle_n) = R_n ln cos(angle_1)``, and R_n, which is n without
    momentum, is the ratio of the squared angles of `theory.angles.n_step_angles`.

    Raises:
        EquilibriaError: angle is not below pi/2.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(step_angle(SGD(0.1), 1.0, steps=100), 6)  # acos(cos(1) ** 0.01)
        0.110848
    """
    within("angle per epoch", angle, low=0, below=math.pi / 2)
    log_cos = math.log1p(-2 * math.sin(angle / 2) ** 2) / _spread(_without_settings(rule), steps)
    return 2 * math.asin(math.sqrt(-math.expm1(log_cos) / 2))


def decay_for_angle(rule: Rule, angle: float) -> float:
    """The weight decay with which a rule settles at this angle, its other settings as they are.

    Raises:
        EquilibriaError: there is none, because lr is 0, the angle too large, or a matter of the gradients (AdamL2).

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 5e-4, momentum=0.9)
        >>> round(decay_for_angle(rule, rule.equilibrium().angle), 12)
        0.0005
    """
    return _decay_for_angle(dataclasses.replace(rule, weight_decay=0.0), within("angle", angle, above=0, below=1))


@lru_cache(maxsize=64)
def _decay_for_angle(rule: Rule, angle: float) -> float:
    decay = angle**2 / 2 / within("lr", rule.lr, above=0)
    for _ in range(60):  # the squared angle is very nearly proportional to the decay: a few rounds
        reached = float(dataclasses.replace(rule, weight_decay=decay).equilibrium().angle)
        decay *= (angle / reached) ** 2
        if abs(reached / angle - 1) < 1e-13:
            break
    return decay


def _without_settings(rule: Rule) -> Rule:
    """The rule at a decay so small that angles add up as squares; how Adam decays makes no difference then."""
    if isinstance(rule, AdamL2):
        rule = AdamW(rule.lr, betas=rule.betas)
    return dataclasses.replace(rule, lr=_SMALL**0.5, weight_decay=_SMALL**0.5)


@lru_cache(maxsize=64)
def _spread(rule: Rule, steps: int) -> float:
    """Squared angle over ``steps`` steps, in units of one step's."""
    angles = n_step_angles(rule, steps)
    return float((angles[-1] / angles[1]) ** 2)
