"""The examples of the controllers' pages run, shortened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHORTER = {
    "folded-weight-decay": {"steps: int = 240": "steps: int = 30", "[160]": "[20]", "rates[150]": "rates[15]"},
}
SHORTER["folded-weight-decay"]["range(9, 240, 10)"] = "range(9, 30, 10)"


@pytest.mark.parametrize("page", SHORTER)
def test_the_example_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    text = (DOCS / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for long, short in SHORTER[page].items():
        assert long in code
        code = code.replace(long, short)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": page})
    assert (tmp_path / f"{page}.html").stat().st_size > 1e6
    assert (DOCS / f"{page}.png").exists()
    printed = capsys.readouterr().out
    if page == "folded-weight-decay":
        assert float(re.search(r"at most (\S+) apart", printed)[1]) < 1e-10
        assert float(re.search(r"up to (\S+) times the test loss", printed)[1]) > 1.05  # after 30 of 240 steps
