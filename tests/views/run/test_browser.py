"""The page of a run in a real browser: what is drawn, what a click and a word change, on every screen."""

from __future__ import annotations

import json

import pytest
from tests.helpers.browser import Browser, find
from tests.helpers.report_helpers import layer_names, run

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


def test_every_chart_is_drawn_and_nothing_is_asked_of_the_network(browser, page):
    browser.open(page)
    angle, norm, schedule = (traces(browser, f"{name}-chart") for name in ("angle", "norm", "schedule"))
    assert of("measured", angle) == of("predicted", angle) == set(range(12))
    assert of("measured", norm) == of("norm_equilibrium", norm) == set(range(12))
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
    assert names == [layer.name for layer in worst_first(summarise(samples, metadata=metadata))[:12]]
    assert names[0] == layer_names(20)[OUTLIER]
    last = browser.run(
        """(() => { const data = document.getElementById("angle-chart").data;
        const last = (kind) => data.find((t) => t.meta.kind === kind && t.meta.layer === 0).y.at(-1);
        return last("measured") / last("predicted"); })()"""
    )
    assert last == pytest.approx(1.6, rel=0.2)


def test_a_click_on_a_row_shows_its_layer_in_every_chart(browser, page):
    browser.open(page)
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


def test_ratios_compare_with_prediction_and_equilibrium(browser, page):
    browser.open(page)
    browser.click("#relative")
    last = browser.run("document.getElementById('angle-chart').data.find((trace) => trace.meta.layer === 0).y.at(-1)")
    assert last == pytest.approx(1.6, rel=0.2)
    assert of("predicted", traces(browser)) == set()
    assert browser.run("document.getElementById('norm-chart').layout.yaxis.title.text") == "norm ÷ equilibrium"


def test_a_zoom_goes_to_all_charts_and_survives_a_choice(browser, page):
    browser.open(page)
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
