"""Sums over the processes that share a sharded tensor: one all-reduce per sample for all tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equilibria.tensors.layout import is_sharded
from equilibria.tensors.parameters import Watched


def sum_over_pieces(
    watched: Sequence[Watched], products: Sequence[Tensor], extra: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Sum inner products over the shards of each tensor; products of unsharded tensors stay as they are.

    Every process must call this for the same tensors: it waits for the others.

    Args:
        watched: the tensors.
        products: inner products of the local shards, each of shape (units, products).
        extra: further numbers to average over the processes in the same call.

    Returns:
        The sums in the same order, and the averages.
    """
    result = list(products)
    for group, members in _by_process_group(watched).items():
        packed = torch.cat([*(result[index].reshape(-1) for index in members), extra.to(result[members[0]])])
        dist.all_reduce(packed, group=group)
        *sums, total = torch.split(packed, [*(result[index].numel() for index in members), extra.numel()])
        for index, summed in zip(members, sums, strict=True):
            result[index] = summed.reshape(result[index].shape)
        extra = (total / dist.get_world_size(group)).to(extra)
    return result, extra


def any_sharded(watched: Sequence[Watched]) -> bool:
    """Whether sampling must communicate with other processes."""
    return any(is_sharded(tensor.param) for tensor in watched)


def _by_process_group(watched: Sequence[Watched]) -> dict[Any, list[int]]:
    """Process group -> indices of the tensors that are sharded over it."""
    members: dict[Any, list[int]] = {}
    for index, tensor in enumerate(watched):
        if is_sharded(tensor.param):
            dtensor: Any = tensor.param
            for dim, placement in enumerate(dtensor.placements):
                if placement.is_shard():
                    members.setdefault(dtensor.device_mesh.get_group(dim), []).append(index)
    return members
