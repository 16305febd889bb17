"""The notebook cards of a run and of a sharpness tracker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equilibria.diagnosis.summary import LayerSummary
from equilibria.findings import Finding
from equilibria.views.notebook import EQUILIBRIUM, MEASURED, PREDICTED, Line, card, svg_chart
from equilibria.views.run.headline import run_headline, worst_first, worst_layer
from equilibria.views.run.metrics import last_values
from equilibria.views.run.terminal import state_word
from equilibria.views.thinning import stretches

_STRETCHES = 120
_HEADINGS = ("layer", "rad per step", "predicted", "ratio", "norm", "equilibrium norm", "state")


def run_card(
    samples: pa.Table,
    layers: Sequence[LayerSummary],
    *,
    findings: Sequence[Finding] = (),
    notes: Sequence[str] = (),
    metrics: pa.Table | None = None,
) -> str:
    """A card with the curves of the layer that is furthest off, one row per layer, and the findings.

    Args:
        samples: a sample table.
        layers: its summaries.
        findings: of the run.
        notes: sentences about the record itself.
        metrics: the numbers that the training logged.
    """
    logged = "" if metrics is None else last_values(metrics)
    shown = worst_first(layers)
    return card(
        f"{run_headline(layers)}. {worst_layer(layers)}",
        picture=_angles(samples, shown[0].name) if shown else "",
        headings=_HEADINGS,
        rows=[_row(layer) for layer in shown],
        notes=[*([f"{logged}."] if logged else []), *notes, *map(_sentences, findings)],
    )


def tracker_card(queries: pa.Table, *, title: str, findings: Sequence[Finding] = ()) -> str:
    """A card with sharpness over threshold along the run, the last queries, and the findings.

    Args:
        queries: a sharpness table.
        title: what was tracked.
        findings: of the tracker.
    """
    columns = queries.to_pydict()
    x = columns["step"]
    lines = [
        Line("edge of stability", x, [1.0] * len(x), EQUILIBRIUM, dashed=True),
        Line("R = sharpness / threshold", x, columns["ratio"], MEASURED),
    ]
    rows = list(zip(*(columns[name] for name in ("step", "sharpness", "threshold", "ratio", "state")), strict=True))
    return card(
        title,
        picture=svg_chart(lines, x="steps", y="R"),
        headings=("step", "sharpness", "threshold", "R", "state"),
        rows=[[f"{step:,}", *(f"{value:.4g}" for value in numbers), state] for step, *numbers, state in rows[:-6:-1]],
        notes=[*map(_sentences, findings)],
    )


def _sentences(finding: Finding) -> str:
    return f"{finding.subject}: {finding.evidence}. {finding.remedy}"


def _angles(samples: pa.Table, name: str) -> str:
    own = samples.filter(pc.equal(samples["param"].cast(pa.string()), name))
    parts = stretches(own["step"].to_numpy(), np.zeros(own.num_rows, np.int64), most=_STRETCHES)
    lines = [
        Line(label, parts.first.tolist(), parts.rms(own[column].to_numpy()).tolist(), colour, dashed=dashed)
        for label, column, colour, dashed in (
            ("measured", "angle", MEASURED, False),
            ("predicted", "angle_predicted", PREDICTED, True),
            ("equilibrium", "angle_equilibrium", EQUILIBRIUM, True),
        )
    ]
    return svg_chart(lines, x="steps", y=f"rad per step of {name}", log=True)


def _row(layer: LayerSummary) -> list[str]:
    ratio = layer.angle_vs_predicted
    return [
        layer.name,
        _number(layer.angle),
        _number(layer.angle_predicted),
        "" if ratio is None else f"{ratio:.2f}",
        _number(layer.norm),
        _number(layer.norm_equilibrium),
        state_word(layer),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
