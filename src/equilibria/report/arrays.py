"""Arrays inside a page: base64 of 32-bit floats, and equal arrays only once."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import ArrayLike


class Arrays:
    """What the curves of a page are made of; a curve is known by its number here.

    Example:
        >>> arrays = Arrays()
        >>> arrays.add([1.0, 2.0]), arrays.add([3.0]), arrays.add([1.0, 2.0]), arrays.add([float("nan")])
        (0, 1, 0, None)
        >>> len(arrays.encoded)
        2
    """

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, values: ArrayLike, *, rounding: float | None = None) -> int | None:
        """The number of an array; None if it holds no number at all, for then there is nothing to draw.

        Args:
            values: what is not finite is a gap.
            rounding: where to round what 32 bits cannot hold: ``-inf`` downwards, ``inf`` upwards, None to the nearest.
        """
        exact = np.asarray(values, dtype=np.float64)
        if not np.isfinite(exact).any():
            return None
        short = _to_single(exact, rounding)
        content = short.tobytes()
        if content not in self._numbers:
            self._numbers[content] = len(self.encoded)
            self.encoded.append(base64.b64encode(content).decode())
        return self._numbers[content]


def _to_single(exact: np.ndarray, rounding: float | None) -> np.ndarray:
    with np.errstate(over="ignore"):  # what is too large for 32 bits is a gap
        short = exact.astype("<f4")
    if rounding is not None:
        inside = short > exact if rounding < 0 else short < exact
        short = np.where(inside, np.nextafter(short, np.float32(rounding)), short)
    return np.where(np.isfinite(short), short, np.float32(np.nan)).astype("<f4")
