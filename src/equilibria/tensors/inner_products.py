"""Inner products of tensors row by row: products and sums in float64, every number read from memory once.

In main memory one compiled pass forms all products of all tensors, which costs hardly more than reading the numbers; on
a device torch forms them one by one. A whole tensor is a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import boolean, float64, int64, void
from numpy.typing import NDArray
from torch import Tensor

from equilibria._compiled import compiled, float32_at, float64_at, inner

_STRETCH = 1 << 16  # numbers of a type that no compiled loop reads which are converted at a time
_SIGNATURE = void(int64[:, ::1], float64[::1], boolean, float64[:, ::1])

Array = NDArray[Any]
Loop = Callable[..., None]


class ProductsPass:
    """Collects weights, gradients and momentum buffers, then adds ww, wg, gg, wv, gv, vv of each to a table.

    Args:
        sums: (rows, at least 6), float64; on the device of the tensors, or in main memory.

    Example:
        >>> sums = torch.zeros(1, 6, dtype=torch.float64)
        >>> one_pass = ProductsPass(sums)
        >>> one_pass.add(0, torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), None)
        >>> one_pass.run()
        >>> sums.tolist()
        [[25.0, 3.0, 1.0, 0.0, 0.0, 0.0]]
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._work = _Work()

    def add(self, place: int, weight: Tensor, gradient: Tensor, buffer: Tensor | None) -> None:
        """Take three contiguous matrices of one shape; their sums go to the rows from ``place`` on.

        Without a buffer nothing is added to the last three columns.
        """
        _check_fit(place, len(self._sums), weight, gradient, buffer)
        if weight.device.type == "cpu":
            self._work.add(place, weight, gradient, buffer)
        else:
            _add_products_on_device(weight, gradient, buffer, self._sums[place : place + len(weight)])

    def run(self) -> None:
        """Form the products."""
        self._work.run(_sum_products, self._sums)


class MovesPass:
    """Collects weights before and after a step and gradients, then adds ww, wg, gg, we, ee of each to a table.

    The step has moved a weight by e - shrink w.

    Args:
        sums: (rows, at least 5), float64; on the device of the tensors, or in main memory.

    Example:
        >>> w, sums = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 5, dtype=torch.float64)
        >>> one_pass = MovesPass(sums)
        >>> one_pass.add(0, w, torch.tensor([[0.5, 0.5]]), None, shrink=0.5, refresh=True)
        >>> one_pass.run()
        >>> sums.tolist(), w.tolist()
        ([[1.0, 0.0, 0.0, 0.0, 0.25]], [[0.5, 0.5]])
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._work = _Work()

    def add(
        self, place: int, before: Tensor, after: Tensor, gradient: Tensor | None, *, shrink: float, refresh: bool
    ) -> None:
        """Take three contiguous matrices of one shape; their sums go to the rows from ``place`` on.

        Args:
            place: the first row.
            before: the weight before the step.
            after: the weight after it.
            gradient: None if it is known already: then nothing is added to wg and gg.
            shrink: share of the weight that decay took away.
            refresh: whether ``before`` becomes ``after`` on the way.
        """
        _check_fit(place, len(self._sums), before, after, gradient)
        if before.device.type == "cpu":
            self._work.add(place, before, after, gradient, shrink=shrink, refresh=refresh)
            return
        _add_move_on_device(before, after, gradient, shrink, self._sums[place : place + len(before)])
        if refresh:
            before.copy_(after)

    def run(self) -> None:
        """Form the products."""
        self._work.run(_sum_moves, self._sums)


def products_of(first: Tensor, second: Tensor) -> tuple[float, float, float]:
    """<a, a>, <a, b> and <b, b> of two vectors; waits for their device.

    Example:
        >>> products_of(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        (25.0, 3.0, 1.0)
    """
    sums = torch.zeros(1, 6, dtype=torch.float64, device=first.device)
    one_pass = ProductsPass(sums)
    one_pass.add(0, first.contiguous().unsqueeze(0), second.contiguous().unsqueeze(0), None)
    one_pass.run()
    aa, ab, bb = sums[0, :3].tolist()
    return aa, ab, bb


def moved_products(before: Tensor, after: Tensor) -> tuple[float, float, float]:
    """<w, w>, <w, e> and <e, e> of a vector and its move e, after which ``before`` becomes ``after``; waits for it.

    Example:
        >>> w = torch.tensor([1.0, 0.0])
        >>> moved_products(w, torch.tensor([1.0, 0.5])), w
        ((1.0, 0.0, 0.25), tensor([1.0000, 0.5000]))
    """
    sums = torch.zeros(1, 5, dtype=torch.float64, device=before.device)
    one_pass = MovesPass(sums)
    one_pass.add(0, before.unsqueeze(0), after.contiguous().unsqueeze(0), None, shrink=0.0, refresh=True)
    one_pass.run()
    ww, _, _, we, ee = sums[0].tolist()
    return ww, we, ee


def _check_fit(place: int, room: int, *matrices: Tensor | None) -> None:
    """Compiled code reads and writes by address: what does not fit has to be refused before it."""
    held = [each for each in matrices if each is not None]
    shapes = {tuple(each.shape) for each in held}
    if len(shapes) > 1:
        raise ValueError(f"got tensors of shapes {', '.join(map(str, sorted(shapes)))}; expected one shape for all")
    if place + len(held[0]) > room:
        raise ValueError(f"got {len(held[0])} rows, for {room - place} of which there is room: the tensor has grown")
    strange = next((each for each in held if type(each) is not Tensor or (each.numel() and not each.data_ptr())), None)
    if strange is not None and strange.device.type == "cpu":
        raise TypeError(f"got a tensor of type {type(strange).__name__}, whose numbers have no place in memory to read")


class _Work:
    """What is to be read, by address: one compiled call for all tensors of a type."""

    def __init__(self) -> None:
        self._held: list[Tensor | None] = []  # so that nothing is freed before it is read
        self._addresses: dict[torch.dtype, list[tuple[int, ...]]] = {torch.float32: [], torch.float64: []}
        self._shrinks: dict[torch.dtype, list[float]] = {torch.float32: [], torch.float64: []}
        self._others: list[tuple[Any, ...]] = []

    def add(
        self,
        place: int,
        first: Tensor,
        second: Tensor,
        third: Tensor | None,
        shrink: float = 0.0,
        refresh: bool = False,
    ) -> None:
        kind = first.dtype
        if kind is not second.dtype or (third is not None and third.dtype is not kind) or kind not in self._addresses:
            self._others.append((place, first, second, third, shrink, refresh))
            return
        held = first if third is None else third  # anything that can be read
        rows, columns = first.shape
        self._held += first, second, third
        self._addresses[kind].append(
            (first.data_ptr(), second.data_ptr(), held.data_ptr(), third is not None, rows, columns, place, refresh)
        )
        self._shrinks[kind].append(shrink)

    def run(self, loop: Loop, sums: Tensor) -> None:
        for kind, addresses in self._addresses.items():
            if addresses:
                loop(np.array(addresses, np.int64), np.array(self._shrinks[kind]), kind is torch.float64, sums.numpy())
        for place, first, second, third, shrink, refresh in self._others:
            _run_converted(loop, sums, (first, second, third), place=place, shrink=shrink)
            if refresh:
                first.copy_(second)


def _run_converted(
    loop: Loop, sums: Tensor, matrices: tuple[Tensor, Tensor, Tensor | None], *, place: int, shrink: float
) -> None:
    """The same for tensors of other or different types: converted stretch by stretch."""
    rows, columns = matrices[0].shape
    width = max(1, _STRETCH // max(1, rows))
    for begin in range(0, columns, width):
        first, second, third = (
            None if each is None else each[:, begin : begin + width].double().contiguous() for each in matrices
        )
        assert first is not None and second is not None
        part = _Work()
        part.add(place, first, second, third, shrink=shrink)
        part.run(loop, sums)


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
        e = (np.float64(after[i]) - x) + shrink * x  # the difference first, which is exact: nothing else cancels
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
def _sum_products(work: Array, _shrinks: Array, double: bool, sums: Array) -> None:
    for first, second, third, has_third, rows, columns, place, _ in work:
        for row in range(rows):
            begin = row * columns * (8 if double else 4)
            if double:
                w, g = float64_at(first + begin, columns), float64_at(second + begin, columns)
                v = float64_at(third + begin, columns)
                found = _six_products(w, g, v) if has_third else _three_products(w, g)
            else:
                w32, g32 = float32_at(first + begin, columns), float32_at(second + begin, columns)
                v32 = float32_at(third + begin, columns)
                found = _six_products(w32, g32, v32) if has_third else _three_products(w32, g32)
            for column in range(6):
                sums[place + row, column] += found[column]


@compiled(_SIGNATURE)
def _sum_moves(work: Array, shrinks: Array, double: bool, sums: Array) -> None:
    for at in range(work.shape[0]):
        first, second, third, has_third, rows, columns, place, refresh = work[at]
        for row in range(rows):
            begin = row * columns * (8 if double else 4)
            if double:
                w, now = float64_at(first + begin, columns), float64_at(second + begin, columns)
                g = float64_at((third if has_third else second) + begin, columns)
                move = _move_and_refresh(w, now, g, shrinks[at]) if refresh else _move(w, now, g, shrinks[at])
            else:
                w32, now32 = float32_at(first + begin, columns), float32_at(second + begin, columns)
                g32 = float32_at((third if has_third else second) + begin, columns)
                move = (
                    _move_and_refresh(w32, now32, g32, shrinks[at]) if refresh else _move(w32, now32, g32, shrinks[at])
                )
            for column in range(5):
                if has_third or column not in (1, 2):
                    sums[place + row, column] += move[column]


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
