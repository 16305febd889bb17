"""Forecasts against brute-force walks with a planted L and the recursion of the theory, and what must not matter."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.planted_walks import Run, Walk

from equilibria.forecasting import BASELINES, FORECAST, Scenario, backtest, forecast
from equilibria.forecasting._fit import fit
from equilibria.forecasting._layers import read_layers
from equilibria.forecasting._paths import integrate
from equilibria.forecasting._scenario import GroupSchedule, group_schedules
from equilibria.theory import SGD, SGDW, AdamL2, AdamW
from equilibria.theory.schedules import Cosine, FromValues, MultiStep
from equilibria.theory.states import State, rescale_factors
from equilibria.theory.transient import evolve

DROP = np.where(np.arange(1400) < 700, 0.1, 0.01)


@pytest.fixture(scope="module")
def constant() -> Run:
    return Walk().run(np.full(300, 0.1))


@pytest.fixture(scope="module")
def dropped() -> Run:
    return Walk(drift=0.2, power=0.015, seed=1).run(DROP)  # the power that the prior expects: no sample shows it


# ---- the fit


def test_planted_parameters_are_found_within_their_standard_error():
    # lr swings in the window, so that the samples show the power. Planted values lie within the prior's scatter.
    lrs = 0.1 * np.exp(np.sin(np.arange(800) / 40))
    walk = Walk(layers=16, power=0.08, drift=0.3, seed=2)
    fitted = fit(read_layers(walk.run(lrs)).cohorts[0])
    errors = np.sqrt(np.stack([fitted.covariance[:, 1, 1], fitted.covariance[:, 2, 2]]))
    z = (np.stack([fitted.power, fitted.drift]) - [[walk.power], [walk.drift]]) / errors
    assert np.abs(z).max() < 3.5  # 32 normal numbers exceed it once in 70
    assert (errors[0] < 0.04).all()  # the samples say more than the prior alone, which has 0.05


def test_without_a_change_of_lr_the_power_is_the_priors(constant):
    fitted = fit(read_layers(constant).cohorts[0])
    np.testing.assert_allclose(fitted.power, 0.015, atol=0.02)
    np.testing.assert_allclose(np.sqrt(fitted.covariance[:, 1, 1]), 0.05, rtol=0.1)


def test_the_level_is_the_planted_one(constant):
    fitted = fit(read_layers(constant).cohorts[0])
    errors = np.sqrt(fitted.covariance[:, 0, 0])
    assert np.abs(fitted.level / errors).max() < 4


@pytest.mark.parametrize("betas", [None, (0.9, 0.99)], ids=["sgd", "adamw"])
def test_the_rebuilt_optimizer_state_moves_as_the_real_one_did(betas):
    walk = Walk(betas=betas, dim=400, weight_decay=0.5 if betas else 5e-3)
    cohort = read_layers(walk.run(np.full(300, 5e-3 if betas else 0.1))).cohorts[0]
    now = fit(cohort).replay
    ratio = cohort.moved_sq[now.sampled[-100:]].mean(axis=0) / now.moved_sq[-100:].mean(axis=0)
    # 100 angles with a memory of some ten steps; each squared angle scatters by sqrt(2/400) times its memory's share.
    np.testing.assert_allclose(ratio, 1, atol=0.04)


# ---- the integration


RULES = {
    "heavy ball": SGD(0.1, 5e-3, momentum=0.9),
    "sgd": SGD(0.1, 5e-3),
    "sgdw": SGDW(0.1, 5e-3, momentum=0.9),
    "nesterov": SGD(0.1, 5e-3, momentum=0.9, nesterov=True),
    "adamw": AdamW(5e-3, 0.5, betas=(0.9, 0.99)),
    "adam": AdamL2(5e-3, 0.05, betas=(0.9, 0.99)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_with_a_constant_l_the_paths_are_those_of_the_theory(rule, constant):
    cohort = dataclasses.replace(read_layers(constant).cohorts[0], rule=rule)
    if isinstance(rule, AdamW | AdamL2):
        cohort = dataclasses.replace(cohort, unit_grad_sq=cohort.plain_unit_grad_sq)
    fitted = fit(cohort)
    zero = np.zeros(len(cohort.names))
    fitted = dataclasses.replace(fitted, power=zero, drift=zero, gain=zero + 1, pull=zero)
    lr = Cosine(rule.lr, steps=500).values(400)
    course = GroupSchedule(300, lr, np.full(400, rule.weight_decay), np.ones(400), 1.0)
    paths = integrate(cohort, fitted, course, shown=np.arange(400), central=True)
    at = fitted.replay
    start = State(at.norm_sq, at.radial, at.buffer_sq, at.second, np.zeros(0), at.steps_done)
    expected = evolve(rule, 400, start=start, unit_grad_sq=np.exp(fitted.level), dim=cohort.entries, lr=lr)
    np.testing.assert_allclose(paths.norm_sq[:, :, 0], expected.norm_sq[:-1], rtol=1e-9)
    np.testing.assert_allclose(paths.angle[:, :, 0], expected.angle, rtol=1e-6)
    np.testing.assert_allclose(paths.travelled[:, 0], expected.angle.sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.2, -0.2])
def test_the_correlation_of_gradient_and_momentum_is_found(correlation):
    """E||buffer||^2 of AR(1) gradients over that of independent ones is (1 + m a) / (1 - m a)."""
    fitted = fit(read_layers(Walk(dim=400, correlation=correlation, seed=6).run(np.full(400, 0.1))).cohorts[0])
    off = np.log(fitted.gain * (1 - 0.9 * correlation) / (1 + 0.9 * correlation))
    assert np.abs(off / fitted.gain_error).max() < 3.5
    # The prior draws by up to 8 % of its distance, 4 % here; the mean of 8 layers scatters by 1 %.
    assert abs(off.mean()) < 0.07


def test_the_correlation_fades_in_a_slow_recursion_of_heavy_ball_as_the_layer_turns_less():
    cohort = read_layers(Walk(layers=2).run(np.full(200, 0.1))).cohorts[0]
    zero, momentum, decay, lr = np.zeros(2), 0.9, 5e-3, np.repeat([0.1, 0.02], 60)
    fitted = dataclasses.replace(fit(cohort), power=zero, drift=zero, gain=zero + 0.7)
    course = GroupSchedule(200, lr, np.full(120, decay), np.ones(120), 1.0)
    paths = integrate(cohort, fitted, course, shown=np.arange(120), central=True)
    p, q, r = fitted.replay.norm_sq, fitted.replay.radial, fitted.replay.buffer_sq
    gain, speed_sq = 0.7, np.exp(fitted.reference)
    for step in range(120):
        np.testing.assert_allclose(paths.norm_sq[step, :, 0], p, rtol=1e-12)
        if step and step % 4 == 0:  # L is updated every fourth step
            gain = 1 - 0.3 * np.minimum(speed_sq / np.exp(fitted.reference), 1) ** 0.25
        np.testing.assert_allclose(np.exp(paths.log_unit_grad_sq[step, :, 0]), gain * np.exp(fitted.level), rtol=1e-12)
        r = momentum**2 * r + gain * np.exp(fitted.level) / p + decay**2 * p + 2 * momentum * decay * q
        q = momentum * q + decay * p
        speed_sq = lr[step] ** 2 * r / p
        p, q = p - 2 * lr[step] * q + lr[step] ** 2 * r, q - lr[step] * r
    assert (gain > 0.8).all()


def test_forecast_and_bands_hold_on_a_walk_whose_lr_drops(dropped):
    test = backtest(dropped, start=300)
    own = test.scores[FORECAST]
    assert own.angle < 0.05
    assert own.norm < 0.05
    # The planted L is one that the prior allows for: bands that hold 90 % of such walks hold most of this one.
    assert 0.8 < test.angle_coverage <= 1
    assert 0.8 < test.norm_coverage <= 1
    for name in BASELINES:
        assert own.angle < test.scores[name].angle


@pytest.mark.slow
def test_bands_of_many_walks_hold_ninety_per_cent():
    rng = np.random.default_rng(0)
    result = [
        backtest(Walk(power=0.05 * a, drift=0.3 * b, seed=seed).run(DROP[:1000]), start=300)
        for seed, (a, b) in enumerate(rng.standard_normal((30, 2)))
    ]
    assert 0.85 < np.mean([test.angle_coverage for test in result]) < 0.98
    assert np.mean([test.norm_coverage for test in result]) > 0.85


def test_adamw_is_forecast_too():
    walk = Walk(betas=(0.9, 0.99), weight_decay=0.5, seed=3)
    test = backtest(walk.run(np.where(np.arange(900) < 500, 5e-3, 5e-4)), start=300)
    assert test.scores[FORECAST].angle < 0.05
    assert test.scores[FORECAST].norm < 0.03
    assert all(test.scores[FORECAST].angle < test.scores[name].angle for name in BASELINES)


@settings(max_examples=8, deadline=None)
@given(st.floats(-3, 3))
def test_weights_times_c_and_lr_times_c_squared_change_no_angle(log_c):
    c = float(np.exp(log_c))
    run = Walk(layers=2, dim=50).run(np.full(60, 0.1))
    factors = {"norm": c, "update_norm": c, "lr": c**2, "weight_decay": c**-2}
    table = run.table
    for name, factor in factors.items():
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(table[name].to_numpy() * factor))
    plain = forecast(run, schedule=MultiStep(0.1, milestones=[100], factor=0.1), steps=200)
    scaled = forecast(Run(table, run.metadata), schedule=MultiStep(0.1 * c**2, milestones=[100], factor=0.1), steps=200)
    for one, other in zip(plain.layers, scaled.layers, strict=True):
        np.testing.assert_allclose(one.angle.value, other.angle.value, rtol=1e-7)
        np.testing.assert_allclose(one.angle.high, other.angle.high, rtol=1e-6)
        np.testing.assert_allclose(one.norm.value * c, other.norm.value, rtol=1e-7)


# ---- what it says


def test_curves_are_thin_keep_every_change_and_agree_with_the_full_one(constant):
    result = forecast(constant, schedule=MultiStep(0.1, milestones=[3333], factor=0.1), steps=20_000)
    layer = result.layers[0]
    assert len(layer.step) <= 510
    assert {3332, 3333} <= set(layer.step.tolist())
    full = result.full(layer.name)
    np.testing.assert_array_equal(full.step, np.arange(300, 20_000))
    np.testing.assert_allclose(full.norm.value[layer.step - 300], layer.norm.value, rtol=1e-12)
    assert layer.integrated_angle.value == pytest.approx(float(full.angle.value.sum()), rel=1e-9)
    off = np.abs(full.angle.value / full.angle_equilibrium - 1) > 0.05
    assert layer.steps_out.value == np.count_nonzero(off)


def test_bands_widen_with_the_horizon(constant):
    layer = forecast(constant, schedule=0.1, steps=3000).layers[0]
    width = layer.norm.high / layer.norm.low
    assert width[-1] > width[20] > width[0] > 1
    assert width[0] < 1.05  # the norm is known where the forecast begins
    assert (layer.angle.low < layer.angle.value).all()


def test_bands_are_wider_where_l_drifts(constant):
    calm, drifting = (
        forecast(run, schedule=0.1, steps=1500).layers[0]
        for run in (constant, Walk(drift=1.5, seed=0).run(np.full(300, 0.1)))
    )
    widths = [np.log(layer.norm.high / layer.norm.low) for layer in (calm, drifting)]
    assert widths[1][-1] > 1.5 * widths[0][-1]
    np.testing.assert_allclose(calm.angle.value[-1], drifting.angle.value[-1], rtol=0.1)  # in equilibrium, whatever L


def test_rescaling_keeps_the_angle_in_equilibrium(constant):
    plan = MultiStep(0.1, milestones=[400], factor=0.1)
    plain, rescaled = (forecast(constant, schedule=plan, steps=900, rescale=flag).layers[0] for flag in (False, True))
    at = int(np.flatnonzero(plain.step == 400)[0])
    assert plain.angle.value[at] / plain.angle_equilibrium[at] == pytest.approx(10**-0.5, rel=0.05)
    assert rescaled.angle.value[at] / rescaled.angle_equilibrium[at] == pytest.approx(1, rel=0.05)
    assert rescaled.steps_out.value < 0.5 * plain.steps_out.value  # L falls a little with the angle, so not none
    assert rescaled.steps_out.high <= 600


def test_under_a_cosine_weights_are_rescaled_at_every_step(constant):
    observed = read_layers(constant)
    scenario = Scenario(Cosine(0.1, steps=1000), rescale=True)
    (course,) = group_schedules(scenario, observed, first=300, steps=1000)
    rule = observed.cohorts[0].rule
    rules = [dataclasses.replace(rule, lr=float(lr)) for lr in (observed.cohorts[0].lr[-1], *course.lr[:50])]
    by_hand = [rescale_factors(*pair).weight ** 2 for pair in pairwise(rules)]
    np.testing.assert_allclose(course.rescale_sq[:50], by_hand, rtol=1e-9)
    to_a_hundredth = Scenario(Cosine(0.1, steps=1000, end=1e-3), rescale=True)
    layer = forecast(constant, schedule=to_a_hundredth, steps=1000).layers[0]
    np.testing.assert_allclose(layer.angle.value, layer.angle_equilibrium, rtol=0.2)
    assert layer.angle_equilibrium[-1] < 0.15 * layer.angle_equilibrium[0]


def test_the_drop_is_a_finding_with_a_remedy(constant):
    result = forecast(constant, schedule=MultiStep(0.1, milestones=[400], factor=0.1), steps=900)
    finding = result.findings[0]
    assert finding.severity == "note", "a state, no fault"
    assert "when lr falls at step 400" in finding.subject
    assert "rescale=True" in finding.remedy
    assert result.assumptions


def test_four_times_the_batch_has_a_quarter_of_l(constant):
    one, four = (forecast(constant, schedule=0.1, steps=2000, batch_factor=b).layers[0] for b in (1, 4))
    np.testing.assert_allclose(one.unit_grad_sq[:5] / four.unit_grad_sq[:5], 4, rtol=0.01)
    assert four.norm.value[-1] / one.norm.value[-1] == pytest.approx(4**-0.25, rel=0.02)
    assert four.norm.high[-1] / four.norm.low[-1] > one.norm.high[-1] / one.norm.low[-1]


def test_another_group_keeps_its_ratio():
    run = Walk(layers=2).run(np.full(100, 0.1))
    table, at = run.table, run.table.column_names.index("lr")
    is_second = np.array(table["param"].to_pylist()) == "layer1"
    lr = np.where(is_second, 0.02, table["lr"].to_numpy())
    table = table.set_column(at, table.schema.field("lr"), pa.array(lr))
    run.metadata["params"][1]["group"] = 1
    result = forecast(Run(table, run.metadata), schedule=Cosine(0.1, steps=400), steps=400)
    np.testing.assert_allclose(result["layer1"].lr, 0.2 * result["layer0"].lr, rtol=1e-12)


def test_weight_decay_may_change(constant):
    more = forecast(constant, schedule=0.1, steps=3000, weight_decay=0.01).layers[0]
    as_it_was = forecast(constant, schedule=Scenario(0.1), steps=3000).layers[0]
    assert more.angle_equilibrium[-1] / as_it_was.angle_equilibrium[-1] == pytest.approx(2**0.5, rel=1e-3)
    assert more.norm.value[-1] / as_it_was.norm.value[-1] == pytest.approx(2**-0.25, rel=0.02)


def test_without_weight_decay_there_is_no_equilibrium_and_the_norm_grows(constant):
    layer = forecast(constant, schedule=0.1, steps=600, weight_decay=0.0).layers[0]
    assert not layer.angle_equilibrium.any()
    assert np.isnan(layer.steps_out.value)
    assert (np.diff(layer.norm.value) > 0).all()


def test_lr_that_ends_at_zero_is_no_trouble(constant):
    layer = forecast(constant, schedule=Cosine(0.1, steps=600), steps=700).layers[0]
    assert np.isfinite(layer.norm.value).all()
    assert np.isfinite(layer.angle.high).all()
    assert layer.angle.value[-1] == 0


def test_a_list_of_every_step_is_a_schedule(constant):
    listed = forecast(constant, schedule=FromValues([0.1] * 500), steps=500)
    assert listed.layers[0].lr[-1] == 0.1


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_bands_of_the_angle_are_shown_in_every_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = forecast(Walk(layers=2).run(np.full(300, 0.1)), schedule=0.1, steps=400)
    last = result.layers[0].angle
    shown = str(result.table())
    assert f"{last.value[-1]:.3g} ({last.low[-1]:.2g}-{last.high[-1]:.2g})" in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert ("in a wider terminal" in " ".join(shown.split())) == (columns == 60)
