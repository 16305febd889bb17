"""Runs that went wrong: a NaN in the data, ReLUs that die, weights too coarse for their decay, an end at lr 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.watching import WatchedRun
from tests.helpers.scripts import Watch, images, trained_twice

STEPS = 200


def shown(run: WatchedRun) -> str:
    """The table of a run, its lines joined."""
    return " ".join(str(run.table()).split())


def normalised(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(192, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU()),
        *(nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4)),
    ).to(dtype)


def batch(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(inputs), (32,))
    return inputs[chosen] + torch.randn_like(inputs[chosen]), labels[chosen]


def one_nan(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = normalised(), images(320)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    run = watch(model, optimizer)
    for step in range(STEPS):
        seen, known = batch(inputs, labels)
        if step == STEPS - 40:
            seen[3, 0, 2, 2] = math.nan
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(seen), known)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    return model


def test_the_headline_of_a_run_that_is_nan_says_so_and_nothing_is_said_of_equilibria():
    run = trained_twice(one_nan)
    assert shown(run).startswith("3 of 3 parameters (1.weight, ...) are no longer finite.")
    assert not {"out_of_equilibrium", "angle_off"} & {finding.kind for finding in run.findings()}
    with pytest.raises(EquilibriaError, match=r"1\.weight and 2 more: no longer finite"):
        eq.forecast(run, schedule=2e-3, steps=2 * STEPS)


def dying_relus(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    inputs, labels = images(320)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    watch(model, optimizer)
    for step in range(2 * STEPS):
        if step == STEPS // 2:
            with torch.no_grad():
                model[3].bias.fill_(-1e3)
        seen, known = batch(inputs, labels)
        optimizer.zero_grad()
        functional.cross_entropy(model(seen), known).backward()
        optimizer.step()
    return model


def test_angles_that_rounding_makes_are_called_so():
    run = trained_twice(dying_relus)
    angle = run.samples().filter(run.samples()["step"].to_numpy() > 2 * STEPS - 20)["angle"].to_numpy()
    assert 0 < angle[0] < 2**-25  # decay alone moves 1.weight, along itself
    assert "rad per step (steps 300 to 399), no more than rounding makes" in shown(run)
    with pytest.raises(EquilibriaError, match="gradient exactly 0 since step 100"):
        eq.forecast(run, schedule=0.05, steps=4 * STEPS)


def in_bfloat16(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = normalised(torch.bfloat16), images(320)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4)
    watch(model, optimizer)
    for _ in range(STEPS):
        seen, known = batch(inputs, labels)
        optimizer.zero_grad()
        functional.cross_entropy(model(seen.bfloat16()).float(), known).backward()
        optimizer.step()
    return model


def test_weights_whose_decay_is_rounded_away_have_no_time_to_settle():
    run = trained_twice(in_bfloat16)
    table = shown(run)
    assert "rounds the weight decay" in table and table.count("decay lost") == 3
    for column in ("steps left", "norm*", "to settle", "in equilibrium"):
        assert column not in table
    assert [finding.severity for finding in run.findings()].count("warning") == 1  # not twice, in different words
    with pytest.raises(EquilibriaError, match="rounds its weight decay away"):
        eq.forecast(run, schedule=1e-3, steps=2 * STEPS)


def stepped_every_epoch(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    epochs, model, (inputs, labels) = 20, normalised(), images(320)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    watch(model, optimizer)
    for _ in range(epochs):
        for _ in range(20):
            seen, known = batch(inputs, labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(seen), known).backward()
            optimizer.step()
        scheduler.step()
    return model


def test_a_cosine_stepped_every_epoch_runs_out_as_one_stepped_at_every_step():
    run = trained_twice(stepped_every_epoch)
    table = shown(run)
    assert "lr is falling, too fast for a time to settle at one lr" in table
    assert "steps left" not in table and "out of equilibrium" not in table
