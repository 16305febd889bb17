"""RMSprop with a single second moment: the simplest optimizer that stays at the edge of stability."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from equilibria.control._optimizer import CheckedOptimizer, as_factor, as_number, descend, sum_of_squares
from equilibria.errors import positive, within


class ScalarRMSprop(CheckedOptimizer):
    """RMSprop with one second moment per parameter group (Lyu, Li & Arora, Definition B.1).

    ``x' = x - lr g / sqrt(m)``, then ``m' = decay m + (1 - decay) ||g||^2``: the step uses the *old* moment; ||g|| is
    the norm over all parameters of the group. With decay = 1 - C lr^2 it follows the sharpness-reduction flow once it
    has reached the edge of stability; `equilibria.theory.effective_schedulers` has the same recursion for numpy.

    The moment of a group is the number ``group["second_moment"]``, which the optimizer's state_dict includes.

    Args:
        params: parameters or parameter groups.
        lr: the base learning rate; a step is about this long.
        decay: of the moment per step, 0 <= decay < 1.
        second_moment: initial ||g||^2; by default that of the first gradient, so that the first step is lr long.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        >>> optimizer = ScalarRMSprop([x], lr=0.5, decay=0.75, second_moment=4.0)
        >>> (2 * x).sum().backward()
        >>> optimizer.step()
        >>> x.item(), optimizer.param_groups[0]["second_moment"]
        (0.5, 4.0)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        decay: float = 0.99,
        second_moment: float | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "second_moment": second_moment})

    def _check_group(self, settings: dict[str, Any]) -> None:
        within("lr", as_number("lr", settings["lr"]), low=0)
        within("decay", settings["decay"], low=0, below=1)
        if settings["second_moment"] is not None:
            positive("second_moment", settings["second_moment"])

    def _move_all(self) -> None:
        for group, weights in self._moving():
            if weights:
                _move_together(weights, group)


def _move_together(weights: list[Tensor], group: dict[str, Any]) -> None:
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    grad_sq = sum_of_squares(gradients)
    moment = group["second_moment"] or grad_sq
    for weight, gradient in zip(weights, gradients, strict=True):
        if grad_sq > 0:
            descend(weight, gradient, lr=as_factor(group["lr"]) / moment**0.5)
    # None until a gradient differs from zero, which then initialises the moment.
    group["second_moment"] = group["decay"] * moment + (1 - group["decay"]) * grad_sq or None
