"""plan(): what a schedule will do, before it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from equilibria._display import renderer
from equilibria.errors import EquilibriaError, one_of, positive, whole, within
from equilibria.findings import Finding
from equilibria.planning._findings import DTYPES, find
from equilibria.planning._phases import Span, cut, first_goal
from equilibria.planning._rescaling import in_scale, rescaled_sq
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.settling import settling_steps
from equilibria.theory.states import State, cold_start, rescaled, settled
from equilibria.theory.targets import Targets, targets
from equilibria.theory.transient import Trajectory, evolve


def check_scale(
    rule: Rule,
    init_norm: float | None,
    unit_grad_sq: float | None,
    dim: float | None,
    shape: tuple[int, int] | None,
    *,
    settles: bool,
) -> None:
    """Refuse a scale that this rule does not have, and a start whose norm there is nothing to compare with."""
    if isinstance(rule, AdamL2) and (unit_grad_sq is None or dim is None):
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq}, dim={dim} for Adam with L2; expected both: its angle depends on the "
            "gradient scale (for AdamW neither is needed)"
        )
    if shape is not None and not isinstance(rule, Muon):
        raise EquilibriaError(f"got shape={shape} for {type(rule).__name__}; expected it only for Muon")
    if dim is not None and isinstance(rule, Muon):
        raise EquilibriaError(f"got dim={dim} for Muon; expected shape=(rows, columns), which fixes its norm")
    name = "unit_grad_sq" if isinstance(rule, SGD | SGDW) else "shape" if isinstance(rule, Muon) else "dim"
    value = {"unit_grad_sq": unit_grad_sq, "shape": shape, "dim": dim}[name]
    if not settles and (init_norm is None or value is None):
        raise EquilibriaError(
            f"got weight_decay=0, without which there is no equilibrium to start from, with init_norm={init_norm}, "
            f"{name}={value}; expected both init_norm and {name}, or a weight_decay > 0"
        )
    if init_norm is not None and value is None:
        raise EquilibriaError(
            f"got init_norm={init_norm} without {name}; expected both: {name} fixes the norm to compare with"
        )


def check_distance(init_norm: float | None, start_norm: float) -> None:
    """Fourth powers of the ratio must stay within float64."""
    if init_norm is not None and not 1e-70 <= positive("init_norm", init_norm) / start_norm <= 1e70:
        raise EquilibriaError(
            f"got init_norm={init_norm:g}, {init_norm / start_norm:.2g} times its equilibrium {start_norm:.3g}; "
            "expected 1e-70 to 1e70 times"
        )


def update_size(rule: Rule, dim: float | None, shape: tuple[int, int] | None) -> float:
    """What the squared norm goes as: the number of entries; for Muon the squared length of the adjusted update."""
    if isinstance(rule, Muon) and shape is not None:
        return rule.gain(shape) ** 2 * min(shape)
    return 1.0 if dim is None else scale_number("dim", dim)


def scale_number(name: str, value: float) -> float:
    """A positive number far enough from the ends of float64 for the squares and ratios that follow from it."""
    return within(name, positive(name, value), low=1e-100, high=1e100)


Array = NDArray[np.float64]

_CURVE_POINTS = 500
MOST_STEPS = 10_000_000  # ten seconds and a gigabyte; longer runs are planned in coarser steps or in parts


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of the plan.

    Attributes:
        step: optimizer step.
        lr: learning rate.
        weight_decay: weight decay.
        angle: predicted angle, radians.
        angle_equilibrium: the angle this lr and wd would settle at, radians; 0 at lr 0 or wd 0.
        norm: predicted ||w||, in units of L^(1/4) or sqrt(d) where those were not given.
        norm_equilibrium: the norm this lr and wd would settle at; NaN at lr 0 or wd 0.
    """

    step: int
    lr: float
    weight_decay: float
    angle: float
    angle_equilibrium: float
    norm: float
    norm_equilibrium: float

    @property
    def angle_ratio(self) -> float | None:
        """Angle / equilibrium angle; None at lr 0 or wd 0."""
        return self.angle / self.angle_equilibrium if self.angle_equilibrium > 0 else None

    @property
    def norm_ratio(self) -> float | None:
        """Norm / equilibrium norm; None at lr 0 or wd 0."""
        return self.norm / self.norm_equilibrium if self.norm_equilibrium > 0 else None


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the schedule.

    Attributes:
        number: from 1.
        first_step: its first optimizer step.
        steps: how many steps it has.
        flat: lr and wd are constant.
        jump: it begins with a jump of lr or wd.
        start: first step.
        middle: middle step.
        end: last step.
        time_constant: steps per factor e near equilibrium, at the settings of its end; None at lr 0 or wd 0.
        monotone: no oscillation near equilibrium; None at lr 0 or wd 0.
        settle_steps: steps it needs until the angle stays within the tolerance; None for a ramp, whose goal moves, and
            at lr 0 or wd 0.
        settles: the angle is within the tolerance at its end.
    """

    number: int
    first_step: int
    steps: int
    flat: bool
    jump: bool
    start: Moment
    middle: Moment
    end: Moment
    time_constant: float | None
    monotone: bool | None
    settle_steps: int | None
    settles: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """The plan as curves, thinned out to a few hundred points.

    Attributes:
        step: optimizer steps.
        lr: learning rate.
        weight_decay: weight decay.
        angle: predicted angle, radians.
        angle_equilibrium: what lr x wd would settle at.
        angle_by_lr: what the lr alone suggests: the largest equilibrium angle times lr / largest lr; in a run without
            weight decay the angle at the initial norm.
        norm: predicted norm.
        norm_equilibrium: equilibrium norm; NaN at lr 0 or wd 0.
    """

    step: NDArray[np.int64]
    lr: Array
    weight_decay: Array
    angle: Array
    angle_equilibrium: Array
    angle_by_lr: Array
    norm: Array
    norm_equilibrium: Array


@dataclass(frozen=True, slots=True)
class Situation:
    """What the user told the planner, for findings and pages.

    Attributes:
        rule: the optimizer at the largest lr x wd (in a run without weight decay: at the largest lr).
        start_rule: the optimizer at the first lr above 0, or at the lr that a warm-up ends at (smooth, or in stairs
            from 0); without weight decay the same as ``rule``.
        start_norm: its equilibrium norm: where training starts if no initial norm is given; None without weight decay.
        steps: length of the run.
        steps_per_epoch: None where time is shown in steps.
        tolerance: what counts as settled.
        init_norm: given initial norm, or None for a start in equilibrium.
        unit_grad_sq: L (1 if not given).
        dim: number of entries (1 if not given); for Muon the squared length of its update, from the shape.
        dtype: in which the weights are stored.
        rescale: weights and optimizer state are rescaled at every change of lr or wd.
    """

    rule: Rule
    start_rule: Rule
    start_norm: float | None
    steps: int
    steps_per_epoch: int | None
    tolerance: float
    init_norm: float | None
    unit_grad_sq: float
    dim: float
    dtype: str
    rescale: bool = False

    @property
    def norm_power(self) -> int:
        """A step turns as lr / ||w||^norm_power: 1 for steps of a fixed length, 2 if the gradient goes as 1 / ||w||."""
        return 2 if isinstance(self.rule, SGD | SGDW) else 1

    @property
    def norm_name(self) -> str:
        """What the norms of this plan are called: of a single entry they are its root mean square."""
        return "rms entry" if isinstance(self.rule, AdamW | Lion) and self.dim == 1 else "||w||"

    def time(self, steps: float) -> str:
        """Steps in the unit that people read: epochs where they are known."""
        if self.steps_per_epoch is None:
            return f"{steps:,.0f} steps"
        epochs = steps / self.steps_per_epoch
        return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a schedule does before it runs.

    Attributes:
        phases: its phases.
        curve: angle and norm over the run.
        findings: what to know, in plain sentences.
        settled_share: share of the steps with the angle within the tolerance of equilibrium.
        travelled: sum of the angles of all steps, radians: the distance on the sphere.
        situation: the inputs.
    """

    phases: tuple[Phase, ...]
    curve: Curve
    findings: tuple[Finding, ...]
    settled_share: float
    travelled: float
    situation: Situation

    def __repr__(self) -> str:
        names = f"{len(self.phases)} phases, {len(self.findings)} findings, {len(self.curve.step)} curve points"
        return f"<Plan of {type(self.situation.rule).__name__} over {self.situation.steps:,} steps: {names}>"

    def _repr_html_(self) -> str:
        shown: str = renderer("plan.card.plan_card")(self)
        return shown


def plan(
    rule: Rule,
    schedule: ScheduleLike,
    *,
    steps: int,
    steps_per_epoch: int | None = None,
    weight_decay: ScheduleLike | None = None,
    init_norm: float | None = None,
    unit_grad_sq: float | None = None,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
    dtype: str = "float32",
    tolerance: float = 0.05,
    rescale: bool = False,
) -> Plan:
    """Predict norm and angle of a scale-invariant weight over a whole schedule.

    Args:
        rule: the optimizer; the schedule replaces its lr.
        schedule: learning rate as a function of the step (any form that `theory.schedules.as_schedule` takes).
        steps: length of the run in optimizer steps.
        steps_per_epoch: to speak of epochs.
        weight_decay: weight-decay schedule; the rule's own without.
        init_norm: ||w|| at the start; without it training starts in the equilibrium of its first lr above 0, or of the
            lr that a warm-up ends at (smooth, or in stairs from 0; not with rescale). Needed where there is no weight
            decay, hence no equilibrium.
        unit_grad_sq: L = E||g||^2 ||w||^2; needed with init_norm for SGD-type rules, and always for Adam with L2.
        dim: number of entries; needed with init_norm for AdamW and Lion, and always for Adam with L2. Not for Muon.
        shape: (rows, columns) of the matrix; needed with init_norm for Muon.
        dtype: in which the weights are stored: float32, bfloat16 or float16.
        tolerance: what counts as settled.
        rescale: whether weights and optimizer state are rescaled into the new equilibrium at every change of lr or wd,
            in a jump or step by step, as `equilibria.control.RescaleOnDecay` does.

    Returns:
        Phases, curves and findings.

    Raises:
        EquilibriaError: bad or missing input.

    Example:
        >>> from equilibria.theory import SGD
        >>> from equilibria.theory.schedules import MultiStep
        >>> result = plan(SGD(0.1, 5e-4, momentum=0.9), MultiStep(0.1, milestones=[60, 120], factor=0.1), steps=200)
        >>> [round(phase.start.angle_ratio, 2) for phase in result.phases]
        [1.0, 0.32, 0.1]
    """
    if not isinstance(rule, get_args(Rule)):
        raise EquilibriaError(
            f"got rule={rule!r}; expected one of equilibria.theory's: SGD(lr, weight_decay, ...), ..."
        )
    count = whole("steps", steps, low=1)
    within("steps", count, high=MOST_STEPS)
    one_of("dtype", dtype, DTYPES)
    within("tolerance", tolerance, above=0, below=1)
    lrs = as_schedule(schedule, name="lr").values(count)
    decays = as_schedule(rule.weight_decay if weight_decay is None else weight_decay, name="weight_decay").values(count)
    if not lrs.any():
        raise EquilibriaError("got a schedule whose lr is 0 at every step; expected a positive lr somewhere")
    with np.errstate(over="ignore"):  # infinite is refused below, as without a stable equilibrium
        pull = lrs * decays
    check_scale(rule, init_norm, unit_grad_sq, dim, shape, settles=bool(pull.any()))
    spans = cut(lrs, decays)
    scale = {
        "unit_grad_sq": 1.0 if unit_grad_sq is None else scale_number("unit_grad_sq", unit_grad_sq),
        "dim": update_size(rule, dim, shape),
    }

    def at(step: int) -> Rule:
        here: Rule = dataclasses.replace(rule, lr=float(lrs[step]), weight_decay=float(decays[step]))
        return here

    top = start = at(int(np.argmax(pull if pull.any() else lrs)))
    start_norm = None
    if pull.any():
        top.equilibrium(**scale)  # type: ignore[arg-type]  # refuses an lr * wd without a stable equilibrium
        # Rescaled weights follow lr up a warm-up too: they begin in the equilibrium of its first step.
        start = at(int(np.flatnonzero(pull)[0]) if rescale else first_goal(pull, spans))
        start_norm = math.sqrt(settled(start, **scale).norm_sq)
        check_distance(init_norm, start_norm)
    situation = Situation(
        top,
        start,
        start_norm,
        count,
        None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1),
        tolerance,
        None if init_norm is None else positive("init_norm", init_norm),
        scale["unit_grad_sq"],
        scale["dim"],
        dtype,
        rescale,
    )
    return _build(situation, lrs, decays, spans)


def _build(situation: Situation, lrs: Array, decays: Array, spans: tuple[Span, ...]) -> Plan:
    goal = _goals(situation, lrs, decays)
    scales = _scales(situation, lrs, decays)
    paths = _follow(situation, *in_scale(situation.rule, lrs, decays, scales), spans)
    angle = np.concatenate([path.angle for path in paths])
    norm = np.concatenate([path.norm[:-1] for path in paths]) * scales
    shown = _thin(situation.steps, spans)
    norm_goal = np.sqrt(goal.norm_sq)

    def moment(step: int) -> Moment:
        columns = (lrs, decays, angle, goal.angle, norm, norm_goal)
        return Moment(step, *(float(column[step]) for column in columns))

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = angle / goal.angle
    inside = np.abs(ratio - 1) <= situation.tolerance
    phases = tuple(
        _phase(n, span, situation, moment, inside[span.first : span.first + span.steps], _final(path, span, scales))
        for n, (span, path) in enumerate(zip(spans, paths, strict=True), start=1)
    )
    last = np.flatnonzero(lrs)[-1]
    per_lr = angle[last] / lrs[last] * (norm[last] / norm[0]) ** situation.norm_power
    by_lr = lrs * (goal.angle.max() / lrs.max() or per_lr)
    curve = Curve(shown, *(column[shown] for column in (lrs, decays, angle, goal.angle, by_lr, norm, norm_goal)))
    return Plan(phases, curve, find(phases, situation), float(inside.mean()), float(angle.sum()), situation)


def _goals(situation: Situation, lrs: Array, decays: Array) -> Targets:
    """The equilibrium of every step, solved once per stretch of constant lr and weight decay."""
    firsts = np.flatnonzero(np.concatenate([[True], (lrs[1:] != lrs[:-1]) | (decays[1:] != decays[:-1])]))
    goal = targets(
        situation.rule,
        lrs[firsts],
        weight_decay=decays[firsts],
        unit_grad_sq=situation.unit_grad_sq,
        dim=situation.dim,
    )
    lengths = np.diff(firsts, append=len(lrs))
    return Targets(np.repeat(goal.angle, lengths), np.repeat(goal.norm_sq, lengths))


def _follow(situation: Situation, lrs: Array, decays: Array, spans: tuple[Span, ...]) -> list[Trajectory]:
    """The moment recursion, one trajectory per phase, each from where the last one ended."""
    state, paths = _start(situation), []
    for span in spans:
        rests = _rests(situation, span, lrs, decays)
        steps = slice(span.first, span.first + (1 if rests else span.steps))
        path = evolve(
            situation.rule,
            steps.stop - steps.start,
            start=state,
            lr=lrs[steps],
            weight_decay=decays[steps],
            unit_grad_sq=situation.unit_grad_sq,
            dim=situation.dim,
        )
        paths.append(_held(path, span.steps) if rests else path)
        state = path.final
    return paths


def _scales(situation: Situation, lrs: Array, decays: Array) -> Array:
    """By how much weights were rescaled until each step, all together."""
    if not situation.rescale:
        return np.ones(len(lrs))
    factors = rescaled_sq(situation.rule, lrs, decays, unit_grad_sq=situation.unit_grad_sq, dim=situation.dim)
    return np.asarray(np.sqrt(np.cumprod(factors)))


def _final(path: Trajectory, span: Span, scales: Array) -> State:
    """Where a phase ends, in the scale of its last step."""
    return rescaled(path.final, float(scales[span.first + span.steps - 1]))


def _rests(situation: Situation, span: Span, lrs: Array, decays: Array) -> bool:
    """The phase begins in its own equilibrium, a fixed point of the recursion, and does not leave it."""
    here = (float(lrs[span.first]), float(decays[span.first]))
    goal = (situation.start_rule.lr, situation.start_rule.weight_decay)
    return span.first == 0 and span.flat and situation.init_norm is None and here == goal


def _held(path: Trajectory, steps: int) -> Trajectory:
    """One step, repeated."""
    columns = {name: np.repeat(getattr(path, name)[:1], steps) for name in ("lr", "weight_decay", "moved_sq")}
    return Trajectory(**columns, norm_sq=np.repeat(path.norm_sq[:1], steps + 1), final=path.final)


def _start(situation: Situation) -> State:
    if situation.init_norm is not None:
        return cold_start(situation.rule, situation.init_norm)
    return settled(situation.start_rule, unit_grad_sq=situation.unit_grad_sq, dim=situation.dim)


def _thin(steps: int, spans: tuple[Span, ...]) -> NDArray[np.int64]:
    """Evenly spread steps, and the two sides of every phase boundary."""
    even = np.linspace(0, steps - 1, min(steps, _CURVE_POINTS)).round().astype(int).tolist()
    sides = [side for span in spans for side in (span.first - 1, span.first) if side >= 0]
    return np.array(sorted({*even, *sides}), dtype=np.int64)  # np.unique would import numpy.ma, a tenth of the run time


def _phase(
    number: int,
    span: Span,
    situation: Situation,
    moment: Callable[[int], Moment],
    inside: NDArray[np.bool_],
    final: State,
) -> Phase:
    end = moment(span.first + span.steps - 1)
    rule = dataclasses.replace(situation.rule, lr=end.lr, weight_decay=end.weight_decay)
    moving = end.lr * end.weight_decay > 0
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    settled_here = rule.equilibrium(**scale) if moving else None  # type: ignore[arg-type]
    needs = None
    if span.flat and moving:
        outside = np.flatnonzero(~inside)
        needs = int(outside[-1]) + 1 if len(outside) else 0
        if not inside[-1]:
            needs = span.steps + settling_steps(
                rule,
                final,
                tolerance=situation.tolerance,
                unit_grad_sq=situation.unit_grad_sq,
                dim=situation.dim,
            )
    return Phase(
        number,
        span.first,
        span.steps,
        span.flat,
        span.jump,
        moment(span.first),
        moment(span.first + span.steps // 2),
        end,
        settled_here.time_constant if settled_here else None,
        settled_here.monotone if settled_here else None,
        needs,
        bool(inside[-1]),
    )
