"""The tutorial runs: shortened always, in full among the slow tests, where what it says must be true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.page_runner import Page

PAGE = Path(__file__).parents[2] / "docs" / "forecast.md"
SHORTER = {
    "DROP, STEPS, SEEDS = 1500, 4000, 4": "DROP, STEPS, SEEDS = 150, 320, 1",
    "width: int = 30": "width: int = 3",
}


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = "".join(Page(PAGE).replaced(SHORTER).run(compare=False).printed)
    assert {"forecast.html", "what-if.html"} <= {path.name for path in tmp_path.iterdir()}
    assert all(path.stat().st_size > 1e6 for path in tmp_path.glob("*.html"))
    assert "will turn more slowly than in equilibrium when lr falls at step 150" in printed
    assert re.search(r"^off by [\d.]+x: the plan as given$", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_what_the_tutorial_says_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_as_told("".join(Page(PAGE).run(compare=False).printed))


def test_what_the_tutorial_shows_is_what_it_says():
    assert_as_told("".join(block.body for block in Page(PAGE).blocks() if block.language == "text"))


def assert_as_told(printed: str) -> None:
    """The outputs, shown or printed, bear the text of the page out; their digits differ between machines."""
    best, dip = (
        float(each) for each in re.search(r"plain: .* drop, ([\d.]+)% at best,.* then ([\d.]+)%", printed).groups()
    )
    assert best > dip + 0.7
    assert "wd x0.1 from step 1,500" in printed
    ends = dict(
        re.findall(r"^(plain|rescaled|less decay): .* at best, ([\d.]+)% at the end$", printed, flags=re.MULTILINE)
    )
    assert float(ends["less decay"]) > float(ends["plain"]) + 1
    assert abs(float(ends["rescaled"]) - float(ends["plain"])) < 1.5
    (told,) = re.findall(r"^angle over equilibrium: .*", printed, flags=re.MULTILINE)
    ratios = [float(each) for each in re.findall(r"([\d.]+) (?:before the drop|right|as long|at the end)", told)]
    assert ratios[1] < 0.5 < ratios[2] and abs(ratios[3] - 1) < 0.15
