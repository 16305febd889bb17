"""A misuse of any public entry point raises an error that names the argument at fault, as the user typed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.control import (
    AngularSchedule,
    FoldedWeightDecay,
    ProjectedGD,
    RescaleOnDecay,
    Rotational,
    WeightDecayScheduler,
    start_in_equilibrium,
)
from equilibria.curvature import adam_preconditioner, sharpness_by_group
from equilibria.theory import SGD, AdamW, Muon, schedules


@dataclasses.dataclass
class World:
    """A small network in front of a BatchNorm, and what trains it."""

    folder: Path

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.plain_sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.stranger = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1)
        self.batch = torch.randn(16, 4), torch.randint(3, (16,))
        self.objective = eq.objective(self.model, functional.cross_entropy)
        self.invariant = [self.model[0].weight]
        (self.folder / "file").write_text("not a folder")
        (self.folder / "others").mkdir()
        (self.folder / "others" / "notes.txt").write_text("not a run")

    def watch(self, **settings: Any) -> Any:
        model, optimizer = settings.pop("model", self.model), settings.pop("optimizer", self.sgd)
        return eq.watch(model, optimizer, **settings)

    def track(self, **settings: Any) -> Any:
        names = ("objective", "optimizer", "batch")
        first = [
            settings.pop(name, value) for name, value in zip(names, (self.objective, self.sgd, self.batch), strict=True)
        ]
        return eq.SharpnessTracker(*first, **settings)

    def sharpness(self, **settings: Any) -> Any:
        objective, batch = settings.pop("objective", self.objective), settings.pop("batch", self.batch)
        return eq.sharpness(objective, batch, **settings)

    def start(self, **settings: Any) -> Any:
        model, optimizer = settings.pop("model", self.model), settings.pop("optimizer", self.sgd)
        loss = lambda batch: functional.cross_entropy(self.model(batch[0]), batch[1])  # noqa: E731
        wanted = {"invariant": self.invariant, "loss": loss, "batches": [self.batch], **settings}
        return start_in_equilibrium(model, optimizer, **wanted)


def _flat_plan(optimizer: Any = None, schedule: Any = 0.1, **settings: Any) -> Any:
    return eq.plan(SGD(0.1, 5e-4) if optimizer is None else optimizer, schedule, **{"steps": 10, **settings})


class _HalfSink:
    def append(self, columns: object) -> None: ...


# (the argument at fault, the misuse), by what is called
MISUSES: dict[str, list[tuple[str, Callable[[World], object]]]] = {
    "watch": [
        ("model", lambda world: world.watch(model="net")),
        ("optimizer", lambda world: world.watch(optimizer="sgd")),
        ("optimizer", lambda world: world.watch(optimizer=[])),
        ("optimizer", lambda world: world.watch(optimizer=world.stranger)),
        ("every", lambda world: world.watch(every="often")),
        ("every", lambda world: world.watch(every=0)),
        ("select", lambda world: world.watch(select=3)),
        ("select", lambda world: world.watch(select=[3])),
        ("select", lambda world: world.watch(select="layer9.*")),
        ("select", lambda world: world.watch(select=lambda name, tensor: False)),
        ("granularity", lambda world: world.watch(granularity="column")),
        ("steps_per_epoch", lambda world: world.watch(steps_per_epoch=0)),
        ("invariant", lambda world: world.watch(invariant="0.weight")),
        ("invariant", lambda world: world.watch(invariant=["0.wieght"])),
        ("invariant", lambda world: world.watch(invariant=[])),
        ("invariant", lambda world: world.watch(invariant=world.model)),
        ("invariant", lambda world: world.watch(invariant=[torch.ones(2)])),
        ("sinks", lambda world: world.watch(sinks=3)),
        ("sinks", lambda world: world.watch(sinks=[_HalfSink()])),
        ("log_dir", lambda world: world.watch(log_dir=3)),
        ("log_dir", lambda world: world.watch(log_dir=world.folder / "file")),
        ("log_dir", lambda world: world.watch(log_dir=world.folder / "file" / "below")),
        ("log_dir", lambda world: world.watch(log_dir=world.folder / "others")),
    ],
    "a watched run": [
        ("sink", lambda world: world.watch().add_sink(_HalfSink())),
        ("optimizer", lambda world: world.watch().reattach(world.stranger)),
        ("state", lambda world: world.watch().load_state_dict({})),
        ("path", lambda world: world.watch().report(world.folder / "absent" / "a.html")),
        ("path", lambda world: world.watch().report(world.folder / "others" / "notes.txt")),
    ],
    "read_run": [
        ("path", lambda world: eq.read_run(3)),  # type: ignore[arg-type]
        ("path", lambda world: eq.read_run(world.folder / "absent")),
        ("path", lambda world: eq.read_run(world.folder / "others")),
    ],
    "sharpness": [
        ("objective", lambda world: world.sharpness(objective=world.model)),
        ("batch", lambda world: world.sharpness(batch=[])),
        ("batch", lambda world: world.sharpness(batch=(torch.randn(16, 5), world.batch[1]))),
        ("select", lambda world: world.sharpness(select=["0.wieght"])),
        ("select", lambda world: world.sharpness(select=lambda name, tensor: False)),
        ("k", lambda world: world.sharpness(k=0)),
        ("k", lambda world: world.sharpness(k=10_000)),
        ("end", lambda world: world.sharpness(end="middle")),
        ("tol", lambda world: world.sharpness(tol=0)),
        ("budget", lambda world: world.sharpness(budget=0)),
        ("method", lambda world: world.sharpness(method="guess")),
        ("warm", lambda world: world.sharpness(warm=3.0)),
        ("spherical", lambda world: world.sharpness(select=["2.weight"], spherical=True)),
        ("preconditioner", lambda world: world.sharpness(preconditioner={})),
        ("groups", lambda world: sharpness_by_group(world.objective, world.batch, groups=[])),
        ("groups", lambda world: sharpness_by_group(world.objective, world.batch, groups="0.weight")),
        ("optimizer", lambda world: adam_preconditioner(world.objective, world.adam)),
    ],
    "SharpnessTracker": [
        ("objective", lambda world: world.track(objective=world.model)),
        ("optimizer", lambda world: world.track(optimizer="sgd")),
        ("optimizer", lambda world: world.track(optimizer=world.stranger)),
        ("optimizer", lambda world: world.track(optimizer=torch.optim.RMSprop(world.model.parameters()))),
        ("batch", lambda world: world.track(batch=[])),
        ("every", lambda world: world.track(every="often")),
        ("select", lambda world: world.track(select=["0.wieght"])),
        ("spherical", lambda world: world.track(spherical=True)),
        ("spherical", lambda world: world.track(optimizer=world.adam, spherical=True)),
        ("tol", lambda world: world.track(tol=-1)),
        ("recheck", lambda world: world.track(recheck=0)),
        ("monitor", lambda world: world.track(monitor=world.model)),
        ("log_dir", lambda world: world.track(log_dir=world.folder / "others")),
    ],
    "plan": [
        ("optimizer", lambda world: _flat_plan("sgd")),
        ("optimizer", lambda world: _flat_plan(torch.optim.SGD)),
        ("optimizer", lambda world: _flat_plan(torch.optim.RMSprop(world.model.parameters()))),
        ("schedule", lambda world: _flat_plan(schedule="cosine")),
        ("schedule", lambda world: _flat_plan(schedule=[0.1, -0.1])),
        ("schedule", lambda world: _flat_plan(schedule=0.0)),
        ("weight_decay", lambda world: _flat_plan(weight_decay="none")),
        ("steps", lambda world: _flat_plan(steps=0)),
        ("steps_per_epoch", lambda world: _flat_plan(steps_per_epoch=0)),
        ("dtype", lambda world: _flat_plan(dtype="float8")),
        ("tolerance", lambda world: _flat_plan(tolerance=2)),
        ("shape", lambda world: _flat_plan(shape=(2, 2))),
        ("dim", lambda world: _flat_plan(Muon(0.02, 0.1), dim=4)),
        ("init_norm", lambda world: _flat_plan(AdamW(1e-3, 0.1), init_norm=1.0)),
    ],
    "AngularSchedule": [
        ("optimizer", lambda world: AngularSchedule("sgd", 0.01, invariant=world.invariant)),  # type: ignore[arg-type]
        ("angle", lambda world: AngularSchedule(world.sgd, "fast", invariant=world.invariant)),  # type: ignore[arg-type]
        ("angle", lambda world: AngularSchedule(world.sgd, -0.1, invariant=world.invariant)),
        ("angle", lambda world: AngularSchedule(world.sgd, [0.1, -0.1], invariant=world.invariant)),
        ("angle", lambda world: AngularSchedule(world.sgd, world.model, invariant=world.invariant)),  # type: ignore[arg-type]
        ("invariant", lambda world: AngularSchedule(world.sgd, 0.01, invariant=[])),
        ("invariant", lambda world: AngularSchedule(world.sgd, 0.01, invariant=["0.weight"])),
        ("by", lambda world: AngularSchedule(world.sgd, 0.01, invariant=world.invariant, by="wd")),  # type: ignore[arg-type]
        (
            "steps_per_epoch",
            lambda world: AngularSchedule(world.sgd, 0.01, invariant=world.invariant, steps_per_epoch=0),
        ),
    ],
    "other controllers": [
        ("scheduler", lambda world: RescaleOnDecay("cosine", model=world.model, invariant=world.invariant)),  # type: ignore[arg-type]
        ("model", lambda world: RescaleOnDecay(world.sgd, model="net", invariant=world.invariant)),  # type: ignore[arg-type]
        ("invariant", lambda world: RescaleOnDecay(world.sgd, model=world.model, invariant=["0.wieght"])),
        ("invariant", lambda world: RescaleOnDecay(world.plain_sgd, model=world.model, invariant=["0.weight"])),
        ("scheduler", lambda world: FoldedWeightDecay(world.adam, model=world.model, invariant=["0.weight"])),
        ("scheduler", lambda world: FoldedWeightDecay(world.sgd, model=world.model, invariant=["0.weight"])),
        ("optimizer", lambda world: Rotational("sgd", invariant=world.invariant)),  # type: ignore[arg-type]
        ("invariant", lambda world: Rotational(world.sgd, invariant=world.model)),  # type: ignore[arg-type]
        ("invariant", lambda world: Rotational(world.sgd, invariant=[torch.ones(2)])),
        ("granularity", lambda world: Rotational(world.sgd, invariant=world.invariant, granularity="column")),  # type: ignore[arg-type]
        ("scheduler", lambda world: WeightDecayScheduler("cosine", 1e-3)),  # type: ignore[arg-type]
        ("schedule", lambda world: WeightDecayScheduler(world.sgd, [1e-3, -1.0])),
        ("hold", lambda world: WeightDecayScheduler(world.sgd, hold="speed")),  # type: ignore[arg-type]
        ("groups", lambda world: WeightDecayScheduler(world.sgd, 1e-3, groups=[7])),
        ("groups", lambda world: WeightDecayScheduler(world.plain_sgd, 1e-3)),
        ("decay", lambda world: ProjectedGD(world.model.parameters(), lr=0.1, weight_decay=0.1, decay=0.5)),
    ],
    "start_in_equilibrium": [
        ("model", lambda world: world.start(model="net")),
        ("invariant", lambda world: world.start(invariant=["0.wieght"])),
        ("loss", lambda world: world.start(loss=3)),
        ("batches", lambda world: world.start(batches=[])),
        ("granularity", lambda world: world.start(granularity="column")),
        ("optimizer", lambda world: world.start(optimizer=torch.optim.RMSprop(world.model.parameters()))),
        ("invariant", lambda world: world.start(invariant=[world.invariant[0].requires_grad_(False)])),
    ],
    "laws": [
        ("betas", lambda world: AdamW(1e-3, 0.1, betas=(0.9,))),  # type: ignore[arg-type]
        ("nesterov", lambda world: SGD(0.1, 5e-4, nesterov=True)),
        ("weight_decay", lambda world: SGD(0.1, 0.0).equilibrium()),
        ("lr", lambda world: SGD(0.0, 0.1).equilibrium()),
        ("points", lambda world: schedules.FromValues([])),
        ("pieces", lambda world: schedules.Piecewise([(3, 0.1)])),
        ("pieces", lambda world: schedules.Piecewise([(0, 0.1), (4, 0.2), (2, 0.3)])),
        ("milestones", lambda world: schedules.MultiStep(0.1, milestones=[4, 2], factor=0.1)),
        ("target", lambda world: eq.cite("gravity")),
    ],
}


@pytest.mark.parametrize(
    ("argument", "misuse"),
    [
        pytest.param(argument, misuse, id=f"{called}-{argument}-{number}")
        for called, misuses in MISUSES.items()
        for number, (argument, misuse) in enumerate(misuses)
    ],
)
def test_a_misuse_names_its_argument(argument, misuse, tmp_path):
    with pytest.raises(eq.EquilibriaError) as raised:
        misuse(World(tmp_path))
    assert raised.value.argument == argument, str(raised.value)
