"""The Triton kernels of `equilibria.tensors.inner_products` for tensors on a GPU; importing this needs triton.

One launch serves any number of tensors, which it reads by address, and reads every number once; a second launch adds up
what its blocks found. No kernel waits for the host, and the host waits for none.

Every row of ``work`` describes three tensors: their addresses, the types of their numbers (-1: there is none), whether
the first becomes the second in the same pass, and the bits of a float64, the share of the first that decay removed. A
block is a stretch of one row of these, ``CHUNK`` numbers at most, and ``blocks`` names its row of ``work``, its first
number and the one after its last.

Error. ``LANES`` sums run side by side in float32, each over at most 16 products that are themselves rounded (less where
the device fuses both), and everything after that is in float64. A sum of products x_i y_i is therefore off by at most
17 x 2^-24 = 1.01e-6 of sum |x_i y_i|, however many numbers there are; by up to 2^-149 more for each product below
2^-126 (numbers below 1e-19), and infinite if a product is above 3.4e38. A move is formed in float32: the difference of
the weights is exact where they differ by less than a factor of 2 (Sterbenz), what decay removed is rounded by 2^-24 of
itself, and their sum by 2^-24. The few coordinates of `sum_coordinates` are read as they are and added up in float64.
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

from equilibria.tensors.device_queue import has_queue, sent_to_device

if TYPE_CHECKING:
    from equilibria.tensors.inner_products import DeviceItem, Matrices

ERROR: Final = 17 * 2.0**-24
"""The largest error of a sum of products, as a share of the sum of their absolute values."""

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types of numbers that the kernels read."""

REFERENCES: Final = 3
"""With how many earlier vectors one launch of `look` compares."""

WARPS: Final = {"sum_products": 8, "sum_moves": 8, "copy": 8, "add_up": 4, "sum_coordinates": 8, "gather": 8}
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
    # Without a gradient a move leaves wg and gg as they are.
    columns = [0b111111 if kernel != "sum_moves" else 0b11001 if item.tensors[2] is None else 0b11111 for item in items]
    blocks, units = _layout(_shapes(items, columns), device)
    found = torch.empty(len(blocks) if sums is not None else 0, 8, dtype=torch.float64, device=device)
    with _current(device):
        if len(blocks):
            run, work = _KERNELS[kernel], _work(items, device)
            run[(len(blocks),)](work, blocks, found, LANES=_LANES, num_warps=WARPS[kernel])
        if sums is not None and len(units):
            add_up[(len(units),)](units, found, sums, sums.stride(0), AT_ONCE=_AT_ONCE, num_warps=WARPS["add_up"])


def look(
    tensors: Sequence[Matrices],
    units: Tensor,
    offsets: Sequence[Tensor],
    now: Tensor,
    references: Sequence[Tensor],
    before: Tensor | None,
    out: Tensor,
    copies: Sequence[DeviceItem],
) -> None:
    """Read a few coordinates of many tensors and form what is known of them, and copy tensors, in one launch.

    Args:
        tensors: for every tensor the weight, its gradient and Adam's second moment, on one device.
        units: for every unit its tensor, its first coordinate and the number of its coordinates, 1,024 at most.
        offsets: for weights, gradients and second moments the places of all coordinates in the memory of their tensor.
        now: receives the weights' coordinates, float64.
        references: up to `REFERENCES` earlier vectors like ``now``.
        before: the vector of the step before; None if it is unknown.
        out: (units, 3 x references + 2), float64: <a, a>, <a, e> and <e, e> with every reference a and the move e from
            it, <g, w - w of the step before> and <g, g/sqrt(v)>; NaN where something is unknown.
        copies: tensors whose second is copied into the first.
    """
    work = _on_device(tuple(_described(matrices, 0.0, refresh=False) for matrices in tensors), now.device)
    vectors = [*references, *[now] * (REFERENCES - len(references)), now if before is None else before]
    blocks, _ = _layout(_shapes(copies, [0] * len(copies)), now.device)
    copied = _work(copies, now.device) if len(blocks) else work
    numbers = len(blocks), len(references), int(before is not None)
    with _current(now.device):
        sum_coordinates[(len(blocks) + len(units),)](
            *(work, units, *offsets, now, *vectors, out, copied, blocks, *numbers),
            LANES=_LANES,
            num_warps=WARPS["sum_coordinates"],
        )


def collect(tensors: Sequence[Tensor | None], units: Tensor, places: Tensor, out: Tensor) -> None:
    """Read a few coordinates of many tensors, in one launch.

    Args:
        tensors: on one device; None where there is none.
        units: for every unit its tensor, its first coordinate and the number of its coordinates, 1,024 at most.
        places: of all coordinates in the memory of their tensor.
        out: receives them, float32; NaN of what is not there.
    """
    rows = tuple(_described((tensor, None, None), 0.0, refresh=False) for tensor in tensors)
    with _current(out.device):
        gather[(len(units),)](_on_device(rows, out.device), units, places, out, LANES=_LANES, num_warps=WARPS["gather"])


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if has_queue(device) else torch.no_grad()


def _shapes(items: Sequence[DeviceItem], columns: Sequence[int]) -> tuple[tuple[int, int, int, int], ...]:
    """Rows, numbers, first row of the table, and bits of its columns that are written."""
    return tuple((item.rows, item.tensors[0].numel(), item.row, own) for item, own in zip(items, columns, strict=True))


def _work(items: Sequence[DeviceItem], device: torch.device) -> Tensor:
    return _on_device(tuple(_described(item.tensors, item.shrink, refresh=item.refresh) for item in items), device)


def _described(tensors: Sequence[Tensor | None], shrink: float, *, refresh: bool) -> tuple[int, ...]:
    """A row of ``work``."""
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    kinds = (-1 if tensor is None else KINDS[tensor.dtype] for tensor in tensors)
    return (*addresses, *kinds, int(refresh), int(np.float64(shrink).view(np.int64)))


@lru_cache(maxsize=16)
def _on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """A table in the device's memory. The tables of a training hardly ever change: gradients get the same memory."""
    return sent_to_device(np.array(rows, dtype=np.int64), device)


@lru_cache(maxsize=16)
def _layout(shapes: tuple[tuple[int, int, int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The blocks of tensors with so many rows and numbers, their first row and columns of the table; those of units."""
    rows, numbers, first_row, written = np.array(shapes, dtype=np.int64).reshape(-1, 4).T
    columns = numbers // np.maximum(rows, 1)
    item = np.repeat(np.arange(len(shapes)), rows)
    row = np.arange(len(item)) - np.repeat(np.cumsum(rows) - rows, rows)
    count = -(-columns // _CHUNK)[item]  # blocks of every unit
    ends = np.cumsum(count)
    unit = np.repeat(np.arange(len(item)), count)
    begin = columns[item[unit]] * row[unit] + _CHUNK * (np.arange(len(unit)) - np.repeat(ends - count, count))
    end = np.minimum(begin + _CHUNK, columns[item[unit]] * (row[unit] + 1))
    blocks = np.stack([item[unit], begin, end], axis=1)
    units = np.stack([ends - count, ends, first_row[item] + row, written[item]], axis=1)
    return sent_to_device(blocks, device), sent_to_device(units, device)


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
def _block(work, blocks):
    """The row of ``work`` of this block, its first number and the one after its last."""
    place = blocks + 3 * tl.program_id(0).to(tl.int64)
    return work + 8 * tl.load(place), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _tensors(row):
    """The addresses of the three tensors of a row of ``work``, and their types."""
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@triton.jit
def _store_totals(found, first, second, third, fourth, fifth, sixth):
    """Write the six sums of this block."""
    out = found + 8 * tl.program_id(0).to(tl.int64)
    tl.store(out, _total(first))
    tl.store(out + 1, _total(second))
    tl.store(out + 2, _total(third))
    tl.store(out + 3, _total(fourth))
    tl.store(out + 4, _total(fifth))
    tl.store(out + 5, _total(sixth))


@triton.jit
def sum_products(work, blocks, found, LANES: tl.constexpr):
    """Write ww, wg, gg, wv, gv, vv of every block."""
    row, begin, end = _block(work, blocks)
    w_at, g_at, v_at, w_kind, g_kind, v_kind = _tensors(row)
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
    _store_totals(found, ww, wg, gg, wv, gv, vv)


@triton.jit
def sum_moves(work, blocks, found, LANES: tl.constexpr):
    """Write ww, wg, gg, we, ee of every block; the first tensor becomes the second where ``work`` says so."""
    row, begin, end = _block(work, blocks)
    before_at, after_at, g_at, before_kind, after_kind, g_kind = _tensors(row)
    refresh, shrink = tl.load(row + 6), tl.load(row + 7).to(tl.float64, bitcast=True).to(tl.float32)
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
    _store_totals(found, ww, wg, gg, we, ee, ee)


@triton.jit
def _copy(work, blocks, LANES: tl.constexpr):
    """Copy this block of the second tensor of a row of ``work`` into the first."""
    row, begin, end = _block(work, blocks)
    to, source, kind = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    lanes = tl.arange(0, LANES)
    for first in range(begin, end, LANES):
        places = first + lanes
        inside = places < end
        _write(to, kind, places, inside, _numbers(source, kind, places, inside))


@triton.jit
def copy(work, blocks, _found, LANES: tl.constexpr):
    """Copy the second tensor of every row of ``work`` into the first."""
    _copy(work, blocks, LANES)


@triton.jit
def add_up(units, found, sums, width, AT_ONCE: tl.constexpr):
    """Write the products of all blocks of a unit (a tensor or a row of one) into its row of the table of sums.

    ``units`` has the first block of every unit, the one after its last, its row of the table, and a bit for every
    column that is written.
    """
    place = units + 4 * tl.program_id(0).to(tl.int64)
    begin, end, row, written = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    columns = tl.arange(0, 8)
    total = tl.zeros([8], tl.float64)
    for first in range(begin, end, AT_ONCE):
        blocks = first + tl.arange(0, AT_ONCE)
        inside = (blocks[:, None] < end) & (columns[None, :] < 6)
        total += tl.sum(tl.load(found + 8 * blocks[:, None] + columns[None, :], mask=inside, other=0.0), axis=0)
    tl.store(sums + width * row + columns, total, mask=((written >> columns) & 1) != 0)


@triton.jit
def _compare(out, here, reference, places, inside):
    """Write <a, a>, <a, e> and <e, e> of an earlier vector a and the move e from it."""
    a = tl.load(reference + places, mask=inside, other=0.0)
    e = here - a
    tl.store(out, tl.sum(a * a, axis=0))
    tl.store(out + 1, tl.sum(a * e, axis=0))
    tl.store(out + 2, tl.sum(e * e, axis=0))


@triton.jit
def _look(
    program,
    work,
    units,
    w_places,
    g_places,
    v_places,
    now,
    first,
    second,
    third,
    before,
    out,
    references,
    is_known,
    LANES: tl.constexpr,
):
    """Read the coordinates of a unit into ``now``; write the products with earlier vectors and the pull on the move."""
    unit = units + 3 * program
    begin, count = tl.load(unit + 1), tl.load(unit + 2)
    w_at, g_at, v_at, w_kind, g_kind, v_kind = _tensors(work + 8 * tl.load(unit))
    lanes = tl.arange(0, LANES)
    places, inside = begin + lanes, lanes < count
    w = _numbers(w_at, w_kind, tl.load(w_places + places, mask=inside, other=0), inside).to(tl.float64)
    tl.store(now + places, w, mask=inside)
    out += (3 * references + 2) * program
    if references > 0:
        _compare(out, w, first, places, inside)
    if references > 1:
        _compare(out + 3, w, second, places, inside)
    if references > 2:
        _compare(out + 6, w, third, places, inside)
    out += 3 * references
    moved = tl.full([], float("nan"), tl.float64)
    scaled = tl.full([], float("nan"), tl.float64)
    if g_kind >= 0:
        g = _numbers(g_at, g_kind, tl.load(g_places + places, mask=inside, other=0), inside).to(tl.float64)
        if is_known != 0:
            moved = tl.sum(g * (w - tl.load(before + places, mask=inside, other=0.0)), axis=0)
        if v_kind >= 0:
            v = _numbers(v_at, v_kind, tl.load(v_places + places, mask=inside, other=0), inside).to(tl.float64)
            root = tl.where(v == 0, float("inf"), tl.sqrt(v))  # infinite: a coordinate that never had a gradient
            scaled = tl.sum(g * g / root, axis=0)
    tl.store(out, moved)
    tl.store(out + 1, scaled)


@triton.jit(do_not_specialize=["copies", "references", "is_known"])
def sum_coordinates(
    work,
    units,
    w_places,
    g_places,
    v_places,
    now,
    first,
    second,
    third,
    before,
    out,
    copied,
    blocks,
    copies,
    references,
    is_known,
    LANES: tl.constexpr,
):
    """Copy a block in each of the first ``copies`` programs, look at the coordinates of a unit in each of the rest."""
    program = tl.program_id(0).to(tl.int64)
    if program < copies:
        _copy(copied, blocks, LANES)
    else:
        unit, places = program - copies, (w_places, g_places, v_places)
        _look(unit, work, units, *places, now, first, second, third, before, out, references, is_known, LANES)


@triton.jit
def gather(work, units, places, gathered, LANES: tl.constexpr):
    """Write the coordinates of a unit of the first tensor of a row of ``work``."""
    unit = units + 3 * tl.program_id(0).to(tl.int64)
    row, begin, count = work + 8 * tl.load(unit), tl.load(unit + 1), tl.load(unit + 2)
    at, kind = tl.load(row), tl.load(row + 3)
    lanes = tl.arange(0, LANES)
    inside = lanes < count
    numbers = tl.full([LANES], float("nan"), tl.float32)
    if kind >= 0:
        numbers = _numbers(at, kind, tl.load(places + begin + lanes, mask=inside, other=0), inside)
    tl.store(gathered + begin + lanes, numbers, mask=inside)


_KERNELS: Final = {"sum_products": sum_products, "sum_moves": sum_moves, "copy": copy}
