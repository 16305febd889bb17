"""The same schedule with what could be done about it: weights rescaled, weight decay that follows lr."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.planning._planner import Plan, plan
from equilibria.theory.rules import AdamL2, Rule
from equilibria.theory.schedules import FromValues, ScheduleLike, as_schedule

AS_TYPED, RESCALED, HELD, BOTH = "as typed", "rescale", "hold lr × wd", "rescale and hold"
MEANING = {
    AS_TYPED: "The schedule as it was typed.",
    RESCALED: "Whenever lr or wd changes, weights and optimizer state are rescaled into the new equilibrium "
    "(equilibria.control.RescaleOnDecay).",
    HELD: "Weight decay rises as lr falls, so that the equilibrium angle and the time to settle stay what they are at "
    'the peak (equilibria.control.WeightDecayScheduler with hold="time_constant"). Where lr goes to 0 it grows without '
    "bound.",
    BOTH: "Weight decay rises as lr falls, and weights are rescaled with both: the angle stays as it is. Where lr goes "
    "to 0 weight decay grows without bound, and norms fall to 0.",
}


def alternatives(rule: Rule, schedule: ScheduleLike, *, steps: int, **settings: Any) -> dict[str, Plan]:
    """What `RescaleOnDecay` and a held lr x wd would make of a schedule, by name.

    Args:
        rule: as for `plan`, like all that follows.
        schedule: the learning rate.
        steps: length of the run.
        settings: the other arguments of `plan`.

    Returns:
        The plans that differ from the one that was typed; none where nothing would change. Weight decay is held only
        where it is constant as typed.

    Example:
        >>> from equilibria.theory import SGD
        >>> from equilibria.theory.schedules import MultiStep
        >>> found = alternatives(SGD(0.1, 5e-4, momentum=0.9), MultiStep(0.1, milestones=[60], factor=0.1), steps=200)
        >>> list(found), round(found["rescale"].phases[1].start.angle_ratio, 2)
        (['rescale', 'hold lr × wd', 'rescale and hold'], 1.0)
    """
    courses: dict[str, dict[str, Any]] = {RESCALED: {"rescale": True}}
    held = _held(rule, schedule, steps) if settings.get("weight_decay") is None else None
    if held is not None:
        courses |= {HELD: {"weight_decay": held}, BOTH: {"weight_decay": held, "rescale": True}}
    typed = plan(rule, schedule, steps=steps, **settings)
    found: dict[str, Plan] = {}
    for name, course in courses.items():
        try:
            other = plan(rule, schedule, steps=steps, **{**settings, **course})
        except EquilibriaError:  # a held weight decay may be too large for an equilibrium, or an lr too small
            continue
        if not any(_same(other, known) for known in (typed, *found.values())):
            found[name] = other
    return found


def _held(rule: Rule, schedule: ScheduleLike, steps: int) -> FromValues | None:
    """The weight decay that keeps the equilibrium of the largest lr; 0 at lr 0, where there is none."""
    lr = as_schedule(schedule, name="lr").values(steps)
    if not (rule.weight_decay > 0 and lr.any()):
        return None
    ratio = np.divide(lr.max(), lr, out=np.zeros_like(lr), where=lr > 0)
    return FromValues(rule.weight_decay * (ratio**2 if isinstance(rule, AdamL2) else ratio))


def _same(one: Plan, other: Plan) -> bool:
    return all(
        np.array_equal(getattr(one.curve, field.name), getattr(other.curve, field.name), equal_nan=True)
        for field in dataclasses.fields(one.curve)
    )
