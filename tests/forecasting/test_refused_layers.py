"""Layers without a forecast have a reason and a remedy; doubtful ones have wider bands."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.helpers.planted_walks import Run, Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import backtest, forecast
from equilibria.forecasting._fit import fit
from equilibria.forecasting._layers import read_layers
from equilibria.theory.schedules import Cosine, MultiStep


@pytest.fixture(scope="module")
def run() -> Run:
    return Walk(layers=3).run(np.full(200, 0.1))


def changed(run: Run, name: str, values: np.ndarray) -> Run:
    at = run.table.column_names.index(name)
    table = run.table.set_column(at, run.table.schema.field(name), pa.array(values))
    return Run(table, run.metadata)


def entries(run: Run, **changes: object) -> Run:
    return Run(run.table, {"params": [{**entry, **changes} for entry in run.metadata["params"]]})


def test_not_a_run():
    with pytest.raises(EquilibriaError, match=r"got run=3; expected what equilibria\.watch"):
        forecast(3, schedule=0.1, steps=500)


def test_no_such_directory(tmp_path):
    with pytest.raises(EquilibriaError):
        forecast(tmp_path / "nothing", schedule=0.1, steps=500)


def test_nothing_left_to_forecast(run):
    with pytest.raises(EquilibriaError, match="got steps=200 for a run recorded up to step 199"):
        forecast(run, schedule=0.1, steps=200)


def test_a_schedule_shorter_than_the_run(run):
    with pytest.raises(EquilibriaError, match="got schedule with 300 values for a run of 500 steps"):
        forecast(run, schedule=[0.1] * 300, steps=500)
    with pytest.raises(EquilibriaError, match="got weight_decay with 300 values"):
        forecast(run, schedule=0.1, steps=500, weight_decay=[0.1] * 300)


def test_too_few_samples(run):
    reason = (
        r"layer0 and 2 more: 10 samples, 5 of them in the second half .* at least 20 are needed there: about 30 more"
    )
    with pytest.raises(EquilibriaError, match=rf"{reason}\).* a later start"):
        forecast(run, schedule=0.1, steps=500, start=10)
    with pytest.raises(EquilibriaError, match="got a run without samples"):
        forecast(Run(run.table.slice(0, 0), run.metadata), schedule=0.1, steps=500)


def every(run: Run, gap: int) -> Run:
    """The run, sampled every so many steps."""
    return Run(run.table.filter(pc.equal(pc.bit_wise_and(run.table["step"], gap - 1), 0)), run.metadata)


def test_twenty_samples_are_fitted_or_none(run):
    """24 samples, of which 12 were fitted, were accepted once."""
    with pytest.raises(EquilibriaError, match=r"25 samples, 13 of them .* about 15 more.*: watch longer, or sample"):
        forecast(every(run, 8), schedule=0.1, steps=500)
    assert len(every(run, 4).table) == 3 * 50
    assert not forecast(every(run, 4), schedule=0.1, steps=500).refused


def test_an_l_that_grew_fast_in_a_short_record_is_not_followed_for_ever():
    """L of the first 80 steps grew as their fifth power; forecast to step 6,000 it grew 200-fold once. A rise ends."""
    cosine = Cosine(0.1, steps=6000)
    run = Walk(layers=3, drift=5.0, seed=4).run(cosine.values(80))
    for layer in forecast(run, schedule=cosine, steps=6000).layers:
        assert (layer.unit_grad_sq < 20.1 * layer.unit_grad_sq[0]).all()
        assert layer.unit_grad_sq.max() > 1.2 * layer.unit_grad_sq[0]  # but it is followed for a while
        assert (layer.angle.value < 2 * layer.angle_equilibrium).all()


def test_unknown_optimizer(run):
    unknown = entries(run, rule=None, no_law="no law for RMSprop")
    with pytest.raises(EquilibriaError, match="layer0 and 2 more: no law for RMSprop"):
        forecast(unknown, schedule=0.1, steps=500)


def test_a_weight_that_is_not_known_to_be_a_matrix(run):
    lion = entries(run, rule={"kind": "Lion", "betas": [0.9, 0.99]})
    with pytest.raises(EquilibriaError, match="layer0 and 2 more: it is not known to be a matrix"):
        forecast(lion, schedule=0.1, steps=500)


def test_a_weight_that_is_not_invariant_has_no_forecast_but_the_others_have(run):
    is_first = np.array(run.table["param"].to_pylist()) == "layer0"
    result = forecast(changed(run, "cosine", np.where(is_first, 0.3, 1e-9)), schedule=0.1, steps=500)
    assert [layer.name for layer in result.layers] == ["layer1", "layer2"]
    assert "does not look scale-invariant" in result.refused["layer0"]
    with pytest.raises(EquilibriaError, match=r"got layer 'layer0', which was refused .* expected one of: layer1"):
        result["layer0"]
    with pytest.raises(EquilibriaError, match="which is not in this run"):
        result["layer9"]


def test_a_gradient_that_has_vanished_has_no_forecast(run):
    step = run.table["step"].to_numpy()
    gone = changed(run, "unit_grad_sq", run.table["unit_grad_sq"].to_numpy() * np.exp(-step / 20))
    with pytest.raises(EquilibriaError, match="its gradient has vanished"):
        forecast(gone, schedule=0.1, steps=500)


def test_bursts_widen_the_band_with_a_reason(run):
    burst = np.where(run.table["step"].to_numpy() % 10 == 0, 20.0, 0.2)
    bursty = changed(run, "unit_grad_sq", run.table["unit_grad_sq"].to_numpy() * burst)
    calm, wild = (forecast(record, schedule=0.1, steps=500) for record in (run, bursty))
    assert not calm.layers[0].validity
    assert wild.layers[0].validity[0].startswith("its gradient varies widely in size, and no training loss was logged")
    assert wild.layers[0].norm.high[-1] / wild.layers[0].norm.low[-1] > 1.3 * (
        calm.layers[0].norm.high[-1] / calm.layers[0].norm.low[-1]
    )
    assert any("wider than usual" in finding.subject for finding in wild.findings)


def test_bursts_do_not_move_the_centre_of_a_forecast(run):
    drop = MultiStep(0.1, milestones=[250], factor=0.1)
    burst = np.where(np.arange(run.table.num_rows) % 30 < 3, 10.0, 1.0)
    names = run.table["param"].to_numpy()
    results = []
    for hit in (np.full(len(names), False), names == "layer0", np.full(len(names), True)):
        table = run.table
        for column in ("unit_grad_sq", "momentum_unit_grad_sq"):
            values = table[column].to_numpy() * np.where(hit, burst, 1.0)
            table = table.set_column(table.column_names.index(column), table.field(column), pa.array(values))
        results.append(forecast(Run(table, run.metadata), schedule=drop, steps=400))
    levels = [result.layers[1].unit_grad_sq for result in results]
    falls = [float(np.log(level[-1] / level[0])) for level in levels]
    assert min(falls) > -0.5
    finding = results[2].findings[0]
    assert finding.severity == "note" and finding.evidence.count("varies widely in size") == 1
    assert "log the training loss" in finding.remedy


def test_a_forecast_shortly_after_a_drop_is_a_warning():
    lrs = np.where(np.arange(200) < 150, 0.1, 0.01)
    finding = forecast(Walk(layers=1).run(lrs), schedule=0.01, steps=300).findings[0]
    assert finding.subject == "lr jumped 50 steps before the forecast begins"
    assert finding.remedy.endswith("start=150 and the schedule of the whole run: --start 150 --lr 0.01")


def test_a_cosine_has_no_jump_however_steep_its_end_is():
    """Sampled every 3 steps, its lr changes by half from sample to sample near the end."""

    def lr(step: int) -> float:
        return 0.05 * (1 + np.cos(np.pi * step / 400))

    recorded = Walk(layers=1).run(np.array([lr(step) for step in range(391)]))
    third = recorded.table["step"].to_numpy() % 3 == 0
    sparse = Run(recorded.table.filter(third), recorded.metadata)
    for record, schedule in ((sparse, lr), (recorded, lr)):
        result = forecast(record, schedule=schedule, steps=399)
        said = " ".join(finding.subject for finding in result.findings)
        assert "lr jump" not in said and "when lr falls" not in said


def test_few_samples_are_a_reason_for_wider_bands(run):
    every_fourth = Run(run.table.filter(pc.equal(pc.bit_wise_and(run.table["step"], 3), 0)), run.metadata)
    result = forecast(every_fourth, schedule=0.1, steps=500)
    assert "25 samples were fitted" in result.layers[0].validity[0]


def test_a_schedule_that_does_not_go_on_is_noted(run):
    result = forecast(run, schedule=0.01, steps=500)
    assert any("lr jumps where the forecast begins" in finding.subject for finding in result.findings)


def test_sparse_samples_give_nearly_the_same_fit(run):
    every_second = Run(run.table.filter(pc.equal(pc.bit_wise_and(run.table["step"], 1), 0)), run.metadata)
    dense, sparse = (fit(read_layers(record).cohorts[0]) for record in (run, every_second))
    errors = np.sqrt(dense.covariance[:, 0, 0] + sparse.covariance[:, 0, 0])
    assert np.abs((dense.level - sparse.level) / errors).max() < 3
    np.testing.assert_allclose(dense.replay.norm_sq, sparse.replay.norm_sq, rtol=0.02)


def test_backtest_needs_samples_on_both_sides(run):
    with pytest.raises(EquilibriaError, match="expected at least 50 steps from there on"):
        backtest(run, start=180)
    with pytest.raises(EquilibriaError, match=r"10 samples, 5 of them .* at least 20"):
        backtest(run, start=10)


def test_results_cannot_be_changed(run):
    result = forecast(run, schedule=0.1, steps=500)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.steps = 3
