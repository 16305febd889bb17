"""The page about the manifold of minimisers: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
NUMBER = re.compile(r"\d+\.?\d*")


@pytest.mark.slow
def test_the_page_shows_what_its_code_prints(capsys, tmp_path, monkeypatch):
    """The words exactly; numbers to 3 %: the oscillation grows out of rounding, which differs between machines."""
    text = (DOCS / "minimiser-manifold.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "minimiser-manifold", "exec"), {"__name__": "minimiser-manifold"})
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers, expected = (list(map(float, NUMBER.findall(lines))) for lines in (printed, shown))
    assert numbers == pytest.approx(expected, rel=0.03, abs=0.002)
    assert (tmp_path / "sharpness-reduction-flow.html").stat().st_size > 1e6
    assert "](sharpness-reduction-flow.png)" in text and (DOCS / "sharpness-reduction-flow.png").exists()
