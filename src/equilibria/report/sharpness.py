"""What a sharpness tracker measured: as charts of a report, and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from string import Template

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria._rich import Console, Table, Text
from equilibria.findings import counted
from equilibria.measure.sharpness_findings import sharpness_findings
from equilibria.measure.sharpness_table import EDGE
from equilibria.pages.words import text

_MOST_POINTS = 3000  # more than a wide screen can show
_MOST_ROWS = 12
_LOSS_FLOOR = 1e-12  # of the largest loss: what lies below is rounding
_DRAWN = ("sharpness", "threshold", "ratio", "loss", "loss_predicted")
_COLUMNS = {
    "step": "step",
    "sharpness": "sharpness",
    "threshold": "threshold",
    "ratio": "R",
    "loss": "loss",
    "hvps": "products",
}


def sharpness_curves(queries: pa.Table) -> dict[str, object]:
    """The curves as JSON can hold them; None for what was not measured."""
    steps = np.asarray(queries["step"].to_numpy(), dtype=np.float64)
    alone = np.append(True, np.diff(steps) != 1)  # of consecutive steps, which alternate at the edge, the mean is drawn
    first = np.flatnonzero(alone)
    chosen = np.unique(np.linspace(0, len(first) - 1, min(len(first), _MOST_POINTS)).round().astype(np.int64))
    means = {name: _means(queries[name], first)[chosen] for name in _DRAWN}
    return {
        "step": [int(step) for step in steps[first][chosen]],
        **{name: [_finite(value) for value in values.tolist()] for name, values in means.items()},
        "edge": edge_stretches(queries),
        "loss_floor": _LOSS_FLOOR * max((value for value in queries["loss"].to_pylist() if value), default=0.0),
    }


def _means(column: pa.ChunkedArray, first: NDArray[np.int64]) -> NDArray[np.float64]:
    """Over the rows from each of the first ones to the next."""
    values = np.asarray(column.to_numpy(), dtype=np.float64)
    found: NDArray[np.float64] = np.add.reduceat(values, first) / np.diff(np.append(first, len(values)))
    return found


def edge_stretches(queries: pa.Table) -> list[list[int]]:
    """First and last step of every stretch at the edge of stability; a stretch lasts until the query that ends it."""
    steps, found, at = queries["step"].to_pylist(), [], 0
    for state, group in groupby(queries["state"].to_pylist()):
        length = len(list(group))
        if state == EDGE:
            found.append([steps[at], steps[min(at + length, len(steps) - 1)]])
        at += length
    return found


def sharpness_section(queries: pa.Table) -> str:
    """The section of a page with the charts."""
    subject = sharpness_findings(queries)[-1].subject
    limit = "2 / lr_eff" if queries["effective_lr"][-1].as_py() is not None else "the optimizer's threshold"
    template = Template(files("equilibria.report").joinpath("sharpness.html").read_text(encoding="utf-8"))
    label = f"Chart of sharpness and threshold over the run: {subject}"
    return template.substitute(limit=text(limit), label=text(label))


def sharpness_settings(queries: pa.Table | None) -> list[tuple[str, str, str]]:
    """Name, value and a remark for the head of a page."""
    if queries is None:
        return []
    spent = float(np.nansum(queries["hvps"].to_numpy(zero_copy_only=False)))
    last = queries["step"][-1].as_py()
    return [
        (
            "sharpness",
            f"{queries.num_rows:,} queries",
            f"to step {last:,}; {spent / queries.num_rows:.1f} products each",
        )
    ]


def print_sharpness(queries: pa.Table, *, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Print some of the queries, the last among them, and what they mean.

    Args:
        queries: the table of a tracker, or of a recorded run.
        notes: about the record itself, printed before the findings.
        console: where to print; standard output without it.
    """
    out = Console() if console is None else console
    if not queries.num_rows:
        out.print("no queries yet: train a step first")
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in _COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in _thinned(queries, _MOST_ROWS).to_pylist():
        table.add_row(*(_cell(name, row[name]) for name in _COLUMNS), Text(_standing(row)))
    out.print(table)
    out.print(
        Text(f"{counted(queries.num_rows, 'row')} in all; R is sharpness over threshold", style="dim"), end="\n\n"
    )
    for note in notes:
        out.print(Text(f"- {note}"))
    for finding in sharpness_findings(queries):
        mark = "!" if finding.severity == "warning" else "-"
        out.print(Text(f"{mark} {finding.subject}: {finding.evidence}"))


def _thinned(queries: pa.Table, most: int) -> pa.Table:
    """Evenly spaced rows, with the first and the last."""
    if queries.num_rows <= most:
        return queries
    return queries.take(np.unique(np.linspace(0, queries.num_rows - 1, most).round().astype(np.int64)))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if name in ("step", "hvps") else f"{value:.3g}"


def _standing(row: dict[str, object]) -> str:
    left = row["steps_to_crossing"]
    if isinstance(left, float) and left > 0:
        return f"crossing in {left:,.0f} steps"
    return str(row["state"] or "")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
