"""When the stability ratio R reaches 1: a forecast from the queries so far, and the observed step afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Chosen on the runs `CHOSEN_ON` of benchmarks/crossing.py; judged on its other runs.
_WINDOW = 2 / 3  # of the steps since the first query: the part that the forecast continues
_PIECES = 4  # of the window; their slopes show how much the growth of R varies
_LEAST_QUERIES = 4  # in the window
_LEAST_DEVIATION = (
    0.05  # of the growth of ln R, relative to that by weight decay: it changes even where it looks steady
)
_DEVIATIONS = 2.0  # standard deviations of the growth in the spread
_LATE = 0.01  # of the steps so far, added to the spread: shortly before the crossing the growth often falls
_LARGEST_LACK_GROWTH = 2.0  # times the growth by weight decay: that of effective_lr^2 at a constant gradient


@dataclass(frozen=True, slots=True)
class Crossing:
    """The step at which R reaches 1.

    Attributes:
        step: real; before the crossing a forecast, afterwards interpolated between two queries.
        spread: of the step: half the width of the range in which the crossing is expected, or was.
    """

    step: float
    spread: float


@dataclass(frozen=True, slots=True)
class Query:
    """What a query before the crossing contributes to the forecast.

    Attributes:
        step: of the query.
        log_ratio: ln R.
        log_sharpness: of the spherical sharpness.
    """

    step: int
    log_ratio: float
    log_sharpness: float


def forecast_crossing(queries: Sequence[Query], *, decay_growth: float) -> Crossing | None:
    """Extrapolate ln R to 0, for gradient descent with weight decay on a scale-invariant loss.

    ``ln R = ln sharpness - ln |w|^2 + constant``. Without a gradient weight decay alone makes ``-ln |w|^2`` grow, at a
    known rate. The gradient makes it grow less: this lack is continued as the exponential that it followed in the
    window, the last two thirds of the queried steps. The growth of ln sharpness is continued as its mean over the
    window, shrunk towards 0 as far as it varied between quarters of the window.

    Args:
        queries: in the order of their steps, under constant settings, before the crossing.
        decay_growth: of ln R per step by weight decay alone, ``-2 ln(1 - lr wd)``.

    Returns:
        The forecast; None if there are too few queries or R does not grow.

    Example:
        >>> queries = [Query(step, math.log(0.5) + 2e-3 * step, 0.0) for step in range(0, 210, 30)]
        >>> round(forecast_crossing(queries, decay_growth=2e-3).step, 1)  # ln 2 / 2e-3
        346.6
    """
    steps, ratios, sharpness = (
        np.array([getattr(query, name) for query in queries], dtype=np.float64)
        for name in ("step", "log_ratio", "log_sharpness")
    )
    recent = steps >= steps[-1] - _WINDOW * (steps[-1] - steps[0]) if len(steps) else np.zeros(0, dtype=bool)
    if recent.sum() < _LEAST_QUERIES or ratios[-1] >= 0:
        return None
    elapsed = steps[-1] - steps[0]
    steps, ratios, sharpness = steps[recent], ratios[recent], sharpness[recent]
    variance = float(np.var(_slopes(steps, sharpness, _PIECES), ddof=1)) / decay_growth**2
    sharpening = float(np.polyfit(steps - steps[-1], sharpness, 1)[0]) / decay_growth
    if sharpening:
        sharpening *= sharpening**2 / (sharpening**2 + variance)
    lack, lack_growth = _lack(steps, ratios - sharpness, decay_growth)
    if sharpening <= -1:
        return None
    deviation = math.sqrt(variance / (1 + sharpening) ** 2 + _LEAST_DEVIATION**2)
    # In units of 1/decay_growth: ln R(now) + (1 + sharpening) time - lack (exp(lack_growth time) - 1)/lack_growth = 0
    time = _first_root(float(ratios[-1]), 1 + sharpening, lack, lack_growth)
    if time is None:
        return None
    left = time / decay_growth
    return Crossing(float(steps[-1]) + left, _DEVIATIONS * deviation * left + _LATE * float(elapsed))


def observed_crossing(before: Query, step: int, log_ratio: float) -> Crossing:
    """Interpolate ln R to 0 between the last query before the crossing and the first one after it.

    Example:
        >>> observed_crossing(Query(100, -0.03, 0.0), 120, 0.01)
        Crossing(step=115.0, spread=15.0)
    """
    crossing = before.step + (step - before.step) * before.log_ratio / (before.log_ratio - log_ratio)
    return Crossing(crossing, max(crossing - before.step, step - crossing))


def _slopes(steps: Floats, values: Floats, pieces: int) -> Floats:
    """Mean slopes over equal pieces of the steps."""
    ends = np.linspace(steps[0], steps[-1], pieces + 1)
    slopes: Floats = np.diff(np.interp(ends, steps, values)) / np.diff(ends)
    return slopes


def _lack(steps: Floats, log_inverse_norm: Floats, decay_growth: float) -> tuple[float, float]:
    """By how much the gradient slows the growth of ``-ln |w|^2`` now, and at which rate this lack grows.

    Returns:
        Both relative to the growth by weight decay.
    """
    late = slice(-max(_LEAST_QUERIES, len(steps) // 4), None)
    lack = 1 - float(np.polyfit(steps[late] - steps[-1], log_inverse_norm[late], 1)[0]) / decay_growth
    first, second = (1 - _slopes(steps, log_inverse_norm, 2) / decay_growth).tolist()
    growth = 0.0
    if first > 1e-4 and second > 1e-4:  # of the growth by decay: less is rounding
        growth = math.log(second / first) / (decay_growth * float(steps[-1] - steps[0]) / 2)
    growth = min(max(growth, 0.0), _LARGEST_LACK_GROWTH)
    since = decay_growth * float(steps[-1] - np.mean(steps[late]))  # the mean lack is that of the middle of its steps
    return max(lack, 0.0) * math.exp(growth * since), growth


def _first_root(start: float, rate: float, lack: float, lack_growth: float) -> float | None:
    """First time at which ``start + rate time - lack (exp(lack_growth time) - 1)/lack_growth`` is 0; None if never.

    Newton's method from 0: the function is concave, so that every iterate stays before the root.
    """
    time = 0.0
    for _ in range(100):
        exponent = min(lack_growth * time, 500.0)  # without a root an iterate may be anywhere
        value = start + rate * time - lack * (math.expm1(exponent) / lack_growth if lack_growth else time)
        slope = rate - lack * math.exp(exponent)
        if abs(value) < 1e-9:
            return time
        if slope <= 0:
            return None
        time -= value / slope
    return None
