"""From what the hooks read to rows of the sample table, with the forecast beside every measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.monitor.geometry import Step
from equilibria.monitor.hooks import Reading, Tap
from equilibria.monitor.predictor import Forecast, Forecaster, Start
from equilibria.monitor.settings_log import Settings
from equilibria.records.tables import (
    CHANGED_OUTSIDE,
    DISTURBED,
    NO_EQUILIBRIUM,
    NO_GRADIENT,
    NOT_FINITE,
    SETTLED,
    SETTLING,
    SKIPPED,
)
from equilibria.tensors.parameters import Watched
from equilibria.theory.rules import SGD, SGDW, Rule

Flags = NDArray[np.bool_]


class Verdicts:
    """One verdict per weight, from sample to sample.

    Example:
        >>> verdicts = Verdicts(1)
        >>> def see(settled, changed):
        ...     return verdicts.judge(np.array([settled]), changed=np.array([changed]), balanced=np.array([True]))[0]
        >>> see(False, False), see(True, False), see(False, True), see(False, False), see(True, False)
        ('settling', 'settled', 'disturbed', 'disturbed', 'settled')
    """

    def __init__(self, count: int) -> None:
        self._was_settled, self._disturbed = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def judge(self, settled: Flags, *, changed: Flags, balanced: Flags) -> list[str]:
        """The state of every weight.

        Args:
            settled: whether its angle is within the tolerance of equilibrium.
            changed: whether settings or the weight itself were changed since the last sample.
            balanced: whether there is an equilibrium at all.
        """
        self._disturbed = ~settled & (self._disturbed | (changed & self._was_settled))
        self._was_settled = settled.copy()
        moving = np.where(self._disturbed, DISTURBED, SETTLING)
        words: list[str] = np.where(balanced, np.where(settled, SETTLED, moving), NO_EQUILIBRIUM).tolist()
        return words

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        held = {"was_settled": self._was_settled, "disturbed": self._disturbed}
        return {name: torch.from_numpy(flags.copy()) for name, flags in held.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._was_settled, self._disturbed = (state[name].cpu().numpy().copy() for name in ("was_settled", "disturbed"))


Array = NDArray[np.float64]

_MOVED_BETWEEN = 1e-5  # relative change of the norm between two steps that rounding cannot explain
_FURTHER = 5  # times the length of the sampled steps, which those between do not reach one after another
_ABOUT_GRADIENT = ("grad_norm", "cosine", "unit_grad_sq")
_SETTINGS = ("lr", "weight_decay", "momentum")


class Reckoning:
    """Turns the readings of one optimizer into columns of the sample table.

    Args:
        watched: the tensors that its readings are about.
        steps_per_epoch: to say times in epochs too.
    """

    def __init__(self, watched: Sequence[Watched], *, steps_per_epoch: int | None) -> None:
        self.names = [name for each in watched for name in each.unit_names]
        self._steps_per_epoch = steps_per_epoch
        self._groups = np.repeat([each.group for each in watched], [each.units for each in watched])
        entries = np.repeat([float(each.entries) for each in watched], [each.units for each in watched])
        self._entries = entries
        told = np.concatenate([[], *(each.invariant or [np.nan] * each.units for each in watched)]).astype(np.float64)
        self._forecasters = {
            int(group): Forecaster(entries[self._groups == group], invariant=told[self._groups == group])
            for group in set(self._groups)
        }
        alone = len(self._forecasters) == 1  # then nothing is to be picked out
        self._places: dict[int, Any] = {
            group: slice(None) if alone else self._groups == group for group in self._forecasters
        }
        self._verdicts = Verdicts(len(self.names))
        self._norm_after = np.full(len(self.names), np.nan)
        self._pace = np.full(len(self.names), np.nan)  # length of the last sampled step, per unit of learning rate
        # Seen too late to begin anew: what Adam remembers of these weights was not read, and is at a later sample.
        self._stale = np.zeros(len(self.names), dtype=bool)
        self._last: tuple[int, dict[int, Settings]] | None = None

    def columns(self, tap: Tap, reading: Reading, products: Array) -> dict[str, Any]:
        """The rows of one sampled step.

        Args:
            tap: where the reading comes from.
            reading: what was read.
            products: its inner products, (units, 9), gradients no longer scaled; NaN without a gradient.
        """
        with np.errstate(all="ignore"):  # gradients and weights may be anything, and the samples say so
            return self._columns(tap, reading, products)

    def _columns(self, tap: Tap, reading: Reading, products: Array) -> dict[str, Any]:
        measured = _step(reading, products, self._spread(reading.combined, tap), self._combinations(reading, tap))
        skipped = reading.found_inf is not None and bool(reading.found_inf)
        now = {group: tap.logs[group].at(reading.count) for group in self._forecasters}
        lr = np.array([now[group].lr for group in self._groups])
        missing = self._spread(reading.missing, tap)
        unread = self._spread(reading.unread, tap)
        changed = self._changed(reading, tap, measured, lr)
        forecast = self._forecast(tap, reading, measured, products, changed=changed, skipped=skipped)
        columns = self._measured_columns(measured, now, skipped=skipped)
        columns = _with_nulls(columns, missing=missing, unread=unread)
        columns |= self._forecast_columns(forecast)
        columns["step"] = np.full(len(self.names), reading.label, dtype=np.int64)
        columns["param"] = self.names
        balanced = np.isfinite(forecast.norm_equilibrium)
        disturbed = changed | self._jumped(tap, reading)
        columns["state"] = self._verdicts.judge(forecast.settled, changed=disturbed, balanced=balanced)
        columns["note"] = _notes(measured, changed=changed, missing=missing, unread=unread, skipped=skipped)
        self._last = reading.count, now
        self._norm_after = measured.norm if skipped else np.sqrt(measured.norm_sq_after)
        self._pace = _pace(measured, lr)
        for log in tap.logs:
            log.forget_before(reading.count)
        return columns

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "names": list(self.names),
            "forecasters": {group: each.state_dict() for group, each in self._forecasters.items()},
            "verdicts": self._verdicts.state_dict(),
            "norm_after": torch.from_numpy(self._norm_after.copy()),
            "pace": torch.from_numpy(self._pace.copy()),
            "stale": torch.from_numpy(self._stale.copy()),
            "last": None
            if self._last is None
            else (self._last[0], {group: tuple(settings) for group, settings in self._last[1].items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same weights."""
        for group, each in self._forecasters.items():
            each.load_state_dict(state["forecasters"][group])
        self._verdicts.load_state_dict(state["verdicts"])
        held = (state[name].numpy().copy() for name in ("norm_after", "pace", "stale"))
        self._norm_after, self._pace, self._stale = held
        self._last = None
        if state["last"] is not None:
            count, settings = state["last"]
            self._last = count, {group: Settings(*held) for group, held in settings.items()}

    def _spread(self, per_tensor: Sequence[Any], tap: Tap) -> NDArray[Any]:
        """One value per row from one value per tensor."""
        return np.repeat(np.asarray(per_tensor), [each.units for each in tap.watched])

    def _combinations(self, reading: Reading, tap: Tap) -> Array:
        table = [(each.gradient, each.buffer, each.shrink) for each in reading.combinations]
        return np.repeat(np.array(table), [each.units for each in tap.watched], axis=0).T

    def _changed(self, reading: Reading, tap: Tap, measured: Step, lr: Array) -> Flags:
        """Which weights somebody else changed since the last sample, as far as can be told.

        Torch counts changes of a tensor, but not those through ``.data``. These show in the norm, where it differs
        from what the last sample left by more than the steps between could do.
        """
        changed = self._spread(reading.changed, tap).astype(bool)
        if self._last is None:
            return changed
        first = self._last[0] + 1
        lrs = {
            group: sum(each.lr for each in tap.logs[group].between(first, reading.count)) for group in self._forecasters
        }
        taken = np.array([lrs[group] for group in self._groups])
        reach = np.where(taken > 0, _FURTHER * taken * np.fmax(self._pace, _pace(measured, lr)), 0.0)
        changed |= np.abs(measured.norm - self._norm_after) > reach + _MOVED_BETWEEN * measured.norm
        return changed

    def _jumped(self, tap: Tap, reading: Reading) -> Flags:
        """Whose settings jumped since the last sample."""
        first = reading.count if self._last is None else self._last[0] + 1
        jumped = {group: tap.logs[group].jumped(first, reading.count + 1) for group in self._forecasters}
        return np.array([jumped[group] for group in self._groups])

    def _forecast(
        self, tap: Tap, reading: Reading, measured: Step, products: Array, *, changed: Flags, skipped: bool
    ) -> Forecast:
        parts: dict[str, NDArray[Any]] = {
            field.name: np.zeros(len(self.names), dtype=bool)
            if field.name in ("settled", "invariant")
            else np.full(len(self.names), np.nan)
            for field in dataclasses.fields(Forecast)
        }
        combined, begins = self._spread(reading.combined, tap), self._spread(reading.begin, tap)
        for group, forecaster in self._forecasters.items():
            rule, here = reading.laws[group].rule, self._places[group]
            if rule is None:
                continue
            begin = begins[here] | (changed[here] & isinstance(rule, SGD | SGDW))
            start = _start(reading, rule, products[here], self._entries[here], combined[here], begin)
            first = reading.count if begin.all() else forecaster.next_step
            rules = _rules(rule, tap.logs[group].between(first, reading.count + 1))
            if rules is None:
                tap.begin_anew()
                continue
            part = Step(**{f.name: getattr(measured, f.name)[here] for f in dataclasses.fields(Step)})
            found = forecaster.forecast(
                reading.count, part, rules, start=start if begin.any() else None, skipped=skipped
            )
            for name in parts:
                parts[name][here] = getattr(found, name)
            self._stale[here] = ~begin & (self._stale[here] | changed[here])
        if (self._stale & changed).any():
            tap.begin_anew()
        parts["angle"][self._stale] = parts["norm"][self._stale] = np.nan
        return Forecast(**parts)

    def _measured_columns(self, measured: Step, now: Mapping[int, Settings], *, skipped: bool) -> dict[str, Any]:
        settings = [now[group] for group in self._groups]
        lr, norm = np.array([each.lr for each in settings]), measured.norm
        moved, angle = (np.zeros_like(norm), np.zeros_like(norm)) if skipped else (measured.moved, measured.angle)
        return {
            "lr": lr,
            "weight_decay": np.array([each.weight_decay for each in settings]),
            "momentum": np.array([each.momentum for each in settings]),
            "norm": norm,
            "grad_norm": np.sqrt(measured.gg),
            "cosine": measured.cosine,
            "update_norm": moved,
            "angle": angle,
            "relative_update": moved / norm,
            "effective_lr": lr / measured.ww,
            "unit_grad_sq": measured.gg * measured.ww,
        }

    def _forecast_columns(self, forecast: Forecast) -> dict[str, Any]:
        epoch = np.nan if self._steps_per_epoch is None else float(self._steps_per_epoch)
        columns = {
            "momentum_unit_grad_sq": forecast.momentum_unit_grad_sq,
            "angle_equilibrium": forecast.angle_equilibrium,
            "norm_equilibrium": forecast.norm_equilibrium,
            "angle_predicted": forecast.angle,
            "norm_predicted": forecast.norm,
            "steps_to_settle": forecast.steps_to_settle,
            "epochs_to_settle": forecast.steps_to_settle / epoch,
        }
        return {name: _nulls(values) for name, values in columns.items()}


def _step(reading: Reading, products: Array, combined: Flags, combinations: Array) -> Step:
    """The move from what was read: combined from weight, gradient and buffer, or measured."""
    ww, wg, gg, x, y, z = products.T[:6]
    own, kept, shrink = combinations
    we = np.where(combined, own * wg + kept * x, x)
    ee = np.where(combined, own * own * gg + 2 * own * kept * y + kept * kept * z, y)
    uphill = own > 0  # maximize: the buffer then gathers -g
    vg = np.where(combined & (kept != 0), np.where(uphill, -y, y), np.nan)
    return Step(ww=ww, wg=wg, gg=gg, we=we, ee=ee, vg=vg, shrink=shrink)


def _start(reading: Reading, rule: Rule, products: Array, entries: Array, combined: Flags, begin: Flags) -> Start:
    """The optimizer's memory, for the weights whose forecast begins here."""
    known = np.nan_to_num(products)  # weights without a gradient have no recursion, but must not spoil the others'
    radial, buffer_sq, second = known[:, 6:9].T
    if not isinstance(rule, SGD | SGDW):
        return Start(radial, buffer_sq, second / np.maximum(entries, 1), reading.steps_taken, begin)
    radial, buffer_sq = (np.where(combined, known[:, at], held) for at, held in ((3, radial), (5, buffer_sq)))
    return Start(radial, buffer_sq, np.zeros(len(entries)), float(reading.count or bool(buffer_sq.any())), begin)


def _nulls(values: Array) -> NDArray[Any]:
    """None for what has no law, so that it is told apart from what was measured and is not a number."""
    column: NDArray[Any] = values.astype(object)
    column[np.isnan(values)] = None
    return column


def _with_nulls(columns: dict[str, Any], *, missing: Flags, unread: Flags) -> dict[str, Any]:
    """Null in place of NaN for what could not be measured: all without a gradient, or only what is about it."""
    about_weight = [name for name in columns if name not in _SETTINGS]
    for where, names in ((missing, about_weight), (unread, _ABOUT_GRADIENT)):
        for name in names if where.any() else ():
            columns[name] = columns[name].astype(object)
            columns[name][where] = None
    return columns


def _pace(measured: Step, lr: Array) -> Array:
    """Length of the step per unit of learning rate."""
    return measured.moved / lr


def _notes(measured: Step, *, changed: Flags, missing: Flags, unread: Flags, skipped: bool) -> list[str | None]:
    words = np.where(changed, CHANGED_OUTSIDE, "").astype(object)
    words[~np.isfinite(measured.gg) & ~unread | np.isinf(measured.ww)] = NOT_FINITE
    words[missing] = NO_GRADIENT
    if skipped:
        words[:] = SKIPPED
    return [word or None for word in words]


def _rules(rule: Rule, settings: Sequence[Settings]) -> list[Rule] | None:
    """The rule at every step, None if one of them has settings without a law: then the recursion cannot follow."""
    try:
        return [_adjusted(rule, each) for each in settings]
    except EquilibriaError:
        return None


@lru_cache(maxsize=1024)
def _adjusted(rule: Rule, settings: Settings) -> Rule:
    """The rule with the settings of one step."""
    changes: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.betas is not None:
        changes["betas"] = settings.betas
    elif hasattr(rule, "momentum"):
        changes["momentum"] = settings.momentum
    return dataclasses.replace(rule, **changes)
