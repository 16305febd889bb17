"""Plain text for the terminal: colours, wrapped paragraphs, aligned tables, line charts."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence, Sized
from typing import TypeVar

_DECADES = 3
Cell = TypeVar("Cell", bound=Sized)


def width() -> int:
    """Columns to fill: the terminal's, between 60 and 110."""
    return max(60, min(110, shutil.get_terminal_size((100, 24)).columns))


def coloured() -> bool:
    """Whether to use ANSI colours: standard output is a terminal, and NO_COLOR is not set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, code: str) -> str:
    """Text in an ANSI colour, where colours are wanted."""
    return f"\033[{code}m{text}\033[0m" if coloured() else text


def wrap(text: str, *, indent: str = "  ", hang: str | None = None) -> str:
    """A paragraph wrapped to the terminal; colours in the indent take no room."""
    shown = re.sub(r"\033\[[\d;]*m", "", indent)
    kept = text.replace(" %", "\u00a0%")  # a number stays with its unit
    filled = textwrap.fill(
        kept, width(), initial_indent=shown, subsequent_indent=shown if hang is None else hang, break_long_words=False
    )
    return indent + filled[len(shown) :].replace("\u00a0%", " %")


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


def fitting(
    columns: Mapping[str, Sequence[Cell]], *, spare: Sequence[str], width: int, gap: int = 2
) -> dict[str, Sequence[Cell]]:
    """Drop columns of a table until it fits.

    Args:
        columns: cells by title, from left to right.
        spare: titles of the columns that may be dropped, the first one first.
        width: columns of the terminal.
        gap: spaces that each column takes beside its cells.

    Returns:
        The columns to show; too wide still if dropping all of ``spare`` is not enough.

    Example:
        >>> fitting({"layer": ["conv1"], "norm": ["1.23"], "state": ["settled"]}, spare=["norm"], width=20)
        {'layer': ['conv1'], 'state': ['settled']}
    """
    kept = dict(columns)
    for title in spare:
        if sum(max([len(heading), *map(len, cells)]) + gap for heading, cells in kept.items()) <= width:
            break
        kept.pop(title, None)
    return kept


def chart(
    x: Sequence[float],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    columns: int,
    rows: int = 14,
    unit: str = "epochs",
    end: float | None = None,
) -> list[str]:
    """A line chart with a logarithmic axis, in characters.

    Args:
        x: positions, ascending.
        series: (character, values) pairs; later ones are drawn over earlier ones. Values three decades below the
            upper end are left out.
        columns: width of the plot without its axis.
        rows: height.
        unit: what x counts.
        end: the label at the right end; the last x without it.

    Returns:
        Lines of text, without line ends.

    Example:
        >>> print(chart([0, 1, 2], [("*", [1.0, 10.0, 100.0])], columns=5, rows=3, unit="steps")[0])
                  100 ┤   **
    """
    positive = sorted(math.log(value) for _, values in series for value in values if value > 0)
    # A few wild values at the start, or an lr that falls to zero, must not squeeze the rest into one row.
    high = min(positive[-1], positive[round(0.98 * (len(positive) - 1))] + math.log(3))
    low = max(positive[0], high - _DECADES * math.log(10))
    if high - low < 0.2:  # a flat line goes in the middle
        low, high = low - 0.1, high + 0.1
    span = max(high - low, 1e-9)
    grid = [[" "] * columns for _ in range(rows)]
    for mark, values in series:
        for column, value in enumerate(_resample(x, values, columns)):
            if value is not None and value > 0 and math.log(value) >= low - 1e-12:
                grid[max(0, round((high - math.log(value)) / span * (rows - 1)))][column] = mark
    lines = []
    for row, cells in enumerate(grid):
        labelled = row % max(1, (rows - 1) // 4) == 0 or row == rows - 1
        label = f"{math.exp(high - span * row / (rows - 1)):.3g}" if labelled else ""
        lines.append(f"{label:>13} {'┤' if labelled else '│'}{''.join(cells)}")
    last = f"{x[-1] if end is None else end:,.0f}"
    lines.append(f"{'':>13} └{'─' * columns}")
    lines.append(f"{'':>13}  {x[0]:,.0f}".ljust(15 + columns - len(last)) + f"{last} {unit}")
    return lines


def _resample(x: Sequence[float], values: Sequence[float], columns: int) -> list[float | None]:
    """Value at the middle of each column, interpolated between the two points around it."""
    result: list[float | None] = []
    point = 0
    for column in range(columns):
        target = x[0] + (x[-1] - x[0]) * (column + 0.5) / columns
        while point < len(x) - 2 and x[point + 1] < target:
            point += 1
        following = min(point + 1, len(x) - 1)
        share = (target - x[point]) / (x[following] - x[point]) if x[following] > x[point] else 0.0
        value = values[point] + share * (values[following] - values[point])
        result.append(value if math.isfinite(value) else None)
    return result
