"""composer's OptimizerMonitor, emulated: it pins torch below 2.7.1, so that it cannot be installed beside this one.

Written anew from the quantities that it logs (mosaicml 0.32.1): the norm of the gradient of every layer, and with its
decoupled AdamW also those of the first moment, the weight and the update; every 10 steps by default.
It forms the update as step - decay * w, where the optimizer applies -(step + decay * w).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peers.bench import Bench, Step, Watcher


def every(steps: int) -> Watcher:
    @contextmanager
    def attach(bench: Bench) -> Iterator[Step]:
        count = itertools.count()

        def after(*_: object) -> None:
            if next(count) % steps == 0:
                with torch.no_grad():
                    for weight in bench.weights.values():
                        metrics(bench.optimizer, weight)

        handle = bench.optimizer.register_step_post_hook(after)
        yield bench.step
        handle.remove()

    return attach


def metrics(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, float]:
    """What is logged of one layer."""
    state, vectors = optimizer.state[weight], {"grad": weight.grad}
    if "exp_avg" in state:
        vectors |= {"moment": state["exp_avg"], "param": weight, "update": reported_update(optimizer, weight)}
    return {name: torch.linalg.vector_norm(vector).item() for name, vector in vectors.items()}


def reported_update(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """The update as it is formed for the log, with the decay per step of torch's AdamW: lr * weight_decay."""
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    beta1, beta2 = group["betas"]
    count = float(state["step"])
    spread = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt() + group["eps"]
    step = group["lr"] / (1 - beta1**count) * state["exp_avg"] / spread
    return step - group["lr"] * group["weight_decay"] * weight
