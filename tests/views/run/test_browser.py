"""The page of a run in a real browser: what is drawn, what a click and a word change, on every screen."""

from __future__ import annotations

import json

import pyarrow.compute as pc
import pytest
from tests.helpers.browser import Browser, find
from tests.helpers.report_helpers import layer_names, run, transformer_run

from equilibria.diagnosis.summary import summarise
from equilibria.records.tables import SAMPLE_FIELDS
from equilibria.views.run.headline import worst_first
from equilibria.views.run.page import write_report

OUTLIER = 7


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find()
    if program is None:
        pytest.skip("no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    samples, metadata = run(20, outlier=OUTLIER, lawless=13)
    return write_report(samples, tmp_path_factory.mktemp("page") / "run.html", metadata=metadata, title="twenty layers")


def traces(browser, chart="angle-chart"):
    """(kind, layer) of every trace of a chart that has a visible line or area in the drawing."""
    return browser.run(
        f"""(() => {{ const chart = document.getElementById("{chart}");
        const paths = chart.querySelectorAll(".scatterlayer .trace path").length;
        if (!paths) throw new Error("nothing is drawn");
        return chart.data.map((trace) => [trace.meta.kind, trace.meta.layer ?? null]); }})()"""
    )


def of(kind, drawn):
    return {layer for what, layer in drawn if what == kind}


def settle(browser):
    browser.run("new Promise((done) => setTimeout(done, 250))")  # typing is answered after a short rest


def pressed(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).getAttribute('aria-pressed')")


def unfold(browser):
    browser.run("document.querySelectorAll('tr.kind button').forEach((button) => button.click())")


def visible(browser, selector="tr[data-layer]"):
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter((row) => row.offsetParent !== null)"
        ".map((row) => row.querySelector('button span:last-child').textContent)"
    )


def test_every_chart_is_drawn_and_nothing_is_asked_of_the_network(browser, page):
    browser.open(page)
    angle, norm, schedule = (traces(browser, f"{name}-chart") for name in ("angle", "norm", "schedule"))
    lawless = 2  # of the three layers that findings name; the other two are further off
    assert of("measured", angle) == of("measured", norm) == set(range(12))
    assert of("predicted", angle) == of("norm_equilibrium", norm) == set(range(12)) - {lawless}
    assert [kind for kind, _ in angle].count("equilibrium") == 1  # all layers share lr and wd
    assert [kind for kind, _ in angle].count("rest") == 1
    assert [kind for kind, _ in schedule] == ["wd", "lr"]
    assert not of("envelope", angle)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]


def test_the_first_colour_is_the_worst_layer_and_its_line_is_its_samples(browser, page):
    samples, metadata = run(20, outlier=OUTLIER, lawless=13)
    browser.open(page)
    names = browser.run("[...document.querySelectorAll('#chips button')].map((chip) => chip.textContent)")
    named = {layer_names(20)[OUTLIER], layer_names(20)[13], "layer4.0.conv1.weight"}  # by findings
    worst = [layer.name for layer in worst_first(summarise(samples, metadata=metadata))]
    assert names == sorted(worst, key=lambda name: name not in named)[:12]
    assert names[0] == layer_names(20)[OUTLIER]
    last = browser.run(
        """(() => { const data = document.getElementById("angle-chart").data;
        const last = (kind) => data.find((t) => t.meta.kind === kind && t.meta.layer === 0).y.at(-1);
        return last("measured") / last("predicted"); })()"""
    )
    assert last == pytest.approx(1.6, rel=0.2)


def test_a_click_on_a_row_shows_its_layer_in_every_chart(browser, page):
    browser.open(page)
    unfold(browser)
    row = "tr[data-layer='15']"
    browser.click(f"{row} td:nth-child(3)")
    angle, norm = traces(browser), traces(browser, "norm-chart")
    assert of("measured", angle) == {*range(12), 15}
    assert of("envelope", angle) == of("norm_predicted", norm) == {15}
    opacity = browser.run(
        "Object.fromEntries(document.getElementById('angle-chart').data"
        ".filter((t) => t.meta.kind === 'measured').map((t) => [t.meta.layer, t.opacity]))"
    )
    assert opacity["15"] == 1
    assert max(value for layer, value in opacity.items() if layer != "15") < 0.5
    assert pressed(browser, f"{row} button") == pressed(browser, '#chips [data-layer="15"]') == "true"
    browser.click(f"{row} td:nth-child(3)")
    assert of("envelope", traces(browser)) == set()
    assert of("measured", traces(browser)) == set(range(12))
    assert browser.problems == []


def test_the_keyboard_does_what_the_mouse_does(browser, page):
    browser.open(page)
    unfold(browser)
    browser.run("document.querySelector('tr[data-layer=\"2\"] button').focus()")
    browser.press("Enter", 13, "\r")
    assert of("envelope", traces(browser)) == {2}
    browser.run("document.querySelector('#chips [data-layer=\"4\"]').focus()")
    browser.press(" ", 32, " ")
    assert of("envelope", traces(browser)) == {2, 4}
    assert browser.run("document.activeElement.dataset.layer") == "4"  # the focus stays where it was
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.dataset.layer") == "5"
    browser.click("#clear")
    assert of("envelope", traces(browser)) == set()
    assert browser.run("document.getElementById('clear').hidden") is True


def test_a_word_finds_layers_in_the_table_and_the_charts(browser, page):
    browser.open(page)
    browser.run("document.getElementById('search').focus()")
    browser.type("Layer1 conv2")
    settle(browser)
    shown = browser.run(
        "[...document.querySelectorAll('tr[data-layer]')].filter((row) => row.offsetParent !== null)"
        ".map((row) => row.querySelector('button').textContent)"
    )
    assert sorted(shown) == [f"layer1.{i}.conv2.weight" for i in range(3)]
    assert len(of("measured", traces(browser))) == 3
    assert len(of("envelope", traces(browser))) == 3  # so few that there is room for them
    assert browser.run("document.getElementById('count').textContent") == "3 of 20 layers"
    browser.type(" nothing like it")
    settle(browser)
    assert browser.run("document.getElementById('angle-chart').data.length") == 0
    assert browser.problems == []


def test_a_row_of_siblings_unfolds_and_folds(browser, page):
    browser.open(page)
    kinds = visible(browser, "tr.kind")
    assert kinds == [f"layer{stage}.*.conv{place}.weight" for stage in (1, 2, 3) for place in (1, 2)]
    assert visible(browser) == ["conv1.weight", "layer4.0.conv1.weight"]
    browser.click("tr.kind button")
    assert visible(browser)[:4] == ["conv1.weight", *(f"layer1.{block}.conv1.weight" for block in range(3))]
    expanded = "[...document.querySelectorAll('tr.kind button')].map((button) => button.getAttribute('aria-expanded'))"
    assert browser.run(expanded) == ["true", *["false"] * 5]
    browser.click("tr.kind button")
    assert visible(browser) == ["conv1.weight", "layer4.0.conv1.weight"]
    assert browser.problems == []


def test_a_chosen_layer_shows_its_row(browser, page):
    browser.open(page)
    browser.click("#chips button")
    assert layer_names(20)[OUTLIER] in visible(browser)


def test_the_table_can_be_sorted_by_the_error_of_the_prediction(browser, page):
    samples, metadata = run(20, outlier=OUTLIER, lawless=13)
    browser.open(page)
    browser.click("#order")
    assert visible(browser) == [layer.name for layer in worst_first(summarise(samples, metadata=metadata))]
    assert visible(browser, "tr.kind") == []
    browser.click("#order")
    assert visible(browser) == ["conv1.weight", "layer4.0.conv1.weight"]
    assert browser.problems == []


def test_without_predictions_there_are_no_ratios(browser, page, tmp_path):
    samples, metadata = transformer_run(12)
    switch = "getComputedStyle(document.querySelector('.switch')).display"
    browser.open(write_report(samples, tmp_path / "gpt.html", metadata=metadata))
    assert browser.run(switch) == "none"
    legend = browser.run("[...document.querySelectorAll('#charts .legend li')].filter((li) => li.offsetParent).length")
    assert legend == 2 + 1 + 2  # measured and the middle of all, measured, lr and wd
    assert browser.problems == []
    browser.open(page)
    assert browser.run(switch) != "none"


def test_no_line_is_drawn_through_steps_that_were_not_recorded(browser, tmp_path):
    samples, metadata = run(2, steps=6000)
    steps = samples["step"]
    recorded = pc.or_(pc.less(steps, 1000), pc.greater(steps, 4000))
    gaps = (
        "document.getElementById('{}-chart').data.map((trace) => Array.from(trace.y).filter((y) => y === null).length)"
    )
    browser.open(write_report(samples.filter(recorded), tmp_path / "hole.html", metadata=metadata))
    for chart in ("norm", "schedule"):
        assert set(browser.run(gaps.format(chart))) == {1}
    browser.open(write_report(samples, tmp_path / "whole.html", metadata=metadata))
    for chart in ("norm", "schedule"):
        assert set(browser.run(gaps.format(chart))) == {0}
    assert browser.problems == []


def test_ratios_compare_with_prediction_and_equilibrium(browser, page):
    browser.open(page)
    browser.click("#relative")
    last = browser.run("document.getElementById('angle-chart').data.find((trace) => trace.meta.layer === 0).y.at(-1)")
    assert last == pytest.approx(1.6, rel=0.2)
    assert of("predicted", traces(browser)) == set()
    assert browser.run("document.getElementById('norm-chart').layout.yaxis.title.text") == "norm ÷ equilibrium"


def test_a_zoom_goes_to_all_charts_and_survives_a_choice(browser, page):
    browser.open(page)
    unfold(browser)
    browser.run("Plotly.relayout('norm-chart', {'xaxis.range[0]': 10, 'xaxis.range[1]': 20}).then(() => 0)")
    browser.click("tr[data-layer='3'] td:nth-child(3)")
    for chart in ("angle", "norm", "schedule"):
        assert browser.run(f"document.getElementById('{chart}-chart').layout.xaxis.range") == [10, 20]
    browser.run("Plotly.relayout('angle-chart', {'xaxis.autorange': true}).then(() => 0)")
    assert browser.run("document.getElementById('schedule-chart').layout.xaxis.range") == pytest.approx([0, 59.9])


def test_light_and_dark(browser, page):
    seen = {}
    browser.open(page)
    for dark in (False, True):
        browser.look(dark=dark)
        settle(browser)
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        line = browser.run("document.getElementById('schedule-chart').data[1].line.color")
        seen[dark] = sum(map(int, paper[4:-1].split(","))), sum(int(line[i : i + 2], 16) for i in (1, 3, 5))
    assert seen[False][0] > 700 > 200 > seen[True][0]  # paper
    assert seen[False][1] < 200 < 600 < seen[True][1]  # ink, drawn again when the scheme changed


def test_a_phone_needs_no_sideways_scrolling(browser, page):
    browser.open(page, width=390, height=844, phone=True)
    assert browser.run("document.documentElement.scrollWidth") == 390
    widths = browser.run(
        "[...document.querySelectorAll('.chart .main-svg')].map((svg) => svg.getBoundingClientRect().width)"
    )
    assert 300 < min(widths) <= max(widths) <= 390
    table = browser.run(
        "(() => { const box = document.querySelector('.scroll'); return [box.scrollWidth, box.clientWidth] })()"
    )
    assert table[0] == table[1]
    assert browser.problems == []


def test_many_layers_are_drawn_on_demand(browser, tmp_path):
    samples, metadata = run(60, steps=1000, outlier=3)
    browser.open(write_report(samples, tmp_path / "many.html", metadata=metadata))
    drawn = traces(browser)
    assert of("measured", drawn) == set(range(12))
    assert ["middle", None] in drawn and ["rest", None] not in drawn
    browser.click("#everything")
    drawn = traces(browser)
    assert ["rest", None] in drawn and ["middle", None] not in drawn
    assert (
        browser.run("document.getElementById('angle-chart').data.find((t) => t.meta.kind === 'rest').meta.count") == 48
    )
    assert browser.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1])
def test_few_layers(browser, tmp_path, count):
    samples, metadata = run(1, steps=1000)
    samples = samples if count else SAMPLE_FIELDS.empty_table()
    browser.open(write_report(samples, tmp_path / "few.html", metadata=metadata))
    assert browser.run("document.getElementById('charts').hidden") is (count == 0)
    if count:
        assert of("envelope", traces(browser)) == {0}
    assert browser.problems == []


@pytest.mark.slow
def test_a_million_samples(browser, tmp_path):
    samples, metadata = run(500, steps=20_000, outlier=3)
    assert samples.num_rows == 1_000_000
    path = write_report(samples, tmp_path / "million.html", metadata=metadata)
    assert path.stat().st_size < 10_000_000
    assert min(browser.open(path) for _ in range(3)) < 5
    assert of("measured", traces(browser)) == set(range(12))
