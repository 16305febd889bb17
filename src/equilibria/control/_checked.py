"""What the optimizers of this folder share: a step that looks at everything before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from equilibria.control._gradients import loss_of, require_usable, with_gradient

_ANY = 1e-30  # a learning rate that nothing forbids


class CheckedOptimizer(Optimizer):
    """An optimizer whose groups are checked when they are added, and these and its gradients before every step.

    A subclass says what is wrong with a group (`_check_group`) and how one weight moves (`_move`), or how all do
    (`_move_all`), which raises before it changes anything, if it raises.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, its settings checked."""
        if isinstance(param_group, dict):  # torch says what is wrong with anything else
            self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it asks for the gradients' values, by address
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; ``closure`` computes the loss and its gradients, and its value is returned.

        Raises:
            EquilibriaError: a setting is out of range (a tensor lr on a device other than the CPU is not looked at), a
                gradient is sparse, complex or not finite, or something else forbids the step; nothing was changed then.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self._check_group(_at_hand(group))
        require_usable((weight for _, weights in self._moving() for weight in weights), by=type(self).__name__)
        self._move_all()
        return loss

    def _moving(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Every group, and its parameters that have a gradient to follow."""
        return [(group, with_gradient(group["params"])) for group in self.param_groups]

    def _check_group(self, settings: dict[str, Any]) -> None:
        """Refuse settings of a group."""

    def _move_all(self) -> None:
        for group, weights in self._moving():
            for weight in weights:
                self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def _at_hand(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, without a learning rate that lies on a device, where fetching it at every step would wait."""
    lr = group["lr"]
    return {**group, "lr": _ANY} if isinstance(lr, Tensor) and lr.device.type != "cpu" else group
