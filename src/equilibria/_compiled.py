"""Loops compiled to machine code, kept on disk between runs where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from numba import carray, float32, float64, njit, types
from numba.extending import intrinsic

_REORDERED_SUMS = {"reassoc", "contract", "nsz"}  # many lanes at once; NaN and infinity keep their meaning

Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """A decorator for what a compiled function calls."""
    called: Function = njit(fastmath=_REORDERED_SUMS)(function)
    return called


def compiled(*signatures: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that compiles a function for given argument types at once, so that no first call is slow.

    Args:
        signatures: numba's, one per combination of types.
    """

    def compile_it(function: Callable[..., None]) -> Callable[..., None]:
        try:
            kept: Callable[..., None] = njit(list(signatures), fastmath=_REORDERED_SUMS, cache=True)(function)
        except Exception:  # no folder for it can be written, the disk is full, or what is there is damaged
            kept = njit(list(signatures), fastmath=_REORDERED_SUMS)(function)
        return kept

    return compile_it


def _pointer_to(kind: types.Type) -> Callable[..., Any]:
    def typed(_context: Any, address: types.Type) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), generate

    pointer: Callable[..., Any] = intrinsic(typed)
    return pointer


_to_float32, _to_float64 = _pointer_to(float32), _pointer_to(float64)


@inner
def float32_at(address: int, count: int) -> Any:
    """So many numbers in memory from an address on, as an array; for compiled code."""
    return carray(_to_float32(address), count)


@inner
def float64_at(address: int, count: int) -> Any:
    """The same in double precision."""
    return carray(_to_float64(address), count)
