"""Windows of a sample table, and the numbers made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest

from equilibria.errors import EquilibriaError
from equilibria.lab.demo import DemoArm, DemoResult, DemoSettings, LayerTurns, Turn
from equilibria.lab.demo.results import layer_turns
from equilibria.records.tables import SAMPLE_FIELDS

SETTINGS = DemoSettings(steps_before=10, steps_after=10, steady_window=4, drop_window=2)
LAYERS = ("a.conv.weight", "b.conv.weight")


def sample(step: int, param: str, **values: object) -> dict[str, object]:
    row = dict.fromkeys(SAMPLE_FIELDS.names)
    return {**row, "step": step, "param": param, "norm": 1.0, "lr": 0.1, **values}


def samples(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SAMPLE_FIELDS)


def table_of(angle, *, predicted=lambda step: 3.0, equilibrium=lambda step: 2.0) -> pa.Table:
    rows = [
        sample(step, name, angle=angle(step), angle_equilibrium=equilibrium(step), angle_predicted=predicted(step))
        for step in range(20)
        for name in (*LAYERS, "fc.weight")
    ]
    return samples(rows)


def test_each_window_has_the_root_mean_square_of_its_steps():
    first, second = layer_turns(table_of(float), {}, settings=SETTINGS, layers=LAYERS)
    assert (first.layer, second.layer) == LAYERS
    assert first.before.measured == pytest.approx(math.sqrt((36 + 49 + 64 + 81) / 4))
    assert first.after.measured == pytest.approx(math.sqrt((100 + 121) / 2))
    assert first.end.measured == pytest.approx(math.sqrt(sum(n * n for n in range(16, 20)) / 4))
    assert first.before.ratio == pytest.approx(first.before.measured / 2)
    assert first.before.predicted_ratio == pytest.approx(1.5)


def test_a_layer_without_prediction_says_so():
    turns = layer_turns(table_of(float, predicted=lambda step: None), {}, settings=SETTINGS, layers=LAYERS)
    assert turns[0].end.predicted is None
    assert turns[0].end.predicted_ratio is None


def test_skipped_steps_do_not_count():
    rows = [sample(step, "a.conv.weight", angle=2.0, angle_equilibrium=2.0, angle_predicted=2.0) for step in range(20)]
    rows[8] |= {"angle": 0.0, "note": "step skipped"}
    (turns,) = layer_turns(samples(rows), {}, settings=SETTINGS, layers=LAYERS[:1])
    assert turns.before.ratio == pytest.approx(1.0)


def test_a_missing_layer_or_window_is_an_error_that_names_it():
    with pytest.raises(EquilibriaError, match=r"without c\.conv\.weight"):
        layer_turns(table_of(float), {}, settings=SETTINGS, layers=["c.conv.weight"])
    short = table_of(float).slice(0, 30)
    with pytest.raises(EquilibriaError, match=r"no sample of a\.conv\.weight in steps 10 to 11"):
        layer_turns(short, {}, settings=SETTINGS, layers=LAYERS)


def test_windows_longer_than_their_phase_raise():
    with pytest.raises(EquilibriaError, match="got steps_before=3; expected 4 <= steps_before"):
        DemoSettings(steps_before=3, steps_after=10, steady_window=4, drop_window=2)
    with pytest.raises(EquilibriaError, match="got steps_after=5; expected 6 <= steps_after"):
        DemoSettings(steps_before=5, steps_after=5, steady_window=4, drop_window=6)


def turns(before: float, after: float, end: float) -> LayerTurns:
    return LayerTurns("stem.conv.weight", *(Turn(ratio * 0.02, 0.02, None) for ratio in (before, after, end)))


def result(*before: float) -> DemoResult:
    layers = tuple(turns(ratio, 0.32, 0.97) for ratio in before)
    arm = DemoArm(Path("out/plain"), Path("out/plain.html"), (0, 50), (0.1, 0.99), layers)
    return DemoResult(Path("out"), DemoSettings(), arm, arm, arm)


@pytest.mark.parametrize(("ratios", "good"), [((1.04, 0.97), True), ((1.0, 0.94), False), ((1.06, 1.0), False)])
def test_as_predicted_asks_for_every_layer_within_five_per_cent(ratios, good):
    found = result(*ratios)
    assert found.as_predicted is good
    assert found.off_before == pytest.approx(max(abs(ratio - 1) for ratio in ratios))


def test_the_dictionary_is_json_with_every_number():
    values = json.loads(json.dumps(result(1.01, 0.99).as_dict()))
    assert list(values) == ["out", "settings", "off_before", "as_predicted", "plain", "rescaled", "less_decay"]
    assert values["settings"]["lr"] == 0.1
    assert (values["plain"]["test_accuracy"], values["plain"]["accuracies"]) == (0.99, [0.1, 0.99])
    layer = values["plain"]["layers"][0]
    assert list(layer) == ["layer", "before", "after", "end"]
    assert layer["after"]["ratio"] == pytest.approx(0.32)
    assert layer["after"]["predicted_ratio"] is None
