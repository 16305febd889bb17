"""The live pages in a real browser: charts that grow, sliders that respond, messages for errors."""

from __future__ import annotations

import math
import time

import pytest

pytest.importorskip("starlette", reason='the server needs pip install "equilibria[serve]"')
pytest.importorskip("uvicorn", reason='the server needs pip install "equilibria[serve]"')

from tests.helpers.browser import Browser, find
from tests.helpers.served import serving, training, wait_for, write_damaged, write_hostile_run, write_run

from equilibria.records import RecordWriter

VIEW = "document.documentElement.dataset.view"
EVIL = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2><b>\"'&%{x}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", 3, outlier=1)
    write_run(folder / "second", 2)
    write_damaged(folder / "spoilt")
    write_hostile_run(folder / f"zz{EVIL.replace('/', '_')}")  # the last one: the numbers of the others stay
    return folder


@pytest.fixture(scope="module")
def base(folder):
    if find() is None:
        pytest.skip("no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
    with serving(folder, results=folder / "none") as base:
        yield base


@pytest.fixture(scope="module")
def browser(base, tmp_path_factory):
    browser = Browser(find(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def until(browser, code):
    return wait_for(lambda: browser.run(code))


def quiet(browser, base):
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith((f"{base}/", "data:", "blob:"))] == []


def rows(browser):
    return browser.run("[...document.querySelectorAll('#runs tr')].map((row) => row.innerText)")


def test_a_training_in_another_process_makes_the_chart_grow(browser, base, folder):
    browser.open(base)
    until(browser, "document.querySelectorAll('#runs tr').length >= 3")
    with training(folder / "trained"):
        wait_for(lambda: any("training now" in row for row in rows(browser)), seconds=120)
        number = browser.run(
            "[...document.querySelectorAll('#runs a')].find((a) => a.textContent === 'trained').pathname"
        )
        quiet(browser, base)
        browser.open(f"{base}{number}")
        last = "Math.max(...document.getElementById('angle-chart').data.find((t) => t.meta.kind === 'measured').x)"
        until(browser, f"{VIEW} && document.querySelector('#angle-chart .trace path') !== null")
        browser.run("void (window.before = document.getElementById('angle-chart'))")
        ends = [browser.run(last)]
        for _ in range(2):
            ends.append(until(browser, f"(() => {{ const end = {last}; return end > {ends[-1]} ? end : 0 }})()"))
        assert ends == sorted(set(ends))
        assert browser.run("document.getElementById('angle-chart') === window.before")  # grown, not made again
        assert browser.run("document.getElementById('state').textContent") == "training now"
        quiet(browser, base)
    until(browser, "document.getElementById('state').textContent === 'interrupted'")  # it was killed


def test_the_chosen_layer_stays_while_the_run_grows(browser, base):
    browser.open(f"{base}/run/1")
    until(browser, VIEW)
    browser.click("tr[data-layer='1'] td:nth-child(3)")
    name = browser.run("document.querySelector('tr.chosen button').textContent")
    browser.run("document.querySelector('tr.chosen button').focus()")
    browser.run(
        """(async () => { const view = await live.get("/run/1/view");
        const other = { 0: 1, 1: 0, 2: 2 }; // another layer is the worst now
        live.showPage(view.inside.replace(/data-layer="(.)"/g, (_, place) => `data-layer="${other[place]}"`));
        return true; })()"""
    )
    assert browser.run("document.activeElement.textContent") == name
    quiet(browser, base)


def test_a_slider_changes_the_curve_and_the_finding(browser, base):
    browser.open(f"{base}/plan")
    until(browser, "document.documentElement.dataset.query")
    headline = "document.querySelector('#page h1').textContent"
    lowest = "Math.min(...document.getElementById('angle-chart').data.find((t) => t.name === 'predicted').y)"
    finding = "document.querySelector('.finding h3').textContent"
    before = [browser.run(code) for code in (headline, lowest, finding)]
    assert "never reach equilibrium" in before[2]
    browser.run("document.querySelector('[data-slides=wd]').focus()")
    for _ in range(8):
        browser.press("PageUp", 33)
    until(browser, f"{headline} !== {before[0]!r}")
    until(browser, "document.getElementById('state').textContent === 'Up to date'")
    assert float(browser.run("document.getElementById('wd').value")) > 5e-3
    assert browser.run(lowest) > 2 * before[1]
    assert browser.run(finding) != before[2]
    assert "--wd" in browser.run("document.getElementById('command').textContent")
    assert "wd=" in browser.run("location.search")
    assert browser.run("document.activeElement.dataset.slides") == "wd"
    quiet(browser, base)


def test_an_impossible_plan_shows_a_message_and_the_next_one_is_drawn(browser, base):
    browser.open(f"{base}/plan")
    until(browser, "document.documentElement.dataset.query")
    set_to = """(() => {{ const field = document.getElementById('milestones'); field.value = '{}';
      field.dispatchEvent(new Event('input', {{bubbles: true}})) }})()"""
    browser.run(set_to.format("60,900"))
    until(browser, "!document.getElementById('problem').hidden")
    assert "before the end of the run" in browser.run("document.getElementById('problem').textContent")
    browser.run(set_to.format("60"))
    until(browser, "document.getElementById('problem').hidden")


def test_a_bad_run_shows_a_message_and_the_others_work(browser, base):
    browser.open(base)
    until(browser, "document.querySelectorAll('#runs tr').length >= 3")
    bad = next(row for row in rows(browser) if "spoilt" in row)
    assert "damaged" in bad
    assert "not the description of a run" in bad
    number = browser.run("[...document.querySelectorAll('#runs a')].find((a) => a.textContent === 'spoilt').pathname")
    browser.open(f"{base}{number}")
    until(browser, "document.querySelector('.problem') !== null")
    assert "cannot be read" in browser.run("document.querySelector('h1').textContent")
    quiet(browser, base)


def test_logged_numbers_of_several_runs_share_a_panel_and_the_zoom(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    for name, rate in (("fast", 300), ("slow", 900)):
        write_run(folder / name, 2)
        with RecordWriter(folder / name, metadata={}, resume=True) as writer:
            steps = list(range(0, 3000, 5))
            values = [2 * math.exp(-step / rate) + 0.01 for step in steps]
            writer.append({"step": steps, "name": ["loss"] * len(steps), "value": values}, table="metrics")
    with serving(folder) as address:
        browser.open(f"{address}/compare?run=1&run=2")
        until(browser, "document.documentElement.dataset.drawn")
        panels = "[...document.querySelectorAll('#metric-charts .chart')]"
        assert browser.run(f"{panels}.map((chart) => chart.data.length)") == [2]
        assert browser.run(f"new Set({panels}[0].data.map((trace) => trace.line.color)).size") == 2
        zoom = "{'xaxis.range[0]': 100, 'xaxis.range[1]': 200}"
        browser.run(f"document.getElementById('compare-chart').emit('plotly_relayout', {zoom})")
        until(browser, f"String({panels}[0].layout.xaxis.range) === '100,200'")
        browser.open(f"{address}/run/1")
        until(browser, VIEW)
        until(browser, f"{panels}.length === 1")
        quiet(browser, address)


def test_runs_are_compared(browser, base):
    browser.open(f"{base}/compare?run=1&run=2")
    until(browser, "document.documentElement.dataset.drawn")
    chart = "document.getElementById('compare-chart').data.filter((t) => t.meta.kind === 'measured').length"
    assert browser.run(chart) == 2
    browser.click("#explain")
    until(browser, "document.querySelector('#explanation #causes') !== null")
    browser.click("#picks input[value='2']")
    until(browser, f"{chart} === 1")
    assert browser.run("document.querySelectorAll('#last tr').length") == 1
    assert browser.run("document.getElementById('why').hidden")  # one run: nothing to explain
    quiet(browser, base)


PAGES = {
    "/": "document.querySelectorAll('#runs tr').length >= 3",
    "/run/1": VIEW,
    "/compare": "document.documentElement.dataset.drawn",
    "/plan": "document.documentElement.dataset.query",
    "/run/1/forecast": "document.documentElement.dataset.query",
    "/gallery": "true",
}


@pytest.mark.parametrize("path", PAGES)
def test_keyboard_and_narrow_screen(browser, base, path):
    browser.open(f"{base}{path}", width=390, height=844, dark=True, phone=True)
    until(browser, f"Boolean({PAGES[path]})")
    time.sleep(0.3)
    assert browser.run("document.documentElement.scrollWidth") == 390
    unnamed = """[...document.querySelectorAll('a, button, input, select, summary')].filter((e) => e.offsetParent)
      .filter((e) => !(e.textContent.trim() || e.ariaLabel || (e.labels && e.labels.length))).map((e) => e.outerHTML)"""
    assert browser.run(unnamed) == []
    controls = browser.run(
        """[...document.querySelectorAll('a[href], button, input, select, summary')]
        .filter((e) => e.offsetParent && e.tabIndex >= 0 && e.type !== 'radio').slice(0, 12).length"""
    )
    browser.run("document.activeElement.blur()")
    seen = set()
    for _ in range(controls):
        browser.press("Tab", 9)
        seen.add(browser.run("document.activeElement.outerHTML.slice(0, 90)"))
        outline = browser.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or browser.run("document.activeElement.type") == "radio"
    assert len(seen) >= min(controls, 4)
    quiet(browser, base)


def test_hostile_names_stay_text_on_every_live_page(browser, base):
    browser.open(base)
    until(browser, "[...document.querySelectorAll('#runs a')].some((a) => a.textContent.includes('onerror'))")
    link = "[...document.querySelectorAll('#runs a')].find((a) => a.textContent.includes('onerror')).pathname"
    number = browser.run(link).rpartition("/")[2]
    pages = {
        f"/run/{number}": VIEW,
        f"/run/{number}/forecast": "document.querySelector('#page, .problem') !== null",
        f"/compare?run={number}&run=1": "document.querySelector('main') !== null",
    }
    for path, is_shown in pages.items():
        browser.open(f"{base}{path}")
        until(browser, is_shown)
        time.sleep(0.5)  # for the scripts that the page would run
        assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
        assert browser.run("window.hit === undefined")
        assert browser.run("document.documentElement.textContent.includes('onerror=window.hit')")
        quiet(browser, base)
