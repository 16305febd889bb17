"""The pages of forecasts and back-tests: self-contained, true to the numbers, safe with any text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.helpers.browser import Browser, find
from tests.helpers.pages import check_nothing_is_loaded, check_policy, data_of
from tests.helpers.planted_walks import Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import BASELINES, Scenario, backtest, suggest, what_if
from equilibria.theory.schedules import MultiStep
from equilibria.views.forecast.page import forecast_page

EVIL = "</script><script>alert(1)</script>\"'&"
LRS = np.where(np.arange(420) < 300, 0.1, 0.01)
FINISHED = Walk(layers=3).run(LRS)
DROP = MultiStep(0.1, milestones=[300], factor=0.1)
RESULT = what_if(FINISHED, {"as planned": DROP, EVIL: Scenario(DROP, rescale=True)}, steps=420, start=200)
SUGGESTED = suggest(FINISHED, schedule=0.1, steps=420, start=200, target="as now")
PAGE = forecast_page(RESULT, suggestion=SUGGESTED, title=EVIL).document()


def test_the_curves_are_those_of_the_forecasts():
    shown = data_of(PAGE)
    assert (shown["first"], shown["end"], shown["unit"]) == (200, 420, "step")
    assert [scenario["name"] for scenario in shown["scenarios"]] == ["as planned", EVIL]
    for scenario, forecast in zip(shown["scenarios"], RESULT.forecasts.values(), strict=True):
        for name, drawn in zip(shown["names"], scenario["layers"], strict=True):
            layer, x = forecast[name], np.array(scenario["schedules"][drawn["schedule"]]["x"])
            at = np.searchsorted(layer.step, x)
            np.testing.assert_array_equal(layer.step[at], x)
            for key, column in (
                ("angle", layer.angle.value),
                ("angle_high", layer.angle.high),
                ("norm", layer.norm.value),
            ):
                np.testing.assert_allclose(drawn[key], column[at], rtol=1e-4)
            assert {299, 300} <= set(x)  # both sides of the drop


def test_measured_samples_end_where_the_forecast_begins():
    shown = data_of(PAGE)
    measured = RESULT.forecasts["as planned"].measured(shown["names"][0])
    at = np.array(shown["measured"][0]["x"], dtype=int)
    assert at.max() == 199
    np.testing.assert_allclose(shown["measured"][0]["angle"], measured.angle[at], rtol=1e-4)


def test_the_page_is_self_contained():
    check_nothing_is_loaded(PAGE, style="--sure")
    check_policy(PAGE)


def test_text_stays_text_and_every_scenario_has_its_part():
    assert PAGE.count("<script") == 3
    assert PAGE.count("&lt;script&gt;alert(1)") >= 4
    assert len(re.findall(r'<input type="radio" name="choice"', PAGE)) == 2
    assert PAGE.count('<div class="choice choice-1">') == 3  # its sentence, its layers, its findings
    for assumption in (*SUGGESTED.assumptions, *RESULT.forecasts["as planned"].assumptions):
        assert assumption[1:40].replace("&", "&amp;") in PAGE or "%" in assumption[:40]


def test_the_axes_hold_every_scenario():
    shown = data_of(PAGE)
    for at, ranges in enumerate(shown["ranges"]):
        for scenario in shown["scenarios"]:
            assert ranges["angle"][0] < min(scenario["layers"][at]["angle_low"])
            assert max(scenario["layers"][at]["angle_high"]) < ranges["angle"][1]


def test_the_page_of_a_back_test(tmp_path):
    test = backtest(FINISHED, start=200)
    page = test.report(tmp_path / "test.html").read_text()
    shown = data_of(page)
    assert [scenario["name"] for scenario in shown["scenarios"]] == ["forecast", *BASELINES]
    guess = shown["scenarios"][1]["layers"][0]
    assert guess["angle_low"] is None and guess["norm"] is None and max(guess["angle"]) > 0
    own = test.scores["forecast"]
    assert f"{100 * own.angle:.1f}\u00a0%" in page and f"{100 * own.norm_p90:.1f}\u00a0%" in page
    for first, _ in test.horizons:
        assert f"{first:,}–" in page


def test_more_scenarios_than_buttons_raise(tmp_path):
    many = what_if(FINISHED, {str(n): DROP for n in range(13)}, steps=301, start=290)
    with pytest.raises(EquilibriaError, match="at most 12"):
        forecast_page(many).write(tmp_path / "page.html")


@pytest.mark.skipif(find() is None, reason="no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
def test_the_buttons_change_the_curves(tmp_path):
    page = forecast_page(RESULT).write(tmp_path / "page.html")
    drawn = "document.getElementById('angle-chart').data.map((trace) => trace.name).at(-2)"
    seen = "[...document.querySelectorAll('.choice')].filter((part) => part.offsetParent).map((part) => part.className)"
    browser = Browser(find(), tmp_path / "profile")
    try:
        for width, dark in ((1200, False), (390, True)):
            browser.open(page, width=width, dark=dark, phone=width == 390)
            assert browser.run(drawn) == "as planned"
            browser.run("document.getElementById('choice-0').focus()")
            browser.press("ArrowRight", 39)
            assert browser.run(drawn) == EVIL
            assert set(browser.run(seen)) == {"choice choice-1"}
            browser.run("document.getElementById('layer').value = 1")
            browser.run("document.getElementById('layer').dispatchEvent(new Event('change'))")
            assert browser.run("document.documentElement.scrollWidth") == width
            assert browser.problems == []
            assert browser.requests == [page.resolve().as_uri()]
    finally:
        browser.close()
