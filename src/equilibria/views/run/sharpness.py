"""The queries of a sharpness tracker: charts of a report, and a table for the terminal."""

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

from equilibria.diagnosis.sharpness import figure, sharpness_findings, sharpness_name
from equilibria.findings import counted, joined
from equilibria.planning._phases import thinned
from equilibria.records.tables import EDGE
from equilibria.views.words import text

_MOST_POINTS = 3000  # more than a wide screen can show
_MOST_ROWS = 12
_LOSS_FLOOR = 1e-12  # of the largest loss: what lies below is rounding
_DRAWN = ("sharpness", "threshold", "ratio", "loss", "loss_predicted")
_TITLES = {
    "step": "step",
    "sharpness": "sharpness",
    "threshold": "threshold",
    "ratio": "R",
    "loss": "loss",
    "hvps": "products",
}


def sharpness_curves(queries: pa.Table) -> dict[str, object]:
    """The curves of the charts as JSON; None where there is no number."""
    steps = np.asarray(queries["step"].to_numpy(), dtype=np.float64)
    at_edge = np.array([state == EDGE for state in queries["state"].to_pylist()])
    follows = (np.diff(steps) == 1) & at_edge[1:] & at_edge[:-1]  # at the edge values alternate: draw their mean
    first = np.flatnonzero(np.append(True, ~follows))
    chosen = thinned(len(first), most=_MOST_POINTS)
    means = {name: _means(queries[name], first)[chosen] for name in _DRAWN}
    lowest = np.nanmin(np.asarray(queries["loss"].to_numpy(), dtype=np.float64))
    means["loss_predicted"] = np.where(at_edge[first][chosen], lowest + means["loss_predicted"], np.nan)
    return {
        "step": [int(step) for step in steps[first][chosen]],
        **{name: [_finite(value) for value in values.tolist()] for name, values in means.items()},
        "edge": edge_stretches(queries),
        "loss_floor": _LOSS_FLOOR * max((value for value in queries["loss"].to_pylist() if value), default=0.0),
    }


def _means(column: pa.ChunkedArray, first: NDArray[np.int64]) -> NDArray[np.float64]:
    """Means over the rows from each of ``first`` up to the next."""
    values = np.asarray(column.to_numpy(), dtype=np.float64)
    return np.asarray(np.add.reduceat(values, first) / np.diff(np.append(first, len(values))))


def edge_stretches(queries: pa.Table) -> list[list[int]]:
    """First and last step of every stretch at the edge of stability; a stretch lasts until the query that ends it."""
    steps, stretches, row = queries["step"].to_pylist(), [], 0
    for state, group in groupby(queries["state"].to_pylist()):
        length = len(list(group))
        if state == EDGE:
            stretches.append([steps[row], steps[min(row + length, len(steps) - 1)]])
        row += length
    return stretches


def sharpness_section(queries: pa.Table, *, metadata: Mapping[str, Any]) -> str:
    """The section of a report with the charts."""
    subject, about = sharpness_findings(queries, metadata=metadata)[-1].subject, metadata.get("sharpness") or {}
    limit = "2 / lr_eff" if queries["effective_lr"][-1].as_py() is not None else "the optimizer's threshold"
    levels = zip(queries["state"].to_pylist(), queries["loss_predicted"].to_pylist(), strict=True)
    predicted = any(state == EDGE and level is not None for state, level in levels)
    level = "; the lowest loss so far plus the most that the edge adds" if predicted else ""
    flatter = ", and with weight decay it leads to flatter minima" if predicted else ""
    template = Template(files("equilibria.views.run").joinpath("sharpness.html").read_text(encoding="utf-8"))
    label = f"Chart of sharpness and threshold over the run: {subject}"
    return template.substitute(
        limit=text(limit), label=text(label), what=text(sharpness_name(about)), level=text(level), flatter=text(flatter)
    )


def sharpness_settings(queries: pa.Table | None, *, metadata: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and remark of the settings in the head of a report."""
    if queries is None:
        return []
    about = metadata.get("sharpness") or {}
    spent = float(np.nansum(queries["hvps"].to_numpy(zero_copy_only=False)))
    last = queries["step"][-1].as_py()
    return [
        (
            sharpness_name(about),
            counted(queries.num_rows, "query", "queries"),
            f"to step {last:,}; {spent / queries.num_rows:.1f} Hessian-vector products each",
        ),
        *([("parameters", f"{about['entries']:,}", _selection(about))] if "entries" in about else []),
    ]


def _selection(about: Mapping[str, Any]) -> str:
    names = about["params"]
    if len(names) == about.get("of"):
        return f"all {counted(len(names), 'tensor')}"
    return f"{counted(len(names), 'tensor')}: {joined(names)}"


def sharpness_table(samples: pa.Table, *, metadata: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Some of the queries, the last among them, and the findings.

    Args:
        samples: the sharpness table of a tracker or of a recorded run.
        metadata: of the tracker or the run.
        notes: sentences about the record itself, shown before the findings.

    Returns:
        Text as wide as the terminal, with ANSI colours if standard output is one and NO_COLOR is not set.
    """
    from equilibria.views._rich import Text, collected_text, columns_table, text_console

    out = text_console()
    if samples.num_rows:
        name = sharpness_name(metadata.get("sharpness") or {})
        out.print(columns_table(_columns(samples, name), words=("state",)))
        rows = counted(samples.num_rows, "row")
        legend = f"{rows} in all; R is sharpness over threshold; products: Hessian times vector"
        out.print(Text(legend, style="dim"), end="\n\n")
    else:
        out.print("no queries yet: train a step first")
    for note in notes:
        out.print(Text(f"- {note}"))
    for finding in sharpness_findings(samples, metadata=metadata):
        mark = "!" if finding.severity == "warning" else "-"
        out.print(Text(f"{mark} {finding.subject}: {finding.evidence}"))
    return collected_text(out)


def _columns(samples: pa.Table, name: str) -> dict[str, list[str]]:
    """The cells of the table by title."""
    rows = samples.take(thinned(samples.num_rows, most=_MOST_ROWS)).to_pylist()
    titles = {**_TITLES, "sharpness": name.replace(" ", "\n")}
    columns = {title: [_cell(column, row[column]) for row in rows] for column, title in titles.items()}
    return {**columns, "state": [_standing(row) for row in rows]}


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if name in ("step", "hvps") else figure(value)


def _standing(row: dict[str, object]) -> str:
    left, spread = row["steps_to_crossing"], row["crossing_spread"]
    if isinstance(left, float) and left > 0:
        around = f" ± {spread:,.0f}" if isinstance(spread, float) else ""
        return f"crossing in {left:,.0f}{around} steps"
    return str(row["state"] or "")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
