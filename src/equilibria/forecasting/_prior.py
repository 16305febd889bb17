"""What other trainings say about L: the prior of a fit, and when a record calls for wider bands than usual."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting._layers import Cohort
from equilibria.theory._reals import Array
from equilibria.theory.rules import AdamL2, AdamW

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prior:
    """Means and standard deviations over layers, from other trainings.

    Attributes:
        power: power of the squared angle in L.
        power_sd: its scatter.
        drift: change of ln L per e-fold of the steps done.
        drift_sd: its scatter over networks.
        drift_shared: error that all layers of a network share when the drift is read from a window.
        drift_apart: its scatter over the layers of a network.
        rate: rate per step at which L follows the angle.
        wander: scatter of ln L around the fit over the rest of a run.
        block_sd: scatter of ln L over blocks of samples, as a first guess.
        angle: ln of measured over predicted angle.
        angle_sd: its scatter.
        size_sd: scatter of ln of the mean square update that makes the norm grow (Adam).
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


# From 19 trainings that are in no reported result: residual networks with BatchNorm after every convolution, each
# forecast from its first 300 steps.
# - Digits, 30 % fresh label noise, 1,500 steps. Seed 100, width 8: SGD with momentum (lr 0.1, wd 5e-3) and AdamW (lr
#   5e-3, wd 0.5), constant, lr / 10, cosine, warm-up and cosine. Seed 101, width 16: lr 0.05, wd 5e-3 and AdamW lr
#   2e-3, wd 1, lr / 5 and the last two. Seed 102: SGD without momentum, lr 0.5, lr / 10.
# - CIFAR-10 pooled to 16x16, width 8, 1,000 steps, seed 100: both optimizers, lr / 10 and cosine.
# Regressions over whole runs gave a power of 0.02 +- 0.03 on digits and 0.05 +- 0.06 on CIFAR-10, a drift of -0.3 +-
# 0.26 and of 0.8 +- 0.3. The mean of the drift is kept near 0: networks differ more than two data sets can show.
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

# Near interpolation L falls with the noise. From 6 trainings that are in no reported result: digits without label
# noise, 1,500 steps, lr / 10 or / 5 at step 700, perceptrons and convolutional networks of two layers with BatchNorm,
# seeds 200 to 205, SGD with momentum and AdamW: ln L fell by 0.2 to 2.8 at the drop (with 30 % label noise by 0.0 to
# 0.14).
_POWER_NEAR_INTERPOLATION, _POWER_SD_NEAR_INTERPOLATION = 0.35, 0.25


def prior_of(cohort: Cohort, rows: Rows) -> Prior:
    """The prior for the optimizer of a cohort, and for a network near interpolation if the samples show one.

    Args:
        cohort: the layers.
        rows: the fitted samples.
    """
    prior = _ADAM if isinstance(cohort.rule, AdamW | AdamL2) else _SGD
    if not _interpolates(cohort, rows):
        return prior
    return replace(prior, power=_POWER_NEAR_INTERPOLATION, power_sd=_POWER_SD_NEAR_INTERPOLATION)


# ---- wider bands

ENOUGH_SAMPLES = 60  # fitted; fewer leave it open how far single steps scatter
# Mean of ||g||^4 over the square of the mean of ||g||^2. In the trainings of the prior 1.04 to 1.15 in the median layer
# of a network and up to 1.9 in its first layer; 1.3 to 3 and up to 9 on digits without label noise, which networks
# memorise.
_BURSTY = 1.6
_INTERPOLATES = 1.25  # in the median layer
_BURSTY_LEVEL_SD = 0.6  # scatter of ln L in such trainings, from one 50 steps to the next
NEAR_INTERPOLATION = (
    "the gradient comes in bursts: near interpolation L jumps about, falls with lr by a factor between 1 and 20, and "
    "the angle with it"
)


@dataclass(frozen=True, slots=True, eq=False)
class Widening:
    """How much wider than usual the bands of a fit must be; one entry per layer.

    Attributes:
        level_sd: standard deviation to add to that of ln L.
        angle_sd: standard deviation to add to that of single ln angles.
        factor: factor of the scatter of single angles and of the norm.
        reasons: the reasons, in sentences; empty for usual bands.
    """

    level_sd: Array
    angle_sd: Array
    factor: Array
    reasons: tuple[tuple[str, ...], ...]


def widening_of(cohort: Cohort, rows: Rows) -> Widening:
    """Widen for gradients that come in bursts, and for few samples.

    Args:
        cohort: the layers.
        rows: the fitted samples.
    """
    bursty = (_burstiness(cohort, rows) > _BURSTY) | _interpolates(cohort, rows)
    few = len(rows) < ENOUGH_SAMPLES
    burst_sd = np.where(bursty, _BURSTY_LEVEL_SD, 0.0)
    too_few = f"{len(rows)} samples were fitted; with {ENOUGH_SAMPLES} or more the band is narrower"
    return Widening(
        level_sd=np.hypot(burst_sd, _level_error(cohort, rows) if few else 0.0),
        angle_sd=burst_sd / 2,
        factor=np.full(len(cohort.names), 1 + 5 / len(rows) if few else 1.0),
        reasons=tuple((NEAR_INTERPOLATION,) * bool(is_bursty) + (too_few,) * few for is_bursty in bursty),
    )


def _interpolates(cohort: Cohort, rows: Rows) -> bool:
    """Whether the network is about to memorise its data: few examples of a batch still have a gradient."""
    return bool(np.median(_burstiness(cohort, rows)) > _INTERPOLATES)


def _burstiness(cohort: Cohort, rows: Rows) -> Array:
    """Mean of ||g||^4 over the square of the mean of ||g||^2, of every layer."""
    noise = cohort.plain_unit_grad_sq[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.nanmean(noise**2, axis=0) / np.nanmean(noise, axis=0) ** 2
    return result


def _level_error(cohort: Cohort, rows: Rows) -> Array:
    """Standard error of ln L from few samples, taken as independent."""
    values = cohort.unit_grad_sq[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.nanstd(values, axis=0) / np.abs(np.nanmean(values, axis=0)) / np.sqrt(len(rows))
    return np.minimum(np.nan_to_num(result, nan=1.0), 1.0)
