"""Sums over the processes that share a sharded tensor: one all-reduce per sample and mesh axis for all tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equilibria.tensors.layout import is_sharded, sharded_axes
from equilibria.tensors.parameters import Watched


def sum_over_processes(watched: Sequence[Watched], products: Tensor, extra: Tensor) -> Tensor:
    """Sum inner products, in place, over the shards of each tensor; those of whole tensors stay as they are.

    A tensor that is sharded along several axes of a mesh is summed along each of them. Processes with the same part of
    a tensor, as along an axis of a mesh on which it is replicated, count once.

    Every process must call this for the same tensors: it waits for the others.

    Args:
        watched: the tensors.
        products: inner products of the local shards, the units of all tensors one after another; 0 for units of which
            this process holds nothing.
        extra: further numbers, to average over the processes in the same calls.

    Returns:
        The averages.
    """
    for group, parts in _by_process_group(watched).items():
        packed = torch.cat([*(products[part].reshape(-1) for part in parts), extra.to(products)])
        dist.all_reduce(packed, group=group)
        *sums, total = torch.split(packed, [*(products[part].numel() for part in parts), extra.numel()])
        for part, summed in zip(parts, sums, strict=True):
            products[part] = summed.view_as(products[part])
        extra = (total / dist.get_world_size(group)).to(extra)
    return extra


def any_sharded(watched: Sequence[Watched]) -> bool:
    """Whether sampling must communicate with other processes."""
    return any(is_sharded(tensor.param) for tensor in watched)


def _by_process_group(watched: Sequence[Watched]) -> dict[Any, list[slice]]:
    """Process group -> the units of the tensors that are sharded over it, as few slices as that takes."""
    parts: dict[Any, list[slice]] = {}
    begin = 0
    for layer in watched:
        end = begin + layer.units
        for mesh_axis in sharded_axes(layer.param):
            dtensor: Any = layer.param
            of_group = parts.setdefault(dtensor.device_mesh.get_group(mesh_axis), [])
            first = of_group.pop().start if of_group and of_group[-1].stop == begin else begin
            of_group.append(slice(first, end))
        begin = end
    return parts
