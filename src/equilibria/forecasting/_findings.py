"""The findings and assumptions of forecasts and back-tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.diagnosis.gradient_size import VARIES
from equilibria.findings import Finding, counted, joined, warnings_first
from equilibria.forecasting._fit import VARYING_GRADIENT
from equilibria.forecasting._layers import Cohort, RecordedLayers, by_reason
from equilibria.forecasting._scenario import JUMP, GroupSchedule, Scenario
from equilibria.records.tables import GAIN_LAW, INVARIANT_LAW

if TYPE_CHECKING:
    from equilibria.forecasting._backtest import Score
    from equilibria.forecasting._forecast import Estimate, LayerForecast

_MUCH = 0.25  # share of the remaining steps out of equilibrium that deserves a note
_STEEPER = 3  # times the pace of its neighbours: less is part of a smooth schedule, however steep
_LARGE, _SOON = 0.5, 200  # relative change of lr, and the steps after it in which a forecast is worse than usual
_SEAM = 2  # factor between the record's last lr and the schedule's first that is hardly intended
_FAR = 10  # times the recorded turning that a forecast may reach without a remark
_LEAST_COVERED = 0.75  # share of the measurements inside the 90 % bands
_GOOD = 0.05  # median error of the angle that is good enough, however good a guess is
_USELESS = 0.3  # median error of the angle that is not, even if every guess is worse
_SAME_TIME = 0.1  # relative difference of two times to settle that needs no remark
_LAW, _RESCALED_LAW = "transient.evolve", "states.rescaled"

NO_EFFECT = "setting without effect"
"""The kind of a finding that a scenario's setting changes nothing."""


def wide_bands(layers: Sequence[LayerForecast]) -> Iterator[Finding]:
    """The layers whose bands are wider than usual, by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for layer in layers:
        for reason in layer.validity:
            names_by_reason.setdefault(reason, []).append(layer.name)
    if not names_by_reason:
        return
    remedies = []
    if VARYING_GRADIENT in names_by_reason:
        remedies.append("log the training loss, monitor.log(loss=loss): it shows whether the network interpolates")
    if any("samples" in reason for reason in names_by_reason):
        remedies.append("watch longer, or sample at least every fifth step (see eq.watch)")
    widened = sum(bool(layer.validity) for layer in layers)
    yield Finding(
        "note",
        f"the bands of {widened} of {counted(len(layers), 'layer')} are wider than usual",
        "; ".join(f"{joined(names, most=3)}: {reason}" for reason, names in names_by_reason.items()),
        "; ".join(remedies),
        _LAW,
    )


# ---- of a forecast


def forecast_findings(
    layers: Sequence[LayerForecast],
    recorded: RecordedLayers,
    scenario: Scenario,
    schedule: GroupSchedule,
) -> tuple[Finding, ...]:
    """The findings of a forecast, warnings first; ``schedule`` is that of the first layer."""
    cohort = recorded.cohorts[0]
    invariant = [layer for layer in layers if layer.law == INVARIANT_LAW]
    return warnings_first(
        [
            *_seam(cohort, schedule),
            *(_nothing_to_rescale(layers) if scenario.rescale and not invariant else ()),
            *wide_bands(layers),
            *(_recent_change(cohort, schedule) if invariant else ()),
            *(_slow_after_fall(invariant, scenario) if invariant else ()),
            *(_time_to_settle(invariant, recorded, schedule) if invariant else ()),
            *_failing_assumptions(layers, recorded.failing),
            *_refusals(recorded.refused, len(layers)),
        ]
    )


def _seam(cohort: Cohort, schedule: GroupSchedule) -> Iterator[Finding]:
    """A schedule that does not continue where the record ends."""
    last, first = float(cohort.lr[-1]), float(schedule.lr[0])
    if abs(first - last) <= JUMP * max(first, last) or _continues(cohort, schedule):
        return
    yield Finding(
        "warning" if max(first, last) >= _SEAM * min(first, last) else "note",
        f"lr jumps where the forecast begins, at step {schedule.first:,}",
        f"the record ends with lr {last:.4g}, the schedule has {first:.4g} at step {schedule.first:,}",
        "if this is not intended: give the schedule of the whole run, in optimizer steps from 0, with its actual lr",
        _LAW,
    )


def _nothing_to_rescale(layers: Sequence[LayerForecast]) -> Iterator[Finding]:
    """A scenario with rescaling where there are no scale-invariant weights."""
    yield Finding(
        "note",
        "rescaling changes nothing here",
        f"it acts on scale-invariant weights, and none of {counted(len(layers), 'layer')} is forecast as one",
        "leave it out",
        _RESCALED_LAW,
        NO_EFFECT,
    )


def _continues(cohort: Cohort, schedule: GroupSchedule) -> bool:
    """Whether lr goes on at about the pace that it has before or after the seam, as at the end of a cosine."""
    recorded, future = _log(cohort.lr[-2:]), _log(schedule.lr[:2])
    paces = [abs(float(np.diff(future)[0]))] if len(future) > 1 else []
    if len(recorded) > 1:
        paces.append(abs(float(np.diff(recorded)[0])) / int(cohort.step[-1] - cohort.step[-2]))
    steps = max(schedule.first - int(cohort.step[-1]), 1)
    return abs(float(future[0] - recorded[-1])) / steps <= _STEEPER * max(paces, default=0.0)


def _log(lr: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln lr, with a number for an lr of 0."""
    return np.asarray(np.log(np.maximum(lr, 1e-300)))


def _is_jump(pace: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which changes per step are far from those beside them: a smooth schedule is steep at its end, but has no jump."""
    padded = np.concatenate([[0.0], np.abs(pace), [0.0]])
    return np.asarray(np.abs(pace) > _STEEPER * np.maximum(padded[:-2], padded[2:]))


def _recent_change(cohort: Cohort, schedule: GroupSchedule) -> Iterator[Finding]:
    """A record that ends shortly after a jump of lr: the fit sees the transient."""
    large = np.abs(np.diff(cohort.lr)) > _LARGE * np.maximum(cohort.lr[1:], cohort.lr[:-1])
    jumps = np.flatnonzero(large & _is_jump(np.diff(_log(cohort.lr)) / np.diff(cohort.step)))
    if not len(jumps) or schedule.first - cohort.step[jumps[-1] + 1] > _SOON:
        return
    before, after = jumps[-1], jumps[-1] + 1
    yield Finding(
        "warning",
        f"lr jumped {counted(schedule.first - int(cohort.step[after]), 'step')} before the forecast begins",
        f"from {cohort.lr[before]:.4g} to {cohort.lr[after]:.4g}; L is still changing in response, which the fit "
        "mistakes for its drift: the angle may be 10 to 15 % off, more than the bands allow for",
        f"forecast again {_SOON} steps after the change, or {_from_before(cohort, after, schedule)}",
        _LAW,
    )


def _from_before(cohort: Cohort, after: int, schedule: GroupSchedule) -> str:
    """How to forecast the same run from before a change; without a schedule --start would keep the lr of before."""
    start, lr = int(cohort.step[after]), float(schedule.lr[0])
    lr_flag = f"--lr {lr:.6g}" if np.all(schedule.lr == lr) else "--schedule with its options"
    rescaled = bool(cohort.changed[after].any())
    return (
        f"from before it, with start={start}{', rescale=True' if rescaled else ''} and the schedule of the whole run: "
        f"--start {start} {lr_flag}{' --rescale' if rescaled else ''}"
    )


def _slow_after_fall(layers: Sequence[LayerForecast], scenario: Scenario) -> Iterator[Finding]:
    """Layers that turn too slowly for long after lr falls."""
    first = layers[0]
    jumps = _is_jump(np.diff(_log(first.lr)) / np.diff(first.step))
    falls = [
        point
        for point, (before, after) in enumerate(pairwise(first.lr.tolist()), start=1)
        if jumps[point - 1] and 0 < after < (1 - JUMP) * before and first.step[point] == first.step[point - 1] + 1
    ]
    total = int(first.step[-1] - first.step[0]) + 1
    slow = [layer for layer in layers if layer.steps_out.value > _MUCH * total]
    if not falls or not slow:
        return
    fall = falls[0]
    worst = min(slow, key=lambda layer: float(layer.angle.value[fall] / layer.angle_equilibrium[fall]))
    share = float(worst.angle.value[fall] / worst.angle_equilibrium[fall])
    if share > 1 - JUMP:
        return
    yield Finding(
        "note",
        f"{len(slow)} of {counted(len(layers), 'layer')} will turn more slowly than in equilibrium when lr falls at "
        f"step {first.step[fall]:,}",
        f"{worst.name} at {share:.0%} of its equilibrium angle then, and out of equilibrium for "
        f"{worst.steps_out.value:,.0f} of {total:,} steps ({worst.steps_out.low:,.0f} to {worst.steps_out.high:,.0f})",
        "more weight decay after the fall settles faster"
        if scenario.rescale
        else "forecast again with rescale=True (--rescale); in training, RescaleOnDecay does it",
        _LAW,
    )


def _time_to_settle(
    layers: Sequence[LayerForecast], recorded: RecordedLayers, schedule: GroupSchedule
) -> Iterator[Finding]:
    """The layer whose steps out of equilibrium differ most from the time to settle that a report gives, and why."""
    times = {layer.name: min(recorded.settling.get(layer.name, math.nan), schedule.steps) for layer in layers}
    apart = [layer for layer in layers if _is_outside(layer.steps_out, times[layer.name])]
    if not apart:
        return
    worst = max(apart, key=lambda layer: abs(math.log((layer.steps_out.value + 1) / times[layer.name])))
    said, out = recorded.settling[worst.name], worst.steps_out
    cohort = recorded.cohorts[0]
    constant = bool(np.all(worst.lr == cohort.lr[-1]) and np.all(worst.weight_decay == cohort.weight_decay[-1]))
    change = f"L ends at {worst.unit_grad_sq[-1] / worst.unit_grad_sq[0]:.2g} times its first value"
    why = change if constant else f"lr x wd follows the schedule, and {change}"
    yield Finding(
        "note",
        f"{len(apart)} of {counted(len(layers), 'layer')} will settle at another time than a report says",
        f"{worst.name} will be out of equilibrium for {out.value:,.0f} ({out.low:,.0f} to {out.high:,.0f}) of the "
        f"{schedule.steps:,} steps to come; a report says that it needs {said:,.0f}, at the lr, weight decay and L of "
        f"step {recorded.last_step:,}. Here {why}",
        "nothing needs doing: the forecast's number is for this schedule",
        _LAW,
    )


def _is_outside(steps: Estimate, time: float) -> bool:
    """Whether a time is outside of a band, by more than a tenth of it; not if it is unknown."""
    margin = _SAME_TIME * max(time, steps.value)
    return bool(time < steps.low - margin or time > steps.high + margin)


def _failing_assumptions(layers: Sequence[LayerForecast], failing: Mapping[str, tuple[str, ...]]) -> Iterator[Finding]:
    """The assumptions that the report of the run says fail; bursts that widen the bands have their own finding."""
    names_by_reason: dict[str, list[str]] = {}
    for layer in layers:
        for reason in failing.get(layer.name, ()) if layer.law == INVARIANT_LAW else ():
            if reason != VARIES or VARYING_GRADIENT not in layer.validity:
                names_by_reason.setdefault(reason, []).append(layer.name)
    if not names_by_reason:
        return
    affected = {name for names in names_by_reason.values() for name in names}
    yield Finding(
        "note",
        f"the samples of {len(affected)} of {counted(len(layers), 'layer')} contradict an assumption of the laws",
        "; ".join(f"{joined(names, most=3)}: {reason}" for reason, names in names_by_reason.items()),
        "nothing to do for drift and correlation, which the fit includes; where another fails, the forecast may be off "
        "by more than its bands",
        _LAW,
    )


def _refusals(refused: Mapping[str, str], forecast: int) -> Iterator[Finding]:
    if not refused:
        return
    yield Finding(
        "note",
        f"{counted(len(refused), 'layer')} of {len(refused) + forecast} cannot be forecast",
        by_reason(refused),
        "forecast again when the missing steps or samples are recorded"
        if any(reason.endswith("more") for reason in refused.values())
        else "nothing to do for vectors, and for weights without a normalisation after them or without weight decay",
        _LAW,
    )


def assumptions(
    layers: Sequence[LayerForecast], scenario: Scenario, cohort: Cohort, schedule: GroupSchedule
) -> tuple[str, ...]:
    """The assumptions behind a forecast, in sentences; cohort and schedule are those of the first layer."""
    first, by_gain = layers[0], sum(layer.law == GAIN_LAW for layer in layers)
    some = f"of {by_gain} of {counted(len(layers), 'layer')} " if by_gain < len(layers) else ""
    recorded, future = cohort.lr[len(cohort.lr) // 2 :], schedule.lr[schedule.lr > 0]
    ratio = float(future.min() / recorded.min()) if len(future) and recorded.min() > 0 else 1.0
    turned = float(np.sum(np.diff(cohort.step, prepend=-1) * cohort.angle[:, 0] ** 2))
    to_turn = 0.0
    if len(first.step) > 1:
        to_turn = float(np.sum(np.gradient(first.step.astype(float)) * first.angle.value**2))
    sentences = ["momentum, betas, model and data stay as recorded"]
    if by_gain < len(layers):
        sentences.append(
            "L of scale-invariant layers goes on changing as it did, ever more slowly, and hardly responds to the "
            "angle, as in the trainings of the prior (small networks with a normalisation after every weight)"
        )
    if by_gain:
        sentences.append(
            f"the growth gain {some}that was measured before the forecast persists, and rises as angle^-0.25 when the "
            "layer slows down; updates keep their length, under AdamW but for some per cent that change with lr: as in "
            "16 runs of small transformers"
        )
    sentences.append(
        "the band of the angle is for single steps, the band of the norm for the norm itself; both are meant to hold "
        "90 % (docs/forecast-model.md lists what they held)"
    )
    if ratio < 0.5 and by_gain < len(layers):
        sentences.append(
            f"lr falls to {ratio:.2g} of the lowest lr among the fitted samples: there L follows the prior"
        )
    if turned > 0 and to_turn > _FAR * turned:
        sentences.append(f"the forecast steps turn {to_turn / turned:.0f} times as far as the recorded ones")
    if scenario.batch_factor != 1 and by_gain < len(layers):
        sentences.append("gradients are noise: L is inverse to the batch size (the record does not show how far)")
    if scenario.batch_factor != 1 and by_gain:
        sentences.append(f"the batch size changes neither growth gain nor updates {some}(not tested)")
    if scenario.rescale and by_gain < len(layers) and (schedule.weight_decay * schedule.lr > 0).any():
        sentences.append(
            "scale-invariant weights and their optimizer state are rescaled at every change of lr or weight decay, "
            "step by step under a smooth schedule; RescaleOnDecay stops where the variance before a BatchNorm would "
            "fall to 1000 times its eps, which a record does not show"
        )
    return tuple(sentences)


# ---- of a back-test


def backtest_accuracy(scores: Mapping[str, Score], coverage: tuple[float, float]) -> Iterator[Finding]:
    """Angles or bands that are not to be trusted.

    Args:
        scores: of the forecast, first, and of the guesses.
        coverage: shares of the measured angles and norms inside their 90 % bands.
    """
    (own, *_), (name, *_) = scores.values(), scores
    guess = min((other for other in scores if other != name), key=lambda other: scores[other].angle)
    if own.angle > _USELESS or (scores[guess].angle < own.angle and own.angle > _GOOD):
        yield Finding(
            "warning",
            "do not trust the angles forecast for this kind of run",
            f"the median error of the forecast was {own.angle:.0%}, that of the guess \u201c{guess}\u201d "
            f"{scores[guess].angle:.0%}",
            "use the direction of the forecast, not its numbers; near interpolation, or shortly after a change of lr, "
            "L changes in ways that the record does not show",
            _LAW,
        )
    for what, share in zip(("angles", "norms"), coverage, strict=True):
        if share < _LEAST_COVERED:
            yield Finding(
                "warning",
                f"do not trust the bands of the {what} for this kind of run",
                f"the 90 % bands hold {share:.0%} of the measured {what}",
                "watch longer or more often before the forecast; the table by layer has the share of each",
                _LAW,
            )


def was_rescaled(cohort: Cohort, first: int) -> bool:
    """Whether weights changed outside the optimizer's step where lr or weight decay changed, from step ``first`` on."""
    moved = _settings_changed(cohort) & (cohort.step >= first)
    return bool(moved.any() and cohort.changed[moved].mean() > 0.5)


def weights_changed(cohort: Cohort, first: int, *, rescaled: bool) -> Iterator[Finding]:
    """Weights that changed outside the optimizer's step after the forecast began, at step ``first``."""
    changed = cohort.changed.any(axis=1) & (cohort.step >= first)
    steps = cohort.step[changed]
    unexplained = cohort.step[changed & ~(_settings_changed(cohort) & rescaled)]
    if rescaled:
        yield Finding(
            "note",
            "weights were rescaled when lr or weight decay changed, and the forecast does the same",
            f"at {counted(len(steps), 'sample')}, first at step {steps[0]:,}" if len(steps) else "as requested",
            "nothing to do if RescaleOnDecay was used",
            _RESCALED_LAW,
        )
    if len(unexplained):
        yield Finding(
            "warning",
            "weights were changed outside the optimizer's step, unknown to the forecast",
            f"{cohort.names[0]}, among {counted(len(cohort.names), 'layer')}: at "
            f"{counted(len(unexplained), 'sample')}, first at step {unexplained[0]:,}",
            "do not count errors from there on against the forecast; if it was a rescaling: rescale=True",
            _RESCALED_LAW,
        )


def _settings_changed(cohort: Cohort) -> NDArray[np.bool_]:
    """The samples before which lr or weight decay changed; unknown, hence False, for the first."""
    changed = np.zeros(len(cohort.step), dtype=bool)
    for values in (cohort.lr, cohort.weight_decay):
        changed[1:] |= np.diff(values) != 0
    return changed
