"""The doctor's examination in the terminal: a table, the findings, and the code that fixes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equilibria.control._split_decay import is_scale_invariant
from equilibria.doctor._examination import Examination, ParameterRow
from equilibria.views._rich import Console, Table, Text

_STYLE = {"warning": "yellow", "note": "cyan", "": ""}
_MARK = {"warning": "!", "note": "i", "": ""}
_UNLIMITED = 10_000  # columns
_LEGEND = {
    "invariant": "jointly (n): n parameters may be scaled together; against (n): some up as others go down (--json "
    "names them)",
    "decay": "decay: share of the norm per step",
    "angle": "angle: in equilibrium, radians per step, of parameters that are invariant alone",
    "settles in": "settles in: its time constant",
}


def print_examination(examination: Examination, *, console: Console | None = None) -> None:
    """Print the table, then every finding with its remedy, then the code."""
    out = Console() if console is None else console
    table = _table(examination, console=out)
    out.print(table)
    sym = examination.symmetries
    evidence = f"{len(sym.basis)} scaling symmetries, gap {sym.gap:.0e}, {sym.probes} backward passes"
    out.print(Text(evidence, style="dim"))
    shown = [text for title, text in _LEGEND.items() if any(column.header == title for column in table.columns)]
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
        out.print("\nThe right groups (or those of equilibria.split_decay(model, ...)):\n")
        out.print(Text(examination.fix), soft_wrap=True)


def _table(examination: Examination, *, console: Console) -> Table:
    """A table with as many columns as fit: the least informative are left out first."""
    left_out: set[str] = set()
    for title in ("", "shape", "decay", "role", "settles in", "lr"):
        left_out.add(title)
        table = _table_without(left_out, examination)
        if console.measure(table, options=console.options.update(width=_UNLIMITED)).maximum <= console.width:
            break
    return table


def _table_without(left_out: set[str], examination: Examination) -> Table:
    columns = [column for column in _COLUMNS if column.title not in left_out]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("parameter", overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for row in examination.rows:
        mark = Text(_MARK[row.severity], style=_STYLE[row.severity])
        table.add_row(mark, Text(row.name), *(column.cell(row, examination) for column in columns))
    return table


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


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[ParameterRow, Examination], str]
    is_number: bool = True


_COLUMNS = (
    _Column("role", lambda row, _: row.role, is_number=False),
    _Column("shape", lambda row, _: "x".join(map(str, row.shape)) or "1", is_number=False),
    _Column("invariant", _short, is_number=False),
    _Column("lr", lambda row, _: _number(row.lr)),
    _Column("wd", lambda row, _: _number(row.weight_decay)),
    _Column("decay", lambda row, _: _number(row.decay_per_step)),
    _Column("angle", lambda row, _: _number(row.angle)),
    _Column("settles in", lambda row, _: _steps(row)),
)
