"""Parameter groups: what is scale-invariant decays, the rest does not and has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from equilibria.errors import EquilibriaError, within


def two_groups(
    model: nn.Module, invariant: Collection[str], *, lr: float, weight_decay: float, other_lr: float
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: the scale-invariant weights first, then all others, without weight decay.

    Args:
        model: the network.
        invariant: names of its scale-invariant weights, as in ``model.named_parameters()``.
        lr: of these.
        weight_decay: of these.
        other_lr: of the others, such as BatchNorm's scales and the last layer.

    Raises:
        EquilibriaError: a name that the model does not have, one name that is in no list, or a negative number.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
        >>> groups = two_groups(net, ["0.weight"], lr=0.5, weight_decay=5e-3, other_lr=0.1)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
        [(1, 0.5, 0.005), (2, 0.1, 0.0)]
    """
    if isinstance(invariant, str):
        raise EquilibriaError(f"got invariant={invariant!r}; expected a list of names: [{invariant!r}]")
    params = dict(model.named_parameters())
    chosen = dict.fromkeys(invariant)
    unknown = [name for name in chosen if name not in params]
    if unknown:
        raise EquilibriaError(
            f"got invariant={unknown[0]!r}, which the model lacks; expected names such as {next(iter(params))!r}"
        )
    others = [param for name, param in params.items() if name not in chosen]
    first = {
        "params": [params[name] for name in params if name in chosen],
        "lr": within("lr", lr, low=0),
        "weight_decay": within("weight_decay", weight_decay, low=0),
    }
    rest = {"params": others, "lr": within("other_lr", other_lr, low=0), "weight_decay": 0.0}
    return [first, *([rest] if others else [])]
