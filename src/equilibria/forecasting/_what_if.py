"""`what_if`: several courses of the rest of a run, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from equilibria._display import renderer
from equilibria.errors import EquilibriaError
from equilibria.forecasting._forecast import Forecast, LayerForecast, Total, forecast
from equilibria.forecasting._observed import RunLike, as_run
from equilibria.forecasting._scenario import Scenario
from equilibria.theory.schedules import ScheduleLike


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scenario makes of one layer.

    Attributes:
        scenario: its name.
        layer: the layer's.
        steps_out: steps whose angle is further than 5 % from equilibrium; NaN without one.
        final_angle: radians of the last step, with its 90 % band.
        final_ratio: the same over the equilibrium angle; None without one.
        final_norm: ||w|| before the last step, with its 90 % band.
        integrated_angle: sum of the angles of all remaining steps, radians: the distance travelled on the sphere.
    """

    scenario: str
    layer: str
    steps_out: Total
    final_angle: Total
    final_ratio: float | None
    final_norm: Total
    integrated_angle: Total


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """Several forecasts of one run.

    Attributes:
        forecasts: by the name of their scenario.
    """

    forecasts: Mapping[str, Forecast]

    def __repr__(self) -> str:
        first = next(iter(self.forecasts.values()))
        return f"<WhatIf of {', '.join(self.forecasts)}: {len(first.layers)} layers, to step {first.steps - 1:,}>"

    def outcomes(self, scenario: str) -> tuple[Outcome, ...]:
        """Every layer under one scenario, in the order of the network."""
        if scenario not in self.forecasts:
            known = ", ".join(self.forecasts)
            raise EquilibriaError(f"got scenario {scenario!r}; expected one of: {known}")
        return tuple(outcome(scenario, layer) for layer in self.forecasts[scenario].layers)

    def worst(self, scenario: str) -> Outcome:
        """The layer that is out of equilibrium the longest; among equals the one that ends furthest from it."""
        return worst_of(self.outcomes(scenario))

    def table(self) -> None:
        """Print the scenarios side by side: the worst layer of each, and the last angle of every layer."""
        renderer("forecast.terminal.print_what_if")(self)

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML page that needs no network, with a button for every scenario.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline.
        """
        shown: Path = renderer("forecast.page.write_page")(self, path, title=title)
        return shown


def what_if(
    run: RunLike, scenarios: Mapping[str, ScheduleLike | Scenario], *, steps: int, start: int | None = None
) -> WhatIf:
    """Forecast one run under several scenarios.

    Args:
        run: as for `forecast`.
        scenarios: courses of the rest of the run by name: a learning-rate schedule, or a `Scenario`; the first is what
            the others are compared with.
        steps: length of the whole run in optimizer steps, those recorded included.
        start: fit only samples before this step and forecast from there; everything recorded without.

    Returns:
        The forecasts; ``table()`` and ``report(path)`` show them.

    Raises:
        EquilibriaError: no scenarios, or as `forecast`; the message names the scenario.
    """
    if not scenarios:
        raise EquilibriaError("got no scenarios; expected at least one, such as {'as planned': 0.1}")
    read = _Read(as_run(run))
    found = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = forecast(read, schedule=scenario, steps=steps, start=start)
        except EquilibriaError as error:
            raise EquilibriaError(f"{name}: {error}" if len(scenarios) > 1 else str(error)) from error
    return WhatIf(found)


class _Read:
    """A run whose samples are read once."""

    def __init__(self, run: Any) -> None:
        self.metadata: Mapping[str, Any] = run.metadata
        self._table: pa.Table = run.samples()

    def samples(self) -> pa.Table:
        """The sample table."""
        return self._table


def outcome(scenario: str, layer: LayerForecast) -> Outcome:
    """The numbers of one layer's forecast that people compare."""
    last = float(layer.angle_equilibrium[-1])
    return Outcome(
        scenario,
        layer.name,
        layer.steps_out,
        Total(*(float(band[-1]) for band in (layer.angle.value, layer.angle.low, layer.angle.high))),
        float(layer.angle.value[-1]) / last if last > 0 else None,
        Total(*(float(band[-1]) for band in (layer.norm.value, layer.norm.low, layer.norm.high))),
        layer.integrated_angle,
    )


def worst_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that is out of equilibrium the longest; among equals the one that ends furthest from it."""
    return max(outcomes, key=_badness)


def _badness(found: Outcome) -> tuple[float, float]:
    ratio = found.final_ratio
    return (
        -1.0 if math.isnan(found.steps_out.value) else found.steps_out.value,
        abs(math.log(ratio)) if ratio else 0.0,
    )
