"""A benchmark's page, and the same tables as JSON beside it, so that numbers can be followed from commit to commit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def publish(page: Path, text: str) -> None:
    """Write the page, and its tables into ``benchmarks/NAME.json``."""
    page.write_text(text, encoding="utf-8")
    target = Path(__file__).with_name(page.name).with_suffix(".json")
    target.write_text(json.dumps(list(tables(text)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tables(text: str) -> Iterator[dict[str, object]]:
    """Every Markdown table of a page: its heading, and its rows by column; cells that are numbers as numbers."""
    heading, rows = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            head, _, *body = rows
            names = [name or "verdict" for name in head]
            yield {"heading": heading, "rows": [dict(zip(names, map(value, row), strict=True)) for row in body]}
            rows = []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def value(cell: str) -> float | str:
    plain = cell.replace(",", "")
    return float(plain) if NUMBER.fullmatch(cell) else cell.strip("*")
