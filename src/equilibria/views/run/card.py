"""The notebook cards of a run and of a sharpness tracker."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.siblings import Siblings, folded
from equilibria.findings import Finding
from equilibria.views.notebook import MOST_ROWS, card
from equilibria.views.run.headline import in_short, most_telling_first, run_details
from equilibria.views.run.metrics import last_values
from equilibria.views.run.terminal import most_telling, state_words, unlike_siblings
from equilibria.views.svg import EQUILIBRIUM, MEASURED, PREDICTED, Line, svg_chart
from equilibria.views.thinning import stretches

_STRETCHES = 120
_NUMBERS = {
    "rad per step": "angle",
    "predicted": "angle_predicted",
    "ratio": "angle_vs_predicted",
    "equilibrium": "angle_equilibrium",
    "norm": "norm",
    "equilibrium norm": "norm_equilibrium",
}  # columns -> fields of a summary


def run_card(
    samples: pa.Table,
    layers: Sequence[LayerSummary],
    *,
    findings: Sequence[Finding] = (),
    notes: Sequence[str] = (),
    metrics: pa.Table | None = None,
) -> str:
    """A card with the curves of the most telling layer, one row per layer or kind of layers, and the findings.

    Args:
        samples: a sample table.
        layers: its summaries, in the order of the model.
        findings: of the run.
        notes: sentences about the record itself.
        metrics: the numbers that the training logged.
    """
    rows = folded(layers)
    shown = most_telling(rows, layers, most=MOST_ROWS)
    numbers = {title: field for title, field in _NUMBERS.items() if any(row.values(field) for row in shown)}
    unlike, logged = unlike_siblings(rows), "" if metrics is None else last_values(metrics)
    return card(
        in_short(layers, findings),
        picture=_angles(samples, most_telling_first(layers)[0].name) if layers else "",
        headings=("layer", *numbers, "state"),
        rows=[[_name(row), *(_cell(row, field) for field in numbers.values()), state_words(row)] for row in shown],
        left_out=len(rows) - len(shown),
        notes=[
            *filter(None, [run_details(layers), logged and f"{logged}.", unlike, *notes]),
            *map(_sentences, findings),
        ],
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


def _name(row: Siblings) -> str:
    return row.kind if len(row.members) == 1 else f"{row.kind}, {len(row.members):,} layers"


def _cell(row: Siblings, field: str) -> str:
    """The number of a layer; of several layers the median, the smallest and the largest."""
    values = row.values(field)
    show = _two_decimals if field == "angle_vs_predicted" else _three_digits
    if not values:
        return ""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{show(median(values))} ({low} to {high})"


def _two_decimals(value: float) -> str:
    return f"{value:.2f}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"
