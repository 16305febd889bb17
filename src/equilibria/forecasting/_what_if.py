"""`what_if`: several scenarios for the rest of a run, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from equilibria._display import Printable, renderer
from equilibria.errors import EquilibriaError
from equilibria.forecasting._forecast import Estimate, Forecast, LayerForecast, forecast
from equilibria.forecasting._layers import RunLike, SampledRun, as_run
from equilibria.forecasting._scenario import Scenario
from equilibria.theory.schedules import ScheduleLike


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer under one scenario, in the numbers that people compare.

    Attributes:
        scenario: name of the scenario.
        layer: name of the layer.
        steps_out: number of steps with an angle more than 5 % from equilibrium; NaN if there is none.
        final_angle: radians of the last step, with its 90 % band.
        final_ratio: last angle over its equilibrium; None if there is none.
        final_norm: ||w|| before the last step, with its 90 % band.
        integrated_angle: sum of the angles of all remaining steps, radians: the distance travelled on the sphere.
    """

    scenario: str
    layer: str
    steps_out: Estimate
    final_angle: Estimate
    final_ratio: float | None
    final_norm: Estimate
    integrated_angle: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """Several forecasts of one run.

    Attributes:
        forecasts: the forecasts by name of their scenario; the first is the reference.
    """

    forecasts: Mapping[str, Forecast]

    def __repr__(self) -> str:
        first = next(iter(self.forecasts.values()))
        return f"<WhatIf of {', '.join(self.forecasts)}: {len(first.layers)} layers, to step {first.steps - 1:,}>"

    def outcomes(self, scenario: str) -> tuple[LayerOutcome, ...]:
        """Every layer under one scenario, in the order of the network."""
        if scenario not in self.forecasts:
            raise EquilibriaError(f"got scenario {scenario!r}; expected one of: {', '.join(self.forecasts)}")
        return tuple(layer_outcome(scenario, layer) for layer in self.forecasts[scenario].layers)

    def worst(self, scenario: str) -> LayerOutcome:
        """The layer that is out of equilibrium longest; among equals the one that ends furthest from it."""
        return worst_of(self.outcomes(scenario))

    def table(self) -> Printable:
        """The scenarios side by side: the worst layer of each, and the last angle of every layer."""
        shown: Printable = renderer("forecast.terminal.what_if_table")(self)
        return shown

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML page that needs no network, with a button for every scenario.

        Args:
            path: the file to write; an existing file is replaced.
            title: shown above the headline.
        """
        written: Path = renderer("forecast.page.write_page")(self, path, title=title)
        return written


def what_if(
    run: RunLike, scenarios: Mapping[str, ScheduleLike | Scenario], *, steps: int, start: int | None = None
) -> WhatIf:
    """Forecast one run under several scenarios.

    Args:
        run: as for `forecast`.
        scenarios: learning-rate schedules or scenarios (`Scenario`) by name; the others are compared with the first.
        steps: length of the whole run in optimizer steps, including the recorded ones.
        start: fit only samples before this step and forecast from there; all samples if not given.

    Returns:
        The forecasts; ``table()`` and ``report(path)`` show them.

    Raises:
        EquilibriaError: no scenarios, or a reason of `forecast`; the message names the scenario.
    """
    if not scenarios:
        raise EquilibriaError("got no scenarios; expected at least one, such as {'as planned': 0.1}")
    read = _ReadOnce(as_run(run))
    forecasts = {}
    for name, scenario in scenarios.items():
        try:
            forecasts[name] = forecast(read, schedule=scenario, steps=steps, start=start)
        except EquilibriaError as error:
            raise EquilibriaError(f"{name}: {error}" if len(scenarios) > 1 else str(error)) from error
    return WhatIf(forecasts)


class _ReadOnce:
    """A run whose samples are read once for all scenarios."""

    def __init__(self, run: SampledRun) -> None:
        self.metadata = run.metadata
        self._table = run.samples()

    def samples(self) -> pa.Table:
        """The sample table."""
        return self._table


def layer_outcome(scenario: str, layer: LayerForecast) -> LayerOutcome:
    """One layer's forecast in the numbers that people compare."""
    last = float(layer.angle_equilibrium[-1])
    return LayerOutcome(
        scenario,
        layer.name,
        layer.steps_out,
        Estimate(*(float(band[-1]) for band in (layer.angle.value, layer.angle.low, layer.angle.high))),
        float(layer.angle.value[-1]) / last if last > 0 else None,
        Estimate(*(float(band[-1]) for band in (layer.norm.value, layer.norm.low, layer.norm.high))),
        layer.integrated_angle,
    )


def worst_of(outcomes: Sequence[LayerOutcome]) -> LayerOutcome:
    """The layer that is out of equilibrium longest; among equals the one that ends furthest from it."""

    def badness(outcome: LayerOutcome) -> tuple[float, float]:
        steps_out, ratio = outcome.steps_out.value, outcome.final_ratio
        return -1.0 if math.isnan(steps_out) else steps_out, abs(math.log(ratio)) if ratio else 0.0

    return max(outcomes, key=badness)
