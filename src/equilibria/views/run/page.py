"""A run as one HTML page that needs no network: measured against predicted, layer by layer, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.diagnosis.summary import LayerSummary, summarise
from equilibria.findings import Finding
from equilibria.views.document import Page, card, write_document
from equilibria.views.run.curves import MOST_LAYERS, MOST_STRETCHES, curves
from equilibria.views.run.headline import TOLERANCE, headline, without_findings, worst, worst_first
from equilibria.views.run.sharpness import sharpness_curves, sharpness_section, sharpness_settings
from equilibria.views.run.table import layer_table
from equilibria.views.words import full_stop, percent, sentence_case, settings_list, text

_FIRST_FINDINGS = 4  # the rest is one click away, so that the charts are near the top


def write_report(
    samples: pa.Table,
    path: str | Path,
    *,
    metadata: Mapping[str, Any],
    title: str | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] | None = None,
    sharpness: pa.Table | None = None,
) -> Path:
    """Write a run as one offline HTML page.

    The page appears complete or not at all: it is written beside its target and then moved into place.

    Args:
        samples: the sample table, of a monitor or of a recorded run.
        path: the file to write, in a folder that exists; an existing file is replaced.
        metadata: the metadata of the run; with "steps", its length where that is more than the samples show.
        title: shown above the headline; "Training report" without it.
        notes: what a reader should know about the record itself, as sentences.
        findings: what there is to say about the run; by default what the samples and queries show.
        sharpness: the table of a sharpness tracker, if there was one.

    Returns:
        The path.

    Raises:
        EquilibriaError: the samples lack a column, the folder does not exist, the path is not a file, or it cannot be
            written.
    """
    page = report_html(samples, metadata=metadata, title=title, notes=notes, findings=findings, sharpness=sharpness)
    return write_document(path, page)


def report_html(
    samples: pa.Table,
    *,
    metadata: Mapping[str, Any],
    title: str | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] | None = None,
    sharpness: pa.Table | None = None,
) -> str:
    """A run as the text of one HTML page; its scripts, styles and data are inside.

    Args:
        samples: the sample table, of a monitor or of a recorded run.
        metadata: the metadata of the run; with "steps", its length where that is more than the samples show.
        title: shown above the headline; "Training report" without it.
        notes: what a reader should know about the record itself, as sentences.
        findings: what there is to say about the run; by default what the samples and queries show.
        sharpness: the table of a sharpness tracker, if there was one.

    Returns:
        HTML.

    Example:
        >>> from equilibria.records.tables import SAMPLE_FIELDS
        >>> "Nothing was measured yet</h1>" in report_html(SAMPLE_FIELDS.empty_table(), metadata={})
        True
    """
    return report_page(
        samples, metadata=metadata, title=title, notes=notes, findings=findings, sharpness=sharpness
    ).document()


def report_page(
    samples: pa.Table,
    *,
    metadata: Mapping[str, Any],
    title: str | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] | None = None,
    sharpness: pa.Table | None = None,
    drawn: pa.Table | None = None,
    sampled: tuple[int, int] | None = None,
    stretches: int = MOST_STRETCHES,
) -> Page:
    """The same in parts, also of a long run of which only a part of the samples is at hand.

    Args:
        samples: as for `report_html`, like the next five.
        metadata: of the run.
        title: above the headline.
        notes: about the record.
        findings: about the run.
        sharpness: of a tracker.
        drawn: the table that the curves are made of, see `curves`; the samples without it.
        sampled: how many steps and samples there are in all; what ``samples`` holds without it.
        stretches: of a line, see `curves`.
    """
    layers = worst_first(summarise(samples, metadata=metadata))
    queries = None if sharpness is None or not sharpness.num_rows else sharpness
    about_sharpness = () if sharpness is None else sharpness_findings(sharpness, metadata=metadata)
    found = (*diagnose(samples, metadata=metadata), *about_sharpness) if findings is None else findings
    said, worst_said = headline(layers), worst(layers)
    if not layers and about_sharpness:
        said, worst_said = sentence_case(about_sharpness[-1].subject), full_stop(about_sharpness[-1].evidence)
    names = [layer.name for layer in layers]
    table, epoch = samples if drawn is None else drawn, metadata.get("steps_per_epoch")
    shown = curves(table, names, steps_per_epoch=epoch, most=stretches)
    settings = [*_settings(samples, layers, metadata, sampled), *sharpness_settings(queries, metadata=metadata)]
    parts = {
        "tolerance": text(percent(TOLERANCE)),
        "headline": text(said),
        "worst": text(worst_said),
        "settings": settings_list(settings),
        "notes": "".join(f'<p class="notice">{text(full_stop(note))}</p>' for note in notes),
        "findings": _findings(found, layers),
        "angle_label": text(f"Chart of measured and predicted angle per step of every layer. {said}"),
        "sharpness": "" if queries is None else sharpness_section(queries, metadata=metadata),
        "layers": "" if queries is not None and not layers else layer_table(layers, most=MOST_LAYERS),
        "without_layers": " hidden" if queries is not None and not layers else "",
    }
    data = {**shown, "sharpness": None if queries is None else sharpness_curves(queries)}
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
    """With their settings over the run as the samples have them; the metadata are of one moment."""
    places = {entry["name"]: place for place, entry in enumerate(metadata.get("params", ()))}
    ordered = sorted(layers, key=lambda layer: places.get(layer.name, len(places)))
    told = [layer.course for layer in ordered if layer.angle is not None]
    return list(dict.fromkeys(told)) or [entry["settings"] for entry in metadata.get("optimizers", ())]


def _length(first: int, last: int, steps_per_epoch: int | None) -> tuple[str, str]:
    steps = f"steps {first:,} to {last:,}"
    if not steps_per_epoch:
        return f"{last + 1 - first:,} steps", steps
    return f"{(last + 1 - first) / steps_per_epoch:,.3g} epochs", f"{steps}, {steps_per_epoch:,} per epoch"


def _findings(findings: Sequence[Finding], layers: Sequence[LayerSummary]) -> str:
    """The first few as cards, the others folded away."""
    if not findings:
        return _nothing_found(layers) if layers else _NOTHING_TO_SAY
    cards = [card(finding) for finding in findings]
    count = len(cards) if len(cards) == _FIRST_FINDINGS + 1 else _FIRST_FINDINGS  # to fold one card saves nothing
    first, others = cards[:count], cards[count:]
    if others:
        first += [f'<details class="more"><summary>{len(others):,} more findings</summary>', *others, "</details>"]
    return "\n".join(first)


def _nothing_found(layers: Sequence[LayerSummary]) -> str:
    title, sentence = without_findings(layers)
    return f'<article class="finding"><h3>{text(title)}</h3><p>{text(sentence)}</p></article>'


_NOTHING_TO_SAY = '<p class="none">There is nothing to judge before the first sample.</p>'
