"""The table of everything that controls training; a new controller is one more row.

A row says how to build the controller for parameter groups of a small network with two normalised layers. The tests
find it here and put it through all that a good citizen of torch must stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from equilibria.control import (
    SGDW,
    AngularSchedule,
    FoldedWeightDecay,
    Lion,
    ProjectedGD,
    RescaleOnDecay,
    Rotational,
    ScalarRMSprop,
    TaperedExponential,
    WeightDecayScheduler,
)


@dataclass(frozen=True)
class Controls:
    """What a training loop steps: an optimizer, and perhaps a scheduler after it."""

    optimizer: torch.optim.Optimizer
    scheduler: Any = None

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


Make = Callable[[nn.Module, list[dict[str, Any]], list[Tensor], dict[str, Any]], Controls]
"""(model, groups with lr and weight decay, invariant tensors among them, {"foreach": ...} or {}) -> controls."""


@dataclass(frozen=True)
class Row:
    """A controller and what may be asked of it.

    Attributes:
        name: for the test report.
        make: builds it.
        lr: learning rate of the first group; the second has half of it.
        weight_decay: of the first group; the second has twice as much.
        bf16: whether weights of bfloat16 are allowed; otherwise they must be refused.
        refuses_nan: whether a gradient that is not finite is refused; otherwise the controller must stay finite itself.
        foreach: whether torch's foreach option reaches an optimizer inside.
        only_invariant: whether all its parameters must be scale-invariant.
    """

    name: str
    make: Make
    lr: float = 0.05
    weight_decay: float = 0.01
    bf16: bool = True
    refuses_nan: bool = True
    foreach: bool = False
    only_invariant: bool = False


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    """An optimizer that needs nothing but its groups."""
    return lambda _model, groups, _invariant, options: Controls(kind(groups, **settings, **options))


def rotational(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        return Controls(Rotational(inner, invariant, model=model, **settings))

    return make


def angular(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        return Controls(inner, AngularSchedule(inner, invariant=invariant, **settings))

    return make


def folded(kind: type[FoldedWeightDecay], **settings: Any) -> Make:
    """Folding needs groups of scale-invariant weights alone."""

    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inside = {id(weight) for weight in invariant}
        split = []
        for group in groups:
            for wanted in (True, False):
                params = [param for param in group["params"] if (id(param) in inside) is wanted]
                split += [{**group, "params": params}] if params else []
        drop = StepLR(SGD(model, split, invariant, options).optimizer, 3, gamma=0.5)
        return Controls(drop.optimizer, kind(drop, model, invariant=invariant, **settings))

    return make


def rescaled(plain: Make) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        drop = StepLR(plain(model, groups, invariant, options).optimizer, 3, gamma=0.5)
        return Controls(drop.optimizer, RescaleOnDecay(drop, model, invariant=invariant))

    return make


def decayed(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        drop = StepLR(plain(model, groups, invariant, options).optimizer, 3, gamma=0.5)
        return Controls(drop.optimizer, WeightDecayScheduler(drop, **settings))

    return make


SGD, ADAMW = optimizer(torch.optim.SGD, momentum=0.9), optimizer(torch.optim.AdamW)

ROWS = [
    Row("SGDW", optimizer(SGDW, momentum=0.9)),
    Row("Lion", optimizer(Lion), lr=0.01),
    Row("ScalarRMSprop", optimizer(ScalarRMSprop)),
    Row("ProjectedGD, GWSI", optimizer(ProjectedGD), bf16=False, only_invariant=True),
    Row("ProjectedGD, one sphere", optimizer(ProjectedGD, sphere="group"), bf16=False, only_invariant=True),
    Row("ProjectedGD, quasi", optimizer(ProjectedGD, scheduler="quasi_rmsprop"), bf16=False, only_invariant=True),
    Row("Rotational SGD", rotational(SGD), bf16=False, foreach=True),
    Row("Rotational SGD, rows", rotational(SGD, granularity="row"), bf16=False, foreach=True),
    Row("Rotational AdamW", rotational(ADAMW, centred=True), lr=1e-3, bf16=False, foreach=True),
    Row("Rotational Lion", rotational(optimizer(Lion)), lr=1e-3, bf16=False),
    Row("Rotational SGDW", rotational(optimizer(SGDW, momentum=0.9)), bf16=False),
    Row("AngularSchedule", angular(SGD, angle=0.02), refuses_nan=False, foreach=True),
    Row("AngularSchedule, AdamW", angular(ADAMW, angle=0.02), lr=1e-3, refuses_nan=False, foreach=True),
    Row("AngularSchedule by wd", angular(SGD, angle=0.02, by="weight_decay"), refuses_nan=False, foreach=True),
    Row("FoldedWeightDecay", folded(FoldedWeightDecay), refuses_nan=False, foreach=True),
    Row("TEXP", folded(TaperedExponential), refuses_nan=False, foreach=True),
    Row("TEXP v2", folded(TaperedExponential, instant_drop=False), refuses_nan=False, foreach=True),
    Row("RescaleOnDecay", rescaled(SGD), refuses_nan=False, foreach=True),
    Row("RescaleOnDecay, AdamW", rescaled(ADAMW), lr=0.01, refuses_nan=False, foreach=True),
    Row("RescaleOnDecay, SGDW", rescaled(optimizer(SGDW, momentum=0.9))),
    Row("WeightDecayScheduler", decayed(SGD, hold="angle"), refuses_nan=False, foreach=True),
]
