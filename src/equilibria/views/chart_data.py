"""Numbers for the charts of pages, as JSON columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

Column = list[float | None]


def column(values: ArrayLike, *, digits: int = 12) -> Column:
    """A JSON column with ``digits`` significant digits; JSON has no NaN and no infinity, so they become None."""
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in numbers]


def log_column(values: ArrayLike, *, digits: int = 6) -> Column:
    """A JSON column for a logarithmic axis, on which only positive numbers have a place; six digits fill a screen."""
    numbers = np.asarray(values, dtype=np.float64)
    return column(np.where(numbers > 0, numbers, np.nan), digits=digits)
