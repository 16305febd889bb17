"""The Triton kernels of `equilibria.tensors.inner_products` for tensors on a GPU; importing this needs triton.

One launch serves any number of tensors, which it reads by address, and reads every number once; a second launch adds up
what its blocks found. No kernel waits for the host, and the host waits for none.

Every row of ``work`` describes three tensors: their addresses, the types of their numbers (-1: there is none), and
whether the first becomes the second in the same pass. A block is a stretch of one row of these, ``CHUNK`` numbers at
most, and ``blocks`` names its row of ``work``, its first number and the one after its last.

Error. ``LANES`` sums run side by side in float32, each over at most 16 products that are themselves rounded (less where
the device fuses both), and everything after that is in float64. A sum of products x_i y_i is therefore off by at most
17 x 2^-24 = 1.01e-6 of sum |x_i y_i|, however many numbers there are. A move is formed in float32: the difference of
the weights is exact where they differ by less than a factor of 2 (Sterbenz), what decay removed is rounded by 2^-24 of
itself, and their sum by 2^-24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import triton
from torch import Tensor
from triton import language as tl

if TYPE_CHECKING:
    from equilibria.tensors.inner_products import DeviceItem

ERROR: Final = 17 * 2.0**-24
"""The largest error of a sum of products, as a share of the sum of their absolute values."""

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types of numbers that the kernels read."""

WARPS: Final = {"sum_products": 8, "sum_moves": 8, "copy": 8, "add_up": 4, "gather_numbers": 8}
"""Groups of threads with which each kernel is compiled."""

_LANES = 1024
_CHUNK = 16 * _LANES  # numbers in a block
_AT_ONCE = 128  # blocks that are added up at a time


def launch(kernel: str, items: Sequence[DeviceItem], sums: Tensor | None) -> None:
    """Run a kernel over all items: two launches, or one where nothing is summed up.

    Args:
        kernel: "sum_products", "sum_moves" or "copy".
        items: their tensors are on one device and have types in `KINDS`.
        sums: the table of sums, on the same device; None for "copy".
    """
    device = items[0].tensors[0].device
    shapes = tuple((item.rows, item.tensors[0].numel(), item.row) for item in items)
    blocks, units = _layout(shapes, device)
    if not len(blocks):
        return
    work = _on_device(tuple(_described(item) for item in items), device)
    shrinks = _on_device(tuple(item.shrink for item in items), device)
    found = torch.empty(len(blocks) if sums is not None else 0, 8, dtype=torch.float64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        _KERNELS[kernel][(len(blocks),)](work, shrinks, blocks, found, LANES=_LANES, num_warps=WARPS[kernel])
        if sums is not None:
            products = 6 if kernel == "sum_products" else 5
            add_up[(len(units),)](
                units, found, sums, sums.stride(0), products, AT_ONCE=_AT_ONCE, num_warps=WARPS["add_up"]
            )


def gather(tensors: Sequence[Tensor], item: Tensor, offset: Tensor, out: Tensor) -> None:
    """Read some numbers of many tensors in one launch.

    Args:
        tensors: on one device, with types in `KINDS`.
        item: for every number its tensor, by the index in ``tensors``.
        offset: for every number its place in the memory of the tensor.
        out: float64 or float32, one entry per number.
    """
    rows = tuple((tensor.data_ptr(), KINDS[tensor.dtype]) for tensor in tensors)
    work, count = _on_device(rows, out.device), len(out)
    with torch.cuda.device(out.device) if out.device.type == "cuda" else torch.no_grad():
        gather_numbers[(-(-count // _LANES),)](
            work, item, offset, out, count, LANES=_LANES, num_warps=WARPS["gather_numbers"]
        )


def _described(item: DeviceItem) -> tuple[int, ...]:
    """A row of ``work``."""
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in item.tensors)
    kinds = (-1 if tensor is None else KINDS[tensor.dtype] for tensor in item.tensors)
    return (*addresses, *kinds, int(item.refresh))


@lru_cache(maxsize=16)
def _on_device(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """A table in the device's memory. The tables of a training hardly ever change: gradients get the same memory."""
    table = torch.tensor(values, dtype=torch.float32 if isinstance(values[0], float) else torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


@lru_cache(maxsize=16)
def _layout(shapes: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The blocks of tensors with so many rows, numbers and first row of the table; the blocks of every unit."""
    rows, numbers, first_row = np.array(shapes, dtype=np.int64).reshape(-1, 3).T
    columns = numbers // np.maximum(rows, 1)
    item = np.repeat(np.arange(len(shapes)), rows)
    row = np.arange(len(item)) - np.repeat(np.cumsum(rows) - rows, rows)
    count = -(-columns // _CHUNK)[item]  # blocks of every unit
    ends = np.cumsum(count)
    unit = np.repeat(np.arange(len(item)), count)
    begin = columns[item[unit]] * row[unit] + _CHUNK * (np.arange(len(unit)) - np.repeat(ends - count, count))
    end = np.minimum(begin + _CHUNK, columns[item[unit]] * (row[unit] + 1))
    tables = np.stack([item[unit], begin, end], axis=1), np.stack([ends - count, ends, first_row[item] + row], axis=1)
    blocks, units = (torch.from_numpy(np.ascontiguousarray(table)).to(device) for table in tables)
    return blocks, units


# ---- the kernels


@triton.jit
def _numbers(address, kind, places, inside):
    """Some numbers of a tensor as float32, 0 outside of it."""
    if kind == 0:
        numbers = tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=inside, other=0.0)
    elif kind == 1:
        numbers = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + places, mask=inside, other=0.0).to(tl.float32)
    else:
        numbers = tl.load(address.to(tl.pointer_type(tl.float16)) + places, mask=inside, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def _write(address, kind, places, inside, numbers):
    """Write numbers into a tensor of the type that they were read from."""
    if kind == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + places, numbers, mask=inside)
    elif kind == 1:
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + places, numbers.to(tl.bfloat16), mask=inside)
    else:
        tl.store(address.to(tl.pointer_type(tl.float16)) + places, numbers.to(tl.float16), mask=inside)


@triton.jit
def _total(sums):
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def sum_products(work, _shrinks, blocks, found, LANES: tl.constexpr):
    """Write ww, wg, gg, wv, gv, vv of every block."""
    block = tl.program_id(0).to(tl.int64)
    item, begin, end = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    row = work + 7 * item
    w_at, g_at, v_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    w_kind, g_kind, v_kind = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    lanes = tl.arange(0, LANES)
    ww = tl.zeros([LANES], tl.float32)
    wg = tl.zeros([LANES], tl.float32)
    gg = tl.zeros([LANES], tl.float32)
    wv = tl.zeros([LANES], tl.float32)
    gv = tl.zeros([LANES], tl.float32)
    vv = tl.zeros([LANES], tl.float32)
    for first in range(begin, end, LANES):
        places = first + lanes
        inside = places < end
        w = _numbers(w_at, w_kind, places, inside)
        g = _numbers(g_at, g_kind, places, inside)
        ww += w * w
        wg += w * g
        gg += g * g
        if v_kind >= 0:
            v = _numbers(v_at, v_kind, places, inside)
            wv += w * v
            gv += g * v
            vv += v * v
    out = found + 8 * block
    tl.store(out, _total(ww))
    tl.store(out + 1, _total(wg))
    tl.store(out + 2, _total(gg))
    tl.store(out + 3, _total(wv))
    tl.store(out + 4, _total(gv))
    tl.store(out + 5, _total(vv))


@triton.jit
def sum_moves(work, shrinks, blocks, found, LANES: tl.constexpr):
    """Write ww, wg, gg, we, ee of every block; the first tensor becomes the second where ``work`` says so."""
    block = tl.program_id(0).to(tl.int64)
    item, begin, end = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    row = work + 7 * item
    before_at, after_at, g_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    before_kind, after_kind, g_kind = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    refresh, shrink = tl.load(row + 6), tl.load(shrinks + item)
    lanes = tl.arange(0, LANES)
    ww = tl.zeros([LANES], tl.float32)
    wg = tl.zeros([LANES], tl.float32)
    gg = tl.zeros([LANES], tl.float32)
    we = tl.zeros([LANES], tl.float32)
    ee = tl.zeros([LANES], tl.float32)
    for first in range(begin, end, LANES):
        places = first + lanes
        inside = places < end
        w = _numbers(before_at, before_kind, places, inside)
        after = _numbers(after_at, after_kind, places, inside)
        e = (after - w) + shrink * w  # the difference first: it is exact, and nothing else cancels
        ww += w * w
        we += w * e
        ee += e * e
        if g_kind >= 0:
            g = _numbers(g_at, g_kind, places, inside)
            wg += w * g
            gg += g * g
        if refresh != 0:
            _write(before_at, before_kind, places, inside, after)
    out = found + 8 * block
    tl.store(out, _total(ww))
    tl.store(out + 1, _total(wg))
    tl.store(out + 2, _total(gg))
    tl.store(out + 3, _total(we))
    tl.store(out + 4, _total(ee))


@triton.jit
def copy(work, _shrinks, blocks, _found, LANES: tl.constexpr):
    """Copy the second tensor of every row of ``work`` into the first."""
    block = tl.program_id(0).to(tl.int64)
    item, begin, end = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    row = work + 7 * item
    to, source, kind = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    lanes = tl.arange(0, LANES)
    for first in range(begin, end, LANES):
        places = first + lanes
        inside = places < end
        _write(to, kind, places, inside, _numbers(source, kind, places, inside))


@triton.jit
def add_up(units, found, sums, width, products, AT_ONCE: tl.constexpr):
    """Add the products of all blocks of a unit (a tensor or a row of one) to its row of the table of sums.

    ``units`` has the first block of every unit, the one after its last, and its row of the table.
    """
    unit = tl.program_id(0).to(tl.int64)
    begin, end, row = tl.load(units + 3 * unit), tl.load(units + 3 * unit + 1), tl.load(units + 3 * unit + 2)
    columns = tl.arange(0, 8)
    total = tl.zeros([8], tl.float64)
    for first in range(begin, end, AT_ONCE):
        blocks = first + tl.arange(0, AT_ONCE)
        inside = (blocks[:, None] < end) & (columns[None, :] < products)
        total += tl.sum(tl.load(found + 8 * blocks[:, None] + columns[None, :], mask=inside, other=0.0), axis=0)
    to, is_product = sums + width * row + columns, columns < products
    tl.store(to, tl.load(to, mask=is_product) + total, mask=is_product)


@triton.jit
def gather_numbers(work, item, offset, out, count, LANES: tl.constexpr):
    """Write one number of some tensor to every entry of ``out``; ``work`` has the tensors' addresses and types."""
    places = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = places < count
    row = work + 2 * tl.load(item + places, mask=inside, other=0)
    address, kind = tl.load(row, mask=inside, other=0), tl.load(row + 1, mask=inside, other=0)
    at = tl.load(offset + places, mask=inside, other=0)
    full = tl.load((address + 4 * at).to(tl.pointer_type(tl.float32)), mask=inside & (kind == 0), other=0.0)
    brain = tl.load((address + 2 * at).to(tl.pointer_type(tl.bfloat16)), mask=inside & (kind == 1), other=0.0)
    half = tl.load((address + 2 * at).to(tl.pointer_type(tl.float16)), mask=inside & (kind == 2), other=0.0)
    tl.store(out + places, full + brain.to(tl.float32) + half.to(tl.float32), mask=inside)


_KERNELS: Final = {"sum_products": sum_products, "sum_moves": sum_moves, "copy": copy}
