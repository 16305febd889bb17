"""Gradient descent projected to the sphere, with the effective learning rate of a GWSI or RMSprop scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from equilibria.control._optimizer import CheckedOptimizer, as_number, require_fine, sum_of_squares, with_gradient
from equilibria.errors import EquilibriaError, one_of, positive, within
from equilibria.theory.effective_schedulers import (
    SchedulerParameters,
    quasi_rmsprop_parameters,
    rmsprop_scheduler_step,
)

SphereScheduler: TypeAlias = Literal["gwsi", "quasi_rmsprop", "rmsprop"]
"""How `ProjectedGD` sets its effective learning rate."""
Sphere: TypeAlias = Literal["tensor", "group"]
"""The weights that share one sphere: each tensor by itself, or all tensors of a group together."""


class ProjectedGD(CheckedOptimizer):
    """Gradient descent on the sphere: ``theta' = P(theta - eta grad L(theta))``, P(x) = x/||x|| (Lyu, Li & Arora).

    A weight keeps the norm r it has at its first step; theta = w / r. The effective learning rate eta comes from the
    scheduler:

    - "gwsi": exactly the directions of gradient descent with learning rate lr and coupled weight decay on a
      scale-invariant weight (Lemma 3.1, Theorem B.7), ``eta = lr / ((1 - lr wd) q)``, where q is the squared norm of
      that weight, ``q' = (1 - lr wd)^2 q + lr^2 ||grad L(theta)||^2 / q``. lr may follow a schedule.
    - "quasi_rmsprop": the RMSprop scheduler that imitates it (Theorem B.9), ``eta = v^(-1/2)``,
      ``v' = b v + (1-b) ||grad L(theta)||^2 / base^2`` with base = sqrt(2 lr wd), b = 1 - 4 lr wd.
    - "rmsprop": the same recursion with base = lr and any b = ``decay`` (Definition B.3).

    The loss must not depend on the norm: of each tensor (``sphere="tensor"``), or of all tensors of a group together
    (``sphere="group"``, the weaker condition and the one of the paper).

    Args:
        params: parameters or parameter groups, all of them scale-invariant.
        lr: learning rate of the gradient descent to follow; base learning rate for "rmsprop".
        weight_decay: its coupled weight decay, for "gwsi" and "quasi_rmsprop".
        scheduler: "gwsi", "quasi_rmsprop" or "rmsprop".
        decay: of the moment per step, for "rmsprop" only.
        effective_lr: initial eta; by default lr / ((1 - lr wd) ||w||^2), except for "rmsprop", which needs one.
        sphere: "tensor" or "group": the weights that share one sphere.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = ProjectedGD([w], lr=0.5, weight_decay=0.1)
        >>> (w[0] / w.norm()).backward()
        >>> optimizer.step()
        >>> round(w.norm().item(), 12), round(optimizer.state[w]["effective_lr"], 6)  # 0.5 / (0.95 * 25)
        (5.0, 0.021053)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        weight_decay: float = 0.0,
        scheduler: SphereScheduler = "gwsi",
        decay: float | None = None,
        effective_lr: float | None = None,
        sphere: Sphere = "tensor",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "scheduler": scheduler,
            "decay": decay,
            "effective_lr": effective_lr,
            "sphere": sphere,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the settings and the type of a parameter group and add it."""
        super().add_param_group(param_group)
        try:
            require_fine(self.param_groups[-1]["params"], by="ProjectedGD")
        except EquilibriaError:
            self.param_groups.pop()
            raise

    def _check_group(self, settings: dict[str, Any]) -> None:
        _check(settings)

    def _move_all(self) -> None:
        planned = [(sphere, group) for group in self.param_groups for sphere in _spheres(group)]
        for move in [self._plan(sphere, group) for sphere, group in planned]:  # all are planned before one is made
            move.make(self.state)

    def _plan(self, weights: list[Tensor], group: dict[str, Any]) -> _Move:
        _check(group)
        state = self.state.get(weights[0], {})
        radius = state["radius"] if state else sum_of_squares(weights) ** 0.5
        if radius == 0:
            raise EquilibriaError(
                f"got a zero weight of shape {tuple(weights[0].shape)}; expected a direction", argument="params"
            )
        lr, wd = as_number("lr", group["lr"]), float(group["weight_decay"])
        unit_grad_sq = sum_of_squares([w.grad for w in weights if w.grad is not None]) * radius**2
        if group["scheduler"] == "gwsi":
            norm_sq = state["norm_sq"] if state else _first_norm_sq(group, lr, radius)
            eta = lr / ((1 - lr * wd) * norm_sq)
            changes = {"norm_sq": (1 - lr * wd) ** 2 * norm_sq + lr**2 * unit_grad_sq / norm_sq}
        else:
            moment = state["moment"] if state else _first_effective_lr(group, lr, radius) ** -2
            eta = moment**-0.5
            parameters = _parameters(group, lr)
            changes = {"moment": float(rmsprop_scheduler_step(moment, unit_grad_sq, parameters=parameters))}
        return _Move(weights, radius, eta, {**changes, "radius": radius, "effective_lr": eta})


@dataclass(frozen=True, slots=True)
class _Move:
    """A step of one sphere whose settings have been checked."""

    weights: list[Tensor]
    radius: float
    effective_lr: float
    state: dict[str, float]

    def make(self, states: Any) -> None:
        """Step, project, and store the state with the first tensor of the sphere."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        torch._foreach_add_(self.weights, gradients, alpha=-self.effective_lr * self.radius**2)
        torch._foreach_mul_(self.weights, self.radius / sum_of_squares(self.weights) ** 0.5)
        states[self.weights[0]].update(self.state)


def _spheres(group: dict[str, Any]) -> Iterator[list[Tensor]]:
    """The tensors of each sphere that has gradients."""
    moving = with_gradient(group["params"])
    if group["sphere"] == "tensor":
        yield from ([weight] for weight in moving)
    elif len(moving) == len(group["params"]):
        yield moving
    elif moving:
        raise EquilibriaError(
            f"got gradients for {len(moving)} of the {len(group['params'])} tensors of one sphere; expected all or "
            "none: a tensor that the loss does not depend on needs a gradient of zeros, or a separate group"
        )


def _check(group: dict[str, Any]) -> None:
    scheduler = one_of("scheduler", group["scheduler"], get_args(SphereScheduler))
    one_of("sphere", group["sphere"], get_args(Sphere))
    lr = within("lr", as_number("lr", group["lr"]), low=0)
    decay = within("weight_decay", group["weight_decay"], low=0)
    if group["effective_lr"] is not None:
        positive("effective_lr", group["effective_lr"])
    if scheduler == "rmsprop":
        _check_rmsprop(group)
        positive("lr", lr)
    elif group["decay"] is not None:
        raise EquilibriaError(
            f"got decay={group['decay']:g} with scheduler={scheduler!r}; expected it for 'rmsprop' only",
            argument="decay",
        )
    elif scheduler == "gwsi":
        within("lr*weight_decay", lr * decay, low=0, below=1)
    else:
        within("lr*weight_decay", lr * decay, above=0, below=0.25)


def _check_rmsprop(group: dict[str, Any]) -> None:
    if group["decay"] is None or group["effective_lr"] is None or group["weight_decay"] != 0:
        settings = ", ".join(f"{name}={group[name]}" for name in ("decay", "effective_lr", "weight_decay"))
        raise EquilibriaError(
            f"got {settings} with scheduler='rmsprop'; expected decay and effective_lr, which it cannot derive from "
            "weight decay, and no weight_decay"
        )
    within("decay", group["decay"], above=0, below=1)


def _parameters(group: dict[str, Any], lr: float) -> SchedulerParameters:
    if group["scheduler"] == "rmsprop":
        return SchedulerParameters(lr, group["decay"])
    return quasi_rmsprop_parameters(lr * group["weight_decay"])


def _first_effective_lr(group: dict[str, Any], lr: float, radius: float) -> float:
    if group["effective_lr"] is not None:
        return float(group["effective_lr"])
    return lr / ((1 - lr * float(group["weight_decay"])) * radius**2)


def _first_norm_sq(group: dict[str, Any], lr: float, radius: float) -> float:
    """The squared norm at which gradient descent has the first effective learning rate."""
    if group["effective_lr"] is None:
        return radius**2
    return positive("lr", lr) / ((1 - lr * float(group["weight_decay"])) * float(group["effective_lr"]))
