"""One summary per layer: measured, predicted and equilibrium over the last samples, in numbers and in one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.metadata import invariance_from_metadata, settings_text, short
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import (
    SETTINGS,
    Array,
    Series,
    alike_since,
    last_true,
    setting_changes,
    setting_jumps,
)
from equilibria.errors import whole
from equilibria.findings import counted
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, STATES

LEAST_WINDOW = 20  # samples: the RMS of 20 angles that scatter by 20 % is good to 4 %
ACCURACY = 0.05  # |ln(measured / predicted angle)| to expect
_SURE = 4  # standard errors
_LEAST_RATIO = 1e-9  # stands for 0 of a weight that does not turn: ln(0) can be neither sorted nor written
_OF_A_LAW = (
    *("angle_predicted", "angle_vs_predicted", "angle_equilibrium", "angle_vs_equilibrium"),
    *("norm_predicted", "norm_vs_predicted", "norm_equilibrium", "norm_vs_equilibrium"),
    *("steps_to_settle", "epochs_to_settle", "angle_error"),
)  # fields that are None for a layer without a law


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One parameter over the window of `summarise`; None where a number is unknown.

    Attributes:
        name: the parameter (or its row).
        samples: samples in the window.
        last_step: step of the last sample, counted from 0.
        angle: root mean square angle per step, rad.
        angle_predicted: root mean square of the predicted angles.
        angle_equilibrium: root mean square of the equilibrium angles.
        angle_vs_predicted: measured / predicted.
        angle_vs_equilibrium: measured / equilibrium.
        norm: ||w|| at the last sample.
        norm_predicted: the predicted norm there.
        norm_equilibrium: the equilibrium norm there.
        norm_vs_predicted: measured / predicted.
        norm_vs_equilibrium: measured / equilibrium.
        cosine: root mean square cosine of weight and gradient; it does not depend on the settings, so the window for it
            reaches across their changes, to 20 samples at least if there are as many.
        invariant: whether the weight is scale-invariant: by the label of `symmetries` or, without one, by the cosine.
        state: one of STATES.
        steps_to_settle: steps until the angle stays within 5 % of equilibrium; None also if lr falls to 0 before.
        epochs_to_settle: the same in epochs, if the length of an epoch is known.
        lr: of the last sample.
        weight_decay: of the last sample, as torch defines it.
        momentum: of the last sample; beta1 for Adam and Lion.
        settings: the optimizer with these settings, as text.
        no_law: why there is no law, None if there is one.
        how_wrong: |ln(measured / predicted angle)|: 0.05 is 5 % off, 0.7 a factor of 2 either way.
        first_step: step of the first sample in the window, None if it is empty.
        first_lr: of the first sample of the run.
        how: the label of `symmetries`, such as "rows"; None if the monitor had none.
        angle_error: relative standard error of ``angle_vs_predicted``; momentum correlates successive angles.
        lr_runs_out: whether lr falls steadily and, at its present pace, reaches 0 before the layer can settle.
        shape: of the parameter, None if the metadata do not know it.
        recorded_from: step of the first sample of the run.
        first_norm: ||w|| at that sample.
        angle_over_run: root mean square angle per step over all samples of the run.
    """

    name: str
    samples: int
    last_step: int
    angle: float | None
    angle_predicted: float | None
    angle_equilibrium: float | None
    angle_vs_predicted: float | None
    angle_vs_equilibrium: float | None
    norm: float | None
    norm_predicted: float | None
    norm_equilibrium: float | None
    norm_vs_predicted: float | None
    norm_vs_equilibrium: float | None
    cosine: float | None
    invariant: bool | None
    state: str | None
    steps_to_settle: float | None
    epochs_to_settle: float | None
    lr: float | None
    weight_decay: float | None
    momentum: float | None
    settings: str
    no_law: str | None
    how_wrong: float | None
    first_step: int | None = None
    first_lr: float | None = None
    how: str | None = None
    lr_runs_out: bool = False
    angle_error: float | None = None
    shape: tuple[int, ...] | None = None
    recorded_from: int | None = None
    first_norm: float | None = None
    angle_over_run: float | None = None

    @property
    def few(self) -> bool:
        """Whether there are too few samples to judge the angle."""
        return self.samples < LEAST_WINDOW

    @property
    def surely_off(self) -> bool:
        """Whether measured and predicted angle differ by more than 5 % and by more than chance."""
        if self.how_wrong is None or self.few:
            return False
        return self.how_wrong > max(ACCURACY, _SURE * (self.angle_error or 0.0))

    @property
    def settings_over_run(self) -> str:
        """The optimizer with its settings; lr from the first to the last sample of the run."""
        if self.first_lr is None or self.lr is None or self.first_lr == self.lr:
            return self.settings
        now = short(self.lr)
        return self.settings.replace(f"lr={now}", f"lr={short(self.first_lr)} -> {now}", 1)

    @property
    def sentence(self) -> str:
        """The summary in one sentence."""
        if self.angle is None:
            return f"{self.name} did not move in any sampled step."
        return f"{self.name} turns {self.angle:.3g} rad per step; {'; '.join(_clauses(self))}."


def summarise(samples: pa.Table, *, metadata: Mapping[str, Any], window: int | None = None) -> tuple[LayerSummary, ...]:
    """Summarise the last samples of every parameter.

    Angles are compared by their root mean square over a window: the last quarter of the samples since lr, weight decay
    or momentum last changed. Under a schedule that changes them at every step it is the last quarter since they last
    jumped, as far as they were within a factor of 2 of their present values; predictions follow the schedule. A window
    has 20 samples at least where there are as many, never contains a jump by more than a tenth, and leaves out steps
    with an lr of 0, which move nothing.

    Args:
        samples: the sample table of a monitor or of a recorded run.
        metadata: the metadata of the run.
        window: use the last so many samples of each parameter instead.

    Returns:
        The summaries, in the order of the metadata.
    """
    return summarise_run(sampled_run(samples, metadata=metadata), window=window)


def summarise_run(run: SampledRun, *, window: int | None = None) -> tuple[LayerSummary, ...]:
    """`summarise` for samples that are sorted already."""
    if not run.series.names:
        return ()
    taken = run.taken
    size = _window_sizes(taken) if window is None else np.full(len(taken.names), whole("window", window, low=1))
    recent = _last_rows(taken, size if window is not None else np.minimum(size, _since_jump(taken)))
    longer = _last_rows(taken, size)
    table = _window_numbers(recent) | _present(recent) | {"first_lr": _first(taken, "lr")}
    table |= {"cosine": _rms(longer, longer.columns["cosine"] ** 2)}
    over_run = _rms(taken, taken.columns["angle"] ** 2).astype(np.float32)  # the last digits depend on the other layers
    table |= {"first_norm": _first(taken, "norm"), "angle_over_run": over_run.astype(np.float64)}
    invariant = list(map(invariance_from_metadata, run.entries, table["cosine"].tolist()))
    no_law = [_no_law(entry) for entry in run.entries]
    runs_out = _lr_runs_out(recent)
    for name in ("steps_to_settle", "epochs_to_settle"):
        table[name][runs_out] = np.nan
    # The window may hold predictions from before that was known.
    lawless = np.array([known is False or reason is not None for known, reason in zip(invariant, no_law, strict=True)])
    for name in _OF_A_LAW:
        table[name][lawless] = np.nan
    if epoch := run.metadata.get("steps_per_epoch"):
        steps, epochs = table["steps_to_settle"], table["epochs_to_settle"]
        table["epochs_to_settle"] = np.where(np.isfinite(epochs), epochs, steps / epoch)
    state = recent.last("state")
    state = np.where(lawless & (state >= 0), STATES.index(NO_EQUILIBRIUM), state)
    settings = zip(*(table[name].tolist() for name in SETTINGS), strict=True)
    columns: dict[str, Iterable[Any]] = {name: _or_none(values) for name, values in table.items()}
    columns |= {
        "name": run.series.names,
        "samples": recent.counts.tolist(),
        "last_step": map(int, run.series.last("step").tolist()),
        "first_step": (None if step is None else int(step) for step in _or_none(_first(recent, "step"))),
        "recorded_from": (None if step is None else int(step) for step in _or_none(_first(taken, "step"))),
        "shape": (tuple(entry["shape"]) if "shape" in entry else None for entry in run.entries),
        "lr_runs_out": runs_out.tolist(),
        "invariant": invariant,
        "how": (entry.get("how") for entry in run.entries),
        "state": (STATES[int(position)] if position >= 0 else None for position in state.tolist()),
        "settings": (
            settings_text(entry, rule, present, run.metadata)
            for entry, rule, present in zip(run.entries, run.rules, settings, strict=True)
        ),
        "no_law": no_law,
        "how_wrong": map(_how_wrong, _or_none(table["angle_vs_predicted"])),
    }
    in_order = (columns[field.name] for field in dataclasses.fields(LayerSummary))
    return tuple(LayerSummary(*row) for row in zip(*in_order, strict=True))


def _no_law(entry: Mapping[str, Any]) -> str | None:
    if entry.get("rule") or entry.get("promised_by"):  # a controller promises the angle, and is held to it
        return None
    return entry.get("no_law") or "no law is known for its optimizer"


def _how_wrong(ratio: float | None) -> float | None:
    return None if ratio is None else abs(math.log(max(ratio, _LEAST_RATIO)))


def _or_none(values: Array) -> list[Any]:
    """The numbers of a column, None where unknown."""
    listed = values.astype(object)
    listed[~np.isfinite(values)] = None
    return list(listed.tolist())


def _window_sizes(series: Series) -> Array:
    """Rows in the window of each parameter, as `summarise` says, before it is cut at a jump."""
    since_change = series.first[1:] - last_true(series, setting_changes(series))
    alike = series.first[1:] - alike_since(series)
    under_schedule = np.minimum(-(-_since_jump(series) // 4), alike)
    size = np.where(since_change < LEAST_WINDOW, under_schedule, -(-since_change // 4))
    return np.asarray(np.maximum(size, LEAST_WINDOW))


def _since_jump(series: Series) -> Array:
    return np.asarray(series.first[1:] - last_true(series, setting_jumps(series)))


def _last_rows(series: Series, size: Array) -> Series:
    begin = np.maximum(series.first[1:] - size, series.first[:-1])
    return series.where(np.arange(series.first[-1]) >= np.repeat(begin, series.counts))


def _window_numbers(recent: Series) -> dict[str, Array]:
    """Root mean squares over the window, and their ratios over the rows that have both numbers."""
    angle_sq = recent.columns["angle"] ** 2
    numbers = {"angle": _rms(recent, angle_sq)}
    for name in ("angle_predicted", "angle_equilibrium"):
        law_sq = recent.columns[name] ** 2
        numbers[name] = _rms(recent, law_sq)
        both = _rms(recent, np.where(np.isnan(law_sq), np.nan, angle_sq))
        numbers[f"angle_vs_{name[6:]}"] = both / np.where(numbers[name] > 0, numbers[name], np.nan)
    return numbers | {"angle_error": _angle_error(recent, numbers["angle_vs_predicted"])}


def _angle_error(recent: Series, ratio: Array) -> Array:
    """Relative standard error of measured / predicted.

    From the scatter around the prediction: under a schedule the angle itself moves, which is no scatter.
    """
    angle_sq, predicted_sq = (recent.columns[name] ** 2 for name in ("angle", "angle_predicted"))
    residual = angle_sq - np.repeat(ratio, recent.counts) ** 2 * predicted_sq
    known = np.isfinite(residual)
    count = recent.sums(known.astype(np.float64))
    spacing = (recent.last("step") - _first(recent, "step")) / np.maximum(recent.counts - 1, 1)
    correlation = np.clip(np.nan_to_num(recent.last("momentum")), 0, 0.9999) ** (2 * np.maximum(spacing, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        scatter = _rms(recent, residual**2) / _rms(recent, np.where(known, angle_sq, np.nan)) ** 2 / 2
        error = scatter * np.sqrt((1 + correlation) / (1 - correlation) / count)
    return np.asarray(np.where(count > 1, error, np.nan))


def _first(recent: Series, name: str) -> Array:
    return np.where(recent.counts > 0, np.append(recent.columns[name], np.nan)[recent.first[:-1]], np.nan)


def _lr_runs_out(recent: Series) -> Array:
    """Whether lr falls steadily and, at its present pace, reaches 0 before the layer can settle."""
    moves = recent.sums(setting_changes(recent).astype(np.float64)) > recent.counts / 2
    fall = _first(recent, "lr") - recent.last("lr")
    pace = fall / np.maximum(recent.last("step") - _first(recent, "step"), 1)
    return np.asarray(moves & (recent.last("steps_to_settle") * pace > recent.last("lr")))


def _rms(recent: Series, squares: Array) -> Array:
    known = np.isfinite(squares)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(recent.sums(np.where(known, squares, 0.0)) / recent.sums(known)))


def _present(recent: Series) -> dict[str, Array]:
    now = ("norm", "norm_predicted", "norm_equilibrium", "steps_to_settle", "epochs_to_settle", *SETTINGS)
    numbers = {name: recent.last(name) for name in now}
    for name in ("predicted", "equilibrium"):
        numbers[f"norm_vs_{name}"] = numbers["norm"] / numbers[f"norm_{name}"]
    return numbers


def times(ratio: float) -> str:
    """How far a ratio is from 1, in words.

    Example:
        >>> times(0.714), times(2.0), times(1.004)
        ('1.4x too small', '2x too large', 'right to 1 %')
    """
    if abs(ratio - 1) < 0.01:
        return "right to 1 %"
    return f"{ratio:.3g}x too large" if ratio > 1 else f"{1 / ratio:.3g}x too small"


def how_long(steps: float, epochs: float | None) -> str:
    """A time in steps, with epochs where their length is known.

    Example:
        >>> how_long(2100, 5.37), how_long(1, None)
        ('2,100 more steps (5.4 epochs)', '1 more step')
    """
    return counted(math.ceil(steps), "more step") + (f" ({epochs:.1f} epochs)" if epochs else "")


def _clauses(layer: LayerSummary) -> list[str]:
    """The clauses of the sentence after the measured angle."""
    if layer.no_law is not None:
        return [layer.no_law]
    if layer.invariant is False:
        return [f"{_not_invariant(layer)}, so no law applies"]
    if layer.angle_predicted is None:
        return ["there is no prediction for it"]
    predicts = f"{layer.settings} predicts {layer.angle_predicted:.3g}"
    if layer.weight_decay == 0:
        return [predicts, "without weight decay its norm grows and it turns ever more slowly: there is no equilibrium"]
    if layer.angle_equilibrium is None:
        return [predicts, "with these settings there is no equilibrium"]
    if layer.state == SETTLED:
        return [predicts, "it is settled"]
    return [f"{predicts} now and {layer.angle_equilibrium:.3g} in equilibrium", _distance(layer)]


def _not_invariant(layer: LayerSummary) -> str:
    if layer.how is None or layer.how == "no":
        cosine = "" if layer.cosine is None else f" (cosine with its gradient {layer.cosine:.2g})"
        return f"it is not scale-invariant{cosine}"
    return f"it is not scale-invariant by itself ({layer.how})"


def _distance(layer: LayerSummary) -> str:
    since = "since the last change " if layer.state == DISTURBED else ""
    norm = None if layer.norm_vs_equilibrium is None else f"is {times(layer.norm_vs_equilibrium)}"
    steps = layer.steps_to_settle
    if steps == 0 and norm is not None and layer.angle_vs_equilibrium is not None:
        return f"{since}its norm {norm}, but it still turns at {layer.angle_vs_equilibrium:.2g}x its equilibrium"
    wait = None if not steps else f"needs {how_long(steps, layer.epochs_to_settle)} to settle"
    if layer.lr_runs_out:
        distance = "" if norm is None else f"its norm {norm}; "
        return f"{since}{distance}lr falls to 0 before it can settle, and under a schedule it need not settle"
    return f"{since}its norm {' and '.join(filter(None, (norm, wait))) or 'is not settled'}"
