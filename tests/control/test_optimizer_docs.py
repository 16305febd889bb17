"""The examples of the docs pages run, print what the pages show, and draw their pictures."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"rotational": 0.0, "angular-schedule": 2e-4, "start-in-equilibrium": 0.15, "sphere-optimizers": 0.0}
PAGES |= {"lion": 0.15, "weight-decay-scheduler": 0.0, "rescale-on-decay": 0.15}
"""How far a number may be off, beside 1 %: rounding in a training run grows from step to step."""

SHORTER = {"rotational": ("STEPS = 300", "STEPS = 20"), "start-in-equilibrium": ("STEPS = 300", "STEPS = 50")}
SHORTER["rescale-on-decay"] = ("DROP, STEPS = 150, 300", "DROP, STEPS = 150, 160")
"""Only the picture needs the later steps: what is printed is about the first ones, or the same at every step."""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.mark.parametrize(("page", "tolerance"), PAGES.items(), ids=PAGES)
@pytest.mark.slow
def test_the_example_prints_what_the_page_shows(page, tolerance, tmp_path, monkeypatch):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", text, flags=re.DOTALL).groups()
    if page in SHORTER:
        assert SHORTER[page][0] in code
        code = code.replace(*SHORTER[page])
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{page}.md", "exec"), {})
    found, expected = ([NUMBER.sub("#", x), [float(n) for n in NUMBER.findall(x)]] for x in (printed.getvalue(), shown))
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=0.01, abs=tolerance)
    assert (tmp_path / f"{page}.html").stat().st_size > 1e6
    assert f"]({page}.png)" in text
    assert (DOCS / f"{page}.png").exists()
