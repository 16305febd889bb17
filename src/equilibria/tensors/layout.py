"""Views of tensors as flat vectors or rows, for any strides, sharding or type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # their numbers are where data_ptr() says


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this process, detached and as real numbers."""
    detached: Any = tensor.detach()
    if is_sharded(detached):
        detached = _summed(detached).to_local()
    return as_real(detached.resolve_neg())


def _summed(tensor: Any) -> Any:
    """Reduce partial placements of a DTensor, as gradients of replicated weights can have."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=whole)


def as_real(tensor: Tensor) -> Tensor:
    """Real view of a tensor: complex numbers become pairs along a further axis."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor; by its methods, because importing the class costs as much as a training step."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def sharded_axes(tensor: Any) -> dict[int, int]:
    """By the axes of a DTensor's mesh along which it is sharded, the axis of the tensor; none for other tensors.

    FSDP2 over tensor parallelism shards an axis with strides, by a placement that torch does not call a shard.
    """
    placements = tensor.placements if is_sharded(tensor) else ()
    return {axis: one.dim for axis, one in enumerate(placements) if not (one.is_replicate() or one.is_partial())}


def flat(tensor: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Flatten a tensor in the memory order of ``like`` (default: its own).

    Nothing is copied if the strides agree and the memory has no gaps: contiguous, channels-last or transposed alike.
    """
    template = tensor if like is None else like
    if tensor.is_contiguous() and template.is_contiguous():  # the usual case, and the fast one
        return tensor.view(-1)
    if not is_dense(template):  # its memory has no order to follow: row by row
        return tensor.reshape(-1)
    if tensor.stride() != template.stride():
        tensor = torch.empty_like(template, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor so that ``flat`` of the copy is a view, in the order of ``flat(tensor)``."""
    return tensor.clone(memory_format=torch.preserve_format if is_dense(tensor) else torch.contiguous_format)


def rows(tensor: Tensor, *, axis: int) -> Tensor:
    """View a tensor as a matrix, one row per index of ``axis``."""
    return tensor.movedim(axis, 0).flatten(1)  # also if this process has no row


def matrix(tensor: Tensor, *, axis: int | None, like: Tensor) -> Tensor:
    """Convert a tensor to a contiguous matrix: one row per index of ``axis``, or a single row if it is None.

    Each row is in the memory order of ``like``. Nothing is copied if the strides agree and rows follow one another in
    memory.
    """
    count = 1 if axis is None else like.shape[axis]
    if not axis and count and tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(count, -1) if tensor.numel() else tensor.view(count, 0)
    if axis is None:
        return flat(tensor, like=like).contiguous().unsqueeze(0)
    if like.numel() and is_dense(like) and like.stride(axis) * count == like.numel():
        return flat(tensor, like=like).view(count, -1)
    return rows(tensor, axis=axis).contiguous()


def aligned(weight: Tensor, *others: Tensor | None, axis: int | None) -> Any:
    """The weight and tensors of its shape as contiguous ones whose numbers are in the same order, row after row.

    Tensors that are so already are returned as they are, by a few comparisons: where thousands of small tensors are
    read, these are most of the work. The others become matrices (`matrix`).
    """
    for tensor in (weight, *others):
        if tensor is not None and (
            type(tensor) not in PLAIN or axis or not tensor.is_contiguous() or tensor.is_complex() or tensor.is_neg()
        ):
            like = local(weight)
            parts = (None if tensor is None else local(tensor) for tensor in others)
            return [None if part is None else matrix(part, axis=axis, like=like) for part in (like, *parts)]
    return (weight, *others)


def densify(gradient: Tensor) -> Tensor:
    """Convert a sparse gradient to a dense one; return a dense one as it is."""
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def row_axis_of(module: torch.nn.Module) -> int:
    """The axis of a module's weight that numbers its outputs: 1 for transposed convolutions, else 0."""
    return 1 if isinstance(module, torch.nn.modules.conv._ConvTransposeNd) else 0


def first_local_row(tensor: Tensor, *, axis: int) -> int:
    """Index of the first row on this process, which may hold a part of every row only."""
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = tensor
    _, offset = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return int(offset[axis])
