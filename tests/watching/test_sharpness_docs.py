"""The page about sharpness: its code runs, and the run does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from equilibria.measure.sharpness_table import EDGE, SHARPNESS_FIELDS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "sharpness.md").read_text(encoding="utf-8")


def test_the_run_of_the_page_reaches_the_edge_and_becomes_flatter(capsys, tmp_path, monkeypatch):
    """The numbers at the edge differ between machines; the first rows and the course of the run do not."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    scope: dict[str, object] = {}
    exec(compile(code, "sharpness.md", "exec"), scope)
    printed = capsys.readouterr().out
    rows, expected = (text.splitlines() for text in (printed, shown))
    assert [line.split() for line in rows[:3]] == [line.split() for line in expected[:3]]
    tracker = scope["tracker"]
    table = tracker.samples()
    assert tracker.spherical and tracker.state == EDGE
    first = table["state"].to_pylist().index(EDGE)
    values = table["sharpness"].to_pylist()
    assert 250 < table["step"][first].as_py() < 450
    assert values[-1] < values[first] / 2
    assert all(0.85 < ratio < 1.5 for ratio in table["ratio_mean"].to_pylist()[first + 4 :])
    assert (tmp_path / "sharpness.html").stat().st_size > 1e6
    assert "](sharpness.png)" in TEXT and (DOCS / "sharpness.png").exists()


def test_every_column_that_the_page_names_is_there():
    (table,) = re.findall(r"\| column \| \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT)
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named and named <= set(SHARPNESS_FIELDS.names)
