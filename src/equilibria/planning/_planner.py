"""`plan`: the effect of a schedule on norm and angle, predicted before it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, one_of, positive, scale_number, whole, within
from equilibria.optimizers.rules import TorchOptimizer, rule_of_optimizer
from equilibria.planning._findings import plan_findings
from equilibria.planning._phases import Span, cut, first_equilibrium_step, thinned
from equilibria.planning._plan import Curve, Phase, Plan, PlannedStep, Situation, WeightDtype
from equilibria.theory import SGD, SGDW, AdamL2, Identified, Muon, Rule
from equilibria.theory._reals import Array
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.settling import settling_steps
from equilibria.theory.states import State, cold_start, rescaled, settled
from equilibria.theory.targets import rescale_sq_factors, targets_per_step, unscaled_settings
from equilibria.theory.transient import Trajectory, evolve

MOST_STEPS = 10_000_000  # ten seconds and a gigabyte; plan longer runs in coarser steps or in parts
_CURVE_POINTS = 500

OptimizerLike: TypeAlias = Rule | TorchOptimizer
"""A rule of `equilibria.theory` or a torch optimizer."""


def plan(
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
    rescale: bool = False,
) -> Plan:
    """Predict norm and angle of a scale-invariant weight over a whole schedule.

    Args:
        optimizer: a rule of `equilibria.theory`, or a torch optimizer. Of a torch optimizer the groups with weight
            decay are planned, all groups if none decays; they may differ in lr, which the schedule replaces, but must
            follow one rule otherwise.
        schedule: learning rate as a function of the step (any form that `theory.schedules.as_schedule` takes).
        steps: length of the run in optimizer steps.
        steps_per_epoch: to show time in epochs.
        weight_decay: weight-decay schedule; the optimizer's own value if not given.
        init_norm: ||w|| at the start. If not given, training starts in the equilibrium of its first lr above 0, or of
            the lr that a warm-up ends at (smooth, or in stairs from 0; not with rescale). Required without weight
            decay, which has no equilibrium.
        unit_grad_sq: L = E||g||^2 ||w||^2; required with init_norm for SGD-type rules, and always for Adam with L2.
        dim: number of entries; required with init_norm for AdamW and Lion, and always for Adam with L2. Not for Muon.
        shape: (rows, columns) of the matrix, on which norm and angle of Muon depend; required with init_norm. A law
            that has to be measured is measured for it.
        dtype: number format of the weights.
        tolerance: relative distance from equilibrium that counts as settled.
        rescale: rescale weights and optimizer state into the new equilibrium at every change of lr or wd, in a jump or
            step by step, as `equilibria.control.RescaleOnDecay` does.

    Returns:
        Phases, curves and findings.

    Raises:
        EquilibriaError: bad or missing input, an optimizer without a rule, or parameter groups with different rules.

    Example:
        >>> from equilibria.theory import SGD
        >>> from equilibria.theory.schedules import MultiStep
        >>> result = plan(SGD(0.1, 5e-4, momentum=0.9), MultiStep(0.1, milestones=[60, 120], factor=0.1), steps=200)
        >>> [round(phase.start.angle_ratio, 2) for phase in result.phases]
        [1.0, 0.32, 0.1]
    """
    rule = as_rule(optimizer, decay_scheduled=weight_decay is not None, shape=shape)
    if isinstance(rule, Identified) and shape is not None and dim is None:
        dim = float(math.prod(shape))
        shape = None
    count = whole("steps", steps, low=1)
    within("steps", count, high=MOST_STEPS)
    one_of("dtype", dtype, get_args(WeightDtype))
    within("tolerance", tolerance, above=0, below=1)
    lrs = as_schedule(schedule).values(count)
    decays = as_schedule(rule.weight_decay if weight_decay is None else weight_decay, name="weight_decay").values(count)
    if not lrs.any():
        raise EquilibriaError(
            "got a schedule whose lr is 0 at every step; expected a positive lr somewhere", argument="schedule"
        )
    with np.errstate(over="ignore"):  # an infinite product raises below: it has no stable equilibrium
        pull = lrs * decays
    _check_scale(rule, init_norm, unit_grad_sq, dim, shape, decays=bool(pull.any()))
    if isinstance(rule, Muon) and shape is not None:
        rule = dataclasses.replace(rule, shape=shape)
    scale = {
        "unit_grad_sq": 1.0 if unit_grad_sq is None else scale_number("unit_grad_sq", unit_grad_sq),
        "dim": _update_size(rule, dim),
    }
    spans = cut(lrs, decays)

    def rule_at(step: int) -> Rule:
        scheduled: Rule = dataclasses.replace(rule, lr=float(lrs[step]), weight_decay=float(decays[step]))
        return scheduled

    largest = start = rule_at(int(np.argmax(pull if pull.any() else lrs)))
    start_norm = None
    if pull.any():
        largest.equilibrium(**scale)  # type: ignore[arg-type]  # raises if this lr * wd has no stable equilibrium
        # Rescaled weights follow lr up a warm-up too: they begin in the equilibrium of its first step.
        start = rule_at(int(np.flatnonzero(pull)[0]) if rescale else first_equilibrium_step(pull, spans))
        start_norm = math.sqrt(settled(start, **scale).norm_sq)
        _check_distance(init_norm, start_norm)
    situation = Situation(
        rule=largest,
        start_rule=start,
        start_norm=start_norm,
        steps=count,
        steps_per_epoch=None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1),
        tolerance=tolerance,
        init_norm=None if init_norm is None else positive("init_norm", init_norm),
        unit_grad_sq=scale["unit_grad_sq"],
        dim=scale["dim"],
        dtype=dtype,
        rescale=rescale,
    )
    return _build(situation, lrs, decays, spans)


# ---- the inputs


def as_rule(optimizer: OptimizerLike, *, decay_scheduled: bool = False, shape: tuple[int, int] | None = None) -> Rule:
    """The rule itself, or that of a torch optimizer.

    Args:
        optimizer: a rule or a torch optimizer.
        decay_scheduled: whether a schedule replaces the weight decay, so that groups may differ in it.
        shape: of the weight, if its law has to be measured.
    """
    if isinstance(optimizer, Rule):
        return optimizer
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise EquilibriaError(
            f"got optimizer={optimizer!r}; expected a rule of equilibria.theory such as SGD(lr, weight_decay), or a "
            "torch optimizer",
            argument="optimizer",
        )
    scheduled = ("lr", "weight_decay") if decay_scheduled else ("lr",)
    return rule_of_optimizer(optimizer, scheduled=scheduled, shape=shape)


def _check_scale(
    rule: Rule,
    init_norm: float | None,
    unit_grad_sq: float | None,
    dim: float | None,
    shape: tuple[int, int] | None,
    *,
    decays: bool,
) -> None:
    """Raise if the scale does not belong to this rule, or if nothing fixes the norm that init_norm is compared with."""
    coupled = isinstance(rule, AdamL2) or (isinstance(rule, Identified) and rule.is_coupled)
    if coupled and (unit_grad_sq is None or dim is None):
        name = rule.name if isinstance(rule, Identified) else "Adam with L2"
        raise EquilibriaError(
            f"got unit_grad_sq={unit_grad_sq}, dim={dim} for {name}; expected both: its angle depends on the "
            "gradient scale (for AdamW neither is needed)"
        )
    if shape is not None and not isinstance(rule, Muon):
        raise EquilibriaError(
            f"got shape={shape} for {type(rule).__name__}; expected it only for Muon", argument="shape"
        )
    if dim is not None and isinstance(rule, Muon):
        raise EquilibriaError(
            f"got dim={dim} for Muon; expected shape=(rows, columns), which fixes its norm", argument="dim"
        )
    name = _scale_name(rule)
    value = {"unit_grad_sq": unit_grad_sq, "shape": shape, "dim": dim}[name]
    if not decays and (init_norm is None or value is None):
        raise EquilibriaError(
            f"got weight_decay=0, without which there is no equilibrium to start from, with init_norm={init_norm}, "
            f"{name}={value}; expected both init_norm and {name}, or a weight_decay > 0"
        )
    if init_norm is not None and value is None:
        raise EquilibriaError(
            f"got init_norm={init_norm} without {name}; expected both: {name} fixes the norm to compare with",
            argument="init_norm",
        )


def _scale_name(rule: Rule) -> str:
    """The number that fixes the norm of a rule."""
    if isinstance(rule, Identified):
        return "dim" if rule.step.entries else "unit_grad_sq"
    return "unit_grad_sq" if isinstance(rule, SGD | SGDW) else "shape" if isinstance(rule, Muon) else "dim"


def _check_distance(init_norm: float | None, start_norm: float) -> None:
    """Raise if the fourth power of the initial norm over equilibrium would leave float64."""
    if init_norm is not None and not 1e-70 <= positive("init_norm", init_norm) / start_norm <= 1e70:
        raise EquilibriaError(
            f"got init_norm={init_norm:g}, {init_norm / start_norm:.2g} times its equilibrium {start_norm:.3g}; "
            "expected 1e-70 to 1e70 times",
            argument="init_norm",
        )


def _update_size(rule: Rule, dim: float | None) -> float:
    """The number that the squared norm is proportional to: entries; for Muon the squared length of its update."""
    if isinstance(rule, Muon) and rule.shape is not None:
        return rule.update_sq(rule.shape)
    return 1.0 if dim is None else scale_number("dim", dim)


# ---- the prediction


def _build(situation: Situation, lrs: Array, decays: Array, spans: tuple[Span, ...]) -> Plan:
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    equilibrium = targets_per_step(situation.rule, lrs, decays, **scale)
    scales = np.ones(len(lrs))  # the factor by which weights were rescaled up to each step
    if situation.rescale:
        scales = np.sqrt(np.cumprod(rescale_sq_factors(situation.rule, lrs, decays, **scale)))
    paths = _evolve_phases(situation, *unscaled_settings(situation.rule, lrs, decays, scales), spans)
    angle = np.concatenate([path.angle for path in paths])
    norm = np.concatenate([path.norm[:-1] for path in paths]) * scales
    norm_equilibrium = np.sqrt(equilibrium.norm_sq)

    def planned_step(step: int) -> PlannedStep:
        columns = (lrs, decays, angle, equilibrium.angle, norm, norm_equilibrium)
        return PlannedStep(step, *(float(column[step]) for column in columns))

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = angle / equilibrium.angle
    inside = np.abs(ratio - 1) <= situation.tolerance
    phases = []
    for number, (span, path) in enumerate(zip(spans, paths, strict=True), start=1):
        final = rescaled(path.final, float(scales[span.first + span.steps - 1]))
        phases.append(_phase(number, span, situation, planned_step, inside[span.first :][: span.steps], final))
    last = np.flatnonzero(lrs)[-1]
    per_lr = angle[last] / lrs[last] * (norm[last] / norm[0]) ** situation.norm_power
    by_lr = lrs * (equilibrium.angle.max() / lrs.max() or per_lr)
    shown = thinned(situation.steps, most=_CURVE_POINTS, boundaries=[span.first for span in spans])
    columns = (lrs, decays, angle, equilibrium.angle, by_lr, norm, norm_equilibrium)
    return Plan(
        phases=tuple(phases),
        curve=Curve(shown, *(column[shown] for column in columns)),
        findings=plan_findings(phases, situation),
        settled_share=float(inside.mean()),
        travelled=float(angle.sum()),
        situation=situation,
    )


def _evolve_phases(situation: Situation, lrs: Array, decays: Array, spans: tuple[Span, ...]) -> list[Trajectory]:
    """The moment recursion, one trajectory per phase, each from where the last one ended."""
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    if situation.init_norm is not None:
        state = cold_start(situation.rule, situation.init_norm)
    else:
        state = settled(situation.start_rule, **scale)
    paths = []
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
        paths.append(_repeated(path, span.steps) if rests else path)
        state = path.final
    return paths


def _rests(situation: Situation, span: Span, lrs: Array, decays: Array) -> bool:
    """Whether the phase begins in its own equilibrium, a fixed point of the recursion, and stays in it."""
    settings = (float(lrs[span.first]), float(decays[span.first]))
    start = (situation.start_rule.lr, situation.start_rule.weight_decay)
    return span.first == 0 and span.flat and situation.init_norm is None and settings == start


def _repeated(path: Trajectory, steps: int) -> Trajectory:
    """A trajectory of one step, repeated."""
    columns = {name: np.repeat(getattr(path, name)[:1], steps) for name in ("lr", "weight_decay", "moved_sq")}
    return Trajectory(**columns, norm_sq=np.repeat(path.norm_sq[:1], steps + 1), final=path.final)


def _phase(
    number: int,
    span: Span,
    situation: Situation,
    planned_step: Callable[[int], PlannedStep],
    inside: NDArray[np.bool_],
    final: State,
) -> Phase:
    """One phase; ``inside`` says which of its steps are within the tolerance, ``final`` is the state at its end."""
    end = planned_step(span.first + span.steps - 1)
    rule = dataclasses.replace(situation.rule, lr=end.lr, weight_decay=end.weight_decay)
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    equilibrium = rule.equilibrium(**scale) if end.lr * end.weight_decay > 0 else None  # type: ignore[arg-type]
    settle_steps = None
    if span.flat and equilibrium is not None:
        outside = np.flatnonzero(~inside)
        settle_steps = int(outside[-1]) + 1 if len(outside) else 0
        if not inside[-1]:
            more = settling_steps(rule, final, tolerance=situation.tolerance, **scale)  # type: ignore[arg-type]
            settle_steps = span.steps + more
    return Phase(
        number=number,
        first_step=span.first,
        steps=span.steps,
        flat=span.flat,
        jump=span.jump,
        start=planned_step(span.first),
        middle=planned_step(span.first + span.steps // 2),
        end=end,
        time_constant=equilibrium.time_constant if equilibrium else None,
        monotone=equilibrium.monotone if equilibrium else None,
        settle_steps=settle_steps,
        settles=bool(inside[-1]),
    )
