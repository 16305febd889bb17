"""AdamP and its copy in pytorch_optimizer: at every step a cosine decides which tensors are scale-invariant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

Train = Callable[[torch.optim.Optimizer], int]
"""Trains for some steps; says how many."""


def flagged(net: nn.Module, train: Train) -> tuple[Counter[str], int]:
    """How often each tensor was taken for scale-invariant, of how many steps."""
    optimizer = import_module("adamp").AdamP(net.parameters(), lr=1e-3, weight_decay=1e-2)
    return _counted(net, optimizer, train, lambda wrap: setattr(optimizer, "_projection", wrap(optimizer._projection)))


def flagged_by_copy(net: nn.Module, train: Train) -> tuple[Counter[str], int]:
    module = import_module("pytorch_optimizer.optimizer.adamp")
    original = module.projection
    optimizer = module.AdamP(net.parameters(), lr=1e-3, weight_decay=1e-2, foreach=False)
    try:
        return _counted(net, optimizer, train, lambda wrap: setattr(module, "projection", wrap(original)))
    finally:
        module.projection = original


def _counted(
    net: nn.Module, optimizer: torch.optim.Optimizer, train: Train, install: Callable[[Any], None]
) -> tuple[Counter[str], int]:
    """The projection's second result is another factor of the decay where it took a tensor for invariant."""
    names = {param.data_ptr(): name for name, param in net.named_parameters()}
    found: Counter[str] = Counter()

    def wrap(projection: Callable[..., tuple[Any, float]]) -> Callable[..., tuple[Any, float]]:
        def watched(param: Any, *args: Any, **named: Any) -> tuple[Any, float]:
            perturbation, factor = projection(param, *args, **named)
            found[names[param.data_ptr()]] += factor != 1
            return perturbation, factor

        return watched

    install(wrap)
    return found, train(optimizer)
