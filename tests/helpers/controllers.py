"""The table of everything that controls training; a new controller is one more row.

A row says how to build the controller for parameter groups of a small network with two normalised layers. The tests
find it here and put it through all that a good citizen of torch must stand.
"""

from __future__ import annotations

import warnings
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
    Hyperball,
    Lion,
    ProjectedGD,
    RelativeUpdateLimits,
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
        self.step_scheduler()
        return loss

    def step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

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
        foreach: whether torch's foreach and fused options reach an optimizer inside.
        only_invariant: whether all its parameters must be scale-invariant.
        sharded: whether weights may be DTensors; otherwise they must be refused.
        rounding: of a step that torch.compile changes, relative to the step.
    """

    name: str
    make: Make
    lr: float = 0.05
    weight_decay: float = 0.01
    bf16: bool = True
    refuses_nan: bool = True
    foreach: bool = False
    only_invariant: bool = False
    sharded: bool = True
    rounding: float = 1e-12


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    """An optimizer that needs nothing but its groups."""
    return lambda _model, groups, _invariant, options: Controls(kind(groups, **settings, **options))


def rotational(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        return Controls(Rotational(inner, invariant=invariant, model=model, **settings))

    return make


def held(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        return Controls(Hyperball(inner, invariant=invariant, model=model, **settings))

    return make


def limited(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        return Controls(RelativeUpdateLimits(inner, model=model, **settings))

    return make


def angular(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        inner = plain(model, groups, invariant, options).optimizer
        with warnings.catch_warnings():  # the groups hold other parameters, too, which get its lr
            warnings.filterwarnings("ignore", "AngularSchedule sets")
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
        return Controls(drop.optimizer, kind(drop, model=model, invariant=invariant, **settings))

    return make


def rescaled(plain: Make) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        drop = StepLR(plain(model, groups, invariant, options).optimizer, 3, gamma=0.5)
        return Controls(drop.optimizer, RescaleOnDecay(drop, model=model, invariant=invariant))

    return make


def decayed(plain: Make, **settings: Any) -> Make:
    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        drop = StepLR(plain(model, groups, invariant, options).optimizer, 3, gamma=0.5)
        return Controls(drop.optimizer, WeightDecayScheduler(drop, **settings))

    return make


def falling_decay(plain: Make) -> Make:
    """A schedule of weight decay is for one level of it: every group has its own."""

    def make(model: nn.Module, groups: Any, invariant: Any, options: Any) -> Controls:
        scheduler: Any = StepLR(plain(model, groups, invariant, options).optimizer, 3, gamma=0.5)
        optimizer = scheduler.optimizer
        for at, group in enumerate(groups):
            levels = [group["weight_decay"] / (1 + step) for step in range(8)]
            scheduler = WeightDecayScheduler(scheduler, levels, groups=[at])
        return Controls(optimizer, scheduler)

    return make


SGD, ADAMW = optimizer(torch.optim.SGD, momentum=0.9), optimizer(torch.optim.AdamW)
COMPILED_ADAM = 1e-4  # with a tensor lr it corrects the bias in float32: 1 - 0.999 keeps 6e-8 / 1e-3 of its digits
COMPILED_MUON = 1e-2  # orthogonalises in bfloat16
NESTEROV, ADAM = optimizer(torch.optim.SGD, momentum=0.9, nesterov=True), optimizer(torch.optim.Adam)
RMSPROP = optimizer(ProjectedGD, scheduler="rmsprop", decay=0.9, effective_lr=0.02)
ON_SPHERES: dict[str, Any] = {"bf16": False, "only_invariant": True}
TURNING: dict[str, Any] = {"bf16": False, "sharded": False}
ANGULAR: dict[str, Any] = {"refuses_nan": False, "foreach": True, "sharded": False}
TORCH_INSIDE: dict[str, Any] = {"refuses_nan": False, "foreach": True}

ROWS = [
    Row("SGDW", optimizer(SGDW, momentum=0.9)),
    Row("Lion", optimizer(Lion), lr=0.01),
    Row("ScalarRMSprop", optimizer(ScalarRMSprop)),
    Row("ProjectedGD, GWSI", optimizer(ProjectedGD), **ON_SPHERES),
    Row("ProjectedGD, one sphere", optimizer(ProjectedGD, sphere="group"), **ON_SPHERES),
    Row("ProjectedGD, quasi", optimizer(ProjectedGD, scheduler="quasi_rmsprop"), **ON_SPHERES),
    Row("ProjectedGD, RMSprop", RMSPROP, weight_decay=0.0, **ON_SPHERES),
    Row("Rotational SGD", rotational(SGD), foreach=True, **TURNING),
    Row("Rotational SGD, rows", rotational(SGD, granularity="row"), foreach=True, **TURNING),
    Row("Rotational Nesterov", rotational(NESTEROV), foreach=True, **TURNING),
    Row("Rotational AdamW", rotational(ADAMW, centred=True), lr=1e-3, foreach=True, **TURNING),
    Row("Rotational Lion", rotational(optimizer(Lion)), lr=1e-3, **TURNING),
    Row("Rotational SGDW", rotational(optimizer(SGDW, momentum=0.9)), **TURNING),
    Row("Hyperball SGD", held(SGD), foreach=True, **TURNING),
    Row("Hyperball AdamW, rows", held(ADAMW, granularity="row"), lr=1e-3, foreach=True, **TURNING),
    Row("Hyperball Lion, equilibrium", held(optimizer(Lion), norm="equilibrium"), lr=1e-3, **TURNING),
    Row("RelativeUpdateLimits", limited(SGD, low=0.01, high=0.02), foreach=True, sharded=False),
    Row(
        "RelativeUpdateLimits, rows", limited(ADAMW, high=5e-3, granularity="row"), lr=0.01, foreach=True, sharded=False
    ),
    Row("AngularSchedule", angular(SGD, angle=0.02), **ANGULAR),
    Row("AngularSchedule, AdamW", angular(ADAMW, angle=0.02), lr=1e-3, rounding=COMPILED_ADAM, **ANGULAR),
    Row("AngularSchedule by wd", angular(SGD, angle=0.02, by="weight_decay"), **ANGULAR),
    Row("FoldedWeightDecay", folded(FoldedWeightDecay), **TORCH_INSIDE),
    Row("TEXP", folded(TaperedExponential), **TORCH_INSIDE),
    Row("TEXP v2", folded(TaperedExponential, instant_drop=False), **TORCH_INSIDE),
    Row("RescaleOnDecay", rescaled(SGD), **TORCH_INSIDE),
    Row("RescaleOnDecay, Nesterov", rescaled(NESTEROV), **TORCH_INSIDE),
    Row("RescaleOnDecay, SGDW", rescaled(optimizer(SGDW, momentum=0.9))),
    Row("RescaleOnDecay, AdamW", rescaled(ADAMW), lr=0.01, rounding=COMPILED_ADAM, **TORCH_INSIDE),
    Row("RescaleOnDecay, Adam+L2", rescaled(ADAM), lr=0.01, rounding=COMPILED_ADAM, **TORCH_INSIDE),
    Row("RescaleOnDecay, Lion", rescaled(optimizer(Lion)), lr=0.01),
    Row("WeightDecayScheduler", falling_decay(SGD), **TORCH_INSIDE),
    Row("WeightDecayScheduler, angle", decayed(SGD, hold="angle"), **TORCH_INSIDE),
    Row("WeightDecayScheduler, norm", decayed(ADAMW, hold="norm"), lr=0.01, rounding=COMPILED_ADAM, **TORCH_INSIDE),
]
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    MUON = rescaled(optimizer(torch.optim.Muon))
    MATRICES: dict[str, Any] = {"refuses_nan": False, "only_invariant": True, "rounding": COMPILED_MUON}
    ROWS.append(Row("RescaleOnDecay, Muon", MUON, lr=0.01, **MATRICES))
    TURNED = {"only_invariant": True, "rounding": COMPILED_MUON, **TURNING}
    ROWS.append(Row("Rotational Muon", rotational(optimizer(torch.optim.Muon)), lr=0.01, **TURNED))
