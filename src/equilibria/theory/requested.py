"""Settings for a requested behaviour: the laws of angles and equilibria solved for weight decay, angle or steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from equilibria.errors import EquilibriaError, one_of, whole, within
from equilibria.theory.angles import angular_diffusion, n_step_angles
from equilibria.theory.citations import law
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule, closed_rule
from equilibria.theory.states import settled

Hold: TypeAlias = Literal["angle", "time_constant", "norm"]
HOLDS: tuple[Hold, ...] = get_args(Hold)

_TINY_RATE = 1e-10  # lr * wd at which angles are so small that only their ratio matters
_FIRST_ORDER = 1e-5  # lr and weight decay at which first-order laws hold
_STRIDE, _SHORTEST, _WIDEST = 0.5, 1e-9, 20.0  # of the search for a weight decay, in its logarithm


@law("smd", "Fig. 7", derived="cosines multiply in the noise-dominated regime, up to the steps of one momentum memory")
def angle_per_step(rule: Rule, angle: float, *, steps: int) -> float:
    """Angle of one step such that ``steps`` of them turn by ``angle``.

    ``ln cos(angle_n) = R_n ln cos(angle_1)``, n = ``steps``. R_n is that ratio for the angles of `angles.n_step_angles`
    at small lr * wd: n without momentum, more with it. Exact for plain SGD; else the relative error is about lr * wd
    times the memory of the momentum in steps.

    Args:
        rule: the optimizer; only its momentum (betas) matters.
        angle: radians over all steps, below pi/2.
        steps: n.

    Returns:
        Radians per step. Not included: a persistent mean gradient, which turns further over many steps.

    Raises:
        EquilibriaError: ``angle`` is outside [0, pi/2), or ``steps`` is below 1.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(angle_per_step(SGD(0.1), 1.0, steps=100), 6), round(math.acos(math.cos(1.0) ** 0.01), 6)
        (0.110848, 0.110848)
    """
    rule = closed_rule(rule)
    total = within("angle", angle, low=0, below=math.pi / 2)
    log_cos = _log_cos(total) / _turning_ratio(_without_decay(rule), whole("steps", steps, low=1))
    return 2 * math.asin(math.sqrt(-math.expm1(log_cos) / 2))


@law(
    "smd",
    "Thm 1, Thm 2, eq. (4), (5)",
    derived="the exact equilibrium angle of every rule, solved for the weight decay",
)
def decay_for_angle(rule: Rule, angle: float) -> float:
    """Weight decay with which a rule settles at a given angle per step.

    Solves ``rule.equilibrium().angle = angle`` for the weight decay; to first order it is angle^2 (1+a)/(2 lr) for SGD.

    Args:
        rule: the optimizer; its weight decay is ignored.
        angle: radians per step, in (0, 1).

    Returns:
        The weight decay.

    Raises:
        EquilibriaError: no weight decay does it: lr is 0, the angle is too large, or it depends on the gradients
            (AdamL2).

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 5e-4, momentum=0.9)
        >>> round(decay_for_angle(rule, rule.equilibrium().angle), 12)
        0.0005
    """
    rule = closed_rule(rule)
    return _decay_for_angle(dataclasses.replace(rule, weight_decay=0.0), within("angle", angle, above=0, below=1))


@law("smd", "§4, ||w||^4 under constant lr", derived="the norm's growth without weight decay, as a fall of the angle")
def steps_to_fall(rule: Rule, start: float, *, end: float) -> float:
    """Fewest steps in which the angle falls from ``start`` to ``end`` at constant lr: those without weight decay.

    Only a growing norm lowers the angle at constant lr, and weights grow no faster than they turn: ``1/angle^2`` rises
    by p S per step. p is `norm_power`: 2 for SGD (angle ~ 1/||w||^2), 1 for rules that normalise the gradient
    (angle ~ 1/||w||). S is the long-run squared angle per step over that of one step: 1 without momentum, (1+a)/(1-a)
    with momentum a.

    Args:
        rule: the optimizer; only its kind and momentum (betas) matter.
        start: radians per step now, above 0.
        end: radians per step later, above 0.

    Returns:
        Steps, 0 if the angle does not fall. For small angles, and to within the memory of the momentum. Where Adam's
        second moment remembers for longer than this, its lag reduces them, to as little as half.

    Raises:
        EquilibriaError: an angle is outside (0, pi/2).

    Example:
        >>> from equilibria.theory import SGD
        >>> round(steps_to_fall(SGD(0.1, momentum=0.9), 0.05, end=0.005))
        1042
    """
    rule = closed_rule(rule)
    first, last = (within(name, x, above=0, below=math.pi / 2) for name, x in (("start", start), ("end", end)))
    power = norm_power(rule)
    return max(0.0, (last**-2 - first**-2) / (power * _relative_diffusion(_without_decay(rule))))


@law("smd", "eq. (3)", derived="gradients are inversely proportional to the norm; Adam, Lion and Muon make up for that")
def norm_power(rule: Rule) -> int:
    """p in ``angle ~ lr / ||w||^p``: 2 for SGD and SGDW, 1 for rules that normalise the gradient (Adam, Lion, Muon)."""
    return 2 if isinstance(rule, SGD | SGDW) else 1


@law(
    "",
    "fixed points of every rule",
    derived="angle and time constant depend on lr * wd and momentum alone, for Adam with L2 on lr^2 * wd; the norm on "
    "lr / wd (AdamC, ScionC), exactly by its fixed point",
)
def holding_weight_decay(reference: Rule, current: Rule, *, hold: Hold) -> float:
    """Weight decay at which ``current`` has the equilibrium angle, time constant or norm of ``reference``.

    At constant momentum angle and time constant require ``lr wd = const`` (Adam with L2: ``lr² wd = const``), the norm
    ``wd / lr = const``, so that decay per step goes as lr². When momentum a changes they differ: the angle of SGD holds
    at ``lr wd/(1 + a) = const``, its time constant at ``lr wd/(1 - a) = const`` (to first order; this solves the exact
    forms). A measured law is held by its powers.

    Args:
        reference: the rule whose equilibrium to keep; lr and weight decay above 0.
        current: the same kind of rule with the present learning rate and momentum, lr above 0.
        hold: "angle" (per step), "time_constant" (in steps) or "norm".

    Returns:
        The weight decay.

    Raises:
        EquilibriaError: ``reference`` has no equilibrium, the rules are of different kinds, or no weight decay does it.

    Example:
        >>> holding_weight_decay(SGD(0.1, 5e-4, momentum=0.9), SGD(0.02, 0.0, momentum=0.9), hold="angle")
        0.0025
        >>> round(holding_weight_decay(AdamW(1e-3, 0.1), AdamW(1e-4, 0.0), hold="norm"), 4)
        0.01
    """
    one_of("hold", hold, HOLDS)
    if type(reference) is not type(current):
        raise EquilibriaError(f"got {reference!r} and {current!r}; expected two rules of one kind")
    if not (reference.decay_per_step > 0 and current.lr > 0):
        raise EquilibriaError(
            f"got lr={reference.lr:g}, weight_decay={reference.weight_decay:g} to hold at lr={current.lr:g}; expected "
            "all above 0: otherwise there is no equilibrium"
        )
    if hold == "norm":
        return _norm_holding(reference, current)
    ratio = reference.lr / current.lr
    if isinstance(reference, Identified):
        if reference.is_coupled:
            raise EquilibriaError(
                f"got the measured law of {reference.name}, whose decay depends on the gradient; "
                "expected one with a decoupled decay, or hold='norm'"
            )
        return reference.weight_decay * float(ratio ** (reference.decay.lr / reference.decay.weight_decay))
    if dataclasses.replace(current, lr=reference.lr, weight_decay=reference.weight_decay) == reference:
        return reference.weight_decay * (ratio**2 if isinstance(current, AdamL2) else ratio)
    return _solve_decay(reference, current, hold=hold)


def _norm_holding(reference: Rule, current: Rule) -> float:
    """Weight decay with which ``current`` has the norm of ``reference``; L and the entries drop out to first order."""
    wanted = _quantity(reference, "norm")
    decay: float = reference.weight_decay * current.lr / reference.lr
    if isinstance(reference, Identified):
        power = -reference.slope / reference.decay.weight_decay
    else:
        power = 4.0 if isinstance(reference, SGD | SGDW) else 3.0 if isinstance(reference, AdamL2) else 2.0
    try:
        for _ in range(20):  # ||w|| goes very nearly as decay^(-1 / power): a few rounds
            ratio = _quantity(dataclasses.replace(current, weight_decay=decay), "norm") / wanted
            decay *= ratio**power
            if abs(ratio - 1) < 1e-13:
                return decay
    except EquilibriaError:  # a round went beyond the settings that have an equilibrium
        pass
    return _solve_decay(reference, current, hold="norm")


@lru_cache(maxsize=64)
def _relative_diffusion(rule: Rule) -> float:
    """Squared angle per step over long distances, divided by that of one step."""
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


def _without_decay(rule: Rule) -> Rule:
    """The rule at a decay so small that squared angles add up; coupled and decoupled decay of Adam then agree."""
    if isinstance(rule, AdamL2):
        rule = AdamW(rule.lr, betas=rule.betas)
    return dataclasses.replace(rule, lr=_TINY_RATE**0.5, weight_decay=_TINY_RATE**0.5)


@lru_cache(maxsize=64)
def _turning_ratio(rule: Rule, steps: int) -> float:
    """ln cos of the angle over ``steps`` steps, divided by that of one step."""
    angles = n_step_angles(rule, steps)
    return _log_cos(float(angles[-1])) / _log_cos(float(angles[1]))


def _log_cos(angle: float) -> float:
    """ln cos(angle), without cancellation at small angles."""
    return math.log1p(-2 * math.sin(angle / 2) ** 2)


def _solve_decay(reference: Rule, current: Rule, *, hold: Hold) -> float:
    """Solve numerically after a change of momentum, on which angle and time constant depend differently."""
    if not isinstance(current, SGD | SGDW | AdamW) and hold != "norm":
        raise EquilibriaError(f"got {current!r} after {reference!r}; expected the same momentum, betas and variant")
    from scipy.optimize import brentq

    wanted = _quantity(reference, hold)

    def miss(log_decay: float) -> float:
        return math.log(_quantity(dataclasses.replace(current, weight_decay=math.exp(log_decay)), hold) / wanted)

    if hold == "norm":
        guess = math.log(reference.weight_decay * current.lr / reference.lr)
    else:
        guess = _first_order(current, wanted, hold)
    bracket = _bracket(miss, guess, rises=hold == "angle")
    if bracket is None:
        raise EquilibriaError(
            f"got {current!r} to hold the {hold} of {reference!r}; expected a smaller change of momentum, or a smaller "
            "lr * weight_decay: no weight decay does it"
        )
    return math.exp(brentq(miss, *bracket, xtol=1e-14))


def _first_order(rule: Rule, wanted: float, hold: Hold) -> float:
    """Logarithm of the weight decay to first order in lr * weight_decay."""
    small = _quantity(dataclasses.replace(rule, lr=_FIRST_ORDER, weight_decay=_FIRST_ORDER), hold)
    return math.log(_FIRST_ORDER**2 * ((wanted / small) ** 2 if hold == "angle" else small / wanted) / rule.lr)


def _bracket(miss: Callable[[float], float], guess: float, *, rises: bool) -> tuple[float, float] | None:
    """Two arguments between which a function changes sign; None if it has no zero.

    The search starts below the guess, where the function is monotone, and walks towards the zero. It shortens its
    stride at settings without an equilibrium, and where the time constant grows again because the approach oscillates.
    """
    here, stride = guess - 2 * _STRIDE, _STRIDE
    value = _value(miss, here)
    while value is not None and stride > _SHORTEST and abs(here - guess) < _WIDEST:
        ahead = here + math.copysign(stride, -value if rises else value)
        next_value = _value(miss, ahead)
        if next_value is None or (next_value * value > 0 and abs(next_value) >= abs(value)):
            stride /= 4
        elif next_value * value <= 0:
            return here, ahead
        else:
            here, value = ahead, next_value
    return None


def _value(miss: Callable[[float], float], log_decay: float) -> float | None:
    """The function's value, or None where there is no equilibrium."""
    try:
        return miss(log_decay)
    except EquilibriaError:
        return None


def _quantity(rule: Rule, hold: Hold) -> float:
    if hold == "norm":
        return math.sqrt(float(settled(rule).norm_sq))
    return float(getattr(rule.equilibrium(), hold))
