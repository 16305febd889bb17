"""Loops compiled to machine code by numba if it is installed, and kept on disk between runs where that is possible.

numba is optional (``pip install 'equilibria[fast]'``). Without it the same functions run as plain Python on numpy
arrays: the same numbers, slower. Importing numba takes about a second, so import the modules that use these decorators
only when their loops are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    from numba import njit
except ImportError:
    njit = None

_REORDERED_SUMS = {"reassoc", "contract", "nsz"}  # many lanes at once; NaN and infinity keep their meaning

Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Decorate a function that compiled functions call."""
    if njit is None:
        return function
    called: Function = njit(fastmath=_REORDERED_SUMS)(function)
    return called


def compiled(*signatures: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile the decorated function at once for some argument types, so that no first call is slow.

    Args:
        signatures: numba's, as text such as ``"void(float64[::1], int64)"``, one per combination of types.
    """

    def compile_it(function: Callable[..., None]) -> Callable[..., None]:
        if njit is None:
            return function
        try:
            kept: Callable[..., None] = njit(list(signatures), fastmath=_REORDERED_SUMS, cache=True)(function)
        except Exception:  # no folder for it can be written, the disk is full, or what is there is damaged
            kept = njit(list(signatures), fastmath=_REORDERED_SUMS)(function)
        return kept

    return compile_it
