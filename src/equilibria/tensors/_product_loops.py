"""The compiled loops of `equilibria.tensors.inner_products`; importing this needs numba.

Every row of ``work`` describes three matrices: address of the first, second and third, whether there is a third, rows,
columns, first row of the table of sums, and whether the first matrix becomes the second in the same pass. The matrices
are read by address, so that one call serves any number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, float32, float64, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from equilibria._compiled import compiled, inner

_SIGNATURE = "void(int64[:, ::1], float64[::1], boolean, float64[:, ::1])"

Array = NDArray[Any]


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
    """The float32 numbers from an address on, as an array."""
    return carray(_to_float32(address), count)


@inner
def float64_at(address: int, count: int) -> Any:
    """The float64 numbers from an address on, as an array."""
    return carray(_to_float64(address), count)


@inner
def _six_products(w: Array, g: Array, v: Array) -> tuple[float, ...]:
    ww = wg = gg = wv = gv = vv = 0.0
    for i in range(w.size):
        x, y, z = np.float64(w[i]), np.float64(g[i]), np.float64(v[i])
        ww, wg, gg = ww + x * x, wg + x * y, gg + y * y
        wv, gv, vv = wv + x * z, gv + y * z, vv + z * z
    return ww, wg, gg, wv, gv, vv


@inner
def _three_products(w: Array, g: Array) -> tuple[float, ...]:
    ww = wg = gg = 0.0
    for i in range(w.size):
        x, y = np.float64(w[i]), np.float64(g[i])
        ww, wg, gg = ww + x * x, wg + x * y, gg + y * y
    return ww, wg, gg, 0.0, 0.0, 0.0


@inner
def _move(before: Array, after: Array, g: Array, shrink: float) -> tuple[float, ...]:
    ww = wg = gg = we = ee = 0.0
    for i in range(before.size):
        x, y = np.float64(before[i]), np.float64(g[i])
        e = (np.float64(after[i]) - x) + shrink * x  # the difference first: it is exact, and nothing else cancels
        ww, wg, gg, we, ee = ww + x * x, wg + x * y, gg + y * y, we + x * e, ee + e * e
    return ww, wg, gg, we, ee


@inner
def _move_and_refresh(before: Array, after: Array, g: Array, shrink: float) -> tuple[float, ...]:
    ww = wg = gg = we = ee = 0.0
    for i in range(before.size):
        x, y = np.float64(before[i]), np.float64(g[i])
        e = (np.float64(after[i]) - x) + shrink * x
        ww, wg, gg, we, ee = ww + x * x, wg + x * y, gg + y * y, we + x * e, ee + e * e
        before[i] = after[i]
    return ww, wg, gg, we, ee


@compiled(_SIGNATURE)
def sum_products(work: Array, _shrinks: Array, double: bool, sums: Array) -> None:
    """Write ww, wg, gg, wv, gv, vv of every matrix in ``work`` into its rows of ``sums``."""
    for first, second, third, has_third, rows, columns, place, _ in work:
        for row in range(rows):
            begin = row * columns * (8 if double else 4)
            if double:
                w, g = float64_at(first + begin, columns), float64_at(second + begin, columns)
                v = float64_at(third + begin, columns)
                products = _six_products(w, g, v) if has_third else _three_products(w, g)
            else:
                w32, g32 = float32_at(first + begin, columns), float32_at(second + begin, columns)
                v32 = float32_at(third + begin, columns)
                products = _six_products(w32, g32, v32) if has_third else _three_products(w32, g32)
            for column in range(6):
                sums[place + row, column] = products[column]


@compiled(_SIGNATURE)
def sum_moves(work: Array, shrinks: Array, double: bool, sums: Array) -> None:
    """Write ww, wg, gg, we, ee of every matrix in ``work`` into its rows of ``sums``."""
    for item in range(work.shape[0]):
        first, second, third, has_third, rows, columns, place, refresh = work[item]
        for row in range(rows):
            begin = row * columns * (8 if double else 4)
            if double:
                w, now = float64_at(first + begin, columns), float64_at(second + begin, columns)
                g = float64_at((third if has_third else second) + begin, columns)
                move = _move_and_refresh(w, now, g, shrinks[item]) if refresh else _move(w, now, g, shrinks[item])
            else:
                w32, now32 = float32_at(first + begin, columns), float32_at(second + begin, columns)
                g32 = float32_at((third if has_third else second) + begin, columns)
                move = (
                    _move_and_refresh(w32, now32, g32, shrinks[item])
                    if refresh
                    else _move(w32, now32, g32, shrinks[item])
                )
            for column in range(5):
                if has_third or column not in (1, 2):
                    sums[place + row, column] = move[column]
