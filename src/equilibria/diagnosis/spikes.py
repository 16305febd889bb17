"""Findings about spikes: a loss, a gradient, an angle or an lr that jumps up, and what came first.

A loss is logged with `monitor.log(loss=...)`; without one nothing is said about the loss. Causes are not measured: a
finding says in which order the samples show what happened. Within one step the order is: loss and gradient, of one
batch, then lr and angle, of the update that follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from equilibria.diagnosis.divergence import Divergence, divergence
from equilibria.diagnosis.gradient_jumps import GradientJump, gradient_jumps, total_gradients
from equilibria.diagnosis.loss_rises import LEAST, MAD, WINDOW, LossRise, loss_rises
from equilibria.diagnosis.lr_excursions import Excursion
from equilibria.diagnosis.metadata import short
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array
from equilibria.diagnosis.spike_signs import (
    LEAST_USUAL,
    STEPS_BEFORE,
    Sign,
    lr_course,
    lr_excursions,
    lr_groups,
    sampled_steps,
    signs_around,
)
from equilibria.findings import Finding, counted, joined, plain, rounded

_SHORT, _EXTRAORDINARY = 2, 3  # values, and times the highest rise: less, without another sign, may be noise
_TO_BE_LOST = 10  # values after the rise from which on a loss that is not back counts as lost
_IN_DETAIL = 3  # the last spikes have a finding each, those before them one together
_MOST_EXCURSIONS = 3  # of lr: more are a schedule
_CLIP_TRIAL = (
    "In our trial (docs/findings.md, ten seeds) a batch with wrong labels then raised the loss of the next 20 steps by "
    "0.10 at most, not by 0.45 (BatchNorm, SGD), or by 0.011, not by 0.015 (LayerNorm, AdamW)"
)
_CLIPPED = 0.01  # scatter of the log of the total gradient norm: less is clipped or normalised


def spikes(run: SampledRun) -> Iterator[Finding]:
    """A loss that diverged, rises of a logged loss, excursions of lr, and jumps of gradients and angles.

    Gradients and angles that jump for a moment count only without a logged loss. Of events at the same steps one is
    reported, in this order; of several losses one that did not come back, else the one that rises most. After a run has
    diverged, no single event is. The kind of a finding names its step: each is announced once, however many there are.
    """
    losses, growth = run.losses, divergence(run)
    rises = [(rise, name) for name, (step, values) in losses.items() for rise in loss_rises(step, values)]
    rises = [(rise, name) for rise, name in rises if not _may_be_noise(run, rise)]
    rises.sort(key=lambda rise_of: (not _is_lost(rise_of[0]), -rise_of[0].size))
    about_loss = ((rise, partial(_about_loss, run, name, rise, growth)) for rise, name in rises)
    events = [
        *(Event(rise.size, rise.first, rise.before, rise.last, finding) for rise, finding in about_loss),
        *(
            Event(math.inf, lr.first, lr.before, lr.after, partial(_about_lr, run, lr, losses))
            for lr in _accidental_excursions(run)
        ),
        *(
            Event(jump.factor, jump.step, jump.step, jump.step, partial(_about_gradient, run, jump))
            for jump in gradient_jumps(run)
            if jump.until is not None or not losses
        ),
    ]
    if growth is not None:
        events = [event for event in events if event.first < growth.since]
        if not any(_is_lost(rise) and rise.before < growth.since for rise, _ in rises):
            yield growth.finding
    distinct: list[Event] = []
    for event in events:
        if all(event.last < other.first or event.first > other.last for other in distinct):
            distinct.append(event)
    distinct.sort(key=lambda event: event.first)
    earlier, last = distinct[:-_IN_DETAIL], distinct[-_IN_DETAIL:]
    if len(earlier) == 1:
        earlier, last = [], distinct
    if earlier:
        yield _together(earlier)
    for finding, event in ((event.finding(), event) for event in last):
        yield finding if finding.kind else replace(finding, kind=event.kind)


@dataclass(frozen=True, slots=True)
class Event:
    """A spike of any kind: its size in its own unit, its step, the steps around it, and the finding about it."""

    size: float
    step: int
    first: int
    last: int
    finding: Callable[[], Finding]

    @property
    def kind(self) -> str:
        """The kind of its finding, which stays the same as training goes on."""
        return f"spikes, step {self.step}"


def _together(events: Sequence[Event]) -> Finding:
    """Several spikes in one finding, of the kind of the last of them: it is new only if that one is."""
    largest = max(events, key=lambda event: event.size).finding()
    return Finding(
        "note",
        f"{len(events):,} earlier spikes, at steps {joined([f'{event.step:,}' for event in events], most=12)}",
        f"the largest: {largest.subject}: {largest.evidence}",
        largest.remedy,
        "",
        kind=events[-1].kind,
    )


# ---- the loss


def _may_be_noise(run: SampledRun, rise: LossRise) -> bool:
    """Whether it is a value or two without a trace in the samples, as a batch of very few examples has at times."""
    if not rise.back or rise.lasts > _SHORT or rise.beyond > _EXTRAORDINARY:
        return False
    signs = signs_around(run, rise.before, rise.peak_step, spike=rise.first)
    return not any(sign.may_precede(rise) for sign in signs)


def _is_lost(rise: LossRise) -> bool:
    return not rise.back and rise.later >= _TO_BE_LOST


def _about_loss(run: SampledRun, name: str, rise: LossRise, growth: Divergence | None) -> Finding:
    lost = _is_lost(rise)
    apart = rise.first - rise.before > 1
    when = (
        f"between the values logged at steps {rise.before:,} and {rise.first:,}" if apart else f"at step {rise.first:,}"
    )
    peak = "" if rise.peak_step == rise.first else f" (peak at step {rise.peak_step:,})"
    subject = f"{name} rose from {plain(rise.level, digits=3)} to {plain(rise.peak, digits=3)}{peak} {when}"
    if rise.back:
        subject += f" and was back at step {rise.last:,}"
    elif lost:
        subject += f" and has not come back: it is {plain(rise.now, digits=3)} at step {rise.last:,}"
    signs = signs_around(run, rise.before, rise.peak_step, spike=rise.first)
    evidence = f"{plain(rise.level, digits=3)} is the median of the {counted(rise.values, 'value')} before; "
    evidence += _in_order(run, signs, name=name, rise=rise)
    if not rise.back and not lost:
        evidence += f"; only {counted(rise.later, 'value')} logged since: too few to say whether it comes back"
    kind = ""
    if lost and growth is not None:
        evidence, kind = f"{evidence}; {growth.growth}", "diverged"
    begin = min([rise.before, *(sign.since - 1 for sign in signs if sign.may_precede(rise))])
    remedy = _remedy(run, signs, begin, rise)
    if lost:
        remedy += f"; to undo it, load a checkpoint from before step {begin + 1:,}"
    return Finding("warning" if lost else "note", subject, evidence, remedy, "", kind=kind)


def _in_order(run: SampledRun, signs: Sequence[Sign], *, name: str = "", rise: LossRise | None = None) -> str:
    """What came first and what then, with the steps that were not sampled."""
    if rise is None:
        return f"first {'; then '.join(sign.text for sign in signs)}{_not_sampled(run, signs[0].step)}"
    before = [sign for sign in signs if sign.may_precede(rise)]
    parts = [sign.text for sign in before]
    course = lr_course(run, rise.before - STEPS_BEFORE, max(rise.first, signs[-1].step if signs else 0))
    if not before:
        lr = "an lr, or " if course.is_smooth else ""
        usual = f"no sampled step before shows {lr}a gradient or an angle of a quarter of the layers, out of line"
        text = usual if _has_usual(run, rise.before) else "there are too few samples before it to see what came first"
    else:
        unclear = before[0].step > rise.first
        together = before[-1].kind == "gradient" and before[-1].step == rise.first
        parts[-1:] = (
            [f"{name}, and in the same step {parts[-1]}"] if together else [parts[-1], f"{name} at step {rise.first:,}"]
        )
        text = ("first or at the same time " if unclear else "first ") + "; then ".join(parts)
    text += "".join(f"; then {sign.text}" for sign in signs if sign not in before)
    if not any(sign.kind == "lr" for sign in signs):
        one_batch = _one_batch(run, before, rise) and course.is_smooth
        as_one = ", and the samples before show no quarter of the layers out of line: as one bad batch does"
        as_one = as_one if one_batch else ""
        text += f"; {course.text}{as_one}" if one_batch or not course.is_smooth else ""
    return text + _not_sampled(run, rise.first)


def _has_usual(run: SampledRun, before: int) -> bool:
    return int(np.count_nonzero(sampled_steps(run) <= before)) >= LEAST_USUAL + STEPS_BEFORE


def _one_batch(run: SampledRun, before: Sequence[Sign], rise: LossRise) -> bool:
    """Whether a gradient at one step is the only sign, with the loss or before it, and all steps there were sampled."""
    if [sign.kind for sign in before] != ["gradient"] or not before[0].once:
        return False
    sampled = sampled_steps(run)
    around = sampled[(sampled >= before[0].step - STEPS_BEFORE) & (sampled <= rise.first + 1)]
    return len(around) > 1 and int(np.diff(around).max()) == 1 and rise.first in around


def _not_sampled(run: SampledRun, step: int) -> str:
    """The two samples around a step, if there are steps between them."""
    sampled = sampled_steps(run)
    row = int(np.searchsorted(sampled, step))
    if row == 0 or row == len(sampled):
        last = int(sampled[min(row, len(sampled) - 1)])
        return f"; the {'first' if row == 0 else 'last'} sample is that of step {last:,}"
    low, high = int(sampled[row - 1]), int(sampled[row])
    return "" if high - low <= 1 else f"; nothing was sampled between steps {low:,} and {high:,}"


# ---- lr


def _accidental_excursions(run: SampledRun) -> list[Excursion]:
    """Excursions upwards, the largest of those at the same steps; none where there are many: that is a schedule."""
    upwards = sorted(
        (excursion for excursion in lr_excursions(run) if excursion.factor > 1), key=lambda one: -one.factor
    )
    distinct = {(excursion.first, excursion.last): excursion for excursion in reversed(upwards)}
    return list(distinct.values()) if len(distinct) <= _MOST_EXCURSIONS else []


def _about_lr(run: SampledRun, excursion: Excursion, losses: Mapping[str, tuple[Array, Array]]) -> Finding:
    signs = signs_around(run, excursion.before, excursion.after)
    evidence = _in_order(run, signs) if signs else f"lr was {short(excursion.level)} before and after"
    evidence += _loss_around(excursion, losses) if losses else "; no loss was logged"
    return Finding("note", excursion.text, evidence, _lr_remedy(run, excursion.before), "")


def _loss_around(excursion: Excursion, losses: Mapping[str, tuple[Array, Array]]) -> str:
    """The highest loss in and after an excursion of lr beside its usual values; "" if too few were logged."""
    for name, (step, values) in losses.items():
        before = values[step <= excursion.before][-WINDOW:]
        inside = (step > excursion.first) & (step <= excursion.after + STEPS_BEFORE)
        if len(before) > LEAST and inside.any():
            numbers = (np.max(values[inside]), np.median(before), np.max(before))
            highest, level, usual = (plain(float(number), digits=3) for number in numbers)
            return (
                f"; {name} was at most {highest} over steps {int(step[inside][0]):,}-{int(step[inside][-1]):,}, after "
                f"{level} (median) and {usual} (highest) of the {counted(len(before), 'value')} before"
            )
    return ""


# ---- gradients and angles


def _about_gradient(run: SampledRun, jump: GradientJump) -> Finding:
    signs = signs_around(run, jump.step - 1, jump.step, spike=jump.step)
    evidence = _in_order(run, signs) if signs else f"no single layer was out of line{_not_sampled(run, jump.step)}"
    if not run.losses:
        evidence += "; no loss was logged"
    factor = plain(jump.factor)
    if jump.until is not None:
        return Finding(
            "note",
            f"{jump.what} jumped to {factor} times its recent median at step {jump.step:,} and stayed high",
            f"{factor} is the median over steps {jump.step:,}-{jump.until:,}; at the last sample it is "
            f"{plain(jump.now)} times that median; {evidence}",
            "nothing needs doing if the loss, its scale, the batch or the data were changed there; otherwise go back "
            f"to a checkpoint from before step {jump.step:,}",
            "",
        )
    return Finding(
        "note",
        f"{jump.what} was {factor} times its recent median at step {jump.step:,}",
        evidence,
        f"{_remedy(run, signs, jump.step - 1)}; to see what it does to the loss: monitor.log(loss=loss) at every step",
        "",
    )


# ---- remedies


def _remedy(run: SampledRun, signs: Sequence[Sign], before: int, rise: LossRise | None = None) -> str:
    """One call for the goal that the first sign suggests."""
    first = next((sign for sign in signs if rise is None or sign.may_precede(rise)), None)
    if first is not None and first.kind == "lr":
        return _lr_remedy(run, before)
    if first is not None and first.kind == "outside":
        return "nothing to do if this was intended (a loaded checkpoint, swapped averages)"
    if first is None:
        sampled = sampled_steps(run)
        gap = int(np.median(np.diff(sampled))) if len(sampled) > 1 else 1
        if gap > 1:
            return "to see what comes first next time, sample every step: eq.watch(model, optimizer, every=1)"
        return "log which examples are in each batch, to look at those of the step named"
    return _clip(run, before, rise)


def _clip(run: SampledRun, before: int, rise: LossRise | None) -> str:
    step, total = total_gradients(run)
    usual = step <= before
    step, total = step[usual][-WINDOW:], total[usual][-WINDOW:]
    if len(total) < LEAST_USUAL:
        return (
            "to bound what one batch does, clip at twice the usual total norm of the gradient, which is not known from "
            f"{counted(len(total), 'sample')}: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
        )
    median = float(np.median(total))
    steps = f"the samples of steps {int(step[0]):,} to {int(step[-1]):,}"
    if MAD * float(np.median(np.abs(np.log(total / median)))) < _CLIPPED:
        usual_norm = (
            f"gradients arrive with a total norm of {rounded(median, digits=2)} in {steps}: they are clipped already"
        )
        if rise is None:
            return usual_norm
        limit = f"{rounded(rise.level + (rise.peak - rise.level) / 2, digits=2)}"
        return f"{usual_norm}. To leave such a batch out: if loss.item() > {limit}: continue, before loss.backward()"
    return (
        "to bound what one batch does: "
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {rounded(2 * median, digits=2)}) before optimizer.step(); "
        f"that is twice the median total gradient norm of the watched parameters over {steps}. {_CLIP_TRIAL}"
    )


def _lr_remedy(run: SampledRun, before: int) -> str:
    highest = max(float(np.max(rows["lr"][rows["step"] <= before], initial=0.0)) for rows in lr_groups(run))
    return (
        "if lr was not meant to rise, correct the schedule; to bound it, before optimizer.step(): "
        f'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {short(highest)})'
    )
