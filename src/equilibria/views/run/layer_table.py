"""The table of the layers in the report of a run, as HTML; layers of one kind across blocks unfold from one row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.siblings import Siblings, folded, unlike_by_block
from equilibria.findings import joined, percent, rounded
from equilibria.records.tables import NO_EQUILIBRIUM, SETTLED
from equilibria.views.document import scrolling_table
from equilibria.views.run.headline import STATE_MARKS, TOLERANCE, most_telling_first
from equilibria.views.words import ratio_cell, text

_SECTION = """<section aria-labelledby="layers-heading">
<h2 id="layers-heading">Layer by layer</h2>
{}
</section>"""
_ORDER = (
    '<p class="order"><button type="button" id="order" aria-pressed="false" hidden>furthest off first</button></p>\n'
)
_MOST_UNLIKE = 4
_NOTHING = "–"
_WORDS = ("state", "law", "how")  # fields whose columns are flush left


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table.

    Attributes:
        title: its heading.
        field: of `LayerSummary`; a column without any value in it is left out.
        cell: the HTML of a cell, for a layer or for several of one kind.
        is_wide: whether it is for wide screens only.
    """

    title: str
    field: str
    cell: Callable[[Siblings], str]
    is_wide: bool = True


def layer_table(layers: Sequence[LayerSummary], *, curves: Sequence[str]) -> str:
    """The section with the table of the layers, in the order of the model.

    Args:
        layers: of the run, in the order of the model.
        curves: the names of those that the charts draw, in the order in which the script numbers them; the others have
            no row. The script finds a row by that number, ``data-layer``; "furthest off first" sorts by ``data-rank``.
    """
    if not layers:
        return _SECTION.format('<p class="none">No layer was measured.</p>')
    numbers = {name: number for number, name in enumerate(curves)}
    ranks = {layer.name: rank for rank, layer in enumerate(most_telling_first(layers))}
    columns, kinds = _columns(layers), folded(layers)
    head = "".join(_heading(column) for column in columns)
    rows: list[str] = []
    for row in kinds:
        is_kind = len(row.members) > 1
        if is_kind:
            rows.append(_kind_row(len(rows), row, columns))
        for layer in row.members:
            if layer.name in numbers:
                places = f'data-layer="{numbers[layer.name]}" data-rank="{ranks[layer.name]}" data-place="{len(rows)}"'
                rows.append(_layer_row(places, layer, columns, kind=row.kind if is_kind else None))
    kind = "layers numeric" if columns and columns[-1].field not in _WORDS else "layers"
    shown_table = scrolling_table(f'<tr><th scope="col">layer</th>{head}</tr>', rows, name="layers-heading", kind=kind)
    order = _ORDER if sum(layer.how_wrong is not None for layer in layers) > 1 else ""
    caption = _caption(columns, len(layers) - len(numbers), is_folded=len(kinds) < len(layers))
    return _SECTION.format(f"{order}{shown_table}\n{caption}")


def _columns(layers: Sequence[LayerSummary]) -> list[_Column]:
    """The columns that are not empty; without predictions, how the norm has changed takes their place."""
    has_law = any(layer.angle_vs_predicted is not None for layer in layers)
    columns = [
        _Column("angle ÷\u00a0predicted", "angle_vs_predicted", _ratios("angle_vs_predicted"), is_wide=False),
        _Column("measured, rad per step", "angle", _numbers("angle"), is_wide=has_law),
        _Column("predicted", "angle_predicted", _numbers("angle_predicted")),
        _Column("equilibrium", "angle_equilibrium", _numbers("angle_equilibrium")),
        _Column("norm", "norm", _numbers("norm")),
        _Column(
            "norm ÷\u00a0equilibrium",
            "norm_vs_equilibrium",
            _ratios("norm_vs_equilibrium", words=("shorter", "longer")),
            is_wide=False,
        ),
        *([_Column("growth gain G", "gain", _numbers("gain"))] if any(layer.by_gain for layer in layers) else []),
        _Column("settles in", "steps_to_settle", lambda row: f"<td>{_settles_in(_slowest(row))}</td>"),
        _Column("state", "state", _state_cell, is_wide=False),
        *([_Column("law", "law", _law)] if len({layer.law for layer in layers} - {None}) > 1 else []),
        _Column("invariant", "how", lambda row: f"<td>{escape(_label(row))}</td>"),
    ]
    if not has_law:
        since = min((layer.recorded_from for layer in layers if layer.recorded_from is not None), default=0)
        columns.insert(5, _Column(f"norm ÷ that at step {since:,}", "first_norm", _growth, is_wide=False))
    empty = set()
    if all(_settles_in(layer) == _NOTHING for layer in layers):
        empty.add("steps_to_settle")
    if (
        all(layer.state in (None, NO_EQUILIBRIUM) for layer in layers)
        and len({layer.state_word for layer in layers}) == 1
    ):
        empty.add("state")
    empty |= {column.field for column in columns if all(getattr(layer, column.field) is None for layer in layers)}
    return [column for column in columns if column.field not in empty]


def _heading(column: _Column) -> str:
    kind = ' class="wide"' if column.is_wide else ""
    return f'<th scope="col"{kind}>{escape(column.title)}</th>'


def _caption(columns: Sequence[_Column], left_out: int, *, is_folded: bool) -> str:
    sentences = []
    if any(column.field == "angle_vs_predicted" for column in columns):
        sentences.append(
            f"▼ slower, ▲ faster than predicted by more than {text(percent(TOLERANCE))}; norm: ▼ shorter, ▲ longer "
            "than in equilibrium."
        )
    if is_folded:
        sentences.append(
            "A row with ▸ stands for the layers of one kind in all blocks: their median, and below it the smallest and "
            "the largest. Click it to see them."
        )
    sentences.append("Click the row of a layer to see it in every chart.")
    if left_out > 0:
        sentences.append(
            f"{left_out:,} more layers, closer to their prediction or without one, are left out: "
            "<code>equilibria report --json</code> lists them all."
        )
    return f'<p class="caption">{" ".join(sentences)}</p>'


def _layer_row(places: str, layer: LayerSummary, columns: Sequence[_Column], *, kind: str | None) -> str:
    name = f'<span class="swatch"></span><span>{_breakable(layer.name)}</span>'
    cells = "".join(_cell(column, Siblings(layer.name, (layer,))) for column in columns)
    member = "" if kind is None else f' class="member" data-kind="{escape(kind)}" hidden'
    return (
        f'<tr {places}{member} title="{escape(layer.sentence)}">'
        f'<th scope="row"><button type="button" aria-pressed="false">{name}</button></th>{cells}</tr>'
    )


def _kind_row(place: int, row: Siblings, columns: Sequence[_Column]) -> str:
    """The row of several layers; the script shows and hides their own rows."""
    unlike = [f"{name}\u00a0{factor:.2g}×" for name, factor in unlike_by_block(row, "angle").items()]
    more = [f"{joined(unlike, most=_MOST_UNLIKE)} the median angle"] if unlike else []
    words = "; ".join([f"{len(row.members):,} layers", *more])
    name = f'<span class="fold" aria-hidden="true">▸</span><span>{_breakable(row.kind)}</span>'
    cells = "".join(_cell(column, row) for column in columns)
    button = f'<button type="button" aria-expanded="false">{name}</button><small>{_breakable(words)}</small>'
    return (
        f'<tr class="kind" data-kind="{escape(row.kind)}" data-place="{place}">'
        f'<th scope="row">{button}</th>{cells}</tr>'
    )


def _cell(column: _Column, row: Siblings) -> str:
    cell = column.cell(row)
    return cell.replace("<td>", '<td class="wide">', 1) if column.is_wide else cell


def _breakable(name: str) -> str:
    """Words with dotted names that a narrow screen may break after a dot, but not after that of a decimal."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", escape(name))


def _numbers(field: str) -> Callable[[Siblings], str]:
    def cell(row: Siblings) -> str:
        values = row.values(field)
        return f"<td>{_number(median(values)) if values else _NOTHING}{_range(values, _number)}</td>"

    return cell


def _ratios(field: str, *, words: tuple[str, str] = ("slower", "faster")) -> Callable[[Siblings], str]:
    def cell(row: Siblings) -> str:
        values = row.values(field)
        middle = ratio_cell(median(values) if values else None, TOLERANCE, words=words)
        return f"{middle.removesuffix('</td>')}{_range(values, _ratio)}</td>"

    return cell


def _growth(row: Siblings) -> str:
    values = [layer.norm / layer.first_norm for layer in row.members if layer.norm is not None and layer.first_norm]
    return f"<td>{_ratio(median(values)) if values else _NOTHING}{_range(values, _ratio)}</td>"


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The smallest and the largest of several values, in small print."""
    if len(values) < 2 or show(min(values)) == show(max(values)):
        return ""
    return f'<small class="range">{show(min(values))} – {show(max(values))}</small>'


def _number(value: float) -> str:
    return rounded(value, all_digits=True)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.005 <= value < 100 else rounded(value)


def _slowest(row: Siblings) -> LayerSummary:
    return max(row.members, key=lambda layer: layer.steps_to_settle or 0.0)


def _settles_in(layer: LayerSummary) -> str:
    """The time until a layer is settled, with its unit; a dash where that is unknown or past."""
    if layer.state == SETTLED or not layer.steps_to_settle:
        return _NOTHING
    if layer.epochs_to_settle is not None:
        return f"{_time(layer.epochs_to_settle)} epochs"
    return f"{math.ceil(layer.steps_to_settle):,} steps"


def _time(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.2g}"


def _state_cell(row: Siblings) -> str:
    """The state of a layer or why it has none, or the number of layers of each kind."""
    counts = Counter(
        (layer.state or NO_EQUILIBRIUM, layer.state_word or NO_EQUILIBRIUM) for layer in row.members
    ).most_common()
    (state, _), _ = counts[0]
    kind = "good" if state == SETTLED else "no-law" if state == NO_EQUILIBRIUM else "bad"
    words = [
        f'<span aria-hidden="true">{STATE_MARKS[state]}</span> '
        + (f"{count:,} {escape(word)}" if len(counts) > 1 else escape(word))
        for (state, word), count in counts
    ]
    shown = words[0] if len(words) == 1 else "".join(f"<div>{line}</div>" for line in words)
    wait = _settles_in(_slowest(row))
    more = "" if wait == _NOTHING else f'<small class="narrow-only">{wait}</small>'
    return f'<td class="state {kind}">{shown}{more}</td>'


def _law(row: Siblings) -> str:
    laws = dict.fromkeys(layer.law or _NOTHING for layer in row.members)
    return f"<td>{escape(next(iter(laws)) if len(laws) == 1 else 'both')}</td>"


def _label(row: Siblings) -> str:
    labels = dict.fromkeys(layer.how or "" for layer in row.members)
    return next(iter(labels)) if len(labels) == 1 else "various"
