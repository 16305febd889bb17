"""The page about folded weight decay: its example runs, and the two runs agree; shortened always, in full if slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.page_runner import Page, Tolerance, assert_shown

PAGE = Path(__file__).parents[2] / "docs" / "folded-weight-decay.md"
SHORTER = {
    "steps: int = 240": "steps: int = 30",
    "[160]": "[20]",
    "rates[150]": "rates[15]",
    "range(9, 240, 10)": "range(9, 30, 10)",
}


def test_the_folded_run_of_the_page_is_the_same_and_rates_by_hand_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed, jointly = Page(PAGE).replaced(SHORTER).run(compare=False).printed
    assert (tmp_path / "folded-weight-decay.html").stat().st_size > 1e6
    assert float(re.search(r"at most (\S+) apart", printed)[1]) < 1e-10
    assert float(re.search(r"up to (\S+) times the test loss", printed)[1]) > 1.05  # after 30 of 240 steps
    shown = [block.body for block in Page(PAGE).blocks() if block.language == "text"]
    assert_shown(jointly, shown[1], Tolerance(), PAGE.name)


@pytest.mark.slow
def test_in_full_the_example_prints_what_the_page_shows(tmp_path, monkeypatch):
    """How far two runs in float64 are apart after 240 steps is rounding, which no two machines share."""
    monkeypatch.chdir(tmp_path)
    page = Page(PAGE)
    shown = next(block.body for block in page.blocks() if block.language == "text")
    printed = page.run(compare=False).printed[0]
    apart = re.compile(r"at most \S+ apart")
    assert_shown(apart.sub("", printed), apart.sub("", shown), Tolerance(rel=0.05), PAGE.name)
    assert all(float(re.search(r"at most (\S+) apart", text)[1]) < 1e-10 for text in (printed, shown))
