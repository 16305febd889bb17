"""Which samples summarise a layer, and the summary of every layer of a run from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.budget import layer_budgets, missing_gain
from equilibria.diagnosis.layer_summary import LEAST_WINDOW, LayerSummary, log_error
from equilibria.diagnosis.metadata import settings_text
from equilibria.diagnosis.passing import passing_steps
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
from equilibria.diagnosis.siblings import is_row_kind, kind_of
from equilibria.errors import whole
from equilibria.records.tables import (
    CHANGED_OUTSIDE,
    DISTURBED,
    GAIN_LAW,
    LAWS,
    NO_EQUILIBRIUM,
    NOTES,
    SETTLED,
    SETTLING,
    STATES,
)
from equilibria.theory.equilibrium import ROUNDED_AWAY
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, AdamL2, Rule

_TAILS = 0.025 * np.arange(1, 9)  # of the steps since a jump
_FEW = 10  # samples at about one lr that are worth leaving out a tail for
_PACE, _REGULAR = 4, 0.5  # changes of lr that give the pace of a schedule, and how far their distances may differ
_ABOUT = 1.28  # factor of the angle from equilibrium up to which a layer with a measured gain may count as settled
_OF_EQUILIBRIUM = (
    *("angle_equilibrium", "angle_vs_equilibrium", "norm_equilibrium", "norm_vs_equilibrium"),
    *("steps_to_settle", "epochs_to_settle"),
)
_OF_A_LAW = (
    *("angle_predicted", "angle_vs_predicted", "norm_predicted", "norm_vs_predicted", "angle_error"),
    *_OF_EQUILIBRIUM,
)  # fields that are None for a layer without a law


def summarise(samples: pa.Table, *, metadata: Mapping[str, Any], window: int | None = None) -> tuple[LayerSummary, ...]:
    """Summarise the last samples of every parameter.

    Angles are compared by their root mean square over a window, in which every sample has the weight of the steps that
    it stands for: half the way to its neighbours on both sides. The window is the last quarter of the samples since lr,
    weight decay or momentum last changed, or under a schedule since they last jumped, and at least the last 20. A
    window holds only samples at which every setting was within a factor of 2 of its present value, and none from before
    a jump by more than a tenth; it may hold fewer than 20. Left out are steps with an lr of 0, which move nothing,
    samples without a prediction where others have one, the first steps of a run where they were sampled more densely
    than the others, and the steep tail of a falling schedule: the fewest last steps, a fifth at most of those from the
    last jump to the last sample, before which 10 samples have an lr within a factor of 2, or else most have. The window
    ends with the last sample before the tail.

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
    before_tail = taken
    if window is None:
        before_tail = _without_start(_without_tail(taken, _with_prediction(taken, lawless)))
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
    per_entry = np.sqrt([float(entry.get("entries") or np.nan) for entry in run.entries])
    table |= {"relative_update": _rms(recent, recent.columns["relative_update"])}
    table |= {"update_per_entry": _rms(recent, recent.columns["update_norm"]) / per_entry}
    over_run = _rms(taken, taken.columns["angle"]).astype(np.float32)  # the last digits depend on the other layers
    table |= {"first_norm": _first(taken, "norm"), "angle_over_run": over_run.astype(np.float64)}
    invariant = run.invariant
    runs_out = _lr_runs_out(taken, taken.last("steps_to_settle")) | (taken.last("lr") < recent.last("lr"))
    for name in ("steps_to_settle", "epochs_to_settle"):
        table[name][runs_out] = np.nan
    for name in _OF_A_LAW:  # the window may hold predictions from before that was known
        table[name][lawless] = np.nan
    for name in ("gain", "gain_error"):
        table[name][[why is not None for why in idle]] = np.nan
    if epoch := run.metadata.get("steps_per_epoch"):
        steps, epochs = table["steps_to_settle"], table["epochs_to_settle"]
        table["epochs_to_settle"] = np.where(np.isfinite(epochs), epochs, steps / epoch)
    state = _states(taken, recent)
    # A window may hold equilibria from before a gain became unsure.
    unbalanced = (law == LAWS.index(GAIN_LAW)) & (state == STATES.index(NO_EQUILIBRIUM))
    table["rounding"] = _roundings(run)
    swallowed = np.isfinite(table["rounding"]) & ~_is_coupled(run)  # no decay acts: there is nothing to settle to
    for name in _OF_EQUILIBRIUM:
        table[name][unbalanced | swallowed] = np.nan
    state = np.where((lawless | swallowed) & (state >= 0), STATES.index(NO_EQUILIBRIUM), state)
    ratio = table["angle_vs_equilibrium"]
    turns_off = (law == LAWS.index(GAIN_LAW)) & ((ratio * _ABOUT < 1) | (ratio > _ABOUT))
    near = state == STATES.index(SETTLED)
    passing = passing_steps(before_tail, entries=run.entries, rules=run.rules) if near.any() else np.nan
    table["passing"] = np.where(near, passing, np.nan)
    state = np.where(near & (turns_off | np.isfinite(table["passing"])), STATES.index(SETTLING), state)
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
        "how_wrong": map(log_error, _or_none(table["angle_vs_predicted"])),
        "law": (
            None if code < 0 or void else LAWS[int(code)] for code, void in zip(law.tolist(), lawless, strict=True)
        ),
        "budget": (
            None if lost else budget
            for budget, lost in zip(layer_budgets(run, recent), swallowed.tolist(), strict=True)
        ),
        "decay_rounds_away": swallowed.tolist(),
        "resolution": (ROUNDED_AWAY.get(str(entry.get("dtype"))) for entry in run.entries),
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


def _states(taken: Series, recent: Series) -> Array:
    """The last state of each parameter, -1 without any; disturbed only by a jump that found it settled."""
    state = recent.last("state")
    earlier = np.arange(taken.first[-1]) < np.repeat(taken.last_jump, taken.counts)
    settled = taken.sums(np.where(earlier, taken.columns["state"] == STATES.index(SETTLED), 0.0)) > 0
    outside = taken.sums((taken.columns["note"] == NOTES.index(CHANGED_OUTSIDE)).astype(np.float64)) > 0
    return np.where(~settled & ~outside & (state == STATES.index(DISTURBED)), STATES.index(SETTLING), state)


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
            if always or not is_row_kind(kind_of(series.names[position])):  # a rare token comes back
                reasons[position] = what if always else f"{what} since step {int(since[position]):,}"
    for position in np.flatnonzero(lr_is_zero & ~np.isfinite(missing)).tolist():
        reasons[position] = "lr is 0"
    return reasons


def _no_law(entry: Mapping[str, Any]) -> str | None:
    if entry.get("rule") or entry.get("promised_by"):  # a controller promises the angle, and is held to it
        return None
    return entry.get("no_law") or "no law is known for its optimizer"


def _or_none(values: Array) -> list[Any]:
    """The numbers of a column, None where unknown."""
    listed = values.astype(object)
    listed[~np.isfinite(values)] = None
    return list(listed.tolist())


def _without_tail(taken: Series, judged: Series) -> Series:
    """The rows without the tail of a falling schedule, of parameters with few judged rows at about the last lr.

    Left out are the fewest last steps before which `_FEW` judged rows have about the lr of the last one; where no tail
    allowed is long enough, those before which most have it.
    """
    best, cut = np.minimum(_alike(judged), _FEW), np.zeros(len(taken.names), dtype=np.int64)
    if (best == _FEW).all():
        return taken
    settings = judged.only(**{name: judged.columns[name] for name in (*SETTINGS, "step")})
    last = np.nan_to_num(taken.last("step"))
    since_jump = last + 1 - np.append(taken.columns["step"], 0)[taken.last_jump]

    def before(tail: Array, rows: Series) -> Series:
        return rows.where(rows.columns["step"] <= np.repeat(last - tail, rows.counts))

    for share in _TAILS:
        tail = (share * since_jump).astype(np.int64)
        earlier = before(tail, settings)
        alike = np.where(earlier.last("lr") > taken.last("lr"), np.minimum(_alike(earlier), _FEW), 0)
        best, cut = np.maximum(best, alike), np.where(alike > best, tail, cut)
    return before(cut, taken)


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


def _lr_runs_out(taken: Series, settling: Array) -> Array:
    """Whether lr falls steadily, and at a pace that would end at 0 before the layer could settle."""
    rows = (taken.of(position) for position in range(len(taken.names)))
    runs_out = (_ends_before(row["step"], row["lr"], wait) for row, wait in zip(rows, settling.tolist(), strict=True))
    return np.fromiter(runs_out, dtype=bool, count=len(taken.names))


def _ends_before(step: Array, lr: Array, wait: float) -> bool:
    """Whether lr, which falls at every step or by steps of equal length such as epochs, would be 0 before so long."""
    changes = np.flatnonzero(np.diff(lr))[-_PACE:] + 1
    if len(changes) < _PACE or not np.all(np.diff(lr[[*(changes - 1), -1]]) < 0):
        return False
    begins = step[changes]
    lengths = np.append(np.diff(begins), step[-1] - begins[-1])
    usual = float(np.median(lengths[:-1]))
    if np.any(np.abs(lengths[:-1] - usual) > _REGULAR * usual) or lengths[-1] > (1 + _REGULAR) * usual:
        return False
    pace = (lr[changes[0]] - lr[-1]) / (begins[-1] - begins[0])
    return bool(wait * pace > lr[-1])


def _rms(series: Series, values: Array) -> Array:
    return np.sqrt(series.mean(values**2))


def _present(recent: Series) -> dict[str, Array]:
    now = ("norm", "norm_predicted", "norm_equilibrium", "steps_to_settle", "epochs_to_settle", "gain", "gain_error")
    numbers = {name: recent.last(name) for name in (*now, *SETTINGS)}
    for name in ("predicted", "equilibrium"):
        numbers[f"norm_vs_{name}"] = numbers["norm"] / numbers[f"norm_{name}"]
    return numbers


# ---- rounding


def _is_coupled(run: SampledRun) -> Array:
    """Whether the decay of each parameter is part of its update, and rounded with it."""
    return np.array([isinstance(rule, SGD | AdamL2 | Identified) for rule in run.rules])


def _roundings(run: SampledRun) -> Array:
    """Relative change per step, by decay or (coupled) update, of the layers whose type rounds that away; else NaN."""
    columns = run.taken.columns
    change = np.where(
        np.repeat(_is_coupled(run), run.taken.counts),
        columns["angle_predicted"],
        columns["lr"] * columns["weight_decay"],
    )
    limits = np.array([_rounding_limit(rule, entry) for rule, entry in zip(run.rules, run.entries, strict=True)])
    known = run.taken.only(change=change).where(np.isfinite(change))
    roundings = np.full(len(run.taken.names), np.nan)
    for layers, (changes,) in known.blocks("change"):
        suspicious = np.min(changes, axis=1) < limits[layers]
        layers, changes = layers[suspicious], changes[suspicious]
        # The median: the end of a schedule that falls to zero is no reason for alarm.
        typical = np.median(changes, axis=1)
        roundings[layers] = np.where((typical > 0) & (typical < limits[layers]), typical, np.nan)
    return roundings


def _rounding_limit(rule: Rule | None, entry: Mapping[str, Any]) -> float:
    if rule is None or rule.weight_decay == 0:
        return math.nan
    return ROUNDED_AWAY.get(str(entry.get("dtype")), math.nan)
