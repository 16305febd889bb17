"""The findings of a plan: plain sentences, each with its evidence, a remedy and the law behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, percent, warnings_first
from equilibria.theory import Identified, Lion, Muon, Rule
from equilibria.theory.equilibrium import ROUNDED_AWAY
from equilibria.theory.rules import EQUILIBRIUM_LAWS, SGD, SGDW, AdamL2, AdamW
from equilibria.theory.settling import memory_lengths, settling_steps, steps_to_tolerance
from equilibria.theory.states import State, cold_start, rescaled, settled

if TYPE_CHECKING:
    from equilibria.planning._plan import Phase, PlannedStep, Situation

# From this many steps on, the closed form of settling is within 26 memory lengths of the recursion (the maximum over
# all rules, momenta to 0.99, norms of 0.1 to 30 times equilibrium); if the margin is smaller, the recursion decides.
_SLOW, _MARGIN = 5000, 40


def plan_findings(phases: Sequence[Phase], situation: Situation) -> tuple[Finding, ...]:
    """The findings about these phases, warnings first."""
    findings = [
        *_fades(phases, situation),
        *_decay_ends(phases, situation),
        *_far_start(phases, situation),
        *_never_settles(phases, situation),
        *_jumps(phases, situation),
        *_oscillates(phases, situation),
        *_falls_behind(phases, situation),
        *_rounded_away(phases, situation),
    ]
    return warnings_first(findings)


def _numbers(phases: Sequence[Phase]) -> str:
    names = [str(phase.number) for phase in phases]
    return f"phase {names[0]}" if len(names) == 1 else f"phases {', '.join(names[:-1])} and {names[-1]}"


def _range(low: float, high: float) -> str:
    if high >= 10:
        return f"{low:.2g} to {high:.3g} times"
    return f"{percent(low) if percent(low) == percent(high) else f'{100 * low:.0f}-{percent(high)}'} of"


def _never_settles(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    stuck = [phase for phase in phases if phase.settle_steps is not None and not phase.settles]
    if not stuck:
        return
    ratios = [step.angle_ratio for phase in stuck for step in phase.shown_steps if step.angle_ratio is not None]
    worst = max(stuck, key=lambda phase: (phase.settle_steps or 0) / phase.steps)
    yield Finding(
        "warning",
        f"{_numbers(stuck)} never reach{'es' if len(stuck) == 1 else ''} equilibrium",
        f"for {situation.time(sum(phase.steps for phase in stuck))} the weights turn at "
        f"{_range(min(ratios), max(ratios))} their equilibrium angle; phase {worst.number} lasts "
        f"{situation.time(worst.steps)} and would need {situation.time(worst.settle_steps or worst.steps)} to settle",
        f"to settle at once, {_rescale_stuck(situation, stuck)}. {_other_decay(situation, stuck[0])}",
        "settling.settling_steps",
    )


def _rescale_stuck(situation: Situation, stuck: Sequence[Phase]) -> str:
    """The rescaling that starts phases that never settle in their equilibrium."""
    first = stuck[0]
    if not _is_fresh(situation, first):
        return (
            f"rescale where phase {first.number} begins: {_rescale(situation, first.start)}; "
            "and likewise at every later change"
        )
    is_far_start = _is_far(situation) and _rule_at(situation.rule, first.start) == situation.start_rule
    factor = "as for the far start" if is_far_start else f"by {_factor(1 / (first.start.norm_ratio or 1.0))}"
    again = ", and plan again: it changes where the later phases start" if len(stuck) > 1 else ""
    return f"multiply the initial scale-invariant weights {factor}{again}"


def _is_fresh(situation: Situation, phase: Phase) -> bool:
    """Whether the phase begins with an optimizer that has no state to rescale yet."""
    return phase.first_step == 0 and situation.init_norm is not None


def _other_decay(situation: Situation, phase: Phase) -> str:
    """The effect of a larger weight decay in that phase: it settles faster, at another angle."""
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    present = _rule_at(situation.rule, phase.start)
    if _is_fresh(situation, phase) and situation.init_norm is not None:
        state = cold_start(present, situation.init_norm)
    else:
        state = rescaled(settled(present, **scale), phase.start.norm_ratio or 1.0)
    for factor in (2, 3, 5, 10, 20, 30, 50, 100):
        rule = dataclasses.replace(present, weight_decay=present.weight_decay * factor)
        try:
            equilibrium = rule.equilibrium(**scale)  # type: ignore[arg-type]
            settles = _settles_within(rule, state, phase, situation)
        except EquilibriaError:
            break
        if settles:
            larger = float(equilibrium.angle) / phase.start.angle_equilibrium
            return (
                f"A {factor}x larger weight decay in phase {phase.number} would settle within it, but turn "
                f"{larger:.2g}x as fast"
            )
    return f"No weight decay up to 100x settles phase {phase.number} within its length"


def _settles_within(rule: Rule, state: State, phase: Phase, situation: Situation) -> bool:
    """Whether this rule settles from this state before the phase ends."""
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}
    # The closed form leaves out Adam's second moment, which lags behind the norm, and the build-up of a fresh momentum.
    if not (isinstance(rule, AdamW | AdamL2) or _is_fresh(situation, phase)):
        memory, _ = memory_lengths(rule)
        ratio = math.sqrt(float(state.norm_sq) / float(settled(rule, **scale).norm_sq))
        expected = steps_to_tolerance(rule, ratio, tolerance=situation.tolerance)
        if expected > _SLOW and abs(expected - phase.steps) > _MARGIN * memory:
            return expected < phase.steps
    needs = settling_steps(rule, state, tolerance=situation.tolerance, **scale)  # type: ignore[arg-type]
    return needs < phase.steps


def _jumps(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    """Angles that jump past their new equilibrium when lr or wd changes, and then come back."""
    for before, after in pairwise(phases):
        start, end = after.start.angle_ratio, after.end.angle_ratio
        if start is None or end is None or not after.jump or before.end.angle_equilibrium == 0 or 0.8 <= start <= 1.25:
            continue
        under = start < 1
        if (end <= 0.8) if under else (end >= 1.25):
            continue  # it does not come back: _never_settles reports it
        drop = before.end.lr / after.start.lr
        fall = before.end.angle_equilibrium / after.start.angle_equilibrium
        what = "undershoots" if under else "overshoots"
        dip = ", which is where test accuracy can dip (pseudo-overfitting)" if under and drop > 1 else ""
        yield Finding(
            "warning",
            f"the angle {what} when phase {after.number} begins and comes back",
            _jump_evidence(drop, fall)
            + f": it starts at {percent(start)} of its new equilibrium and reaches {percent(end)} over "
            f"{situation.time(min(after.settle_steps or after.steps, after.steps))}{dip}",
            f"to settle at once: {_rescale(situation, after.start)}",
            "settling.after_lr_drop",
        )


def _jump_evidence(drop: float, fall: float) -> str:
    """The effect of a jump; lr is divided by ``drop``, the equilibrium angle by ``fall``."""
    if drop > 1.001:
        return f"dividing lr by {drop:.3g} divides the angle by {drop:.3g} at once, but its equilibrium by {fall:.3g}"
    if drop < 0.999:
        rise = f"{1 / drop:.3g}"
        return f"lr times {rise} multiplies the angle by {rise} at once, but its equilibrium by {1 / fall:.3g}"
    return f"the new equilibrium is {1 / fall:.3g} times the angle, which gets there only as the norm follows"


def _rule_at(rule: Rule, step: PlannedStep) -> Rule:
    return dataclasses.replace(rule, lr=step.lr, weight_decay=step.weight_decay)


def _rescale(situation: Situation, step: PlannedStep) -> str:
    """The factors that bring weights and optimizer state at this step into its equilibrium."""
    r = 1 / (step.norm_ratio or 1.0)
    first, second = f"by {_factor(1 / r)}", f"by {_factor(1 / r**2)}"
    state = {
        SGD: f"momentum buffer {first}",
        SGDW: f"momentum buffer {first}",
        Lion: f"exp_avg {first}",
        Muon: f"momentum buffer {first}",
        AdamW: f"exp_avg {first}, exp_avg_sq {second}",
        AdamL2: f"exp_avg {first}, exp_avg_sq {second}",
        Identified: f"averages of gradients {first}, those of squared gradients {second}",
    }[type(situation.rule)]
    return (
        f"multiply the scale-invariant weights (those only) by {_factor(r)}, their {state}, and the running mean and "
        f"variance of the BatchNorm behind them by {_factor(r)} and {_factor(r * r)}"
    )


def _factor(value: float) -> str:
    """At least three significant digits: 0.000 would erase the weights."""
    return f"{value:.3f}" if 0.1 <= value < 1000 else f"{value:.3g}"


def _oscillates(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    swinging = [phase for phase in phases if phase.monotone is False]
    if swinging:
        product = max(phase.start.lr * phase.start.weight_decay for phase in swinging)
        yield Finding(
            "note",
            f"the norm oscillates around its equilibrium in {_numbers(swinging)}",
            f"lr x wd = {product:.3g} is above the threshold of this momentum: the approach overshoots, and heavy ball "
            "settles no faster with more decay",
            "lower lr x wd or the momentum if you want a smooth approach",
            "approach.oscillation_threshold",
        )


def _falls_behind(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    ramps = [phase for phase in phases if not phase.flat and phase.end.lr < phase.start.lr]
    # Only a lag that builds up counts: a lag present from the start has another cause.
    falling = [phase for phase in ramps if (phase.start.angle_ratio or 0.0) >= 0.8 > (phase.end.angle_ratio or 0.0)]
    late = [phase for phase in ramps if falling and phase.number >= falling[0].number]
    late = [phase for phase in late if (phase.middle.angle_ratio or 1.0) < 0.8]
    if not late:
        return
    peak = max(phases, key=lambda phase: phase.start.lr)
    last = late[-1]
    to_zero = last.end.lr <= 0.01 * peak.start.lr
    yield Finding(
        "note",
        "the lr falls to zero while wd stays fixed" if to_zero else "the lr falls faster than the norm can follow",
        f"during phase {falling[0].number} the angle falls below 80 % of equilibrium, to "
        f"{percent(last.middle.angle_ratio or 0)} in the middle of phase {last.number}: the equilibrium norm falls "
        f"with lr, but so does lr x wd, the speed at which the weights follow; they end at "
        f"{last.end.norm / peak.end.norm:.2f} of their norm at the peak",
        "often this is wanted: the angle falls faster than its equilibrium. To stay in equilibrium, end at a larger "
        "lr, or rescale the scale-invariant weights and their optimizer state as lr falls",
        "settling.relaxation",
    )


def _fades(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    """Runs without weight decay: the norm only grows, and every step turns less than the one before."""
    if situation.start_norm is not None:
        return
    steps = [step for phase in phases for step in phase.shown_steps if step.lr > 0]
    first, last = steps[0], steps[-1]
    yield Finding(
        "warning",
        "without weight decay there is no equilibrium, and the angle fades",
        f"{situation.norm_name} grows from {first.norm:.3g} to {last.norm:.3g}, so that at the end the same lr turns "
        f"the weights {(last.norm / first.norm) ** situation.norm_power:.3g} times less than at the start, and still "
        f"falling as 1 / sqrt(steps); step {last.step:,} turns by {last.angle:.3g} rad",
        f"to let the lr schedule alone set the angle, add weight decay{_holding_decay(situation, phases)}",
        "transient.evolve",
    )


def _holding_decay(situation: Situation, phases: Sequence[Phase]) -> str:
    """The weight decay that holds the angle of the phase with the largest lr, in words; "" if there is none."""
    peak = max(phases, key=lambda phase: phase.middle.lr)
    step = peak.middle
    if step.lr == 0:
        return ""
    scale = {"unit_grad_sq": situation.unit_grad_sq, "dim": situation.dim}

    def angle(decay: float) -> float:
        rule = dataclasses.replace(situation.rule, lr=step.lr, weight_decay=decay)
        try:
            return float(rule.equilibrium(**scale).angle)  # type: ignore[arg-type]
        except EquilibriaError:  # beyond the largest decay that has an equilibrium
            return math.inf

    low, high = 1e-16 / step.lr, 2 / step.lr
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if angle(middle) < step.angle else (low, middle)
    if not math.isfinite(angle(high)):
        return ""
    wanted = f"phase {peak.number} has in its middle, {step.angle:.3g} rad at lr {step.lr:.3g}"
    return f": wd {low:.3g} holds the angle that {wanted}"


def _decay_ends(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    """Weight decay that falls to zero while lr does not: first the norm lags behind, then nothing holds it."""
    peak = max(phase.start.weight_decay for phase in phases)
    begun = next((phase.number for phase in phases if phase.start.weight_decay > 0), len(phases) + 1)
    idle = [
        phase for phase in phases if phase.number > begun and not any(step.weight_decay for step in phase.shown_steps)
    ]
    idle = [phase for phase in idle if phase.middle.lr > 0]
    if idle:
        before, after = idle[0].start.norm, idle[-1].end.norm
        yield Finding(
            "warning",
            f"without weight decay {_numbers(idle)} {'has' if len(idle) == 1 else 'have'} no equilibrium",
            f"{situation.norm_name} grows from {before:.3g} to {after:.3g}, so that the same lr turns the weights "
            f"{(after / before) ** situation.norm_power:.3g} times less at the end, and falling: lr alone sets the "
            "angle there",
            "to keep an equilibrium to the end, let the weight decay end above 0",
            "transient.evolve",
        )
    falling = [
        phase
        for phase in phases
        if phase.end.weight_decay < min(0.01 * peak, phase.start.weight_decay)
        and max(phase.middle.angle_ratio or 0.0, phase.end.angle_ratio or 0.0) > 1.25
    ]
    if falling:
        last = falling[-1]
        yield Finding(
            "note",
            "the weight decay falls to zero faster than the norm can follow",
            "as wd falls, the equilibrium angle falls and the equilibrium norm grows; in the middle of phase "
            f"{last.number} the weights turn at {_range(*[last.middle.angle_ratio or 0.0] * 2)} their equilibrium"
            " angle",
            "to stay near equilibrium to the end, let lr fall with the weight decay, or end at a larger one",
            "settling.relaxation",
        )


def _is_far(situation: Situation) -> bool:
    """Whether the initial norm is given and at least 10 % from the first equilibrium."""
    if situation.init_norm is None or situation.start_norm is None:
        return False
    return abs(situation.init_norm / situation.start_norm - 1) >= 0.1


def _far_start(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    if not _is_far(situation) or situation.init_norm is None or situation.start_norm is None:
        return
    ratio = situation.init_norm / situation.start_norm
    first = next((phase for phase in phases if phase.start.angle_ratio is not None), phases[0])
    times = f"{ratio:.2g} times its equilibrium" if ratio >= 1 else f"{100 * ratio:.2g} % of its equilibrium"
    later = first.middle.norm_ratio
    if ratio > 1:
        effect = "the first steps turn too little until the norm has decayed"
    elif later and later > 1.2:
        effect = f"the first steps are so large that the norm overshoots, to {later:.2g} times equilibrium in mid-phase"
    else:
        effect = "the first steps turn too much until the norm has grown; a longer warm-up softens them"
    yield Finding(
        "warning",
        f"training starts far from equilibrium: the norm is {times}",
        f"{situation.norm_name} = {situation.init_norm:.3g} against {situation.start_norm:.3g} at lr "
        f"{situation.start_rule.lr:.3g}; step {first.first_step:,} turns by {first.start.angle:.3g} rad; {effect}",
        f"multiply the initial scale-invariant weights by {1 / ratio:.3g}",
        "transient.evolve",
    )


def _rounded_away(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    limit = ROUNDED_AWAY[situation.dtype]
    coupled = isinstance(situation.rule, SGD | AdamL2 | Identified)

    def size(phase: Phase) -> float:
        ends = (phase.start, phase.end)
        return max(step.angle if coupled else step.lr * step.weight_decay for step in ends)

    lost = [phase for phase in phases if 0 < size(phase) < limit]
    if not lost:
        return
    largest = max(size(phase) for phase in lost)
    what = "most of the update" if coupled else "the weight decay"
    yield Finding(
        "warning",
        f"{situation.dtype} weights round {what} away in {_numbers(lost)}",
        (f"a step moves the weight by {largest:.3g} of itself" if coupled else f"lr x wd = {largest:.3g} per step")
        + f" against half an ulp, {limit:.3g}: most entries round back to their old value, and this plan does not hold",
        "raise lr x wd: it is too small to have an effect"
        if situation.dtype == "float32"
        else "keep a float32 master copy of the weights, or use stochastic rounding",
        EQUILIBRIUM_LAWS[type(situation.rule)],
    )
