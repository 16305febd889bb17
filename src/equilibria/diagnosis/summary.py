"""What the samples of a run say, layer by layer: measured beside predicted, in numbers and in one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.series import (
    SETTINGS,
    Array,
    Series,
    alike_since,
    by_parameter,
    changes,
    jumps,
    last_true,
    steps_taken,
)
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import counted
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, STATES
from equilibria.theory.rules import RULES, Rule

LEAST_WINDOW = 20  # samples: the RMS of 20 angles that scatter by 20 % is good to 4 %
ACCURACY = 0.05  # |ln(measured / predicted angle)| to expect
_SURE = 4  # standard errors
INVARIANT = 0.2  # of a random direction's cosine with the gradient
_LEAST_RATIO = 1e-9  # a weight that does not turn at all is this wrong: a logarithm of 0 cannot be sorted or written
_KINDS = {kind.__name__: kind for kind in RULES.values()}


_THEORY = (
    *("angle_predicted", "angle_vs_predicted", "angle_equilibrium", "angle_vs_equilibrium"),
    *("norm_predicted", "norm_vs_predicted", "norm_equilibrium", "norm_vs_equilibrium"),
    *("steps_to_settle", "epochs_to_settle", "angle_error"),
)  # what a layer without a law has not


def _sizes(series: Series) -> Array:
    """Rows that are enough for a mean, and no fewer than 20.

    The last quarter since the last change; under a schedule that moves on, the last quarter since it last jumped, as
    far as the settings were about what they are now.
    """
    since_change = series.first[1:] - last_true(series, changes(series))
    alike = series.first[1:] - alike_since(series)
    under_schedule = np.minimum(-(-_since_jump(series) // 4), alike)
    size = np.where(since_change < LEAST_WINDOW, under_schedule, -(-since_change // 4))
    return np.asarray(np.maximum(size, LEAST_WINDOW))


def _since_jump(series: Series) -> Array:
    return np.asarray(series.first[1:] - last_true(series, jumps(series)))


def _last_rows(series: Series, size: Array) -> Series:
    begin = np.maximum(series.first[1:] - size, series.first[:-1])
    return series.where(np.arange(series.first[-1]) >= np.repeat(begin, series.counts))


def rule_of(entry: Mapping[str, Any], settings: Mapping[str, float]) -> Rule | None:
    """The rule of a parameter at the settings of one sample, None where there is no law.

    Args:
        entry: the parameter's entry in the metadata; its "rule" holds the kind and what the samples do not.
        settings: lr, weight_decay and momentum (beta1 for Adam and Lion) of the sample.

    Example:
        >>> entry = {"rule": {"kind": "AdamW", "betas": [0.9, 0.95]}}
        >>> rule_of(entry, {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.8})
        AdamW(lr=0.001, weight_decay=0.1, betas=(0.8, 0.95))
    """
    told = dict(entry.get("rule") or {})
    kind = _KINDS.get(told.pop("kind", ""))
    if kind is None:
        return None
    if math.isfinite(settings["momentum"]):
        told["momentum"] = settings["momentum"]
    if told.get("betas"):
        told["betas"] = (told.get("momentum", told["betas"][0]), told["betas"][1])
    own = {field.name for field in dataclasses.fields(kind)} - {"lr", "weight_decay"}
    extra: dict[str, Any] = {name: value for name, value in told.items() if name in own and value is not None}
    try:
        return kind(settings["lr"], settings["weight_decay"], **extra)
    except EquilibriaError:
        return None  # settings that changed to something without a law


def is_invariant(rms_cosine: float, entry: Mapping[str, Any]) -> bool | None:
    """Whether a weight is scale-invariant, None if unknown.

    Symmetries that were given to the monitor know; else weight and gradient must be orthogonal, with a cosine far below
    that of a random direction.
    """
    told: bool | None = entry.get("invariant")
    entries = entry.get("entries", 0)
    if told is not None or not (math.isfinite(rms_cosine) and entries):
        return told
    return bool(rms_cosine * math.sqrt(entries) < INVARIANT)


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One parameter, measured beside predicted, over the window of `summarise`; None where there is no number.

    Attributes:
        name: the parameter (or its row).
        samples: samples in the window.
        last_step: step of the last sample, counted from 0.
        angle: root mean square angle per step, rad.
        angle_predicted: the same of the prediction.
        angle_equilibrium: the same of the equilibrium.
        angle_vs_predicted: measured / predicted.
        angle_vs_equilibrium: measured / equilibrium.
        norm: ||w|| at the last sample, like the two below.
        norm_predicted: of the prediction.
        norm_equilibrium: of the equilibrium.
        norm_vs_predicted: measured / predicted.
        norm_vs_equilibrium: measured / equilibrium.
        cosine: root mean square cosine of weight and gradient; no setting changes what it tells, so that it is taken
            over at least 20 samples where there are as many.
        invariant: whether symmetries say so or, without them, whether that is far below a random direction's.
        state: one of STATES.
        steps_to_settle: steps until the angle stays within 5 % of equilibrium; None too where lr falls to 0 before.
        epochs_to_settle: the same in epochs, if an epoch's length is known.
        lr: of the last sample, like the two below.
        weight_decay: as torch means it.
        momentum: beta1 for Adam and Lion.
        settings: the optimizer with these settings, as text.
        no_law: why there is no law, None where there is one.
        how_wrong: |ln(measured / predicted angle)|, to sort by: 0.05 is 5 % off, 0.7 a factor of 2 either way.
        first_step: step of the first sample in the window, None if there is no sample.
        first_lr: of the first sample of the run.
        how: how symmetries say that it is invariant, in words; None if the monitor was given none.
        angle_error: relative standard error of ``angle_vs_predicted``; momentum makes successive angles alike.
        lr_runs_out: whether lr falls all the time and, at its pace, is 0 before the layer could settle.
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

    @property
    def few(self) -> bool:
        """Fewer samples than say something about an angle."""
        return self.samples < LEAST_WINDOW

    @property
    def surely_off(self) -> bool:
        """Whether the measured angle is off the predicted one by more than 5 %, and by more than chance."""
        if self.how_wrong is None or self.few:
            return False
        return self.how_wrong > max(ACCURACY, _SURE * (self.angle_error or 0.0))

    @property
    def course(self) -> str:
        """The optimizer with its settings over the run: lr from the first to the last sample."""
        if self.first_lr is None or self.lr is None or self.first_lr == self.lr:
            return self.settings
        now = short(self.lr)
        return self.settings.replace(f"lr={now}", f"lr={short(self.first_lr)} -> {now}", 1)

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        if self.angle is None:
            return f"{self.name} was not seen to move: no sampled step changed it."
        return f"{self.name} turns {self.angle:.3g} rad per step; {'; '.join(_clauses(self))}."


def summarise(samples: pa.Table, *, metadata: Mapping[str, Any], window: int | None = None) -> tuple[LayerSummary, ...]:
    """One summary per parameter.

    Angles are compared by their root mean square over a window. By default that is the last quarter of the samples
    since lr, weight decay or momentum last changed, and at least 20 samples where there are as many. Under a schedule
    that changes them all the time it is the last quarter as far as they were within a factor of 2 of what they are
    now, and again at least 20: predictions follow the schedule. No window goes across a sudden change by more than a
    tenth. Steps with an lr of 0 do not count: nothing moves.

    Args:
        samples: the sample table, of a monitor or of a recorded run.
        metadata: the metadata of the run.
        window: instead, the last so many samples of each parameter.

    Returns:
        The summaries, in the order of the metadata.
    """
    everything = by_parameter(samples, metadata=metadata)
    if not everything.names:
        return ()
    taken = steps_taken(everything)
    size = _sizes(taken) if window is None else np.full(len(taken.names), whole("window", window, low=1))
    recent = _last_rows(taken, size if window is not None else np.minimum(size, _since_jump(taken)))
    longer = _last_rows(taken, size)
    table = _window_numbers(recent) | _present(recent) | {"last_step": everything.last("step")}
    table |= {"first_lr": _first(taken, "lr"), "first_step": _first(recent, "step")}
    table |= {"lr_runs_out": _lr_runs_out(recent)}
    table |= {"cosine": _rms(longer, longer.columns["cosine"] ** 2)}
    rows = zip(*(values.tolist() for values in table.values()), strict=True)
    entries = {entry["name"]: entry for entry in metadata.get("params", ())}
    return tuple(
        _summary(name, dict(zip(table, row, strict=True)), entries.get(name, {}), metadata)
        for name, row in zip(everything.names, rows, strict=True)
    )


def _window_numbers(recent: Series) -> dict[str, Array]:
    """Root mean squares over the window, and their ratios over the rows that have both."""
    angle_sq = recent.columns["angle"] ** 2
    numbers = {"samples": recent.counts, "angle": _rms(recent, angle_sq)}
    for name in ("angle_predicted", "angle_equilibrium"):
        theory_sq = recent.columns[name] ** 2
        numbers[name] = _rms(recent, theory_sq)
        both = _rms(recent, np.where(np.isnan(theory_sq), np.nan, angle_sq))
        numbers[f"angle_vs_{name[6:]}"] = both / np.where(numbers[name] > 0, numbers[name], np.nan)
    return numbers | {"angle_error": _angle_error(recent, numbers["angle_vs_predicted"])}


def _angle_error(recent: Series, ratio: Array) -> Array:
    """Relative standard error of measured / predicted.

    The scatter is taken around the prediction: under a schedule the angle itself moves, which is no scatter.
    """
    angle_sq, predicted_sq = (recent.columns[name] ** 2 for name in ("angle", "angle_predicted"))
    left = angle_sq - np.repeat(ratio, recent.counts) ** 2 * predicted_sq
    known = np.isfinite(left)
    count = recent.sums(known.astype(np.float64))
    spacing = (recent.last("step") - _first(recent, "step")) / np.maximum(recent.counts - 1, 1)
    alike = np.clip(np.nan_to_num(recent.last("momentum")), 0, 0.9999) ** (2 * np.maximum(spacing, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        scatter = _rms(recent, left**2) / _rms(recent, np.where(known, angle_sq, np.nan)) ** 2 / 2
        error = scatter * np.sqrt((1 + alike) / (1 - alike) / count)
    return np.asarray(np.where(count > 1, error, np.nan))


def _first(recent: Series, name: str) -> Array:
    return np.where(recent.counts > 0, np.append(recent.columns[name], np.nan)[recent.first[:-1]], np.nan)


def _lr_runs_out(recent: Series) -> Array:
    """Whether lr falls all the time and, at its pace, is 0 before the layer could settle."""
    moves = recent.sums(changes(recent).astype(np.float64)) > recent.counts / 2
    fall = _first(recent, "lr") - recent.last("lr")
    pace = fall / np.maximum(recent.last("step") - _first(recent, "step"), 1)
    return np.asarray(moves & (recent.last("steps_to_settle") * pace > recent.last("lr")))


def _rms(recent: Series, squares: Array) -> Array:
    known = np.isfinite(squares)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(recent.sums(np.where(known, squares, 0.0)) / recent.sums(known)))


def _present(recent: Series) -> dict[str, Array]:
    now = ("norm", "norm_predicted", "norm_equilibrium", "state", "steps_to_settle", "epochs_to_settle", *SETTINGS)
    numbers = {name: recent.last(name) for name in now}
    for name in ("predicted", "equilibrium"):
        numbers[f"norm_vs_{name}"] = numbers["norm"] / numbers[f"norm_{name}"]
    return numbers


def _summary(name: str, row: dict[str, float], entry: Mapping[str, Any], metadata: Mapping[str, Any]) -> LayerSummary:
    state, last_step, first_step = row.pop("state"), int(row.pop("last_step")), row.pop("first_step")
    numbers: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in row.items()}
    invariant = is_invariant(row["cosine"], entry)
    if row["lr_runs_out"]:
        numbers |= dict.fromkeys(("steps_to_settle", "epochs_to_settle"))
    no_law = None if entry.get("rule") else entry.get("no_law") or "no law is known for its optimizer"
    if invariant is False or no_law is not None:  # what the window still holds is of a time when there was one
        numbers |= dict.fromkeys(_THEORY)
        state = STATES.index(NO_EQUILIBRIUM) if state >= 0 else state
    ratio, steps, epoch = numbers["angle_vs_predicted"], numbers["steps_to_settle"], metadata.get("steps_per_epoch")
    if numbers["epochs_to_settle"] is None and steps is not None and epoch:
        numbers["epochs_to_settle"] = steps / epoch
    return LayerSummary(
        **{**numbers, "samples": int(row["samples"])},
        name=name,
        first_step=int(first_step) if math.isfinite(first_step) else None,
        last_step=last_step,
        invariant=invariant,
        how=entry.get("how"),
        state=STATES[int(state)] if state >= 0 else None,
        settings=_settings_text(entry, row, metadata),
        no_law=no_law,
        how_wrong=None if ratio is None else abs(math.log(max(ratio, _LEAST_RATIO))),
    )


def _settings_text(entry: Mapping[str, Any], settings: Mapping[str, float], metadata: Mapping[str, Any]) -> str:
    """``SGD(lr=0.1, wd=5e-4, momentum=0.9)``, with the settings of the sample."""
    rule = rule_of(entry, settings)
    optimizers = metadata.get("optimizers", ())
    position = entry.get("optimizer", 0)
    kind = optimizers[position]["class"] if position < len(optimizers) else "optimizer"
    words = [f"{name}={short(settings[key])}" for name, key in (("lr", "lr"), ("wd", "weight_decay"))]
    betas = getattr(rule, "betas", None)
    if betas:
        words.append(f"betas=({', '.join(map(short, betas))})")
    elif settings["momentum"] > 0:
        words.append(f"momentum={short(settings['momentum'])}")
    words += [f"{name}=True" for name in ("nesterov",) if getattr(rule, name, False)]
    return f"{kind}({', '.join(words)})"


def short(value: float) -> str:
    """A setting as people write it.

    Example:
        >>> short(0.1), short(0.0005), short(0.999), short(float("nan"))
        ('0.1', '5e-4', '0.999', '?')
    """
    if not math.isfinite(value):
        return "?"
    digits, power = f"{value:.6e}".split("e")
    scientific = f"{float(digits):g}e{int(power)}"
    return min(f"{value:.7g}", scientific, key=len)


def times(ratio: float) -> str:
    """A ratio in words.

    Example:
        >>> times(0.714), times(2.0), times(1.004)
        ('1.4x too small', '2x too large', 'right to 1 %')
    """
    if abs(ratio - 1) < 0.01:
        return "right to 1 %"
    return f"{ratio:.3g}x too large" if ratio > 1 else f"{1 / ratio:.3g}x too small"


def how_long(steps: float, epochs: float | None) -> str:
    """Steps, with epochs where they are known.

    Example:
        >>> how_long(2100, 5.37), how_long(1, None)
        ('2,100 more steps (5.4 epochs)', '1 more step')
    """
    count = math.ceil(steps)
    return counted(count, "more step") + (f" ({epochs:.1f} epochs)" if epochs else "")


def _clauses(layer: LayerSummary) -> list[str]:
    """What follows the measured angle."""
    if layer.no_law is not None:
        return [layer.no_law]
    if layer.invariant is False:
        return [f"{_not_invariant(layer)}, so no law applies"]
    if layer.angle_predicted is None:
        return ["there is no prediction for it"]
    predicts = f"{layer.settings} predicts {layer.angle_predicted:.3g}"
    if layer.weight_decay == 0:
        return [predicts, "without weight decay its norm grows and it turns ever less: there is no equilibrium"]
    if layer.angle_equilibrium is None:
        return [predicts, "with these settings there is no equilibrium"]
    if layer.state == SETTLED:
        return [predicts, "it is settled"]
    return [f"{predicts} now and {layer.angle_equilibrium:.3g} in equilibrium", _still_to_go(layer)]


def _not_invariant(layer: LayerSummary) -> str:
    if layer.how is None or layer.how == "no":
        seen = "" if layer.cosine is None else f" (cosine with its gradient {layer.cosine:.2g})"
        return f"it is not scale-invariant{seen}"
    return f"it is not scale-invariant by itself ({layer.how})"


def _still_to_go(layer: LayerSummary) -> str:
    since = "since the last change " if layer.state == DISTURBED else ""
    norm = None if layer.norm_vs_equilibrium is None else f"is {times(layer.norm_vs_equilibrium)}"
    steps = layer.steps_to_settle
    if steps == 0 and norm is not None and layer.angle_vs_equilibrium is not None:
        return f"{since}its norm {norm}, but it still turns at {layer.angle_vs_equilibrium:.2g}x its equilibrium"
    wait = None if not steps else f"needs {how_long(steps, layer.epochs_to_settle)} to settle"
    if layer.lr_runs_out:
        away = "" if norm is None else f"its norm {norm}; "
        return f"{since}{away}lr is falling: settling is not in reach, and under a schedule not needed"
    return f"{since}its norm {' and '.join(filter(None, (norm, wait))) or 'is not settled'}"
