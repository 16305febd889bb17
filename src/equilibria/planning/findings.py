"""What a plan means: plain sentences, each with its evidence, a remedy and the law behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from equilibria.theory import Lion, Muon, Rule
from equilibria.theory.rescale import rescale_factors
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW

if TYPE_CHECKING:
    from equilibria.planning.planner import Moment, Phase, Situation

# Largest relative shrink per step that rounding to nearest swallows whatever the weight: half an ulp of the worst case.
_ROUNDED_AWAY = {"float32": 2.0**-25, "bfloat16": 2.0**-9, "float16": 2.0**-12}
DTYPES = tuple(_ROUNDED_AWAY)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing about a plan.

    Attributes:
        severity: "warning" (costs something) or "note".
        subject: what it is about.
        evidence: the numbers.
        remedy: what to do.
        law: the law of `equilibria.theory` it rests on; ask `equilibria.cite`.
    """

    severity: str
    subject: str
    evidence: str
    remedy: str
    law: str


def find(phases: Sequence[Phase], situation: Situation) -> tuple[Finding, ...]:
    """Everything worth saying about these phases, most serious first."""
    found = [
        *_far_start(phases, situation),
        *_never_settles(phases, situation),
        *_undershoots(phases, situation),
        *_oscillates(phases, situation),
        *_falls_behind(phases, situation),
        *_rounded_away(phases, situation),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _numbers(phases: Sequence[Phase]) -> str:
    names = [str(phase.number) for phase in phases]
    return f"phase {names[0]}" if len(names) == 1 else f"phases {', '.join(names[:-1])} and {names[-1]}"


def percent(share: float) -> str:
    """A share as people read it: 0.45 -> 45 %."""
    return f"{100 * share:.0f} %"


def _range(low: float, high: float) -> str:
    return percent(low) if percent(low) == percent(high) else f"{100 * low:.0f}-{percent(high)}"


def _never_settles(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    stuck = [phase for phase in phases if phase.settle_steps is not None and not phase.settles]
    if not stuck:
        return
    ratios = [m.angle_ratio for phase in stuck for m in (phase.start, phase.middle, phase.end) if m.angle_ratio]
    has = sum(phase.steps for phase in stuck)
    worst = max(stuck, key=lambda phase: (phase.settle_steps or 0) / phase.steps)
    factor = (worst.settle_steps or worst.steps) / worst.steps
    yield Finding(
        "warning",
        f"{_numbers(stuck)} never reach{'es' if len(stuck) == 1 else ''} equilibrium",
        f"for {situation.time(has)} the weights turn at {_range(min(ratios), max(ratios))} of what lr x wd asks for; "
        f"phase {worst.number} has {situation.time(worst.steps)} and would need "
        f"{situation.time(worst.settle_steps or worst.steps)}",
        f"rescale weights and optimizer state at each change of lr (settled at once), or raise weight decay more "
        f"than {factor:.0f}x in phase {worst.number} (time to settle goes as 1/(lr x wd)), or make the phase longer",
        "settling.settling_steps",
    )


def _undershoots(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    for before, after in pairwise(phases):
        start, end = after.start.angle_ratio, after.end.angle_ratio
        if not (after.jump and start and end and start < 0.8 < end and before.end.angle_equilibrium > 0):
            continue
        old, new = _rule_at(situation.rule, before.end), _rule_at(situation.rule, after.start)
        drop = before.end.lr / after.start.lr
        asked = before.end.angle_equilibrium / after.start.angle_equilibrium
        fell, same_decay = drop > 1, old.weight_decay == new.weight_decay
        yield Finding(
            "warning",
            f"the angle undershoots when phase {after.number} begins and climbs back",
            (
                f"dividing lr by {drop:.3g} divides the angle by {drop:.3g} at once, although equilibrium asks for "
                f"{asked:.3g} only"
                if fell
                else f"equilibrium asks for {1 / asked:.3g} times the angle, which comes only as the norm decays"
            )
            + f": it starts at {percent(start)} and climbs to {percent(end)} over "
            f"{situation.time(min(after.settle_steps or after.steps, after.steps))}, which is "
            "where test accuracy can dip (pseudo-overfitting)",
            f"to be settled at once: {_rescale_sentence(situation, old, new)}"
            + (
                f"; a weight decay of {old.weight_decay * drop:.3g} from here on would settle {drop:.3g}x faster, but "
                "at the old angle"
                if fell and same_decay
                else ""
            ),
            "settling.after_lr_drop",
        )


def _rule_at(rule: Rule, moment: Moment) -> Rule:
    return dataclasses.replace(rule, lr=moment.lr, weight_decay=moment.weight_decay)


def _rescale_sentence(situation: Situation, old: Rule, new: Rule) -> str:
    factors = rescale_factors(old, new, unit_grad_sq=situation.unit_grad_sq, dim=situation.dim)
    state = {
        SGD: f"the momentum buffer by {factors.first_moment:.3f}",
        SGDW: f"the momentum buffer by {factors.first_moment:.3f}",
        Lion: f"exp_avg by {factors.first_moment:.3f}",
        Muon: f"the momentum buffer by {factors.first_moment:.3f}",
        AdamW: f"exp_avg by {factors.first_moment:.3f}, exp_avg_sq by {factors.second_moment:.3f}",
        AdamL2: f"exp_avg by {factors.first_moment:.3f}, exp_avg_sq by {factors.second_moment:.3f}",
    }[type(old)]
    return f"multiply the weights by {factors.weight:.3f} and {state}"


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
    late = [phase for phase in ramps if phase.middle.angle_ratio and phase.middle.angle_ratio < 0.8]
    if not late:
        return
    peak = max(phases, key=lambda phase: phase.start.lr)
    last = late[-1]
    ratio = last.middle.angle_ratio or 0.0
    to_zero = last.end.lr <= 0.01 * peak.start.lr
    yield Finding(
        "warning",
        "the lr falls to zero while wd stays fixed" if to_zero else "the lr falls faster than the norm can follow",
        f"from step {late[0].first_step:,} on the angle lags, down to {percent(ratio)} of equilibrium in the middle of "
        f"phase {last.number}: the equilibrium norm falls with lr, but so does lr x wd, the speed at which the weights "
        f"follow; they end at {last.end.norm / peak.end.norm:.2f} of their norm at the peak",
        "let wd rise as lr falls, or end the schedule at a larger lr: the last steps turn less than lr x wd says",
        "settling.relaxation",
    )


def _far_start(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    if not situation.init_norm:
        return
    first = next((phase for phase in phases if phase.start.angle_ratio), phases[0])
    ratio, angle = first.start.norm_ratio, first.start.angle_ratio
    if not ratio or abs(ratio - 1) < 0.1:
        return
    small = ratio < 1
    yield Finding(
        "warning",
        f"training starts far from equilibrium: the norm is {ratio:.2g} of its equilibrium value",
        f"||w|| = {first.start.norm:.3g}, equilibrium {first.start.norm_equilibrium:.3g}; step {first.first_step} "
        f"turns by {first.start.angle:.3g} rad" + (f", {angle:.2g} times the equilibrium angle" if angle else ""),
        (
            "the first steps are too large until the norm has grown: warm up the lr, for longer if you do already"
            if small
            else "the first steps are too small until the norm has decayed"
        )
        + f", or scale the initial weights by {1 / ratio:.3g}",
        "transient.evolve",
    )


def _rounded_away(phases: Sequence[Phase], situation: Situation) -> Iterator[Finding]:
    limit = _ROUNDED_AWAY[situation.dtype]
    coupled = isinstance(situation.rule, SGD | AdamL2)
    lost = [
        phase
        for phase in phases
        if 0 < (phase.start.angle if coupled else phase.start.lr * phase.start.weight_decay) < limit
    ]
    if not lost:
        return
    what = "most of the update" if coupled else "the weight decay"
    product = max(phase.start.lr * phase.start.weight_decay for phase in lost)
    yield Finding(
        "warning",
        f"{situation.dtype} weights round {what} away in {_numbers(lost)}",
        (
            f"a step moves the weight by {max(phase.start.angle for phase in lost):.3g} of itself"
            if coupled
            else f"lr x wd = {product:.3g} per step"
        )
        + f" against half an ulp, {limit:.3g}: most entries round back to what they were",
        "keep a float32 master copy of the weights, or use stochastic rounding",
        "equilibrium.heavy_ball",
    )
