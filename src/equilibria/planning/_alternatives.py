"""Alternatives to a plan: the same schedule with rescaled weights, a weight decay that rises as lr falls, or both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.planning._plan import Plan
from equilibria.planning._planner import OptimizerLike, as_rule, plan
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


def alternatives(optimizer: OptimizerLike, schedule: ScheduleLike, *, steps: int, **settings: Any) -> dict[str, Plan]:
    """Plan the schedule with `RescaleOnDecay`, with a constant lr x wd, and with both.

    Args:
        optimizer: as for `plan`, like all other arguments.
        schedule: the learning rate.
        steps: length of the run.
        settings: the other arguments of `plan`.

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
    rule = as_rule(optimizer, decay_scheduled=settings.get("weight_decay") is not None)
    changes: dict[str, dict[str, Any]] = {RESCALED: {"rescale": True}}
    decay = _constant_product(rule, schedule, steps) if settings.get("weight_decay") is None else None
    if decay is not None:
        changes |= {CONSTANT_PRODUCT: {"weight_decay": decay}, BOTH: {"weight_decay": decay, "rescale": True}}
    typed = plan(rule, schedule, steps=steps, **settings)
    plans: dict[str, Plan] = {}
    for name, change in changes.items():
        try:
            other = plan(rule, schedule, steps=steps, **{**settings, **change})
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
    ratio = np.divide(lr.max(), lr, out=np.zeros_like(lr), where=lr > 0)
    return FromValues(rule.weight_decay * (ratio**2 if isinstance(rule, AdamL2) else ratio))


def _same(one: Plan, other: Plan) -> bool:
    return all(
        np.array_equal(getattr(one.curve, field.name), getattr(other.curve, field.name), equal_nan=True)
        for field in dataclasses.fields(one.curve)
    )
