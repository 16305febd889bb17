"""Inner products of tensors row by row, with products and sums in float64.

In main memory one compiled pass (numba) forms all products of all tensors and reads every number once, which costs
hardly more than reading alone. Without numba torch forms them from short stretches converted to float64. On a device
torch forms them one by one. A whole tensor is a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import warn_in_training

_STRETCH = 1 << 16  # numbers that are converted to float64 at a time
_MANY = 1_000_000  # numbers in a pass from which on numba makes a difference that people notice

_COMPILED = (torch.float32, torch.float64)  # types that the compiled loops read

Matrices = tuple[Tensor, Tensor, Tensor | None]
_Item = tuple[int, Matrices, float, bool]  # first row, matrices, shrink, refresh


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
        self._work = _Work("sum_products", lambda matrices, _shrink, out: _add_products(*matrices, out))

    def add(self, row: int, weight: Tensor, gradient: Tensor, buffer: Tensor | None) -> None:
        """Add three contiguous matrices of one shape; their sums go to the rows from ``row`` on.

        Without a buffer nothing is added to the last three columns.
        """
        _check_fit(row, len(self._sums), weight, gradient, buffer)
        if weight.device.type == "cpu":
            self._work.add(row, weight, gradient, buffer)
        else:
            _add_products(weight, gradient, buffer, self._sums[row : row + len(weight)])

    def run(self) -> None:
        """Form the products."""
        self._work.run(self._sums)


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
        self._work = _Work("sum_moves", lambda matrices, shrink, out: _add_move(*matrices, shrink, out))

    def add(
        self, row: int, before: Tensor, after: Tensor, gradient: Tensor | None, *, shrink: float, refresh: bool
    ) -> None:
        """Add three contiguous matrices of one shape; their sums go to the rows from ``row`` on.

        Args:
            row: the first row.
            before: the weight before the step.
            after: the weight after it.
            gradient: None if it is known already: then nothing is added to wg and gg.
            shrink: share of the weight that decay removed.
            refresh: whether ``before`` becomes ``after`` in the same pass.
        """
        _check_fit(row, len(self._sums), before, after, gradient)
        if before.device.type == "cpu":
            self._work.add(row, before, after, gradient, shrink=shrink, refresh=refresh)
            return
        _add_move(before, after, gradient, shrink, self._sums[row : row + len(before)])
        if refresh:
            before.copy_(after)

    def run(self) -> None:
        """Form the products."""
        self._work.run(self._sums)


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
    """<w, w>, <w, e> and <e, e> of a vector w and its move e; ``before`` becomes ``after``. Waits for the device.

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


def _check_fit(row: int, room: int, *matrices: Tensor | None) -> None:
    """Check shapes and memory: compiled code reads and writes by address, wherever that leads."""
    tensors = [matrix for matrix in matrices if matrix is not None]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"got tensors of shapes {', '.join(map(str, sorted(shapes)))}; expected one shape for all")
    if row + len(tensors[0]) > room:
        raise ValueError(f"got {len(tensors[0])} rows, for {room - row} of which there is room: the tensor has grown")
    for tensor in tensors:
        has_memory = type(tensor) is Tensor and (not tensor.numel() or tensor.data_ptr())
        if not has_memory and tensor.device.type == "cpu":
            raise TypeError(
                f"got a tensor of type {type(tensor).__name__}, whose numbers have no place in memory to read"
            )


# ---- in main memory


class _Work:
    """Matrices in main memory: one compiled call for all of a type, or torch on stretches of each.

    Args:
        loop: name of the compiled loop in `equilibria.tensors._product_loops`.
        by_torch: does the same with three matrices, their shrink and their rows of the table.
    """

    def __init__(self, loop: str, by_torch: Callable[[Matrices, float, Tensor], None]) -> None:
        self._loop, self._by_torch = loop, by_torch
        self._items: dict[torch.dtype | None, list[_Item]] = {}  # by the type that a compiled loop reads, or None

    def add(
        self,
        row: int,
        first: Tensor,
        second: Tensor,
        third: Tensor | None,
        shrink: float = 0.0,
        refresh: bool = False,
    ) -> None:
        kind: torch.dtype | None = first.dtype
        alike = second.dtype is kind and (third is None or third.dtype is kind)
        kind = kind if alike and kind in _COMPILED else None
        self._items.setdefault(kind, []).append((row, (first, second, third), shrink, refresh))

    def run(self, sums: Tensor) -> None:
        if not self._items:
            return
        loops = _compiled_loops()
        if loops is None:
            self._run_torch(sums)
        else:
            self._run_compiled(getattr(loops, self._loop), sums)

    def _run_compiled(self, loop: Callable[..., None], sums: Tensor) -> None:
        for kind, items in self._items.items():
            if kind is not None:
                _call(loop, items, kind, sums)
                continue
            for row, matrices, shrink, refresh in items:
                for part in _stretches(matrices):
                    _call(loop, [(row, part, shrink, False)], torch.float64, sums)
                if refresh:
                    matrices[0].copy_(matrices[1])

    def _run_torch(self, sums: Tensor) -> None:
        items = [item for of_kind in self._items.values() for item in of_kind]
        if sum(matrices[0].numel() for _, matrices, _, _ in items) >= _MANY:
            _recommend_numba()
        for row, matrices, shrink, refresh in items:
            for part in _stretches(matrices):
                self._by_torch(part, shrink, sums[row : row + len(matrices[0])])
            if refresh:
                matrices[0].copy_(matrices[1])


@cache
def _compiled_loops() -> ModuleType | None:
    """The compiled loops; None without numba. Imported at the first use, because numba's import takes a second."""
    try:
        from equilibria.tensors import _product_loops
    except ImportError:
        return None
    return _product_loops


@cache
def _recommend_numba() -> None:
    warn_in_training(
        "numba is not installed, so torch measures the weights, about six times slower; install it: "
        "pip install 'equilibria[fast]'",
        UserWarning,
    )


def _call(loop: Callable[..., None], items: list[_Item], kind: torch.dtype, sums: Tensor) -> None:
    """Call a compiled loop for matrices of one type."""
    work, shrinks = [], []
    for row, (first, second, third), shrink, refresh in items:
        readable = first if third is None else third  # any address that can be read
        addresses = first.data_ptr(), second.data_ptr(), readable.data_ptr()
        work.append((*addresses, third is not None, *first.shape, row, refresh))
        shrinks.append(shrink)
    loop(np.array(work, np.int64), np.array(shrinks), kind is torch.float64, sums.numpy())


def _stretches(matrices: Matrices) -> Iterator[Matrices]:
    """The matrices in float64, a range of columns at a time: no large copy is made."""
    rows, columns = matrices[0].shape
    width = max(1, _STRETCH // max(1, rows))
    for begin in range(0, columns, width):
        part: Any = tuple(
            None if matrix is None else matrix[:, begin : begin + width].double().contiguous() for matrix in matrices
        )
        yield part


# ---- by torch: on a device, or on stretches in main memory


def _add_products(weight: Tensor, gradient: Tensor, buffer: Tensor | None, out: Tensor) -> None:
    vectors = [weight, gradient] if buffer is None else [weight, gradient, buffer]
    columns = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)][: 3 if buffer is None else 6]
    for column, (i, j) in enumerate(columns):
        out[:, column] += _dot(vectors[i], vectors[j]).to(out.device)


def _add_move(before: Tensor, after: Tensor, gradient: Tensor | None, shrink: float, out: Tensor) -> None:
    wide = torch.promote_types(before.dtype, torch.float32)
    before, after = before.to(wide), after.to(wide)
    move = (after - before).add_(before, alpha=shrink)  # the difference first: it is exact, and nothing else cancels
    pairs = {0: (before, before), 3: (before, move), 4: (move, move)}
    if gradient is not None:
        pairs |= {1: (before, gradient), 2: (gradient, gradient)}
    for column, pair in pairs.items():
        out[:, column] += _dot(*pair).to(out.device)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner products row by row.

    A whole tensor keeps its type, float32 at least: a device forms such a sum as a tree, which is accurate, and no copy
    of the numbers is made.
    """
    if len(first) > 1:
        by_row: Tensor = torch.linalg.vecdot(first.double(), second.double())
        return by_row
    kind = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    total: Tensor = torch.dot(first[0].to(kind), second[0].to(kind)).double()
    return total
