"""What Adam divides the gradient by, read from its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import Objective, Params
from equilibria.measure.parameters import unwrap_optimizer


def adam_preconditioner(objective: Objective, optimizer: object) -> Params:
    """Adam's preconditioner P, by name, as it would be in the next step if the second moments stood still.

    ``P = sqrt(v / (1 - beta2^t)) + eps``: Adam moves by ``-lr m/(1 - beta1^t) / P``. The largest eigenvalue of
    ``P^(-1/2) H P^(-1/2)`` is to be compared with `equilibria.theory.thresholds.adam_threshold`.

    Args:
        objective: the loss of the network that is trained.
        optimizer: a torch.optim.Adam or AdamW, or a wrapper around one, that has taken a step.

    Returns:
        Name -> positive tensor, for the parameters of the objective that the optimizer trains.

    Raises:
        EquilibriaError: if the optimizer is another one, has not taken a step, or trains none of them.
    """
    inner = unwrap_optimizer(optimizer)
    names = {(param.data_ptr(), param.shape): name for name, param in objective.params.items()}
    found: Params = {}
    for group in inner.param_groups:
        for param in group["params"]:
            name = names.get((param.data_ptr(), param.shape))
            if name is not None:
                found[name] = _denominator(inner.state.get(param, {}), group, type(inner).__name__)
    if not found:
        raise EquilibriaError(
            f"got an optimizer that trains none of the {len(names)} parameters of the objective; expected the one that "
            "trains its model"
        )
    return found


def _denominator(state: Any, group: Any, kind: str) -> Tensor:
    second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    if second not in state or "betas" not in group:
        raise EquilibriaError(
            f"got an optimizer of type {kind} without second moments; expected Adam or AdamW after its first step"
        )
    steps = float(state["step"])
    corrected = state[second].detach() / (1 - group["betas"][1] ** steps)
    denominator: Tensor = torch.sqrt(corrected) + group["eps"]
    return denominator
