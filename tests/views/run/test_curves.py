"""The data inside a page: decoded, they are the samples, with every extreme and every gap."""

from __future__ import annotations

import base64

import numpy as np
import pyarrow.compute as pc
import pytest
from tests.helpers.report_helpers import layer_names, run, table

from equilibria.views.run.curves import MOST_LAYERS, Arrays, curves


def decode(found, number):
    return np.frombuffer(base64.b64decode(found["arrays"][number]), dtype="<f4")


def samples_of(samples, name, column):
    own = samples.filter(pc.equal(samples["param"].cast("string"), name))
    return own["step"].to_numpy(), own[column].to_numpy()


def test_the_envelope_contains_every_sample():
    samples, _ = run(3, steps=40_000, every=5)
    found = curves(samples, layer_names(3), steps_per_epoch=None)
    for layer in found["layers"]:
        steps, angle = samples_of(samples, layer["name"], "angle")
        x, low, high = (decode(found, layer[key]) for key in ("x", "low", "high"))
        assert 50 < len(x) < 300
        nearest = np.abs(steps[:, None] - x.astype(float)).argmin(axis=1)
        on_an_edge = np.zeros(len(steps), dtype=bool)
        on_an_edge[1:] |= nearest[1:] != nearest[:-1]
        on_an_edge[:-1] |= nearest[1:] != nearest[:-1]
        inside = (low[nearest].astype(float) <= angle) & (angle <= high[nearest].astype(float))
        assert inside[~on_an_edge].all()
        assert low.min() <= angle.min() and high.max() >= angle.max()


def test_a_spike_of_one_sample_is_in_the_page():
    at = np.arange(50_000)
    angle = np.full((50_000, 1), 0.01)
    angle[31_415] = 0.7
    norm = np.full((50_000, 1), 3.0)
    norm[2_718] = 0.02
    found = curves(table(at, ["w"], {"angle": angle, "norm": norm}), ["w"], steps_per_epoch=None)
    (layer,) = found["layers"]
    high, line = decode(found, layer["high"]), decode(found, layer["norm"])
    assert high.max() >= 0.7
    assert line.min() == np.float32(0.02)
    assert decode(found, layer["line_x"])[line.argmin()] == pytest.approx(2718, abs=50_000 / 800)


def test_averages_do_not_cross_a_change_of_lr():
    samples, _ = run(1, steps=50_000, every=5)
    found = curves(samples, layer_names(1), steps_per_epoch=None)
    (layer,) = found["layers"]
    x, shown = decode(found, layer["x"]), decode(found, layer["angle"])
    steps, angle = samples_of(samples, layer["name"], "angle")
    before, after = angle[(steps > 20_000) & (steps < 30_000)], angle[(steps >= 30_000) & (steps < 30_500)]
    last, first = shown[x < 30_000][-1], shown[x >= 30_000][0]
    assert before.min() < last < before.max()
    assert after.min() < first < after.max() < before.min()


def test_ratios_compare_like_with_like():
    steps = np.arange(3000)
    every_third = (steps % 3 == 0)[:, None]
    angle, predicted = np.where(every_third, 2.0, 8.0), np.where(every_third, 1.0, np.nan)
    samples = table(steps, ["w"], {"angle": angle, "angle_predicted": predicted})
    found = curves(samples, ["w"], steps_per_epoch=None)
    ratio = decode(found, found["layers"][0]["ratio"])
    assert 50 < len(ratio) < 1000
    np.testing.assert_allclose(ratio, 2.0)


def test_what_is_not_known_is_a_gap_and_not_drawn_at_all_if_nothing_is():
    samples, _ = run(4, lawless=2)
    found = curves(samples, layer_names(4), steps_per_epoch=None)
    lawless = found["layers"][2]
    assert all(
        lawless[key] is None for key in ("predicted", "equilibrium", "norm_equilibrium", "norm_predicted", "ratio")
    )
    assert lawless["angle"] is not None
    angle = np.array([[0.1], [np.nan], [np.inf], [0.2]])
    found = curves(table(np.arange(4), ["w"], {"angle": angle}), ["w"], steps_per_epoch=None)
    np.testing.assert_array_equal(decode(found, found["layers"][0]["angle"]), np.float32([0.1, np.nan, np.nan, 0.2]))


def test_layers_with_equal_curves_share_them():
    samples, _ = run(20)
    found = curves(samples, layer_names(20), steps_per_epoch=None)
    for kind in ("equilibrium", "lr", "wd", "x", "line_x"):
        assert len({layer[kind] for layer in found["layers"]}) == 1
    assert len({layer["angle"] for layer in found["layers"]}) == 20


def test_the_middle_of_many_layers():
    samples, _ = run(60, steps=500, every=10)
    assert curves(samples, layer_names(40), steps_per_epoch=None)["middle"] is None
    found = curves(samples, layer_names(60), steps_per_epoch=None)
    angle = samples["angle"].to_numpy().reshape(-1, 60)
    for number, share in zip(found["middle"]["angle"], (10, 50, 90), strict=True):
        np.testing.assert_allclose(decode(found, number), np.percentile(angle, share, axis=1), rtol=1e-6)


def test_more_layers_than_fit_are_left_out():
    count = MOST_LAYERS + 20
    names = [f"w[{i}]" for i in range(count)]
    samples = table(np.arange(5), names, {"angle": np.full((5, count), 0.1)})
    found = curves(samples, names, steps_per_epoch=None)
    assert [layer["name"] for layer in found["layers"]] == names[:MOST_LAYERS]


@pytest.mark.parametrize("steps_per_epoch", [None, 50])
def test_the_axis_is_in_epochs_where_they_are_known(steps_per_epoch):
    samples, _ = run(1, steps=200, every=10)
    found = curves(samples, layer_names(1), steps_per_epoch=steps_per_epoch)
    assert found["unit"] == ("step" if steps_per_epoch is None else "epoch")
    assert found["range"] == [0, 190 / (steps_per_epoch or 1)]
    np.testing.assert_allclose(decode(found, found["layers"][0]["x"]), np.arange(0, 200, 10) / (steps_per_epoch or 1))


def test_no_layer_and_one_sample_have_an_axis():
    samples, _ = run(1, steps=10, every=10)
    assert curves(samples.slice(0, 0), [], steps_per_epoch=None)["layers"] == []
    low, high = curves(samples, layer_names(1), steps_per_epoch=None)["range"]
    assert low < high


def test_32_bits_round_outwards_where_they_are_told_to():
    values = np.random.default_rng(0).uniform(0, 1, 1000)
    for rounding, holds in ((-np.inf, np.less_equal), (np.inf, np.greater_equal)):
        arrays = Arrays()
        number = arrays.add(values, rounding=rounding)
        short = np.frombuffer(base64.b64decode(arrays.encoded[number]), "<f4").astype(float)
        assert holds(short, values).all()
        np.testing.assert_allclose(short, values, rtol=3e-7, atol=1e-38)
