"""One summary per layer: measured, predicted and equilibrium of the same last samples, in numbers and in a sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.budget import LayerBudget, layer_budgets, missing_gain
from equilibria.diagnosis.metadata import settings_text, three_digits
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import (
    SETTINGS,
    Array,
    Series,
    alike_since,
    last_true,
    setting_changes,
    without_gradient_since,
    zero_gradient_since,
)
from equilibria.errors import whole
from equilibria.findings import counted
from equilibria.records.tables import DISTURBED, GAIN_LAW, LAWS, NO_EQUILIBRIUM, SETTLED, SETTLING, STATES

LEAST_WINDOW = 20  # samples, where there are as many at about these settings; and fewest to know how far they scatter
ACCURACY = 0.05  # |ln(measured / predicted angle)| to expect
JUDGED = 0.1  # standard error of measured / predicted up to which it is judged
_SURE = 4  # standard errors
_TAIL, _LONGEST_TAIL = 0.05, 0.2  # of the highest lr since a jump, and of the samples since it
_PACE = 5  # samples whose lr gives the pace of a schedule
_ABOUT = 1.28  # factor of the angle from equilibrium up to which a layer with a measured gain may count as settled
_ALIKE = 2  # factor by which norm and angle may disagree about the distance from equilibrium
_MUCH_LONGER = 10  # times the steps so far: a time to settle beyond it is no number to act on
_LEAST_RATIO = 1e-9  # stands for 0 of a weight that does not turn: ln(0) can be neither sorted nor written
_OF_EQUILIBRIUM = (
    *("angle_equilibrium", "angle_vs_equilibrium", "norm_equilibrium", "norm_vs_equilibrium"),
    *("steps_to_settle", "epochs_to_settle"),
)
_OF_A_LAW = (
    *("angle_predicted", "angle_vs_predicted", "norm_predicted", "norm_vs_predicted", "angle_error"),
    *_OF_EQUILIBRIUM,
)  # fields that are None for a layer without a law


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One parameter over the window of `summarise`; None where a number is unknown.

    All angles and their ratios are of the same samples, those of the steps from ``first_step`` to ``last_step``; norms
    and settings are of the last of them.

    Attributes:
        name: the parameter (or its row).
        samples: samples in the window.
        last_step: step of its last sample, counted from 0.
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
        invariant: whether the weight is scale-invariant by the label of `symmetries` or, without one, looks so by its
            cosines (`equilibria.diagnosis.invariance`); None while that is undecided.
        state: one of STATES.
        steps_to_settle: steps until the angle stays within 5 % of equilibrium; None also if ``lr_runs_out``.
        epochs_to_settle: the same in epochs, if the length of an epoch is known.
        lr: of the last sample.
        weight_decay: of the last sample, as torch defines it.
        momentum: of the last sample; beta1 for Adam and Lion.
        settings: the optimizer with these settings, as text.
        no_law: why there is no law, None if there is one.
        how_wrong: |ln(measured / predicted angle)|: 0.05 is 5 % off, 0.7 a factor of 2 either way.
        first_step: step of the first sample in the window, None if it is empty.
        lr_range: lowest and highest lr of the window, None if it is empty.
        first_lr: of the first sample of the run.
        peak_lr: highest of the sampled steps of the run.
        last_lr: of the last sample of the run; ``lr`` unless the window leaves out the tail of a schedule.
        how: the label of `symmetries`, such as "rows"; None if the monitor had none.
        angle_error: relative standard error of ``angle_vs_predicted``, from the scatter of the last samples around
            their predictions; momentum correlates successive angles.
        mean_cosine: of weight and gradient, with its sign, over all samples of the run.
        lr_runs_out: whether lr falls over the last samples, so fast that its pace would end at 0 before the layer could
            settle: then a time to settle at the present lr means nothing.
        shape: of the parameter, None if the metadata do not know it.
        recorded_from: step of the first sample of the run.
        first_norm: ||w|| at that sample.
        angle_over_run: root mean square angle per step over all samples of the run.
        law: of the predictions, one of LAWS; None without any, and in records that do not say.
        gain: the growth gain G at the last sample.
        gain_error: its standard error.
        no_gain: why there is neither a gain nor another prediction: a clause about one layer and one about several,
            with {} for their names; None if there is one.
        budget: why the norm changed over the window.
        relative_update: root mean square of ||w' - w|| / ||w|| per step.
        update_per_entry: root mean square change of an entry per step.
        idle: why no gradient moves it, such as "no gradient since step 250"; None if one does. It then has no
            prediction.
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
    lr_range: tuple[float, float] | None = None
    first_lr: float | None = None
    peak_lr: float | None = None
    last_lr: float | None = None
    how: str | None = None
    lr_runs_out: bool = False
    angle_error: float | None = None
    shape: tuple[int, ...] | None = None
    recorded_from: int | None = None
    first_norm: float | None = None
    angle_over_run: float | None = None
    mean_cosine: float | None = None
    law: str | None = None
    gain: float | None = None
    gain_error: float | None = None
    no_gain: tuple[str, str] | None = None
    budget: LayerBudget | None = None
    relative_update: float | None = None
    update_per_entry: float | None = None
    idle: str | None = None

    @property
    def by_gain(self) -> bool:
        """Whether its predictions come from its measured growth gain, not from the law of invariant weights."""
        return self.law == GAIN_LAW

    @property
    def few(self) -> bool:
        """Whether there are too few samples to judge the angle: its error is unknown, or more than 10 %."""
        return self.angle_error is None or self.angle_error > JUDGED

    @property
    def is_near(self) -> bool:
        """Whether the measured angle is within 5 % of the predicted one."""
        how_wrong = _how_wrong(self.angle_vs_predicted)
        return how_wrong is not None and how_wrong <= ACCURACY

    @property
    def surely_off(self) -> bool:
        """Whether measured and predicted angle differ by more than 5 % and by more than chance."""
        if self.how_wrong is None or self.few:
            return False
        return self.how_wrong > max(ACCURACY, _SURE * (self.angle_error or 0.0))

    @property
    def norm_explains_angle(self) -> bool:
        """Whether norm and angle are off equilibrium alike: the angle goes as the norm to the power of -1 or -2.

        They are not while L, of which the equilibrium norm is made, has changed a lot within its average: then norm and
        time to settle say little.
        """
        if self.norm_vs_equilibrium is None or self.angle_vs_equilibrium is None:
            return False
        low, high = sorted((self.norm_vs_equilibrium**-1, self.norm_vs_equilibrium**-2))
        return bool(low / _ALIKE < self.angle_vs_equilibrium < high * _ALIKE)

    @property
    def settings_over_run(self) -> str:
        """The optimizer with its settings; lr at the first sample of the run, its highest one and the last."""
        if self.first_lr is None or self.lr is None or self.peak_lr is None or self.last_lr is None:
            return self.settings
        now = three_digits(self.last_lr)
        if self.peak_lr > max(self.first_lr, self.last_lr):
            course = f"lr={three_digits(self.first_lr)}, sampled peak {three_digits(self.peak_lr)}, now {now}"
        elif self.first_lr != self.last_lr:
            course = f"lr={three_digits(self.first_lr)} -> {now}"
        else:
            return self.settings
        return self.settings.replace(f"lr={three_digits(self.lr)}", course, 1)

    @property
    def when(self) -> str:
        """The steps of the window, with their number where few of them were sampled, and lr's range where it moved.

        Example:
            >>> at = dict.fromkeys((field.name for field in dataclasses.fields(LayerSummary)))
            >>> window = at | {"samples": 160, "first_step": 1840, "last_step": 1999, "lr_range": (3e-5, 1.2e-4)}
            >>> LayerSummary(**window).when
            'over steps 1,840-1,999 (lr 3e-5 to 1.2e-4)'
            >>> LayerSummary(**window | {"samples": 4}).when
            'over steps 1,840-1,999 (4 of 160 steps sampled, lr 3e-5 to 1.2e-4)'
        """
        if self.first_step is None or self.first_step == self.last_step:
            return self.steps
        low, high = (three_digits(lr) for lr in self.lr_range or (math.nan, math.nan))
        steps = self.last_step - self.first_step + 1
        few = self.samples < min(LEAST_WINDOW, steps)
        remarks = [f"{self.samples} of {steps:,} steps sampled"] if few else []
        remarks += [] if low == high else [f"lr {low} to {high}"]
        in_brackets = f" ({', '.join(remarks)})" if remarks else ""
        return f"{self.steps}{in_brackets}"

    @property
    def steps(self) -> str:
        """The steps of the window."""
        if self.first_step is None or self.first_step == self.last_step:
            return f"at step {self.last_step:,}"
        return f"over steps {self.first_step:,}-{self.last_step:,}"

    @property
    def sentence(self) -> str:
        """The summary in one sentence."""
        if self.angle is None:
            why = "" if self.idle is None else f": {self.idle}"
            return f"{self.name} has no angle in any sampled step{why}."
        return f"{self.name} turns {self.angle:.3g} rad per step {self.when}; {'; '.join(_clauses(self))}."


def summarise(samples: pa.Table, *, metadata: Mapping[str, Any], window: int | None = None) -> tuple[LayerSummary, ...]:
    """Summarise the last samples of every parameter.

    Angles are compared by their root mean square over a window, in which every sample has the weight of the steps that
    it stands for: half the way to its neighbours on both sides. The window is the last quarter of the samples since lr,
    weight decay or momentum last changed, or under a schedule since they last jumped, and at least the last 20. A
    window holds only samples at which every setting was within a factor of 2 of its present value, and none from before
    a jump by more than a tenth; it may hold fewer than 20. Left out are steps with an lr of 0, which move nothing,
    samples without a prediction where others have one, the first steps of a run where they were sampled more densely
    than the others, and the tail of a schedule that falls to nothing: the last samples, a fifth at most, with an lr
    below 5 % of the highest since the last jump, unless 20 of them have about the same lr.

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
    no_law, idle = [_no_law(entry) for entry in run.entries], _idle(run.series)
    law = _last_law(taken)
    lawless = np.array(
        [
            (looks is False and code != LAWS.index(GAIN_LAW)) or reason is not None or why is not None
            for looks, reason, why, code in zip(run.looks, no_law, idle, law.tolist(), strict=True)
        ]
    )
    if window is None:
        before_tail = _without_start(_without_tail(taken))
        size = _window_sizes(before_tail)
        recent = _last_rows(before_tail, np.minimum(size, before_tail.since_jump))
        recent = _with_prediction(_last_rows(recent, _alike(before_tail)), lawless)
        longer = _with_prediction(_last_rows(before_tail, size), lawless)
    else:
        recent = longer = _last_rows(taken, np.full(len(taken.names), whole("window", window, low=1)))
    table = _window_numbers(recent) | _present(recent)
    moved = run.series.where(~run.series.no_step & (run.series.columns["lr"] > 0))  # also those without an angle
    table |= {"first_lr": _first(moved, "lr"), "peak_lr": _peak_lr(taken), "last_lr": taken.last("lr")}
    table |= {"angle_error": _angle_error(recent, longer), "cosine": _rms(longer, longer.columns["cosine"])}
    table |= {"mean_cosine": taken.mean(taken.columns["cosine"])}
    per_entry = np.sqrt([max(float(entry.get("entries", 0)), 1.0) for entry in run.entries])
    table |= {"relative_update": _rms(recent, recent.columns["relative_update"])}
    table |= {"update_per_entry": _rms(recent, recent.columns["update_norm"]) / per_entry}
    over_run = _rms(taken, taken.columns["angle"]).astype(np.float32)  # the last digits depend on the other layers
    table |= {"first_norm": _first(taken, "norm"), "angle_over_run": over_run.astype(np.float64)}
    invariant = run.invariant
    runs_out = _lr_runs_out(_last_rows(taken, np.minimum(_PACE, taken.since_jump)))
    for name in ("steps_to_settle", "epochs_to_settle"):
        table[name][runs_out] = np.nan
    for name in _OF_A_LAW:  # the window may hold predictions from before that was known
        table[name][lawless] = np.nan
    for name in ("gain", "gain_error"):
        table[name][[why is not None for why in idle]] = np.nan
    if epoch := run.metadata.get("steps_per_epoch"):
        steps, epochs = table["steps_to_settle"], table["epochs_to_settle"]
        table["epochs_to_settle"] = np.where(np.isfinite(epochs), epochs, steps / epoch)
    state = recent.last("state")
    # A window may hold equilibria from before a gain became unsure.
    unbalanced = (law == LAWS.index(GAIN_LAW)) & (state == STATES.index(NO_EQUILIBRIUM))
    for name in _OF_EQUILIBRIUM:
        table[name][unbalanced] = np.nan
    state = np.where(lawless & (state >= 0), STATES.index(NO_EQUILIBRIUM), state)
    # The norm of a layer with a measured gain may pass its equilibrium while gradients still change.
    ratio = table["angle_vs_equilibrium"]
    turns_off = (law == LAWS.index(GAIN_LAW)) & ((ratio * _ABOUT < 1) | (ratio > _ABOUT))
    state = np.where(turns_off & (state == STATES.index(SETTLED)), STATES.index(SETTLING), state)
    settings = zip(*(table[name].tolist() for name in SETTINGS), strict=True)
    columns: dict[str, Iterable[Any]] = {name: _or_none(values) for name, values in table.items()}
    columns |= {
        "name": run.series.names,
        "samples": recent.counts.tolist(),
        "last_step": map(int, np.where(recent.counts > 0, recent.last("step"), run.series.last("step")).tolist()),
        "first_step": (None if step is None else int(step) for step in _or_none(_first(recent, "step"))),
        "recorded_from": (None if step is None else int(step) for step in _or_none(_first(taken, "step"))),
        "shape": (tuple(entry["shape"]) if "shape" in entry else None for entry in run.entries),
        "lr_range": _lr_ranges(recent),
        "lr_runs_out": runs_out.tolist(),
        "invariant": invariant,
        "how": (entry.get("how") for entry in run.entries),
        "state": (STATES[int(position)] if position >= 0 else None for position in state.tolist()),
        "settings": (
            settings_text(entry, rule, present, run.metadata)
            for entry, rule, present in zip(run.entries, run.rules, settings, strict=True)
        ),
        "no_law": no_law,
        "idle": idle,
        "how_wrong": map(_how_wrong, _or_none(table["angle_vs_predicted"])),
        "law": (
            None if code < 0 or void else LAWS[int(code)] for code, void in zip(law.tolist(), lawless, strict=True)
        ),
        "budget": layer_budgets(run, recent),
    }
    columns["no_gain"] = (
        None
        if predicted or reason is not None or why is not None
        else missing_gain(tuple(entry["shape"]) if "shape" in entry else None, samples=count, steps=steps)
        for predicted, reason, why, entry, count, steps in zip(
            np.isfinite(table["angle_predicted"]).tolist(),
            no_law,
            idle,
            run.entries,
            taken.counts.tolist(),
            np.nan_to_num(taken.last("step") - _first(taken, "step")).astype(np.int64).tolist(),
            strict=True,
        )
    )
    in_order = (columns[field.name] for field in dataclasses.fields(LayerSummary))
    return tuple(_without_doubtful_time(LayerSummary(*row)) for row in zip(*in_order, strict=True))


def _without_doubtful_time(layer: LayerSummary) -> LayerSummary:
    """The summary without a time to settle that norm and angle do not agree about."""
    if layer.steps_to_settle is None or layer.norm_vs_equilibrium is None or layer.norm_explains_angle:
        return layer
    return dataclasses.replace(layer, steps_to_settle=None, epochs_to_settle=None)


def _idle(series: Series) -> list[str | None]:
    """Why no gradient moves a parameter: it gets none, its lr is 0, or its gradient is exactly 0."""
    reasons: list[str | None] = [None] * len(series.names)
    zero, missing = zero_gradient_since(series), without_gradient_since(series)
    lr_is_zero = (series.sums((series.columns["lr"] != 0).astype(np.float64)) == 0) & (series.counts > 0)
    for since, what in ((zero, "gradient exactly 0"), (missing, "no gradient")):
        for position in np.flatnonzero(np.isfinite(since)).tolist():
            always = since[position] == series.columns["step"][series.first[position]]
            reasons[position] = what if always else f"{what} since step {int(since[position]):,}"
    for position in np.flatnonzero(lr_is_zero & ~np.isfinite(missing)).tolist():
        reasons[position] = "lr is 0"
    return reasons


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


def _without_tail(taken: Series) -> Series:
    """The rows without the tail of a schedule that falls to nothing, of parameters that have few others at its lr."""
    first = np.maximum(taken.last_jump, taken.first[:-1])
    row, lr = np.arange(taken.first[-1]), np.nan_to_num(taken.columns["lr"])
    since_jump = row >= np.repeat(first, taken.counts)
    highest = np.maximum.reduceat(np.append(np.where(since_jump, lr, 0.0), 0.0), taken.first[:-1])
    tail_begin = last_true(taken, since_jump & (lr >= _TAIL * np.repeat(highest, taken.counts))) + 1
    tail = taken.first[1:] - tail_begin
    leave_out = (tail <= _LONGEST_TAIL * taken.since_jump) & (_alike(taken) < LEAST_WINDOW) & (taken.counts > 0)
    return taken.where(~np.repeat(leave_out, taken.counts) | (row < np.repeat(tail_begin, taken.counts)))


def _without_start(series: Series) -> Series:
    """The rows without the first steps of a run where they were sampled more densely than later ones.

    ``every="auto"`` samples the first two steps whatever they cost, then as often as the budget allows. They stay where
    no more samples follow than there are of them.
    """
    step, counts = series.columns["step"], series.counts
    pace = (series.last("step") - _first(series, "step")) / np.maximum(counts - 1, 1)
    gap = np.append(np.diff(step), 0)
    row = np.arange(len(step))
    spaced = np.where(gap >= np.repeat(pace, counts) / 2, row, len(row))
    end = np.minimum.reduceat(np.append(spaced, len(row)), series.first[:-1])  # the last row of the dense beginning
    dense = np.where(counts > 0, end + 1 - series.first[:-1], 0)
    leave_out = (dense > 1) & (counts >= 2 * dense)
    return series.where(row >= np.repeat(series.first[:-1] + np.where(leave_out, dense, 0), counts))


def _window_sizes(series: Series) -> Array:
    """Rows in the window of each parameter, before it is cut to those at about the present settings."""
    since_change = series.first[1:] - last_true(series, setting_changes(series))
    since = np.where(since_change < LEAST_WINDOW, series.since_jump, since_change)
    return np.asarray(np.maximum(-(-since // 4), LEAST_WINDOW))


def _alike(series: Series) -> Array:
    return np.asarray(series.first[1:] - alike_since(series))


def _last_rows(series: Series, size: Array) -> Series:
    begin = np.maximum(series.first[1:] - size, series.first[:-1])
    return series.where(np.arange(series.first[-1]) >= np.repeat(begin, series.counts))


def _last_law(taken: Series) -> Array:
    """The position of each parameter's last law in LAWS, -1 without any."""
    row = last_true(taken, taken.columns["law"] >= 0)
    known = (row >= taken.first[:-1]) & (taken.counts > 0)
    return np.where(known, np.append(taken.columns["law"], -1)[np.where(known, row, -1)], -1)


def _with_prediction(series: Series, lawless: Array) -> Series:
    """The rows with a prediction by the last law, and all rows of a parameter that has none or, since then, no law."""
    known = np.isfinite(series.columns["angle_predicted"])
    known &= series.columns["law"] == np.repeat(_last_law(series), series.counts)
    without = lawless | (series.sums(known.astype(np.float64)) == 0)
    return series.where(known | np.repeat(without, series.counts))


def _window_numbers(recent: Series) -> dict[str, Array]:
    """Root mean squares over the window, and their ratios."""
    names = ("angle", "angle_predicted", "angle_equilibrium")
    numbers = {name: _rms(recent, recent.columns[name]) for name in names}
    for name in names[1:]:
        numbers[f"angle_vs_{name[6:]}"] = numbers["angle"] / np.where(numbers[name] > 0, numbers[name], np.nan)
    return numbers


def _angle_error(recent: Series, longer: Series) -> Array:
    """Relative standard error of measured / predicted over the window.

    From the scatter of the ratio of single samples over more rows than the window has, around its mean in the window
    and before it: the error is known also where the window is short, and unknown with fewer than 20 samples in all.
    """
    from_the_end = np.repeat(longer.first[1:], longer.counts) - np.arange(longer.first[-1])
    is_recent = from_the_end <= np.repeat(recent.counts, longer.counts)
    weights = longer.weights
    squares, known, groups = np.zeros(len(recent.names)), np.zeros(len(recent.names)), np.zeros(len(recent.names))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio_sq = (longer.columns["angle"] / longer.columns["angle_predicted"]) ** 2
        for rows in (is_recent, ~is_recent):
            of_group = np.where(rows & np.isfinite(ratio_sq), ratio_sq, np.nan)
            residual = of_group / np.repeat(longer.mean(of_group, weights), longer.counts) - 1
            count = longer.sums(np.isfinite(residual).astype(np.float64))
            squares, known, groups = (
                squares + longer.sums(np.nan_to_num(residual) ** 2),
                known + count,
                groups + (count > 0),
            )
        scatter = np.sqrt(squares / (known - groups + 1)) / 2
        spacing = (recent.last("step") - _first(recent, "step")) / np.maximum(recent.counts - 1, 1)
        correlation = np.clip(np.nan_to_num(recent.last("momentum")), 0, 0.9999) ** (2 * np.maximum(spacing, 1))
        of_recent = recent.weights
        count = recent.sums(of_recent) ** 2 / recent.sums(of_recent**2)  # `effective_count` of each parameter
        error = scatter * np.sqrt(np.minimum((1 + correlation) / (1 - correlation), count) / count)
    return np.asarray(np.where(known >= LEAST_WINDOW, error, np.nan))


def _peak_lr(taken: Series) -> Array:
    lr = np.append(np.nan_to_num(taken.columns["lr"], nan=-np.inf), -np.inf)
    return np.where(taken.counts > 0, np.maximum.reduceat(lr, taken.first[:-1]), np.nan)


def _lr_ranges(recent: Series) -> list[tuple[float, float] | None]:
    ranges = (recent.of(position)["lr"] for position in range(len(recent.names)))
    return [(float(lr.min()), float(lr.max())) if len(lr) else None for lr in ranges]


def _first(recent: Series, name: str) -> Array:
    return np.where(recent.counts > 0, np.append(recent.columns[name], np.nan)[recent.first[:-1]], np.nan)


def _lr_runs_out(recent: Series) -> Array:
    """Whether lr falls steadily, and at a pace that would end at 0 before the layer could settle."""
    moves = recent.sums(setting_changes(recent).astype(np.float64)) > recent.counts / 2
    rises = np.diff(recent.columns["lr"], prepend=np.nan) > 0
    rises[recent.first[:-1][recent.counts > 0]] = False
    moves &= recent.sums(rises.astype(np.float64)) == 0
    fall = _first(recent, "lr") - recent.last("lr")
    pace = fall / np.maximum(recent.last("step") - _first(recent, "step"), 1)
    return np.asarray(moves & (recent.last("steps_to_settle") * pace > recent.last("lr")))


def _rms(series: Series, values: Array) -> Array:
    return np.sqrt(series.mean(values**2))


def _present(recent: Series) -> dict[str, Array]:
    now = ("norm", "norm_predicted", "norm_equilibrium", "steps_to_settle", "epochs_to_settle", "gain", "gain_error")
    numbers = {name: recent.last(name) for name in (*now, *SETTINGS)}
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


def _few_digits(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def how_long(steps: float, epochs: float | None) -> str:
    """A time in steps, with epochs where their length is known.

    Example:
        >>> how_long(2100, 5.37), how_long(1, None)
        ('2,100 more steps (5.4 epochs)', '1 more step')
    """
    return counted(math.ceil(steps), "more step") + (f" ({_few_digits(epochs)} epochs)" if epochs else "")


def _clauses(layer: LayerSummary) -> list[str]:
    """The clauses of the sentence after the measured angle."""
    if layer.no_law is not None:
        return [layer.no_law]
    if layer.idle is not None:
        return [layer.idle]
    if layer.invariant is False and not layer.by_gain:
        return [f"{_not_invariant(layer)}, {_why_no_gain(layer)}"]
    if layer.angle_predicted is None:
        undecided = layer.invariant is None and layer.mean_cosine is not None
        why = "whether it is scale-invariant is undecided, " if undecided else ""
        return [f"{why}{_why_no_gain(layer)}"]
    predicts = f"{layer.settings} predicts {layer.angle_predicted:.3g}"
    if layer.by_gain:
        predicts = f"its measured gain {gain_text(layer)} predicts {layer.angle_predicted:.3g}"
    elif layer.invariant is None:
        return [f"{predicts} if it is scale-invariant, which is undecided"]
    if layer.weight_decay == 0:
        turns = "" if layer.by_gain else "its norm grows and it turns ever more slowly: "
        return [predicts, f"without weight decay {turns}there is no equilibrium"]
    if layer.angle_equilibrium is None:
        unknown = "its gain is not known to be positive: no equilibrium is stated"
        return [predicts, unknown if layer.by_gain else "with these settings there is no equilibrium"]
    if layer.state == SETTLED:
        return [predicts, "it is settled"]
    when = "now" if layer.last_lr == layer.lr else "there"
    return [f"{predicts} {when} and {layer.angle_equilibrium:.3g} in equilibrium", _distance(layer)]


def gain_text(layer: LayerSummary) -> str:
    """The growth gain with its standard error.

    Example:
        >>> at = dict.fromkeys((field.name for field in dataclasses.fields(LayerSummary)))
        >>> gain_text(LayerSummary(**at | {"gain": 23.4, "gain_error": 1.52}))
        '23.4 ± 1.5'
    """
    return "" if layer.gain is None else f"{layer.gain:.3g} ± {layer.gain_error or math.nan:.2g}"


def _why_no_gain(layer: LayerSummary) -> str:
    one = "{} has no prediction" if layer.no_gain is None else layer.no_gain[0]
    return f"and {one.format('it')}"


def _not_invariant(layer: LayerSummary) -> str:
    if layer.how is None or layer.how == "no":
        cosine = "" if layer.mean_cosine is None else f" (mean cosine with its gradient {layer.mean_cosine:.2g})"
        return f"it {'is not' if layer.how else 'does not look'} scale-invariant{cosine}"
    return f"it is not scale-invariant by itself ({layer.how})"


def _distance(layer: LayerSummary) -> str:
    since = "since the last change " if layer.state == DISTURBED else ""
    if layer.lr_runs_out:
        high, now = (three_digits(lr or math.nan) for lr in ((layer.lr_range or (0.0, 0.0))[1], layer.last_lr))
        fell = "lr is falling" if high == now else f"lr fell from {high} to {now} since step {layer.first_step or 0:,}"
        return f"{fell}, too fast for a time to settle at one lr"
    if layer.norm_vs_equilibrium is not None and not layer.norm_explains_angle:
        return "its gradient has changed too much for a time to settle"
    norm = None if layer.norm_vs_equilibrium is None else f"is {times(layer.norm_vs_equilibrium)}"
    steps = layer.steps_to_settle
    if steps == 0 and norm is not None and layer.angle_vs_equilibrium is not None:
        return f"{since}its norm {norm}, but it still turns at {layer.angle_vs_equilibrium:.2g}x its equilibrium"
    wait = None
    if steps:
        wait = f"needs {how_long(steps, layer.epochs_to_settle)} to settle at this lr and weight decay"
    if steps and steps > _MUCH_LONGER * (layer.last_step + 1):
        wait = f"would take more than {_MUCH_LONGER} times the steps so far to settle at this lr and weight decay"
    return f"{since}its norm {' and '.join(filter(None, (norm, wait))) or 'is not settled'}"
