"""What the pages beside a run's own show: several runs, a plan, forecasts; as JSON for their scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equilibria.errors import EquilibriaError
from equilibria.forecasting import suggest, what_if
from equilibria.forecasting._layers import read_layers
from equilibria.planning import alternatives, plan
from equilibria.serve.follow import UNREADABLE, Followed, Seen
from equilibria.serve.requests import AskedPlan, Readers
from equilibria.views.forecast.page import forecast_page
from equilibria.views.plan.page import plan_page
from equilibria.views.thinning import stretches

MOST_COMPARED = 8
_STRETCHES, _FEW_STRETCHES, _SAMPLES_PER_MEAN = 240, 30, 6  # a mean over fewer scatters as much as they do
_SUGGESTED, _TARGETS = "suggested", ("now", "equilibrium")


def plan_view(asked: AskedPlan, *, title: str, with_alternatives: bool) -> dict[str, object]:
    """The inside of a plan's page and what its charts draw."""
    found = plan(asked.rule, asked.schedule, **asked.settings)
    others = alternatives(asked.rule, asked.schedule, **asked.settings) if with_alternatives else None
    page = plan_page(found, title=title, alternatives=others)
    return {"inside": page.inside(), "data": page.data, "command": asked.command}


def forecast_view(run: Seen, query: Mapping[str, str], readers: Readers) -> dict[str, object]:
    """The inside of a forecast's page: the plan as given and alternatives to it, with a suggestion if one is asked for.

    Raises:
        EquilibriaError: too few samples, no layer that can be forecast, or a query that cannot be.
    """
    asked = dict(query)
    target = asked.pop("suggest", "")
    if target and target not in _TARGETS:
        raise EquilibriaError(f"got suggest={target!r}; expected one of: {', '.join(_TARGETS)}")
    wanted = readers.forecast(asked, read_layers(run))
    scenarios = dict(wanted.scenarios)
    suggestion = None
    if target:
        base = scenarios[next(iter(scenarios))]
        suggestion = suggest(run, schedule=base, steps=wanted.steps, target=target)  # type: ignore[arg-type]
        if suggestion.best.changes:
            scenarios[_SUGGESTED] = suggestion.best.scenario
    page = forecast_page(what_if(run, scenarios, steps=wanted.steps), title=run.name, suggestion=suggestion)
    return {"inside": page.inside(), "data": page.data}


def comparison(runs: Mapping[int, Followed], layer: str | None) -> dict[str, object]:
    """One layer in several runs, over steps.

    Args:
        runs: by number.
        layer: its name; None for the first that all of them have.
    """
    names = _common_first([run.layers for run in runs.values() if run.status.state not in UNREADABLE])
    chosen = layer if layer is not None else next(iter(names), None)
    if chosen is not None and chosen not in names:
        raise EquilibriaError(
            f"got layer={chosen!r}; expected one that a chosen run has, such as {', '.join(names[:3])}"
        )
    return {
        "layer": chosen,
        "layers": names,
        "runs": [{"id": number, "name": run.name, **_course(run, chosen)} for number, run in runs.items()],
    }


def _common_first(lists: Sequence[Sequence[str]]) -> list[str]:
    known = list(dict.fromkeys(name for names in lists for name in names))
    return sorted(known, key=lambda name: -sum(name in names for names in lists))  # stable: else as in the network


def _course(run: Followed, layer: str | None) -> dict[str, Any]:
    """Root mean square angles, measured, predicted and in equilibrium, and norms; or why there are none."""
    if run.status.state in UNREADABLE:
        return {"x": [], "message": f"{run.status.state}: {run.status.message}"}
    table = run.drawn()
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


def _cell(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) and value > 0 else None
