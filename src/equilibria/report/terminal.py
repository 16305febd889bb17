"""The layers of a run in the terminal: a headline, a table and the findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equilibria._rich import Console, Table, Text
from equilibria.findings import Finding, counted
from equilibria.measure.samples import NO_EQUILIBRIUM, SETTLED
from equilibria.measure.summary import LayerSummary
from equilibria.report.verdict import headline, without_findings, worst, worst_first

_ROOMY, _NARROW = 92, 72  # columns of a terminal from which all is spaced out, and below which some is left out
_LEGEND = {
    "theory": "the angle predicted for now",
    "settled": "the angle in equilibrium",
    "goal": "the norm once settled",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the table, shown where the terminal has so many columns."""

    title: str
    cell: Callable[[LayerSummary], str]
    width: int = 0


def print_table(
    layers: Sequence[LayerSummary],
    *,
    findings: Sequence[Finding] = (),
    notes: Sequence[str] = (),
    most: int | None = None,
    console: Console | None = None,
) -> None:
    """Print a headline, one line per layer, the most surprising first, and the findings below.

    Args:
        layers: the summaries.
        findings: printed below as sentences.
        notes: about the record itself, printed before them.
        most: layers that are printed at most; None for all.
        console: where to print; standard output without it.
    """
    out = Console() if console is None else console
    if not layers:
        out.print("no samples yet: train a few steps first")
        return
    out.print(Text(f"{headline(layers)}. {worst(layers)}"), end="\n\n")
    shown = worst_first(layers)[:most]
    out.print(layer_table(shown, width=out.width))
    out.print(Text(_when(layers), style="dim"))
    if legend := _legend(_columns(shown, width=out.width)):
        out.print(Text(legend, style="dim"))
    if most is not None and len(layers) > most:
        out.print(Text(f"{len(layers) - most:,} more layers are in --json", style="dim"))
    out.print()
    for note in notes:
        out.print(_sentence("-", note))
    if not findings:
        out.print(_sentence("-", ": ".join(without_findings(layers))))
    for finding in findings:
        out.print(_sentence("!" if finding.severity == "warning" else "-", f"{finding.subject}: {finding.evidence}"))
        if finding.remedy:
            out.print(_sentence(" ", finding.remedy))


def _when(layers: Sequence[LayerSummary]) -> str:
    """What the numbers are of: the samples taken with the present settings."""
    most = max(layers, key=lambda layer: layer.samples)
    first = most.last_step if most.first_step is None else most.first_step
    return f"root mean square of {counted(most.samples, 'sample')}, steps {first:,} to {most.last_step:,}"


def layer_table(layers: Sequence[LayerSummary], *, width: int) -> Table:
    """The table itself, to fit into so many columns."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2 if width >= _ROOMY else 1, 0, 0))
    columns = _columns(layers, width=width)
    short = all(layer.name.endswith(".weight") for layer in layers)
    in_epochs = any(layer.epochs_to_settle is not None for layer in layers)
    table.add_column("layer", overflow="fold")
    for column in columns:
        title = column.title.format(unit="ep." if in_epochs else "steps")
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    labelled = any(layer.how for layer in layers)
    if labelled:
        table.add_column("invariant", overflow="fold")
    for layer in layers:
        name = layer.name.removesuffix(".weight") if short else layer.name
        label = [Text(layer.how or "")] if labelled else []
        table.add_row(Text(name), *(column.cell(layer) for column in columns), _state(layer), *label)
    return table


def _columns(layers: Sequence[LayerSummary], *, width: int) -> list[_Column]:
    """Those that there is room for and that hold something."""
    return [column for column in _COLUMNS if width >= column.width and any(map(column.cell, layers))]


def _legend(columns: Sequence[_Column]) -> str:
    return "; ".join(f"{column.title}: {_LEGEND[column.title]}" for column in columns if column.title in _LEGEND)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(layer: LayerSummary) -> str:
    ratio = layer.angle_vs_predicted
    return "" if ratio is None else f"{ratio:.2f}" if 0.005 < ratio < 100 else f"{ratio:.0e}"


def _time_left(layer: LayerSummary) -> str:
    """Epochs where their length is known, else steps."""
    if layer.state == SETTLED or not layer.steps_to_settle or layer.invariant is False:
        return ""
    if layer.epochs_to_settle is not None:
        return _count(layer.epochs_to_settle)
    return _count(math.ceil(layer.steps_to_settle))


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def _state(layer: LayerSummary) -> str:
    if layer.no_law is not None:
        return "no law"
    if layer.invariant is False:
        return "not invariant"
    if layer.state == NO_EQUILIBRIUM and layer.weight_decay == 0:
        return "no decay"
    return layer.state or ""


def _sentence(mark: str, text: str) -> Table:
    """A marked paragraph whose further lines are indented under its first."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(mark), Text(text))
    return grid


_COLUMNS = (
    _Column("rad/step", lambda layer: _number(layer.angle)),
    _Column("theory", lambda layer: _number(layer.angle_predicted), width=_NARROW),
    _Column("ratio", _ratio),
    _Column("settled", lambda layer: _number(layer.angle_equilibrium), width=_ROOMY),
    _Column("norm", lambda layer: _number(layer.norm)),
    _Column("goal", lambda layer: _number(layer.norm_equilibrium), width=_NARROW),
    _Column("{unit} left", _time_left),
)
