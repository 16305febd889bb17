"""The page about folded weight decay: its example runs, shortened, and the two runs agree."""

from __future__ import annotations

import re
from pathlib import Path

from page_runner import Page

PAGE = Path(__file__).parents[2] / "docs" / "folded-weight-decay.md"
SHORTER = {
    "steps: int = 240": "steps: int = 30",
    "[160]": "[20]",
    "rates[150]": "rates[15]",
    "range(9, 240, 10)": "range(9, 30, 10)",
}


def test_the_folded_run_of_the_page_is_the_same_and_rates_by_hand_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (printed,) = Page(PAGE).replaced(SHORTER).run(compare=False).printed
    assert (tmp_path / "folded-weight-decay.html").stat().st_size > 1e6
    assert float(re.search(r"at most (\S+) apart", printed)[1]) < 1e-10
    assert float(re.search(r"up to (\S+) times the test loss", printed)[1]) > 1.05  # after 30 of 240 steps
