"""The angle of a step from three logged norms, with the error that their rounding leaves.

A step from w to w' with ||w|| = a, ||w'|| = b and ||w' - w|| = d turns the weight by theta, where

    d^2 - (b - a)^2 = 4 a b sin^2(theta / 2).

Of small angles this keeps the digits that cos(theta) = (a^2 + b^2 - d^2) / 2ab loses. The error is the distance to the
ends of the interval that the angle has if every number is off by its rounding in the worst way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.moments import angle_from_chord_sq, chord_sq

Array = NDArray[np.float64]

_FORMATS = (8, 11, 24, 53)  # bits of bfloat16, float16, float32 and float64 numbers
_OF_COMPUTING = 4  # roundings in a norm that was computed in the format it is written in: its sum has many
_FLOAT32_DIGITS = 9  # decimals that identify a float32 number
_DIGITS = 15  # with more of them a number is a float64 number
_LOOKED_AT = 2_000  # values of a column


class Angles(NamedTuple):
    """Angles in radians and their errors; NaN where a norm is missing."""

    angle: Array
    error: Array


def angles_from_norms(before: Array, after: Array, moved: Array, *, errors: tuple[Array, Array, Array]) -> Angles:
    """The angles between weights before and after their steps.

    Args:
        before: ||w||.
        after: ||w'||.
        moved: ||w' - w||.
        errors: largest absolute errors of ``before``, of ``after - before`` and of ``moved``.

    Example:
        >>> sides = [np.array([side]) for side in (3.0, 4.0, 5.0)]
        >>> turned = angles_from_norms(*sides, errors=(np.array([1e-3]), np.array([1e-3]), np.array([1e-3])))
        >>> float(turned.angle[0]), float(turned.error[0])
        (1.5707..., 0.0013...)
    """
    of_before, of_change, of_moved = errors
    change = np.abs(after - before)
    with np.errstate(invalid="ignore", divide="ignore"):
        angle = angle_from_chord_sq(chord_sq(before**2, after**2, moved**2))
        sizes = before * after
        off = of_before * after + (of_before + of_change) * before
        longest = (moved + of_moved) ** 2 - np.maximum(change - of_change, 0.0) ** 2
        shortest = np.maximum(moved - of_moved, 0.0) ** 2 - (change + of_change) ** 2
        high = angle_from_chord_sq(np.where(sizes > off, longest / (sizes - off), np.inf))
        low = angle_from_chord_sq(shortest / (sizes + off))
    known = np.isfinite(before) & np.isfinite(after) & np.isfinite(moved) & (before > 0) & (after > 0)
    error = np.maximum(high - angle, angle - low)
    return Angles(np.where(known, angle, np.nan), np.where(known, error, np.nan))


def rounding(values: Array) -> Array:
    """The largest error of each number of a column, from the digits with which the column was written.

    Numbers with the bits of bfloat16, float16 or float32 were computed in that format, with an error of four roundings;
    those with few decimal digits have half a unit of the last one besides: of the decimals or of the digits that the
    column shows at most, whichever is larger.

    Example:
        >>> rounding(np.array([12.3456, 0.1231])).tolist()  # "%.4f"
        [5.29...e-05, 5.00...e-05]
        >>> rounding(np.array([0.1, 0.2], dtype=np.float32).astype(np.float64)).tolist()
        [2.38...e-08, 4.76...e-08]
    """
    known = values[np.isfinite(values) & (values != 0)]
    if not len(known):
        return np.zeros_like(values)
    some = known[np.linspace(0, len(known) - 1, min(len(known), _LOOKED_AT)).astype(np.int64)]
    size, bits = np.abs(values), _bits(some)
    by_format = size * _OF_COMPUTING * 2.0 ** -next(precision for precision in _FORMATS if bits <= precision)
    decimals, digits = _decimals(some)
    if bits <= _FORMATS[2] or digits > _DIGITS:
        return np.asarray(by_format)
    with np.errstate(divide="ignore"):
        power = np.where(size > 0, np.floor(np.log10(size)), 0.0)
    half_unit = 0.5 * np.maximum(10.0**-decimals, 10.0 ** (power - digits + 1))
    from_float32 = size * _OF_COMPUTING * 2.0 ** -_FORMATS[2] if digits <= _FLOAT32_DIGITS else 0.0
    return np.asarray(half_unit + from_float32)


def _bits(values: Array) -> int:
    """The most bits that the mantissa of one of the numbers needs."""
    mantissa = (np.abs(np.frexp(values)[0]) * 2.0**53).astype(np.int64)
    lowest = mantissa & -mantissa
    return int(54 - np.log2(lowest.astype(np.float64)).min()) - 1


def _decimals(values: Array) -> tuple[int, int]:
    """The most decimals, and the most significant digits, of one of the numbers in its shortest spelling."""
    decimals = digits = 0
    for value in values.tolist():
        mantissa, _, power = f"{value!r}".lstrip("-").partition("e")
        whole, _, part = mantissa.partition(".")
        part = part.rstrip("0")
        decimals = max(decimals, len(part) - int(power or 0))
        digits = max(digits, len((whole + part).lstrip("0")))
    return max(decimals, 0), max(digits, 1)
