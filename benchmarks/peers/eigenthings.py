"""hessian-eigenthings: Lanczos with as many steps as it is told."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor, nn
from torch.nn import functional

from peers.eigenvalue import Answer, Batch, Solver


def lanczos(iterations: int | None) -> Solver:
    """None: its default of 2 k steps, 2 for one eigenvalue."""

    def solve(net: nn.Module, batch: Batch, start: int) -> Answer:
        package, calls = import_module("hessian_eigenthings"), []

        def loss(model: nn.Module, data: Batch) -> Tensor:
            calls.append(1)
            return functional.cross_entropy(model(data[0]), data[1])

        operator = package.HessianOperator(net, [batch], loss)
        found = package.lanczos(operator, k=1, which="LA", seed=start, max_iter=iterations)
        return Answer(float(found.eigenvalues[0]), len(calls), "" if bool(found.converged) else "says: not converged")

    return solve
