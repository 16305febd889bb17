"""`forecast`: what every layer will do over the rest of a run, from what was recorded of it so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibria._display import renderer
from equilibria.errors import EquilibriaError, whole, within
from equilibria.findings import Finding, counted
from equilibria.forecasting._findings import assumptions, find
from equilibria.forecasting._fit import Fit, fit
from equilibria.forecasting._observed import Cohort, Observed, RunLike, observe
from equilibria.forecasting._paths import NINETY, Paths, follow
from equilibria.forecasting._scenario import Course, Scenario, courses
from equilibria.planning._phases import cut
from equilibria.theory.rules import Rule
from equilibria.theory.schedules import ScheduleLike

Array = NDArray[np.float64]

_SHOWN = 500  # points of a curve
_MOST_STEPS = 100_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """A forecast and the band in which 90 % of what is measured is expected.

    Attributes:
        value: the central forecast.
        low: lower end of the band.
        high: upper end of it.
    """

    value: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True)
class Total:
    """A number over the whole forecast, with the ends of its 90 % band."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Samples of one layer.

    Attributes:
        step: the sampled steps.
        angle: radians of each.
        norm: ||w|| before each.
        lr: learning rate of each.
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
        rule: its optimizer with the settings of the last sample.
        step: the steps shown, at most some 500, both sides of every change of phase among them.
        lr: learning rate of these steps.
        weight_decay: weight decay of these steps.
        angle: radians of each step; the band is that of single steps, as a sample measures them.
        norm: ||w|| before each step.
        effective_lr: lr / ||w||^2.
        angle_equilibrium: radians per step once settled; 0 without weight decay.
        unit_grad_sq: L that the forecast expects.
        integrated_angle: sum of the angles of all steps, radians: the distance travelled on the sphere.
        steps_out: steps whose angle is further than 5 % from equilibrium; NaN without one.
        validity: why the band is wider than usual, in sentences; empty if all is well.
    """

    name: str
    rule: Rule
    step: NDArray[np.int64]
    lr: Array
    weight_decay: Array
    angle: Band
    norm: Band
    effective_lr: Band
    angle_equilibrium: Array
    unit_grad_sq: Array
    integrated_angle: Total
    steps_out: Total
    validity: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What `forecast` expects.

    Attributes:
        scenario: under which course.
        first: the first forecast step: the one after the last that was fitted.
        steps: length of the whole run.
        layers: one per layer that can be forecast.
        refused: the other layers, with the reason.
        findings: what is worth knowing, most serious first.
        assumptions: what all this rests on, in sentences.
        steps_per_epoch: None if the run did not say.
    """

    scenario: Scenario
    first: int
    steps: int
    layers: tuple[LayerForecast, ...]
    refused: Mapping[str, str]
    findings: tuple[Finding, ...]
    assumptions: tuple[str, ...]
    steps_per_epoch: int | None
    _parts: tuple[tuple[Cohort, Fit, Course], ...]

    def __repr__(self) -> str:
        return f"<Forecast of {counted(len(self.layers), 'layer')}, steps {self.first:,} to {self.steps - 1:,}>"

    def _repr_html_(self) -> str:
        shown: str = renderer("forecast.card.forecast_card")(self)
        return shown

    def __getitem__(self, name: str) -> LayerForecast:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        known = self.refused.get(name)
        names = ", ".join(layer.name for layer in self.layers)
        reason = f"which was refused ({known})" if known else "which is not in this run"
        raise EquilibriaError(f"got layer {name!r}, {reason}; expected one of: {names}")

    def measured(self, name: str) -> Measured:
        """What was recorded of a layer before the forecast begins."""
        cohort, _, _, at = self._part(name)
        return Measured(cohort.step, cohort.angle[:, at], np.sqrt(cohort.norm_sq[:, at]), cohort.lr)

    def full(self, name: str) -> LayerForecast:
        """One layer at every single step."""
        cohort, fitted, course, at = self._part(name)
        paths = follow(cohort, fitted, course, shown=np.arange(course.steps))
        return layer_forecast(cohort, fitted, course, paths, at)

    def _part(self, name: str) -> tuple[Cohort, Fit, Course, int]:
        self[name]  # refuses an unknown one
        cohort, fitted, course = next(part for part in self._parts if name in part[0].names)
        return cohort, fitted, course, cohort.names.index(name)

    def table(self) -> None:
        """Print one line per layer: where it ends, how long it is out of equilibrium, how far it travels."""
        renderer("forecast.terminal.print_forecast")(self)

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the forecast as one HTML page that needs no network.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline.
        """
        shown: Path = renderer("forecast.page.write_page")(self, path, title=title)
        return shown


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
    """Norm, angle and effective lr of every scale-invariant layer over the rest of a run.

    Args:
        run: what `equilibria.watch` or `equilibria.read_run` gave, or the directory of a run.
        schedule: learning rate of the whole run as a function of its step (any form that
            `theory.schedules.as_schedule` takes), for the first layer's parameter group; the other groups keep their
            ratio to it. Or a `Scenario`, which holds all that follows too.
        steps: length of the whole run in optimizer steps, those recorded included.
        weight_decay: weight decay of the first layer's group; as at the last sample without.
        batch_factor: batch size from now on over that of the record.
        rescale: whether weights and optimizer state are rescaled whenever lr or weight decay change, as
            `equilibria.control.RescaleOnDecay` does.
        start: fit only samples before this step and forecast from there; everything recorded without.

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
        >>> found = forecast(monitor, schedule=0.1, steps=400)
        >>> found, found.layers[0].name, found.layers[0].step[-1].item()
        (<Forecast of 1 layer, steps 40 to 399>, '0.weight', 399)
    """
    if isinstance(schedule, Scenario) and (weight_decay is not None or batch_factor != 1 or rescale):
        raise EquilibriaError(
            "got a Scenario and weight_decay, batch_factor or rescale beside it; expected them inside of the Scenario"
        )
    scenario = (
        schedule
        if isinstance(schedule, Scenario)
        else Scenario(schedule, weight_decay=weight_decay, batch_factor=batch_factor, rescale=rescale)
    )
    observed = observe(run, before=start)
    first, total = observed.last_step + 1, whole("steps", steps, low=1)
    within("steps", total, high=_MOST_STEPS)
    if total <= first:
        raise EquilibriaError(
            f"got steps={total:,} for a run recorded up to step {first - 1:,}; expected the length of the whole run, "
            f"more than {first:,}, or start= an earlier step"
        )
    return _forecast(scenario, observed, courses(scenario, observed, first=first, steps=total))


def _forecast(scenario: Scenario, observed: Observed, paths_taken: tuple[Course, ...]) -> Forecast:
    parts, layers = [], []
    for cohort, course in zip(observed.cohorts, paths_taken, strict=True):
        fitted = fit(cohort)
        paths = follow(cohort, fitted, course, shown=_thinned(course))
        parts.append((cohort, fitted, course))
        layers += [layer_forecast(cohort, fitted, course, paths, at) for at in range(len(cohort.names))]
    course = paths_taken[0]
    pairs = tuple(zip(observed.cohorts, paths_taken, strict=True))
    return Forecast(
        scenario=scenario,
        first=course.first,
        steps=course.first + course.steps,
        layers=tuple(layers),
        refused=observed.refused,
        findings=find(layers, observed.refused, scenario, pairs),
        assumptions=assumptions(layers, scenario, pairs),
        steps_per_epoch=observed.steps_per_epoch,
        _parts=tuple(parts),
    )


def _thinned(course: Course) -> NDArray[np.int64]:
    """Evenly spread steps, and both sides of every change of phase."""
    even = np.linspace(0, course.steps - 1, min(course.steps, _SHOWN)).round().astype(np.int64)
    sides = [side for span in cut(course.lr, course.weight_decay) for side in (span.first - 1, span.first)]
    return np.array(sorted({*even.tolist(), *(side for side in sides if side >= 0)}), dtype=np.int64)


def layer_forecast(cohort: Cohort, fitted: Fit, course: Course, paths: Paths, at: int) -> LayerForecast:
    """One layer of a cohort, from its paths."""
    shown = paths.shown
    angle, norm_sq = paths.angle[:, at], paths.norm_sq[:, at]
    lr = course.lr[shown]
    norm = _band(np.sqrt(norm_sq), scatter=float(fitted.norm_scatter[at]))
    goal = paths.goal[:, at]
    return LayerForecast(
        name=cohort.names[at],
        rule=cohort.rule,
        step=shown + course.first,
        lr=lr,
        weight_decay=course.weight_decay[shown],
        angle=_band(angle, scatter=float(fitted.scatter[at])),
        norm=norm,
        effective_lr=Band(lr / norm.value**2, lr / norm.high**2, lr / norm.low**2),
        angle_equilibrium=goal,
        unit_grad_sq=np.exp(paths.log_drive[:, at, 0]),
        integrated_angle=_total(paths.travelled[at]),
        steps_out=_total(paths.outside[at], most=course.steps) if goal.any() else Total(np.nan, np.nan, np.nan),
        validity=fitted.validity[at],
    )


def _band(members: Array, *, scatter: float = 0.0) -> Band:
    """90 % around the first member; the others are displaced by one standard deviation each."""
    centre = members[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.nan_to_num(np.log(members[:, 1:] / centre[:, np.newaxis]))
    width = np.exp(NINETY * np.sqrt((apart**2).sum(axis=1) + scatter**2))
    return Band(centre, centre / width, centre * width)


def _total(members: Array, *, most: float = math.inf) -> Total:
    centre = float(members[0])
    room = NINETY * float(np.sqrt(((members[1:] - centre) ** 2).sum()))
    return Total(centre, max(centre - room, 0.0), min(centre + room, most))
