"""Inner products of tensors row by row: products and sums in float64, every number read from memory once.

In main memory one compiled pass forms all products of a step, which costs hardly more than reading the numbers; on a
device torch forms them one by one. A whole tensor is a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import boolean, float32, float64, void
from numpy.typing import NDArray
from torch import Tensor

from equilibria._compiled import compiled

_AS_THEY_ARE = {torch.float32: np.float32, torch.float64: np.float64}
_STRETCH = 1 << 16  # numbers of another type that are converted at a time

Matrix = NDArray[Any]


def add_products(weight: Tensor, gradient: Tensor, buffer: Tensor | None, *, out: Tensor) -> None:
    """Add ww, wg, gg, wv, gv, vv of weight, gradient and momentum buffer to the first six columns.

    Args:
        weight: matrix.
        gradient: of the same shape.
        buffer: of the same shape, or None: then nothing is added to the last three.
        out: float64, as many rows; on the device of the weight, or in main memory.

    Example:
        >>> sums = torch.zeros(1, 6, dtype=torch.float64)
        >>> add_products(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), None, out=sums)
        >>> sums.tolist()
        [[25.0, 3.0, 1.0, 0.0, 0.0, 0.0]]
    """
    if weight.device.type != "cpu":
        _add_products_on_device(weight, gradient, buffer, out)
        return
    sums = out.numpy()
    for parts in _as_arrays(weight, gradient, buffer):
        _sum_products(*parts, sums)


def add_move(
    before: Tensor, after: Tensor, gradient: Tensor | None, *, shrink: float, refresh: bool, out: Tensor
) -> None:
    """Add ww, wg, gg, we, ee to the first five columns, where e = after - (1 - shrink) before.

    Args:
        before: the weight before the step, a matrix.
        after: the weight after it.
        gradient: None if it is known already: then nothing is added to wg and gg.
        shrink: share of the weight that decay took away.
        refresh: whether ``before`` becomes ``after`` on the way.
        out: float64, as many rows; on the device of the weight, or in main memory.

    Example:
        >>> w, sums = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 5, dtype=torch.float64)
        >>> add_move(w, torch.tensor([[0.5, 0.5]]), None, shrink=0.5, refresh=True, out=sums)
        >>> sums.tolist(), w.tolist()
        ([[1.0, 0.0, 0.0, 0.0, 0.25]], [[0.5, 0.5]])
    """
    if before.device.type != "cpu":
        _add_move_on_device(before, after, gradient, shrink, out)
    else:
        at_once = refresh and {before.dtype, after.dtype} <= {_common_type(before, after, gradient)}
        sums = out.numpy()
        for parts in _as_arrays(before, after, gradient):
            _sum_move(*parts, shrink, at_once, sums)
        refresh = refresh and not at_once
    if refresh:
        before.copy_(after)


def _common_type(*tensors: Tensor | None) -> torch.dtype | None:
    """The type that all of them have, if they can be read as they are."""
    types = {tensor.dtype for tensor in tensors if tensor is not None}
    return types.pop() if len(types) == 1 and types <= _AS_THEY_ARE.keys() else None


def _as_arrays(first: Tensor, second: Tensor, third: Tensor | None) -> Iterator[tuple[Matrix, Matrix, Matrix]]:
    """The same matrices for numpy, an empty one for what is absent: at once, or converted stretch by stretch."""
    kind = _common_type(first, second, third)
    if kind is not None:
        absent = np.empty((0, 0), _AS_THEY_ARE[kind])
        yield first.numpy(), second.numpy(), absent if third is None else third.numpy()
        return
    absent = np.empty((0, 0))
    width = max(1, _STRETCH // max(1, len(first)))
    for begin in range(0, first.shape[1], width):
        parts = [
            t[:, begin : begin + width].double().contiguous().numpy() for t in (first, second, third) if t is not None
        ]
        yield parts[0], parts[1], parts[2] if third is not None else absent


@compiled([void(kind[:, ::1], kind[:, ::1], kind[:, ::1], float64[:, ::1]) for kind in (float32, float64)])
def _sum_products(weight: Matrix, gradient: Matrix, buffer: Matrix, sums: Matrix) -> None:
    for row in range(weight.shape[0]):
        w, g = weight[row], gradient[row]
        ww = wg = gg = wv = gv = vv = 0.0
        if buffer.size:
            v = buffer[row]
            for i in range(w.size):
                x, y, z = np.float64(w[i]), np.float64(g[i]), np.float64(v[i])
                ww, wg, gg = ww + x * x, wg + x * y, gg + y * y
                wv, gv, vv = wv + x * z, gv + y * z, vv + z * z
        else:
            for i in range(w.size):
                x, y = np.float64(w[i]), np.float64(g[i])
                ww, wg, gg = ww + x * x, wg + x * y, gg + y * y
        sums[row, 0] += ww
        sums[row, 1] += wg
        sums[row, 2] += gg
        sums[row, 3] += wv
        sums[row, 4] += gv
        sums[row, 5] += vv


@compiled(
    [void(kind[:, ::1], kind[:, ::1], kind[:, ::1], float64, boolean, float64[:, ::1]) for kind in (float32, float64)]
)
def _sum_move(before: Matrix, after: Matrix, gradient: Matrix, shrink: float, refresh: bool, sums: Matrix) -> None:
    for row in range(before.shape[0]):
        w, now = before[row], after[row]
        ww = wg = gg = we = ee = 0.0
        # The difference first, which is exact: nothing else cancels. Four loops, so that none has a branch in it.
        if gradient.size:
            g = gradient[row]
            if refresh:
                for i in range(w.size):
                    x, y = np.float64(w[i]), np.float64(g[i])
                    e = (np.float64(now[i]) - x) + shrink * x
                    ww, wg, gg, we, ee = ww + x * x, wg + x * y, gg + y * y, we + x * e, ee + e * e
                    w[i] = now[i]
            else:
                for i in range(w.size):
                    x, y = np.float64(w[i]), np.float64(g[i])
                    e = (np.float64(now[i]) - x) + shrink * x
                    ww, wg, gg, we, ee = ww + x * x, wg + x * y, gg + y * y, we + x * e, ee + e * e
        elif refresh:
            for i in range(w.size):
                x = np.float64(w[i])
                e = (np.float64(now[i]) - x) + shrink * x
                ww, we, ee = ww + x * x, we + x * e, ee + e * e
                w[i] = now[i]
        else:
            for i in range(w.size):
                x = np.float64(w[i])
                e = (np.float64(now[i]) - x) + shrink * x
                ww, we, ee = ww + x * x, we + x * e, ee + e * e
        sums[row, 0] += ww
        sums[row, 1] += wg
        sums[row, 2] += gg
        sums[row, 3] += we
        sums[row, 4] += ee


def _add_products_on_device(weight: Tensor, gradient: Tensor, buffer: Tensor | None, out: Tensor) -> None:
    vectors = [weight, gradient] if buffer is None else [weight, gradient, buffer]
    columns = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)][: 3 if buffer is None else 6]
    for column, (i, j) in enumerate(columns):
        out[:, column] += _dot_on_device(vectors[i], vectors[j]).to(out.device)


def _add_move_on_device(before: Tensor, after: Tensor, gradient: Tensor | None, shrink: float, out: Tensor) -> None:
    wide = torch.promote_types(before.dtype, torch.float32)
    before, after = before.to(wide), after.to(wide)
    move = (after - before).add_(before, alpha=shrink)
    pairs = {0: (before, before), 3: (before, move), 4: (move, move)}
    if gradient is not None:
        pairs |= {1: (before, gradient), 2: (gradient, gradient)}
    for column, pair in pairs.items():
        out[:, column] += _dot_on_device(*pair).to(out.device)


def _dot_on_device(first: Tensor, second: Tensor) -> Tensor:
    """Row by row; float32 for a whole tensor, whose sum a device forms as a tree, without a copy of the numbers."""
    if len(first) > 1:
        by_row: Tensor = torch.linalg.vecdot(first.double(), second.double())
        return by_row
    kind = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    total: Tensor = torch.dot(first[0].to(kind), second[0].to(kind)).double()
    return total
