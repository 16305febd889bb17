"""What results show in a notebook: well-formed, escaped, with the numbers that they print."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from statistics import median
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.report_helpers import KINDS, run, transformer_run
from torch import nn
from torch.nn.functional import cross_entropy

import equilibria as eq
from equilibria.diagnosis.summary import summarise
from equilibria.theory import SGD
from equilibria.views.notebook import card
from equilibria.views.run.card import run_card
from equilibria.views.svg import Line, log_levels, round_levels, svg_bars, svg_chart

ONE = run(1, steps=300)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A short training with a drop, and everything that can be shown of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    batches = [(inputs, inputs[:, :5].argmax(1)) for inputs in torch.randn(120, 32, 20)]
    objective = eq.objective(model, cross_entropy)
    sym = eq.symmetries(objective, batches[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    log_dir = tmp_path_factory.mktemp("runs") / "a"
    with (
        eq.watch(model, optimizer, invariant=sym, every=1, log_dir=log_dir) as monitor,
        eq.SharpnessTracker(objective, optimizer, batches[0], every=40) as tracker,
    ):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return {
        "monitor": monitor,
        "run": eq.read_run(log_dir),
        "tracker": tracker,
        "symmetries": sym,
        "sharpness": eq.sharpness(objective, batches[0], select=sym.largest_uniform(), spherical=True),
        "plan": eq.plan(
            SGD(lr=0.1, weight_decay=5e-4, momentum=0.9), lambda step: 0.1 if step < 500 else 0.01, steps=900
        ),
        "forecast": eq.forecast(eq.read_run(log_dir), schedule=0.1, steps=400),
    }


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


@pytest.mark.parametrize("name", ["monitor", "run", "tracker", "symmetries", "sharpness", "plan", "forecast"])
def test_each_shows_a_table_and_a_picture_and_asks_for_nothing(shown, name):
    html = shown[name]._repr_html_()
    tree = parsed(html)
    assert tree.find(".//table") is not None
    assert tree.find(".//svg") is not None
    assert not re.search(r"<script|https?:|src=|href=", html)


def test_a_recorded_run_looks_as_it_did_while_it_was_watched(shown):
    recorded, watched = (
        "".join(parsed(shown[name]._repr_html_()).itertext()).split("0.weight", 2)[1] for name in ("run", "monitor")
    )
    assert recorded == watched


def test_the_table_of_a_run_has_the_measured_angle(shown):
    cells = [cell.text for cell in parsed(shown["run"]._repr_html_()).iter("td")]
    summary = summarise(shown["run"].samples(), metadata=shown["run"].metadata)
    for layer in summary:
        at = cells.index(layer.name)
        assert cells[at + 1] == f"{layer.angle:.3g}"


def test_siblings_share_a_row_of_the_card_with_their_range():
    samples, metadata = transformer_run(12, fast={0: 2.0})
    layers = summarise(samples, metadata=metadata)
    tree = parsed(run_card(samples, layers))
    head, *rows = [[cell.text or "" for cell in row] for row in tree.iter("tr")]
    assert head == ["layer", "rad per step", "norm", "state"]  # no empty columns of predictions
    assert [row[0] for row in rows] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *(f"transformer.h.*.{kind}.weight, 12 layers" for kind in KINDS),
    ]
    angles = [layer.angle for layer in layers if layer.name.endswith("mlp.c_fc.weight")]
    assert rows[4][1] == f"{median(angles):.3g} ({min(angles):.3g} to {max(angles):.3g})"
    assert "Against the median of their siblings: transformer.h.0 (4 layers)" in "".join(tree.itertext())


def test_a_card_with_room_for_twelve_rows_shows_the_most_telling_in_the_order_of_the_model():
    (layer,) = summarise(ONE[0], metadata=ONE[1])
    layers = [dataclasses.replace(layer, name=f"unit{place}", how_wrong=place % 5 / 10) for place in range(20)]
    tree = parsed(run_card(ONE[0], layers))
    names = [row[0].text for row in tree.iter("tr")][1:]
    assert names == [f"unit{place}" for place in range(20) if place % 5 >= 2]
    assert "and 8 more" in "".join(tree.itertext())


def test_a_forecast_shows_what_it_expects_of_each_layer(shown):
    forecast = shown["forecast"]
    text = "".join(parsed(forecast._repr_html_()).itertext())
    for layer in forecast.layers:
        assert f"{float(layer.angle.value[-1]):.3g}" in text


def test_a_forecast_without_an_equilibrium_says_nothing_of_the_time_to_it(shown):
    forecast = shown["forecast"]
    nothing = dict.fromkeys(("value", "low", "high"), math.nan)
    layers = [dataclasses.replace(one, steps_out=type(one.steps_out)(**nothing)) for one in forecast.layers]
    without = dataclasses.replace(forecast, layers=tuple(layers))
    text = "".join(parsed(without._repr_html_()).itertext())
    assert "nan" not in text and "longest out of equilibrium" not in text


def test_the_sharpness_shows_its_value_and_where_it_lies(shown):
    found = shown["sharpness"]
    text = "".join(parsed(found._repr_html_()).itertext())
    assert f"{found.value:.6g}" in text
    share = max(float(part.square().sum()) for part in found.vectors[0].values())
    assert f"{share:.0%}" in text


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Co"]), max_size=30))
def test_names_are_escaped(name):
    html = card(name, headings=[name], rows=[[name]], notes=[f"A{name}"], picture=svg_bars([(name, 0.5)], label=name))
    assert "".join(parsed(html).itertext()).count(name) >= (4 if name else 0)


def test_long_tables_are_cut_and_counted():
    text = "".join(parsed(card("x", headings=["n"], rows=[[f"row {at}"] for at in range(30)])).itertext())
    assert "row 11" in text
    assert "row 12" not in text
    assert "and 18 more" in text


def test_gaps_split_a_line_and_an_empty_chart_is_nothing():
    line = Line("a", [0, 1, 2, 3, 4], [1.0, 2.0, float("nan"), 3.0, 4.0], "#000")
    assert len(parsed(svg_chart([line], x="steps", y="R")).findall(".//polyline")) == 2
    assert svg_chart([Line("a", [0, 1], [0.0, -1.0], "#000")], x="steps", y="R", log=True) == ""


def test_a_higher_value_is_drawn_higher():
    drawn = parsed(svg_chart([Line("a", [0, 1], [1.0, 100.0], "#000")], x="steps", y="R", log=True)).find(".//polyline")
    first, last = (tuple(map(float, point.split(","))) for point in drawn.get("points").split())
    assert first[0] < last[0]
    assert first[1] > last[1]


def test_a_few_whole_numbers_have_whole_ticks():
    picture = svg_chart([Line("a", [4, 6], [1.0, 2.0], "red")], x="log2 of the steps n", y="R")
    assert re.findall(r'y="190\.0" text-anchor="middle"[^>]*>([^<]*)<', picture) == ["4", "5", "6"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_axes_end_on_round_numbers_around_the_data(low, span):
    levels = round_levels(low, low + span)
    steps = [after - before for before, after in pairwise(levels)]
    assert levels[0] <= low + 1e-6 * span and levels[-1] >= low + span * (1 - 1e-6) and 2 <= len(levels) <= 6
    assert max(steps) == pytest.approx(min(steps)) and f"{steps[0]:.0e}"[0] in "125"
    assert steps[0] <= span, "no axis is mostly empty"


@given(st.floats(-9, 9), st.floats(0, 12))
def test_logarithmic_axes_too(low, span):
    levels = log_levels(low, low + span)
    assert levels[0] <= low + 1e-6 and levels[-1] >= low + span - 1e-6 and 2 <= len(levels) <= 7
    assert sorted(levels) == levels
    assert all(f"{10**level:.6e}"[1:8] == ".000000" for level in levels) or span < 0.31
    assert levels[-1] - levels[0] <= max(3 * span, 1.0)


def test_a_run_without_a_step_shows_what_to_do():
    model = nn.Linear(3, 2)
    with eq.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        assert "Nothing was measured yet" in "".join(parsed(monitor._repr_html_()).itertext())
