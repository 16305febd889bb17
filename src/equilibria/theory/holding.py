"""The weight decay that keeps a layer's equilibrium while its learning rate or momentum moves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from scipy.optimize import brentq

from equilibria.errors import EquilibriaError, one_of
from equilibria.theory.citations import law
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

HOLDS = ("angle", "time_constant")
_SMALL = 1e-5  # lr and weight decay at which first-order laws hold
_STRIDE, _SHORTEST, _WIDEST = 0.5, 1e-9, 20.0  # of the search, in the logarithm of the weight decay


@law(
    "",
    "fixed points of every rule",
    derived="angle and time constant depend on lr * wd and momentum alone; for Adam with L2 on lr^2 * wd",
)
def holding_weight_decay(reference: Rule, current: Rule, *, hold: str) -> float:
    """The weight decay at which ``current`` has the equilibrium angle, or the time constant, of ``reference``.

    While momentum stays, both say ``lr wd = const`` (Adam with L2: ``lr² wd = const``). While momentum a moves, they
    part: the angle of SGD holds at ``lr wd/(1 + a) = const``, its time constant at ``lr wd/(1 - a) = const`` (to first
    order; the exact forms are solved here).

    Args:
        reference: the rule whose equilibrium is kept; lr and weight decay above 0.
        current: the same kind of rule with the learning rate and momentum of now, lr above 0.
        hold: "angle" (per step) or "time_constant" (in steps).

    Returns:
        The weight decay.

    Raises:
        EquilibriaError: no equilibrium to hold, rules of two kinds, or none that has it.

    Example:
        >>> holding_weight_decay(SGD(0.1, 5e-4, momentum=0.9), SGD(0.02, 0.0, momentum=0.9), hold="angle")
        0.0025
    """
    one_of("hold", hold, HOLDS)
    if type(reference) is not type(current):
        raise EquilibriaError(f"got {reference!r} and {current!r}; expected two rules of one kind")
    if not (reference.decay_per_step > 0 and current.lr > 0):
        raise EquilibriaError(
            f"got lr={reference.lr:g}, weight_decay={reference.weight_decay:g} to hold at lr={current.lr:g}; expected "
            "all above 0: otherwise there is no equilibrium"
        )
    ratio = reference.lr / current.lr
    if dataclasses.replace(current, lr=reference.lr, weight_decay=reference.weight_decay) == reference:
        return reference.weight_decay * (ratio**2 if isinstance(current, AdamL2) else ratio)
    return _solve(reference, current, hold=hold)


def _solve(reference: Rule, current: Rule, *, hold: str) -> float:
    """Momentum moved: the two depend on it differently, and not every rule has closed forms."""
    if not isinstance(current, SGD | SGDW | AdamW):
        raise EquilibriaError(f"got {current!r} after {reference!r}; expected the same momentum, betas and variant")
    wanted = _held(reference, hold)

    def miss(log_decay: float) -> float:
        return math.log(_held(dataclasses.replace(current, weight_decay=math.exp(log_decay)), hold) / wanted)

    bracket = _bracket(miss, _first_order(current, wanted, hold), rises=hold == "angle")
    if bracket is None:
        raise EquilibriaError(
            f"got {current!r} to hold the {hold} of {reference!r}; expected a smaller change of momentum, or a smaller "
            "lr * weight_decay: no weight decay does it"
        )
    return math.exp(brentq(miss, *bracket, xtol=1e-14))


def _first_order(rule: Rule, wanted: float, hold: str) -> float:
    """Logarithm of the weight decay that would do it if lr * weight_decay were small."""
    small = _held(dataclasses.replace(rule, lr=_SMALL, weight_decay=_SMALL), hold)
    return math.log(_SMALL**2 * ((wanted / small) ** 2 if hold == "angle" else small / wanted) / rule.lr)


def _bracket(miss: Callable[[float], float], guess: float, *, rises: bool) -> tuple[float, float] | None:
    """Two places between which a function passes through 0; None if it has no zero.

    It starts at less decay than guessed, where the function is monotone, and walks towards 0; in shorter strides where
    it meets settings without an equilibrium, or a time constant that grows again because the approach oscillates.
    """
    at, stride = guess - 2 * _STRIDE, _STRIDE
    value = _value(miss, at)
    while value is not None and stride > _SHORTEST and abs(at - guess) < _WIDEST:
        ahead = at + math.copysign(stride, -value if rises else value)
        found = _value(miss, ahead)
        if found is None or (found * value > 0 and abs(found) >= abs(value)):
            stride /= 4
        elif found * value <= 0:
            return at, ahead
        else:
            at, value = ahead, found
    return None


def _value(miss: Callable[[float], float], at: float) -> float | None:
    """The function, or None where there is no equilibrium."""
    try:
        return miss(at)
    except EquilibriaError:
        return None


def _held(rule: Rule, hold: str) -> float:
    return float(getattr(rule.equilibrium(), hold))
