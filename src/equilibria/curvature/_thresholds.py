"""Stability thresholds: the curvature at which an optimizer with its present settings becomes unstable.

For Adam that is the curvature of the preconditioned Hessian, so its preconditioner is here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import Objective, Params
from equilibria.optimizers.rules import follows
from equilibria.tensors.parameters import unwrap_optimizer
from equilibria.theory.stability import adam_threshold, momentum_threshold, nesterov_threshold

_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_MUST_AGREE = ("lr", "momentum", "dampening", "nesterov", "betas")


@dataclass(frozen=True, slots=True)
class StabilityLimit:
    """The stability threshold of an optimizer, with the settings it follows from.

    Attributes:
        threshold: the eigenvalue of the Hessian (Adam: of the preconditioned Hessian) at which R = 1; infinite at lr=0.
        lr: learning rate.
        weight_decay: of the group with the most elements.
        plain: whether it is gradient descent with at most weight decay, which the laws of the edge require.
        law: the law of the threshold; pass it to `equilibria.cite`.
    """

    threshold: float
    lr: float
    weight_decay: float
    plain: bool
    law: str

    def ratio(self, curvature: float) -> float:
        """R; see `ratio_to_threshold`."""
        return ratio_to_threshold(curvature, self.threshold)


def ratio_to_threshold(curvature: float, threshold: float) -> float:
    """R = curvature / threshold; infinite where weight decay alone is unstable, so that the threshold is not positive.

    Example:
        >>> ratio_to_threshold(2.0, 4.0), ratio_to_threshold(0.0, -1.0)
        (0.5, inf)
    """
    return curvature / threshold if threshold > 0 else math.inf


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's curvature is that of the preconditioned Hessian."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def stability_limit(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], *, scale_invariant: bool
) -> StabilityLimit:
    """The threshold of SGD (with or without momentum, Nesterov's too), Adam or AdamW.

    Args:
        optimizer: its present settings count.
        params: the parameters of the Hessian; all must be trained with the same lr and momentum. Where weight decay
            differs between them (as for weights and biases), that of the most elements counts: the threshold is off by
            lr x wd at most.
        scale_invariant: whether the loss is scale-invariant in these parameters together.

    Raises:
        EquilibriaError: if the optimizer is another one, or settings differ between the parameters.
    """
    group = _common_group(optimizer, params)
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    momentum = float(group.get("momentum", 0.0))
    if group.get("maximize"):
        raise EquilibriaError(
            "got an optimizer with maximize=True; expected one that minimises the loss", argument="optimizer"
        )
    if is_adam(optimizer):
        _check_decoupled(optimizer, group)
    plain = momentum == 0 and not is_adam(optimizer)
    law = _law(optimizer, group, scale_invariant=scale_invariant)
    if lr == 0:  # as at the ends of schedules
        return StabilityLimit(math.inf, lr, decay, plain, law)
    if is_adam(optimizer):
        return StabilityLimit(float(adam_threshold(lr, decay, beta1=float(group["betas"][0]))), lr, decay, plain, law)
    if group["nesterov"]:
        threshold = nesterov_threshold(lr, decay, momentum=momentum, scale_invariant=scale_invariant)
    else:
        dampening = float(group["dampening"]) if momentum else 0.0  # torch ignores it without momentum
        threshold = momentum_threshold(
            lr, decay, momentum=momentum, dampening=dampening, scale_invariant=scale_invariant
        )
    return StabilityLimit(float(threshold), lr, decay, plain, law)


def _law(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, scale_invariant: bool) -> str:
    if is_adam(optimizer):
        return "stability.adam_threshold"
    if group["nesterov"]:
        return "stability.nesterov_threshold"
    if group["momentum"] or (group["weight_decay"] and not scale_invariant):
        return "stability.momentum_threshold"  # at momentum 0 the one law of 2/lr - wd
    return "stability.raw_threshold"


def _common_group(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Mapping[str, Any]:
    """The parameter group with the most elements of ``params``; raises if settings that matter differ."""
    if not any(isinstance(optimizer, kind) and follows(optimizer, kind) for kind in _KNOWN):
        raise EquilibriaError(
            f"got an optimizer of type {type(optimizer).__name__}, whose stability threshold is unknown; expected "
            "torch.optim.SGD, Adam or AdamW, with their own step; equilibria.sharpness measures the sharpness alone",
            argument="optimizer",
        )
    wanted = {id(param) for param in params}
    sizes = [sum(param.numel() for param in group["params"] if id(param) in wanted) for group in optimizer.param_groups]
    groups = [group for group, size in zip(optimizer.param_groups, sizes, strict=True) if size]
    for name in _MUST_AGREE:
        values = {str(group.get(name)) for group in groups}
        if len(values) > 1:
            raise EquilibriaError(
                f"got parameter groups with {name}={', '.join(sorted(values))}, for which there is no single "
                "threshold; expected one value: select= the parameters of one group",
                argument="select",
            )
    return optimizer.param_groups[sizes.index(max(sizes))]


def _check_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    if group["weight_decay"] and not decoupled:
        raise EquilibriaError(
            f"got Adam with weight_decay={group['weight_decay']:g}, which its preconditioner divides, so that "
            "there is no single threshold; expected AdamW, or weight_decay=0",
            argument="optimizer",
        )


# ---- Adam's preconditioner


def adam_preconditioner(objective: Objective, optimizer: object) -> Params:
    """Adam's preconditioner P by parameter name, with the second moments of the last step.

    ``P = sqrt(v / (1 - beta2^t)) + eps``: Adam moves by ``-lr m/(1 - beta1^t) / P``. Compare the largest eigenvalue of
    ``P^(-1/2) H P^(-1/2)`` with `equilibria.theory.stability.adam_threshold`.

    Args:
        objective: the loss of the network in training.
        optimizer: a torch.optim.Adam or AdamW, or a wrapper around one, that has taken a step.

    Returns:
        Name -> positive tensor, for the parameters of the objective that the optimizer trains.

    Raises:
        EquilibriaError: if the optimizer is not Adam or AdamW, has not taken a step, or trains none of the parameters.
    """
    inner = unwrap_optimizer(optimizer)
    names = {(param.data_ptr(), param.shape): name for name, param in objective.params.items()}
    preconditioner: Params = {}
    for group in inner.param_groups:
        for param in group["params"]:
            name = names.get((param.data_ptr(), param.shape))
            if name is not None:
                preconditioner[name] = _denominator(inner.state.get(param, {}), group, type(inner).__name__)
    if not preconditioner:
        raise EquilibriaError(
            f"got an optimizer that trains none of the {len(names)} parameters of the objective; expected the one that "
            "trains its model",
            argument="optimizer",
        )
    return preconditioner


def _denominator(state: Any, group: Any, kind: str) -> Tensor:
    second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    if second not in state or "betas" not in group:
        raise EquilibriaError(
            f"got an optimizer of type {kind} without second moments; expected Adam or AdamW after its first step",
            argument="optimizer",
        )
    steps = float(state["step"])
    corrected = state[second].detach() / (1 - group["betas"][1] ** steps)
    denominator: Tensor = torch.sqrt(corrected) + group["eps"]
    return denominator
