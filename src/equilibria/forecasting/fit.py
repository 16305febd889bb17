"""What the samples of a layer say about its future: L, how it changes, how far single steps scatter.

    ln L = level + power * ln(angle^2 / reference) + drift * ln(clock / clock now)

where the angle's part is followed at a rate. The clock is the number of steps where L grows, and the sum of squared
angles where L falls: in the runs that the prior comes from growth went on when lr had fallen, and falling stopped.
Level, power and drift are a linear regression on the sampled steps, with a prior on the last two: where the window
shows no change of lr, the power is the prior's, with the prior's scatter. Layers of one network drift alike, so that
the drift of each is drawn to the mean of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting.doubts import doubts, interpolates
from equilibria.forecasting.observed import Cohort
from equilibria.forecasting.prior import Prior, prior_of
from equilibria.forecasting.start import Replay, replay
from equilibria.theory.rules import AdamL2, AdamW

Array = NDArray[np.float64]

_SKIPPED = 0.5  # of the recorded steps: the start of training is another world
_MOST_SAMPLES = 2_000
_BLOCKS = 12  # means that are fitted: single samples of L scatter by its own size
_SMOOTHING = 20  # samples
_LEAST_SHARE = 0.05  # of N that L is at least, however much gradients turn back
_NO_PRIOR = 10.0
_TINY = 1e-290


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Of one cohort; one entry per layer.

    Attributes:
        window: first and last step of the samples that were fitted.
        level: ln L at the end of the window.
        power: of the squared angle in L.
        drift: of ln L per e-fold of the clock.
        covariance: of these three, layers x 3 x 3.
        reference: ln of the squared angle that the level belongs to.
        rate: per step, at which L follows the angle.
        steps_done: at the end of the record.
        turned: sum of squared angles until then.
        wander: of ln L around the fit, a standard deviation.
        scatter: of single angles around their prediction in the window, a standard deviation of the logarithm.
        norm_scatter: of the norm around a smooth course in the window, the same.
        angle_scale: measured over predicted angle.
        angle_error: standard error of its logarithm.
        size: entries of the weight as its update shows them (Adam).
        size_error: standard error of its logarithm.
        replay: the optimizer's memory.
        validity: why a forecast is wider than usual, in sentences.
    """

    window: tuple[int, int]
    level: Array
    power: Array
    drift: Array
    covariance: Array
    reference: Array
    rate: Array
    steps_done: Array
    turned: Array
    wander: Array
    scatter: Array
    norm_scatter: Array
    angle_scale: Array
    angle_error: Array
    size: Array
    size_error: Array
    replay: Replay
    validity: tuple[tuple[str, ...], ...]


def fit(cohort: Cohort) -> Fit:
    """Fit one cohort to its samples."""
    rows = _window(cohort)
    prior = prior_of(cohort.rule, interpolates=interpolates(cohort, rows))
    speed = _speed(cohort)
    steps, turned = np.broadcast_to((cohort.step + 1.0)[:, np.newaxis], speed.shape), _turned(cohort, speed)
    warmth = _followed(np.log(speed), cohort.step, prior.rate)
    level, power, drift, covariance = _regress(cohort, rows, warmth, np.log([steps, turned]), prior)
    smooth = _smooth(np.maximum(cohort.drive, _LEAST_SHARE * cohort.grad_sq))
    now = replay(cohort, smooth)
    scale, scale_error = _update_size(cohort, rows, now, prior)
    count = len(cohort.names)
    seen = doubts(cohort, rows)
    clock = np.where(drift > 0, steps, turned)
    fitted = np.exp(level + power * (warmth - warmth[-1]) + drift * np.log(clock / clock[-1]))
    beside = replay(cohort, np.where(np.arange(len(smooth))[:, np.newaxis] < rows[0], smooth, fitted))
    return Fit(
        window=(int(cohort.step[rows[0]]), int(cohort.step[rows[-1]])),
        level=level,
        power=power,
        drift=drift,
        covariance=covariance,
        reference=warmth[-1],
        rate=np.full(count, prior.rate),
        steps_done=steps[-1].copy(),
        turned=turned[-1],
        wander=np.hypot(prior.wander, seen.wander),
        scatter=np.hypot(_scatter(cohort, rows, beside, scale) * seen.widening, seen.scatter),
        norm_scatter=_norm_scatter(cohort, rows) * seen.widening,
        angle_scale=scale,
        angle_error=scale_error,
        size=cohort.entries,
        size_error=np.full(count, prior.size_sd),
        replay=now,
        validity=seen.sentences,
    )


def _window(cohort: Cohort) -> NDArray[np.int64]:
    first = cohort.step[0] + _SKIPPED * (cohort.step[-1] - cohort.step[0])
    rows = np.flatnonzero(cohort.step >= first)
    return rows[-_MOST_SAMPLES:]


def _speed(cohort: Cohort) -> Array:
    """Squared angle per step, without its noise; of a step at lr 0 next to nothing."""
    return np.maximum(_smooth(cohort.angle**2), _TINY)


def _turned(cohort: Cohort, speed: Array) -> Array:
    """Sum of squared angles until each sample; steps before the record count as its first samples do."""
    gaps = np.diff(cohort.step, prepend=-1)[:, np.newaxis]
    result: Array = np.cumsum(gaps * speed, axis=0)
    return result


def _followed(values: Array, step: NDArray[np.int64], rate: float) -> Array:
    """What follows ``values`` at a rate per step."""
    found = np.empty_like(values)
    found[0] = values[0]
    keep = np.exp(-rate * np.diff(step))
    for at in range(1, len(values)):
        found[at] = keep[at - 1] * found[at - 1] + (1 - keep[at - 1]) * values[at]
    return found


def _regress(
    cohort: Cohort, rows: NDArray[np.int64], warmth: Array, log_clocks: Array, prior: Prior
) -> tuple[Array, Array, Array, Array]:
    """Level, power and drift of every layer, and their covariance."""
    blocks = np.array_split(rows, min(_BLOCKS, len(rows) // 4))
    least = _LEAST_SHARE * np.array([np.nanmean(cohort.grad_sq[each], axis=0) for each in blocks])
    means = np.array([np.nanmean(cohort.drive[each], axis=0) for each in blocks])
    observed = np.log(np.maximum(np.maximum(means, least), _TINY))
    warm, by_steps, by_turning = (
        np.array([values[each].mean(axis=0) for each in blocks]) - values[-1] for values in (warmth, *log_clocks)
    )
    clock = by_steps
    mean, noise = np.array([0.0, prior.power, prior.drift]), np.full(observed.shape[1], prior.block_sd)
    for spread in (_NO_PRIOR, prior.drift_apart):  # each by itself, then around the mean of all
        design = np.stack([np.ones_like(observed), warm, clock], axis=2).transpose(1, 0, 2)
        precision = np.diag([0.0, prior.power_sd**-2, spread**-2])
        normal = np.einsum("lbi,lbj->lij", design, design) / noise[:, None, None] ** 2 + precision
        right = np.einsum("lbi,bl->li", design, observed) / noise[:, None] ** 2 + precision @ mean
        covariance = np.linalg.inv(normal)
        found = np.einsum("lij,lj->li", covariance, right)
        left = observed.T - np.einsum("lbi,li->lb", design, found)
        noise = np.sqrt((left**2).sum(axis=1) / max(len(blocks) - 2, 1) + 1e-8)
        clock = np.where(found[:, 2] > 0, by_steps, by_turning)
        together = np.average(found[:, 2], weights=1 / covariance[:, 2, 2])
        trust = prior.drift_sd**2 / (prior.drift_sd**2 + prior.drift_shared**2)
        mean[2] = prior.drift + trust * (together - prior.drift)
    covariance[:, 2, 2] += trust * prior.drift_shared**2
    return found[:, 0], found[:, 1], found[:, 2], covariance


def _update_size(cohort: Cohort, rows: NDArray[np.int64], at: Replay, prior: Prior) -> tuple[Array, Array]:
    """Measured over predicted length of the update in the window, drawn to the prior; and the error of its logarithm.

    SGD's is exact, given L.
    """
    if not isinstance(cohort.rule, AdamW | AdamL2):
        return np.ones(len(cohort.names)), np.zeros(len(cohort.names))
    places = np.isin(at.sampled, rows)
    predicted, rows = at.moved_sq[places], at.sampled[places]
    blocks = np.array_split(np.arange(len(rows)), min(_BLOCKS, max(len(rows) // 4, 2)))
    parts = np.array([cohort.moved_sq[rows[each]].sum(axis=0) / predicted[each].sum(axis=0) for each in blocks])
    error = 0.5 * parts.std(axis=0, ddof=1) / np.sqrt(len(blocks))
    found = 0.5 * np.log(cohort.moved_sq[rows].sum(axis=0) / predicted.sum(axis=0))
    weight = prior.angle_sd**2 / (prior.angle_sd**2 + error**2)
    return np.exp(prior.angle + weight * (found - prior.angle)), np.sqrt(weight) * error


def _scatter(cohort: Cohort, rows: NDArray[np.int64], at: Replay, scale: Array) -> Array:
    """Standard deviation of ln(measured / predicted angle) of single steps in the window, L as it was fitted."""
    places = np.isin(at.sampled, rows)
    measured, predicted = cohort.moved_sq[at.sampled[places]], at.moved_sq[places]
    with np.errstate(divide="ignore"):
        off = 0.5 * np.log(measured / predicted) - np.log(scale)
    result: Array = np.sqrt(np.nanmean(np.where(np.isfinite(off), off, np.nan) ** 2, axis=0))
    return result


def _norm_scatter(cohort: Cohort, rows: NDArray[np.int64]) -> Array:
    """Standard deviation of ln ||w|| in the window around the parabola through it."""
    time = np.linspace(-1, 1, len(rows))
    design = np.stack([np.ones_like(time), time, time**2], axis=1)
    logs = 0.5 * np.log(cohort.norm_sq[rows])
    left = logs - design @ np.linalg.lstsq(design, logs, rcond=None)[0]
    return np.asarray(left.std(axis=0))


def _smooth(values: Array) -> Array:
    """Means over the samples around each, fewer at the ends."""
    total = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(np.nan_to_num(values), axis=0)])
    places = np.arange(len(values))
    low = np.maximum(places - _SMOOTHING // 2, 0)
    high = np.minimum(places + _SMOOTHING // 2 + 1, len(values))
    result: Array = (total[high] - total[low]) / (high - low)[:, np.newaxis]
    return result
