"""`backtest`: a forecast of a finished run from its first steps, beside what happened and beside simpler guesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, whole
from equilibria.forecasting.fit import fit
from equilibria.forecasting.forecast import LayerForecast, layer_forecast
from equilibria.forecasting.observed import Cohort, RunLike, observe
from equilibria.forecasting.paths import follow
from equilibria.forecasting.scenario import recorded_course

Array = NDArray[np.float64]
Steps = NDArray[np.int64]

RMS_SAMPLES = 50  # whose root mean square is compared: with momentum 0.9 it is good to some 3 %, a single angle to 10 %
FORECAST = "forecast"
BASELINES = ("angle proportional to lr", "always at equilibrium", "constant last value")
_HORIZONS = 4  # parts of the remaining steps


@dataclass(frozen=True, slots=True)
class Score:
    """How far off one way of forecasting was, over all layers and remaining samples.

    Attributes:
        angle: median of |forecast / measured - 1| of the angle, both as the rms of 50 samples.
        angle_p90: 90th percentile of the same.
        single_angle: median with single samples as they were measured.
        norm: median of |forecast / measured - 1| of ||w||; NaN for a guess that says nothing about it.
        norm_p90: 90th percentile of the same.
    """

    angle: float
    angle_p90: float
    single_angle: float
    norm: float
    norm_p90: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerTest:
    """One layer: the forecast at every remaining sample, and what was measured there.

    Attributes:
        forecast: at the sampled steps.
        angle: measured, radians.
        rms_angle: root mean square of the 50 samples around, radians.
        norm: measured ||w||.
        guesses: angle by each of `BASELINES`.
    """

    forecast: LayerForecast
    angle: Array
    rms_angle: Array
    norm: Array
    guesses: Mapping[str, Array]

    @property
    def angle_error(self) -> Array:
        """forecast / measured - 1, both as the rms of the 50 samples around."""
        return rms(self.forecast.angle.value) / self.rms_angle - 1

    @property
    def norm_error(self) -> Array:
        """forecast / measured - 1."""
        return self.forecast.norm.value / self.norm - 1

    @property
    def angle_coverage(self) -> float:
        """Share of the single measured angles inside of the 90 % band."""
        band = self.forecast.angle
        return float(np.mean((band.low <= self.angle) & (self.angle <= band.high)))

    @property
    def norm_coverage(self) -> float:
        """Share of the measured norms inside of the 90 % band."""
        band = self.forecast.norm
        return float(np.mean((band.low <= self.norm) & (self.norm <= band.high)))


@dataclass(frozen=True, slots=True, eq=False)
class BackTest:
    """What `backtest` found.

    Attributes:
        start: samples before this step were fitted.
        steps: up to here the forecast is compared.
        layers: one per layer that can be forecast.
        refused: the others, with the reason.
        scores: of the forecast and of each baseline, by name.
        angle_coverage: share of single measured angles inside of the 90 % bands.
        norm_coverage: share of measured norms inside of theirs.
        horizons: first step of each part of the remaining steps, and the forecast's score in it.
    """

    start: int
    steps: int
    layers: tuple[LayerTest, ...]
    refused: Mapping[str, str]
    scores: Mapping[str, Score]
    angle_coverage: float
    norm_coverage: float
    horizons: tuple[tuple[int, Score], ...]

    def __repr__(self) -> str:
        own = self.scores[FORECAST]
        return (
            f"<BackTest of {len(self.layers)} layers from step {self.start:,} to {self.steps - 1:,}: angle "
            f"{own.angle:.1%} off (median), norm {own.norm:.1%}, bands cover {self.angle_coverage:.0%}>"
        )


def backtest(run: RunLike, *, start: int = 300) -> BackTest:
    """Forecast a finished run from its samples before ``start``, under the settings that it really had.

    Args:
        run: as for `forecast`.
        start: samples before this step are fitted, those from it on are compared.

    Returns:
        Errors, coverage of the bands, and three simpler guesses in the same table.

    Raises:
        EquilibriaError: too few samples on either side of ``start``.
    """
    first = whole("start", start, low=1)
    known, everything = observe(run, before=first), observe(run)
    layers: list[LayerTest] = []
    for cohort in known.cohorts:
        whole_run = _same(cohort, everything.cohorts)
        if whole_run is not None and whole_run.step[-1] >= first + RMS_SAMPLES:
            layers += _compare(cohort, whole_run, first)
    if not layers:
        raise EquilibriaError(
            f"got a run recorded up to step {everything.last_step:,} and start={first:,}; expected at least "
            f"{RMS_SAMPLES} samples from there on: start earlier, or forecast"
        )
    return BackTest(
        start=first,
        steps=everything.last_step + 1,
        layers=tuple(layers),
        refused=known.refused,
        scores={name: _score(layers, name) for name in (FORECAST, *BASELINES)},
        angle_coverage=_share([layer.angle_coverage for layer in layers], layers),
        norm_coverage=_share([layer.norm_coverage for layer in layers], layers),
        horizons=_by_horizon(layers, first, everything.last_step + 1),
    )


def _same(cohort: Cohort, candidates: tuple[Cohort, ...]) -> Cohort | None:
    return next((each for each in candidates if set(cohort.names) & set(each.names)), None)


def _compare(cohort: Cohort, whole_run: Cohort, first: int) -> list[LayerTest]:
    later = whole_run.since(first)
    course = recorded_course(whole_run, first=int(cohort.step[-1]) + 1, steps=int(later.step[-1]) + 1)
    fitted = fit(cohort)
    paths = follow(cohort, fitted, course, shown=later.step - course.first)
    found = []
    for at, name in enumerate(cohort.names):
        if name not in later.names:
            continue
        place = later.names.index(name)
        layer = layer_forecast(cohort, fitted, course, paths, at)
        last = float(np.sqrt(np.mean(cohort.angle[-RMS_SAMPLES:, at] ** 2)))
        guesses = dict(
            zip(
                BASELINES,
                (last * later.lr / cohort.lr[-1], layer.angle_equilibrium, np.full(len(later.step), last)),
                strict=True,
            )
        )
        norm = np.sqrt(later.norm_sq[:, place])
        found.append(LayerTest(layer, later.angle[:, place], rms(later.angle[:, place]), norm, guesses))
    return found


def rms(angle: Array) -> Array:
    """Over the 50 samples around each, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(angle**2)])
    places = np.arange(len(angle))
    low, high = np.maximum(places - RMS_SAMPLES // 2, 0), np.minimum(places + RMS_SAMPLES // 2, len(angle))
    result: Array = np.sqrt((total[high] - total[low]) / (high - low))
    return result


def _share(values: list[float], layers: list[LayerTest]) -> float:
    return float(np.average(values, weights=[len(layer.angle) for layer in layers]))


def _score(layers: list[LayerTest], name: str, *, part: slice = slice(None)) -> Score:
    angles = [layer.forecast.angle.value if name == FORECAST else layer.guesses[name] for layer in layers]
    pairs = list(zip(angles, layers, strict=True))
    error = np.abs(np.concatenate([(rms(angle) / layer.rms_angle - 1)[part] for angle, layer in pairs]))
    single = np.abs(np.concatenate([(angle / layer.angle - 1)[part] for angle, layer in pairs]))
    norm = np.array([np.nan])
    if name == FORECAST:
        norm = np.abs(np.concatenate([layer.norm_error[part] for layer in layers]))
    return Score(*(float(x) for x in (*np.nanpercentile(error, [50, 90]), np.nanmedian(single), *_two(norm))))


def _two(norm: Array) -> tuple[float, float]:
    return (np.nan, np.nan) if np.isnan(norm).all() else tuple(np.nanpercentile(norm, [50, 90]))


def _by_horizon(layers: list[LayerTest], first: int, steps: int) -> tuple[tuple[int, Score], ...]:
    edges = np.linspace(first, steps, _HORIZONS + 1).round().astype(np.int64)
    step = layers[0].forecast.step
    places = np.searchsorted(step, edges)
    return tuple(
        (int(edge), _score(layers, FORECAST, part=slice(low, high)))
        for edge, low, high in zip(edges[:-1], places[:-1], places[1:], strict=True)
        if high > low
    )
