"""`suggest`: the plan that keeps every layer's angle closest to a target, out of a small space searched completely."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.findings import counted
from equilibria.forecasting._fit import Fit, fit
from equilibria.forecasting._observed import Observed, RunLike, observe
from equilibria.forecasting._paths import Paths, follow
from equilibria.forecasting._scenario import Scenario, courses
from equilibria.planning._phases import cut
from equilibria.theory.schedules import Constant, FromValues, Schedule, ScheduleLike, as_schedule

Array = NDArray[np.float64]
Steps = NDArray[np.int64]
Target: TypeAlias = float | str | ScheduleLike

AS_NOW, EQUILIBRIUM, _ALSO_NOW = "as now", "equilibrium", "now"
# Weight decay and the time of the drops (shares of the remaining steps), finest first: coarser where time is short.
_FACTORS = (1.0, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0), (1.0, 0.1, 0.5, 2.0, 10.0), (1.0, 0.3, 3.0), (1.0,)
_SHIFTS = (0.0, -0.2, -0.1, 0.1, 0.2), (0.0, -0.1, 0.1), (0.0, -0.1, 0.1), (0.0, -0.1, 0.1)
_MOST_PHASES = 3  # with a weight decay of their own; further ones share the last one's
_MOST_PLANS, _MOST_WORK = 800, 200_000_000  # plans, and steps x layers over all of them: some ten seconds
_SHOWN = 200  # steps at which an angle is compared with its target
_NOW = 50  # last samples whose root mean square is the angle of now
_WORTH = 0.02  # share of the distance that a further change must take away


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """One plan for the rest of a run.

    Attributes:
        scenario: for `forecast` and `what_if`.
        changes: what it changes in the plan as it was given, in words; empty for that plan itself.
        off: typical factor between angle and target in the worst layer: exp of the root mean square, over the remaining
            steps, of ln(angle / target). 1 is on target.
        worst_layer: that layer.
        median_off: the same in the median layer.
        integrated_angle: sum of the angles of all remaining steps, radians, in the mean over layers.
        steps_out: steps further than 5 % from equilibrium, in the layer that has the most.
        decays: factors of the recorded weight decay, each from a step on; None if another one was given.
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
        """The flags of `equilibria forecast` that make it; None where there are none.

        Args:
            unit: steps in the unit of positions: 1, or the steps per epoch.
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
    """What `suggest` found.

    Attributes:
        target: in words.
        proposals: the plan as given, then the best one with each number of changes, while more changes bring it closer.
        searched: plans that were tried.
        assumptions: what all this rests on, in sentences.
    """

    target: str
    proposals: tuple[Proposal, ...]
    searched: int
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Proposal:
        """The closest one, whatever it changes."""
        return self.proposals[-1]

    def __repr__(self) -> str:
        changes = "; ".join(self.best.changes) or "nothing to change"
        return f"<Suggestion for {self.target}: {changes}, off by {self.best.off:.2f}x>"


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
    """The plan as given, cut at the jumps of its future.

    Attributes:
        first: the first forecast step.
        lr: of every step of the run, main group.
        weight_decay: the same; NaN where it is to stay as it was.
        edges: first step of every phase, counted from ``first``; 0 is one of them.
        flat: whether lr is constant in each.
        given: the scenario.
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
    run: RunLike, *, schedule: ScheduleLike | Scenario, steps: int, target: Target, start: int | None = None
) -> Suggestion:
    """Search rescaling at jumps, weight decay per phase and the time of drops for the plan closest to a target angle.

    Every combination is tried: no random numbers, the same answer every time.

    Args:
        run: as for `forecast`.
        schedule: the plan to improve: a learning-rate schedule of the whole run, or a `Scenario`.
        steps: length of the whole run in optimizer steps, those recorded included.
        target: radians per step for every layer; a schedule of them over the run; "as now" or "now" (what each layer
            turned in its last 50 samples); or "equilibrium" (what lr x wd of the plan as given asks for).
        start: fit only samples before this step; everything recorded without.

    Returns:
        Proposals: closeness against the number of changes.

    Raises:
        EquilibriaError: as `forecast`; or a target that is neither of these.
    """
    observed = observe(run, before=start)
    given = schedule if isinstance(schedule, Scenario) else Scenario(schedule)
    space = _space(given, observed, whole("steps", steps, low=1))
    shown = np.linspace(0, space.left - 1, min(space.left, _SHOWN)).round().astype(np.int64)
    fits = [fit(cohort) for cohort in observed.cohorts]
    wanted = _wanted(target, observed, space, fits, shown)
    grid = list(_grid(space, layers=sum(len(cohort.names) for cohort in observed.cohorts)))
    proposals = [_try(candidate, space, observed, fits, shown, wanted) for candidate in grid]
    order = np.lexsort(([each.off for each in proposals], [each.changes for each in grid]))
    return Suggestion(
        _in_words(target),
        _front([proposals[at] for at in order]),
        len(grid),
        _assumptions(space, grid),
    )


def _space(given: Scenario, observed: Observed, steps: int) -> _Space:
    first = observed.last_step + 1
    courses(given, observed, first=first, steps=max(steps, first + 1))  # refuses a list that is too short
    if steps <= first:
        raise EquilibriaError(
            f"got steps={steps:,} for a run recorded up to step {first - 1:,}; expected the length of the whole run, "
            f"more than {first:,}"
        )
    lr = as_schedule(given.lr).values(steps)
    main = observed.cohorts[0]
    decay: ScheduleLike = float(main.weight_decay[-1]) if given.weight_decay is None else given.weight_decay
    wd = as_schedule(decay).values(steps)
    spans = cut(lr[first:], wd[first:])
    edges = (0, *(span.first for span in spans if span.jump and span.first))
    return _Space(first, lr, wd, edges, all(span.flat for span in spans), given)


def _grid(space: _Space, *, layers: int) -> Iterator[_Candidate]:
    """Every combination, on the finest grid that can be searched in some tens of seconds."""
    phases = min(len(space.edges), _MOST_PHASES)
    decays = bool(space.weight_decay[space.first :].any())
    changes = np.ptp(space.lr[max(space.first - 1, 0) :]) > 0
    for factors, shifts in zip(_FACTORS, _SHIFTS, strict=True):
        each = factors if decays else (1.0,)
        moved = [round(share * space.left) for share in shifts] if _can_move(space) else [0]
        moved = [shift for shift in moved if _fits(space, shift)]
        rescales = (False, True) if decays and (changes or len(each) > 1) else (False,)
        count = len(rescales) * len(moved) * len(each) ** phases
        small = count <= _MOST_PLANS and count * space.left * layers <= _MOST_WORK
        if small or factors == _FACTORS[-1]:
            for rescale, shift, chosen in itertools.product(rescales, moved, itertools.product(each, repeat=phases)):
                yield _Candidate(rescale, shift, chosen)
            return


def _can_move(space: _Space) -> bool:
    return space.flat and len(space.edges) > 1


def _fits(space: _Space, shift: int) -> bool:
    inner = space.edges[1:]
    return shift == 0 or (inner[0] + shift > 0 and inner[-1] + shift < space.left)


def _try(
    candidate: _Candidate, space: _Space, observed: Observed, fits: list[Fit], shown: Steps, wanted: Array
) -> Proposal:
    scenario = _scenario(candidate, space)
    paths = _paths(scenario, space, observed, fits, shown)
    angle = np.concatenate([each.angle[:, :, 0] for each in paths], axis=1)
    with np.errstate(divide="ignore"):
        apart = np.log(np.maximum(angle, 1e-300) / wanted)
    off = np.sqrt(np.average(apart**2, axis=0, weights=_weights(shown)))
    names = [name for cohort in observed.cohorts for name in cohort.names]
    worst = int(np.argmax(off))
    return Proposal(
        scenario,
        _changes(candidate, space),
        math.exp(min(float(off[worst]), 700.0)),
        names[worst],
        math.exp(min(float(np.median(off)), 700.0)),
        float(np.mean(np.concatenate([each.travelled[:, 0] for each in paths]))),
        float(np.max(np.concatenate([each.outside[:, 0] for each in paths]))),
        _decays(candidate, space),
        _milestones(candidate, space),
    )


def _decays(candidate: _Candidate, space: _Space) -> tuple[tuple[int, float], ...] | None:
    """Where the factor of the weight decay changes, in steps of the run."""
    if space.given.weight_decay is not None:
        return None
    edges = [space.first + edge + (candidate.shift if edge else 0) for edge in space.edges]
    pairs = list(zip(edges, candidate.factors, strict=False))
    before = [1.0, *(factor for _, factor in pairs)]
    return tuple(pair for pair, last in zip(pairs, before, strict=False) if pair[1] != last)


def _milestones(candidate: _Candidate, space: _Space) -> tuple[int, ...] | None:
    """All changes of lr, those to come moved."""
    if not candidate.shift:
        return None
    past = np.flatnonzero(np.diff(space.lr[: space.first + 1])) + 1
    return (*past.tolist(), *(space.first + edge + candidate.shift for edge in space.edges[1:]))


def _paths(scenario: Scenario, space: _Space, observed: Observed, fits: list[Fit], shown: Steps) -> list[Paths]:
    taken = courses(scenario, observed, first=space.first, steps=len(space.lr))
    return [
        follow(cohort, fitted, course, shown=shown, central=True)
        for cohort, fitted, course in zip(observed.cohorts, fits, taken, strict=True)
    ]


def _weights(shown: Steps) -> Array:
    return np.gradient(shown.astype(np.float64)) if len(shown) > 1 else np.ones(1)


def _scenario(candidate: _Candidate, space: _Space) -> Scenario:
    lr, wd = space.lr.copy(), space.weight_decay.copy()
    edges = [0, *(edge + candidate.shift for edge in space.edges[1:]), space.left]
    if candidate.shift:
        for place, edge in enumerate(space.edges):
            lr[space.first + edges[place] : space.first + edges[place + 1]] = space.lr[space.first + edge]
            wd[space.first + edges[place] : space.first + edges[place + 1]] = space.weight_decay[space.first + edge]
    for place, factor in enumerate(candidate.factors):
        last = len(edges) - 1 if place == len(candidate.factors) - 1 else place + 1
        wd[space.first + edges[place] : space.first + edges[last]] *= factor
    decay = space.given.weight_decay if np.array_equal(wd, space.weight_decay) else FromValues(wd)
    return Scenario(
        FromValues(lr) if candidate.shift else space.given.lr,
        weight_decay=decay,
        batch_factor=space.given.batch_factor,
        rescale=candidate.rescale or space.given.rescale,
        name="; ".join(_changes(candidate, space)) or space.given.name or "as given",
    )


def _changes(candidate: _Candidate, space: _Space) -> tuple[str, ...]:
    found = []
    if candidate.shift:
        when = "later" if candidate.shift > 0 else "earlier"
        found.append(f"drops {counted(abs(candidate.shift), 'step')} {when}")
    for place, factor in enumerate(candidate.factors):
        if factor != 1:
            found.append(f"wd x{factor:g} {_when(place, candidate, space)}")
    if candidate.rescale:
        found.append("rescale as lr or wd changes")
    return tuple(found)


def _when(place: int, candidate: _Candidate, space: _Space) -> str:
    begin = space.first + space.edges[place] + (candidate.shift if place else 0)
    if place == len(candidate.factors) - 1:
        return f"from step {begin:,}"
    return f"in steps {begin:,} to {space.first + space.edges[place + 1] + candidate.shift - 1:,}"


def _wanted(target: Target, observed: Observed, space: _Space, fits: list[Fit], shown: Steps) -> Array:
    """The angle asked for, shown steps x layers."""
    if isinstance(target, str):
        if target in (AS_NOW, _ALSO_NOW):
            now = [np.sqrt(np.nanmean(cohort.angle[-_NOW:] ** 2, axis=0)) for cohort in observed.cohorts]
            return np.broadcast_to(np.concatenate(now), (len(shown), sum(map(len, now))))
        if target != EQUILIBRIUM:
            raise EquilibriaError(
                f"got target={target!r}; expected radians per step, a schedule of them, {AS_NOW!r} or {EQUILIBRIUM!r}"
            )
        goal = np.concatenate([each.goal for each in _paths(space.given, space, observed, fits, shown)], axis=1)
        if not (goal > 0).all():
            raise EquilibriaError(
                f"got target={EQUILIBRIUM!r}, but lr or weight decay is 0 in some steps, which have no equilibrium; "
                f"expected another target, such as {AS_NOW!r}"
            )
        return goal
    body = as_schedule(target, name="target")
    if isinstance(body, Constant):
        positive("target", body.value)
    values = body.values(len(space.lr))[space.first + shown]
    if not (values > 0).all():
        raise EquilibriaError("got a target of 0 in some steps; expected radians per step above 0 to the end")
    return np.repeat(values[:, np.newaxis], sum(len(cohort.names) for cohort in observed.cohorts), axis=1)


def _in_words(target: Target) -> str:
    if target in (AS_NOW, _ALSO_NOW):
        return "every layer turns as fast as now"
    if target == EQUILIBRIUM:
        return "every layer turns as lr x wd of the plan as given asks for"
    if isinstance(target, Schedule) and not isinstance(target, Constant):
        return "every layer turns as the given schedule of angles says"
    body = as_schedule(target)  # type: ignore[arg-type]  # strings are dealt with
    return f"every layer turns by {body.value:g} rad per step" if isinstance(body, Constant) else "the given angles"


def _front(ordered: list[Proposal]) -> tuple[Proposal, ...]:
    """The plan as given and, with more and more changes, each that is worth them."""
    found = [next(each for each in ordered if not each.changes)]
    for proposal in ordered:
        if math.log(proposal.off) < (1 - _WORTH) * math.log(found[-1].off):
            if len(proposal.changes) == len(found[-1].changes):
                continue
            found.append(proposal)
    return tuple(found)


def _assumptions(space: _Space, grid: list[_Candidate]) -> tuple[str, ...]:
    factors = sorted({factor for each in grid for factor in each.factors})
    shifts = sorted({each.shift for each in grid})
    tried = [f"{counted(len(grid), 'plan')} from step {space.first:,} to {len(space.lr) - 1:,}"]
    if len(factors) > 1:
        tried.append(f"weight decay times {', '.join(f'{factor:g}' for factor in factors)} in each phase")
    if len(shifts) > 1:
        tried.append(f"all drops moved together by {', '.join(f'{shift:+,}' for shift in shifts if shift)} steps")
    if any(each.rescale for each in grid):
        tried.append("weights rescaled as lr or weight decay change, or not")
    rest = [f"Phases after the third share its weight decay ({len(space.edges)} phases)."]
    return (
        f"Tried: {'; '.join(tried)}. A better plan outside of these is not found.",
        "Closeness counts every remaining step the same, as a ratio, in the layer that is furthest off.",
        f"A further change is listed only if it takes away {_WORTH:.0%} of the distance.",
        "The angle is all that is looked at: whether the network learns better with it is yours to judge.",
        "Central forecasts are compared; their bands are those of the forecast of each plan.",
        *(rest if len(space.edges) > _MOST_PHASES else []),
    )
