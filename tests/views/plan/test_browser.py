"""The page of a plan in a real browser: drawn, quiet, and in both colour schemes."""

from __future__ import annotations

import pytest
from tests.helpers.browser import Browser, find

from equilibria.planning import alternatives, plan
from equilibria.theory import SGD
from equilibria.theory.schedules import MultiStep
from equilibria.views.plan.page import plan_page


@pytest.mark.slow
@pytest.mark.skipif(find() is None, reason="no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
@pytest.mark.parametrize(("wd", "start", "lines"), [(5e-3, {}, 7), (0.0, {"init_norm": 3.0, "unit_grad_sq": 40.0}, 4)])
def test_the_page_of_a_plan(tmp_path, wd, start, lines):
    schedule = MultiStep(0.1, milestones=[600, 1200], factor=0.2)
    result = plan(SGD(0.1, wd, momentum=0.9), schedule, steps=2000, steps_per_epoch=10, **start)
    page = plan_page(result).write(tmp_path / "plan.html")
    browser = Browser(find(), tmp_path / "profile")
    try:
        for width, dark in ((1200, False), (390, True)):
            browser.open(page, width=width, dark=dark, phone=width == 390)
            assert browser.run("document.querySelectorAll('.scatterlayer .trace path').length") >= lines
            assert browser.run("document.documentElement.scrollWidth") == width
            assert browser.problems == []
            assert browser.requests == [page.resolve().as_uri()]
    finally:
        browser.close()


@pytest.mark.skipif(find() is None, reason="no browser: apt-get install chromium, or name one in EQUILIBRIA_BROWSER")
def test_the_buttons_of_a_plan(tmp_path):
    rule, schedule = SGD(0.1, 5e-3, momentum=0.9), MultiStep(0.1, milestones=[600], factor=0.2)
    typed, others = plan(rule, schedule, steps=2000), alternatives(rule, schedule, steps=2000)
    page = plan_page(typed, alternatives=others).write(tmp_path / "plan.html")
    lowest = "Math.min(...document.getElementById('angle-chart').data.find((trace) => trace.name === 'predicted').y)"
    shown = (
        "[...document.querySelectorAll('.choice')].filter((part) => part.offsetParent).map((part) => part.className)"
    )
    browser = Browser(find(), tmp_path / "profile")
    try:
        browser.open(page, width=390, phone=True)
        assert browser.run(lowest) == pytest.approx(min(typed.curve.angle), rel=1e-5)
        browser.run("document.getElementById('choice-0').focus()")
        for place, other in enumerate(others.values(), start=1):
            browser.press("ArrowRight", 39)
            assert browser.run(lowest) == pytest.approx(min(other.curve.angle), rel=1e-5)
            assert browser.run(shown) == [f"choice choice-{place}"] * 3  # its sentence, its phases, its findings
        assert browser.run("document.documentElement.scrollWidth") == 390
        assert browser.problems == []
    finally:
        browser.close()
