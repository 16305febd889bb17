"""When a fit deserves less trust than usual: what is seen, what it does to the bands, and in which words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.findings import Finding, counted
from equilibria.forecasting._observed import Cohort

if TYPE_CHECKING:
    from equilibria.forecasting._forecast import LayerForecast

Array = NDArray[np.float64]

ENOUGH_SAMPLES = 60  # in the window; fewer leave it open how far single steps scatter
# Mean of ||g||^4 over the square of the mean of ||g||^2. In the runs that the prior comes from 1.04 to 1.15 in the
# median layer of a network and up to 1.9 in its first one; 1.3 to 3 and up to 9 on digits without label noise, which
# networks learn by heart.
BURSTY = 1.6
INTERPOLATES = 1.25  # of the median layer
NEAR_INTERPOLATION = (
    "the gradient comes in bursts: near interpolation L jumps about, falls with lr by a factor between 1 and 20, and "
    "the angle with it"
)
_SWING = 0.6  # of ln L in such runs, from one 50 steps to the next


@dataclass(frozen=True, slots=True, eq=False)
class Doubts:
    """One entry per layer.

    Attributes:
        wander: standard deviation to add to that of ln L.
        scatter: standard deviation to add to that of single ln angles.
        widening: factor of the scatter of single angles and of the norm.
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
    level = np.hypot(swing, _level_error(cohort, rows) if few else 0.0)
    widening = np.full(len(cohort.names), 1 + 5 / len(rows) if few else 1.0)
    words = [
        (
            *((NEAR_INTERPOLATION,) if is_bursty else ()),
            *((f"{len(rows)} samples were fitted; with {ENOUGH_SAMPLES} or more the band is narrower",) if few else ()),
        )
        for is_bursty in bursty
    ]
    return Doubts(level, swing / 2, widening, tuple(words))


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


def _level_error(cohort: Cohort, rows: NDArray[np.int64]) -> Array:
    """Standard error of ln L from few samples, each by itself."""
    seen = cohort.drive[rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.nanstd(seen, axis=0) / np.abs(np.nanmean(seen, axis=0)) / np.sqrt(len(rows))
    return np.minimum(np.nan_to_num(result, nan=1.0), 1.0)


def widened(layers: Sequence[LayerForecast]) -> Iterator[Finding]:
    """The layers whose bands are wider than usual, by reason."""
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        for reason in layer.validity:
            by_reason.setdefault(reason, []).append(layer.name)
    if not by_reason:
        return
    doubtful = sum(bool(layer.validity) for layer in layers)
    remedies = [
        "near interpolation more samples do not help: what L does when lr falls shows only then (forecast again after "
        "it); augmentation or label smoothing bring the gradient back"
        if NEAR_INTERPOLATION in by_reason
        else "",
        "watch longer, or sample every fifth step or each (see eq.watch)"
        if by_reason.keys() - {NEAR_INTERPOLATION}
        else "",
    ]
    yield Finding(
        "warning",
        f"the bands of {doubtful} of {counted(len(layers), 'layer')} are wider than usual",
        "; ".join(f"{_named(names)}: {reason}" for reason, names in by_reason.items()),
        "; ".join(each for each in remedies if each),
        "transient.evolve",
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
