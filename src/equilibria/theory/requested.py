"""Laws of angles turned around: the angle of a step from that of many, the weight decay from an angle."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from equilibria.errors import whole, within
from equilibria.theory._known_rule import known_rule
from equilibria.theory.angles import n_step_angles
from equilibria.theory.citations import law
from equilibria.theory.rules import AdamL2, AdamW, Rule

_SMALL = 1e-10  # lr * wd at which angles are so small that only their ratio is left


@law("smd", "Fig. 7", derived="cosines multiply in the noise-dominated regime, up to the steps of one momentum memory")
def step_angle(rule: Rule, angle: float, *, steps: int) -> float:
    """The angle of one step such that ``steps`` of them turn by ``angle``.

    ``ln cos(angle_n) = R_n ln cos(angle_1)``, R_n being that ratio for the angles of `angles.n_step_angles` at small
    lr * wd: n without momentum, more with it. Exact for plain SGD; else right to lr * wd times the steps that the
    momentum remembers.

    Args:
        rule: the optimizer; only its momentum (betas) matters.
        angle: radians over all steps, below pi/2.
        steps: n.

    Returns:
        Radians per step. A persistent mean gradient turns further over many steps, which is not included.

    Raises:
        EquilibriaError: angle is not in [0, pi/2), or steps not at least 1.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(step_angle(SGD(0.1), 1.0, steps=100), 6), round(math.acos(math.cos(1.0) ** 0.01), 6)
        (0.110848, 0.110848)
    """
    known_rule(rule)
    total = within("angle", angle, low=0, below=math.pi / 2)
    log_cos = _log_cos(total) / _spread(_at_rest(rule), whole("steps", steps, low=1))
    return 2 * math.asin(math.sqrt(-math.expm1(log_cos) / 2))


@law(
    "smd",
    "Thm 1, Thm 2, eq. (4), (5)",
    derived="the exact equilibrium angle of every rule, solved for the weight decay",
)
def decay_for_angle(rule: Rule, angle: float) -> float:
    """The weight decay with which a rule settles at this angle, its other settings as they are.

    Solves ``rule.equilibrium().angle = angle`` for the weight decay; to first order it is angle^2 (1+a)/(2 lr) for SGD.

    Args:
        rule: the optimizer; its own weight decay does not matter.
        angle: radians per step, in (0, 1).

    Returns:
        The weight decay.

    Raises:
        EquilibriaError: there is none, because lr is 0, the angle too large, or a matter of the gradients (AdamL2).

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 5e-4, momentum=0.9)
        >>> round(decay_for_angle(rule, rule.equilibrium().angle), 12)
        0.0005
    """
    known_rule(rule)
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


def _at_rest(rule: Rule) -> Rule:
    """The rule at a decay so small that angles add up as squares; how Adam decays makes no difference then."""
    if isinstance(rule, AdamL2):
        rule = AdamW(rule.lr, betas=rule.betas)
    return dataclasses.replace(rule, lr=_SMALL**0.5, weight_decay=_SMALL**0.5)


@lru_cache(maxsize=64)
def _spread(rule: Rule, steps: int) -> float:
    """ln cos of the angle over ``steps`` steps, in units of one step's."""
    angles = n_step_angles(rule, steps)
    return _log_cos(float(angles[-1])) / _log_cos(float(angles[1]))


def _log_cos(angle: float) -> float:
    """ln cos(angle), right for small angles too."""
    return math.log1p(-2 * math.sin(angle / 2) ** 2)
