"""The report of a run: one HTML page that needs no network, with findings, charts and a table of the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.diagnosis import summarise_and_diagnose
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.diagnosis.summary import LayerSummary, summarise
from equilibria.findings import Finding, percent, rounded
from equilibria.records.tables import NO_EQUILIBRIUM, SETTLED
from equilibria.views.document import Page, finding_card, finding_cards, scrolling_table
from equilibria.views.run.curves import MOST_LAYERS, MOST_STRETCHES, curves
from equilibria.views.run.headline import STATE_MARKS, TOLERANCE, no_findings, run_headline, worst_first, worst_layer
from equilibria.views.run.metrics import left_out
from equilibria.views.run.sharpness import sharpness_curves, sharpness_section, sharpness_settings
from equilibria.views.words import full_stop, ratio_cell, sentence_case, settings_list, text

_FIRST_FINDINGS = 4  # the others are one click away, so that the charts are near the top
_NO_SAMPLE = '<p class="none">There is nothing to judge before the first sample.</p>'
_HEADINGS = {
    "layer": "",
    "angle ÷\u00a0predicted": "",
    "measured, rad per step": "wide",
    "predicted": "wide",
    "equilibrium": "wide",
    "norm ÷\u00a0equilibrium": "",
    "settles in": "wide",
    "state": "",
}  # and whether a column is for wide screens only
_LAYERS = """<section aria-labelledby="layers-heading">
<h2 id="layers-heading">Layer by layer, the furthest off first</h2>
{}
</section>"""


def write_report(
    samples: pa.Table,
    path: str | Path,
    *,
    metadata: Mapping[str, Any],
    title: str | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] | None = None,
    sharpness: pa.Table | None = None,
    metrics: pa.Table | None = None,
) -> Path:
    """Write a run as one offline HTML page, which appears complete or not at all.

    Args:
        samples: the sample table of a monitor or of a recorded run.
        path: the file to write, in a folder that exists; an existing file is replaced.
        metadata: the metadata of the run; "steps", if there, is its length where the samples end earlier.
        title: shown above the headline; "Training report" without it.
        notes: sentences about the record itself.
        findings: about the run; those of the samples and queries without it.
        sharpness: the table of a sharpness tracker, if there was one.
        metrics: the numbers that the training logged, if it did.

    Returns:
        The path.

    Raises:
        EquilibriaError: if the samples lack a column, the folder does not exist, the path is not a file, or it cannot
            be written.
    """
    page = report_page(
        samples,
        metadata=metadata,
        title=title,
        notes=notes,
        findings=findings,
        sharpness=sharpness,
        metrics=metrics,
    )
    return page.write(path)


def report_page(
    samples: pa.Table,
    *,
    metadata: Mapping[str, Any],
    title: str | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] | None = None,
    sharpness: pa.Table | None = None,
    metrics: pa.Table | None = None,
    drawn: pa.Table | None = None,
    sampled: tuple[int, int] | None = None,
    stretches: int = MOST_STRETCHES,
) -> Page:
    """The report of a run in parts, also of a long run of which only some samples are loaded.

    Args:
        samples: as for `write_report`.
        metadata: as for `write_report`.
        title: as for `write_report`.
        notes: as for `write_report`.
        findings: as for `write_report`.
        sharpness: as for `write_report`.
        metrics: as for `write_report`.
        drawn: the table behind the curves, see `curves`; the samples without it.
        sampled: the number of all sampled steps and samples; those of ``samples`` without it.
        stretches: of a line, see `curves`.

    Returns:
        The page.

    Example:
        >>> from equilibria.records.tables import SAMPLE_FIELDS
        >>> "Nothing was measured yet</h1>" in report_page(SAMPLE_FIELDS.empty_table(), metadata={}).document()
        True
    """
    queries = None if sharpness is None or not sharpness.num_rows else sharpness
    about_sharpness = () if sharpness is None else sharpness_findings(sharpness, metadata=metadata)
    if findings is None:
        summaries, diagnosed = summarise_and_diagnose(samples, metadata=metadata, metrics=metrics)
        findings = (*diagnosed, *about_sharpness)
    else:
        summaries = summarise(samples, metadata=metadata)
    layers = worst_first(summaries)
    headline, deck = run_headline(layers), worst_layer(layers)
    if not layers and about_sharpness:
        headline, deck = sentence_case(about_sharpness[-1].subject), full_stop(about_sharpness[-1].evidence)
    drawn_curves = curves(
        samples if drawn is None else drawn,
        [layer.name for layer in layers],
        steps_per_epoch=metadata.get("steps_per_epoch"),
        most=stretches,
        metrics=metrics,
    )
    settings = [*_settings(samples, layers, metadata, sampled), *sharpness_settings(queries, metadata=metadata)]
    parts = {
        "tolerance": text(percent(TOLERANCE)),
        "headline": text(headline),
        "deck": text(deck),
        "made": "Measured",
        "settings": settings_list(settings),
        "notes": "".join(f'<p class="notice">{text(full_stop(note))}</p>' for note in notes),
        "findings": _findings(findings, layers),
        "metrics_left_out": "" if metrics is None else text(left_out(metrics)),
        "angle_label": text(f"Chart of measured and predicted angle per step of every layer. {headline}"),
        "sharpness": "" if queries is None else sharpness_section(queries, metadata=metadata),
        "layers": "" if queries is not None and not layers else _layer_table(layers, most=MOST_LAYERS),
        "without_layers": " hidden" if queries is not None and not layers else "",
    }
    data = {**drawn_curves, "sharpness": None if queries is None else sharpness_curves(queries)}
    return Page("equilibria.views.run", "Training report" if title is None else title, data, parts)


def _settings(
    samples: pa.Table, layers: Sequence[LayerSummary], metadata: Mapping[str, Any], sampled: tuple[int, int] | None
) -> list[tuple[str, str, str]]:
    optimizers = _optimizers(layers, metadata)
    pairs = [("optimizer" if len(optimizers) == 1 else "optimizers", "; ".join(optimizers), "")] if optimizers else []
    if not layers:
        return pairs
    ends = pc.min_max(samples["step"])
    first, last = ends["min"].as_py(), max(ends["max"].as_py(), metadata.get("steps", 0) - 1)
    steps, rows = sampled or (pc.count_distinct(samples["step"]).as_py(), samples.num_rows)
    pairs.append(("length", *_length(first, last, metadata.get("steps_per_epoch"))))
    pairs.append(("layers", f"{len(layers):,}", ""))
    pairs.append(("sampled", f"{steps:,} steps", f"{rows:,} samples"))
    return pairs


def _optimizers(layers: Sequence[LayerSummary], metadata: Mapping[str, Any]) -> list[str]:
    """The optimizers with their settings over the run, from the samples: the metadata are of one moment."""
    places = {entry["name"]: place for place, entry in enumerate(metadata.get("params", ()))}
    ordered = sorted(layers, key=lambda layer: places.get(layer.name, len(places)))
    settings = [layer.settings_over_run for layer in ordered if layer.angle is not None]
    return list(dict.fromkeys(settings)) or [entry["settings"] for entry in metadata.get("optimizers", ())]


def _length(first: int, last: int, steps_per_epoch: int | None) -> tuple[str, str]:
    steps = f"steps {first:,} to {last:,}"
    if not steps_per_epoch:
        return f"{last + 1 - first:,} steps", steps
    return f"{(last + 1 - first) / steps_per_epoch:,.3g} epochs", f"{steps}, {steps_per_epoch:,} per epoch"


def _findings(findings: Sequence[Finding], layers: Sequence[LayerSummary]) -> str:
    """The findings as cards; those after the first few are folded away."""
    if not findings:
        return finding_cards((), otherwise=no_findings(layers)) if layers else _NO_SAMPLE
    cards = [finding_card(finding) for finding in findings]
    count = len(cards) if len(cards) == _FIRST_FINDINGS + 1 else _FIRST_FINDINGS  # folding a single card saves nothing
    first, others = cards[:count], cards[count:]
    if others:
        first += [f'<details class="more"><summary>{len(others):,} more findings</summary>', *others, "</details>"]
    return "\n".join(first)


def _layer_table(layers: Sequence[LayerSummary], *, most: int) -> str:
    """The section with the table of the layers; the script finds a row by its place, ``data-layer``."""
    if not layers:
        return _LAYERS.format('<p class="none">No layer was measured.</p>')
    labelled = any(layer.how for layer in layers)
    headings = _HEADINGS | ({"invariant": "wide"} if labelled else {})
    head = "".join(_heading(name, kind) for name, kind in headings.items())
    rows = [_row(place, layer, labelled=labelled) for place, layer in enumerate(layers[:most])]
    shown = scrolling_table(f"<tr>{head}</tr>", rows, name="layers-heading", kind="layers")
    return _LAYERS.format(f"{shown}\n{_caption(layers, most)}")


def _heading(name: str, kind: str) -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<th scope="col"{shown}>{escape(name)}</th>'


def _caption(layers: Sequence[LayerSummary], most: int) -> str:
    left_out = len(layers) - most
    more = (
        f" {left_out:,} more layers, closer to their prediction or without one, are left out: "
        "<code>equilibria report --json</code> lists them all."
        if left_out > 0
        else ""
    )
    near = text(percent(TOLERANCE))
    return (
        f'<p class="caption">▼ slower, ▲ faster than predicted by more than {near}; norm: ▼ shorter, ▲ longer than in '
        f"equilibrium. Click a row to see its layer in every chart.{more}</p>"
    )


def _row(place: int, layer: LayerSummary, *, labelled: bool) -> str:
    name = f'<span class="swatch"></span><span>{_breakable(layer.name)}</span>'
    cells = [
        f'<th scope="row"><button type="button" aria-pressed="false">{name}</button></th>',
        ratio_cell(layer.angle_vs_predicted, TOLERANCE),
        *(_number_cell(value) for value in (layer.angle, layer.angle_predicted, layer.angle_equilibrium)),
        ratio_cell(layer.norm_vs_equilibrium, TOLERANCE, words=("shorter", "longer")),
        f'<td class="wide">{_settles_in(layer)}</td>',
        _state_cell(layer),
        *([f'<td class="wide">{escape(layer.how or "")}</td>'] if labelled else []),
    ]
    return f'<tr data-layer="{place}" title="{escape(layer.sentence)}">{"".join(cells)}</tr>'


def _breakable(name: str) -> str:
    """A dotted name that a narrow screen may break after a dot."""
    return escape(name).replace(".", ".<wbr>")


def _number_cell(value: float | None) -> str:
    return f'<td class="wide">{"–" if value is None else rounded(value, all_digits=True)}</td>'


def _settles_in(layer: LayerSummary) -> str:
    """The time until a layer is settled, with its unit; a dash where that is unknown or past."""
    if layer.state == SETTLED or not layer.steps_to_settle:
        return "–"
    if layer.epochs_to_settle is not None:
        return f"{_time(layer.epochs_to_settle)} epochs"
    return f"{math.ceil(layer.steps_to_settle):,} steps"


def _time(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.2g}"


def _state_cell(layer: LayerSummary) -> str:
    state = layer.state or NO_EQUILIBRIUM
    kind = "good" if state == SETTLED else "no-law" if state == NO_EQUILIBRIUM else "bad"
    sign = f'<span aria-hidden="true">{STATE_MARKS[state]}</span>'
    wait = _settles_in(layer)
    more = "" if wait == "–" else f'<small class="narrow-only">{wait}</small>'
    return f'<td class="state {kind}">{sign} {escape(state)}{more}</td>'
