"""An examination in the terminal: a table, the findings, and the code that fixes them."""

from __future__ import annotations

from equilibria._rich import Console, Table, Text
from equilibria.doctor.examination import Examination, ParameterRow

_STYLE = {"warning": "yellow", "note": "cyan", "": ""}
_MARK = {"warning": "!", "note": "i", "": ""}
_ROOMY = 110  # columns
_LEGEND = (
    "jointly: the norms of so many parameters can only change together; against: some grow as others shrink; decay: "
    "share of the norm per step; angle: radians per step in equilibrium"
)


def print_examination(examination: Examination, *, console: Console | None = None) -> None:
    """Print the table, then every finding with its remedy, then the code."""
    out = Console() if console is None else console
    out.print(_table(examination, width=out.width))
    sym = examination.symmetries
    proof = f"{len(sym.basis)} scaling symmetries, gap {sym.gap:.0e}, {sym.probes} backward passes"
    out.print(Text(proof, style="dim"))
    out.print(Text(_LEGEND, style="dim"))
    for note in sym.notes:
        out.print(Text(f"- {note}"))
    out.print()
    for finding in examination.findings:
        line = Text(f"{_MARK[finding.severity]} ", style=_STYLE[finding.severity])
        out.print(line.append(f"{finding.subject}: {finding.evidence}; {finding.remedy}.", style="default"))
    if not examination.findings:
        out.print("Nothing is wrong.")
    if examination.fix:
        out.print("\nThe groups as they should be (or equilibria.split_decay(model, ...)):\n")
        out.print(Text(examination.fix), soft_wrap=True)


def _table(examination: Examination, *, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("parameter", no_wrap=True)
    roomy = width >= _ROOMY
    for title in ("role", "shape", "invariant") if roomy else ("invariant",):
        table.add_column(title, no_wrap=True)
    for title in ("lr", "wd", "decay", "angle", "settles in") if roomy else ("lr", "wd", "angle"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in examination.rows:
        what = [row.role, "x".join(map(str, row.shape)) or "1"] if roomy else []
        steps = "" if row.time_constant is None else f"{row.time_constant:,.0f} steps"
        numbers = (
            [row.lr, row.weight_decay, row.decay_per_step, row.angle]
            if roomy
            else [row.lr, row.weight_decay, row.angle]
        )
        table.add_row(
            Text(_MARK[row.severity], style=_STYLE[row.severity]),
            Text(row.name),
            *what,
            _short(row, examination),
            *(_number(value) for value in numbers),
            *([steps] if roomy else []),
        )
    return table


def _short(row: ParameterRow, examination: Examination) -> str:
    """How it is invariant, without the names of its partners, which --json has."""
    vector = examination.symmetries.jointly.get(row.name)
    if vector is None:
        return row.invariant
    return f"jointly, {len(vector)}" if min(vector.values()) > 0 else f"against, {len(vector)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
