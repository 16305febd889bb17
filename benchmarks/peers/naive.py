"""What people write by hand: clone the weights, then norms and the angle through a cosine, one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from peers.bench import Bench, Step


@contextmanager
def attach(bench: Bench) -> Iterator[Step]:
    weights, copies = list(bench.weights.values()), []

    def before(*_: object) -> None:
        copies[:] = [weight.detach().clone() for weight in weights]

    def after(*_: object) -> None:
        for weight, old in zip(weights, copies, strict=True):
            weight.norm().item(), weight.grad.norm().item(), update_norm(weight, old), angle(weight, old)

    handles = [bench.optimizer.register_step_pre_hook(before), bench.optimizer.register_step_post_hook(after)]
    yield bench.step
    for handle in handles:
        handle.remove()


def update_norm(new: Tensor, old: Tensor) -> float:
    return (new - old).norm().item()


def angle(new: Tensor, old: Tensor) -> float:
    """In float32, as it is usually written."""
    return torch.acos(functional.cosine_similarity(new.flatten(), old.flatten(), dim=0)).item()


def folk_ratio(weight: Tensor, *, lr: float) -> float:
    """lr |g| / |w|: the relative update, if the optimizer were plain gradient descent without decay."""
    return (lr * weight.grad.norm() / weight.norm()).item()
