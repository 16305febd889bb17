"""Large tensors sampled at every step, for many steps: no error accumulates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.odd_tensors import slow_angle
from torch import nn

from equilibria.monitor.monitor import Monitor

ENTRIES = (520, 520)
SGD = torch.optim.SGD
KINDS = {
    "plain": lambda params: SGD(params, lr=0.05, weight_decay=1e-2),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "dampening": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2, dampening=0.5),
    "maximize": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2, maximize=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.5),
}


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ENTRIES, generator=torch.Generator().manual_seed(0)))


def run(kind, steps, *, meddle=lambda step, model, optimizer: None):
    """Samples, and what a slow float64 measurement around each step says."""
    model = Weight()
    optimizer = KINDS[kind](model.parameters())
    monitor = Monitor(model, optimizer, every=1)
    noise, seen = torch.Generator().manual_seed(1), []
    for step in range(steps):
        model.weight.grad = torch.randn(ENTRIES, generator=noise) / 300
        meddle(step, model, optimizer)
        before = model.weight.detach().double()
        optimizer.step()
        after = model.weight.detach().double()
        angle = slow_angle(before.numpy().ravel(), after.numpy().ravel())
        seen.append((float(before.norm()), float((after - before).norm()), angle))
    monitor.close()
    table = monitor.samples().to_pydict()
    return table, np.array(seen).T


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_a_slow_measurement(kind):
    table, (norm, moved, angle) = run(kind, 60)
    np.testing.assert_allclose(table["norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(table["update_norm"], moved, rtol=2e-5)
    np.testing.assert_allclose(table["angle"], angle, rtol=2e-5)
    assert set(table["note"]) == {None}


@pytest.mark.parametrize("kind", ["plain", "momentum", "AdamW"])
@pytest.mark.parametrize("how", [lambda w: w.data.mul_(0.5), lambda w: w.detach().mul_(0.5)], ids=["data", "in place"])
def test_a_change_from_outside_is_noticed_at_once(kind, how):
    table, (norm, _, angle) = run(kind, 30, meddle=lambda step, model, _opt: how(model.weight) if step == 20 else None)
    assert [step for step, note in zip(table["step"], table["note"], strict=True) if note] == [20]
    np.testing.assert_allclose(table["norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(table["angle"], angle, rtol=2e-5)


def test_momentum_that_is_switched_off_and_on():
    def meddle(step, _model, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.0 if 10 <= step < 20 else 0.9

    table, (norm, moved, _) = run("momentum", 30, meddle=meddle)
    np.testing.assert_allclose(table["norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(table["update_norm"], moved, rtol=2e-5)
