"""Scenarios for the rest of a run: learning rate, weight decay, batch size, rescaling."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import KW_ONLY, dataclass

import numpy as np

from equilibria.errors import EquilibriaError, positive
from equilibria.forecasting._layers import Cohort, RecordedLayers
from equilibria.records.tables import GAIN_LAW, INVARIANT_LAW
from equilibria.theory._reals import Array
from equilibria.theory.schedules import FromValues, ScheduleLike, as_schedule
from equilibria.theory.targets import rescale_sq_factors

JUMP = 0.1  # relative change of lr or weight decay from one step to the next that counts as a jump
_FALL = 0.5  # share of the last lr below which a network that interpolates cannot be forecast
_UNKNOWN = {
    INVARIANT_LAW: "L falls with lr, by a factor between 1 and 20 that the record does not show",
    GAIN_LAW: "updates come in bursts, of sizes that the record does not show",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings for the rest of a run.

    Schedules are functions of the run's step, counted from 0 as in the record: the schedule of the whole run, as given
    to training. They are for the first layer's parameter group; every other group keeps the ratio of its lr (and weight
    decay) to that group's at the last sample.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay; None keeps that of the last sample.
        batch_factor: batch size over that of the record; gradients count as noise, so L falls as 1/batch.
        rescale: rescale scale-invariant weights and their optimizer state at every change of lr or weight decay, in a
            jump or step by step, as `equilibria.control.RescaleOnDecay` does.
        name: shown in tables.
    """

    lr: ScheduleLike
    _: KW_ONLY
    weight_decay: ScheduleLike | None = None
    batch_factor: float = 1.0
    rescale: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        as_schedule(self.lr, name="schedule")
        if self.weight_decay is not None:
            as_schedule(self.weight_decay, name="weight_decay")
        positive("batch_factor", self.batch_factor)


@dataclass(frozen=True, slots=True, eq=False)
class GroupSchedule:
    """A scenario for one parameter group, step by step.

    Attributes:
        first: the first step.
        lr: learning rate of every step.
        weight_decay: weight decay of every step.
        rescale_sq: factor of ||w||^2 before every step, 1 almost always.
        batch_factor: batch size over that of the record.
    """

    first: int
    lr: Array
    weight_decay: Array
    rescale_sq: Array
    batch_factor: float

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.lr)


def group_schedules(scenario: Scenario, layers: RecordedLayers, *, first: int, steps: int) -> tuple[GroupSchedule, ...]:
    """The schedule of every cohort from step ``first`` to the end of a run of ``steps`` steps.

    Raises:
        EquilibriaError: a list of values is shorter than the run.
    """
    main, count = layers.cohorts[0], steps - first
    lr = _values(scenario.lr, "schedule", first=first, steps=steps)
    wd = None
    if scenario.weight_decay is not None:
        wd = _values(scenario.weight_decay, "weight_decay", first=first, steps=steps)
    schedules = []
    for cohort in layers.cohorts:
        row = max(int(np.searchsorted(main.step, cohort.step[-1], side="right")) - 1, 0)  # the same step in both
        own_lr = lr * _ratio("lr", cohort, cohort.lr[-1], main.lr[row])
        last_wd = float(cohort.weight_decay[-1])
        if wd is None:
            own_wd = np.full(count, last_wd)
        else:
            own_wd = wd * _ratio("weight decay", cohort, last_wd, main.weight_decay[row])
        _refuse_fall(cohort, own_lr)
        rescale_sq = _rescaling(cohort, own_lr, own_wd) if scenario.rescale else np.ones(count)
        schedules.append(GroupSchedule(first, own_lr, own_wd, rescale_sq, float(scenario.batch_factor)))
    return tuple(schedules)


def recorded_schedule(cohort: Cohort, *, first: int, steps: int, rescale: bool = False) -> GroupSchedule:
    """The lr and weight decay that were recorded; between two samples they are those of the earlier one."""
    rows = np.searchsorted(cohort.step, np.arange(first, steps), side="right") - 1
    lr, wd = cohort.lr[rows], cohort.weight_decay[rows]
    before = cohort.since(0, before=first)
    _refuse_fall(before, lr)
    return GroupSchedule(first, lr, wd, _rescaling(before, lr, wd) if rescale else np.ones(steps - first), 1.0)


def _values(schedule: ScheduleLike, name: str, *, first: int, steps: int) -> Array:
    function = as_schedule(schedule, name=name)
    values = function.points if isinstance(function, FromValues) else None
    if isinstance(values, Sized) and len(values) < steps:
        raise EquilibriaError(
            f"got {name} with {len(values):,} values for a run of {steps:,} steps; expected one value per step of the "
            "whole run: lengthen it, or forecast fewer steps"
        )
    return function.values(steps - first, start=first)


def _refuse_fall(cohort: Cohort, lr: Array) -> None:
    """Refuse to forecast a network that interpolates past a fall of its lr: no sample shows by how much L falls."""
    last, least = float(cohort.lr[-1]), float(lr.min())
    if cohort.interpolating and least < _FALL * last:
        raise EquilibriaError(
            f"got a schedule that lowers lr from {last:.4g} to {least:.4g}, and {cohort.interpolating}; expected lr "
            f"of at least {_FALL * last:.4g} to the end: there {_UNKNOWN[cohort.law]}: forecast up to the fall, or "
            "again some hundred steps after it"
        )


def _ratio(what: str, cohort: Cohort, own: float, main: float) -> float:
    if own != main and main == 0:
        raise EquilibriaError(
            f"got another {what} for the first layer's parameter group, where it was 0 at the last sample; "
            f"{cohort.names[0]} had {own:.4g}, which keeps its ratio to that 0; expected more than 0 in both: keep "
            f"{what} as it was, or forecast a record in which both are above 0"
        )
    return 1.0 if own == main else float(own / main)


def _rescaling(cohort: Cohort, lr: Array, wd: Array) -> Array:
    """The factor of ||w||^2 before every step, as `equilibria.control.RescaleOnDecay` applies it."""
    if cohort.law == GAIN_LAW:  # it rescales scale-invariant weights
        return np.ones(len(lr))
    return rescale_sq_factors(
        cohort.rule,
        np.append(cohort.lr[-1:], lr),
        np.append(cohort.weight_decay[-1:], wd),
        unit_grad_sq=float(np.nanmean(cohort.unit_grad_sq)),
        dim=float(np.mean(cohort.entries)),
    )[1:]
