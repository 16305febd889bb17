"""Loops compiled to machine code, kept on disk between runs where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import njit

_REORDERED_SUMS = {"reassoc", "contract", "nsz"}  # many lanes at once; NaN and infinity keep their meaning


def compiled(signatures: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that compiles a function for given argument types at once, so that no first call is slow.

    Args:
        signatures: numba's, one per combination of types.
    """

    def compile_it(function: Callable[..., None]) -> Callable[..., None]:
        try:
            kept: Callable[..., None] = njit(list(signatures), fastmath=_REORDERED_SUMS, cache=True)(function)
        except (RuntimeError, OSError):  # no folder for it can be written, or the disk is full
            kept = njit(list(signatures), fastmath=_REORDERED_SUMS)(function)
        return kept

    return compile_it
