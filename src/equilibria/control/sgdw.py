"""SGD with momentum and decoupled weight decay as a torch optimizer; torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from equilibria import theory
from equilibria.control._gradients import as_factor, as_number, descend, loss_of, require_usable, with_gradient


class SGDW(Optimizer):
    """SGD with momentum and decoupled weight decay (Loshchilov & Hutter).

    ``v = momentum v + g;  w = (1 - lr wd) w - lr v``, v from zero. Its equilibrium is that of `equilibria.theory.SGDW`:
    the decay never enters the buffer, so the same lr and weight decay turn a scale-invariant weight (1-momentum)^0.5
    times as far per step as torch.optim.SGD, and it approaches equilibrium 1/(1-momentum) times more slowly.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        momentum: 0 <= momentum < 1.
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        maximize: climb instead of descend.

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, its settings checked."""
        if isinstance(param_group, dict):  # torch says what is wrong with anything else
            self.equilibria_rule({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def equilibria_rule(self, group: dict[str, Any]) -> theory.SGDW:
        """The rule of the theory that a parameter group follows; this is what a monitor asks an optimizer for."""
        return theory.SGDW(
            as_number("lr", group["lr"]),
            as_number("weight_decay", group["weight_decay"]),
            momentum=as_number("momentum", group["momentum"]),
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; ``closure`` computes the loss and its gradients, and its value is returned.

        Raises:
            EquilibriaError: a gradient is sparse, complex or not finite; nothing was changed then.
        """
        loss = loss_of(closure)
        moving = [(weight, group) for group in self.param_groups for weight in with_gradient(group["params"])]
        require_usable((weight for weight, _ in moving), by="SGDW")
        for weight, group in moving:
            self._move(weight, group)
        return loss

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
