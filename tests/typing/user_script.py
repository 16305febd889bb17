"""A user's script under mypy --strict: misspelled modes are errors; an ignore that is not needed fails `make lint`."""

import torch

import equilibria as eq
from equilibria.control import RescaleOnDecay, WeightDecayScheduler
from equilibria.planning import alternatives
from equilibria.theory import SGD

model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

with eq.watch(model, optimizer, every="auto", granularity="row") as monitor:
    text = str(monitor.table())
names: list[str] = monitor.samples().column_names
curve = eq.plan(optimizer, 1e-3, steps=100).curve

eq.watch(model, optimizer, every="atuo")  # type: ignore[arg-type]
eq.watch(model, optimizer, granularity="rows")  # type: ignore[arg-type]
WeightDecayScheduler(scheduler, hold="time-constant")  # type: ignore[arg-type]
RescaleOnDecay(scheduler, model, invariant=["0.weight"])  # type: ignore[call-arg]
RescaleOnDecay(scheduler, model=model, invariant=["0.weight"])

rule = SGD(0.1, 5e-4, momentum=0.9)
eq.translate(rule, to="sgdw", match="diffusion", momentum=0.5)
eq.translate(rule, to="sgdw", match="difusion")  # type: ignore[arg-type]
eq.translate(rule, to="sgdw", mach="diffusion")  # type: ignore[call-arg]
eq.translate(rule, to="moon")  # type: ignore[arg-type]
eq.fold(0.1, 5e-4, steps=10, optimizer="sgd")
eq.fold(0.1, 5e-4, steps=10, optimizer="sdg")  # type: ignore[arg-type]
alternatives(rule, 0.1, steps=100, init_norm=1.0, unit_grad_sq=1.0)
alternatives(rule, 0.1, steps=100, initial_norm=1.0)  # type: ignore[call-arg]
