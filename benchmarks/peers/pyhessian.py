"""PyHessian: power iteration, on a model that it puts into evaluation mode."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import nn

from peers.eigenvalue import Answer, Batch


def as_documented(net: nn.Module, batch: Batch, start: int) -> Answer:
    """Counts its Hessian-vector products from outside."""
    module, calls = import_module("pyhessian.hessian"), []
    original = module.hessian_vector_product

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    torch.manual_seed(start)
    module.hessian_vector_product = counted
    try:
        with warnings.catch_warnings():  # torch warns of create_graph
            warnings.simplefilter("ignore")
            values, _ = module.hessian(net, nn.CrossEntropyLoss(), data=batch, cuda=False).eigenvalues(top_n=1)
    finally:
        module.hessian_vector_product = original
    return Answer(float(values[0]), len(calls))


def in_training_mode(net: nn.Module, batch: Batch, start: int) -> Answer:
    """Its ``model.eval()`` taken away from it."""
    net.eval = lambda: net  # type: ignore[method-assign]
    return as_documented(net, batch, start)
