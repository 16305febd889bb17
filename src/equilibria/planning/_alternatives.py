"""Alternatives to a plan: the same schedule with rescaled weights, a weight decay that rises as lr falls, or both."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.planning._plan import Plan, WeightDtype
from equilibria.planning._planner import OptimizerLike, as_rule, plan
from equilibria.theory.identified import Identified
from equilibria.theory.rules import AdamL2, Rule
from equilibria.theory.schedules import FromValues, ScheduleLike, as_schedule

AS_TYPED, RESCALED, CONSTANT_PRODUCT, BOTH = "as typed", "rescale", "hold lr × wd", "rescale and hold"
MEANING = {
    AS_TYPED: "The schedule as typed.",
    RESCALED: "Whenever lr or wd changes, weights and optimizer state are rescaled into the new equilibrium "
    "(equilibria.control.RescaleOnDecay).",
    CONSTANT_PRODUCT: "Weight decay rises as lr falls, so that the equilibrium angle and the time to settle stay as at "
    'the peak (equilibria.control.WeightDecayScheduler with hold="time_constant"). If lr goes to 0, weight decay grows '
    "without bound.",
    BOTH: "Weight decay rises as lr falls, and weights are rescaled at every change: the angle stays constant. If lr "
    "goes to 0, weight decay grows without bound and norms fall to 0.",
}


def alternatives(
    optimizer: OptimizerLike,
    schedule: ScheduleLike,
    *,
    steps: int,
    steps_per_epoch: int | None = None,
    weight_decay: ScheduleLike | None = None,
    init_norm: float | None = None,
    unit_grad_sq: float | None = None,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
    dtype: WeightDtype = "float32",
    tolerance: float = 0.05,
) -> dict[str, Plan]:
    """Plan the schedule with `RescaleOnDecay`, with a constant lr x wd, and with both.

    Args:
        optimizer: as for `plan`, like all other arguments.
        schedule: the learning rate.
        steps: length of the run.
        steps_per_epoch: to show time in epochs.
        weight_decay: weight-decay schedule.
        init_norm: ||w|| at the start.
        unit_grad_sq: L = E||g||^2 ||w||^2.
        dim: number of entries.
        shape: (rows, columns) of a matrix that Muon trains.
        dtype: number format of the weights.
        tolerance: relative distance from equilibrium that counts as settled.

    Returns:
        The plans that differ from the plan as typed, by name; empty if none does. Weight decay is changed only if it is
        constant as typed.

    Example:
        >>> from equilibria.theory import SGD
        >>> from equilibria.theory.schedules import MultiStep
        >>> rule, schedule = SGD(0.1, 5e-4, momentum=0.9), MultiStep(0.1, milestones=[60], factor=0.1)
        >>> plans = alternatives(rule, schedule, steps=200)
        >>> list(plans), round(plans["rescale"].phases[1].start.angle_ratio, 2)
        (['rescale', 'hold lr × wd', 'rescale and hold'], 1.0)
    """
    rule = as_rule(optimizer, decay_scheduled=weight_decay is not None)
    planned = functools.partial(
        plan,
        rule,
        schedule,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        init_norm=init_norm,
        unit_grad_sq=unit_grad_sq,
        dim=dim,
        shape=shape,
        dtype=dtype,
        tolerance=tolerance,
    )
    changes: dict[str, tuple[ScheduleLike | None, bool]] = {RESCALED: (weight_decay, True)}
    risen = _constant_product(rule, schedule, steps) if weight_decay is None else None
    if risen is not None:
        changes |= {CONSTANT_PRODUCT: (risen, False), BOTH: (risen, True)}
    typed = planned(weight_decay=weight_decay)
    plans: dict[str, Plan] = {}
    for name, (decay, rescale) in changes.items():
        try:
            other = planned(weight_decay=decay, rescale=rescale)
        except EquilibriaError:  # the risen weight decay may be too large for an equilibrium, or an lr too small
            continue
        if not any(_same(other, known) for known in (typed, *plans.values())):
            plans[name] = other
    return plans


def _constant_product(rule: Rule, schedule: ScheduleLike, steps: int) -> FromValues | None:
    """The weight decay that keeps the equilibrium of the largest lr; 0 at lr 0, which has no equilibrium."""
    lr = as_schedule(schedule).values(steps)
    if not (rule.weight_decay > 0 and lr.any()):
        return None
    if isinstance(rule, Identified) and (rule.is_coupled or rule.decay.lr != rule.decay.weight_decay):
        return None
    ratio = np.divide(lr.max(), lr, out=np.zeros_like(lr), where=lr > 0)
    return FromValues(rule.weight_decay * (ratio**2 if isinstance(rule, AdamL2) else ratio))


def _same(one: Plan, other: Plan) -> bool:
    return all(
        np.array_equal(getattr(one.curve, field.name), getattr(other.curve, field.name), equal_nan=True)
        for field in dataclasses.fields(one.curve)
    )
