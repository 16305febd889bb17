"""What decides whether a network interpolates, what a forecast does then, and how far drift and power are followed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.helpers.planted_walks import Walk
from torch import nn

import equilibria as eq
from equilibria.diagnosis.gradient_size import near_interpolation
from equilibria.errors import EquilibriaError
from equilibria.forecasting import backtest, forecast, what_if
from equilibria.forecasting._fit import fit
from equilibria.forecasting._layers import read_layers
from equilibria.forecasting._paths import integrate
from equilibria.forecasting._scenario import GroupSchedule
from equilibria.records._metrics import KeptMetrics
from equilibria.theory.schedules import MultiStep

DROP = MultiStep(0.1, milestones=[250], factor=0.1)


@dataclass(frozen=True)
class Logged:
    """A run whose gradients come in bursts, with a training loss that falls to a share of its start."""

    table: pa.Table
    metadata: dict[str, Any]
    left: float

    def samples(self) -> pa.Table:
        return self.table

    def metrics(self) -> pa.Table:
        kept = KeptMetrics()
        kept.add("loss", list(range(200)), (2 * np.geomspace(1, self.left, 200)).tolist())
        return kept.table()


def bursty(*, left: float) -> Logged:
    run = Walk(layers=3, dim=100).run(np.full(200, 0.1))
    table, burst = run.table, np.where(np.arange(run.table.num_rows) % 30 < 3, 10.0, 1.0)
    for column in ("unit_grad_sq", "momentum_unit_grad_sq"):
        values = pa.array(table[column].to_numpy() * burst)
        table = table.set_column(table.column_names.index(column), table.field(column), values)
    return Logged(table, run.metadata, left)


def test_bursts_alone_do_not_gate_a_run_whose_loss_is_logged():
    run = bursty(left=0.5)
    result = forecast(run, schedule=DROP, steps=400)
    level = result.layers[1].unit_grad_sq
    assert not any(layer.validity for layer in result.layers)
    assert abs(float(np.log(level[-1] / level[0]))) < 0.5
    # The report of this run names the bursts, and so does its forecast: the diagnosis is one.
    assert any("varies widely in size" in finding.evidence for finding in result.findings)


def test_an_interpolating_run_is_not_forecast_past_a_fall_of_lr():
    run = bursty(left=0.01)
    reason = r"lowers lr from 0.1 to 0.01, and the training loss is .* near interpolation"
    with pytest.raises(EquilibriaError, match=reason):
        forecast(run, schedule=DROP, steps=400)
    with pytest.raises(EquilibriaError, match=f"^drop: got a schedule that {reason}"):
        what_if(run, {"as now": 0.1, "drop": DROP}, steps=400)
    at_this_lr = forecast(run, schedule=0.1, steps=400)
    assert all("near interpolation" in layer.validity[0] for layer in at_this_lr.layers)


def test_only_the_loss_before_the_start_decides():
    run = bursty(left=0.01)
    assert "near interpolation" in (read_layers(run).cohorts[0].interpolating or "")
    assert read_layers(run, before=100).cohorts[0].interpolating == ""


def test_without_a_logged_loss_the_centre_stays_and_the_bands_widen():
    run = bursty(left=0.5)
    silent = dataclasses.replace(run, metadata=run.metadata)
    object.__setattr__(silent, "metrics", lambda: KeptMetrics().table())
    known, unknown = (forecast(one, schedule=DROP, steps=400).layers[1] for one in (run, silent))
    np.testing.assert_allclose(known.angle.value, unknown.angle.value, rtol=1e-12)
    assert (unknown.angle.high / unknown.angle.low > 1.5 * known.angle.high / known.angle.low).all()


@pytest.mark.parametrize(("left", "expected"), [(0.051, False), (0.049, True)])
def test_a_twentieth_of_its_start_is_the_boundary(left, expected):
    values = np.where(np.arange(100) < 50, 2.0, 2.0 * left)
    assert bool(near_interpolation((np.arange(100.0), values))) == expected


def test_a_burst_does_not_hide_that_a_training_set_was_fitted():
    steps, values = np.arange(100.0), np.repeat([2.0, 1.5, 0.09, 0.04, 0.5], 20)
    assert "loss was 0.04 over steps 70-79, 2 % of its median 2 over steps 0-6" in near_interpolation((steps, values))
    assert not near_interpolation((steps, np.maximum(values, 0.11)))


def test_a_start_after_the_record_is_refused():
    run = bursty(left=0.5)
    last = int(run.samples()["step"].to_numpy().max())
    assert forecast(run, schedule=DROP, steps=last + 50, start=last + 1).first == last + 1
    with pytest.raises(EquilibriaError, match=f"got start=5,000 for a run whose last sample is of step {last}"):
        forecast(run, schedule=DROP, steps=9000, start=5000)


@pytest.mark.parametrize("steps", [70, 2_000, 20_000])
def test_the_start_of_the_loss_is_that_of_its_first_values_however_long_the_record(steps):
    """A network that learns within 300 steps has done so within the first tenth of a long record."""
    step = np.arange(float(steps))
    fitted = 2.3 * np.exp(-step / min(300, steps / 7)) + 0.04
    assert f"over steps 0-{min(steps // 10, 7) - 1:,}: near interpolation" in near_interpolation((step, fitted))
    assert not near_interpolation((step, fitted + 0.1))


def test_a_memorising_network_is_not_forecast_past_a_fall_of_lr():
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(48, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    groups = [{"params": net[0].parameters(), "weight_decay": 1e-3}, {"params": net[1:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(48, 48), torch.randint(3, (48,))
    with eq.watch(net, optimizer, every=4, invariant=["0.weight"]) as monitor:
        for _ in range(800):
            drawn = torch.randint(48, (16,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs[drawn]), labels[drawn])
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
        assert (net(inputs).argmax(1) == labels).all()
        with pytest.raises(EquilibriaError, match=r"lowers lr from 0\.1 to 0\.01, and the training loss is"):
            forecast(monitor, schedule=MultiStep(0.1, milestones=[900], factor=0.1), steps=1000)


def test_a_ramp_fits_no_power():
    # Planted: a power of 0.3, far from the prior's 0.015. A swing of lr shows it, a ramp cannot.
    ramp, swing = np.geomspace(0.02, 0.2, 400), 0.1 * np.exp(np.sin(np.arange(400) / 30))
    fits = [fit(read_layers(Walk(power=0.3, seed=4).run(lrs)).cohorts[0]) for lrs in (ramp, swing)]
    np.testing.assert_allclose(fits[0].power, 0.015, rtol=1e-9)
    np.testing.assert_allclose(np.sqrt(fits[0].covariance[:, 1, 1]), 0.05, rtol=1e-6)
    assert (fits[1].power > 0.1).all()


def test_a_rise_ends_and_a_fall_goes_on_as_the_law_says():
    cohort = read_layers(Walk(layers=2).run(np.full(300, 0.1))).cohorts[0]
    plain = fit(cohort)
    steps = 3_000
    drift, far_below, clock = np.array([0.8, -0.8]), np.full(2, -30.0), np.full(2, 300.0)
    fitted = dataclasses.replace(plain, power=np.zeros(2), drift=drift, reference=far_below, clock=clock)
    course = GroupSchedule(300, np.full(steps, 0.1), np.full(steps, 5e-3), np.ones(steps), 1.0)
    paths = integrate(cohort, fitted, course, shown=np.array([300, 1500, steps - 1]), central=True)
    change = paths.log_unit_grad_sq[:, :, 0] - fitted.level - np.log(fitted.gain)
    # Every step turns more than the reference, so the clock counts steps: 300 are done. The lag is 20 steps long.
    clock = (np.array([600, 1800, 300 + steps]) - 20) / 300
    np.testing.assert_allclose(change[:, 0], 0.8 * (1 - clock**-4) / 4, rtol=0.02)
    np.testing.assert_allclose(change[:, 1], -0.8 * np.log(clock), rtol=0.02)


def test_bands_hold_in_an_ensemble_of_walks():
    rng = np.random.default_rng(5)
    lrs = np.where(np.arange(700) < 450, 0.1, 0.02)
    tests = [
        backtest(Walk(layers=4, dim=100, power=0.05 * a, drift=0.2 * b, seed=seed).run(lrs), start=300)
        for seed, (a, b) in enumerate(rng.standard_normal((12, 2)))
    ]
    # Planted numbers scatter less than the prior allows for (drift 0.2 against 0.3), so more than 90 % may lie inside.
    assert np.mean([test.angle_coverage for test in tests]) > 0.85
    assert np.mean([test.norm_coverage for test in tests]) > 0.85
