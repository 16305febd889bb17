"""What a sharpness tracker measured: as charts of a report, and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.diagnosis.sharpness import figure, sharpness_findings, what
from equilibria.findings import counted
from equilibria.records.tables import EDGE
from equilibria.views._rich import Console, Table, Text
from equilibria.views.words import text

_MOST_POINTS = 3000  # more than a wide screen can show
_MOST_ROWS = 12
_MOST_NAMES = 4
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
    there = np.array([state == EDGE for state in queries["state"].to_pylist()])
    follows = (np.diff(steps) == 1) & there[1:] & there[:-1]  # at the edge they alternate: the mean is drawn
    first = np.flatnonzero(np.append(True, ~follows))
    chosen = np.unique(np.linspace(0, len(first) - 1, min(len(first), _MOST_POINTS)).round().astype(np.int64))
    means = {name: _means(queries[name], first)[chosen] for name in _DRAWN}
    lowest = np.nanmin(np.asarray(queries["loss"].to_numpy(), dtype=np.float64))
    means["loss_predicted"] = np.where(there[first][chosen], lowest + means["loss_predicted"], np.nan)
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


def sharpness_section(queries: pa.Table, *, metadata: Mapping[str, Any]) -> str:
    """The section of a page with the charts."""
    subject, about = sharpness_findings(queries, metadata=metadata)[-1].subject, metadata.get("sharpness") or {}
    limit = "2 / lr_eff" if queries["effective_lr"][-1].as_py() is not None else "the optimizer's threshold"
    levels = zip(queries["state"].to_pylist(), queries["loss_predicted"].to_pylist(), strict=True)
    lawful = any(state == EDGE and level is not None for state, level in levels)
    level = "; the lowest loss seen and what the edge adds to it, at most" if lawful else ""
    flatter = ", and with weight decay it leads to flatter minima" if lawful else ""
    template = Template(files("equilibria.views.run").joinpath("sharpness.html").read_text(encoding="utf-8"))
    label = f"Chart of sharpness and threshold over the run: {subject}"
    return template.substitute(
        limit=text(limit), label=text(label), what=text(what(about)), level=text(level), flatter=text(flatter)
    )


def sharpness_settings(queries: pa.Table | None, *, metadata: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and a remark for the head of a page."""
    if queries is None:
        return []
    about = metadata.get("sharpness") or {}
    spent = float(np.nansum(queries["hvps"].to_numpy(zero_copy_only=False)))
    last = queries["step"][-1].as_py()
    return [
        (
            what(about),
            how_many(queries.num_rows),
            f"to step {last:,}; {spent / queries.num_rows:.1f} Hessian-vector products each",
        ),
        *([("parameters", f"{about['entries']:,}", _selection(about))] if "entries" in about else []),
    ]


def how_many(count: int) -> str:
    """A number of them in words."""
    return "1 query" if count == 1 else f"{count:,} queries"


def _selection(about: Mapping[str, Any]) -> str:
    names = about["params"]
    if len(names) == about.get("of"):
        return f"all {counted(len(names), 'tensor')}"
    shown = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], "...", names[-1]]
    return f"{counted(len(names), 'tensor')}: {', '.join(shown)}"


def print_sharpness(
    queries: pa.Table, *, metadata: Mapping[str, Any], notes: Sequence[str] = (), console: Console | None = None
) -> None:
    """Print some of the queries, the last among them, and what they mean.

    Args:
        queries: the table of a tracker, or of a recorded run.
        metadata: of it.
        notes: about the record itself, printed before the findings.
        console: where to print; standard output without it.
    """
    out = Console() if console is None else console
    if queries.num_rows:
        _print_rows(queries, what(metadata.get("sharpness") or {}), out)
    else:
        out.print("no queries yet: train a step first")
    for note in notes:
        out.print(Text(f"- {note}"))
    for finding in sharpness_findings(queries, metadata=metadata):
        mark = "!" if finding.severity == "warning" else "-"
        out.print(Text(f"{mark} {finding.subject}: {finding.evidence}"))


def _print_rows(queries: pa.Table, measured: str, out: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, title in _COLUMNS.items():
        table.add_column(measured.replace(" ", "\n") if name == "sharpness" else title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in _thinned(queries, _MOST_ROWS).to_pylist():
        table.add_row(*(_cell(name, row[name]) for name in _COLUMNS), Text(_standing(row)))
    out.print(table)
    rows = counted(queries.num_rows, "row")
    told = f"{rows} in all; R is sharpness over threshold; products: Hessian times vector"
    out.print(Text(told, style="dim"), end="\n\n")


def _thinned(queries: pa.Table, most: int) -> pa.Table:
    """Evenly spaced rows, with the first and the last."""
    if queries.num_rows <= most:
        return queries
    return queries.take(np.unique(np.linspace(0, queries.num_rows - 1, most).round().astype(np.int64)))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if name in ("step", "hvps") else figure(value)


def _standing(row: dict[str, object]) -> str:
    left = row["steps_to_crossing"]
    if isinstance(left, float) and left > 0:
        return f"crossing in {left:,.0f} steps"
    return str(row["state"] or "")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
