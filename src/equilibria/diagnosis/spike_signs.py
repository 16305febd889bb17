"""The signs of a spike: what the samples around it show out of line, in the order of time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equilibria.diagnosis.loss_rises import WINDOW, LossRise
from equilibria.diagnosis.lr_excursions import CHANGED, SAME, Excursion, excursions
from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array
from equilibria.findings import joined, plain
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES

_OUT_OF_LINE = 2.0  # times its recent median: a gradient or an angle of one layer, around a spike
LEAST_USUAL = 10  # samples of a layer that show what is usual
STEPS_BEFORE, _SAMPLES_BEFORE = 10, 2  # before a spike, in which its first sign is looked for
_BEYOND = 1.5  # times the highest usual rise, on a log scale; at the step of the spike itself 1
_NOT_BY_CHANCE = 0.1  # share of the layers that are above their highest usual value at the step of the spike
_BEFORE = 0.25  # the same at the other steps: there are many, and at each a few layers have large gradients by chance
_STEEP = 3  # times the change at the neighbouring samples: a warm-up is steep, but no jump
_ROUNDING = 1e-6  # relative difference of two learning rates that are the same


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


def signs_around(run: SampledRun, before: int, last: int, *, spike: int | None = None) -> list[Sign]:
    """The first sign of each kind.

    Args:
        run: the run.
        before: the last step before the event.
        last: the last step at which to look for its signs.
        spike: the step at which a loss or a gradient was seen to be high.
    """
    sampled = sampled_steps(run)
    around = sampled[(sampled >= before - 10 * WINDOW) & (sampled <= last)]
    gap = int(np.median(np.diff(around))) if len(around) > 1 else 1
    low = before - max(STEPS_BEFORE, _SAMPLES_BEFORE * gap)
    signs = [*_lr_signs(run, low, last), *_layer_signs(run, low, last, spike)]
    return sorted(signs, key=lambda sign: sign.order)


def sampled_steps(run: SampledRun) -> Array:
    """The sampled steps that were taken, each once."""
    return np.unique(run.taken.columns["step"])


def _lr_signs(run: SampledRun, low: int, high: int) -> list[Sign]:
    """The first rise of lr after step ``low`` that may have begun before step ``high``."""
    rises = []
    for rows in lr_groups(run):
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
    for excursion in lr_excursions(run):
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
        if begin - base < LEAST_USUAL:
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
        for step in list(signs):
            if len(signs[step]) < (_NOT_BY_CHANCE if step == spike else _BEFORE) * examined:
                del signs[step]
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
    if np.count_nonzero(np.isfinite(logs[:usual])) < LEAST_USUAL:
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


@dataclass(frozen=True, slots=True)
class LrCourse:
    """lr in the samples around a spike, of the parameter group in which it moved most.

    Attributes:
        text: its course in words.
        is_smooth: whether it never moved by more than a tenth from one sample to the next.
    """

    text: str
    is_smooth: bool


def lr_course(run: SampledRun, low: int, high: int) -> LrCourse:
    """The course of lr in the samples of steps ``low`` to ``high``."""
    courses = []
    for rows in lr_groups(run):
        inside = (rows["step"] >= low) & (rows["step"] <= high)
        step, lr = rows["step"][inside], rows["lr"][inside]
        if len(lr) and np.isfinite(lr).all():
            courses.append((float(np.ptp(lr) / np.max(lr)), step, lr))
    if not courses:
        return LrCourse("no lr is known there", is_smooth=False)
    moved, step, lr = max(courses, key=lambda course: course[0])
    steps = f"over the samples of steps {int(step[0]):,}-{int(step[-1]):,}"
    if moved <= _ROUNDING:
        return LrCourse(f"lr was unchanged {steps}", is_smooth=True)
    change = np.diff(np.log(lr))
    row = int(np.argmax(np.abs(change)))
    if abs(change[row]) <= -math.log1p(-SAME):
        return LrCourse(f"lr went from {three_digits(lr[0])} to {three_digits(lr[-1])} {steps}", is_smooth=True)
    factor = plain(math.exp(abs(change[row])), digits=3)
    verb = "multiplied" if change[row] > 0 else "divided"
    return LrCourse(f"lr was {verb} by {factor} {_when(int(step[row]), int(step[row + 1]))}", is_smooth=False)


def lr_groups(run: SampledRun) -> list[Mapping[str, Array]]:
    """The samples of one layer of every parameter group."""
    first: dict[tuple[object, object], int] = {}
    for position in np.flatnonzero(run.taken.counts > 0).tolist():
        entry = run.entries[position]
        first.setdefault((entry.get("optimizer"), entry.get("group")), position)
    return [run.taken.of(position) for position in first.values()]


def lr_excursions(run: SampledRun) -> list[Excursion]:
    """The excursions of lr in every parameter group."""
    return [excursion for rows in lr_groups(run) for excursion in excursions(rows)]


def _when(before: int, step: int) -> str:
    """When a setting changed, as far as the samples show."""
    return f"at step {step:,}" if step - before <= 1 else f"between the samples at steps {before:,} and {step:,}"
