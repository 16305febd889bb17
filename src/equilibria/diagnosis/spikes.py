"""Findings about spikes: a loss, a gradient, an angle or an lr that jumps up, and what came first.

A loss is logged with `monitor.log(loss=...)`; without one nothing is said about the loss. Causes are not measured: a
finding says in which order the samples show what happened. Within one step the order is: loss and gradient, of one
batch, then lr and angle, of the update that follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from equilibria.diagnosis.loss_rises import (
    LEAST,
    MAD,
    TO_BE_BACK,
    WINDOW,
    LossRise,
    level_and_scatter,
    loss_rises,
    windows_below,
)
from equilibria.diagnosis.lr_excursions import CHANGED, Excursion, excursions
from equilibria.diagnosis.metadata import short
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array
from equilibria.findings import Finding, counted, joined, plain, rounded
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES

_SHORT, _EXTRAORDINARY = 2, 3  # values, and times the highest rise: less, without another sign, may be noise
_TO_BE_LOST = 10  # values after the rise from which on a loss that is not back counts as lost
_MOST = 3  # findings about spikes

_HIGH = 5.0  # times its recent median: a gradient or an angle that is a finding by itself
_HIGH_SCATTERS, _HIGH_ABOVE = 8, 3  # the same in standard deviations of its log, and over the highest in the window
_CALM_AGAIN = 3  # samples whose median is calm again: gradients that stay high are no spike
_OUT_OF_LINE = 2.0  # times its recent median: a gradient or an angle of one layer, around a spike
_BEYOND = 1.5  # times the highest usual rise, on a log scale; at the step of the spike itself 1
_NOT_BY_CHANCE = 0.1  # share of the layers that are above their highest usual value at that step
_LEAST_USUAL = 10  # samples of a layer that show what is usual
_STEPS_BEFORE, _SAMPLES_BEFORE = 10, 2  # before a spike, in which its first sign is looked for

_STEEP = 3  # times the change at the neighbouring samples: a warm-up is steep, but no jump
_CLIPPED = 0.01  # scatter of the log of the total gradient norm: less is clipped or normalised


def spikes(run: SampledRun) -> Iterator[Finding]:
    """Rises of a logged loss, excursions of lr, and, without a logged loss, spikes of gradients and angles.

    Of events at the same steps one is reported, in this order; of several losses the one that rises most.
    """
    losses = run.losses
    rises = [(rise, name) for name, (step, values) in losses.items() for rise in loss_rises(step, values)]
    rises = [(rise, name) for rise, name in rises if not _may_be_noise(run, rise)]
    rises.sort(key=lambda rise_of: -rise_of[0].size)
    events = [
        *(Event(rise.size, rise.before, rise.last, partial(_about_loss, run, name, rise)) for rise, name in rises),
        *(
            Event(math.inf, excursion.before, excursion.after, partial(_about_lr, run, excursion, losses))
            for excursion in _accidental_excursions(run)
        ),
        *(
            Event(spike.factor, spike.step, spike.step, partial(_about_gradient, run, spike))
            for spike in ([] if losses else _high_gradients(run))
        ),
    ]
    distinct: list[Event] = []
    for event in events:
        if all(event.last < other.first or event.first > other.last for other in distinct):
            distinct.append(event)
    largest = sorted(distinct, key=lambda event: -event.size)[:_MOST]
    yield from (event.finding() for event in sorted(largest, key=lambda event: event.first))


@dataclass(frozen=True, slots=True)
class Event:
    """A spike of any kind: its size in its own unit, the steps it lasts, and the finding about it."""

    size: float
    first: int
    last: int
    finding: Callable[[], Finding]


# ---- the loss


def _may_be_noise(run: SampledRun, rise: LossRise) -> bool:
    """Whether it is a value or two without a trace in the samples, as a batch of very few examples has at times."""
    if not rise.back or rise.lasts > _SHORT or rise.beyond > _EXTRAORDINARY:
        return False
    signs = _signs(run, rise.before, rise.peak_step, spike=rise.first)
    return not any(sign.may_precede(rise) for sign in signs)


def _about_loss(run: SampledRun, name: str, rise: LossRise) -> Finding:
    lost = not rise.back and rise.later >= _TO_BE_LOST
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
    signs = _signs(run, rise.before, rise.peak_step, spike=rise.first)
    evidence = f"{plain(rise.level, digits=3)} is the median of the {counted(rise.values, 'value')} before; "
    evidence += _in_order(run, signs, name=name, rise=rise)
    if not rise.back and not lost:
        evidence += f"; only {counted(rise.later, 'value')} logged since: too few to say whether it comes back"
    begin = min([rise.before, *(sign.since - 1 for sign in signs if sign.may_precede(rise))])
    remedy = _remedy(run, signs, begin, rise)
    if lost:
        remedy += f"; to undo it, load a checkpoint from before step {begin + 1:,}"
    return Finding("warning" if lost else "note", subject, evidence, remedy, "")


# ---- the signs: what the samples around a spike show


@dataclass(frozen=True, slots=True)
class Sign:
    """The first sample around a spike at which something is out of line.

    Attributes:
        step: of the sample.
        kind: what is out of line.
        text: what was measured.
        since: the first step at which it may have begun.
        once: whether later samples are as usual again.
    """

    step: int
    kind: Literal["outside", "gradient", "lr", "angle"]
    text: str
    since: int
    once: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Signs in the order of time; the loss of a step comes with its gradient."""
        return self.since, ("outside", "gradient", "lr", "angle").index(self.kind)

    def may_precede(self, rise: LossRise) -> bool:
        """Whether it came before the loss rose, with the loss, or between the same two samples."""
        return self.order <= (rise.first, 1)


def _signs(run: SampledRun, before: int, last: int, *, spike: int | None = None) -> list[Sign]:
    """The first sign of each kind.

    Args:
        run: the run.
        before: the last step before the event.
        last: the last step at which to look for its signs.
        spike: the step at which a loss or a gradient was seen to be high.
    """
    sampled = _sampled_steps(run)
    around = sampled[(sampled >= before - 10 * WINDOW) & (sampled <= last)]
    gap = int(np.median(np.diff(around))) if len(around) > 1 else 1
    low = before - max(_STEPS_BEFORE, _SAMPLES_BEFORE * gap)
    signs = [*_lr_signs(run, low, last), *_layer_signs(run, low, last, spike)]
    return sorted(signs, key=lambda sign: sign.order)


def _sampled_steps(run: SampledRun) -> Array:
    return np.unique(run.taken.columns["step"])


def _lr_signs(run: SampledRun, low: int, high: int) -> list[Sign]:
    """The first rise of lr after step ``low`` that may have begun before step ``high``."""
    rises = []
    for rows in _groups(run):
        steps, change = rows["step"], np.diff(np.log(rows["lr"]))
        neighbours = np.zeros(len(change))
        neighbours[1:] = change[:-1]
        neighbours[:-1] = np.maximum(neighbours[:-1], change[1:])
        jumps = (change > CHANGED) & (change > _STEEP * neighbours) & (steps[1:] >= low) & (steps[:-1] < high)
        rises += [(int(steps[row + 1]), int(steps[row]), math.exp(change[row])) for row in np.flatnonzero(jumps)]
    if not rises:
        return []
    step, before, factor = min(rises)
    text = f"lr was multiplied by {plain(factor, digits=3)} {_when(before, step)}"
    for excursion in _excursions(run):
        if excursion.first == step and excursion.factor > 1:
            text = excursion.text
    return [Sign(step, "lr", text, since=before + 1)]


def _layer_signs(run: SampledRun, low: int, high: int, spike: int | None) -> Iterator[Sign]:
    """The first samples at which layers have a gradient or an angle out of line, or were changed by somebody else."""
    gradients: dict[int, list[tuple[float, str]]] = {}
    predicted: dict[int, list[tuple[float, str]]] = {}
    usual: dict[int, list[tuple[float, str]]] = {}
    outside: dict[int, list[str]] = {}
    examined = 0
    for position, name in enumerate(run.taken.names):
        rows = run.taken.of(position)
        steps = rows["step"]
        begin, end = (int(row) for row in np.searchsorted(steps, [low, high + 1]))
        if end == begin:
            continue
        for row in range(begin, end):
            if rows["note"][row] == NOTES.index(CHANGED_OUTSIDE):
                outside.setdefault(int(steps[row]), []).append(name)
        base = max(begin - WINDOW, 0)
        if begin - base < _LEAST_USUAL:
            continue
        examined += 1
        prediction = rows["angle_predicted"][base:end]
        is_predicted = bool(np.all(prediction > 0))
        turned = rows["angle"][base:end] / (prediction if is_predicted else rows["lr"][base:end])
        kinds = ((gradients, rows["grad_norm"][base:end]), (predicted if is_predicted else usual, turned))
        for signs, values in kinds:
            limit = np.where(steps[begin:end] == spike, 1.0, _BEYOND)
            for row, factor in _out_of_line(values, begin - base, limit):
                signs.setdefault(int(steps[base + row]), []).append((factor, name))
    for signs in (gradients, predicted, usual):
        if spike in signs and len(signs[spike]) < _NOT_BY_CHANCE * examined:
            del signs[spike]
    if outside:
        step = min(outside)
        names = joined(outside[step], most=3)
        text = f"something other than the optimizer's step changed {names} before step {step:,}"
        yield Sign(step, "outside", text, since=step)
    if gradients:
        step = min(gradients)
        text = f"the gradient of {_which(gradients[step], examined)} its recent median at step {step:,}"
        yield Sign(step, "gradient", text, since=step, once=len(gradients) == 1)
    kinds_of_turn = (("predicted", predicted), ("usual at that lr", usual))
    turns = [(min(signs), what, signs) for what, signs in kinds_of_turn if signs]
    if turns:
        step, what, signs = min(turns, key=lambda turn: (turn[0], turn[1]))
        text = f"{_which(signs[step], examined, verb='turned')} as far as {what} at step {step:,}"
        yield Sign(step, "angle", text, since=step)


def _out_of_line(values: Array, usual: int, limit: Array) -> Iterator[tuple[int, float]]:
    """The rows from ``usual`` on whose value is above those before it, with the factor over their median.

    Args:
        values: of one layer.
        usual: number of rows that show what is usual.
        limit: of the other rows: the least rise over the highest usual rise, on a log scale.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(values > 0, np.log(values), np.nan)
    if np.count_nonzero(np.isfinite(logs[:usual])) < _LEAST_USUAL:
        return
    level = float(np.nanmedian(logs[:usual]))
    highest = float(np.nanmax(logs[:usual])) - level
    excess = np.nan_to_num(logs[usual:] - level)
    for row in np.flatnonzero((excess > math.log(_OUT_OF_LINE)) & (excess > limit * highest)).tolist():
        yield usual + row, math.exp(min(float(excess[row]), 700.0))


def _which(factors: Sequence[tuple[float, str]], examined: int, verb: str = "was") -> str:
    """The layers with their factors: the name of one, or how many and the most affected of them."""
    (largest, name), *others = sorted(factors, key=lambda pair: (-pair[0], pair[1]))
    if not others:
        return f"{name} {verb} {plain(largest)} times"
    names = joined([name, *(other for _, other in others)], most=3)
    return f"{len(factors):,} of {examined:,} layers ({names}) {verb} up to {plain(largest)} times"


def _in_order(run: SampledRun, signs: Sequence[Sign], *, name: str = "", rise: LossRise | None = None) -> str:
    """What came first and what then, with the steps that were not sampled."""
    if rise is None:
        return f"first {'; then '.join(sign.text for sign in signs)}{_not_sampled(run, signs[0].step)}"
    before = [sign for sign in signs if sign.may_precede(rise)]
    parts = [sign.text for sign in before]
    if not before:
        usual = "no sampled step before shows an lr, a gradient or an angle out of line"
        text = usual if _has_usual(run, rise.before) else "there are too few samples before it to see what came first"
    else:
        unclear = before[0].step > rise.first
        together = before[-1].kind == "gradient" and before[-1].step == rise.first
        parts[-1:] = (
            [f"{name}, and in the same step {parts[-1]}"] if together else [parts[-1], f"{name} at step {rise.first:,}"]
        )
        text = ("first or at the same time " if unclear else "first ") + "; then ".join(parts)
    text += "".join(f"; then {sign.text}" for sign in signs if sign not in before)
    if _one_batch(before) and not any(sign.kind == "lr" for sign in signs):
        text += "; lr was unchanged, and no layer was out of line in the samples before: as one bad batch does"
    return text + _not_sampled(run, rise.first)


def _has_usual(run: SampledRun, before: int) -> bool:
    return int(np.count_nonzero(_sampled_steps(run) <= before)) >= _LEAST_USUAL + _STEPS_BEFORE


def _one_batch(before: Sequence[Sign]) -> bool:
    """Whether a gradient at one step is the first and only sign: together with the loss, or just before it."""
    if [sign.kind for sign in before] != ["gradient"]:
        return False
    return before[0].once


def _not_sampled(run: SampledRun, step: int) -> str:
    """The two samples around a step, if there are steps between them."""
    sampled = _sampled_steps(run)
    row = int(np.searchsorted(sampled, step))
    if row == 0 or row == len(sampled):
        last = int(sampled[min(row, len(sampled) - 1)])
        return f"; the {'first' if row == 0 else 'last'} sample is that of step {last:,}"
    low, high = int(sampled[row - 1]), int(sampled[row])
    return "" if high - low <= 1 else f"; nothing was sampled between steps {low:,} and {high:,}"


def _when(before: int, step: int) -> str:
    """When a setting changed, as far as the samples show."""
    return f"at step {step:,}" if step - before <= 1 else f"between the samples at steps {before:,} and {step:,}"


# ---- lr


def _groups(run: SampledRun) -> list[Mapping[str, Array]]:
    """The samples of one layer of every parameter group."""
    first: dict[tuple[object, object], int] = {}
    for position in np.flatnonzero(run.taken.counts > 0).tolist():
        entry = run.entries[position]
        first.setdefault((entry.get("optimizer"), entry.get("group")), position)
    return [run.taken.of(position) for position in first.values()]


def _excursions(run: SampledRun) -> list[Excursion]:
    return [excursion for rows in _groups(run) for excursion in excursions(rows)]


def _accidental_excursions(run: SampledRun) -> list[Excursion]:
    """Excursions upwards, the largest of those at the same steps; none where there are many: that is a schedule."""
    upwards = sorted((excursion for excursion in _excursions(run) if excursion.factor > 1), key=lambda one: -one.factor)
    distinct = {(excursion.first, excursion.last): excursion for excursion in reversed(upwards)}
    return list(distinct.values()) if len(distinct) <= _MOST else []


def _about_lr(run: SampledRun, excursion: Excursion, losses: Mapping[str, tuple[Array, Array]]) -> Finding:
    signs = _signs(run, excursion.before, excursion.after)
    evidence = _in_order(run, signs) if signs else f"lr was {short(excursion.level)} before and after"
    evidence += _loss_around(excursion, losses) if losses else "; no loss was logged"
    return Finding("note", excursion.text, evidence, _lr_remedy(run, excursion.before), "")


def _loss_around(excursion: Excursion, losses: Mapping[str, tuple[Array, Array]]) -> str:
    """The highest loss in and after an excursion of lr beside its usual values; "" if too few were logged."""
    for name, (step, values) in losses.items():
        before = values[step <= excursion.before][-WINDOW:]
        inside = (step > excursion.first) & (step <= excursion.after + _STEPS_BEFORE)
        if len(before) > LEAST and inside.any():
            numbers = (np.max(values[inside]), np.median(before), np.max(before))
            highest, level, usual = (plain(float(number), digits=3) for number in numbers)
            return (
                f"; {name} was at most {highest} over steps {int(step[inside][0]):,}-{int(step[inside][-1]):,}, after "
                f"{level} (median) and {usual} (highest) of the {counted(len(before), 'value')} before"
            )
    return ""


# ---- gradients and angles, where no loss is logged


@dataclass(frozen=True, slots=True)
class High:
    """A gradient or an angle that is far above its recent level for a sample or two.

    Attributes:
        step: of the sample.
        factor: over the median of the samples before.
        what: in words.
    """

    step: int
    factor: float
    what: str


def _high_gradients(run: SampledRun) -> list[High]:
    """Spikes of the total gradient of an optimizer, then those of the angle over its prediction."""
    columns = run.taken.columns
    optimizers = np.repeat([int(entry.get("optimizer") or 0) for entry in run.entries], run.taken.counts)
    spikes = []
    for optimizer in np.unique(optimizers).tolist():
        step, total = _totals(run, optimizers == optimizer)
        spikes += [High(*place, "the total gradient norm was") for place in _high(step, total)]
    ratio = columns["angle"] / columns["angle_predicted"]
    known = np.isfinite(ratio) & (ratio > 0)
    step, inverse = np.unique(columns["step"][known], return_inverse=True)
    largest = np.zeros(len(step))
    np.maximum.at(largest, inverse, ratio[known])
    spikes += [High(*place, "the largest angle over its prediction was") for place in _high(step, largest)]
    return spikes


def _totals(run: SampledRun, rows: Array) -> tuple[Array, Array]:
    """Total gradient norm at the sampled steps at which the gradients of all these layers were read."""
    step, grad = run.taken.columns["step"][rows], run.taken.columns["grad_norm"][rows]
    known = np.isfinite(grad)
    steps, inverse, counts = np.unique(step[known], return_inverse=True, return_counts=True)
    if not len(steps):
        return steps, np.zeros(0)
    total = np.sqrt(np.bincount(inverse, weights=grad[known] ** 2))
    whole = (counts == counts.max()) & (total > 0)
    return steps[whole], total[whole]


def _high(step: Array, values: Array) -> Iterator[tuple[int, float]]:
    logs = np.log(values)
    for rows, windows in windows_below(logs):
        level, scatter = level_and_scatter(windows)
        rise = logs[rows] - level
        far = (rise > math.log(_HIGH)) & (rise > _HIGH_SCATTERS * scatter)
        far &= logs[rows] > math.log(_HIGH_ABOVE) + np.nanmax(windows, axis=1)
        for row, height, usual in zip(rows[far].tolist(), rise[far].tolist(), level[far].tolist(), strict=True):
            later = logs[row + 1 : row + 1 + TO_BE_BACK]
            if len(later) < _CALM_AGAIN or np.median(later) < usual + math.log(_OUT_OF_LINE):
                yield int(step[row]), math.exp(min(height, 700.0))


def _about_gradient(run: SampledRun, spike: High) -> Finding:
    signs = _signs(run, spike.step - 1, spike.step, spike=spike.step)
    evidence = _in_order(run, signs) if signs else f"no single layer was out of line{_not_sampled(run, spike.step)}"
    return Finding(
        "note",
        f"{spike.what} {plain(spike.factor)} times its recent median at step {spike.step:,}",
        f"{evidence}; no loss was logged",
        f"{_remedy(run, signs, spike.step - 1)}; to see what it does to the loss: monitor.log(loss=loss) at every step",
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
        sampled = _sampled_steps(run)
        gap = int(np.median(np.diff(sampled))) if len(sampled) > 1 else 1
        if gap > 1:
            return "to see what comes first next time, sample every step: eq.watch(model, optimizer, every=1)"
        return "log which examples are in each batch, to look at those of the step named"
    return _clip(run, before, rise)


def _clip(run: SampledRun, before: int, rise: LossRise | None) -> str:
    step, total = _totals(run, np.full(int(run.taken.first[-1]), True))
    usual = step <= before
    step, total = step[usual][-WINDOW:], total[usual][-WINDOW:]
    if len(total) < _LEAST_USUAL:
        return "to bound what one batch does, clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
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
        f"that is twice the median total gradient norm of the watched parameters over {steps}"
    )


def _lr_remedy(run: SampledRun, before: int) -> str:
    highest = max(float(np.max(rows["lr"][rows["step"] <= before], initial=0.0)) for rows in _groups(run))
    return (
        "if lr was not meant to rise, correct the schedule; to bound it, before optimizer.step(): "
        f'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {short(highest)})'
    )
