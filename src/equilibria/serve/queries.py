"""Answers to the queries of the pages' scripts, as JSON: a plan, a forecast, a comparison of runs, an explanation.

The command line, to the right of this package, knows the options of plans and forecasts: a query has the same options,
the same checks and the same error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equilibria.comparing import explain
from equilibria.errors import EquilibriaError, one_of
from equilibria.forecasting import Scenario, suggest, what_if
from equilibria.forecasting._layers import RecordedLayers, read_layers
from equilibria.planning import alternatives, plan
from equilibria.serve.follow import UNREADABLE, FollowedRun, RunSnapshot
from equilibria.theory import Rule
from equilibria.theory.schedules import ScheduleLike
from equilibria.views.explanation import explanation_content
from equilibria.views.forecast.page import forecast_page
from equilibria.views.plan.page import plan_page
from equilibria.views.run.metrics import metric_panels
from equilibria.views.thinning import stretches

MOST_COMPARED = 8
_STRETCHES, _FEW_STRETCHES, _SAMPLES_PER_MEAN = 240, 30, 6  # a mean over fewer scatters as much as the samples do
_SUGGESTED, _TARGETS = "suggested", ("now", "equilibrium")


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Arguments for `equilibria.plan`.

    Attributes:
        rule: the optimizer.
        schedule: the learning rate.
        settings: the other arguments.
        command: the command line for the same plan.
    """

    rule: Rule
    schedule: ScheduleLike
    settings: Mapping[str, Any]
    command: str


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """Arguments for `equilibria.forecasting.what_if`.

    Attributes:
        scenarios: by name; the first is the plan of the query.
        steps: length of the whole run.
    """

    scenarios: Mapping[str, Scenario]
    steps: int


@dataclass(frozen=True, slots=True)
class QueryReaders:
    """Functions that read the query strings of the pages' forms; both raise EquilibriaError for a bad query.

    Attributes:
        plan: reads the planner's form.
        forecast: reads the forecast form of a run; its second argument holds the observations of that run.
    """

    plan: Callable[[Mapping[str, str]], PlanQuery]
    forecast: Callable[[Mapping[str, str], RecordedLayers], ForecastQuery]


def plan_view(query: PlanQuery, *, title: str, with_alternatives: bool) -> dict[str, object]:
    """The inside of a plan's page and the data of its charts."""
    computed = plan(query.rule, query.schedule, **query.settings)
    others = alternatives(query.rule, query.schedule, **query.settings) if with_alternatives else None
    page = plan_page(computed, title=title, alternatives=others)
    return {"inside": page.inside(), "data": page.data, "command": query.command}


def forecast_view(run: RunSnapshot, options: Mapping[str, str], readers: QueryReaders) -> dict[str, object]:
    """The inside of a forecast's page: the plan and alternatives to it, and a suggestion if ``suggest`` is an option.

    Raises:
        EquilibriaError: if the run has too few samples or no layer that can be forecast, or the query is bad.
    """
    options = dict(options)
    target = options.pop("suggest", "")
    if target:
        one_of("suggest", target, _TARGETS)
    query = readers.forecast(options, read_layers(run))
    scenarios = dict(query.scenarios)
    suggestion = None
    if target:
        base = scenarios[next(iter(scenarios))]
        suggestion = suggest(run, schedule=base, steps=query.steps, target=target)  # type: ignore[arg-type]
        if suggestion.best.changes:
            scenarios[_SUGGESTED] = suggestion.best.scenario
    page = forecast_page(what_if(run, scenarios, steps=query.steps), title=run.name, suggestion=suggestion)
    return {"inside": page.inside(), "data": page.data}


def comparison_view(runs: Mapping[int, FollowedRun], layer: str | None) -> dict[str, object]:
    """One layer in several runs, over steps.

    Args:
        runs: by number.
        layer: its name; None for the one in which they differ most.
    """
    readable = [run for run in runs.values() if run.status.state not in UNREADABLE]
    names = _common_first([run.layers for run in readable])
    chosen = layer if layer is not None else _most_different(readable, names)
    if chosen is not None and chosen not in names:
        raise EquilibriaError(
            f"got layer={chosen!r}; expected one that a chosen run has, such as {', '.join(names[:3])}"
        )
    return {
        "layer": chosen,
        "layers": names,
        "runs": [
            {"id": number, "name": run.name, "metrics": _metric_curves(run), **_layer_curves(run, chosen)}
            for number, run in runs.items()
        ],
    }


def explanation_view(a: RunSnapshot, b: RunSnapshot) -> dict[str, object]:
    """Why run A turns its layers faster or slower than run B: a sentence, and the sections of the page.

    Raises:
        EquilibriaError: if the runs cannot be compared.
    """
    result = explain(a, b)
    return {"a": a.name, "b": b.name, "headline": result.headline, "inside": explanation_content(result)}


def _common_first(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names, those in the most lists first, else in their own order."""
    known = list(dict.fromkeys(name for names in lists for name in names))
    return sorted(known, key=lambda name: -sum(name in names for names in lists))


def _most_different(runs: Sequence[FollowedRun], names: Sequence[str]) -> str | None:
    """The layer whose mean angle differs most between the runs, of those that most of the runs have.

    Layers with an equilibrium come first: the page opens with the angle over it.
    """
    means = [_mean_angles(run.chart_table()) for run in runs]
    known = {name: [angles[name] for angles in means if name in angles] for name in names}

    def rank(name: str) -> tuple[int, bool, float]:
        angles = [angle for angle, _ in known[name] if angle > 0]
        difference = np.log(max(angles) / min(angles)) if angles else 0.0
        return len(known[name]), any(equilibrium > 0 for _, equilibrium in known[name]), float(difference)

    return max(names, key=rank, default=None)  # the first of those that are alike


def _mean_angles(table: pa.Table) -> dict[str, tuple[float, float]]:
    """By layer, its mean angle and mean equilibrium angle; 0 where there is none."""
    means = table.group_by("param").aggregate([("angle", "mean"), ("angle_equilibrium", "mean")])
    columns = means["param"].to_pylist(), means["angle_mean"].to_pylist(), means["angle_equilibrium_mean"].to_pylist()
    return {name: (angle or 0.0, equilibrium or 0.0) for name, angle, equilibrium in zip(*columns, strict=True)}


def _layer_curves(run: FollowedRun, layer: str | None) -> dict[str, Any]:
    """Root mean squares of the angles (measured, predicted, equilibrium) and norms; or why there are none."""
    if run.status.state in UNREADABLE:
        return {"x": [], "message": f"{run.status.state}: {run.status.message}"}
    table = run.chart_table()
    if layer is not None:
        table = table.filter(pc.equal(table["param"].cast(pa.string()), layer))
    if layer is None or not table.num_rows:
        return {"x": []}
    most = min(max(table.num_rows // _SAMPLES_PER_MEAN, _FEW_STRETCHES), _STRETCHES)
    parts = stretches(table["step"].to_numpy(), np.zeros(table.num_rows), most=most)
    means = {
        name: parts.rms(table[name].to_numpy()) for name in ("angle", "angle_equilibrium", "angle_predicted", "norm")
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        means["ratio"] = means["angle"] / means["angle_equilibrium"]
    columns = {name: [_cell(value) for value in values.tolist()] for name, values in means.items()}
    return {"x": ((parts.first + parts.last) / 2).tolist(), **columns}


def _metric_curves(run: FollowedRun) -> list[dict[str, Any]]:
    """The first few numbers that the training logged, the loss first."""
    if run.status.state in UNREADABLE:
        return []
    return [
        {
            "name": panel.name,
            "note": panel.note,
            "log": panel.is_log,
            "x": panel.steps.tolist(),
            "y": [float(f"{value:.5g}") if np.isfinite(value) else None for value in panel.values.tolist()],
        }
        for panel in metric_panels(run.metrics(), most=_STRETCHES)
    ]


def _cell(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) and value > 0 else None
