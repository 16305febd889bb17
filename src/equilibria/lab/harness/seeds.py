"""Claims about a mean over seeds: shown only if the whole confidence interval says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, at_least, at_most, near

FEWEST = 3
CONFIDENCE = 0.95
Values = Sequence[float] | NDArray[np.float64]


def mean_interval(values: Values) -> tuple[float, tuple[float, float]]:
    """The mean over seeds, and Student's 95 % confidence interval of it.

    For two variants that share the seed (first weights, order of the data), give their differences: what both have in
    common then cancels.

    Args:
        values: one per seed, at least three.

    Example:
        >>> mean, (low, high) = mean_interval([1.0, 2.0, 3.0])
        >>> mean, round(high - mean, 3)  # 4.303 / sqrt(3)
        (2.0, 2.484)
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or len(found) < FEWEST:
        raise EquilibriaError(f"got values of shape {found.shape}; expected one per seed, of at least {FEWEST} seeds")
    mean = float(found.mean())
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)))
    return mean, (mean - half, mean + half)


def mean_at_least(
    text: str, source: Source, *, bound: float, values: Values, unit: str = "", printed: float | None = None
) -> Claim:
    """The mean over seeds reaches the bound.

    Example:
        >>> source = Source("smd", "fig. 1")
        >>> mean_at_least("gain", source, bound=0, values=[0.8, 1.0, 1.2]).verdict
        'shown'
        >>> mean_at_least("gain", source, bound=0, values=[-0.2, 1.0, 1.2]).verdict
        'not shown'
    """
    mean, interval = _finite(values)
    claim = at_least(text, source, bound=bound, measured=mean, unit=unit, interval=interval, printed=printed)
    return replace(claim, seeds=len(values))


def mean_at_most(
    text: str, source: Source, *, bound: float, values: Values, unit: str = "", printed: float | None = None
) -> Claim:
    """The mean over seeds does not exceed the bound."""
    mean, interval = _finite(values)
    claim = at_most(text, source, bound=bound, measured=mean, unit=unit, interval=interval, printed=printed)
    return replace(claim, seeds=len(values))


def mean_near(
    text: str,
    source: Source,
    *,
    expected: float,
    values: Values,
    relative: float | None = None,
    absolute: float | None = None,
    unit: str = "",
    printed: float | None = None,
) -> Claim:
    """The mean over seeds is the expected number, within a share of it or an amount: give one of the two."""
    mean, interval = _finite(values)
    claim = near(
        text,
        source,
        expected=expected,
        measured=mean,
        relative=relative,
        absolute=absolute,
        unit=unit,
        interval=interval,
        printed=printed,
    )
    return replace(claim, seeds=len(values))


def _finite(values: Values) -> tuple[float, tuple[float, float] | None]:
    """A training that diverged has no interval, and its mean contradicts every claim."""
    mean, interval = mean_interval(values)
    return mean, interval if np.isfinite(interval).all() else None
