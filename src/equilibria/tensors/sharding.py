"""Sums over the processes that hold the pieces of a tensor: one all-reduce per sample for all tensors together."""

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
    """Add up what the processes found in their pieces; whole tensors are left alone.

    Every process has to call this for the same tensors: it waits for the others.

    Args:
        watched: the tensors.
        products: inner products of the local pieces, each of shape (units, products).
        extra: further numbers that are averaged over the processes on the way.

    Returns:
        The sums in the same order, and the averages.
    """
    result = list(products)
    for group, members in _by_process_group(watched).items():
        packed = torch.cat([*(result[at].reshape(-1) for at in members), extra.to(result[members[0]])])
        dist.all_reduce(packed, group=group)
        *sums, total = torch.split(packed, [*(result[at].numel() for at in members), extra.numel()])
        for at, summed in zip(members, sums, strict=True):
            result[at] = summed.reshape(result[at].shape)
        extra = (total / dist.get_world_size(group)).to(extra)
    return result, extra


def any_sharded(watched: Sequence[Watched]) -> bool:
    """Whether sampling has to talk to other processes."""
    return any(is_sharded(each.param) for each in watched)


def _by_process_group(watched: Sequence[Watched]) -> dict[Any, list[int]]:
    """Process group -> places of the tensors that are cut into pieces over it."""
    found: dict[Any, list[int]] = {}
    for at, each in enumerate(watched):
        if is_sharded(each.param):
            dtensor: Any = each.param
            for dim, placement in enumerate(dtensor.placements):
                if placement.is_shard():
                    found.setdefault(dtensor.device_mesh.get_group(dim), []).append(at)
    return found
