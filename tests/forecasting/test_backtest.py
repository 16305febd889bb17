"""Back-tests: the comparison, their findings about themselves, and events that a forecast cannot know."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.planted_walks import Run, Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import FORECAST, Scenario, backtest, forecast

LRS = np.where(np.arange(500) < 300, 0.1, 0.01)


def _with(run: Run, step: int, name: str, value: object, *, layers: tuple[str, ...] | None = None) -> Run:
    """The column as it is until a step, another value from there on."""
    table = run.table
    rows = table["step"].to_numpy() >= step
    if layers is not None:
        rows &= np.isin(table["param"].to_numpy(), layers)
    column = [value if row else old for row, old in zip(rows, table[name].to_pylist(), strict=True)]
    place = table.column_names.index(name)
    return Run(table.set_column(place, table.field(name), pa.array(column, table.field(name).type)), run.metadata)


@pytest.fixture(scope="module")
def run() -> Run:
    return Walk(layers=3).run(LRS)


def _ended(run: Run) -> Run:
    """One layer has no samples from step 210 on."""
    keep = (run.table["step"].to_numpy() < 210) | (run.table["param"].to_numpy() != "layer2")
    return Run(run.table.filter(pa.array(keep)), run.metadata)


def test_a_layer_is_compared_whatever_happens_to_it_later(run):
    """Refusals that are decided by what comes later would flatter the forecast."""
    lost = _with(run, 350, "unit_grad_sq", 1e-9, layers=("layer1",))
    test = backtest(lost, start=200)
    assert [layer.forecast.name for layer in test.layers] == ["layer0", "layer1", "layer2"]


def test_a_layer_that_ends_early_is_listed(run):
    test = backtest(_ended(run), start=200)
    assert [layer.forecast.name for layer in test.layers] == ["layer0", "layer1"]
    assert "10 samples from step 200 on" in test.refused["layer2"]


def test_a_frozen_layer_has_no_forecast(run):
    result = forecast(_ended(run), schedule=0.01, steps=600)
    assert result.refused == {"layer2": "it has not moved since step 209, while others moved until step 499"}


@pytest.mark.parametrize(
    ("start", "says"),
    [(500, "without samples to compare with"), (501, "expected an earlier one"), (10**308, "expected an earlier one")],
)
def test_a_start_beyond_every_step_leaves_nothing_to_compare_with(run, start, says):
    """Also one that no 64 bits can hold."""
    with pytest.raises(EquilibriaError, match=says):
        backtest(run, start=start)


def test_a_bad_forecast_is_a_warning(run):
    """Another angle and norm from step 250 on, which nothing could know."""
    louder = run
    for name, factor in (("angle", 3.0), ("norm", 2.0)):
        column = louder.table[name].to_numpy() * np.where(louder.table["step"].to_numpy() >= 250, factor, 1.0)
        place = louder.table.column_names.index(name)
        louder = Run(louder.table.set_column(place, louder.table.field(name), pa.array(column)), louder.metadata)
    subjects = [finding.subject for finding in backtest(louder, start=200).findings if finding.severity == "warning"]
    assert any("bands of the angles" in subject for subject in subjects) and any(
        "bands of the norms" in subject for subject in subjects
    )
    quiet = backtest(run, start=200).findings
    assert not [finding for finding in quiet if finding.severity == "warning"]


def test_a_recorded_rescaling_is_forecast(run):
    """The note decides what is forecast; this walk itself was not rescaled."""
    rows = run.table["step"].to_numpy() == 300
    note = pa.array(["changed outside step" if row else None for row in rows], pa.string()).dictionary_encode()
    place, field = run.table.column_names.index("note"), run.table.field("note")
    noted = Run(run.table.set_column(place, field, note.cast(field.type)), run.metadata)
    result = backtest(noted, start=200)
    asked = backtest(run, start=200, rescale=True)
    plain = backtest(run, start=200)
    assert result.scores[FORECAST] == asked.scores[FORECAST] != plain.scores[FORECAST]
    assert any("weights were rescaled" in finding.subject for finding in result.findings)
    at = int(np.flatnonzero(result.layers[0].forecast.step == 300)[0])
    shrunk = result.layers[0].forecast.norm.value[at] / plain.layers[0].forecast.norm.value[at]
    assert shrunk == pytest.approx(10**-0.25, rel=0.01)


def test_the_guess_by_lr_is_not_spoilt_by_a_drop(run):
    """Shortly after a drop the last 50 samples have two learning rates."""
    guess = backtest(run, start=320).layers[0].guesses["angle proportional to lr"]
    assert guess[0] == pytest.approx(run.table["angle"].to_numpy()[310 * 3 : 320 * 3 : 3].mean(), rel=0.5)


def test_settings_besides_a_scenario_raise(run):
    with pytest.raises(EquilibriaError, match="expected them inside of the Scenario"):
        forecast(run, schedule=Scenario(0.01), steps=600, rescale=True)


def test_the_window_of_a_comparison_is_not_larger_than_the_record(run):
    """Every fifth step: 40 samples from step 300 on."""
    sparse = Run(run.table.filter(pa.array(run.table["step"].to_numpy() % 5 == 0)), run.metadata)
    test = backtest(sparse, start=300)
    assert test.rms_samples == len(test.layers[0].angle) == 40
    shown = " ".join(str(test.table()).split())
    assert "the rms of the 40 samples around (200 steps), fewer at the ends" in shown
    layer = test.layers[0]
    assert layer.rms_angle[20] == pytest.approx(np.sqrt(np.mean(layer.angle**2)))
    assert "50 samples" not in shown
