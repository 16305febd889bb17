"""The norms and angles of every parameter, from the series of a log or from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.importing._angles import angles_from_norms, rounding
from equilibria.importing._checkpoints import Stored
from equilibria.importing._logs import Log

Steps = NDArray[np.int64]
Array = NDArray[np.float64]
Series = tuple[Steps, Array]

_ALONG = 0.5  # of the length of an update, that may lie along the weight where too few norms tell
_NEIGHBOURS = 8  # changes between samples that tell how far a step is off the mean of the steps to the next sample
_JUMP, _STEEPER = 0.1, 3  # relative change of a setting that is a jump: a tenth, and thrice the change before
_SETTING_DIGITS = 6  # of an lr that is computed from effective lr and norm


@dataclass(frozen=True)
class History:
    """One parameter, sampled at some steps; NaN where a number is not known.

    Attributes:
        step: the sampled steps.
        norm: ||w|| before the step.
        after: ||w'||.
        interpolated: whether ``after`` is read off the norms of other steps.
        moved: ||w' - w||.
        angle: radians of the step.
        error: of each angle: the largest that rounding leaves, and one standard error of what is interpolated.
        grad_norm: of the gradient.
        lr: steps and values from the parameter's own series; None if it has none.
        shape: None if it is not known.
        dtype: None if it is not known.
        aliases: further names.
        turned: checkpoints only: step, distance and angle over that many steps.
    """

    step: Steps
    norm: Array
    after: Array
    interpolated: NDArray[np.bool_]
    moved: Array
    angle: Array
    error: Array
    grad_norm: Array
    lr: Series | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    aliases: tuple[str, ...] = ()
    turned: tuple[tuple[int, int, float], ...] = field(default=())

    @property
    def entries(self) -> int:
        """Numbers in the weight; 0 if its shape is not known."""
        return 0 if self.shape is None else int(np.prod(self.shape, dtype=np.int64))

    @property
    def impossible(self) -> NDArray[np.bool_]:
        """Flags steps whose norm changes by more than the update is long, or whose update is longer than both norms."""
        with np.errstate(invalid="ignore"):
            too_short = (np.abs(self.after - self.norm) > self.moved) & ~self.interpolated & ~(self.angle > 0)
            return np.asarray(too_short | (self.moved > self.norm + self.after))

    @property
    def stated(self) -> NDArray[np.bool_]:
        """Flags steps whose angle is larger than its error."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.error < self.angle) & ~self.impossible)


def history_from_log(log: Log, metrics: Mapping[str, str]) -> History:
    """One parameter of a log.

    Args:
        log: the log.
        metrics: the name of its metric for every number (one of `_names.NUMBERS`).
    """
    series = {number: log.series[name] for number, name in metrics.items()}
    _check_lengths(metrics, series)
    norms = series.get("norm") or _a_step_later(series.get("norm_after"))
    step = np.union1d(norms[0], series["angle"][0]) if "angle" in series else norms[0]
    norm, of_norm = _at(step, norms)
    after, of_after = _at(step, series.get("norm_after"))
    following, of_following = _at(step + 1, norms)
    after, of_after = (np.where(np.isfinite(after), *pair) for pair in ((after, following), (of_after, of_following)))
    missing = ~np.isfinite(after)
    after = np.where(missing, _between(step, norm), after)
    moved, of_moved = _at(step, series.get("update_norm"))
    relative, of_relative = _at(step, series.get("relative_update"))
    moved, of_moved = (
        np.where(np.isfinite(moved), *pair)
        for pair in ((moved, relative * norm), (of_moved, of_relative * norm + relative * of_norm))
    )
    of_change = np.where(missing, _off_the_line(after - norm, moved), of_norm + of_after)
    turned = angles_from_norms(norm, after, moved, errors=(of_norm, of_change, of_moved))
    angle, error = _at(step, series.get("angle"))
    logged = np.isfinite(angle)
    angle, error = (np.where(logged, *pair) for pair in ((angle, turned.angle), (error, turned.error)))
    speed = series.get("effective_lr")
    return History(
        step=step,
        norm=norm,
        after=after,
        interpolated=missing,
        moved=moved,
        angle=angle,
        error=error,
        grad_norm=_at(step, series.get("grad_norm"))[0],
        lr=None if speed is None else _lr_of(speed, norms),
    )


def history_from_checkpoints(stored: Stored) -> History:
    """One weight of a folder of checkpoints: no step was measured, only norms and angles over many steps."""
    step = np.array([state.step for state in stored.steps], dtype=np.int64)
    unknown = np.full(len(step), np.nan)
    turned = [
        (state.step - state.distance, state.distance, state.angle)
        for state in stored.steps
        if state.distance is not None and state.angle is not None
    ]
    return History(
        step=step,
        norm=np.array([state.norm for state in stored.steps]),
        after=unknown,
        interpolated=np.ones(len(step), dtype=bool),
        moved=unknown,
        angle=unknown,
        error=unknown,
        grad_norm=unknown,
        shape=stored.shape,
        dtype=stored.dtype,
        aliases=stored.aliases,
        turned=tuple(turned),
    )


def _check_lengths(metrics: Mapping[str, str], series: Mapping[str, Series]) -> None:
    for number in ("norm", "norm_after", "update_norm"):
        steps, values = series.get(number, (np.zeros(0), np.zeros(0)))
        if (values < 0).any():
            first = int(np.argmax(values < 0))
            raise EquilibriaError(
                f"got {metrics[number]} = {values[first]:g} at step {steps[first]:,}; expected lengths, 0 or more: not "
                "their logarithms",
                argument="source",
            )


def _at(step: Steps, series: Series | None) -> tuple[Array, Array]:
    """The values of a series at some steps, and their rounding errors; NaN where it has none."""
    values = errors = np.full(len(step), np.nan)
    if series is None or not len(series[0]):
        return values, errors
    place = np.minimum(np.searchsorted(series[0], step), len(series[0]) - 1)
    known = series[0][place] == step
    values, errors = series[1][place], rounding(series[1])[place]
    return np.where(known, values, np.nan), np.where(known, errors, np.nan)


def _a_step_later(series: Series | None) -> Series:
    """Norms before steps, from those after the steps before."""
    return (np.zeros(0, dtype=np.int64), np.zeros(0)) if series is None else (series[0] + 1, series[1])


def _between(step: Steps, norm: Array) -> Array:
    """The norm one step later, along the straight line in ln ||w|| to the next known one; at the end, from the last."""
    known = np.flatnonzero(np.isfinite(norm) & (norm > 0))
    if not len(known):
        return np.full(len(norm), np.nan)
    logs = np.log(norm[known])
    slopes = np.diff(logs) / np.diff(step[known]) if len(known) > 1 else np.zeros(1)
    own = np.minimum(np.searchsorted(known, np.arange(len(norm))), len(slopes) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(norm * np.exp(slopes[own]))


def _off_the_line(change: Array, moved: Array) -> Array:
    """How far a step's change of norm is off the interpolated one.

    The root mean square difference between neighbouring samples of the part of an update that lies along the weight;
    with too few samples, as far as an update that points half along it.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        along = change / moved
    known = np.flatnonzero(np.isfinite(along))
    turns = np.diff(along[known]) ** 2
    if len(turns) < _NEIGHBOURS:
        return np.asarray(np.maximum(_ALONG * moved - np.abs(change), np.abs(change)))
    typical = np.sqrt(np.lib.stride_tricks.sliding_window_view(turns, _NEIGHBOURS).mean(axis=1))
    off = np.full(len(moved), np.nan)
    off[known] = typical[np.clip(np.arange(len(known)) - _NEIGHBOURS // 2, 0, len(typical) - 1)] * moved[known]
    return off


def _lr_of(speed: Series, norms: Series) -> Series:
    """The learning rate from lr / ||w||^2 and ||w||."""
    steps, own, other = np.intersect1d(speed[0], norms[0], return_indices=True)
    lr = speed[1][own] * norms[1][other] ** 2
    return steps, np.array([float(f"{value:.{_SETTING_DIGITS}g}") for value in lr.tolist()])


class Course:
    """A setting at every step, from its values at some: straight lines, but for jumps, which come at the later step.

    Example:
        >>> course = Course((np.array([0, 10, 20]), np.array([0.1, 0.1, 0.01])))
        >>> course.at(np.array([5, 19, 20, 30])).tolist()
        [0.1, 0.1, 0.01, 0.01]
    """

    def __init__(self, series: Series) -> None:
        steps, values = series
        with np.errstate(invalid="ignore", divide="ignore"):
            change = np.diff(values) / np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
        change = np.nan_to_num(change)
        before = np.append(0.0, change[:-1]) if len(change) else change
        ramp = np.where(change * before > 0, np.abs(before), 0.0)
        self.jumps = steps[1:][np.abs(change) > np.maximum(_JUMP, _STEEPER * ramp)]
        ends = np.searchsorted(steps, self.jumps)
        late = steps[ends] - 1 > steps[ends - 1]
        self._steps = np.insert(steps.astype(np.float64), ends[late], steps[ends[late]] - 1.0)
        self._values = np.insert(values, ends[late], values[ends[late] - 1])

    def at(self, steps: Steps) -> Array:
        """The setting at some steps; before the first value, and after the last, it stays."""
        return np.asarray(np.interp(steps, self._steps, self._values))
