"""How commands print: JSON without NaN, wrapped sentences, colour only on a terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
from typing import Any


def jsonable(value: Any) -> Any:
    """Dataclasses, arrays and numbers as JSON values; what is not finite becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """One JSON value and nothing else."""
    print(json.dumps(jsonable(value), allow_nan=False))


def width() -> int:
    """Columns to fill: the terminal's, between 60 and 110."""
    return max(60, min(110, shutil.get_terminal_size((100, 24)).columns))


def wrap(text: str, *, indent: str = "  ", hang: str | None = None) -> str:
    """A paragraph wrapped to the terminal; colours in the indent take no room."""
    shown = re.sub(r"\033\[[\d;]*m", "", indent)
    filled = textwrap.fill(
        text, width(), initial_indent=shown, subsequent_indent=shown if hang is None else hang, break_long_words=False
    )
    return indent + filled[len(shown) :]


def paint(text: str, code: str) -> str:
    """Text in an ANSI colour, on a terminal only, and not where NO_COLOR is set (https://no-color.org)."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def table(rows: list[list[str]], *, left: int = 1) -> str:
    """Rows as aligned columns: the first ``left`` columns flush left, the rest flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
