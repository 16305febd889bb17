"""The norm budget in the report of a run: why norms grow or fall, as a stacked picture and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from equilibria.diagnosis.budget import LayerBudget, budgets_over_time
from equilibria.diagnosis.layer_summary import LayerSummary, gain_text
from equilibria.diagnosis.run import sampled_run
from equilibria.views.document import html_row, html_table
from equilibria.views.svg import EQUILIBRIUM, MEASURED, NARROW, OTHER, PREDICTED, Line, svg_stack
from equilibria.views.words import text

_MOST_ROWS, _MOST_PICTURES = 40, 3
_NOTHING = "–"
_HEADINGS = ("layer", "change of ln ‖w‖²", "random steps", "gradient", "decay", "gain G")
_OF_PICTURES = "The norms that change fastest, in up to 40 stretches of the run."
_CAPTION = (
    "Hundredths per 100 steps, over the window of the table of layers. Random steps: F times the squared angle, with "
    "the F of the optimizer. Gradient: what is left, the pull of the gradient before momentum as the optimizer scales "
    "it; unevenly scaled gradients make it look too far inward. A norm is in equilibrium where the three cancel. G "
    "with its standard error is of the last sample."
)


def budget_section(samples: pa.Table, layers: Sequence[LayerSummary], *, metadata: Mapping[str, Any]) -> str:
    """The section of a report; "" where no layer has a budget."""
    known = [layer for layer in layers if layer.budget is not None]
    if not known:
        return ""
    fastest = sorted(known, key=_change, reverse=True)[:_MOST_PICTURES]
    run = sampled_run(samples, metadata=metadata)
    over_time = dict(zip(run.series.names, budgets_over_time(run), strict=True))
    pictures = [(layer.name, _picture(over_time[layer.name])) for layer in fastest]
    rows = [html_row(layer.name, _cells(layer, layer.budget)) for layer in known[:_MOST_ROWS] if layer.budget]
    left_out = len(known) - _MOST_ROWS
    more = f" {left_out:,} more layers are left out." if left_out > 0 else ""
    sentence = "" if fastest[0].budget is None else f"{fastest[0].name} {fastest[0].budget.sentence}."
    return "\n".join(
        [
            '<section aria-labelledby="budget-heading">',
            '<h2 id="budget-heading">Why norms change</h2>',
            f"<p>{text(sentence)}</p>",
            '<div class="pictures">',
            *(
                f'<figure>{picture}<figcaption class="caption">{text(name)}</figcaption></figure>'
                for name, picture in pictures
                if picture
            ),
            "</div>",
            f'<p class="caption">{text(_OF_PICTURES)}</p>',
            html_table(_HEADINGS, rows, name="budget-heading", kind="numeric"),
            f'<p class="caption">{text(_CAPTION + more)}</p>',
            "</section>",
        ]
    )


def _change(layer: LayerSummary) -> float:
    return 0.0 if layer.budget is None else abs(layer.budget.growth)


def _cells(layer: LayerSummary, budget: LayerBudget) -> list[str]:
    parts = (budget.growth, budget.diffusion, budget.pull, budget.decay)
    return [*(f"{100 * part:+.1f}" for part in parts), gain_text(layer) or _NOTHING]


def _picture(stretches: Sequence[LayerBudget]) -> str:
    middle = [(stretch.first_step + stretch.last_step) / 2 for stretch in stretches]

    def line(label: str, field: str, colour: str) -> Line:
        return Line(label, middle, [100 * float(getattr(stretch, field)) for stretch in stretches], colour)

    parts = [
        line("random steps", "diffusion", PREDICTED),
        line("gradient", "pull", EQUILIBRIUM),
        line("decay", "decay", OTHER),
    ]
    total = line("change", "growth", MEASURED)
    return svg_stack(parts, total, x="step", y="change of ln ‖w‖² per 100 steps, hundredths", width=NARROW)
