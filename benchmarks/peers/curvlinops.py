"""curvlinops: the Hessian as a linear operator for scipy."""

from __future__ import annotations

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn

from peers.eigenvalue import Answer, Batch


def as_documented(net: nn.Module, batch: Batch, start: int) -> Answer:
    """eigsh with its default settings, of the operator as scipy sees it."""
    from curvlinops import HessianLinearOperator

    params = [param for param in net.parameters() if param.requires_grad]
    hessian = HessianLinearOperator(net, nn.CrossEntropyLoss(), params, [batch], check_deterministic=False).to_scipy()
    calls: list[int] = []

    def matvec(vector: np.ndarray) -> np.ndarray:
        calls.append(1)
        found: np.ndarray = hessian @ vector.reshape(-1).astype(np.float32)
        return found

    operator = LinearOperator(hessian.shape, matvec=matvec, dtype=np.float32)
    first = np.random.default_rng(start).normal(size=hessian.shape[0]).astype(np.float32)
    return Answer(float(eigsh(operator, k=1, which="LA", v0=first)[0][0]), len(calls))


def in_evaluation_mode(net: nn.Module, batch: Batch, start: int) -> Answer:
    net.eval()
    return as_documented(net, batch, start)


def without_statistics(net: nn.Module, batch: Batch, start: int) -> Answer:
    """The way round its refusal: BatchNorm that keeps no running statistics."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.num_batches_tracked = False, None
            module.running_mean = module.running_var = None
    return as_documented(net, batch, start)
