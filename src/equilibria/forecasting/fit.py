"""What the samples of a layer say about its future: L, how it changes, how far single steps scatter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting.observed import Cohort
from equilibria.forecasting.start import Replay, replay

Array = NDArray[np.float64]

_WINDOW_SHARE = 0.5  # of the recorded steps: what was before is the start of training
_MOST_SAMPLES = 400
_BLOCKS = 5  # sub-windows that are fitted by themselves
_SMOOTHING = 20  # samples


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Of one cohort; one entry per layer.

    Attributes:
        window: first and last step of the samples that L is fitted to.
        level: ln L at the end of the window.
        level_error: its standard error, from sub-windows.
        power: of the squared angle in L.
        power_error: its standard error.
        reference: ln of the squared angle that the level belongs to.
        rate: per step, at which L follows.
        drift: of ln L per step, at the end of the window.
        drift_error: its standard error.
        fading: rate per step at which the drift dies away.
        scatter: standard deviation of ln angle from step to step.
        angle_scale: measured over predicted angle.
        size: entries of the weight as its update shows them (Adam), else 1.
        replay: the optimizer's memory.
        validity: why a forecast is wider than usual, in sentences.
    """

    window: tuple[int, int]
    level: Array
    level_error: Array
    power: Array
    power_error: Array
    reference: Array
    rate: Array
    drift: Array
    drift_error: Array
    fading: Array
    scatter: Array
    angle_scale: Array
    size: Array
    replay: Replay
    validity: tuple[tuple[str, ...], ...]


def fit(cohort: Cohort) -> Fit:
    """Fit one cohort to its samples."""
    rows = _window(cohort)
    blocks = np.array_split(rows, _BLOCKS)
    means = np.array([np.nanmean(cohort.drive[each], axis=0) for each in blocks])
    logs = np.log(np.maximum(means, 1e-300))
    level = np.log(np.maximum(np.nanmean(cohort.drive[rows], axis=0), 1e-300))
    error = logs.std(axis=0, ddof=1) / np.sqrt(_BLOCKS)
    now = replay(cohort, _smooth(np.maximum(cohort.drive, 0.05 * cohort.grad_sq)))
    zero = np.zeros(len(cohort.names))
    angles = np.log(np.maximum(cohort.angle[rows], 1e-300))
    return Fit(
        window=(int(cohort.step[rows[0]]), int(cohort.step[rows[-1]])),
        level=level,
        level_error=error,
        power=zero,
        power_error=zero,
        reference=np.log(np.nanmean(cohort.moved_sq[rows] / cohort.norm_sq[rows], axis=0)),
        rate=zero + 0.01,
        drift=zero,
        drift_error=zero,
        fading=zero,
        scatter=np.std(angles - _smooth(angles), axis=0),
        angle_scale=zero + 1,
        size=cohort.entries,
        replay=now,
        validity=((),) * len(cohort.names),
    )


def _window(cohort: Cohort) -> NDArray[np.int64]:
    first = cohort.step[-1] - _WINDOW_SHARE * (cohort.step[-1] - cohort.step[0])
    rows = np.flatnonzero(cohort.step >= first)
    return rows[-_MOST_SAMPLES:]


def _smooth(values: Array) -> Array:
    """Means over the samples around each, fewer at the ends."""
    total = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(np.nan_to_num(values), axis=0)])
    places = np.arange(len(values))
    low = np.maximum(places - _SMOOTHING // 2, 0)
    high = np.minimum(places + _SMOOTHING // 2 + 1, len(values))
    result: Array = (total[high] - total[low]) / (high - low)[:, np.newaxis]
    return result
