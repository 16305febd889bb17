"""`suggest`: the plan that keeps every layer's angle closest to a target, by exhaustive search of a small space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from equilibria._display import Printable, renderer
from equilibria.diagnosis.series import sample_weights
from equilibria.errors import EquilibriaError, positive, whole
from equilibria.findings import counted
from equilibria.forecasting._fit import Fit, fit
from equilibria.forecasting._gain import GainFit
from equilibria.forecasting._layers import Cohort, RecordedLayers, RunLike, Steps, read_layers
from equilibria.forecasting._paths import Paths, integrate
from equilibria.forecasting._scenario import Scenario, group_schedules
from equilibria.planning._phases import cut, thinned
from equilibria.theory._reals import Array
from equilibria.theory.schedules import Constant, FromValues, Schedule, ScheduleLike, as_schedule

AngleTarget: TypeAlias = float | Literal["as now", "now", "equilibrium"] | ScheduleLike
"""Radians per step, a schedule of them, or a name: the present angle of each layer, or its equilibrium."""

_NOW, _EQUILIBRIUM = ("as now", "now"), "equilibrium"
# Factors of the weight decay, and shifts of the drops as shares of the remaining steps: the finest grid that is not too
# slow is searched.
_FACTORS = (1.0, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0), (1.0, 0.1, 0.5, 2.0, 10.0), (1.0, 0.3, 3.0), (1.0,)
_SHIFTS = (0.0, -0.2, -0.1, 0.1, 0.2), (0.0, -0.1, 0.1), (0.0, -0.1, 0.1), (0.0, -0.1, 0.1)
_MOST_PHASES = 3  # with separate weight decays; later phases share that of the third
_MOST_PLANS, _MOST_WORK = 800, 200_000_000  # plans, and steps x layers over all plans: about ten seconds
_COMPARED_STEPS = 200  # at which an angle is compared with its target
_PRESENT_SAMPLES = 50  # last samples, whose root mean square is the present angle
_WORTH = 0.02  # share of the distance that a further change must remove


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """One plan for the rest of a run.

    Attributes:
        scenario: to pass to `forecast` and `what_if`.
        changes: its changes to the given plan, in words; empty for that plan itself.
        off: typical factor between angle and target in the worst layer: exp of the root mean square, over the remaining
            steps, of ln(angle / target). 1 is on target.
        worst_layer: that layer.
        median_off: the same factor in the median layer.
        integrated_angle: sum of the angles of all remaining steps, radians, averaged over layers.
        steps_out: steps more than 5 % from equilibrium, in the layer with the most.
        decays: factors of the recorded weight decay, each from a step on; None if the given plan sets its own.
        milestones: steps at which lr drops, if they are moved.
    """

    scenario: Scenario
    changes: tuple[str, ...]
    off: float
    worst_layer: str
    median_off: float
    integrated_angle: float
    steps_out: float
    decays: tuple[tuple[int, float], ...] | None
    milestones: tuple[int, ...] | None

    def flags(self, *, unit: int = 1) -> str | None:
        """The flags of `equilibria forecast` for this plan; None if there are none.

        Args:
            unit: steps per unit of the positions: 1, or the steps per epoch.
        """
        if self.decays is None or not self.changes:
            return None
        decays = ",".join(f"{step / unit:.8g}:x{factor:g}" for step, factor in self.decays)
        drops = ",".join(f"{step / unit:.8g}" for step in self.milestones or ())
        parts = (
            f"--milestones {drops}" if drops else "",
            f"--wd {decays}" if decays else "",
            "--rescale" if self.scenario.rescale else "",
        )
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, eq=False)
class Suggestion:
    """The result of `suggest`.

    Attributes:
        target: the target, in words.
        proposals: the plan as given, then the best plan for each number of changes, while more changes come closer.
        searched: number of plans tried.
        assumptions: the assumptions behind the search, in sentences.
    """

    target: str
    proposals: tuple[Proposal, ...]
    searched: int
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Proposal:
        """The closest plan, whatever it changes."""
        return self.proposals[-1]

    def __repr__(self) -> str:
        changes = "; ".join(self.best.changes) or "nothing to change"
        return f"<Suggestion for {self.target}: {changes}, off by {self.best.off:.2f}x>"

    def table(self, *, unit: int = 1) -> Printable:
        """Closeness to the target against the number of changes, and the flags of the closest plan.

        Args:
            unit: steps per unit of the positions in the flags: 1, or the steps per epoch.
        """
        shown: Printable = renderer("forecast.tables.suggestion_table")(self, unit=unit)
        return shown


@dataclass(frozen=True, slots=True)
class _Candidate:
    rescale: bool
    shift: int
    factors: tuple[float, ...]

    @property
    def changes(self) -> int:
        return int(self.rescale) + int(self.shift != 0) + sum(factor != 1 for factor in self.factors)


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The plan as given, cut at its future jumps.

    Attributes:
        first: the first forecast step.
        lr: learning rate of every step of the run, for the first parameter group.
        weight_decay: weight decay of every step.
        edges: first step of every phase, counted from ``first``, beginning with 0.
        flat: whether lr is constant in every phase.
        given: the scenario as given.
    """

    first: int
    lr: Array
    weight_decay: Array
    edges: tuple[int, ...]
    flat: bool
    given: Scenario

    @property
    def left(self) -> int:
        return len(self.lr) - self.first


def suggest(
    run: RunLike, *, schedule: ScheduleLike | Scenario, steps: int, target: AngleTarget, start: int | None = None
) -> Suggestion:
    """Find the plan closest to a target angle among changes of rescaling, weight decay per phase and time of the drops.

    Every combination is tried, without random numbers: the answer is always the same.

    Args:
        run: as for `forecast`.
        schedule: the plan to improve: a learning-rate schedule of the whole run, or a `Scenario`.
        steps: length of the whole run in optimizer steps, including the recorded ones.
        target: radians per step for every layer; a schedule of them over the run; "as now" or "now" (the rms angle of
            each layer's last 50 samples); or "equilibrium" (the equilibrium angle of the plan as given).
        start: fit only samples before this step; all samples if not given.

    Returns:
        Proposals: closeness against the number of changes.

    Raises:
        EquilibriaError: a reason of `forecast`, or an unknown target.
    """
    layers = read_layers(run, before=start)
    given = schedule if isinstance(schedule, Scenario) else Scenario(schedule)
    space = _space(given, layers, whole("steps", steps, low=1))
    shown = thinned(space.left, most=_COMPARED_STEPS)
    fits = [fit(cohort) for cohort in layers.cohorts]
    wanted = _wanted(target, layers, space, fits, shown)
    grid = list(_grid(space, layers=sum(len(cohort.names) for cohort in layers.cohorts)))
    proposals = [_try(candidate, space, layers, fits, shown, wanted) for candidate in grid]
    order = np.lexsort(([proposal.off for proposal in proposals], [candidate.changes for candidate in grid]))
    return Suggestion(
        target=_in_words(target),
        proposals=_worthwhile([proposals[place] for place in order]),
        searched=len(grid),
        assumptions=_assumptions(space, grid),
    )


def _space(given: Scenario, layers: RecordedLayers, steps: int) -> _Space:
    first = layers.last_step + 1
    group_schedules(given, layers, first=first, steps=max(steps, first + 1))  # raises for a list that is too short
    if steps <= first:
        raise EquilibriaError(
            f"got steps={steps:,} for a run recorded up to step {first - 1:,}; expected the length of the whole run, "
            f"more than {first:,}"
        )
    lr = as_schedule(given.lr).values(steps)
    last_decay = float(layers.cohorts[0].weight_decay[-1])
    wd = as_schedule(last_decay if given.weight_decay is None else given.weight_decay).values(steps)
    spans = cut(lr[first:], wd[first:])
    edges = (0, *(span.first for span in spans if span.jump and span.first))
    return _Space(first, lr, wd, edges, all(span.flat for span in spans), given)


def _grid(space: _Space, *, layers: int) -> Iterator[_Candidate]:
    """Every combination, on the finest grid that takes at most some tens of seconds."""
    phases = min(len(space.edges), _MOST_PHASES)
    decays = bool(space.weight_decay[space.first :].any())
    changes = np.ptp(space.lr[max(space.first - 1, 0) :]) > 0
    for all_factors, shifts in zip(_FACTORS, _SHIFTS, strict=True):
        factors = all_factors if decays else (1.0,)
        moves = [round(share * space.left) for share in shifts] if _can_move(space) else [0]
        moves = [shift for shift in moves if _fits(space, shift)]
        rescales = (False, True) if decays and (changes or len(factors) > 1) else (False,)
        count = len(rescales) * len(moves) * len(factors) ** phases
        small = count <= _MOST_PLANS and count * space.left * layers <= _MOST_WORK
        if small or all_factors == _FACTORS[-1]:
            for rescale, shift, chosen in itertools.product(rescales, moves, itertools.product(factors, repeat=phases)):
                yield _Candidate(rescale, shift, chosen)
            return


def _can_move(space: _Space) -> bool:
    return space.flat and len(space.edges) > 1


def _fits(space: _Space, shift: int) -> bool:
    inner = space.edges[1:]
    return shift == 0 or (inner[0] + shift > 0 and inner[-1] + shift < space.left)


def _try(
    candidate: _Candidate, space: _Space, layers: RecordedLayers, fits: list[Fit | GainFit], shown: Steps, wanted: Array
) -> Proposal:
    """The forecast of a candidate, compared with the wanted angles."""
    scenario = _scenario(candidate, space)
    paths = _paths(scenario, space, layers, fits, shown)
    angle = np.concatenate([path.angle[:, :, 0] for path in paths], axis=1)
    with np.errstate(divide="ignore"):
        distance = np.log(np.maximum(angle, 1e-300) / wanted)
    off = np.sqrt(np.average(distance**2, axis=0, weights=_weights(shown)))
    names = [name for cohort in layers.cohorts for name in cohort.names]
    worst = int(np.argmax(off))
    return Proposal(
        scenario=scenario,
        changes=_changes(candidate, space),
        off=math.exp(min(float(off[worst]), 700.0)),
        worst_layer=names[worst],
        median_off=math.exp(min(float(np.median(off)), 700.0)),
        integrated_angle=float(np.mean(np.concatenate([path.travelled[:, 0] for path in paths]))),
        steps_out=float(np.max(np.concatenate([path.steps_out[:, 0] for path in paths]))),
        decays=_decays(candidate, space),
        milestones=_milestones(candidate, space),
    )


def _decays(candidate: _Candidate, space: _Space) -> tuple[tuple[int, float], ...] | None:
    """The steps of the run at which the factor of the weight decay changes, and the new factors."""
    if space.given.weight_decay is not None:
        return None
    edges = [space.first + edge + (candidate.shift if edge else 0) for edge in space.edges]
    pairs = list(zip(edges, candidate.factors, strict=False))
    before = [1.0, *(factor for _, factor in pairs)]
    return tuple(pair for pair, last in zip(pairs, before, strict=False) if pair[1] != last)


def _milestones(candidate: _Candidate, space: _Space) -> tuple[int, ...] | None:
    """The steps of all changes of lr, with the future ones moved; None if nothing moves."""
    if not candidate.shift:
        return None
    past = np.flatnonzero(np.diff(space.lr[: space.first + 1])) + 1
    return (*past.tolist(), *(space.first + edge + candidate.shift for edge in space.edges[1:]))


def _paths(
    scenario: Scenario, space: _Space, layers: RecordedLayers, fits: list[Fit | GainFit], shown: Steps
) -> list[Paths]:
    schedules = group_schedules(scenario, layers, first=space.first, steps=len(space.lr))
    return [
        integrate(cohort, fitted, schedule, shown=shown, central=True)
        for cohort, fitted, schedule in zip(layers.cohorts, fits, schedules, strict=True)
    ]


def _weights(shown: Steps) -> Array:
    return np.gradient(shown.astype(np.float64)) if len(shown) > 1 else np.ones(1)


def _scenario(candidate: _Candidate, space: _Space) -> Scenario:
    lr, wd = space.lr.copy(), space.weight_decay.copy()
    edges = [0, *(edge + candidate.shift for edge in space.edges[1:]), space.left]
    if candidate.shift:
        for phase, edge in enumerate(space.edges):
            steps = slice(space.first + edges[phase], space.first + edges[phase + 1])
            lr[steps], wd[steps] = space.lr[space.first + edge], space.weight_decay[space.first + edge]
    for phase, factor in enumerate(candidate.factors):
        after = len(edges) - 1 if phase == len(candidate.factors) - 1 else phase + 1
        wd[space.first + edges[phase] : space.first + edges[after]] *= factor
    decay = space.given.weight_decay if np.array_equal(wd, space.weight_decay) else FromValues(wd)
    return Scenario(
        FromValues(lr) if candidate.shift else space.given.lr,
        weight_decay=decay,
        batch_factor=space.given.batch_factor,
        rescale=candidate.rescale or space.given.rescale,
        name="; ".join(_changes(candidate, space)) or space.given.name or "as given",
    )


def _changes(candidate: _Candidate, space: _Space) -> tuple[str, ...]:
    changes = []
    if candidate.shift:
        when = "later" if candidate.shift > 0 else "earlier"
        changes.append(f"drops {counted(abs(candidate.shift), 'step')} {when}")
    for phase, factor in enumerate(candidate.factors):
        if factor != 1:
            changes.append(f"wd x{factor:g} {_when(phase, candidate, space)}")
    if candidate.rescale:
        changes.append("rescale as lr or wd changes")
    return tuple(changes)


def _when(phase: int, candidate: _Candidate, space: _Space) -> str:
    begin = space.first + space.edges[phase] + (candidate.shift if phase else 0)
    if phase == len(candidate.factors) - 1:
        return f"from step {begin:,}"
    return f"in steps {begin:,} to {space.first + space.edges[phase + 1] + candidate.shift - 1:,}"


def _present_angle(cohort: Cohort) -> Array:
    """Root mean square angle of every layer over the last samples, each weighted by the steps it stands for."""
    angle, step = cohort.angle[-_PRESENT_SAMPLES:], cohort.step[-_PRESENT_SAMPLES:]
    weight = np.where(np.isfinite(angle), sample_weights(step, np.array([0, len(step)]))[:, None], 0.0)
    return np.asarray(np.sqrt(np.sum(weight * np.nan_to_num(angle) ** 2, axis=0) / np.sum(weight, axis=0)))


def _wanted(
    target: AngleTarget, layers: RecordedLayers, space: _Space, fits: list[Fit | GainFit], shown: Steps
) -> Array:
    """The target angle, shown steps x layers."""
    if isinstance(target, str):
        if target in _NOW:
            present = [_present_angle(cohort) for cohort in layers.cohorts]
            return np.broadcast_to(np.concatenate(present), (len(shown), sum(map(len, present))))
        if target != _EQUILIBRIUM:
            raise EquilibriaError(
                f"got target={target!r}; expected radians per step, a schedule of them, {_NOW[0]!r} or {_EQUILIBRIUM!r}"
            )
        paths = _paths(space.given, space, layers, fits, shown)
        equilibrium = np.concatenate([path.angle_equilibrium for path in paths], axis=1)
        if not (equilibrium > 0).all():
            raise EquilibriaError(
                f"got target={_EQUILIBRIUM!r}, but lr or weight decay is 0 in some steps, which have no equilibrium; "
                f"expected another target, such as {_NOW[0]!r}"
            )
        return equilibrium
    schedule = as_schedule(target, name="target")
    if isinstance(schedule, Constant):
        positive("target", schedule.value)
    values = schedule.values(len(space.lr))[space.first + shown]
    if not (values > 0).all():
        raise EquilibriaError("got a target of 0 in some steps; expected radians per step above 0 to the end")
    return np.repeat(values[:, np.newaxis], sum(len(cohort.names) for cohort in layers.cohorts), axis=1)


def _in_words(target: AngleTarget) -> str:
    if isinstance(target, str):
        if target in _NOW:
            return "every layer turns as fast as now"
        return "every layer turns at the equilibrium angle of the plan as given"
    if isinstance(target, Schedule) and not isinstance(target, Constant):
        return "every layer turns as in the given schedule of angles"
    schedule = as_schedule(target)
    if isinstance(schedule, Constant):
        return f"every layer turns by {schedule.value:g} rad per step"
    return "every layer turns by the given angles"


def _worthwhile(ordered: list[Proposal]) -> tuple[Proposal, ...]:
    """The plan as given and, with more and more changes, each plan that is worth them."""
    kept = [next(proposal for proposal in ordered if not proposal.changes)]
    for proposal in ordered:
        more_changes = len(proposal.changes) != len(kept[-1].changes)
        if more_changes and math.log(proposal.off) < (1 - _WORTH) * math.log(kept[-1].off):
            kept.append(proposal)
    return tuple(kept)


def _assumptions(space: _Space, grid: list[_Candidate]) -> tuple[str, ...]:
    factors = sorted({factor for candidate in grid for factor in candidate.factors})
    shifts = sorted({candidate.shift for candidate in grid})
    tried = [f"{counted(len(grid), 'plan')} from step {space.first:,} to {len(space.lr) - 1:,}"]
    if len(factors) > 1:
        tried.append(f"weight decay times {', '.join(f'{factor:g}' for factor in factors)} in each phase")
    if len(shifts) > 1:
        tried.append(f"all drops moved together by {', '.join(f'{shift:+,}' for shift in shifts if shift)} steps")
    if any(candidate.rescale for candidate in grid):
        tried.append("weights rescaled as lr or weight decay change, or not")
    sentences = [
        f"Tried: {'; '.join(tried)}. A better plan outside this space is not found.",
        "Closeness weights every remaining step equally, as a ratio, in the layer that is furthest off.",
        f"A further change is listed only if it removes {_WORTH:.0%} of the distance.",
        "Only the angle is compared: whether the network learns better with it is for you to judge.",
        "Central forecasts are compared; the forecast of each plan has its bands.",
    ]
    if len(space.edges) > _MOST_PHASES:
        sentences.append(f"Phases after the third share its weight decay ({len(space.edges)} phases).")
    return tuple(sentences)
