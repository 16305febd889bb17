"""What a network computes for a batch, seen while a loss calls it: a rescaling should not change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.measure.objective import unwrap_model


@torch.no_grad()
def outputs_of(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """All numbers that the model returns when ``loss`` calls it on a batch; the loss, if it calls something else.

    Buffers and random numbers are the caller's to put back.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> outputs_of(net, lambda batch: net(batch).sum(), torch.ones(4, 2)).shape
        torch.Size([12])
    """
    seen: list[Any] = []
    handle = unwrap_model(model).register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        value = loss(batch)
    finally:
        handle.remove()
    tensors = [leaf for leaf in pytree.tree_leaves(seen) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([tensor.double().flatten() for tensor in tensors or [value]])


def moved_by(before: Tensor, after: Tensor) -> float:
    """Root mean square change of outputs in units of their standard deviation; of a single number, of its size.

    Example:
        >>> moved_by(torch.tensor([1.0, -1.0]), torch.tensor([1.5, -0.5]))
        0.5
    """
    spread = before.std(correction=0) if before.numel() > 1 else before.abs()
    change = (after - before).square().mean().sqrt()
    return float(change / spread) if spread > 0 else float(change > 0)
