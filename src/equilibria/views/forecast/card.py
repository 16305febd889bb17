"""A forecast as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.forecasting._what_if import layer_outcome, worst_of
from equilibria.views.notebook import GOAL, MEASURED, PREDICTED, Line, card, svg_chart

if TYPE_CHECKING:
    from equilibria.forecasting import Forecast, LayerOutcome

_HEADINGS = ("layer", "last rad/step", "over equilibrium", "last norm", "rad travelled", "steps out of equilibrium")


def forecast_card(forecast: Forecast) -> str:
    """The worst layer measured and forecast, with its band; a row per layer; the findings."""
    outcomes = [layer_outcome("", layer) for layer in forecast.layers]
    title = f"Forecast of {len(outcomes)} layers, steps {forecast.first:,} to {forecast.steps - 1:,}"
    refused = [f"{name} cannot be forecast: {reason}" for name, reason in forecast.refused.items()]
    if not outcomes:
        return card(title, notes=refused)
    worst = worst_of(outcomes).layer
    findings = [f"{finding.subject}: {finding.evidence}. {finding.remedy}" for finding in forecast.findings]
    return card(
        f"{title}; shown: {worst}, the longest out of equilibrium",
        picture=_picture(forecast, worst),
        headings=_HEADINGS,
        rows=[_row(outcome) for outcome in outcomes],
        notes=[*findings, *refused],
    )


def _picture(forecast: Forecast, name: str) -> str:
    unit = forecast.steps_per_epoch or 1
    layer, before = forecast[name], forecast.measured(name)
    x = layer.step / unit
    lines = [
        Line("measured", before.step / unit, before.angle, MEASURED),
        Line("band", x, layer.angle.low, PREDICTED, dashed=True),
        Line("band", x, layer.angle.high, PREDICTED, dashed=True),
        Line("equilibrium", x, layer.angle_equilibrium, GOAL, dashed=True),
        Line("forecast", x, layer.angle.value, PREDICTED),
    ]
    return svg_chart(lines, x="epochs" if forecast.steps_per_epoch else "steps", y="rad per step", log=True)


def _row(outcome: LayerOutcome) -> list[str]:
    return [
        outcome.layer,
        f"{outcome.final_angle.value:.3g}",
        "" if outcome.final_ratio is None else f"{outcome.final_ratio:.2f}",
        f"{outcome.final_norm.value:.3g}",
        f"{outcome.integrated_angle.value:.3g}",
        f"{outcome.steps_out.value:,.0f}",
    ]
