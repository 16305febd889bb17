"""Rises of a logged loss far above its recent level, and the windows of values that show what is usual."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.series import Array

WINDOW, LEAST = 100, 30  # values before a spike that make its level: at most, at least
MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
TO_BE_BACK = 5  # values whose median is looked at to see whether a loss is back
_SCATTERS, _IF_IT_STAYS = 6, 10  # robust standard deviations from the level to a spike of the loss
_ABOVE_HIGHEST = 2  # times the highest rise in the window; on a log scale, too, unless the loss stays up that far
_LEAST_RISE = 0.1  # of the level
_BACK = 3  # robust standard deviations above the level within which a loss is back
_PART = 4096  # values that are searched at a time


@dataclass(frozen=True, slots=True)
class LossRise:
    """A loss far above its recent level.

    Attributes:
        before: step of the last value at the level.
        first: step of the first value above it.
        peak_step: step of the highest value.
        last: step at which it was back, or of the last value.
        level: median of the logged values since the rise before it, at most 100.
        values: how many these are.
        peak: the highest value.
        size: rise to the first value, in robust standard deviations.
        beyond: the same over the highest rise before; on a log scale for a positive loss.
        lasts: values from the first one to the one that is back, or to the end.
        back: whether the loss came back to its level.
        later: values logged after the first.
        now: median of the last of them.
    """

    before: int
    first: int
    peak_step: int
    last: int
    level: float
    values: int
    peak: float
    size: float
    beyond: float
    lasts: int
    back: bool
    later: int
    now: float


def loss_rises(step: Array, values: Array) -> Iterator[LossRise]:
    """The rises of one loss, in the order of its steps; values that are not finite are left out."""
    finite = np.isfinite(values)
    step, values = step[finite], values[finite]
    if len(values) <= LEAST:
        return
    usual, resume = values.copy(), 0
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, TO_BE_BACK), axis=1)
    while (found := _next_far_above(usual, resume)) is not None:
        row, level, scatter, beyond = found
        before = values[max(row - WINDOW, resume - 1, 0) : row]
        ends = np.flatnonzero(np.maximum(medians, values[: len(medians)])[row + 1 :] <= level + _BACK * scatter)
        back = len(ends) > 0
        end = row + 1 + int(ends[0]) if back else len(values) - 1
        peak = row + int(np.argmax(values[row : end + 1]))
        yield LossRise(
            before=int(step[row - 1]),
            first=int(step[row]),
            peak_step=int(step[peak]),
            last=int(step[end]),
            level=float(np.median(before)),
            values=len(before),
            peak=float(values[peak]),
            size=float((values[row] - level) / scatter),
            beyond=beyond,
            lasts=end - row,
            back=back,
            later=len(values) - 1 - row,
            now=float(np.median(values[max(peak, len(values) - TO_BE_BACK) :])),
        )
        resume = end + 1
        if back:
            # The values before it take its place: it would hide the next rises, as long as it is in their window.
            usual[row:end] = np.resize(usual[max(row - WINDOW, 0) : row][::-1], end - row)


def _next_far_above(values: Array, begin: int) -> tuple[int, float, float, float] | None:
    """The first row from ``begin`` on that `_far_above` finds; the search ends there."""
    for first in range(begin, len(values), _PART):
        offset = max(first - WINDOW, 0)
        for row, *numbers in _far_above(values[offset : first + _PART + TO_BE_BACK]):
            if first <= offset + row < first + _PART:
                level, scatter, beyond = numbers
                return offset + row, level, scatter, beyond
    return None


def _far_above(values: Array) -> Iterator[tuple[int, float, float, float]]:
    """The rows far above the values before them: with level and scatter of these, and the rise over their highest."""
    for rows, windows in windows_below(values):
        level, scatter = level_and_scatter(windows)
        highest = np.nanmax(windows, axis=1)
        rise = values[rows] - level
        far = (scatter > 0) & (rise > _SCATTERS * scatter) & (rise > _LEAST_RISE * np.abs(level))
        beyond = rise / np.where(highest > level, highest - level, np.inf)
        far &= beyond > _ABOVE_HIGHEST
        positive = np.nanmin(windows, axis=1) > 0
        ratios = (np.where(far & positive, upper / level, math.e) for upper in (values[rows], highest))
        beyond = np.where(far & positive, np.divide(*(np.log(ratio) for ratio in ratios)), beyond)
        later = np.concatenate([values, np.full(TO_BE_BACK, -np.inf)])
        later = np.lib.stride_tricks.sliding_window_view(later, TO_BE_BACK)[rows + 1]
        stays = np.median(later, axis=1) > highest
        # Of fewer values the highest is lower: half the window must be exceeded twice as far.
        limit = _ABOVE_HIGHEST * WINDOW / np.count_nonzero(np.isfinite(windows), axis=1)
        far &= (stays & (rise > _IF_IT_STAYS * scatter)) | (beyond > limit)
        yield from zip(*(column[far].tolist() for column in (rows, level, scatter, beyond)), strict=True)


def windows_below(values: Array, *, most: int = 10_000) -> Iterator[tuple[Array, Array]]:
    """The rows above all values in the window before them, with these windows: rows x window, NaN where too early.

    Args:
        values: without NaN.
        most: rows at a time; they are few unless the values rise all the time.
    """
    if len(values) <= LEAST:
        return
    padded = np.concatenate([np.full(WINDOW, np.nan), values[:-1]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    highest = np.concatenate([np.full(WINDOW, -np.inf), values[:-1]])
    highest = np.lib.stride_tricks.sliding_window_view(highest, WINDOW).max(axis=1)
    rows = np.flatnonzero(values > highest)
    rows = rows[rows >= LEAST]
    for begin in range(0, len(rows), most):
        part = rows[begin : begin + most]
        yield part, windows[part]


def level_and_scatter(windows: Array) -> tuple[Array, Array]:
    """Median, and the larger of two robust standard deviations: around it, and from one value to the next."""
    level = np.nanmedian(windows, axis=1)
    around = np.nanmedian(np.abs(windows - level[:, None]), axis=1)
    steps = np.nanmedian(np.abs(np.diff(windows, axis=1)), axis=1) / math.sqrt(2)
    return level, MAD * np.maximum(around, steps)
