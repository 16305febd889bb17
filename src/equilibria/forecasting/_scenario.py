"""What may happen to a run from now on: learning rate, weight decay, batch size, rescaling."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, positive
from equilibria.forecasting._observed import Cohort, Observed
from equilibria.planning._targets import rescale_sq_factors
from equilibria.theory.schedules import FromValues, ScheduleLike, as_schedule

Array = NDArray[np.float64]

JUMP = 0.1  # relative change of lr or weight decay from one step to the next that is worth a word


@dataclass(frozen=True, slots=True)
class Scenario:
    """One course of the rest of a run.

    Schedules are functions of the run's own step, counted from 0 as the record counts: the schedule of the whole run,
    as it was given to training. They hold for the first layer's parameter group; every other group keeps the ratio of
    its lr (and weight decay) to that group's at the last sample.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay; None leaves it as at the last sample.
        batch_factor: batch size over that of the record; the gradient is taken to be noise, so that L falls as 1/batch.
        rescale: whether weights and optimizer state are rescaled whenever lr or weight decay change, in a jump or step
            by step, as `equilibria.control.RescaleOnDecay` does.
        name: for tables.
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
class Course:
    """A scenario as one parameter group sees it.

    Attributes:
        first: the first step.
        lr: of every step.
        weight_decay: of every step.
        rescale_sq: what ||w||^2 is multiplied by before every step, 1 almost always.
        batch_factor: batch size over that of the record.
    """

    first: int
    lr: Array
    weight_decay: Array
    rescale_sq: Array
    batch_factor: float

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.lr)


def courses(scenario: Scenario, observed: Observed, *, first: int, steps: int) -> tuple[Course, ...]:
    """The course of every cohort from step ``first`` to the end of a run of ``steps`` steps.

    Raises:
        EquilibriaError: a list of values is shorter than the run.
    """
    main, count = observed.cohorts[0], steps - first
    lr = _values(scenario.lr, "schedule", first=first, steps=steps)
    wd = None
    if scenario.weight_decay is not None:
        wd = _values(scenario.weight_decay, "weight_decay", first=first, steps=steps)
    found = []
    for cohort in observed.cohorts:
        at = max(int(np.searchsorted(main.step, cohort.step[-1], side="right")) - 1, 0)  # the same moment for both
        own_lr = lr * _ratio("lr", cohort, cohort.lr[-1], main.lr[at])
        held = float(cohort.weight_decay[-1])
        own_wd = (
            np.full(count, held) if wd is None else wd * _ratio("weight decay", cohort, held, main.weight_decay[at])
        )
        rescale_sq = _rescaling(cohort, own_lr, own_wd) if scenario.rescale else np.ones(count)
        found.append(Course(first, own_lr, own_wd, rescale_sq, float(scenario.batch_factor)))
    return tuple(found)


def recorded_course(cohort: Cohort, *, first: int, steps: int, rescale: bool = False) -> Course:
    """What lr and weight decay really were; between two samples they are the earlier one's."""
    at = np.searchsorted(cohort.step, np.arange(first, steps), side="right") - 1
    lr, wd = cohort.lr[at], cohort.weight_decay[at]
    before = cohort.since(0, before=first)
    return Course(first, lr, wd, _rescaling(before, lr, wd) if rescale else np.ones(steps - first), 1.0)


def _values(schedule: ScheduleLike, name: str, *, first: int, steps: int) -> Array:
    body = as_schedule(schedule, name=name)
    given = body.points if isinstance(body, FromValues) else None
    if isinstance(given, Sized) and len(given) < steps:
        raise EquilibriaError(
            f"got {name} with {len(given):,} values for a run of {steps:,} steps; expected one value per step of the "
            "whole run: lengthen it, or forecast fewer steps"
        )
    return body.values(steps - first, start=first)


def _ratio(what: str, cohort: Cohort, own: float, main: float) -> float:
    if own != main and main == 0:
        raise EquilibriaError(
            f"got another {what} for the first layer's parameter group, where it was 0 at the last sample, while it "
            f"was {own:.4g} for {cohort.names[0]}, which keeps its ratio to it; expected more than 0 in both: "
            f"leave {what} as it was, or forecast a record in which both have one"
        )
    return 1.0 if own == main else float(own / main)


def _rescaling(cohort: Cohort, lr: Array, wd: Array) -> Array:
    """r^2 in front of every step: 1 where lr and weight decay stay, and between equilibria that do not exist.

    As `equilibria.control.RescaleOnDecay` does at every step of its scheduler, jump or not: from the last equilibrium
    that there was into the next one that there is.
    """
    return rescale_sq_factors(
        cohort.rule,
        np.append(cohort.lr[-1:], lr),
        np.append(cohort.weight_decay[-1:], wd),
        unit_grad_sq=float(np.nanmean(cohort.drive)),
        dim=float(np.mean(cohort.entries)),
    )[1:]
