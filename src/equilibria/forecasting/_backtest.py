"""`backtest`: a forecast of a finished run from its first steps, beside what happened and beside simpler guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibria._display import renderer
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import Finding, counted
from equilibria.forecasting._fit import fit
from equilibria.forecasting._forecast import LayerForecast, layer_forecast
from equilibria.forecasting._observed import Cohort, RunLike, as_run, observe, seen_whole
from equilibria.forecasting._paths import follow
from equilibria.forecasting._scenario import recorded_course
from equilibria.forecasting._trust import widened

_LEAST_COVERED = 0.75  # of what 90 % bands hold
_GOOD = 0.05  # median error of the angle that is good enough, whatever a guess does
_USELESS = 0.3  # one that is not, even if every guess is worse
_LAW = "transient.evolve"


def judge(
    scores: Mapping[str, Score],
    coverage: tuple[float, float],
    layers: Sequence[LayerForecast],
    remarks: Sequence[Finding],
) -> tuple[Finding, ...]:
    """What is worth knowing, warnings first.

    Args:
        scores: of the forecast, first, and of the guesses.
        coverage: shares of the angles and of the norms inside of their 90 % bands.
        layers: the forecasts.
        remarks: what was found already.
    """
    found = [*_unbelievable(scores, coverage), *remarks, *widened(layers)]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _unbelievable(scores: Mapping[str, Score], coverage: tuple[float, float]) -> Iterator[Finding]:
    (own, *_), (name, *_) = scores.values(), scores
    guess = min((each for each in scores if each != name), key=lambda each: scores[each].angle)
    if own.angle > _USELESS or (scores[guess].angle < own.angle and own.angle > _GOOD):
        yield Finding(
            "warning",
            "do not believe the angles forecast for this kind of run",
            f"the forecast was {own.angle:.0%} off in the median, and \u201c{guess}\u201d {scores[guess].angle:.0%}",
            "take the forecast for its direction, not for its numbers; near interpolation, or shortly after a change "
            "of lr, L does what the record does not show",
            _LAW,
        )
    for what, share in zip(("angles", "norms"), coverage, strict=True):
        if share < _LEAST_COVERED:
            yield Finding(
                "warning",
                f"do not believe the bands of the {what} for this kind of run",
                f"the 90 % bands hold {share:.0%} of the measured {what}",
                "watch longer or more often before the forecast; the layers are listed with their own shares",
                _LAW,
            )


def was_rescaled(cohort: Cohort, first: int) -> bool:
    """Whether weights were changed outside of the optimizer's step where lr or weight decay changed, from a step on."""
    moved = _settings_changed(cohort) & (cohort.step >= first)
    return bool(moved.any() and cohort.changed[moved].mean() > 0.5)


def changed_outside(cohort: Cohort, first: int, *, rescaled: bool) -> Iterator[Finding]:
    """Weights that were changed outside of the optimizer's step after the forecast began, at step ``first``."""
    changed = cohort.changed.any(axis=1) & (cohort.step >= first)
    when = cohort.step[changed]
    strange = cohort.step[changed & ~(_settings_changed(cohort) & rescaled)]
    if rescaled:
        evidence = f"at {counted(len(when), 'sample')}, first at step {when[0]:,}" if len(when) else "as was asked for"
        yield Finding(
            "note",
            "weights were rescaled when lr or weight decay changed, and the forecast does the same",
            evidence,
            "nothing to do if RescaleOnDecay was used",
            "states.rescaled",
        )
    if len(strange):
        yield Finding(
            "warning",
            "weights were changed outside of the optimizer's step, which the forecast does not know",
            f"{cohort.names[0]}, among {counted(len(cohort.names), 'layer')}: at {counted(len(strange), 'sample')}, "
            f"first at step {strange[0]:,}",
            "errors from there on are not the forecast's; if it was a rescaling: rescale=True",
            "states.rescaled",
        )


def _settings_changed(cohort: Cohort) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Samples before which lr or weight decay changed; the first one is not known."""
    moved = np.zeros(len(cohort.step), dtype=bool)
    for values in (cohort.lr, cohort.weight_decay):
        moved[1:] |= np.diff(values) != 0
    return moved


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
        refused: every layer that was not compared, with the reason.
        scores: of the forecast and of each baseline, by name.
        angle_coverage: share of single measured angles inside of the 90 % bands.
        norm_coverage: share of measured norms inside of theirs.
        horizons: first step of each part of the remaining steps, and the forecast's score in it.
        findings: what to make of it, warnings first.
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

    def table(self) -> None:
        """Print errors and coverage: beside the guesses, by horizon, by layer."""
        renderer("forecast.terminal.print_backtest")(self)

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the back-test as one HTML page that needs no network.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline.
        """
        shown: Path = renderer("forecast.page.write_page")(self, path, title=title)
        return shown


def backtest(run: RunLike, *, start: int = 300, rescale: bool | None = None) -> BackTest:
    """Forecast a finished run from its samples before ``start``, under the settings that it really had.

    Args:
        run: as for `forecast`.
        start: samples before this step are fitted, those from it on are compared.
        rescale: whether weights were rescaled when lr or weight decay changed (`equilibria.control.RescaleOnDecay`);
            as the record shows without: it notes weights that were changed outside of the optimizer's step.

    Returns:
        Errors, coverage of the bands, and three simpler guesses in the same table.

    Raises:
        EquilibriaError: too few samples on either side of ``start``.
    """
    first = whole("start", start, low=1)
    source = as_run(run)
    known = observe(source, before=first)
    layers: list[LayerTest] = []
    left_out = dict(known.refused)
    remarks: list[Finding] = []
    for cohort in known.cohorts:
        for whole_run in seen_whole(source, cohort):
            later = whole_run.since(first)
            if len(later.step) < 2 or later.step[-1] < first + RMS_SAMPLES:
                reason = f"{counted(len(later.step), 'sample')} from step {first:,} on; nothing to compare with"
                left_out |= dict.fromkeys(whole_run.names, reason)
                continue
            as_done = was_rescaled(whole_run, first) if rescale is None else rescale
            layers += _compare(cohort, whole_run, later, rescale=as_done)
            remarks += changed_outside(whole_run, first, rescaled=as_done)
    steps = max((int(layer.forecast.step[-1]) + 1 for layer in layers), default=first)
    if not layers:
        name, reason = next(iter(left_out.items()))
        raise EquilibriaError(
            f"got start={first:,} for a run without samples to compare with ({name}: {reason}); expected at least "
            f"{RMS_SAMPLES} steps from there on: start earlier, or forecast"
        )
    scores = {name: _score(layers, name) for name in (FORECAST, *BASELINES)}
    angles, norms = (
        _share([getattr(layer, kind) for layer in layers], layers) for kind in ("angle_coverage", "norm_coverage")
    )
    return BackTest(
        start=first,
        steps=steps,
        layers=tuple(layers),
        refused=left_out,
        scores=scores,
        angle_coverage=angles,
        norm_coverage=norms,
        horizons=_by_horizon(layers, first, steps),
        findings=judge(scores, (angles, norms), [layer.forecast for layer in layers], remarks),
    )


def _compare(cohort: Cohort, whole_run: Cohort, later: Cohort, *, rescale: bool) -> list[LayerTest]:
    """The layers of ``whole_run``, forecast from ``cohort``."""
    course = recorded_course(whole_run, first=int(cohort.step[-1]) + 1, steps=int(later.step[-1]) + 1, rescale=rescale)
    fitted = fit(cohort)
    paths = follow(cohort, fitted, course, shown=later.step - course.first)
    found = []
    for place, name in enumerate(whole_run.names):
        at = cohort.names.index(name)
        layer = layer_forecast(cohort, fitted, course, paths, at)
        last, moving = cohort.angle[-RMS_SAMPLES:, at], cohort.lr[-RMS_SAMPLES:]
        per_lr = float(np.sqrt(np.mean((last / moving) ** 2)))  # no sample has an lr of 0
        constant = np.full(len(later.step), np.sqrt(np.mean(last**2)))
        guesses = dict(zip(BASELINES, (per_lr * later.lr, layer.angle_equilibrium, constant), strict=True))
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


def _score(layers: list[LayerTest], name: str, *, steps: tuple[int, int] | None = None) -> Score:
    """Over all steps, or those from the first up to the second."""
    error, single, norm = [], [], []
    for layer in layers:
        low, high = (0, len(layer.angle)) if steps is None else np.searchsorted(layer.forecast.step, steps).tolist()
        angle = layer.forecast.angle.value if name == FORECAST else layer.guesses[name]
        error.append((rms(angle) / layer.rms_angle - 1)[low:high])
        single.append((angle / layer.angle - 1)[low:high])
        norm.append(layer.norm_error[low:high] if name == FORECAST else np.array([np.nan]))
    off, alone, length = (np.abs(np.concatenate(each)) for each in (error, single, norm))
    return Score(*(float(x) for x in (*np.nanpercentile(off, [50, 90]), np.nanmedian(alone), *_two(length))))


def _two(norm: Array) -> tuple[float, float]:
    return (np.nan, np.nan) if np.isnan(norm).all() else tuple(np.nanpercentile(norm, [50, 90]))


def _by_horizon(layers: list[LayerTest], first: int, steps: int) -> tuple[tuple[int, Score], ...]:
    edges = np.linspace(first, steps, _HORIZONS + 1).round().astype(np.int64).tolist()
    sampled = np.concatenate([layer.forecast.step for layer in layers])
    return tuple(
        (low, _score(layers, FORECAST, steps=(low, high)))
        for low, high in pairwise(edges)
        if ((sampled >= low) & (sampled < high)).any()
    )
