"""A few fixed coordinates of many tensors: cheap to keep from step to step, and enough for cosines and averages.

A whole tensor is represented by 1,024 coordinates drawn once at random, seeded by its name, or by all of them if it has
no more. Of a tensor that is watched row by row the same columns are read in every row, at least 64. Numbers formed from
k of d coordinates scatter by about sqrt(2/k) around those of the whole tensor, 4 % at 1,024, if its entries are alike;
where few of them hold most of a sum, by far more.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.tensors import device_queue
from equilibria.tensors.device_queue import sent_to_device
from equilibria.tensors.inner_products import CopyPass, can_be_read, kernels_for, succeeds
from equilibria.tensors.layout import PLAIN, as_real, is_sharded, local
from equilibria.tensors.parameters import Watched

Vector: TypeAlias = NDArray[np.float64] | Tensor
"""Numbers in main memory as an array, on a device as a tensor."""

_PER_TENSOR, _PER_ROW = 1024, 64
_NUMPY = (torch.float32, torch.float64, torch.float16)  # types that numpy reads in place


class Subsample:
    """Fixed coordinates of several tensors, read into one vector.

    In main memory weights are read through views that numpy keeps, without an operation of torch.

    Args:
        watched: the tensors; sharded, sparse and empty ones are left out.

    Attributes:
        tensors: the included tensors, by their index in ``watched``.
        rows: for every included unit (a tensor or one of its rows) its place among the units of all of ``watched``.
        scale: for every included unit its entries over those that are read: turns a sum into an estimate of the whole.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._params = [layer.weight for layer in watched]
        self.tensors = [index for index, param in enumerate(self._params) if _is_readable(param)]
        begins = np.cumsum([0, *(layer.units for layer in watched)])
        self._entries = {index: _Entries(watched[index]) for index in self.tensors}
        on_device = [device_queue.is_on_device(self._params[index]) for index in self.tensors]
        elsewhere = [self._params[index].device for index, is_on in zip(self.tensors, on_device, strict=True) if is_on]
        self._device = elsewhere[0] if elsewhere else torch.device("cpu")
        self._by_numpy = not elsewhere
        units = [self._entries[index].units for index in self.tensors]
        counts = [self._entries[index].count for index in self.tensors]
        self.rows = np.concatenate(
            [np.arange(0), *(begins[i] + np.arange(u) for i, u in zip(self.tensors, units, strict=True))]
        )
        per_unit = np.repeat(np.array(counts, dtype=np.int64), units)
        self.scale = np.repeat([float(watched[index].entries) for index in self.tensors], units) / per_unit
        self._starts = np.cumsum(per_unit) - per_unit
        self._units = np.repeat(np.arange(len(per_unit)), per_unit)
        edges = np.cumsum([0, *(unit * count for unit, count in zip(units, counts, strict=True))]).tolist()
        self._slices = {index: slice(*edges[place : place + 2]) for place, index in enumerate(self.tensors)}
        self._size = edges[-1]
        # For the kernels: by lists of tensors, their units; by strides of all tensors, the places of all coordinates.
        self._unit_tables: dict[int, Tensor] = {}
        self._tables: dict[int, Tensor] = {}  # by columns
        self._unit_of_each: Tensor | None = None  # coordinate, where torch forms the sums
        self._places: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._bounds = np.stack([np.repeat(np.arange(len(units)), units), self._starts, per_unit], axis=1)

    def slice_of(self, tensor: int) -> slice:
        """The part of a vector that holds the coordinates of a tensor."""
        return self._slices[tensor]

    def weights(self, out: Vector | None = None) -> Vector:
        """The present weights, in a vector of their own unless one is given."""
        out = self.empty() if out is None else out
        for index, where in self._slices.items():
            param, entries = self._params[index], self._entries[index]
            if isinstance(out, np.ndarray) and entries.reads_in_place(param):
                out[where] = entries.in_place(param)
            else:
                out[where] = _like(out, entries.of(param))
        return out

    def of(self, tensors: Sequence[Tensor | None]) -> Vector:
        """The same coordinates of other tensors of the same shapes, one for each of ``watched``; NaN where None."""
        out = self.empty()
        for index, where in self._slices.items():
            tensor = tensors[index]
            out[where] = math.nan if tensor is None else _like(out, self._entries[index].of(tensor))
        return out

    def look(
        self,
        references: Sequence[Vector] = (),
        *,
        out: Vector | None = None,
        before: Vector | None = None,
        gradients: Sequence[Tensor | None] | None = None,
        second: Sequence[Tensor | None] | None = None,
        copies: CopyPass | None = None,
    ) -> tuple[Vector, Vector]:
        """The present weights, and sums over the coordinates of every unit; on a GPU one kernel forms all of it.

        Args:
            references: earlier weights.
            out: receives the present weights; None for a vector of its own.
            before: the weights before the last step; None if they are unknown.
            gradients: of the coming step, one for each of ``watched``; None where one is unknown.
            second: Adam's second moments v; None where there is none.
            copies: are made in the same pass as far as a kernel can; the others are left in it.

        Returns:
            The weights w, and one column each: <a, a>, <a, e> and <e, e> for every reference a and the move e from it,
            <g, w - w before> and <g, g/sqrt(v)>; NaN where something is unknown. On a GPU the next call overwrites
            them: no step needs new memory there.
        """
        copies, weights = CopyPass() if copies is None else copies, self.empty() if out is None else out
        table = self._by_kernel(weights, references, before, gradients, second, copies)
        if table is not None:
            return weights, table
        self.weights(weights)
        columns: list[Any] = []
        for reference in references:
            move = weights - reference
            pairs = (reference, reference), (reference, move), (move, move)
            columns += [self.sums(first * second) for first, second in pairs]
        columns += self._pull(weights, before, gradients, second)
        is_numpy = isinstance(weights, np.ndarray)
        return weights, np.stack(columns, axis=1) if is_numpy else torch.stack(columns, dim=1)

    def _pull(self, weights: Any, before: Any, gradients: Any, second: Any) -> tuple[Vector, Vector]:
        by_numpy, units = isinstance(weights, np.ndarray), len(self.rows)
        moved: Any = np.full(units, math.nan) if by_numpy else weights.new_full((units,), math.nan)
        if gradients is None:
            return moved, moved
        slope, scaled = self.of(gradients), moved
        if before is not None:
            moved = self.sums(slope * (weights - before))
        if second is not None and any(moment is not None for moment in second):
            root: Any = self.of(second) ** 0.5
            root[root == 0] = math.inf  # a coordinate that never had a gradient
            scaled = self.sums(slope * slope / root)
        return moved, scaled

    def _by_kernel(
        self, now: Any, references: Any, before: Any, gradients: Any, second: Any, copies: CopyPass
    ) -> Tensor | None:
        """The table of `look`; None where no kernel can form it: in main memory, and of tensors in unusual forms."""
        kernels = None if self._by_numpy else kernels_for(now.device)
        if kernels is None or len(references) > kernels.REFERENCES or not self.tensors:
            return None
        unknown = [None] * len(self._params)
        columns: Any = self._params, gradients or unknown, second or unknown
        roles = [[column[index] for index in self.tensors] for column in columns]
        if not all(can_be_read(kernels, role, now.device) for role in roles):
            return None
        units, places = self._units_of(1), [self._places_of(role) for role in roles]
        width = 3 * len(references) + 2
        if width not in self._tables:
            self._tables[width] = now.new_empty(len(self.rows), width)
        table = self._tables[width]
        tensors = list(zip(*roles, strict=True))
        items = [item for item in copies.for_kernels() if can_be_read(kernels, item.tensors, now.device)]
        if not succeeds(lambda: kernels.look(tensors, units, places, now, references, before, table, items)):
            return None
        copies.leave_out(items)
        return table

    def gathered(self, several: Sequence[Sequence[Tensor | None]]) -> Vector:
        """One row as `of` returns it for each of several lists of tensors; on a GPU one kernel reads all of them."""
        tensors = [of_list[index] for of_list in several for index in self.tensors]
        kernels = None if self._by_numpy else kernels_for(self._device)
        if kernels is not None and self.tensors and can_be_read(kernels, tensors, self._device):
            out = torch.empty(len(several), self._size, dtype=torch.float32, device=self._device)
            units, places = self._units_of(len(several)), self._places_of(tensors)
            if succeeds(lambda: kernels.collect(tensors, units, places, out)):
                return out
        rows: list[Any] = [self.of(of_list) for of_list in several]
        return np.stack(rows) if self._by_numpy else torch.stack(rows)

    def _units_of(self, lists: int) -> Tensor:
        """Tensor, first coordinate and number of coordinates of every unit of so many lists of tensors."""
        if lists not in self._unit_tables:
            further = np.array([[len(self.tensors), self._size, 0]])
            bounds = np.concatenate([self._bounds + place * further for place in range(lists)])
            self._unit_tables[lists] = sent_to_device(bounds, self._device)
        return self._unit_tables[lists]

    def _places_of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The places of all coordinates in the memory of one list of tensors or several, on the device."""
        indices = [index for index, _ in zip(cycle(self.tensors), tensors, strict=False)]
        owns = [self._params[index] if own is None else own for index, own in zip(indices, tensors, strict=True)]
        strides = tuple(own.stride() for own in owns)
        if strides not in self._places:
            offsets = [self._entries[index].offsets_of(own) for index, own in zip(indices, owns, strict=True)]
            self._places[strides] = sent_to_device(np.concatenate(offsets), self._device)
        return self._places[strides]

    def sums(self, values: Vector) -> Vector:
        """The sum over the coordinates of every unit."""
        if isinstance(values, np.ndarray):
            return np.asarray(np.add.reduceat(values, self._starts)) if len(values) else values
        if self._unit_of_each is None:
            self._unit_of_each = sent_to_device(self._units, values.device)
        return values.new_zeros(len(self.rows)).index_add_(0, self._unit_of_each, values)

    def restored(self, saved: Tensor) -> Vector:
        """A vector from a checkpoint; NaN if it holds other coordinates."""
        out = self.empty()
        out[:] = _like(out, saved) if saved.shape == (self._size,) else math.nan
        return out

    def empty(self) -> Vector:
        """A vector of anything."""
        if self._by_numpy:
            return np.empty(self._size)
        kind = torch.float32 if self._device.type == "mps" else torch.float64
        return torch.empty(self._size, dtype=kind, device=self._device)


class _Entries:
    """The coordinates of one tensor.

    Attributes:
        units: rows, 1 for a whole tensor.
        count: coordinates of each.
    """

    def __init__(self, layer: Watched) -> None:
        shape = as_real(layer.weight.detach()).shape
        draw = np.random.default_rng([zlib.crc32(layer.name.encode()), layer.weight.numel()])
        self.units = layer.units
        entries = math.prod(shape) // self.units
        self.count = min(entries, _PER_TENSOR if layer.axis is None else max(_PER_ROW, _PER_TENSOR // self.units))
        columns = (
            np.sort(draw.choice(entries, self.count, replace=False)) if self.count < entries else np.arange(entries)
        )
        if layer.axis is None:
            self._coordinates = np.unravel_index(columns, shape) if shape else ()
        else:
            others = np.unravel_index(columns, [*shape[: layer.axis], *shape[layer.axis + 1 :]])
            row = np.repeat(np.arange(self.units), self.count)
            inside = [np.tile(axis, self.units) for axis in others]
            self._coordinates = (*inside[: layer.axis], row, *inside[layer.axis :])
        self._offsets: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._on_device: tuple[tuple[int, ...], Tensor] | None = None
        self._view: NDArray[Any] | None = None
        self._address = -1

    def reads_in_place(self, param: Tensor) -> bool:
        """Whether numpy can keep a view of this weight's memory."""
        return type(param) in PLAIN and param.dtype in _NUMPY and not param.is_neg()

    def in_place(self, param: Tensor) -> NDArray[Any]:
        """The coordinates of a weight in main memory, without an operation of torch unless the weight has moved."""
        if self._address != param.data_ptr() or self._view is None:
            self._view, self._address = _memory(param.detach()).numpy(), param.data_ptr()
            self._places = self.offsets_of(param)
        return self._view.take(self._places)

    def of(self, tensor: Tensor) -> Tensor | NDArray[Any]:
        """The coordinates of any tensor of this shape."""
        if (
            type(tensor) in PLAIN and tensor.is_cpu and tensor.dtype in _NUMPY and tensor.is_contiguous()
        ):  # the fast case
            return tensor.detach().resolve_neg().numpy().reshape(-1).take(self.offsets_of(tensor))
        own = local(tensor)
        if own.is_cpu and own.dtype in _NUMPY:
            return _memory(own).numpy().take(self.offsets_of(own))
        if self._on_device is None or self._on_device[0] != own.stride() or self._on_device[1].device != own.device:
            self._on_device = own.stride(), torch.as_tensor(self.offsets_of(own), device=own.device)
        return _memory(own).index_select(0, self._on_device[1])

    def offsets_of(self, tensor: Tensor) -> NDArray[np.int64]:
        """The places of the coordinates in the memory of a tensor with these strides."""
        strides = tensor.stride()
        if strides not in self._offsets:
            pairs = zip(self._coordinates, strides, strict=True)
            self._offsets[strides] = sum((axis * stride for axis, stride in pairs), np.zeros(1, dtype=np.int64))
        return self._offsets[strides]


def _is_readable(param: Tensor) -> bool:
    return not is_sharded(param) and param.layout == torch.strided and param.numel() > 0


def _memory(tensor: Tensor) -> Tensor:
    """The memory of a tensor from its first element to its last, as a vector."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,))


def _like(out: Vector, values: Tensor | NDArray[Any]) -> Any:
    """Values that can be assigned to a part of a vector."""
    if isinstance(out, np.ndarray):
        return values if isinstance(values, np.ndarray) else values.double().cpu().numpy()
    return torch.as_tensor(values, dtype=out.dtype, device=out.device)
