"""`backtest`: a finished run forecast from its first steps, compared with its record and with simpler guesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from equilibria._display import Printable, renderer
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import Finding, counted, warnings_first
from equilibria.forecasting._findings import (
    backtest_accuracy,
    was_rescaled,
    weights_changed,
    wide_bands,
)
from equilibria.forecasting._fit import fit
from equilibria.forecasting._forecast import LayerForecast, layer_forecast
from equilibria.forecasting._layers import Cohort, RunLike, as_run, read_layers, whole_records
from equilibria.forecasting._paths import integrate
from equilibria.forecasting._scenario import recorded_schedule
from equilibria.theory._reals import Array

RMS_SAMPLES = 50  # whose root mean square is compared: with momentum 0.9 it scatters by 3 %, a single angle by 10 %
FORECAST = "forecast"
BASELINES = ("angle proportional to lr", "always at equilibrium", "constant last value")
_HORIZONS = 4  # parts of the remaining steps


@dataclass(frozen=True, slots=True)
class Score:
    """The errors of one way of forecasting, over all layers and remaining samples.

    Attributes:
        angle: median of |forecast / measured - 1| of the angle, both as the rms of up to 50 samples.
        angle_p90: 90th percentile of the same error.
        single_angle: median with single samples as they were measured.
        norm: median of |forecast / measured - 1| of ||w||; NaN for a guess, which has no norm.
        norm_p90: 90th percentile of the same error.
    """

    angle: float
    angle_p90: float
    single_angle: float
    norm: float
    norm_p90: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerTest:
    """One layer: the forecast and the measurement at every remaining sample.

    Attributes:
        forecast: the forecast at the sampled steps.
        angle: measured angle, radians.
        rms_angle: root mean square of the measured angle over up to 50 samples around, radians.
        norm: measured ||w||.
        guesses: the angle by each of `BASELINES`.
    """

    forecast: LayerForecast
    angle: Array
    rms_angle: Array
    norm: Array
    guesses: Mapping[str, Array]

    @property
    def angle_error(self) -> Array:
        """forecast / measured - 1, both as the rms of up to 50 samples around."""
        return rms(self.forecast.angle.value) / self.rms_angle - 1

    @property
    def norm_error(self) -> Array:
        """forecast / measured - 1."""
        return self.forecast.norm.value / self.norm - 1

    @property
    def angle_coverage(self) -> float:
        """Share of the single measured angles inside the 90 % band."""
        band = self.forecast.angle
        return float(np.mean((band.low <= self.angle) & (self.angle <= band.high)))

    @property
    def norm_coverage(self) -> float:
        """Share of the measured norms inside the 90 % band."""
        band = self.forecast.norm
        return float(np.mean((band.low <= self.norm) & (self.norm <= band.high)))


@dataclass(frozen=True, slots=True, eq=False)
class BackTest:
    """The result of `backtest`.

    Attributes:
        start: samples before this step were fitted.
        steps: samples before this step are compared.
        layers: one per layer that can be forecast.
        refused: every other layer, with the reason.
        scores: the errors of the forecast and of each baseline, by name.
        angle_coverage: share of single measured angles inside the 90 % bands.
        norm_coverage: share of measured norms inside theirs.
        horizons: first step of each part of the remaining steps, and the forecast's score in it.
        findings: notable facts, warnings first.
    """

    start: int
    steps: int
    layers: tuple[LayerTest, ...]
    refused: Mapping[str, str]
    scores: Mapping[str, Score]
    angle_coverage: float
    norm_coverage: float
    horizons: tuple[tuple[int, Score], ...]
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        own = self.scores[FORECAST]
        return (
            f"<BackTest of {len(self.layers)} layers from step {self.start:,} to {self.steps - 1:,}: angle "
            f"{own.angle:.1%} off (median), norm {own.norm:.1%}, bands cover {self.angle_coverage:.0%}>"
        )

    @property
    def rms_samples(self) -> int:
        """Samples whose root mean squares are compared: 50, or all that a layer has if they are fewer."""
        return min(RMS_SAMPLES, max(len(layer.angle) for layer in self.layers))

    def table(self) -> Printable:
        """Errors and coverage: of the forecast and the guesses, by horizon, by layer."""
        shown: Printable = renderer("forecast.tables.backtest_table")(self)
        return shown

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the back-test as one HTML page that needs no network; see `Forecast.report`."""
        written: Path = renderer("forecast.backtest.backtest_page")(self, title=title).write(path)
        return written


def backtest(run: RunLike, *, start: int = 300, rescale: bool | None = None) -> BackTest:
    """Forecast a finished run from its samples before ``start``, under its recorded settings, and compare.

    Args:
        run: as for `forecast`.
        start: samples before this step are fitted, those from it on are compared.
        rescale: whether weights were rescaled when lr or weight decay changed (`equilibria.control.RescaleOnDecay`). If
            not given, the record decides: it notes weights that changed outside the optimizer's step.

    Returns:
        Errors, coverage of the bands, and the errors of three simpler guesses.

    Raises:
        EquilibriaError: too few samples on either side of ``start``.
    """
    first = whole("start", start, low=1)
    source = as_run(run)
    known = read_layers(source, before=first)
    layers: list[LayerTest] = []
    left_out = dict(known.refused)
    findings: list[Finding] = []
    for cohort, record in whole_records(source, known.cohorts):
        later = record.since(first)
        if len(later.step) < 2 or later.step[-1] < first + RMS_SAMPLES:
            reason = f"{counted(len(later.step), 'sample')} from step {first:,} on; nothing to compare with"
            left_out |= dict.fromkeys(record.names, reason)
            continue
        rescaled = was_rescaled(record, first) if rescale is None else rescale
        layers += _compare(cohort, record, later, rescale=rescaled)
        findings += weights_changed(record, first, rescaled=rescaled)
    if not layers:
        name, reason = next(iter(left_out.items()))
        raise EquilibriaError(
            f"got start={first:,} for a run without samples to compare with ({name}: {reason}); expected at least "
            f"{RMS_SAMPLES} steps from there on: start earlier, or forecast"
        )
    steps = max(int(layer.forecast.step[-1]) + 1 for layer in layers)
    scores = {name: _score(layers, name) for name in (FORECAST, *BASELINES)}
    counts = [len(layer.angle) for layer in layers]
    angles = float(np.average([layer.angle_coverage for layer in layers], weights=counts))
    norms = float(np.average([layer.norm_coverage for layer in layers], weights=counts))
    accuracy, wide = backtest_accuracy(scores, (angles, norms)), wide_bands([layer.forecast for layer in layers])
    return BackTest(
        start=first,
        steps=steps,
        layers=tuple(layers),
        refused=left_out,
        scores=scores,
        angle_coverage=angles,
        norm_coverage=norms,
        horizons=_by_horizon(layers, first, steps),
        findings=warnings_first([*accuracy, *findings, *wide]),
    )


def _compare(cohort: Cohort, record: Cohort, later: Cohort, *, rescale: bool) -> list[LayerTest]:
    """The layers of ``record``, forecast from ``cohort`` and compared at the samples of ``later``."""
    first, steps = int(cohort.step[-1]) + 1, int(later.step[-1]) + 1
    schedule = recorded_schedule(record, first=first, steps=steps, rescale=rescale)
    fitted = fit(cohort)
    paths = integrate(cohort, fitted, schedule, shown=later.step - first)
    tests = []
    for column, name in enumerate(record.names):
        layer = cohort.names.index(name)
        expected = layer_forecast(cohort, fitted, schedule, paths, layer)
        last, lr = cohort.angle[-RMS_SAMPLES:, layer], cohort.lr[-RMS_SAMPLES:]
        per_lr = float(np.sqrt(np.mean((last / lr) ** 2)))  # no sample has an lr of 0
        constant = np.full(len(later.step), np.sqrt(np.mean(last**2)))
        guesses = dict(zip(BASELINES, (per_lr * later.lr, expected.angle_equilibrium, constant), strict=True))
        angle, norm = later.angle[:, column], np.sqrt(later.norm_sq[:, column])
        tests.append(LayerTest(expected, angle, rms(angle), norm, guesses))
    return tests


def rms(angle: Array, *, samples: int = RMS_SAMPLES) -> Array:
    """The root mean square over the samples around every sample, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(angle**2)])
    rows = np.arange(len(angle))
    low, high = np.maximum(rows - samples // 2, 0), np.minimum(rows + samples // 2, len(angle))
    result: Array = np.sqrt((total[high] - total[low]) / (high - low))
    return result


def _score(layers: list[LayerTest], name: str, *, steps: tuple[int, int] | None = None) -> Score:
    """The score over all steps, or over those from the first given step up to the second."""
    errors, single_errors, norm_errors = [], [], []
    for layer in layers:
        low, high = (0, len(layer.angle)) if steps is None else np.searchsorted(layer.forecast.step, steps).tolist()
        angle = layer.forecast.angle.value if name == FORECAST else layer.guesses[name]
        errors.append((rms(angle) / layer.rms_angle - 1)[low:high])
        single_errors.append((angle / layer.angle - 1)[low:high])
        norm_errors.append(layer.norm_error[low:high] if name == FORECAST else np.array([np.nan]))
    error, single, norm = (np.abs(np.concatenate(parts)) for parts in (errors, single_errors, norm_errors))
    norm_score = (np.nan, np.nan) if np.isnan(norm).all() else np.nanpercentile(norm, [50, 90])
    return Score(*map(float, (*np.nanpercentile(error, [50, 90]), np.nanmedian(single), *norm_score)))


def _by_horizon(layers: list[LayerTest], first: int, steps: int) -> tuple[tuple[int, Score], ...]:
    edges = np.linspace(first, steps, _HORIZONS + 1).round().astype(np.int64).tolist()
    sampled = np.concatenate([layer.forecast.step for layer in layers])
    return tuple(
        (low, _score(layers, FORECAST, steps=(low, high)))
        for low, high in pairwise(edges)
        if ((sampled >= low) & (sampled < high)).any()
    )
