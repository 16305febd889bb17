"""SGD with momentum and decoupled weight decay, which torch lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from equilibria import theory
from equilibria.control._optimizer import CheckedOptimizer, as_factor, as_number, descend


class SGDW(CheckedOptimizer):
    """SGD with momentum and decoupled weight decay (Loshchilov & Hutter).

    ``v = momentum v + g;  w = (1 - lr wd) w - lr v``, v from zero. Its equilibrium is that of `equilibria.theory.SGDW`:
    the decay never enters the buffer, so the same lr and weight decay turn a scale-invariant weight (1-momentum)^0.5
    times as far per step as torch.optim.SGD, and it approaches equilibrium 1/(1-momentum) times more slowly.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        momentum: 0 <= momentum < 1.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        maximize: ascend instead of descending.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = SGDW([w], lr=0.1, weight_decay=0.5)
        >>> (3 * w).sum().backward()
        >>> optimizer.step()
        >>> [round(x, 4) for x in w.tolist()]  # 0.95 w - 0.3
        [0.65, -2.2]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize})

    def equilibria_rule(self, group: dict[str, Any]) -> theory.SGDW:
        """The theory's rule for a parameter group; monitors call this method of an optimizer."""
        return theory.SGDW(
            as_number("lr", group["lr"]),
            as_number("weight_decay", group["weight_decay"]),
            momentum=as_number("momentum", group["momentum"]),
        )

    def _check_group(self, settings: dict[str, Any]) -> None:
        self.equilibria_rule(settings)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        lr, update = as_factor(group["lr"]), weight.grad
        if group["momentum"]:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            update = state["momentum_buffer"].mul_(group["momentum"]).add_(weight.grad)
        weight.mul_(1 - lr * group["weight_decay"])
        descend(weight, update, lr=-lr if group["maximize"] else lr)
