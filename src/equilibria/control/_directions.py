"""The update that an optimizer would subtract from a weight, up to a factor, without the decay and without making it.

Each function advances the state as torch does, under torch's names, so that a checkpoint fits the plain optimizer, and
returns a tensor of the weight's shape that points along the update. Everything is done stretch by stretch, so that the
operations on one stretch find it in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equilibria.control._turning import STRETCH
from equilibria.tensors.layout import flat, is_dense
from equilibria.theory.rules import SGD, SGDW, AdamW, Lion, Rule

State: TypeAlias = dict[str, Any]


class Scratch:
    """Memory for one update at a time, kept from step to step: to allocate it anew costs as much as to fill it."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape, laid out as the weight is, with anything in it."""
        kind, size = (weight.device, weight.dtype), weight.numel()
        if kind not in self._held or self._held[kind].numel() < size:
            self._held[kind] = torch.empty(size, device=weight.device, dtype=weight.dtype)
        memory = self._held[kind][:size]
        return memory.as_strided(weight.shape, weight.stride()) if is_dense(weight) else memory.view(weight.shape)


Direction: TypeAlias = Callable[[Tensor, Tensor, State, Mapping[str, Any], Scratch], Tensor]
"""(weight, gradient, state, group, scratch) -> update."""


def sgd_direction(weight: Tensor, gradient: Tensor, state: State, group: Mapping[str, Any], scratch: Scratch) -> Tensor:
    """torch.optim.SGD and SGDW: the buffer, with Nesterov the gradient ahead of it, without momentum the gradient."""
    momentum, kept = group["momentum"], 1 - group.get("dampening", 0.0)
    if not momentum:
        return gradient
    first = state.get("momentum_buffer") is None
    buffer = _held("momentum_buffer", state, weight)
    if first:
        buffer.copy_(gradient)  # torch does not damp the first
    else:
        for v, g in _stretches(weight, buffer, gradient):
            v.mul_(momentum).add_(g, alpha=kept)
    if not group.get("nesterov"):
        return buffer
    update = scratch.like(weight)
    for out, v, g in _stretches(weight, update, buffer, gradient):
        torch.mul(v, momentum, out=out).add_(g)
    return update


def adamw_direction(
    weight: Tensor, gradient: Tensor, state: State, group: Mapping[str, Any], scratch: Scratch
) -> Tensor:
    """torch.optim.AdamW: ``m / (sqrt(v) + eps sqrt(1 - beta2^t))``, its update but for factors of bias correction."""
    state["step"] = state.get("step", torch.tensor(0.0)) + 1
    beta1, beta2 = group["betas"]
    eps = float(group["eps"]) * (1 - beta2 ** float(state["step"])) ** 0.5
    moments = _held("exp_avg", state, weight), _held("exp_avg_sq", state, weight)
    update = scratch.like(weight)
    for out, first, second, g in _stretches(weight, update, *moments, gradient):
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(first, torch.sqrt(second, out=out).add_(eps), out=out)
    return update


def lion_direction(
    weight: Tensor, gradient: Tensor, state: State, group: Mapping[str, Any], scratch: Scratch
) -> Tensor:
    """Lion: the sign of the interpolated momentum."""
    beta1, beta2 = group["betas"]
    update = scratch.like(weight)
    for out, first, g in _stretches(weight, update, _held("exp_avg", state, weight), gradient):
        torch.mul(first, beta1, out=out).add_(g, alpha=1 - beta1).sign_()
        first.mul_(beta2).add_(g, alpha=1 - beta2)
    return update


DIRECTIONS: dict[type[Rule], Direction] = {
    SGD: sgd_direction,
    SGDW: sgd_direction,
    AdamW: adamw_direction,
    Lion: lion_direction,
}


def _held(name: str, state: State, weight: Tensor) -> Tensor:
    """A buffer of the state, zeros at first, laid out in memory as the weight is."""
    held = state.get(name)
    if held is None:
        held = state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    elif held.stride() != weight.stride() and is_dense(weight):  # a checkpoint of another memory format
        held = state[name] = torch.empty_like(weight).copy_(held)
    buffer: Tensor = held
    return buffer


def _stretches(weight: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding stretches of tensors of one shape, in the order in which the weight keeps its numbers."""
    width = STRETCH if weight.device.type == "cpu" else max(1, weight.numel())
    return zip(*(torch.split(flat(tensor, like=weight), width) for tensor in tensors), strict=True)
