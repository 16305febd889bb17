"""Gradients and angles that jump far above their recent level: for a sample or two, or to stay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.loss_rises import level_and_scatter, windows_below
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array

_HIGH = 5.0  # times its recent median
_SCATTERS, _ABOVE = 8, 3  # the same in standard deviations of its log, and over the highest in the window
_TO_STAY = 10  # samples after a jump, nearly all of them high, from which on it counts as lasting
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class GradientJump:
    """A gradient norm, or an angle over its prediction, that jumped far above its recent level.

    Attributes:
        step: of the sample.
        factor: over the median of the samples before; of a lasting jump that of the median of the next samples.
        what: in words.
        until: last step of these next samples, None for a jump that did not last.
        now: of a lasting jump, the last sample of the run over the median before.
    """

    step: int
    factor: float
    what: str
    until: int | None = None
    now: float = math.nan


def gradient_jumps(run: SampledRun) -> list[GradientJump]:
    """Jumps of the total gradient of an optimizer, then those of the angle over its prediction that did not last."""
    columns = run.taken.columns
    optimizers = np.repeat([int(entry.get("optimizer") or 0) for entry in run.entries], run.taken.counts)
    jumps = []
    for optimizer in np.unique(optimizers).tolist():
        step, total = total_gradients(run, optimizers == optimizer)
        jumps += list(_jumps(step, total, "the total gradient norm"))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = columns["angle"] / columns["angle_predicted"]
    known = np.isfinite(ratio) & (ratio > 0)
    step, inverse = np.unique(columns["step"][known], return_inverse=True)
    largest = np.zeros(len(step))
    np.maximum.at(largest, inverse, ratio[known])
    of_angle = _jumps(step, largest, "the largest angle over its prediction")
    return jumps + [jump for jump in of_angle if jump.until is None]


def total_gradients(run: SampledRun, rows: Array | slice = slice(None)) -> tuple[Array, Array]:
    """Total gradient norm at the sampled steps at which the gradients of all these layers were read."""
    step, grad = run.taken.columns["step"][rows], run.taken.columns["grad_norm"][rows]
    known = np.isfinite(grad)
    steps, inverse, counts = np.unique(step[known], return_inverse=True, return_counts=True)
    if not len(steps):
        return steps, np.zeros(0)
    total = np.sqrt(np.bincount(inverse, weights=grad[known] ** 2))
    whole = (counts == counts.max()) & (total > 0)
    return steps[whole], total[whole]


def _jumps(step: Array, values: Array, what: str) -> Iterator[GradientJump]:
    logs = np.log(values)
    for rows, windows in windows_below(logs):
        level, scatter = level_and_scatter(windows)
        rise = logs[rows] - level
        far = (rise > math.log(_HIGH)) & (rise > _SCATTERS * scatter)
        far &= logs[rows] > math.log(_ABOVE) + np.nanmax(windows, axis=1)
        for row, height, usual in zip(rows[far].tolist(), rise[far].tolist(), level[far].tolist(), strict=True):
            next_ones = logs[row : row + 1 + _TO_STAY]
            if len(next_ones) > _TO_STAY and np.mean(next_ones > usual + math.log(_HIGH)) >= _NEARLY_ALL:
                factor, now = _exp(float(np.median(next_ones)) - usual), _exp(float(logs[-1]) - usual)
                yield GradientJump(int(step[row]), factor, what, until=int(step[row + _TO_STAY]), now=now)
            else:
                yield GradientJump(int(step[row]), _exp(height), what)


def _exp(log_factor: float) -> float:
    return math.exp(min(log_factor, 700.0))
