"""rich, and the blocks that terminal views share.

rich draws from Python's global random numbers when it is imported; here its import leaves them as they were, so that a
training script that seeds ``random`` draws the same numbers whether it is watched or not. Import this module inside of
the function that shows something: rich takes a while to load.
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Mapping, Sequence

from equilibria.views.terminal import coloured

_state = random.getstate()
try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_state)

__all__ = ["Console", "Live", "Table", "Text", "collected_text", "columns_table", "marked", "text_console"]


def text_console() -> Console:
    """A console as wide as the terminal that collects text for `collected_text`, with colours if they are wanted."""
    return Console(file=io.StringIO(), force_terminal=coloured(), force_jupyter=False)


def collected_text(console: Console) -> str:
    """The lines printed to a `text_console`, without the spaces and line ends behind them."""
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).rstrip("\n")


def columns_table(
    columns: Mapping[str, Sequence[str | Text]], *, words: Collection[str] = (), folded: str | None = None, gap: int = 2
) -> Table:
    """A table without lines.

    Args:
        columns: cells by title, from left to right; plain text, or `Text` with a style.
        words: titles of the columns that are flush left; numbers are flush right.
        folded: title of the column whose cells are folded where the table is too wide.
        gap: spaces after each column.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for title in columns:
        if title == folded:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="left" if title in words else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def marked(mark: str, text: str) -> Table:
    """A paragraph with a mark in front; its further lines are indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(mark), Text(text))
    return grid
