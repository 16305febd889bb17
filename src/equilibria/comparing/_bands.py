"""The band in which a run's numbers should lie, from earlier runs: how far one more such run may be off by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

FLOOR = 0.05  # a smaller change of an angle or norm is of no consequence
CHANCE = 1e-3  # of any departure in a run that is like the earlier ones, if runs scatter as normal numbers do
_LARGEST_PRIOR = 1e3  # degrees of freedom from which scatters count as equal


@dataclass(frozen=True, slots=True, eq=False)
class Departures:
    """How far a run lies from the runs before it, in natural logarithms; all arrays have one entry per number.

    Attributes:
        common: the median over the layers of the distance from the mean of the earlier runs.
        common_limit: how far it may lie; beyond it the run is out of its band.
        single: each layer's distance beyond the common one; the layers are the last axis.
        single_limit: how far it may lie.
    """

    common: Array
    common_limit: Array
    single: Array
    single_limit: Array


def departures(run: Array, earlier: Array) -> Departures:
    """Compare the logarithms of a run's numbers with those of at least three earlier runs.

    What all layers share and what one layer does alone are judged apart: seeds move all layers of a run together. The
    scatter of every number is shrunk towards that of the others (Smyth 2004, moderated t), since a few runs know it
    badly; limits are prediction limits of Student's t, shared out (Bonferroni) such that a run like the others is out
    of any of them with a probability of `CHANCE` at most. No limit is tighter than `FLOOR`.

    Args:
        run: one entry per number, the layers as the last axis; NaN where unknown.
        earlier: the same of every earlier run, as the first axis.
    """
    count = len(earlier)
    centre = earlier.mean(axis=0)
    offsets, offset = earlier - centre, run - centre
    shared, common = _median(offsets), _median(offset)
    alone, single = offsets - shared[..., None], offset - common[..., None]
    wider = np.sqrt(1 + 1 / count)
    common_limit = _limit(np.sum(shared**2, axis=0) / (count - 1), count - 1, common.size) * wider
    single_limit = _limit(np.sum(alone**2, axis=0) / (count - 1), count - 1, single.size) * wider
    floor = np.log1p(FLOOR)
    return Departures(common, np.maximum(common_limit, floor), single, np.maximum(single_limit, floor))


def unusual_count(count: int, earlier: Array) -> bool:
    """Whether an event happens more often than in earlier runs, beyond `CHANCE`: Poisson with a Gamma prior (Jeffreys).

    Example:
        >>> unusual_count(1, np.zeros(10)), unusual_count(3, np.zeros(10)), unusual_count(4, np.full(10, 3.0))
        (False, True, False)
    """
    runs = len(earlier)
    return bool(stats.nbinom.sf(count - 1, earlier.sum() + 0.5, runs / (runs + 1)) < CHANCE)


def _median(values: Array) -> Array:
    known = np.isfinite(values).any(axis=-1, keepdims=True)
    return np.asarray(np.nanmedian(np.where(known, values, 0.0), axis=-1))


def _limit(variance: Array, freedom: int, tests: int) -> Array:
    """Two-sided limits of t with moderated variances, half of `CHANCE` shared by all tests."""
    prior_freedom, prior = _prior(variance[np.isfinite(variance) & (variance > 0)], freedom)
    total = freedom + prior_freedom
    moderated = (freedom * variance + prior_freedom * prior) / total
    return np.asarray(stats.t.isf(CHANCE / 4 / max(tests, 1), total) * np.sqrt(moderated))


def _prior(variance: Array, freedom: int) -> tuple[float, float]:
    """Degrees of freedom and variance of the scaled inverse chi squared distribution of the true variances.

    Moments of ln s^2: mean ln s0^2 + psi(d/2) - psi(d0/2) + ln(d0/d), variance psi'(d/2) + psi'(d0/2).
    """
    if len(variance) < 2:
        return 0.0, 0.0
    logs = np.log(variance) - special.digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(logs.var(ddof=1) - special.polygamma(1, freedom / 2))
    prior_freedom = _inverse_trigamma(excess) * 2 if excess > 0 else _LARGEST_PRIOR
    prior_freedom = min(prior_freedom, _LARGEST_PRIOR)
    mean = float(logs.mean()) + float(special.digamma(prior_freedom / 2)) - np.log(prior_freedom / 2)
    return prior_freedom, float(np.exp(mean))


def _inverse_trigamma(value: float) -> float:
    """The x with psi'(x) = value, by Newton's method on 1/psi', which is convex."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
    return x
