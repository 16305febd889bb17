"""`forecast` and `what_if`: norm, angle and effective lr of every layer over the rest of a run, from its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibria._display import Printable, renderer
from equilibria.errors import EquilibriaError, whole, within
from equilibria.findings import Finding, counted
from equilibria.forecasting._findings import assumptions, forecast_findings
from equilibria.forecasting._fit import Fit, fit
from equilibria.forecasting._gain import GainFit
from equilibria.forecasting._layers import Cohort, RecordedLayers, RunLike, read_layers
from equilibria.forecasting._paths import NINETY, Paths, integrate
from equilibria.forecasting._scenario import GroupSchedule, Scenario, group_schedules
from equilibria.planning._phases import cut, thinned
from equilibria.theory._reals import Array
from equilibria.theory.rules import Rule
from equilibria.theory.schedules import ScheduleLike

_CURVE_POINTS = 500
_MOST_STEPS = 100_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """A curve and the band that is expected to hold 90 % of the measurements.

    Attributes:
        value: the central forecast.
        low: lower end of the band.
        high: upper end of the band.
    """

    value: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the ends of its 90 % band."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerSamples:
    """The recorded samples of one layer.

    Attributes:
        step: the sampled steps.
        angle: radians of each step.
        norm: ||w|| before each step.
        lr: learning rate of each step.
    """

    step: NDArray[np.int64]
    angle: Array
    norm: Array
    lr: Array


@dataclass(frozen=True, slots=True, eq=False)
class LayerForecast:
    """One layer from the first forecast step to the end of the run.

    Attributes:
        name: the parameter (or its row).
        law: "invariant", or "measured gain" for a matrix by its growth gain.
        rule: its optimizer with the settings of the last sample.
        step: the steps shown: about 500, with both sides of every change of phase.
        lr: learning rate of these steps.
        weight_decay: weight decay of these steps.
        angle: radians of each step; the band is for single steps, as a sample measures them.
        norm: ||w|| before each step.
        effective_lr: lr / ||w||^2.
        angle_equilibrium: equilibrium angle of lr x wd, radians; 0 if there is none.
        unit_grad_sq: the forecast of L; NaN by the measured gain, which needs no L.
        integrated_angle: sum of the angles of all steps, radians: the distance travelled on the sphere.
        steps_out: number of steps with an angle more than 5 % from equilibrium; NaN if there is none.
        validity: why the band is wider than usual, in sentences; empty if it is not.
    """

    name: str
    law: str
    rule: Rule
    step: NDArray[np.int64]
    lr: Array
    weight_decay: Array
    angle: Band
    norm: Band
    effective_lr: Band
    angle_equilibrium: Array
    unit_grad_sq: Array
    integrated_angle: Estimate
    steps_out: Estimate
    validity: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The result of `forecast`.

    Attributes:
        scenario: the settings of the rest of the run.
        first: the first forecast step, the one after the last fitted sample.
        steps: length of the whole run.
        layers: one per layer that can be forecast.
        refused: the other layers, with the reason.
        findings: notable facts, warnings first.
        assumptions: the assumptions behind the forecast, in sentences.
        steps_per_epoch: None if the run does not record it.
    """

    scenario: Scenario
    first: int
    steps: int
    layers: tuple[LayerForecast, ...]
    refused: Mapping[str, str]
    findings: tuple[Finding, ...]
    assumptions: tuple[str, ...]
    steps_per_epoch: int | None
    _parts: tuple[tuple[Cohort, Fit | GainFit, GroupSchedule], ...]

    def __repr__(self) -> str:
        return f"<Forecast of {counted(len(self.layers), 'layer')}, steps {self.first:,} to {self.steps - 1:,}>"

    def _repr_html_(self) -> str:
        shown: str = renderer("forecast.tables.forecast_card")(self)
        return shown

    def __getitem__(self, name: str) -> LayerForecast:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = ", ".join(layer.name for layer in self.layers)
        refusal = self.refused.get(name)
        reason = f"which was refused ({refusal})" if refusal else "which is not in this run"
        raise EquilibriaError(f"got layer {name!r}, {reason}; expected one of: {names}")

    def measured(self, name: str) -> LayerSamples:
        """The recorded samples of a layer before the forecast begins."""
        cohort, _, _, layer = self._part(name)
        return LayerSamples(cohort.step, cohort.angle[:, layer], np.sqrt(cohort.norm_sq[:, layer]), cohort.lr)

    def full(self, name: str) -> LayerForecast:
        """One layer at every single step."""
        cohort, fitted, schedule, layer = self._part(name)
        paths = integrate(cohort, fitted, schedule, shown=np.arange(schedule.steps))
        return layer_forecast(cohort, fitted, schedule, paths, layer)

    def _part(self, name: str) -> tuple[Cohort, Fit | GainFit, GroupSchedule, int]:
        self[name]  # raises for an unknown layer
        cohort, fitted, schedule = next(part for part in self._parts if name in part[0].names)
        return cohort, fitted, schedule, cohort.names.index(name)

    def table(self) -> Printable:
        """One line per layer: its last angle and norm, its steps out of equilibrium, and the angle it travels."""
        shown: Printable = renderer("forecast.tables.forecast_table")(self)
        return shown

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the forecast as one HTML page that needs no network.

        Args:
            path: the file to write; an existing file is replaced.
            title: shown above the headline.
        """
        written: Path = renderer("forecast.page.forecast_page")(self, title=title).write(path)
        return written


def forecast(
    run: RunLike,
    *,
    schedule: ScheduleLike | Scenario,
    steps: int,
    weight_decay: ScheduleLike | None = None,
    batch_factor: float = 1.0,
    rescale: bool = False,
    start: int | None = None,
) -> Forecast:
    """Forecast norm, angle and effective lr over the rest of a run, of every layer that obeys a law.

    Scale-invariant layers follow their L, other matrices with weight decay their measured growth gain.

    Args:
        run: the result of `equilibria.watch` or `equilibria.read_run`, or the directory of a run.
        schedule: learning rate of the whole run as a function of its step (any form that
            `theory.schedules.as_schedule` takes), for the first layer's parameter group; the other groups keep their
            ratio to it. Or a `Scenario`, which includes weight_decay, batch_factor and rescale.
        steps: length of the whole run in optimizer steps, including the recorded ones.
        weight_decay: weight decay of the first layer's group; that of the last sample if not given.
        batch_factor: batch size from now on over that of the record.
        rescale: rescale weights and optimizer state at every change of lr or weight decay, as
            `equilibria.control.RescaleOnDecay` does.
        start: fit only samples before this step and forecast from there; all samples if not given.

    Returns:
        The forecast.

    Raises:
        EquilibriaError: not a run, too few samples, no layer that can be forecast, or nothing left to forecast.

    Example:
        >>> import torch
        >>> from equilibria.watching import watch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
        >>> with watch(model, optimizer, every=1) as monitor:
        ...     for _ in range(40):
        ...         optimizer.zero_grad()
        ...         (model(torch.randn(16, 8)) * torch.randn(16, 8)).mean().backward()
        ...         optimizer.step()
        >>> result = forecast(monitor, schedule=0.1, steps=400)
        >>> result, result.layers[0].name, result.layers[0].step[-1].item()
        (<Forecast of 1 layer, steps 40 to 399>, '0.weight', 399)
    """
    if not isinstance(schedule, Scenario):
        scenario = Scenario(schedule, weight_decay=weight_decay, batch_factor=batch_factor, rescale=rescale)
    elif weight_decay is None and batch_factor == 1 and not rescale:
        scenario = schedule
    else:
        raise EquilibriaError(
            "got a Scenario together with weight_decay, batch_factor or rescale; expected them inside of the Scenario"
        )
    recorded = read_layers(run, before=start)
    return _forecast(recorded, [fit(cohort) for cohort in recorded.cohorts], scenario, steps)


def _forecast(recorded: RecordedLayers, fits: Sequence[Fit | GainFit], scenario: Scenario, steps: int) -> Forecast:
    first, total = recorded.last_step + 1, whole("steps", steps, low=1)
    within("steps", total, high=_MOST_STEPS)
    if total <= first:
        raise EquilibriaError(
            f"got steps={total:,} for a run recorded up to step {first - 1:,}; expected the length of the whole run, "
            f"more than {first:,}, or start= an earlier step"
        )
    schedules = group_schedules(scenario, recorded, first=first, steps=total)
    parts, layers = [], []
    for cohort, fitted, group in zip(recorded.cohorts, fits, schedules, strict=True):
        boundaries = [span.first for span in cut(group.lr, group.weight_decay)]
        paths = integrate(cohort, fitted, group, shown=thinned(group.steps, most=_CURVE_POINTS, boundaries=boundaries))
        parts.append((cohort, fitted, group))
        layers += [layer_forecast(cohort, fitted, group, paths, layer) for layer in range(len(cohort.names))]
    return Forecast(
        scenario=scenario,
        first=first,
        steps=total,
        layers=tuple(layers),
        refused=recorded.refused,
        findings=forecast_findings(layers, recorded, scenario, schedules[0]),
        assumptions=assumptions(layers, scenario, recorded.cohorts[0], schedules[0]),
        steps_per_epoch=recorded.steps_per_epoch,
        _parts=tuple(parts),
    )


def layer_forecast(
    cohort: Cohort, fitted: Fit | GainFit, schedule: GroupSchedule, paths: Paths, layer: int
) -> LayerForecast:
    """The forecast of one layer of a cohort, from the cohort's paths."""
    shown = paths.shown
    lr = schedule.lr[shown]
    norm = _band(np.sqrt(paths.norm_sq[:, layer]), scatter=float(fitted.norm_scatter[layer]))
    equilibrium = paths.angle_equilibrium[:, layer]
    steps_out = Estimate(np.nan, np.nan, np.nan)
    if equilibrium.any():
        steps_out = _total(paths.steps_out[layer], most=schedule.steps)
    return LayerForecast(
        name=cohort.names[layer],
        law=cohort.law,
        rule=cohort.rule,
        step=shown + schedule.first,
        lr=lr,
        weight_decay=schedule.weight_decay[shown],
        angle=_band(paths.angle[:, layer], scatter=float(fitted.scatter[layer])),
        norm=norm,
        effective_lr=Band(lr / norm.value**2, lr / norm.high**2, lr / norm.low**2),
        angle_equilibrium=equilibrium,
        unit_grad_sq=np.exp(paths.log_unit_grad_sq[:, layer, 0]),
        integrated_angle=_total(paths.travelled[layer]),
        steps_out=steps_out,
        validity=fitted.validity[layer],
    )


def _band(members: Array, *, scatter: float) -> Band:
    """The 90 % band around the first member; the other members are displaced by one standard deviation each."""
    centre = members[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        displacement = np.nan_to_num(np.log(members[:, 1:] / centre[:, np.newaxis]))
    width = np.exp(NINETY * np.sqrt((displacement**2).sum(axis=1) + scatter**2))
    return Band(centre, centre / width, centre * width)


def _total(members: Array, *, most: float = math.inf) -> Estimate:
    """A sum over the steps with its 90 % band, from the first member and the displaced others."""
    centre = float(members[0])
    half_width = NINETY * float(np.sqrt(((members[1:] - centre) ** 2).sum()))
    return Estimate(centre, max(centre - half_width, 0.0), min(centre + half_width, most))


# ---- several scenarios side by side


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
        shown: Printable = renderer("forecast.tables.what_if_table")(self)
        return shown

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML page that needs no network, with a button for every scenario; see `Forecast.report`."""
        written: Path = renderer("forecast.page.forecast_page")(self, title=title).write(path)
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
    recorded = read_layers(run, before=start)
    fits = [fit(cohort) for cohort in recorded.cohorts]
    forecasts = {}
    for name, scenario in scenarios.items():
        try:
            plan = scenario if isinstance(scenario, Scenario) else Scenario(scenario)
            forecasts[name] = _forecast(recorded, fits, plan, steps)
        except EquilibriaError as error:
            raise EquilibriaError(f"{name}: {error}" if len(scenarios) > 1 else str(error)) from error
    return WhatIf(forecasts)


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
