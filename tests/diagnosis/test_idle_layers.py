"""Layers that no gradient moves: the report says since when and why, and predicts nothing for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tests.helpers.sample_worlds import World, edited, world
from torch import nn

import equilibria as eq
from equilibria.diagnosis import summarise_and_diagnose
from equilibria.records._metrics import KeptMetrics
from equilibria.records.tables import NO_GRADIENT
from equilibria.theory import SGD
from equilibria.views.run.terminal import run_table


@cache
def clean() -> World:
    return world(SGD(0.1, 2e-3, momentum=0.9), 800)


def rows() -> tuple[np.ndarray, np.ndarray]:
    return np.array(clean().samples["param"].to_pylist()), clean().samples["step"].to_numpy()


def with_zero_gradients(dead: np.ndarray):
    return edited(clean().samples, grad_norm=np.where(dead, 0.0, clean().samples["grad_norm"].to_numpy()))


@pytest.mark.parametrize("adam", [False, True])
def test_a_network_that_died_is_a_warning_with_the_loss_before_and_now(adam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = (
        torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
        if adam
        else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    )
    monitor, logged = eq.watch(model, optimizer, every=2), []
    target = torch.randn(8, 4)
    for step in range(160):
        if step == 60:
            with torch.no_grad():
                model[2].bias.fill_(-30.0)
        x = torch.randn(32, 8)
        loss = nn.functional.cross_entropy(model(x), (x @ target).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)
        logged.append(loss.item())
    (finding,) = monitor.findings()
    assert finding.severity == "warning"
    assert finding.subject == "the gradients of 3 of 3 layers are exactly 0 since step 60"
    before, now = np.median(logged[50:60]), np.median(logged[-10:])
    assert f"was {before:.3g} before (median of 10 values) and is {now:.3g} now" in finding.evidence
    table = str(monitor.table())
    assert "Too early" not in table and "No check" not in table and "predicts" not in table
    assert "No layer has a prediction: gradient exactly 0 since step 60" in " ".join(table.split())
    monitor.close()


def test_some_layers_with_a_gradient_of_zero_are_counted_and_the_others_judged():
    names, steps = rows()
    table = with_zero_gradients((names != "conv1.weight") & (steps >= 500))
    layers, findings = summarise_and_diagnose(table, metadata=clean().metadata)
    (finding,) = findings
    assert finding.subject == "the gradients of 2 of 3 layers are exactly 0 since step 500"
    count = len(np.unique(steps[steps >= 500]))
    assert finding.evidence == f"conv2.weight, ...: {count} sampled steps, 500-{steps.max()}"
    assert [layer.angle_predicted is None for layer in layers] == [False, True, True]
    assert layers[1].sentence.endswith("; gradient exactly 0 since step 500.")


@pytest.mark.parametrize("share", ["few", "back"])
def test_gradients_of_zero_that_do_not_last_are_no_finding(share):
    _, steps = rows()
    sampled = np.unique(steps)
    dead = steps > sampled[-10] if share == "few" else (steps >= 500) & (steps < sampled[-1])
    layers, findings = summarise_and_diagnose(with_zero_gradients(dead), metadata=clean().metadata)
    assert not any("exactly 0" in finding.subject for finding in findings)
    assert all(layer.idle is None for layer in layers)


@pytest.mark.parametrize("at", [3, 12], ids=["between the last samples", "long before"])
def test_longer_steps_tell_of_a_gradient_between_two_samples(at):
    """Momentum alone makes ever shorter steps."""
    _, steps = rows()
    sampled = np.unique(steps)
    dead, angle = steps >= 500, clean().samples["angle"].to_numpy()
    fading = np.where(dead, 1e-3 * 0.99 ** (steps - 500), angle)
    fading = np.where(steps >= sampled[-at], 2 * fading, fading)
    table = edited(with_zero_gradients(dead), angle=fading)
    layers, _ = summarise_and_diagnose(table, metadata=clean().metadata)
    wanted = None if at == 3 else f"gradient exactly 0 since step {sampled[-at]}"
    assert {layer.idle for layer in layers} == {wanted}


def test_a_norm_that_changed_tells_of_a_gradient_between_two_samples():
    _, steps = rows()
    frozen, norm = steps >= 500, clean().samples["norm"].to_numpy()
    columns = {name: np.where(frozen, np.nan, clean().samples[name].to_numpy()) for name in ("angle", "grad_norm")}
    columns["norm"] = np.where(frozen, np.where(steps < np.unique(steps)[-3], 2.0, 2.001), norm)
    table = edited(clean().samples, note=np.where(frozen, NO_GRADIENT, None), **columns)
    layers, _ = summarise_and_diagnose(table, metadata=clean().metadata)
    assert {layer.idle for layer in layers} == {None}


def test_a_row_of_a_rare_token_is_predicted_between_its_visits():
    """Every fifth step is sampled: a token that is there at every 40th is met by no sample for hundreds of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    with eq.watch(model, optimizer, every=5, granularity={"0.weight": "row"}) as monitor:
        for step in range(400):
            tokens = torch.randint(2, (8,))
            if step % 40 == 2:
                tokens[0] = 2
            loss = nn.functional.cross_entropy(model(tokens), torch.randint(3, (8,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        layers, _ = summarise_and_diagnose(monitor.samples(), metadata=monitor.metadata)
    rare, never = (next(layer for layer in layers if layer.name == f"0.weight[{row}]") for row in (2, 3))
    assert rare.idle is None and rare.angle_predicted is not None
    assert never.idle == "gradient exactly 0"


def test_a_loss_logged_only_since_then_is_named_without_a_loss_before():
    _, steps = rows()
    metrics = KeptMetrics()
    metrics.add("loss", [700], [2.5])
    _, findings = summarise_and_diagnose(
        with_zero_gradients(steps >= 500), metadata=clean().metadata, metrics=metrics.table()
    )
    assert findings[0].evidence.endswith("; the logged loss is 2.5 now (one value)")


def test_a_layer_frozen_during_the_run_is_named_with_its_step_and_has_no_time_to_settle():
    names, steps = rows()
    frozen = (names == "conv2.weight") & (steps >= 500)
    columns = {name: np.where(frozen, np.nan, clean().samples[name].to_numpy()) for name in ("angle", "grad_norm")}
    norm = clean().samples["norm"].to_numpy()
    columns["norm"] = np.where(frozen, norm[(names == "conv2.weight") & (steps == 500)], norm)
    table = edited(clean().samples, note=np.where(frozen, NO_GRADIENT, None), **columns)
    layers, findings = summarise_and_diagnose(table, metadata=clean().metadata)
    (finding,) = findings
    assert finding.evidence == "conv2.weight got none since step 500"
    assert layers[1].idle == "no gradient since step 500"
    assert layers[1].steps_to_settle is None and layers[1].angle is not None
    assert "no gradient" in run_table(layers, findings=findings)


def test_the_row_of_a_layer_at_lr_zero_says_so():
    names, _ = rows()
    lr = np.where(names == "conv3.weight", 0.0, clean().samples["lr"].to_numpy())
    layers, findings = summarise_and_diagnose(edited(clean().samples, lr=lr), metadata=clean().metadata)
    assert layers[2].sentence == "conv3.weight has no angle in any sampled step: lr is 0."
    (row,) = (line for line in run_table(layers, findings=findings).splitlines() if line.startswith("conv3"))
    assert row.split(maxsplit=1)[1].strip() == "lr is 0"
