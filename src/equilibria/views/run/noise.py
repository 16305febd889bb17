"""Gradient noise scales, curvature along the step and turning over many steps: terminal, notebook, report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from equilibria._display import Printable
from equilibria.diagnosis.noise import GradientNoise, LayerNoise
from equilibria.findings import percent, plain
from equilibria.views.document import html_row, html_table
from equilibria.views.notebook import card
from equilibria.views.svg import EQUILIBRIUM, MEASURED, OTHER, PREDICTED, Line, svg_chart
from equilibria.views.words import full_stop, text

_COLOURS = (MEASURED, PREDICTED, EQUILIBRIUM, OTHER)  # of the layers in the chart
_MOST_ROWS = 40
_NOTHING = "–"


def noise_table(noise: GradientNoise) -> Printable:
    """One line per layer, and one for the network."""
    from equilibria.views._rich import Text, collected_text, columns_table, text_console

    columns, notes = _columns(noise), _notes(noise)
    out = text_console()
    if len(columns) > 1:  # otherwise no layer has a number
        out.print(columns_table(columns, words=("layer",)))
    for note in notes:
        out.print(Text(f"- {note}", style="dim"))
    rows = list(zip(*columns.values(), strict=True))
    picture = _chart(noise.layers)
    return Printable(
        collected_text(out),
        card("Gradient noise", picture=picture, headings=_in_one_line(columns), rows=rows, notes=notes),
    )


def noise_section(noise: GradientNoise) -> str:
    """The section of a report; "" where nothing was measured."""
    numbers = ("mean_share", "curvature", "update_gain")
    has_numbers = any(getattr(layer, name) is not None for layer in noise.layers for name in numbers)
    chart = _chart(noise.layers)
    if not has_numbers and not chart:
        return ""
    parts = ['<section aria-labelledby="noise-heading">']
    parts.append('<h2 id="noise-heading">Gradient noise, and turning over many steps</h2>')
    if chart:
        parts.append(f'<div class="picture">{chart}</div>')
        parts.append(
            '<p class="caption">How far n steps turn a layer, D(n) = −ln cos, for one step of D(1), over how far they '
            "would with independent gradients under the same optimizer (n for plain SGD, more with momentum). "
            "1: gradients are independent; below 1: later steps take back what earlier ones did; above 1: they go on "
            "with it.</p>"
        )
    if has_numbers:
        columns = _columns(noise)
        rows = [html_row(row[0], row[1:]) for row in zip(*columns.values(), strict=True)]
        parts.append(html_table(_in_one_line(columns), rows, name="noise-heading", kind="numeric"))
        parts.append(f'<p class="caption">{" ".join(text(full_stop(note)) for note in _notes(noise))}</p>')
    return "\n".join([*parts, "</section>"])


def _columns(noise: GradientNoise) -> dict[str, list[str]]:
    """The cells by title (of two lines), the network first; columns without a number are left out."""
    layers = [noise.network, *noise.layers[: _MOST_ROWS - 1]]
    unit = "noise scale\n÷ batch" if noise.batch_size is None else "noise\nscale"
    columns = {
        "layer": [layer.name for layer in layers],
        "mean\ngradient": [_share(layer) for layer in layers],
        unit: [_scale(layer, noise.batch_size) for layer in layers],
        "lr ×\ncurvature": [_number(layer.lr_curvature, layer.curvature_doubt) for layer in layers],
        "curvature": [_number(layer.curvature, layer.curvature_doubt) for layer in layers],
        "D(16) ÷\nindependent": [_turning(layer, 16) for layer in layers],
        "D(1024) ÷\nindependent": [_turning(layer, 1024) for layer in layers],
        "κ": [_number(layer.update_gain, "") for layer in layers],
    }
    return {title: cells for title, cells in columns.items() if any(cell != _NOTHING for cell in cells)}


def _in_one_line(titles: Iterable[str]) -> list[str]:
    return [title.replace("\n", " ") for title in titles]


def _share(layer: LayerNoise) -> str:
    if layer.mean_share is None or layer.share_error is None:
        return _NOTHING
    return f"{percent(max(layer.mean_share, 0.0))} ± {percent(layer.share_error)}"


def _scale(layer: LayerNoise, batch_size: int | None) -> str:
    if layer.noise_scale is None:
        return _NOTHING
    return _marked(plain(layer.noise_scale * (batch_size or 1)), layer.doubt)


def _number(value: float | None, doubt: str) -> str:
    return _NOTHING if value is None or not math.isfinite(value) else _marked(f"{value:.2g}", doubt)


def _marked(number: str, doubt: str) -> str:
    return f"{number}?" if doubt else number


def _turning(layer: LayerNoise, distance: int) -> str:
    value, error = ((numbers or {}).get(distance, math.nan) for numbers in (layer.turning, layer.turning_error))
    return _NOTHING if math.isnan(value) else f"{value:.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def _notes(noise: GradientNoise) -> list[str]:
    """The window, the unit and why numbers are marked; a reason that several layers share is said once."""
    notes, network = [], noise.network
    if network.first_step is not None:
        batch = "" if noise.batch_size is None else f", batch {noise.batch_size:,}"
        notes.append(f"steps {network.first_step:,}-{network.last_step:,}{batch}; mean gradient: its share of E|g|²")
    if any(layer.curvature is not None for layer in noise.layers):
        notes.append("curvature: a layer's part of e'He along the step e, the other layers' steps included")
    if any(layer.turning for layer in noise.layers):
        notes.append(
            "D(n): how far n steps turn a layer, over n steps with independent gradients under the same optimizer; "
            "below 1 later steps take back what earlier ones did"
        )
    if any(layer.update_gain is not None for layer in noise.layers):
        notes.append(
            "update gain κ: AdamW's squared update over that of independent gradients; its root is in the equilibrium "
            "norm"
        )
    notes += _reasons("noise scale", [(layer.name, layer.doubt) for layer in (network, *noise.layers)])
    notes += _reasons("curvature", [(layer.name, layer.curvature_doubt) for layer in noise.layers])
    left_out = len(noise.layers) - _MOST_ROWS + 1
    return [*notes, *([f"{left_out:,} more layers: run.noise().layers"] if left_out > 0 else [])]


def _reasons(what: str, doubts: Sequence[tuple[str, str]]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, doubt in doubts:
        if doubt:
            names.setdefault(doubt, []).append(name)
    return [
        f"? {what} of {own[0] if len(own) == 1 else f'{own[0]} and {len(own) - 1:,} more'}: {doubt}"
        for doubt, own in list(names.items())[:3]
    ]


def _chart(layers: Sequence[LayerNoise]) -> str:
    """D(n) over that of independent gradients, of a few layers over log2 n."""
    known = [layer for layer in layers if layer.turning]
    spread = [known[round(place * (len(known) - 1) / 3)] for place in range(4)] if len(known) > 4 else known
    lines = [
        Line(
            layer.name,
            [math.log2(n) for n in sorted(layer.turning)],
            [layer.turning[n] for n in sorted(layer.turning)],
            colour,
            marked=True,
        )
        for layer, colour in zip(spread, _COLOURS, strict=False)
        if layer.turning
    ]
    return svg_chart(lines, x="log2 of the steps n", y="D(n) / independent", log=True)
