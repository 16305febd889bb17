"""What every optimizer here asks of its gradients before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, number
from equilibria.measure.layout import local


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The value of the closure that a step was given, run with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient to follow."""
    return [param for param in params if param.grad is not None]


def require_usable(params: Iterable[Tensor], *, by: str) -> None:
    """Refuse gradients that would spoil weights or state: sparse, complex or not finite ones.

    Called before anything is changed, so that a step that raises leaves weights and state as they were.

    Args:
        params: parameters that have a gradient.
        by: the optimizer, for the message.

    Raises:
        EquilibriaError: naming the shape of the parameter and what to do.
    """
    held = list(params)
    for param in held:
        _require_dense_and_real(param, by)
    # One number per tensor, and only one is fetched from a device; a finite gradient may overflow it, hence the look.
    if held and not math.isfinite(_sum_of_norms([_gradient(param) for param in held])):
        for param in held:
            _require_finite(param, by)


def _sum_of_norms(gradients: list[Tensor]) -> float:
    norms = torch._foreach_norm([local(gradient) for gradient in gradients])  # each process looks at what it holds
    return float(sum(norm.to(norms[0].device, torch.float32) for norm in norms))


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _require_dense_and_real(param: Tensor, by: str) -> None:
    gradient, shape = _gradient(param), tuple(param.shape)
    if gradient.layout != torch.strided:
        raise EquilibriaError(
            f"got a sparse gradient for a parameter of shape {shape}; {by} needs dense ones: use sparse=False in the "
            "embedding, or torch.optim.SparseAdam"
        )
    if gradient.is_complex():
        raise EquilibriaError(
            f"got a complex parameter of shape {shape}; {by} needs real ones: pass torch.view_as_real of it"
        )


def _require_finite(param: Tensor, by: str) -> None:
    bad = int((~torch.isfinite(local(_gradient(param)))).sum())
    if bad:
        raise EquilibriaError(
            f"got a gradient with {bad} of {param.numel()} entries not finite for a parameter of shape "
            f"{tuple(param.shape)}; {by} took no step, weights and state are as they were: lower lr, clip gradients, "
            "or skip such batches (torch.amp.GradScaler does)"
        )


def as_number(name: str, value: Any) -> float:
    """A setting of a group as a finite number; a learning rate may be a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise EquilibriaError(f"got {name} of shape {tuple(value.shape)}; expected a number or one element")
        value = value.item()
    return number(name, value)


def as_factor(value: float | Tensor) -> float | Tensor:
    """A learning rate to multiply with; a tensor stays on its device, where fetching it would wait."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def descend(weight: Tensor, update: Tensor, *, lr: float | Tensor) -> None:
    """``weight -= lr * update``, without a temporary if lr is a number; as ``alpha`` a tensor would be fetched."""
    if isinstance(lr, Tensor):
        weight.sub_(update * lr)
    else:
        weight.sub_(update, alpha=lr)
