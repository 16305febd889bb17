"""What the samples of a layer say about its future: L, how it changes, how far single steps scatter.

    ln L = level + power * ln(angle^2 / reference) + drift * ln(clock / clock now)

where the angle's part is followed at a rate. The clock is the number of steps where L grows, and the sum of squared
angles where L falls: in the runs that the prior comes from growth went on when lr had fallen, and falling stopped.
Level, power and drift are a linear regression on the sampled steps, with a prior on the last two: where the window
shows no change of lr, the power is the prior's, with the prior's scatter. Layers of one network drift alike, so that
the drift of each is drawn to the mean of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting._observed import Cohort, ForecastRule, Steps
from equilibria.forecasting._trust import doubts, interpolates
from equilibria.theory.moments import adam_step
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW
from equilibria.theory.states import step_of


@dataclass(frozen=True, slots=True)
class Prior:
    """Means and standard deviations over layers.

    Attributes:
        power: of the squared angle in L.
        power_sd: its scatter.
        drift: of ln L per e-fold of the steps done.
        drift_sd: its scatter over networks.
        drift_shared: what all layers of a network are off by when it is read from a window.
        drift_apart: its scatter over the layers of a network.
        rate: per step, at which L follows the angle.
        wander: of ln L around what the fit says, for as long as one looks.
        block_sd: of ln L of a block of samples, where to begin.
        angle: ln of measured over predicted angle.
        angle_sd: its scatter.
        size_sd: of ln of the mean square update that makes the norm grow (Adam).
    """

    power: float
    power_sd: float
    drift: float
    drift_sd: float
    drift_shared: float
    drift_apart: float
    rate: float
    wander: float
    block_sd: float
    angle: float
    angle_sd: float
    size_sd: float


# From 19 trainings that no reported test uses: residual networks with BatchNorm behind every convolution, each forecast
# from its first 300 steps.
# - Digits, 30 % fresh label noise, 1,500 steps. Seed 100, width 8: SGD with momentum (lr 0.1, wd 5e-3) and AdamW (lr
#   5e-3, wd 0.5), constant, lr / 10, cosine, warm-up and cosine. Seed 101, width 16: lr 0.05, wd 5e-3 and AdamW lr
#   2e-3, wd 1, lr / 5 and the last two. Seed 102: SGD without momentum, lr 0.5, lr / 10.
# - CIFAR-10 pooled to 16x16, width 8, 1,000 steps, seed 100: both optimizers, lr / 10 and cosine.
# Regressions over whole runs gave a power of 0.02 +- 0.03 on digits and 0.05 +- 0.06 on CIFAR-10, a drift of -0.3 +-
# 0.26 and of 0.8 +- 0.3. The mean of the drift is kept near 0: networks differ more than two data sets can say.
_SGD = Prior(
    power=0.015,
    power_sd=0.05,
    drift=-0.1,
    drift_sd=0.5,
    drift_shared=0.35,
    drift_apart=0.25,
    rate=0.05,
    wander=0.15,
    block_sd=0.15,
    angle=0.0,
    angle_sd=0.0,
    size_sd=0.0,
)
# Adam's update is 6 % shorter in the mean square than independent gradients would make it.
_ADAM = replace(_SGD, angle=-0.03, angle_sd=0.015, size_sd=0.08)

# Near interpolation L falls with the noise. From 6 trainings that no reported test uses: digits without label noise,
# 1,500 steps, lr / 10 or / 5 at step 700, perceptrons and convolutional networks of two layers with BatchNorm, seeds
# 200 to 205, SGD with momentum and AdamW: ln L fell by 0.2 to 2.8 at the drop (with 30 % label noise by 0.0 to 0.14).
_POWER, _POWER_SD = 0.35, 0.25


def prior_of(rule: ForecastRule, *, interpolates: bool = False) -> Prior:
    """The prior of an optimizer, and of a network that is about to know its data by heart."""
    found = _ADAM if isinstance(rule, AdamW | AdamL2) else _SGD
    return replace(found, power=_POWER, power_sd=_POWER_SD) if interpolates else found


Array = NDArray[np.float64]

_MEMORIES = 8  # lengths of the optimizer's memory that are gone through: e^-8 of what was before is left
_MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The recursion beside the last samples.

    Attributes:
        norm_sq: ||w||^2 after the last sampled step, one entry per layer, like the three below.
        radial: <w, buffer>.
        buffer_sq: ||buffer||^2.
        second: second moment per entry (Adam), else 0.
        steps_done: optimizer steps taken.
        sampled: places of the samples that were gone through.
        moved_sq: ||w' - w||^2 by the recursion at these samples.
    """

    norm_sq: Array
    radial: Array
    buffer_sq: Array
    second: Array
    steps_done: float
    sampled: NDArray[np.int64]
    moved_sq: Array


def replay(cohort: Cohort, smooth_drive: Array) -> Replay:
    """Go through the last steps of a record.

    Args:
        cohort: the layers.
        smooth_drive: L at every sample, samples x layers, without its noise.
    """
    rule = cohort.rule
    length = max(1 / (1 - each) for each in (rule.betas if isinstance(rule, AdamW | AdamL2) else (_momentum(rule),)))
    last = int(cohort.step[-1])
    first = max(int(cohort.step[0]), last - min(round(_MEMORIES * length), _MOST_STEPS))
    steps = np.arange(first, last + 1, dtype=np.int64)
    norm_sq = _between(steps, cohort.step, cohort.norm_sq)
    drive = _between(steps, cohort.step, smooth_drive)
    held = np.searchsorted(cohort.step, steps, side="right") - 1
    p, q, r, v, moved = _run(cohort, steps, held, norm_sq, drive)
    sampled = np.flatnonzero(cohort.step >= first)
    return Replay(p, q, r, v, float(last + 1), sampled, moved[cohort.step[sampled] - first])


def _momentum(rule: object) -> float:
    assert isinstance(rule, SGD | SGDW)
    return rule.momentum


def _between(steps: Steps, sampled: Steps, values: Array) -> Array:
    """Values at all steps, straight in their logarithm from sample to sample."""
    logs = np.log(np.maximum(values, 1e-290))
    result: Array = np.exp(np.stack([np.interp(steps, sampled, column) for column in logs.T], axis=1))
    return result


def _run(
    cohort: Cohort, steps: Steps, held: Steps, norm_sq: Array, drive: Array
) -> tuple[Array, Array, Array, Array, Array]:
    rule, fresh = cohort.rule, steps[0] == 0
    lr, wd, momentum = cohort.lr[held], cohort.weight_decay[held], cohort.momentum[held]
    q = np.zeros_like(norm_sq[0])
    grad_sq = drive[0] / norm_sq[0]
    if isinstance(rule, SGD | SGDW):
        a = rule.momentum
        r, v = (0 * q if fresh else grad_sq / (1 - a * a)), 0 * q
    else:
        b1 = rule.betas[0]
        r, v = (0 * q if fresh else grad_sq * (1 - b1) / (1 + b1)), (0 * q if fresh else grad_sq / cohort.entries)
    moved = np.empty_like(norm_sq)
    for at in range(len(steps)):
        p = norm_sq[at]
        if isinstance(rule, SGD | SGDW):
            step, *settings = step_of(rule, lr[at], wd[at], np.nan_to_num(momentum[at]))
            p, q, r, moved[at] = step(p, q, r, drive[at] / p, *settings)
        else:
            p, q, r, v, moved[at] = _adam(rule, cohort.entries, float(steps[at]), p, q, r, v, drive[at], lr[at], wd[at])
    return p, q, r, v, moved


def _adam(
    rule: AdamW | AdamL2,
    entries: Array,
    done: float,
    p: Array,
    q: Array,
    r: Array,
    v: Array,
    drive: Array,
    lr: float,
    wd: float,
) -> tuple[Array, Array, Array, Array, Array]:
    b1, b2 = rule.betas
    lost, coupled = (lr * wd, 0.0) if isinstance(rule, AdamW) else (0.0, wd)
    step_size = lr * math.sqrt(1 - b2 ** (done + 1)) / (1 - b1 ** (done + 1))
    return adam_step(p, q, r, v, drive, (1 - b2) / entries, step_size, lost, coupled, b1, b2)


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
