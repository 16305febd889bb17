"""Inner products of tensors row by row, with products and sums in float64.

In main memory one compiled pass (numba) forms all products of all tensors and reads every number once, which costs
hardly more than reading alone. Without numba torch forms them from short stretches converted to float64. On a GPU two
kernels (triton) do the same for all tensors together; elsewhere torch forms the products one by one. A whole tensor is
a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import described, warn_in_training
from equilibria.tensors import device_queue
from equilibria.tensors.layout import PLAIN, is_dense

_STRETCH = 1 << 16  # numbers that are converted to float64 at a time
_MANY = 1_000_000  # numbers in a pass from which on numba makes a difference that people notice

_COMPILED = (torch.float32, torch.float64)  # types that the compiled loops read

Matrices = tuple[Tensor, Tensor, Tensor | None]
_Item = tuple[tuple[int, ...], float, Matrices]  # a row of a loop's ``work``, the shrink, and the tensors


class _Pass:
    """Collects three tensors at a time, then writes inner products of their rows into a table.

    Args:
        sums: (rows, products), float64; on the device of the tensors, or in main memory.
    """

    _loop: str  # name of the compiled loop in `equilibria.tensors._product_loops`
    _columns: tuple[tuple[int, ...], tuple[int, ...]]  # that are written: with a third tensor, and without

    def __init__(self, sums: Tensor) -> None:
        self._sums, self._room = sums, len(sums)
        self._items: dict[torch.dtype | None, list[_Item]] = {}  # by the type that a compiled loop reads, or None
        self._device_items: list[DeviceItem] = []

    @staticmethod
    def _by_torch(matrices: Matrices, shrink: float, out: Tensor) -> None:
        """Add the products of three matrices, as the compiled loop forms them, to rows of a table."""
        raise NotImplementedError

    def _add(self, row: int, tensors: Matrices, rows: int | None, shrink: float, refresh: bool) -> None:
        """Collect contiguous tensors; ``refresh`` copies the second into the first when the products are formed.

        Shapes and memory are checked here: the compiled loops read and write by address, wherever that leads.
        """
        first, second, third = tensors
        shape, kind = first.shape, first.dtype
        count = shape[0] if rows is None else rows
        if second.shape != shape or (third is not None and third.shape != shape):
            shapes = sorted({tuple(tensor.shape) for tensor in tensors if tensor is not None})
            raise ValueError(f"got tensors of shapes {', '.join(map(str, shapes))}; expected one shape for all")
        if row + count > self._room:
            raise ValueError(f"got {count} rows, for {self._room - row} of which there is room: the tensor has grown")
        size = first.numel()
        columns = size // count if count else 0
        if device_queue.is_on_device(first):
            self._device_items.append(DeviceItem(tensors, count, row, shrink, refresh))
            return
        addresses = [0, 0, 0]
        for position, tensor in enumerate(tensors):
            if tensor is None:
                addresses[position] = addresses[0]  # any address that can be read
                continue
            addresses[position] = tensor.data_ptr() if type(tensor) in PLAIN else 0
            if not addresses[position] and (size or type(tensor) not in PLAIN):
                kind_of = type(tensor).__name__
                raise TypeError(f"got a tensor of type {kind_of}, whose numbers have no place in memory to read")
        alike = kind in _COMPILED and second.dtype is kind and (third is None or third.dtype is kind)
        work = (*addresses, third is not None, count, columns, row, refresh)
        self._items.setdefault(kind if alike else None, []).append((work, shrink, tensors))

    def run(self) -> None:
        """Form the products."""
        if self._device_items:
            for item in _launched(self._loop, self._device_items, self._sums):
                shape = item.rows, item.tensors[0].numel() // max(item.rows, 1)
                matrices: Any = tuple(None if x is None else x.reshape(shape) for x in item.tensors)
                total = self._sums.new_zeros(item.rows, 6)
                self._by_torch(matrices, item.shrink, total)
                self._write(item.row, total, matrices)
                if item.refresh:
                    item.tensors[0].copy_(item.tensors[1])
        if not self._items:
            return
        loops = _compiled_loops()
        numbers = (tensors[0].numel() for items in self._items.values() for _, _, tensors in items)
        if loops is None and sum(numbers) >= _MANY:
            _recommend_numba()
        for kind, items in self._items.items():
            if loops is not None and kind is not None:
                _call(getattr(loops, self._loop), items, self._sums, double=kind is torch.float64)
            else:
                self._run_converted(loops, items)

    def _run_converted(self, loops: ModuleType | None, items: list[_Item]) -> None:
        """Convert stretches to float64, for a compiled loop or for torch."""
        for (*_, count, columns, row, refresh), shrink, tensors in items:
            total = self._sums.new_zeros(count, 6)
            for part in _stretches(tensors, count, columns):
                if loops is None:
                    self._by_torch(part, shrink, total)
                else:
                    converted = type(self)(torch.zeros_like(total))
                    converted._add(0, part, None, shrink, False)
                    converted.run()
                    total += converted._sums
            self._write(row, total, tensors)
            if refresh:
                tensors[0].copy_(tensors[1])

    def _write(self, row: int, total: Tensor, tensors: Matrices) -> None:
        columns = list(self._columns[tensors[2] is None])
        self._sums[row : row + len(total), columns] = total[:, columns]


class ProductsPass(_Pass):
    """Collects weights, gradients and momentum buffers, then writes ww, wg, gg, wv, gv, vv of each into a table.

    Args:
        sums: (rows, at least 6), float64; on the device of the tensors, or in main memory.

    Example:
        >>> sums = torch.empty(1, 6, dtype=torch.float64)
        >>> one_pass = ProductsPass(sums)
        >>> one_pass.add(0, torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), None)
        >>> one_pass.run()
        >>> sums.tolist()
        [[25.0, 3.0, 1.0, 0.0, 0.0, 0.0]]
    """

    _loop = "sum_products"
    _columns = (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)

    def add(
        self, row: int, weight: Tensor, gradient: Tensor, buffer: Tensor | None, *, rows: int | None = None
    ) -> None:
        """Add three contiguous tensors of one shape; their sums go to the rows from ``row`` on.

        Without a buffer the last three are 0.

        Args:
            row: the first row.
            weight: the weight.
            gradient: its gradient.
            buffer: its momentum buffer, None if there is none.
            rows: into how many equal rows the numbers of each tensor fall; None for the length of its first axis.
        """
        self._add(row, (weight, gradient, buffer), rows, 0.0, False)

    @staticmethod
    def _by_torch(matrices: Matrices, shrink: float, out: Tensor) -> None:
        _add_products(*matrices, out)


class MovesPass(_Pass):
    """Collects weights before and after a step and gradients, then writes ww, wg, gg, we, ee of each into a table.

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

    _loop = "sum_moves"
    _columns = (0, 1, 2, 3, 4), (0, 3, 4)

    def add(
        self,
        row: int,
        before: Tensor,
        after: Tensor,
        gradient: Tensor | None,
        *,
        shrink: float,
        refresh: bool,
        rows: int | None = None,
    ) -> None:
        """Add three contiguous tensors of one shape; their sums go to the rows from ``row`` on.

        Args:
            row: the first row.
            before: the weight before the step.
            after: the weight after it.
            gradient: None if it is known already: then wg and gg stay as they are.
            shrink: share of the weight that decay removed.
            refresh: whether ``before`` becomes ``after`` in the same pass.
            rows: into how many equal rows the numbers of each tensor fall; None for the length of its first axis.
        """
        self._add(row, (before, after, gradient), rows, shrink, refresh)

    @staticmethod
    def _by_torch(matrices: Matrices, shrink: float, out: Tensor) -> None:
        _add_move(*matrices, shrink, out)


class CopyPass:
    """Collects pairs of tensors, then copies the second of each into the first.

    Example:
        >>> copy, one_pass = torch.zeros(2), CopyPass()
        >>> one_pass.add(copy, torch.tensor([1.0, 2.0]))
        >>> one_pass.run()
        >>> copy
        tensor([1., 2.])
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, to: Tensor, source: Tensor) -> None:
        """Copy ``source`` into ``to``, a tensor of the same shape and type, when the pass runs."""
        self._pairs.append((to, source))

    def run(self) -> None:
        """Copy all of them."""
        if items := self.for_kernels():
            left = {id(item) for item in _launched("copy", items, None)}
            self.leave_out([item for item in items if id(item) not in left])
        for to, source in self._pairs:
            to.copy_(source)
        self._pairs = []

    def for_kernels(self) -> list[DeviceItem]:
        """The pairs that a kernel may copy number by number, on the device of the first of them."""
        pairs = [
            pair
            for pair in self._pairs
            if device_queue.is_on_device(pair[0]) and is_dense(pair[0]) and pair[0].stride() == pair[1].stride()
        ]
        return [
            DeviceItem((to, source, None), 1, 0, 0.0, False) for to, source in pairs if to.device == pairs[0][0].device
        ]

    def leave_out(self, items: Sequence[DeviceItem]) -> None:
        """Forget pairs that a kernel has copied."""
        copied = {id(item.tensors[0]) for item in items}
        self._pairs = [pair for pair in self._pairs if id(pair[0]) not in copied]


def products_of(first: Tensor, second: Tensor) -> tuple[float, float, float]:
    """<a, a>, <a, b> and <b, b> of two vectors; waits for their device.

    Example:
        >>> products_of(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]))
        (25.0, 3.0, 1.0)
    """
    sums = torch.empty(1, 6, dtype=torch.float64, device=first.device)
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
    sums = torch.empty(1, 5, dtype=torch.float64, device=before.device)
    one_pass = MovesPass(sums)
    one_pass.add(0, before.unsqueeze(0), after.contiguous().unsqueeze(0), None, shrink=0.0, refresh=True)
    one_pass.run()
    ww, _, _, we, ee = sums[0].tolist()
    return ww, we, ee


# ---- in main memory


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
        "numba is not installed, so torch measures the weights, four to five times slower; install it: "
        "pip install 'equilibria[fast]'",
        UserWarning,
    )


def _call(loop: Callable[..., None], items: list[_Item], sums: Tensor, *, double: bool) -> None:
    """Call a compiled loop for tensors of one type."""
    work, shrinks, _ = zip(*items, strict=True)
    loop(np.array(work, np.int64), np.array(shrinks), double, sums.numpy())


def _stretches(tensors: Matrices, rows: int, columns: int) -> Iterator[Matrices]:
    """The tensors as matrices in float64, a range of columns at a time: no large copy is made."""
    width = max(1, _STRETCH // max(1, rows))
    wide = [None if tensor is None else tensor.detach().view(rows, columns) for tensor in tensors]
    for begin in range(0, columns, width):
        part: Any = tuple(
            None if matrix is None else matrix[:, begin : begin + width].double().contiguous() for matrix in wide
        )
        yield part


# ---- on a GPU


class DeviceItem(NamedTuple):
    """Up to three tensors of one shape on a device, as contiguous rows.

    Attributes:
        tensors: the tensors; None where there is none.
        rows: into how many rows their numbers fall.
        row: the row of the table of sums for the first of them.
        shrink: share of the first that decay removed (moves only).
        refresh: whether the first becomes the second (moves only).
    """

    tensors: Matrices
    rows: int
    row: int
    shrink: float
    refresh: bool


def _launched(kernel: str, items: list[DeviceItem], sums: Tensor | None) -> list[DeviceItem]:
    """Run a kernel over the items that it can read; returns the others, which are left to torch."""
    if not items:
        return items
    device = items[0].tensors[0].device if sums is None else sums.device
    kernels = kernels_for(device)
    if kernels is None:
        return items
    readable = [item for item in items if can_be_read(kernels, item.tensors, device)]
    others = [item for item in items if not can_be_read(kernels, item.tensors, device)]
    if readable and not succeeds(lambda: kernels.launch(kernel, readable, sums)):
        return items
    return others


def kernels_for(device: torch.device) -> ModuleType | None:
    """The kernels for a device; None without triton, which comes with torch for CUDA and ROCm, or if they failed."""
    return None if _failures or not device_queue.has_queue(device) else _kernels()


def can_be_read(kernels: ModuleType, tensors: Sequence[Tensor | None], device: torch.device) -> bool:
    """Whether kernels on a device can read these tensors."""
    return all(
        tensor is None
        or (
            type(tensor) in PLAIN
            and tensor.dtype in kernels.KINDS
            and tensor.device == device
            and tensor.layout == torch.strided
            and not tensor.is_neg()
        )
        for tensor in tensors
    )


def succeeds(launch: Callable[[], None]) -> bool:
    """Launch kernels; False, with one warning, if that fails: then torch does all work from now on."""
    try:
        launch()
    except Exception as error:  # no C compiler for triton's launcher, a GPU that it does not know
        _failures.append(described(error))
        warn_in_training(
            "triton cannot run our kernels, so torch measures the weights, with many more launches: " + _failures[0],
            UserWarning,
        )
        return False
    return True


_failures: list[str] = []  # of the kernels


@cache
def _kernels() -> ModuleType | None:
    try:
        from equilibria.tensors import _product_kernels
    except ImportError:
        return None
    return _product_kernels


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
    if len(first) != 1:
        by_row: Tensor = torch.linalg.vecdot(first.double(), second.double())
        return by_row
    kind = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    total: Tensor = torch.dot(first[0].to(kind), second[0].to(kind)).double()
    return total
