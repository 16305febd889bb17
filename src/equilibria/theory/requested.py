"""Laws of angles turned around: the angle of a step from that of many, the weight decay from an angle."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from equilibria.errors import whole, within
from equilibria.theory._known_rule import known_rule
from equilibria.theory.angles import angular_diffusion, n_step_angles
from equilibria.theory.citations import law
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

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


@law("smd", "§4, ||w||^4 under constant lr", derived="the norm's growth without weight decay, as a fall of the angle")
def steps_to_fall(rule: Rule, start: float, end: float) -> float:
    """The fewest steps in which the angle falls from ``start`` to ``end`` while lr stays: those without weight decay.

    Only a growing norm lowers the angle then, and weights grow no faster than they turn: ``1/angle^2`` rises by p S per
    step, p = 2 for SGD (angle ~ 1/||w||^2) and 1 for rules that make up for the size of gradients (angle ~ 1/||w||), S
    being the squared angle per step over long distances in units of one step's: 1 without momentum, (1+a)/(1-a) with.

    Args:
        rule: the optimizer; only its kind and momentum (betas) matter.
        start: radians per step now, above 0.
        end: radians per step later, above 0.

    Returns:
        Steps, 0 if the angle does not fall. Right for small angles, to the steps that the momentum remembers. Where
        Adam's second moment remembers longer than this, its lag makes them fewer, down to half.

    Raises:
        EquilibriaError: an angle is not in (0, pi/2).

    Example:
        >>> from equilibria.theory import SGD
        >>> round(steps_to_fall(SGD(0.1, momentum=0.9), 0.05, 0.005))
        1042
    """
    known_rule(rule)
    first, last = (within(name, x, above=0, below=math.pi / 2) for name, x in (("start", start), ("end", end)))
    power = norm_power(rule)
    return max(0.0, (last**-2 - first**-2) / (power * _diffusion(_at_rest(rule))))


@law("smd", "eq. (3)", derived="gradients are inversely proportional to the norm; Adam, Lion and Muon make up for that")
def norm_power(rule: Rule) -> int:
    """p in angle ~ lr/||w||^p: 2 where gradients, inversely proportional to the norm, are used as they are, else 1."""
    return 2 if isinstance(rule, SGD | SGDW) else 1


@lru_cache(maxsize=64)
def _diffusion(rule: Rule) -> float:
    """Squared angle per step over long distances, in units of one step's."""
    return angular_diffusion(rule) / float(rule.equilibrium().angle) ** 2


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
