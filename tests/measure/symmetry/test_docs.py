"""The page about symmetries: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "symmetries.md"


def test_the_page_shows_what_its_code_prints(capsys):
    text = PAGE.read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, scope)
    (shown,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert shown in capsys.readouterr().out
    assert set(scope["part"]) >= {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
