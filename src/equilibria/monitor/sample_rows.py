"""Turns readings into rows of the sample table: every measurement with its prediction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.monitor.gain import GainPredictor
from equilibria.monitor.predictor import OptimizerMemory, Prediction, Predictor
from equilibria.monitor.reading import MeasuredStep, StepReading
from equilibria.monitor.settings_log import Settings
from equilibria.records.tables import (
    CHANGED_OUTSIDE,
    DISTURBED,
    GAIN_LAW,
    INVARIANT_LAW,
    NO_EQUILIBRIUM,
    NO_GRADIENT,
    NOT_FINITE,
    REMOVED,
    RESCALED,
    SETTLED,
    SETTLING,
    SKIPPED,
)
from equilibria.tensors.parameters import Watched
from equilibria.theory.rules import SGD, SGDW, AdamW, Rule

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOVED_BETWEEN = 1e-5  # relative change of the norm between two steps that rounding cannot explain
_FURTHER = 5  # times the length of the sampled steps, which the steps between them do not reach on average
_STEADY = 0.1  # relative change of the norm from sample to sample, up to which it holds in between
_ULPS = 8  # relative update in units of the type's eps above which rounding changes its square by less than 0.1 %
_ABOUT_GRADIENT = ("grad_norm", "cosine", "unit_grad_sq")
_NUMBERS = ("angle", "norm", "angle_equilibrium", "norm_equilibrium", "steps_to_settle")  # that both laws predict


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows of the sample table for one sampled step of one optimizer.

    Attributes:
        columns: values by column name.
        restart: whether the predictions must start again: the next reading has to include the optimizer's state.
        rounded: the tensors, by their index, whose update is so small that rounding decides what remains of it.
        exact: the tensors whose update is larger than that; one that did not move is in neither.
    """

    columns: dict[str, Any]
    restart: bool
    rounded: frozenset[int]
    exact: frozenset[int]


class SampleBuilder:
    """Turns the readings of one optimizer into columns of the sample table.

    Args:
        watched: the tensors of the readings.
        steps_per_epoch: converts steps to settle into epochs; None leaves that column empty.

    Attributes:
        names: of all units.
        steady_norms: their norms after the last sampled step; NaN where the sample before had another one.
    """

    def __init__(self, watched: Sequence[Watched], *, steps_per_epoch: int | None) -> None:
        self.names = [name for layer in watched for name in layer.unit_names]
        self._steps_per_epoch = steps_per_epoch
        self._units = np.array([layer.units for layer in watched], dtype=np.int64)
        self._tensors = self._per_row(range(len(watched)))
        self._least_exact = self._per_row([_ULPS * _eps(layer) for layer in watched])
        self._groups = self._per_row([layer.group for layer in watched])
        self._entries = self._per_row([float(layer.entries) for layer in watched])
        labels = [layer.invariant or [np.nan] * layer.units for layer in watched]
        invariant = np.concatenate([[], *labels]).astype(np.float64)
        shapes = [_matrix_shape(layer) for layer in watched for _ in range(layer.units)]
        self._predictors = {
            int(group): Predictor(
                self._entries[self._groups == group],
                invariant=invariant[self._groups == group],
                shapes=[shape for shape, own in zip(shapes, self._groups, strict=True) if own == group],
            )
            for group in sorted(set(self._groups))
        }
        self._gains = {group: GainPredictor(self._entries[self._groups == group]) for group in self._predictors}
        self._is_matrix = self._per_row([layer.param.dim() > 1 for layer in watched]).astype(bool)
        self._distinct = list(self._predictors)
        self._group_rows = np.searchsorted(self._distinct, self._groups)  # position of each row's group among these
        single = len(self._predictors) == 1  # then all rows are its own
        self._rows: dict[int, Any] = {
            group: slice(None) if single else self._groups == group for group in self._predictors
        }
        self._labels = StateLabels(len(self.names))
        self._norm_after = np.full(len(self.names), np.nan)
        self.steady_norms = self._norm_after
        self._speed = np.full(len(self.names), np.nan)  # length of the last sampled step per unit of learning rate
        # Weights whose change from outside showed only in their norm, when Adam's memory of them was not read: they
        # have no prediction until a later reading includes it.
        self._stale = np.zeros(len(self.names), dtype=bool)
        self._last: tuple[int, dict[int, Settings]] | None = None

    def build(self, reading: StepReading) -> SampleRows:
        """The rows of one sampled step, whose products are in main memory and summed over all processes."""
        products = self._products(reading)
        skipped = reading.found_inf is not None and bool(reading.found_inf)
        settings = {group: reading.settings[group].at(reading.count) for group in self._predictors}
        missing, unread = self._per_row(reading.missing), self._per_row(reading.unread)
        with np.errstate(all="ignore"):  # gradients and weights may be anything, and the samples say so
            if reading.grad_scale is not None:
                products = self._unscaled(reading, products)
            if reading.stands_for:
                products = self._of_runs_stood_for(reading, products)
            measured = self._measured(reading, products)
            lr, weight_decay, momentum = np.array([settings[group][:3] for group in self._distinct])[self._group_rows].T
            changed, jumped = self._changed(reading, measured, lr)
            turned = self._per_row([angle is not None for angle in reading.promised]).astype(bool)
            prediction, by_gain, restart = self._predict(
                reading, measured, products, changed=changed, skipped=skipped, turned=turned
            )
            if turned.any():
                prediction = _as_promised(prediction, self._per_row(reading.promised).astype(np.float64), turned)
            columns = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
            columns |= _measured_columns(measured, lr, missing=missing, unread=unread, skipped=skipped)
            columns |= _prediction_columns(prediction, steps_per_epoch=self._steps_per_epoch)
            gain = self._update_gain(reading, measured, settings, turned)
            columns |= _nullable({"pull": products[:, 9], "scaled_grad_sq": products[:, 10], "update_gain": gain})
            columns |= _nullable({"update_intended": self._intended(reading)})
            growth = np.zeros_like(lr) if skipped else measured.growth
            columns |= _nullable({"growth": growth, **self._measured_gains(turned)})
            norm_after = measured.norm if skipped else np.sqrt(measured.norm_sq_after)
            self.steady_norms = np.where(abs(norm_after / self._norm_after - 1) <= _STEADY, norm_after, np.nan)
            self._norm_after = norm_after
            self._speed = measured.moved / lr
        columns["step"] = np.full(len(self.names), reading.step, dtype=np.int64)
        columns["param"] = self.names
        balanced = np.isfinite(prediction.norm_equilibrium) | (turned & prediction.settled)
        columns["law"] = _laws(prediction, by_gain, turned)
        columns["state"] = self._labels.update(prediction.settled, changed=changed | jumped, balanced=balanced)
        rescaled = self._scale(reading) != 1
        removed = self._per_row(reading.removed).astype(bool)
        columns["note"] = _notes(
            measured,
            changed=changed,
            rescaled=rescaled,
            missing=missing,
            removed=removed,
            unread=unread,
            skipped=skipped,
        )
        self._last = reading.count, settings
        moves, is_small = measured.moved > 0, measured.moved < self._least_exact * measured.norm
        rounded, exact = (frozenset(self._tensors[rows].tolist()) for rows in (moves & is_small, moves & ~is_small))
        return SampleRows(columns, restart, rounded, exact - rounded)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and tensors for a checkpoint."""
        return {
            "names": list(self.names),
            "predictors": {group: predictor.state_dict() for group, predictor in self._predictors.items()},
            "gains": {group: predictor.state_dict() for group, predictor in self._gains.items()},
            "labels": self._labels.state_dict(),
            "norm_after": torch.from_numpy(self._norm_after.copy()),
            "speed": torch.from_numpy(self._speed.copy()),
            "stale": torch.from_numpy(self._stale.copy()),
            "last": None
            if self._last is None
            else (self._last[0], {group: tuple(settings) for group, settings in self._last[1].items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint of the same weights."""
        for group, predictor in self._predictors.items():
            predictor.load_state_dict(state["predictors"][group])
            if "gains" in state:  # a checkpoint of an earlier version has none: they are measured again
                self._gains[group].load_state_dict(state["gains"][group])
        self._labels.load_state_dict(state["labels"])
        arrays = (state[name].numpy().copy() for name in ("norm_after", "speed", "stale"))
        self._norm_after, self._speed, self._stale = arrays
        self._last = None
        if state["last"] is not None:
            count, settings = state["last"]
            self._last = count, {group: Settings(*values) for group, values in settings.items()}

    # ---- measured

    def _products(self, reading: StepReading) -> Array:
        """The inner products of a reading and the two of its pull, (rows, 11); NaN where there is nothing to read."""
        products = np.full((len(self.names), 11), np.nan)
        products[:, :9] = reading.products.numpy()
        products[self._per_row(reading.missing).astype(bool)] = np.nan
        unread, starts = (self._per_row(flags).astype(bool) for flags in (reading.unread, reading.starts))
        products[unread, 1:3] = np.nan
        products[~starts, 6:9] = 0
        if reading.pull is not None:
            products[reading.pull.rows, 9:] = reading.pull.read()
        return products

    def _per_row(self, per_tensor: Sequence[Any]) -> NDArray[Any]:
        """One value per row from one value per tensor."""
        return np.repeat(np.asarray(per_tensor), self._units, axis=0)

    def _unscaled(self, reading: StepReading, products: Array) -> Array:
        """Divide the gradient in the products by the factor that a loss scaler left in it."""
        scale, combined = float(reading.grad_scale), self._per_row(reading.combined)  # type: ignore[arg-type]
        products = products.copy()
        products[:, [1, 9]] /= scale
        products[:, [2, 10]] /= scale * scale
        products[combined, 4] /= scale
        return products

    def _of_runs_stood_for(self, reading: StepReading, products: Array) -> Array:
        """The products of the weights, gradients and buffers that stored ones stand for (`StandsFor`).

        With ``w = w~/P``, ``g = P g~``, ``v = P v~ + q w`` and, for a measured move, ``w' = (1 - s) w + e`` with
        ``1 - s = P/P'`` and ``e = (P/P') e~ / P``.
        """
        products, combined = products.copy(), self._per_row(reading.combined).astype(bool)
        for group, run in reading.stands_for.items():
            rows, p, q = self._groups == group, run.scale, run.share
            ww, wg, gg, x, y, z, wm, mm, second, pull, scaled = products[rows].T
            ww, gg = ww / p**2, gg * p**2
            kept = 1 - self._per_row(reading.combinations)[rows, 2]
            with_buffer = x + q * ww, p**2 * y + q * wg, p**2 * z + 2 * q * x + q * q * ww
            with_move = kept * x / p**2, kept**2 * y / p**2, z
            moved = (np.where(combined[rows], a, b) for a, b in zip(with_buffer, with_move, strict=True))
            start = wm + q * ww, p**2 * mm + 2 * q * wm + q * q * ww
            products[rows] = np.stack([ww, wg, gg, *moved, *start, second, pull, scaled], axis=1)
        return products

    def _measured(self, reading: StepReading, products: Array) -> MeasuredStep:
        """The step, from the products of weight, gradient and buffer or from those of the measured move."""
        combined, (own, kept, shrink) = self._per_row(reading.combined), self._per_row(reading.combinations).T
        ww, wg, gg, x, y, z = products.T[:6]
        we = np.where(combined, own * wg + kept * x, x)
        ee = np.where(combined, own * own * gg + 2 * own * kept * y + kept * kept * z, y)
        uphill = own > 0  # maximize: the buffer then accumulates -g
        vg = np.where(combined & (kept != 0), np.where(uphill, -y, y), np.nan)
        return MeasuredStep(ww=ww, wg=wg, gg=gg, we=we, ee=ee, vg=vg, shrink=shrink)

    def _changed(self, reading: StepReading, measured: MeasuredStep, lr: Array) -> tuple[Flags, Flags]:
        """Weights that somebody else changed since the last sample, if this can be seen; weights whose settings jumped.

        Torch counts the changes of a tensor, but not those through ``.data``. These show in the norm, if it differs
        from the norm after the last sample by more than the steps between could do.
        """
        changed = self._per_row(reading.changed).astype(bool)
        first = reading.count if self._last is None else self._last[0] + 1
        logs = [reading.settings[group] for group in self._distinct]
        jumped = np.array([log.jumped(first, reading.count + 1) for log in logs])[self._group_rows]
        if self._last is not None:
            lr_sums = [sum(settings.lr for settings in log.between(first, reading.count)) for log in logs]
            lr_sum = np.array(lr_sums, dtype=np.float64)[self._group_rows]
            reach = np.where(lr_sum > 0, _FURTHER * lr_sum * np.fmax(self._speed, measured.moved / lr), 0.0)
            expected = self._norm_after * self._scale(reading)
            changed |= np.abs(measured.norm - expected) > reach + _MOVED_BETWEEN * measured.norm
        return changed, jumped

    def _scale(self, reading: StepReading) -> Array:
        """What controllers multiplied every row by since the previous sample."""
        scale = np.ones(len(self.names))
        for _, factors in reading.rescalings:
            scale *= self._per_row(factors)
        return scale

    def _intended(self, reading: StepReading) -> Array:
        """The length of the update without rounding to 16 bits; NaN where nothing estimates it."""
        intended = np.full(len(self.names), np.nan)
        if reading.intended is not None:
            intended[reading.intended.rows] = np.sqrt(reading.intended.squares())
        return intended

    def _update_gain(
        self, reading: StepReading, measured: MeasuredStep, settings: Mapping[int, Settings], turned: Flags
    ) -> Array:
        """kappa of AdamW from the measured update, which is lr m/sqrt(v); NaN for other rules."""
        gain = np.full(len(self.names), np.nan)
        for group, (lr, _, beta1, _) in settings.items():
            if isinstance(reading.laws[group].rule, AdamW) and lr > 0:
                rows = self._rows[group]
                gain[rows] = measured.ee[rows] / (lr * lr * self._entries[rows]) * (1 + beta1) / (1 - beta1)
        return np.where(turned | (gain == 0), np.nan, gain)

    # ---- predicted

    def _predict(
        self,
        reading: StepReading,
        measured: MeasuredStep,
        products: Array,
        *,
        changed: Flags,
        skipped: bool,
        turned: Flags,
    ) -> tuple[Prediction, Flags, bool]:
        """The prediction of all rows, group by group; which rows the measured gain predicts; whether to start again.

        The measured gain predicts the matrices that are not known to be invariant, unless a controller turns them.
        While that is undecided and a matrix has no gain yet, the law of invariant weights may predict it for the time
        being.
        """
        parts: dict[str, NDArray[Any]] = {
            field.name: np.zeros(len(self.names), dtype=bool)
            if field.name in ("settled", "invariant", "undecided")
            else np.full(len(self.names), np.nan)
            for field in dataclasses.fields(Prediction)
        }
        by_gain: dict[str, NDArray[Any]] = {name: np.full(len(self.names), np.nan) for name in _NUMBERS}
        settled_by_gain = np.zeros(len(self.names), dtype=bool)
        combined, starts, restart = self._per_row(reading.combined), self._per_row(reading.starts), False
        for group, predictor in self._predictors.items():
            rule, rows = reading.laws[group].rule, self._rows[group]
            if rule is None:
                continue
            # SGD's memory can start from the products that every reading has; others' needs a reading that includes it.
            start = starts[rows] | (changed[rows] & isinstance(rule, SGD | SGDW))
            memory = _optimizer_memory(reading, rule, products[rows], self._entries[rows], combined[rows], start)
            first = reading.count if start.all() else predictor.next_step
            rules = _rules(rule, reading.settings[group].between(first, reading.count + 1))
            if rules is None:
                restart = True
                continue
            part = measured
            if len(self._predictors) > 1:
                columns = {field.name: getattr(measured, field.name)[rows] for field in dataclasses.fields(measured)}
                part = MeasuredStep(**columns)
            rescalings = [(count - first, self._per_row(by)[rows]) for count, by in reading.rescalings]
            prediction = predictor.predict(
                reading.count,
                part,
                rules,
                memory=memory if start.any() else None,
                skipped=skipped,
                rescalings=rescalings,
            )
            for name in parts:
                parts[name][rows] = getattr(prediction, name)
            other = self._gains[group].predict(
                reading.count, part, rules, changed=changed[rows], skipped=skipped, rescalings=rescalings
            )
            settled_by_gain[rows] = other.settled
            for name, values in by_gain.items():
                values[rows] = getattr(other, name)
            self._stale[rows] = ~start & (self._stale[rows] | changed[rows])
        restart |= bool((self._stale & changed).any())
        parts["angle"][self._stale] = parts["norm"][self._stale] = np.nan
        provisional = parts["undecided"] & np.isfinite(by_gain["angle"])
        measures = (~parts["invariant"] | provisional) & self._is_matrix & ~turned
        for name, values in by_gain.items():
            parts[name][measures] = values[measures]
        parts["settled"] |= measures & settled_by_gain
        return Prediction(**parts), measures, restart

    def _measured_gains(self, turned: Flags) -> dict[str, Array]:
        """The growth gain of every row and its standard error; unknown where a controller turns the weights."""
        gain, error = np.full((2, len(self.names)), np.nan)
        for group, predictor in self._gains.items():
            gain[self._rows[group]], error[self._rows[group]] = predictor.gain, predictor.error
        return {"gain": np.where(turned, np.nan, gain), "gain_error": np.where(turned, np.nan, error)}


def _eps(layer: Watched) -> float:
    return float(torch.finfo(layer.param.dtype).eps)


def _matrix_shape(layer: Watched) -> tuple[int, int]:
    """(rows, columns) of a parameter as a matrix, its first axis the rows."""
    rows, *others = layer.param.shape or (1,)
    return rows, math.prod(others)


def _optimizer_memory(
    reading: StepReading, rule: Rule, products: Array, entries: Array, combined: Flags, starts: Flags
) -> OptimizerMemory:
    """The optimizer's state of the weights whose prediction starts."""
    known = np.nan_to_num(products)  # weights without a gradient have no recursion, but must not spoil the others'
    radial, buffer_sq, second = known[:, 6:9].T
    if not isinstance(rule, SGD | SGDW):
        return OptimizerMemory(radial, buffer_sq, second / np.maximum(entries, 1), reading.steps_taken(), starts)
    radial, buffer_sq = np.where(combined, known[:, 3], radial), np.where(combined, known[:, 5], buffer_sq)
    steps_done = float(reading.count or bool(buffer_sq.any()))
    return OptimizerMemory(radial, buffer_sq, np.zeros(len(entries)), steps_done, starts)


def _measured_columns(
    measured: MeasuredStep, lr: Array, *, missing: Flags, unread: Flags, skipped: bool
) -> dict[str, NDArray[Any]]:
    """The measured columns; None where a value could not be measured: all without a gradient, or those about it."""
    norm = measured.norm
    moved, angle = (np.zeros_like(norm), np.zeros_like(norm)) if skipped else (measured.moved, measured.angle)
    columns: dict[str, NDArray[Any]] = {
        "norm": norm,
        "grad_norm": np.sqrt(measured.gg),
        "cosine": measured.cosine,
        "update_norm": moved,
        "angle": angle,
        "relative_update": moved / norm,
        "effective_lr": lr / measured.ww,
        "unit_grad_sq": measured.gg * measured.ww,
    }
    for where, names in ((missing, tuple(columns)), (unread, _ABOUT_GRADIENT)):
        for name in names if where.any() else ():
            columns[name] = columns[name].astype(object)
            columns[name][where] = None
    return columns


def _prediction_columns(prediction: Prediction, *, steps_per_epoch: int | None) -> dict[str, NDArray[Any]]:
    """The predicted columns; None where there is no law, while a measured value that is not a number stays NaN."""
    epoch = np.nan if steps_per_epoch is None else float(steps_per_epoch)
    columns = {
        "momentum_unit_grad_sq": prediction.momentum_unit_grad_sq,
        "angle_equilibrium": prediction.angle_equilibrium,
        "norm_equilibrium": prediction.norm_equilibrium,
        "angle_predicted": prediction.angle,
        "norm_predicted": prediction.norm,
        "steps_to_settle": prediction.steps_to_settle,
        "epochs_to_settle": prediction.steps_to_settle / epoch,
    }
    return _nullable(columns)


def _nullable(columns: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    """The columns with None in place of NaN."""
    nullable: dict[str, NDArray[Any]] = {name: values.astype(object) for name, values in columns.items()}
    for name, values in columns.items():
        nullable[name][np.isnan(values)] = None
    return nullable


def _as_promised(prediction: Prediction, promised: Array, turned: Flags) -> Prediction:
    """The prediction with the angles of a controller that turns weights itself: it promises them, at constant norm."""
    angles = {name: np.where(turned, promised, getattr(prediction, name)) for name in ("angle", "angle_equilibrium")}
    unknown = ("norm", "norm_equilibrium", "steps_to_settle")
    numbers = {name: np.where(turned, np.nan, getattr(prediction, name)) for name in unknown}
    kept = np.where(turned, np.isfinite(promised), prediction.settled)
    return dataclasses.replace(prediction, **angles, **numbers, settled=kept)


def _laws(prediction: Prediction, by_gain: Flags, turned: Flags) -> list[str | None]:
    """The law behind the prediction of every row, None where there is no prediction."""
    known = np.isfinite(prediction.angle) | np.isfinite(prediction.angle_equilibrium)
    words = np.where(by_gain, GAIN_LAW, INVARIANT_LAW).tolist()
    return [word if has_law else None for word, has_law in zip(words, (known & ~turned).tolist(), strict=True)]


def _notes(
    measured: MeasuredStep,
    *,
    changed: Flags,
    rescaled: Flags,
    missing: Flags,
    removed: Flags,
    unread: Flags,
    skipped: bool,
) -> list[str | None]:
    words = np.where(changed, CHANGED_OUTSIDE, np.where(rescaled, RESCALED, "")).astype(object)
    words[~np.isfinite(measured.gg) & ~unread | np.isinf(measured.ww)] = NOT_FINITE
    words[missing] = NO_GRADIENT
    words[removed] = REMOVED
    if skipped:
        words[:] = SKIPPED
    return [word or None for word in words]


def _rules(rule: Rule, settings: Sequence[Settings]) -> list[Rule] | None:
    """The rule at every step; None if no law covers the settings of one of them: the recursion cannot pass it."""
    try:
        return [_adjusted(rule, of_step) for of_step in settings]
    except EquilibriaError:
        return None


@lru_cache(maxsize=1024)
def _adjusted(rule: Rule, settings: Settings) -> Rule:
    """The rule with the settings of one step."""
    changes: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.betas is not None and hasattr(rule, "betas"):  # groups of a hybrid may have the settings of both rules
        changes["betas"] = settings.betas
    elif hasattr(rule, "momentum"):
        changes["momentum"] = settings.momentum
    return dataclasses.replace(rule, **changes)


class StateLabels:
    """Labels every weight, from sample to sample: settling, settled, disturbed or without equilibrium.

    A weight is disturbed when it was settled, then its settings jumped or somebody changed it, and it has not settled
    again since.

    Example:
        >>> labels = StateLabels(1)
        >>> def label(settled, changed):
        ...     return labels.update(np.array([settled]), changed=np.array([changed]), balanced=np.array([True]))[0]
        >>> label(False, False), label(True, False), label(False, True), label(False, False), label(True, False)
        ('settling', 'settled', 'disturbed', 'disturbed', 'settled')
    """

    def __init__(self, count: int) -> None:
        self._was_settled, self._disturbed = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def update(self, settled: Flags, *, changed: Flags, balanced: Flags) -> list[str]:
        """The state of every weight at a sample.

        Args:
            settled: whether its angle is within the tolerance of equilibrium.
            changed: whether its settings jumped or somebody changed the weight since the last sample.
            balanced: whether it has an equilibrium.
        """
        self._disturbed = ~settled & (self._disturbed | (changed & self._was_settled))
        self._was_settled = settled.copy()
        moving = np.where(self._disturbed, DISTURBED, SETTLING)
        words: list[str] = np.where(balanced, np.where(settled, SETTLED, moving), NO_EQUILIBRIUM).tolist()
        return words

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both flags per weight, for a checkpoint."""
        flags = {"was_settled": self._was_settled, "disturbed": self._disturbed}
        return {name: torch.from_numpy(values.copy()) for name, values in flags.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the flags from a checkpoint."""
        self._was_settled, self._disturbed = (state[name].cpu().numpy().copy() for name in ("was_settled", "disturbed"))
