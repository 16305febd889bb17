"""Who reports the update that was really made? The truth is w_new - w_old in float64."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from peers import composer, naive, ours
from peers.eigenvalue import Batch

STEPS, JUDGED = 30, 10  # steps in all, and how many of the last are judged
HALF_UNIT = 2.0**-24  # of float32
Make = Callable[[nn.Module], torch.optim.Optimizer]

SETTINGS: dict[str, Make] = {
    "SGD, momentum 0.9, lr 0.05, decay 5e-4": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4
    ),
    "SGD, lr 1e-5": lambda net: torch.optim.SGD(net.parameters(), lr=1e-5),
    "AdamW, lr 1e-3, decay 0.01 (1e-5 a step, composer's default)": lambda net: torch.optim.AdamW(
        net.parameters(), lr=1e-3, weight_decay=0.01
    ),
    "AdamW, lr 1e-3, decay 0.1": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1),
    "AdamW, lr 1e-3, decay 1": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1.0),
}


@dataclass
class Errors:
    """Relative ones, over layers and steps.

    Attributes:
        rounding: how far the update in float32 weights may be from the one that was asked for, by rounding alone.
    """

    tool: str
    quantity: str
    found: list[float] = field(default_factory=list)
    rounding: list[float] = field(default_factory=list)

    def excess(self) -> float:
        """The largest error beyond rounding."""
        return max(error - allowed for error, allowed in zip(self.found, self.rounding, strict=True))

    @property
    def median(self) -> float:
        return statistics.median(self.found)

    @property
    def largest(self) -> float:
        return max(self.found)


def measure(net: nn.Module, batch: Batch) -> dict[str, list[Errors]]:
    """Setting -> errors of every tool."""
    return {name: _of(copy.deepcopy(net), batch, make) for name, make in SETTINGS.items()}


def _of(net: nn.Module, batch: Batch, make: Make) -> list[Errors]:
    optimizer, rows = make(net), dict[tuple[str, str], Errors]()
    weights = {name: param for name, param in net.named_parameters() if param.ndim >= 2}
    last_step = ours.LastStep(net, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(net(batch[0]), batch[1]).backward()
        old = {name: weight.detach().clone() for name, weight in weights.items()}
        optimizer.step()
        if step >= STEPS - JUDGED:
            measured = last_step.read()
            for name, weight in weights.items():
                rounding = HALF_UNIT * (old[name].norm() / true_norm(weight.detach(), old[name])).item()
                for key, error in _errors(optimizer, weight, old[name], measured[name]).items():
                    row = rows.setdefault(key, Errors(*key))
                    row.found.append(error)
                    row.rounding.append(rounding)
    last_step.close()
    return list(rows.values())


def _errors(
    optimizer: torch.optim.Optimizer, weight: Tensor, old: Tensor, measured: tuple[float, float]
) -> dict[tuple[str, str], float]:
    lr = optimizer.param_groups[0]["lr"]
    new = weight.detach()
    norm, angle = true_norm(new, old), true_angle(new, old)
    found = {
        ("equilibria watch", "update norm"): measured[0] / norm,
        ("equilibria watch", "angle"): measured[1] / angle,
        ("naive loop", "update norm"): naive.update_norm(new, old) / norm,
        ("naive loop", "angle"): naive.angle(new, old) / angle,
        ("folk rule lr ‖g‖ / ‖w‖", "relative update"): naive.folk_ratio(weight, lr=lr) / (norm / old.double().norm()),
    }
    logged = composer.metrics(optimizer, weight)
    if "update" in logged:
        found["composer's metric", "update norm"] = logged["update"] / norm
    return {key: abs(float(ratio) - 1) for key, ratio in found.items()}


def true_norm(new: Tensor, old: Tensor) -> float:
    return (new.double() - old.double()).norm().item()


def true_angle(new: Tensor, old: Tensor) -> float:
    """Without a cosine, which knows nothing of small angles."""
    one, other = (vector.double() / vector.double().norm() for vector in (new, old))
    return 2 * math.atan2((one - other).norm().item(), (one + other).norm().item())
