"""The layers of a run in the terminal: a headline, a table and the findings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equilibria.diagnosis.summary import LayerSummary
from equilibria.findings import Finding, counted
from equilibria.records.tables import NO_EQUILIBRIUM, SETTLED
from equilibria.views._rich import Console, Table, Text
from equilibria.views.run.headline import headline, without_findings, worst, worst_first

_ROOMY, _NARROW = 92, 72  # columns of a terminal from which all is spaced out, and below which some is left out
_LEGEND = {
    "theory": "the angle predicted for now",
    "settled": "the angle in equilibrium",
    "goal": "the norm once settled",
}
_PARTNERS = ("jointly with ", "against ")
_OF_PARTNERS = "jointly (n): n may be scaled together; against (n): some up as others go down (print(sym) names them)"
_DISPENSABLE = ("settled", "goal", "theory", "norm", "{unit} left")  # what is left out first
_ENDLESS = 10_000  # columns


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
        out.print(
            "no samples yet: train a few steps first; or the watched optimizer is not the one that steps: watch it "
            "after it is made"
        )
        return
    out.print(Text(f"{headline(layers)}. {worst(layers)}"), end="\n\n")
    shown = worst_first(layers)[:most]
    columns = _fitting(shown, out)
    out.print(layer_table(shown, columns, width=out.width))
    out.print(Text(_when(layers), style="dim"))
    if legend := _legend(shown, columns):
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


def layer_table(layers: Sequence[LayerSummary], columns: Sequence[_Column], *, width: int) -> Table:
    """The table itself, spaced out where the terminal has room."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2 if width >= _ROOMY else 1, 0, 0))
    short = all(layer.name.endswith(".weight") for layer in layers)
    in_epochs = any(layer.epochs_to_settle is not None for layer in layers)
    table.add_column("layer", overflow="fold")
    for column in columns:
        title = column.title.format(unit="ep." if in_epochs else "steps")
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    labelled = any(layer.how for layer in layers)
    if labelled:
        table.add_column("invariant", no_wrap=True)
    for layer in layers:
        name = layer.name.removesuffix(".weight") if short else layer.name
        label = [Text(_short(layer.how or ""))] if labelled else []
        table.add_row(Text(name), *(column.cell(layer) for column in columns), state_word(layer), *label)
    return table


def _fitting(layers: Sequence[LayerSummary], out: Console) -> list[_Column]:
    """Those that hold something; without some, where names would have to be folded otherwise."""
    columns = [column for column in _COLUMNS if out.width >= column.width and any(map(column.cell, layers))]
    endless = out.options.update(width=_ENDLESS)
    for title in _DISPENSABLE:
        if out.measure(layer_table(layers, columns, width=out.width), options=endless).maximum <= out.width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def _short(how: str) -> str:
    """How symmetries say that a weight is invariant, with the number of its partners and itself in place of names.

    Example:
        >>> _short("jointly with a.bias, b.weight and 6 more; also against c"), _short("against b, c"), _short("rows")
        ('jointly (9)', 'against (3)', 'rows')
    """
    first = how.partition(";")[0]
    if not first.startswith(_PARTNERS):
        return how
    more = sum(map(int, re.findall(r" and (\d+) more", first)))
    names = re.split(r", | and against ", re.sub(r" and \d+ more|^jointly with |^against ", "", first))
    return f"{'against' if 'against ' in first else 'jointly'} ({1 + len(names) + more})"


def _legend(layers: Sequence[LayerSummary], columns: Sequence[_Column]) -> str:
    words = [f"{column.title}: {_LEGEND[column.title]}" for column in columns if column.title in _LEGEND]
    with_partners = any((layer.how or "").startswith(_PARTNERS) for layer in layers)
    return "; ".join([*words, *([_OF_PARTNERS] if with_partners else [])])


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


def state_word(layer: LayerSummary) -> str:
    """The state of a layer, or why it has none."""
    if layer.no_law is not None:
        return "no law"
    if layer.invariant is False:
        return {None: "not invariant", "no": "not invariant", "no effect": "no effect"}.get(layer.how, "not alone")
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
