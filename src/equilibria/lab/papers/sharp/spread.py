"""A number that the paper read off one draw of the data, beside several of ours."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, comparison

_CONFIDENCE = 0.95


def among(text: str, source: Source, *, printed: float, values: NDArray[np.float64], unit: str = "") -> Claim:
    """The paper's number beside the geometric mean of ours, and where 95 % of further draws of ours would be.

    Student's prediction interval for one more draw, of logarithms, because the numbers are positive and skewed. The
    wider ours scatter the more agrees with them, so it is a comparison and no claim. A draw that is not positive has no
    logarithm, such as the step of what never happened in a short run: it is left out, and the text says of how many.

    Args:
        text: what is compared.
        source: where the paper has it.
        printed: its number.
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
