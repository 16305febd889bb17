"""Tensors as flat vectors or as rows, whatever their strides, sharding or type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError

_PLAIN = (Tensor, torch.nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without its history, real numbers throughout."""
    held: Any = tensor.detach()
    if is_sharded(held):
        held = _summed(held).to_local()
    return as_real(held.resolve_neg())


def _summed(tensor: Any) -> Any:
    """A DTensor whose pieces are still to be added up, as gradients of replicated weights can be, added up."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=whole)


def as_real(tensor: Tensor) -> Tensor:
    """The same numbers, complex ones as pairs along a further axis."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor; asked by its methods, for importing the class costs as much as a training step."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def flat(tensor: Tensor, *, like: Tensor | None = None) -> Tensor:
    """A tensor's numbers as one vector, in the order in which ``like`` keeps its own (default: in its own order).

    Nothing is copied where the strides agree and fill the memory: contiguous, channels-last or transposed alike.
    """
    model = tensor if like is None else like
    if tensor.is_contiguous() and model.is_contiguous():  # the usual case, and the fast one
        return tensor.view(-1)
    if not is_dense(model):  # its memory has no order to follow: row by row
        return tensor.reshape(-1)
    if tensor.stride() != model.stride():
        tensor = torch.empty_like(model, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_of(tensor: Tensor) -> Tensor:
    """A copy whose numbers lie in memory in the order of ``flat(tensor)``, so that flat is a view of it."""
    return tensor.clone(memory_format=torch.preserve_format if is_dense(tensor) else torch.contiguous_format)


def rows(tensor: Tensor, *, axis: int) -> Tensor:
    """A tensor as a matrix, one row per index of ``axis``."""
    return tensor.movedim(axis, 0).flatten(1)  # also where this process holds no row


def matrix(tensor: Tensor, *, axis: int | None, like: Tensor) -> Tensor:
    """A contiguous matrix: one row per index of ``axis``, or one for the whole tensor if it is None.

    The numbers of a row are in the order in which ``like`` keeps its own. Nothing is copied where the strides agree and
    the rows lie in memory one after another.
    """
    count = 1 if axis is None else like.shape[axis]
    if not axis and count and tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(count, -1) if tensor.numel() else tensor.view(count, 0)
    if axis is None:
        return flat(tensor, like=like).contiguous().unsqueeze(0)
    if like.numel() and is_dense(like) and like.stride(axis) * count == like.numel():
        return flat(tensor, like=like).view(count, -1)
    return rows(tensor, axis=axis).contiguous()


def densify(gradient: Tensor) -> Tensor:
    """A gradient that can be multiplied: sparse ones filled up with zeros."""
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a stretch of memory without gaps or overlaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def row_axis_of(module: torch.nn.Module) -> int:
    """The axis that numbers the outputs: 0, but 1 for transposed convolutions."""
    return 1 if isinstance(module, torch.nn.modules.conv._ConvTransposeNd) else 0


def first_local_row(tensor: Tensor, *, axis: int) -> int:
    """The number of the first row that this process holds.

    Raises:
        EquilibriaError: if the rows themselves are cut into pieces.
    """
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = tensor
    for placement in dtensor.placements:
        if placement.is_shard() and placement.dim != axis:
            raise EquilibriaError(
                f"got granularity='row' for a tensor sharded along axis {placement.dim}; its rows run along axis "
                f"{axis} and are cut into pieces: use granularity='tensor'"
            )
    _, offset = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return int(offset[axis])
