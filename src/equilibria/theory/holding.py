"""The weight decay that keeps a layer's equilibrium while its learning rate or momentum moves."""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress

from scipy.optimize import brentq

from equilibria.errors import EquilibriaError, one_of
from equilibria.theory.citations import law
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

HOLDS = ("angle", "time_constant")


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
    same_shape = dataclasses.replace(current, lr=reference.lr, weight_decay=reference.weight_decay) == reference
    start = reference.weight_decay * (ratio**2 if isinstance(current, AdamL2) else ratio)
    return start if same_shape else _solve(reference, current, hold=hold, near=start)


def _solve(reference: Rule, current: Rule, *, hold: str, near: float) -> float:
    """Momentum moved: the two depend on it differently, and only SGD and its relatives have closed forms."""
    if not isinstance(current, SGD | SGDW | AdamW):
        raise EquilibriaError(f"got {current!r} after {reference!r}; expected the same momentum, betas and variant")
    wanted = _held(reference, hold)

    def miss(log_decay: float) -> float:
        return math.log(_held(dataclasses.replace(current, weight_decay=math.exp(log_decay)), hold) / wanted)

    middle = math.log(near)
    for reach in (0.5, 1.0, 2.0, 4.0):  # a wide bracket may reach settings that have no equilibrium
        with suppress(EquilibriaError, ValueError):
            return math.exp(brentq(miss, middle - reach, middle + reach, xtol=1e-14))
    raise EquilibriaError(
        f"got {current!r} to hold the {hold} of {reference!r}; expected a smaller change of momentum, or a smaller "
        "lr * weight_decay: no weight decay does it"
    )


def _held(rule: Rule, hold: str) -> float:
    return float(getattr(rule.equilibrium(), hold))
