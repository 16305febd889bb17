"""The fit of matrices that are not scale-invariant: their growth gain, and the size of their updates.

    change of ln ||w||^2 = -2 eps + G angle^2,      angle = lr u / ||w||

per step, with eps the decay in force (`theory.gain`). G and u are measured over the last eighth of the steps. After
that G goes as angle^-0.25, and u changes only under AdamW: kappa = (1+b1)/(1-b1) mean((m/sqrt v)^2) relaxes towards 1
in proportion to sqrt(lr), but by no more than 30 or 40 %, because a matrix of rarely used rows has a small kappa for
good. An update of Muon or Lion has one size. A G below 0 pulls no more than it did, or norms would vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.diagnosis.budget import BATCHES, KNOWN, LEAST_STEPS
from equilibria.forecasting._layers import Cohort
from equilibria.theory._reals import Array
from equilibria.theory.gain import growth_gain, measured_gain
from equilibria.theory.identified import Identified
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import AdamL2, AdamW, Lion, Rule

GAIN_FALL = 0.25  # power of 1 / angle in G
RELAXING = 0.5  # power of lr in kappa - 1
_LEAST_RELAXED, _MOST_RELAXED = 0.7, 1.4  # of kappa at lr 0, over kappa now
_SHARE = 0.12  # of the steps so far, which are fitted
_LEAST_SAMPLES = 2 * BATCHES + 1

# Standard deviations after the record, so that the bands of 16 runs of small transformers hold 90 %.
_GAIN_WANDER = 0.2  # of G, over G or half of F, whichever is larger
_FALL_WANDER = 0.7  # of G, over the same, per e-fold that the angle falls, if a step scales every entry by itself
_SIZE_WANDER = 0.02  # of ln u, per e-fold of the steps done


@dataclass(frozen=True, slots=True, eq=False)
class GainFit:
    """The fit of one cohort by the law of the measured gain; one entry per layer.

    Attributes:
        window: first and last step of the fitted samples.
        gain: G over the window.
        gain_error: its standard deviation after the record: its standard error, and its wander.
        fall_wander: standard deviation of the change of G per e-fold that the angle falls.
        balanced: whether G is above 0 by two standard errors: otherwise there is no equilibrium.
        angle_sq: mean of the squared angle over the window, which G belongs to.
        size_sq: u^2, mean of (angle ||w||^p / lr^a)^2 over the window.
        relaxed: u^2 at lr 0 over u^2 now.
        size_wander: standard deviation of the change of ln u per e-fold of the steps done.
        norm_power: p.
        lr_power: a, 1 for all closed laws.
        lr: mean over the window.
        in_force: the decay in force over lr x wd.
        norm_sq: ||w||^2 after the last sampled step.
        steps_done: at the end of the record.
        scatter: standard deviation of ln of single angles around their course in the window.
        norm_scatter: 0: norms of matrices do not scatter.
        validity: why the bands are wider than usual, in sentences.
    """

    window: tuple[int, int]
    gain: Array
    gain_error: Array
    fall_wander: Array
    balanced: NDArray[np.bool_]
    angle_sq: Array
    size_sq: Array
    relaxed: Array
    size_wander: float
    norm_power: float
    lr_power: float
    lr: float
    in_force: Array
    norm_sq: Array
    steps_done: float
    scatter: Array
    norm_scatter: Array
    validity: tuple[tuple[str, ...], ...]


def fit_gain(cohort: Cohort) -> GainFit:
    """Fit one cohort of matrices to its last samples."""
    rows = _window(cohort)
    power, lr_power = _powers(cohort.rule)
    step, lr = cohort.step[rows], cohort.lr[rows, np.newaxis]
    angle_sq, norm_sq = cohort.angle[rows] ** 2, cohort.norm_sq[rows]
    size_sq = angle_sq * norm_sq**power / lr ** (2 * lr_power)
    mean_size_sq = size_sq.mean(axis=0)
    gain, error = _gain(cohort, rows)
    unit = np.maximum(np.abs(gain), growth_gain(cohort.rule) / 2)
    return GainFit(
        window=(int(step[0]), int(step[-1])),
        gain=gain,
        gain_error=np.hypot(error, _GAIN_WANDER * unit),
        fall_wander=_FALL_WANDER * unit * isinstance(cohort.rule, AdamW | AdamL2 | Lion),
        balanced=gain > KNOWN * error,
        angle_sq=angle_sq.mean(axis=0),
        size_sq=mean_size_sq,
        relaxed=_relaxed(cohort, mean_size_sq),
        size_wander=_SIZE_WANDER,
        norm_power=power,
        lr_power=lr_power,
        lr=float(lr.mean()),
        in_force=_in_force(cohort, rows),
        norm_sq=_after(cohort, gain),
        steps_done=float(step[-1] + 1),
        scatter=_scatter(step, size_sq),
        norm_scatter=np.zeros(len(cohort.names)),
        validity=((),) * len(cohort.names),
    )


def _window(cohort: Cohort) -> NDArray[np.int64]:
    steps = max(_SHARE * (cohort.step[-1] + 1), BATCHES * LEAST_STEPS)
    first = min(int(np.searchsorted(cohort.step, cohort.step[-1] - steps)), len(cohort.step) - _LEAST_SAMPLES)
    return np.arange(first, len(cohort.step))


def _powers(rule: Rule) -> tuple[float, float]:
    """Powers of 1 / ||w|| and of lr in the angle."""
    if isinstance(rule, Identified):
        return 1 - rule.step.radial, rule.step.lr
    return float(norm_power(rule)), 1.0


def _gain(cohort: Cohort, rows: NDArray[np.int64]) -> tuple[Array, Array]:
    """G over the window and its standard error, from batches; stretches in which a weight was changed do not count."""
    gap = np.diff(cohort.step[rows])[:, np.newaxis]
    decay, turned = (gap * (values[rows[1:]] + values[rows[:-1]]) / 2 for values in (cohort.decay, cohort.angle**2))
    growth = np.diff(np.log(cohort.norm_sq[rows]), axis=0)
    counts = ~cohort.changed[rows[1:]]
    starts = np.arange(BATCHES) * len(gap) // BATCHES
    growth, decay, turned = (np.add.reduceat(np.where(counts, part, 0.0), starts) for part in (growth, decay, turned))
    gain = measured_gain(growth.sum(axis=0), decay=decay.sum(axis=0), angle_sq=turned.sum(axis=0))
    residuals = growth + 2 * decay - gain * turned
    error = np.sqrt(BATCHES / (BATCHES - 1) * np.sum(residuals**2, axis=0)) / turned.sum(axis=0)
    return gain, error


def _relaxed(cohort: Cohort, size_sq: Array) -> Array:
    """u^2 at lr 0 over u^2 now: kappa relaxes towards 1, within limits."""
    if not isinstance(cohort.rule, AdamW | AdamL2):
        return np.ones_like(size_sq)
    known = cohort.entries > 0  # a log of another tool may not say how many there are
    kappa = size_sq / np.where(known, cohort.entries, 1.0) * growth_gain(cohort.rule)
    return np.where(known, np.clip(1 / kappa, _LEAST_RELAXED, _MOST_RELAXED), 1.0)


def _in_force(cohort: Cohort, rows: NDArray[np.int64]) -> Array:
    nominal = (cohort.lr * cohort.weight_decay)[rows]
    return np.asarray(cohort.decay[rows].mean(axis=0) / nominal.mean())


def _after(cohort: Cohort, gain: Array) -> Array:
    """||w||^2 after the last sampled step."""
    growth = -2 * cohort.decay[-1] + gain * cohort.angle[-1] ** 2
    return np.asarray(cohort.norm_sq[-1] * np.exp(growth))


def _scatter(step: NDArray[np.int64], size_sq: Array) -> Array:
    """Standard deviation of the logarithm of single sizes around a line through them."""
    time = np.linspace(-1, 1, len(step))
    design = np.stack([np.ones_like(time), time], axis=1)
    logs = 0.5 * np.log(np.maximum(size_sq, 1e-290))
    residual = logs - design @ np.linalg.lstsq(design, logs, rcond=None)[0]
    return np.asarray(residual.std(axis=0, ddof=2))
