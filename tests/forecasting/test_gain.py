"""Matrices by their measured growth gain: gain and size found in walks, paths as a slow recursion, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.planted_walks import Run, Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import FORECAST, Scenario, backtest, forecast, suggest, what_if
from equilibria.forecasting._fit import fit
from equilibria.forecasting._gain import GainFit, _gain
from equilibria.forecasting._layers import AFTER_RISE, Cohort, read_layers
from equilibria.forecasting._paths import integrate
from equilibria.forecasting._scenario import GroupSchedule
from equilibria.records.tables import GAIN_LAW, INVARIANT_LAW
from equilibria.theory import AdamW, Muon, growth_gain
from equilibria.theory.identified import Identified, PowerLaw
from equilibria.theory.memory import Memory
from equilibria.views.forecast.page import forecast_headline

WD, LR, STEPS = 0.5, 5e-3, 800
MATRIX = {"invariant": False, "shape": [20, 20]}


def as_matrices(run: Run, **entry: Any) -> Run:
    return Run(run.table, {"params": [{**layer, **MATRIX, **entry} for layer in run.metadata["params"]]})


def walk(lrs: np.ndarray, **planted: float) -> Run:
    return as_matrices(Walk(betas=(0.9, 0.99), dim=400, weight_decay=WD, seed=8, **planted).run(lrs))


@pytest.fixture(scope="module")
def run() -> Run:
    return walk(np.full(STEPS, LR), pull=0.15)


@pytest.fixture(scope="module")
def cohort(run) -> Cohort:
    (cohort,) = read_layers(run).cohorts
    assert cohort.law == GAIN_LAW
    return cohort


def test_the_gain_of_a_pulled_matrix_is_found(cohort):
    """ln ||w||^2 changes by F angle^2 - 2 lr (wd + pull) per step, which is G angle^2 - 2 lr wd."""
    rows = np.arange(STEPS // 2, STEPS)
    gain, error = _gain(cohort, rows)
    expected = growth_gain(AdamW(LR, WD, betas=(0.9, 0.99))) - 2 * LR * 0.15 / np.mean(cohort.angle[rows] ** 2, axis=0)
    assert (expected < 17).all() and (error < 0.03 * gain).all()
    # F belongs to lr wd = 0: to the next order it is off by lr (wd + pull) times a memory of ten steps, 3.3 %.
    assert np.abs(gain - expected).max() < 4 * error.max() + LR * (WD + 0.15) * 10 * 19


def test_the_size_of_an_update_is_that_of_the_last_samples(cohort):
    fitted = fit(cohort)
    assert isinstance(fitted, GainFit)
    last = slice(int(np.searchsorted(cohort.step, fitted.window[0])), None)
    slow = [np.mean((cohort.angle[last, layer] * np.sqrt(cohort.norm_sq[last, layer]) / LR) ** 2) for layer in range(8)]
    np.testing.assert_allclose(fitted.size_sq, slow, rtol=1e-12)
    assert STEPS - fitted.window[0] == pytest.approx(0.12 * STEPS, abs=2)
    np.testing.assert_allclose(fitted.in_force, 1.0, rtol=1e-12)
    np.testing.assert_allclose(fitted.relaxed * fitted.size_sq * 19 / 400, 1.0, rtol=1e-9)  # kappa relaxes to 1


def course(steps: int, lr: np.ndarray) -> GroupSchedule:
    return GroupSchedule(STEPS, lr, np.full(steps, WD), np.ones(steps), 1.0)


@pytest.mark.parametrize("gain", [12.0, -9.0])
def test_the_paths_are_those_of_a_slow_recursion(cohort, gain):
    steps = 400
    lr = LR * np.linspace(1.0, 0.1, steps)
    changed = {"gain": np.full(8, gain), "relaxed": np.full(8, 0.8), "balanced": np.full(8, gain > 0)}
    fitted = dataclasses.replace(fit(cohort), **changed)
    paths = integrate(cohort, fitted, course(steps, lr), shown=np.arange(steps), central=True)
    log_norm_sq = np.log(fitted.norm_sq)
    for step in range(steps):
        if step % 4 == 0:  # size and gain are updated every fourth step
            size_sq = fitted.size_sq * (0.8 + 0.2 * np.sqrt(lr[step] / fitted.lr))
        angle = lr[step] * np.sqrt(size_sq) / np.exp(log_norm_sq / 2)
        if step % 4 == 0:
            present = gain * (angle / np.sqrt(fitted.angle_sq)) ** (-0.25 if gain > 0 else 0)
        np.testing.assert_allclose(paths.angle[step, :, 0], angle, rtol=1e-10)
        np.testing.assert_allclose(paths.norm_sq[step, :, 0], np.exp(log_norm_sq), rtol=1e-10)
        turned_sq = angle**2 if gain > 0 else np.minimum(angle**2, fitted.angle_sq)
        log_norm_sq = log_norm_sq + present * turned_sq - 2 * lr[step] * WD
    np.testing.assert_allclose(paths.travelled[:, 0], paths.angle[:, :, 0].sum(axis=0), rtol=1e-10)


def test_in_equilibrium_the_gain_times_the_squared_angle_is_the_decay(cohort):
    steps = 30_000
    fitted = fit(cohort)
    paths = integrate(cohort, fitted, course(steps, np.full(steps, LR / 3)), shown=np.array([0, steps - 1]))
    star = paths.angle_equilibrium[-1]
    gain = fitted.gain * (star / np.sqrt(fitted.angle_sq)) ** -0.25
    np.testing.assert_allclose(gain * star**2, 2 * LR / 3 * WD, rtol=1e-10)
    np.testing.assert_allclose(paths.angle[-1, :, 0], star, rtol=1e-6)  # 20 times 1/(2 lr wd)


def test_norms_that_are_pulled_inward_fall_as_they_did_and_no_faster(cohort):
    steps, fitted = 3000, dataclasses.replace(fit(cohort), gain=np.full(8, -40.0))
    paths = integrate(cohort, fitted, course(steps, np.full(steps, LR)), shown=np.array([0, steps - 1]), central=True)
    fall = np.log(paths.norm_sq[-1, :, 0] / paths.norm_sq[0, :, 0])
    np.testing.assert_allclose(fall, -(steps - 1) * (2 * LR * WD + 40 * fitted.angle_sq), rtol=0.01)
    assert np.isfinite(paths.angle).all()


@given(scale=st.floats(1e-3, 1e3))
@settings(max_examples=15, deadline=None)
def test_units_of_the_weight_do_not_change_angles_of_muon(cohort, scale):
    muon = dataclasses.replace(cohort, rule=Muon(LR, WD))
    scaled = dataclasses.replace(muon, norm_sq=muon.norm_sq * scale**2)
    first, second = (
        integrate(part, fit(part), course(50, np.full(50, LR)), shown=np.arange(50)) for part in (muon, scaled)
    )
    np.testing.assert_allclose(second.angle, first.angle, rtol=1e-9)
    np.testing.assert_allclose(second.norm_sq, first.norm_sq * scale**2, rtol=1e-9)


@pytest.mark.parametrize("pull", [0.3, -0.2])
def test_a_pulled_matrix_is_forecast(pull):
    """In equilibrium, where a pull is one gain; the invariant law without the pull is off by 10 and 18 %."""
    test = backtest(walk(np.full(1400, LR), pull=pull), start=900)
    assert all(layer.forecast.law == GAIN_LAW for layer in test.layers)
    assert test.scores[FORECAST].angle < 0.03
    assert test.scores[FORECAST].norm < 0.03
    assert test.norm_coverage > 0.8


def test_the_other_verbs_take_matrices_too(run):
    plans = what_if(run, {"as it is": LR, "lower": LR / 10}, steps=1200)
    lower = plans.forecasts["lower"].layers[0]
    assert lower.law == GAIN_LAW and np.isnan(lower.unit_grad_sq).all()
    assert lower.angle.value[-1] < plans.forecasts["as it is"].layers[0].angle.value[-1] / 3
    assert suggest(run, schedule=LR, steps=1200, target="as now").best.off < 1.1


# ---- which layers


def test_invariant_layers_and_matrices_of_one_group_have_their_own_laws(run):
    params = [{**entry, "invariant": entry["name"] == "layer3"} for entry in run.metadata["params"]]
    laws = {
        layer.name: layer.law for layer in forecast(Run(run.table, {"params": params}), schedule=LR, steps=900).layers
    }
    assert {name for name, law in laws.items() if law == INVARIANT_LAW} == {"layer3"}
    assert len(laws) == 8


def test_without_invariant_weights_rescaling_is_said_to_change_nothing_and_the_title_is_the_change_of_the_angle(run):
    fall = np.where(np.arange(STEPS + 20) < STEPS, LR, LR / 10).tolist()
    result = what_if(run, {"as planned": fall, "rescaled": Scenario(fall, rescale=True)}, steps=len(fall))
    plan, rescaled = result.forecasts.values()
    assert not any("rescal" in finding.subject for finding in plan.findings)
    assert any(finding.subject == "rescaling changes nothing here" for finding in rescaled.findings)
    assert not any("are rescaled" in sentence for sentence in rescaled.assumptions)
    for one, other in zip(plan.layers, rescaled.layers, strict=True):
        np.testing.assert_array_equal(one.angle.value, other.angle.value)
    assert "rescaled: rescaling changes nothing here" in " ".join(str(result.table()).split())
    factors = [layer.angle.value[-1] / layer.angle.value[0] for layer in plan.layers]
    assert f"turn {np.median(factors):.2g} times as far as in step {STEPS:,}" in forecast_headline(result)
    longer = what_if(run, {"as planned": np.full(STEPS + 2000, LR).tolist()}, steps=STEPS + 2000)
    assert "times as far" not in forecast_headline(longer)  # it settles


def test_an_invariant_matrix_under_muon_is_forecast_by_its_gain(run):
    muon = as_matrices(run, rule={"kind": "Muon", "momentum": 0.95, "nesterov": True}, invariant=True)
    assert {layer.law for layer in forecast(muon, schedule=LR, steps=900).layers} == {GAIN_LAW}


def test_a_matrix_under_an_identified_optimizer_follows_the_powers_of_its_step(run):
    """A step of length lr^2 ||g||: the angle goes as lr^2 / ||w||^2, and decay as measured."""
    step, decay = PowerLaw(1.0, lr=2.0, grad=1.0), PowerLaw(0.5, lr=1.0, weight_decay=1.0)
    rule = Identified(LR, WD, name="Odd", step=step, decay=decay, memory=Memory((), ()))
    odd = as_matrices(run, rule={"kind": "Identified", **dataclasses.asdict(rule)})
    (cohort,) = read_layers(odd).cohorts
    fitted = fit(cohort)
    assert (fitted.norm_power, fitted.lr_power) == (2.0, 2.0)
    np.testing.assert_allclose(fitted.in_force, 0.5, rtol=1e-12)
    last = slice(int(np.searchsorted(cohort.step, fitted.window[0])), None)
    size_sq = np.mean((cohort.angle[last] * cohort.norm_sq[last] / LR**2) ** 2, axis=0)
    np.testing.assert_allclose(fitted.size_sq, size_sq, rtol=1e-12)
    np.testing.assert_array_equal(fitted.relaxed, 1.0)
    paths = integrate(cohort, fitted, course(1, np.array([LR / 2])), shown=np.arange(1), central=True)
    np.testing.assert_allclose(paths.angle[0, :, 0], np.sqrt(size_sq) * (LR / 2) ** 2 / fitted.norm_sq, rtol=1e-10)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"shape": [400]}, "a vector has no steady growth gain"),
        (
            {"rule": {"kind": "SGD", "momentum": 0.9}},
            "is not scale-invariant, and no law gives the size of its gradient",
        ),
        ({"promised_by": "AngularSchedule"}, "AngularSchedule turns it"),
    ],
)
def test_other_layers_are_refused_with_the_reason(run, entry, reason):
    with pytest.raises(EquilibriaError, match=reason):
        forecast(as_matrices(run, **entry), schedule=LR, steps=900)


def test_rows_are_refused_and_matrices_of_a_stack_are_not(run):
    """Rows of an embedding get a gradient now and then: half of them were off by more than 10 per cent."""
    names = [f"wte[{layer}]" for layer in range(len(run.metadata["params"]))]
    old = [layer["name"] for layer in run.metadata["params"]]
    renamed = [names[old.index(name)] for name in run.table["param"].to_pylist()]
    place = run.table.column_names.index("param")
    table = run.table.set_column(place, "param", pa.array(renamed, pa.string()).dictionary_encode())
    rows = Run(table, {"params": [{**e, "name": n} for e, n in zip(run.metadata["params"], names, strict=True)]})
    with pytest.raises(EquilibriaError, match="a row of a matrix, whose gradient comes and goes"):
        forecast(rows, schedule=LR, steps=900)
    assert len(forecast(as_matrices(rows, shape=[8, 20, 20]), schedule=LR, steps=900).layers) == len(names)


@pytest.mark.parametrize("gain", [12.0, -9.0])
def test_the_band_of_the_gain_widens_as_the_angle_falls(cohort, gain):
    """G is off by its error, and by its wander per e-fold of the fall, in one direction."""
    steps, lr = 400, LR * np.linspace(1.0, 0.1, 400)
    planted = {"gain": gain, "gain_error": 1.0, "fall_wander": 5.0, "relaxed": 1.0, "size_wander": 0.0}
    changed = {name: np.full(8, value) if name != "size_wander" else value for name, value in planted.items()}
    fitted = dataclasses.replace(fit(cohort), **changed)
    displaced = integrate(cohort, fitted, course(steps, lr), shown=np.arange(steps)).norm_sq[:, :, 1]
    log_norm_sq = np.log(fitted.norm_sq)
    for step in range(steps):
        angle = lr[step] * np.sqrt(fitted.size_sq) / np.exp(log_norm_sq / 2)
        if step % 4 == 0:
            fall = -np.log(angle / np.sqrt(fitted.angle_sq))
            present = (gain + 1) * np.exp(0.25 * fall * (gain > 0)) + 5 * np.maximum(fall, 0)
        np.testing.assert_allclose(displaced[step], np.exp(log_norm_sq), rtol=1e-10)
        turned_sq = np.where(present > 0, angle**2, np.minimum(angle**2, fitted.angle_sq))
        log_norm_sq = log_norm_sq + present * turned_sq - 2 * lr[step] * WD


def test_entrywise_updates_alone_have_a_wander_with_the_angle(cohort):
    assert (fit(cohort).fall_wander > 0).all()
    assert not fit(dataclasses.replace(cohort, rule=Muon(LR, WD))).fall_wander.any()


def test_matrices_without_decay_are_refused():
    with pytest.raises(EquilibriaError, match="has no weight decay: growth gains of such weights were not tested"):
        forecast(as_matrices(Walk(betas=(0.9, 0.99), weight_decay=0.0).run(np.full(500, LR))), schedule=LR, steps=900)


def test_soon_after_a_warm_up_the_missing_steps_are_named():
    lrs = LR * np.minimum(1, np.arange(1, 401) / 100)
    run = walk(lrs)
    with pytest.raises(
        EquilibriaError,
        match=r"lr rose until step 99, and .* from 450 steps later on: .* step 548 or later, 149 steps more",
    ):
        forecast(run, schedule=LR, steps=900)
    with pytest.raises(EquilibriaError, match=r"the record ends at step 399, .* of step 449 or later, 50 steps more"):
        forecast(walk(np.full(400, LR)), schedule=LR, steps=900)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_forecast_begins_450_steps_after_the_last_rise(missing):
    lrs = LR * np.minimum(1, np.arange(1, 100 + AFTER_RISE - missing) / 100)
    if missing:
        with pytest.raises(EquilibriaError, match="1 step more"):
            forecast(walk(lrs), schedule=LR, steps=900)
    else:
        assert len(forecast(walk(lrs), schedule=LR, steps=900).layers) == 8
