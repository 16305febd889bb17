"""The Lion optimizer, which torch lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from equilibria import theory
from equilibria.control._optimizer import CheckedOptimizer, as_factor, as_number


class Lion(CheckedOptimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay.

    ``u = sign(beta1 m + (1-beta1) g);  m = beta2 m + (1-beta2) g;  w = (1 - lr wd) w - lr u``, m from zero.

    Every entry moves by lr (and by nothing where momentum and gradient are both zero), so a weight of d entries moves
    by lr sqrt(d) whatever its gradient. Its equilibrium is that of `equilibria.theory.Lion`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        betas: (beta1, beta2): share of the momentum in the update, decay of the momentum; each in [0, 1).
        weight_decay: decoupled; the weight shrinks by lr * weight_decay per step.
        maximize: ascend instead of descending.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = Lion([w], lr=0.1, weight_decay=0.5)
        >>> (3 * w).sum().backward()
        >>> optimizer.step()
        >>> [round(x, 4) for x in w.tolist()]  # 0.95 w - 0.1
        [0.85, -2.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def equilibria_rule(self, group: dict[str, Any]) -> theory.Lion:
        """The theory's rule for a parameter group; monitors call this method of an optimizer."""
        return theory.Lion(
            as_number("lr", group["lr"]), as_number("weight_decay", group["weight_decay"]), betas=_pair(group["betas"])
        )

    def _check_group(self, settings: dict[str, Any]) -> None:
        self.equilibria_rule(settings)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        gradient = -weight.grad if group["maximize"] else weight.grad
        state = self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        lr = as_factor(group["lr"])
        update = state["exp_avg"].mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        state["exp_avg"].mul_(beta2).add_(gradient, alpha=1 - beta2)
        # lr multiplies instead of being passed as `alpha`, which would fetch a tensor lr from its device.
        weight.mul_(1 - lr * group["weight_decay"]).sub_(update.mul_(lr))


def _pair(betas: Any) -> tuple[float, float]:
    """A pair of numbers; a checkpoint that went through JSON or YAML has a list instead of a tuple."""
    return tuple(betas) if isinstance(betas, list) else betas
