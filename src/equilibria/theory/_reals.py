"""Arrays of checked real numbers, for the laws that broadcast."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, within

Array = NDArray[np.float64]


def reals(
    name: str,
    value: ArrayLike,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Array:
    """``value`` as a float64 array whose every entry is finite and inside the interval of `within`.

    Example:
        >>> reals("risk", [0.5, 1.5], above=0, below=1)
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got risk=1.5; expected 0 < risk < 1
    """
    try:
        raw = np.asarray(value)
        if raw.dtype.kind in "SUc" or any(isinstance(item, str | bytes) for item in raw.flat if raw.dtype == object):
            raise TypeError  # numpy would read "0.1" as a number, and drop an imaginary part
        array = raw.astype(np.float64)
    except (TypeError, ValueError):
        raise EquilibriaError(f"got {name}={value!r}; expected finite numbers", argument=name) from None
    good = np.isfinite(array)
    if low is not None:
        good &= array >= low
    if high is not None:
        good &= array <= high
    if above is not None:
        good &= array > above
    if below is not None:
        good &= array < below
    if not good.all():
        within(name, array[~good].flat[0], low=low, high=high, above=above, below=below)
    return array


def positive_reals(name: str, value: ArrayLike) -> Array:
    """``value`` as an array of numbers above 0."""
    return reals(name, value, above=0)


def nonnegative_reals(name: str, value: ArrayLike) -> Array:
    """``value`` as an array of numbers of at least 0."""
    return reals(name, value, low=0)


def intrinsic_rate(intrinsic_lr: ArrayLike) -> Array:
    """The intrinsic learning rate ``lr*wd`` as an array of numbers strictly between 0 and 1."""
    return reals("intrinsic_lr", intrinsic_lr, above=0, below=1)
