"""The numbers that a training logged: which are drawn, on which scale, and their last values in words."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tests.helpers.browser import Browser, find
from tests.helpers.report_helpers import run

from equilibria.diagnosis.summary import summarise
from equilibria.records._metrics import KeptMetrics
from equilibria.records.tables import METRIC_FIELDS
from equilibria.views.run.card import run_card
from equilibria.views.run.curves import curves
from equilibria.views.run.metrics import MOST_PANELS, last_values, left_out, metric_panels, metric_summaries
from equilibria.views.run.page import report_page, write_report
from equilibria.views.run.terminal import run_table

HOSTILE = "</script><img src=x onerror=alert(1)> %{y} & 'a'"
STEPS = 3000


def logged(**series):
    kept = KeptMetrics()
    for name, values in series.items():
        kept.add(name, list(range(len(values))), list(values))
    return kept.table()


def falling(steps=STEPS):
    return [3.0 * math.exp(-step / 600) + 0.01 for step in range(steps)]


def test_the_loss_comes_first_and_at_most_four_are_drawn():
    table = logged(accuracy=[0.1], ppl=[9.0], lr=[1.0], speed=[2.0], val_loss=[2.0], loss=[1.0])
    names = [panel.name for panel in metric_panels(table, most=100)]
    assert names == ["loss", "val_loss", "accuracy", "ppl"]
    assert len(names) == MOST_PANELS
    assert left_out(table) == "Not drawn: lr, speed (run.metrics() has them)."
    assert left_out(logged(loss=[1.0])) == ""


@pytest.mark.parametrize(
    ("values", "is_log"),
    [(falling(), True), ([1.0, 5.0, 9.0], False), ([-1.0, 100.0], False), ([0.0, 100.0], False), ([math.nan], False)],
)
def test_the_scale_is_logarithmic_beyond_a_decade_of_positive_numbers(values, is_log):
    (panel,) = metric_panels(logged(loss=values), most=100)
    assert panel.is_log is is_log


def test_a_long_series_keeps_its_spike_and_numbers_that_are_not_finite_are_counted():
    values = [1.0] * 10_000
    values[4321], values[5000], values[9999] = 50.0, math.nan, math.inf
    (panel,) = metric_panels(logged(loss=values), most=200)
    assert len(panel.values) <= 400
    assert np.nanmax(panel.values) == 50.0
    assert abs(panel.steps[np.nanargmax(panel.values)] - 4321) <= 50
    assert panel.note == "inf at step 9,999; 2 values not finite, first at step 5,000"


def test_the_axis_of_the_charts_reaches_from_the_first_to_the_last_number():
    samples, _ = run(2, steps=600)
    data = curves(samples, ["a"], steps_per_epoch=None, metrics=logged(loss=falling(700)))
    assert data["range"] == [0.0, 699.0]
    (panel,) = data["metrics"]
    assert (panel["name"], panel["log"], panel["note"]) == ("loss", False, "0.9458 at step 699")
    assert curves(samples, ["a"], steps_per_epoch=None)["metrics"] == []


def test_words_and_json_have_the_last_value():
    table = logged(loss=[2.5, 0.5, math.nan], accuracy=[0.25])
    assert last_values(table) == "loss nan at step 2, accuracy 0.25 at step 0"
    assert last_values(METRIC_FIELDS.empty_table()) == ""
    loss = metric_summaries(table)[0]
    assert math.isnan(loss.pop("last"))
    expected = {"name": "loss", "count": 3, "not_finite": 1, "first_step": 0, "last_step": 2}
    assert loss == {**expected, "first": 2.5, "lowest": 0.5, "highest": 2.5}


def test_table_and_card_show_the_loss():
    samples, metadata = run(2, steps=600)
    summaries, table = summarise(samples, metadata=metadata), logged(loss=[2.5, 0.125])
    assert "loss 0.125 at step 1" in run_table(summaries, findings=(), metrics=table)
    assert "0.125 at step 1" in run_card(samples, summaries, metrics=table)
    assert "at step 1" not in run_card(samples, summaries)


def test_a_hostile_name_is_text_in_the_page():
    samples, metadata = run(2, steps=600)
    page = report_page(samples, metadata=metadata, metrics=logged(**{HOSTILE: [1.0], "loss": [1.0], "b": [1.0]}))
    text = page.document()
    assert "<img src=x" not in text
    assert [panel["name"] for panel in page.data["metrics"]] == ["loss", HOSTILE, "b"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find()
    if program is None:
        pytest.skip("no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("phone", [False, True])
def test_panels_are_drawn_above_the_angles_over_the_same_steps(browser, tmp_path, phone):
    samples, metadata = run(3, steps=STEPS)
    table = logged(loss=falling(), accuracy=np.linspace(-0.1, 0.9, STEPS), **{HOSTILE: [math.nan, 1.0]})
    path = write_report(samples, tmp_path / "page.html", metadata=metadata, metrics=table)
    browser.open(path, phone=phone, width=390 if phone else 1200)
    state = json.loads(
        browser.run(
            """JSON.stringify((() => {
        const panels = [...document.querySelectorAll("#metric-charts .chart")];
        const angle = document.getElementById("angle-chart");
        const titles = [...document.querySelectorAll("#metric-charts figcaption")];
        return { names: titles.map((title) => title.firstChild.data),
          types: panels.map((chart) => chart.layout.yaxis.type),
          drawn: panels.map((chart) => chart.querySelectorAll(".scatterlayer .trace path").length > 0),
          above: panels.every((chart) => chart.getBoundingClientRect().bottom <= angle.getBoundingClientRect().top),
          same: panels.every((chart) => String(chart.layout.xaxis.range) === String(angle.layout.xaxis.range)),
          left: panels.map((chart) => chart._fullLayout._size.l - angle._fullLayout._size.l),
          wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
          shown: !document.getElementById("metrics").hidden };
        })())"""
        )
    )
    assert state["names"] == ["loss", "accuracy", HOSTILE]
    assert state["types"] == ["log", "linear", "linear"]
    assert state["drawn"] == [True, True, True]
    assert state["above"] and state["same"] and state["shown"]
    assert state["left"] == [0, 0, 0]
    assert state["wide"] == 0
    assert browser.problems == []


def test_zoom_is_shared_with_the_other_charts(browser, tmp_path):
    samples, metadata = run(3, steps=STEPS)
    path = write_report(samples, tmp_path / "page.html", metadata=metadata, metrics=logged(loss=falling()))
    browser.open(path)
    ranges = """new Promise((done) => setTimeout(() => done(
        [...document.querySelectorAll("#charts .chart")].map((chart) => chart.layout.xaxis.range.join(" "))), 200))"""
    zoom = '{"xaxis.range[0]": 100, "xaxis.range[1]": 200}'
    browser.run(f'document.querySelector("#metric-charts .chart").emit("plotly_relayout", {zoom})')
    assert set(browser.run(ranges)) == {"100 200"}
    browser.run("""document.getElementById("norm-chart").emit("plotly_relayout", {"xaxis.autorange": true})""")
    assert len(set(browser.run(ranges))) == 1
    assert set(browser.run(ranges)) != {"100 200"}


def test_without_numbers_there_is_no_section(browser, tmp_path):
    samples, metadata = run(3, steps=600)
    browser.open(write_report(samples, tmp_path / "page.html", metadata=metadata))
    assert browser.run('document.getElementById("metrics").offsetHeight') == 0
