"""The report of a run: one HTML page that needs no network, with findings, charts and a table of the layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.diagnosis import diagnose_run
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.noise import noise_of_run
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.diagnosis.summary import summarise_run
from equilibria.findings import Finding, percent
from equilibria.views.document import Page, finding_card, finding_cards
from equilibria.views.run.blocks import block_section
from equilibria.views.run.budget import budget_section
from equilibria.views.run.checkpoints import checkpoint_section
from equilibria.views.run.curves import MOST_LAYERS, MOST_STRETCHES, curves
from equilibria.views.run.headline import TOLERANCE, headline_and_details, most_telling_first, no_findings
from equilibria.views.run.layer_table import layer_table
from equilibria.views.run.metrics import left_out
from equilibria.views.run.noise import noise_section
from equilibria.views.run.sharpness import sharpness_curves, sharpness_section, sharpness_settings
from equilibria.views.words import full_stop, sentence_case, settings_list, text

_FIRST_FINDINGS = 4  # the others are one click away, so that the charts are near the top
_NO_SAMPLE = '<p class="none">There is nothing to judge before the first sample.</p>'


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
    diffusion: pa.Table | None = None,
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
        diffusion: the diffusion table: how far weights turned over many steps.

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
        diffusion=diffusion,
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
    diffusion: pa.Table | None = None,
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
        diffusion: as for `write_report`.
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
    run = sampled_run(samples, metadata=metadata, metrics=metrics)
    if findings is None:
        layers, diagnosed = diagnose_run(run)
        findings = (*diagnosed, *about_sharpness)
    else:
        layers = summarise_run(run)
    headline, deck = headline_and_details(layers, findings)
    if not layers and about_sharpness:
        headline, deck = sentence_case(about_sharpness[-1].subject), full_stop(about_sharpness[-1].evidence)
    headline, _, rest = headline.partition("; ")
    deck = f"{sentence_case(rest)}. {deck}" if rest else deck
    names = _as_drawn(layers, findings)
    drawn_curves = curves(
        _without_void_predictions(samples if drawn is None else drawn, layers),
        names,
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
        "blocks": block_section(layers),
        "budget": budget_section(samples, layers, metadata=metadata),
        "noise": noise_section(noise_of_run(run, diffusion))
        + checkpoint_section(samples, diffusion, metadata=metadata),
        "layers": "" if queries is not None and not layers else layer_table(layers, curves=names[:MOST_LAYERS]),
        "without_layers": " hidden" if queries is not None and not layers else "",
    }
    data = {**drawn_curves, "sharpness": None if queries is None else sharpness_curves(queries)}
    return Page("equilibria.views.run", "Training report" if title is None else title, data, parts)


def _as_drawn(layers: Sequence[LayerSummary], findings: Sequence[Finding]) -> list[str]:
    """The layers that findings name, then the others, the most telling first: charts colour only the first few."""
    said = "\n".join(f"{finding.subject} {finding.evidence}" for finding in findings)
    names = [layer.name for layer in most_telling_first(layers)]
    return sorted(names, key=lambda name: re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", said) is None)


def _without_void_predictions(samples: pa.Table, layers: Sequence[LayerSummary]) -> pa.Table:
    """The samples without predictions for layers that have no law or are idle: some were made before that was known."""
    lawless = [
        layer.name
        for layer in layers
        if (layer.invariant is False and not layer.by_gain) or layer.no_law is not None or layer.idle is not None
    ]
    if not lawless:
        return samples
    void = pc.is_in(samples["param"].cast(pa.string()), value_set=pa.array(lawless, pa.string()))
    for name in ("angle_predicted", "angle_equilibrium", "norm_predicted", "norm_equilibrium"):
        place = samples.column_names.index(name)
        samples = samples.set_column(place, name, pc.if_else(void, pa.scalar(None, pa.float64()), samples[name]))
    return samples


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
    pairs.append(("sampled", f"{steps:,} of {last + 1 - first:,} steps", f"{rows:,} samples"))
    return pairs


def _optimizers(layers: Sequence[LayerSummary], metadata: Mapping[str, Any]) -> list[str]:
    """The optimizers with their settings over the run, from the samples: the metadata are of one moment."""
    settings = dict.fromkeys(layer.settings_over_run for layer in layers if layer.angle is not None)
    # A controller's own layers have fewer settings than those that it leaves to the plain optimizer.
    whole = [text for text in settings if not any(other.startswith(f"{text[:-1]}, ") for other in settings)]
    return whole or [entry["settings"] for entry in metadata.get("optimizers", ())]


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
