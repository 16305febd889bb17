"""Shared by the small problems: the drift of two steps, steps to keep, and the paper's one draw among ours."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, comparison

Array = NDArray[np.float64]
_CONFIDENCE = 0.95


def kept_steps(count: int, most: int = 1500) -> NDArray[np.int_]:
    """Indices of at most so many of the steps, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def drift_factor(position: Array, slope: Array, h: Array) -> float:
    """Least-squares factor of h^2 grad log lambda1 in the motion of two steps, with h^2 the mean of both steps.

    Args:
        position: along the minimisers, at every step.
        slope: of log lambda1 there.
        h: displacement across the valley.
    """
    pull = slope[:-2] * (h[:-2] ** 2 + h[1:-1] ** 2) / 2
    return float(pull @ (position[2:] - position[:-2]) / (pull @ pull))


def among(text: str, source: Source, *, printed: float, values: Array, unit: str = "") -> Claim:
    """Compare the paper's number, from one draw of the data, with the interval of one more draw of ours.

    Student's 95 % prediction interval about the geometric mean: of logarithms, because the numbers are positive and
    skewed. The wider ours scatter, the more agrees with them, so this is a comparison and no claim. Draws that are not
    positive, such as the step of an event that a short run lacks, are left out; the text states how many remain.

    Args:
        text: the compared quantity.
        source: its place in the paper.
        printed: the paper's number.
        values: ours, one per draw of the data.
        unit: of both.

    Example:
        >>> claim = among("loss", Source("sharp", "fig. 4"), printed=2.5, values=np.array([1.0, 2.0, 3.0]))
        >>> claim.verdict, claim.role, claim.fails
        ('shown', 'comparison', False)
    """
    if len(values) < 2:
        raise EquilibriaError(f"got {len(values)} draw of the data; expected at least 2, to know how they scatter")
    logs = np.log(values[values > 0])
    count = len(logs)
    if count < len(values):
        text += f" ({count} of {len(values)} draws)"
    if count < 2:
        return comparison(Claim(text, source, "among", float(printed), math.nan, 0.0, unit))
    mean = float(logs.mean())
    half = float(student.ppf((1 + _CONFIDENCE) / 2, count - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / count))
    ends = (math.exp(mean - half), math.exp(mean + half))
    return comparison(Claim(text, source, "among", float(printed), math.exp(mean), 0.0, unit, ends))
