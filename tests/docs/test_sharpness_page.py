"""The page about sharpness: its code runs, and the run does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.page_runner import Page

from equilibria.records.tables import EDGE, SHARPNESS_FIELDS

PAGE = Page(Path(__file__).parents[2] / "docs" / "sharpness.md")


@pytest.mark.slow
def test_the_run_of_the_page_reaches_the_edge_and_becomes_flatter(tmp_path, monkeypatch):
    """The numbers at the edge differ between machines; the first rows and the course of the run do not."""
    (shown,) = (block.body for block in PAGE.blocks() if block.language == "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (printed,) = PAGE.run(compare=False).printed
    rows, expected = (text.splitlines() for text in (printed, shown))
    assert [line.split() for line in rows[:3]] == [line.split() for line in expected[:3]]
    tracker = PAGE.world["tracker"]
    table = tracker.samples()
    assert tracker.spherical and tracker.state == EDGE
    first = table["state"].to_pylist().index(EDGE)
    values = table["sharpness"].to_pylist()
    assert 250 < table["step"][first].as_py() < 450
    assert values[-1] < values[first] / 2
    assert all(0.85 < ratio < 1.5 for ratio in table["ratio_mean"].to_pylist()[first + 4 :])
    assert (tmp_path / "sharpness.html").stat().st_size > 1e6


def test_every_column_that_the_page_names_is_there():
    (table,) = re.findall(r"\| column \| \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.text)
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named and named <= set(SHARPNESS_FIELDS.names)
