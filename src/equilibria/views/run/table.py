"""The layers of a report as a table, the most wrong first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from equilibria.diagnosis.summary import LayerSummary
from equilibria.records.tables import NO_EQUILIBRIUM, SETTLED
from equilibria.views.run.headline import STATE_MARKS, TOLERANCE
from equilibria.views.words import number, percent, ratio_cell, text

_HEADINGS = {
    "layer": "",
    "angle ÷\u00a0predicted": "",
    "measured, rad per step": "wide",
    "predicted": "wide",
    "equilibrium": "wide",
    "norm ÷\u00a0target": "",
    "settles in": "wide",
    "state": "",
}


def layer_table(layers: Sequence[LayerSummary], *, most: int) -> str:
    """The section with the table, or with a sentence if there is no layer.

    Args:
        layers: the most wrong first; a row carries its place here as ``data-layer``.
        most: how many to show.
    """
    if not layers:
        return _SECTION.format('<p class="none">No layer was measured.</p>')
    labelled = any(layer.how for layer in layers)
    headings = _HEADINGS | ({"invariant": "wide"} if labelled else {})
    head = "".join(_heading(name, kind) for name, kind in headings.items())
    body = "\n".join(_row(place, layer, labelled=labelled) for place, layer in enumerate(layers[:most]))
    return _SECTION.format(
        '<div class="scroll" role="region" aria-labelledby="layers-heading" tabindex="0">\n<table class="layers">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n{_caption(layers, most)}"
    )


_SECTION = """<section aria-labelledby="layers-heading">
<h2 id="layers-heading">Layer by layer, the most wrong first</h2>
{}
</section>"""


def _heading(name: str, kind: str) -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<th scope="col"{shown}>{escape(name)}</th>'


def _caption(layers: Sequence[LayerSummary], most: int) -> str:
    left_out = len(layers) - most
    more = (
        f" {left_out:,} more layers, closer to their prediction or without one, are not shown: "
        "<code>equilibria report --json</code> lists them all."
        if left_out > 0
        else ""
    )
    near = text(percent(TOLERANCE))
    return (
        f'<p class="caption">▼ slower, ▲ faster than predicted by more than {near}; norm: ▼ shorter, ▲ longer than its '
        f"target. Click a row to see its layer in every chart.{more}</p>"
    )


def _row(place: int, layer: LayerSummary, *, labelled: bool) -> str:
    name = f'<span class="swatch"></span><span>{_breakable(layer.name)}</span>'
    cells = [
        f'<th scope="row"><button type="button" aria-pressed="false">{name}</button></th>',
        ratio_cell(layer.angle_vs_predicted, TOLERANCE),
        *(_number_cell(value) for value in (layer.angle, layer.angle_predicted, layer.angle_equilibrium)),
        ratio_cell(layer.norm_vs_equilibrium, TOLERANCE, words=("shorter", "longer")),
        f'<td class="wide">{settles_in(layer)}</td>',
        _state_cell(layer),
        *([f'<td class="wide">{escape(layer.how or "")}</td>'] if labelled else []),
    ]
    return f'<tr data-layer="{place}" title="{escape(layer.sentence)}">{"".join(cells)}</tr>'


def _breakable(name: str) -> str:
    """A dotted name that a narrow screen may break after a dot."""
    return escape(name).replace(".", ".<wbr>")


def _number_cell(value: float | None) -> str:
    return f'<td class="wide">{"–" if value is None else number(value, all_digits=True)}</td>'


def settles_in(layer: LayerSummary) -> str:
    """The time until a layer is settled, with its unit; a dash where that is unknown or past.

    Args:
        layer: its summary.
    """
    if layer.state == SETTLED or not layer.steps_to_settle:
        return "–"
    if layer.epochs_to_settle is not None:
        return f"{_time(layer.epochs_to_settle)} epochs"
    return f"{math.ceil(layer.steps_to_settle):,} steps"


def _time(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.2g}"


def _state_cell(layer: LayerSummary) -> str:
    state = layer.state or NO_EQUILIBRIUM
    kind = "good" if state == SETTLED else "unlawful" if state == NO_EQUILIBRIUM else "bad"
    sign = f'<span aria-hidden="true">{STATE_MARKS[state]}</span>'
    wait = settles_in(layer)
    more = "" if wait == "–" else f'<small class="narrow-only">{wait}</small>'
    return f'<td class="state {kind}">{sign} {escape(state)}{more}</td>'
