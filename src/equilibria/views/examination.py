"""The doctor's examination in the terminal: a table, the findings, and the code that fixes them."""

from __future__ import annotations

from collections.abc import Callable

from equilibria.control._split_decay import is_scale_invariant
from equilibria.doctor._examination import Examination, ParameterRow
from equilibria.views._rich import Console, Text, columns_table
from equilibria.views.terminal import fitting

_STYLE = {"warning": "yellow", "note": "cyan", "": ""}
_MARK = {"warning": "!", "note": "i", "": ""}
_LEGEND = {
    "invariant": "jointly (n): n parameters may be scaled together; against (n): some up as others go down (--json "
    "names them)",
    "decay": "decay: share of the norm per step",
    "angle": "angle: in equilibrium, radians per step, of parameters that are invariant alone",
    "settles in": "settles in: time constant of the norm, of matrices that decay",
}


def print_examination(examination: Examination, *, console: Console | None = None) -> None:
    """Print the table, then every finding with its remedy, then the code."""
    out = Console() if console is None else console
    columns = fitting(_columns(examination), spare=_SPARE, width=out.width)
    out.print(columns_table(columns, words=_WORDS, folded="parameter"))
    sym = examination.symmetries
    gap = f"told from the rest by a gap of {sym.gap:.0e} (above 1,000 is clear)"
    evidence = f"{len(sym.basis)} scaling symmetries, {gap}, {sym.probes} backward passes"
    out.print(Text(evidence, style="dim"))
    shown = [text for title, text in _LEGEND.items() if title in columns]
    out.print(Text("; ".join(shown), style="dim"))
    for note in sym.notes:
        out.print(Text(f"- {note}"))
    out.print()
    for finding in examination.findings:
        line = Text(f"{_MARK[finding.severity]} ", style=_STYLE[finding.severity])
        out.print(line.append(f"{finding.subject}: {finding.evidence}; {finding.remedy}.", style="default"))
    if not examination.findings:
        out.print("Nothing is wrong.")
    if examination.fix:
        out.print("\nGroups that follow these findings (equilibria.split_decay(model, ...) builds such groups too):\n")
        out.print(Text(examination.fix), soft_wrap=True)


def _columns(examination: Examination) -> dict[str, list[Text]]:
    """The cells of the table by title."""
    marks = [Text(_MARK[row.severity], style=_STYLE[row.severity]) for row in examination.rows]
    columns = {title: [Text(cell(row, examination)) for row in examination.rows] for title, cell in _CELLS.items()}
    return {"": marks, **columns}


def _short(row: ParameterRow, examination: Examination) -> str:
    """How a parameter is invariant, without the names of its partners, which --json has."""
    vector = examination.symmetries.jointly.get(row.name)
    if vector is None:
        return row.invariant
    if is_scale_invariant(row.name, examination.symmetries):
        return f"jointly ({len(vector)})"
    return f"against ({len(examination.symmetries.against(row.name) or vector)})"


def _steps(row: ParameterRow) -> str:
    return "" if row.time_constant is None else f"{row.time_constant:,.0f} steps"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


_CELLS: dict[str, Callable[[ParameterRow, Examination], str]] = {
    "parameter": lambda row, _: row.name,
    "role": lambda row, _: row.role,
    "shape": lambda row, _: "x".join(map(str, row.shape)) or "1",
    "invariant": _short,
    "lr": lambda row, _: _number(row.lr),
    "wd": lambda row, _: _number(row.weight_decay),
    "decay": lambda row, _: _number(row.decay_per_step),
    "angle": lambda row, _: _number(row.angle),
    "settles in": lambda row, _: _steps(row),
}
_WORDS = ("", "parameter", "role", "shape", "invariant")
_SPARE = ("shape", "decay", "role", "settles in", "lr")  # the least informative first
