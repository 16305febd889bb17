"""When a fit deserves less trust than usual: what is seen, what it does to the bands, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting.observed import Cohort

Array = NDArray[np.float64]

ENOUGH_SAMPLES = 60  # in the window; fewer leave it open how far single steps scatter
# Mean of ||g||^4 over the square of the mean of ||g||^2. In the runs that the prior comes from 1.04 to 1.15 in the median
# layer of a network and up to 1.9 in its first one; 1.3 to 3 and up to 9 on digits without label noise, which networks
# learn by heart.
BURSTY = 1.6
INTERPOLATES = 1.25  # of the median layer
_SWING = 0.6  # of ln L in such runs, from one 50 steps to the next


@dataclass(frozen=True, slots=True, eq=False)
class Doubts:
    """One entry per layer.

    Attributes:
        wander: standard deviation to add to that of ln L.
        scatter: standard deviation to add to that of single ln angles.
        widening: factor of the scatter of single angles.
        sentences: what was seen.
    """

    wander: Array
    scatter: Array
    widening: Array
    sentences: tuple[tuple[str, ...], ...]


def doubts(cohort: Cohort, rows: NDArray[np.int64]) -> Doubts:
    """Look for what the forecast does not allow for.

    Args:
        cohort: the layers.
        rows: the samples that were fitted.
    """
    bursts = _bursts(cohort, rows)
    bursty, few = (bursts > BURSTY) | interpolates(cohort, rows), len(rows) < ENOUGH_SAMPLES
    swing = np.where(bursty, _SWING, 0.0)
    widening = np.full(len(cohort.names), 1 + 5 / len(rows) if few else 1.0)
    words = [
        (
            *((_bursty(float(burst)),) if is_bursty else ()),
            *((f"{len(rows)} samples were fitted; with {ENOUGH_SAMPLES} or more the band is narrower",) if few else ()),
        )
        for burst, is_bursty in zip(bursts, bursty, strict=True)
    ]
    return Doubts(swing, swing / 2, widening, tuple(words))


def interpolates(cohort: Cohort, rows: NDArray[np.int64]) -> bool:
    """Whether the network is about to know its data by heart: few samples of a batch still have a gradient.

    Args:
        cohort: the layers.
        rows: the samples that were fitted.
    """
    return bool(np.median(_bursts(cohort, rows)) > INTERPOLATES)


def _bursts(cohort: Cohort, rows: NDArray[np.int64]) -> Array:
    noise = cohort.grad_sq[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.nanmean(noise**2, axis=0) / np.nanmean(noise, axis=0) ** 2
    return result


def _bursty(bursts: float) -> str:
    return (
        f"its gradient comes in bursts (mean of ||g||^4 is {bursts:.1f} times the squared mean of ||g||^2): near "
        "interpolation, L jumps about and the angle with it"
    )
