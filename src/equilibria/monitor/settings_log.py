"""The settings of a parameter group at every step, stored as the list of their changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from equilibria.optimizers.copies import decay_key

_UNKNOWN = float("nan")  # one object: inside a tuple it equals itself, so that unknown settings do not count as changed
_JUMP = 0.1  # relative change of a setting that triggers a sample
_STEEPER = 3  # times the change at the step before: more than that is a jump, less is part of a ramp
_TINY = 1e-300


class Settings(NamedTuple):
    """The settings that a schedule may change from step to step."""

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float] | None


def read_settings(group: Mapping[str, Any]) -> Settings:
    """Read the settings of a group; lr is NaN for an optimizer that chooses its own learning rate.

    Example:
        >>> read_settings({"lr": torch.tensor(0.5), "weight_decay": 0.0, "betas": (0.9, 0.99)})
        Settings(lr=0.5, weight_decay=0.0, momentum=0.9, betas=(0.9, 0.99))
        >>> read_settings({"lr": None})
        Settings(lr=nan, weight_decay=0.0, momentum=0.0, betas=None)
    """
    betas = group.get("betas")
    pair = (_number(betas[0]), _number(betas[1])) if isinstance(betas, Sequence) and len(betas) > 1 else None
    momentum = _number(group.get("momentum", 0.0)) if pair is None else pair[0]
    return Settings(_number(group.get("lr")), _number(group.get(decay_key(group), 0.0)), momentum, pair)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return _UNKNOWN


class _Change(NamedTuple):
    """New settings, the first step that has them, and how much they differ from the previous ones."""

    step: int
    settings: Settings
    relative: float
    is_jump: bool


class SettingsLog:
    """Settings of one group, step by step. `note` runs at every training step and compares four values.

    The hooks write into one log per group; every reading takes a copy along (`hand_over`) with the
    settings of all steps since the previous reading, which may be processed much later.
    """

    def __init__(self, changes: Sequence[_Change] = ()) -> None:
        self._changes = list(changes)
        self._seen: tuple[object, ...] | None = None  # the latest raw settings, unless they can change in place

    def note(self, step: int, group: Mapping[str, Any], *, sampled: bool) -> None:
        """Record the settings with which this step is taken, if they are new.

        Settings on a device are read at sampled steps only: reading them waits for the device.
        """
        raw = group.get("lr"), group.get(decay_key(group)), group.get("momentum"), group.get("betas")
        if self._seen is not None and raw == self._seen:
            return
        if not sampled and self._changes and _on_device(raw):
            return
        self._seen = raw if all(isinstance(value, float | int | None) for value in _numbers(raw)) else None
        settings = read_settings(group)
        if not self._changes:
            self._changes.append(_Change(step, settings, 0.0, False))
        elif settings != self._changes[-1].settings:
            self._changes.append(_change(self._changes[-1], step, settings))

    def jumps(self, step: int, group: Mapping[str, Any]) -> bool:
        """Whether lr or weight decay jump at the coming step, as `jumped` says; settings on a device are not read."""
        if not self._changes:
            return False
        last = self._changes[-1].settings
        pairs = ((group["lr"], last.lr), (group.get(decay_key(group)), last.weight_decay))
        differs = any(
            isinstance(now, float) and abs(now - before) > _JUMP * max(abs(now), abs(before)) for now, before in pairs
        )
        return differs and _change(self._changes[-1], step, read_settings(group)).is_jump

    def at(self, step: int) -> Settings:
        """The settings of a step."""
        return self._changes[self._index(step)].settings

    def jumped(self, first: int, after: int) -> bool:
        """Whether a setting jumped at one of the steps ``first`` to ``after - 1``.

        A jump is a change by more than a tenth at once that is not part of a steep ramp. A smooth schedule has none,
        however rarely it is sampled.
        """
        return any(change.is_jump and first <= change.step < after for change in self._changes)

    def between(self, first: int, after: int) -> list[Settings]:
        """The settings of the steps ``first`` to ``after - 1``."""
        settings: list[Settings] = []
        bounds = [change.step for change in self._changes[1:]] + [after]
        for change, end in zip(self._changes, bounds, strict=True):
            settings += [change.settings] * (min(end, after) - first - len(settings))
        return settings

    def hand_over(self, step: int) -> SettingsLog:
        """Return a copy of all settings up to a sampled step, and keep only what the next sample needs."""
        copy = SettingsLog(self._changes)
        del self._changes[: self._index(step)]
        return copy

    def _index(self, step: int) -> int:
        """The position of the change that holds at a step."""
        return max(bisect_right(self._changes, step, key=lambda change: change.step) - 1, 0)

    def state_dict(self) -> list[tuple[Any, ...]]:
        """All changes, for a checkpoint: plain numbers, which torch.load accepts with ``weights_only``."""
        return [(step, *settings, relative, is_jump) for step, settings, relative, is_jump in self._changes]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore the changes from a checkpoint."""
        self._changes = [
            _Change(step, Settings(*settings), relative, is_jump) for step, *settings, relative, is_jump in state
        ]
        self._seen = None


def _change(before: _Change, step: int, settings: Settings) -> _Change:
    """A change of settings, sized by the largest relative change of lr, weight decay and 1 - momentum."""
    pairs = zip(_acting(before.settings), _acting(settings), strict=True)
    relative = max(((new - old) / max(abs(new), abs(old), _TINY) for old, new in pairs), key=abs)
    continues = before.step == step - 1 and before.relative * relative > 0
    ramp = abs(before.relative) if continues else 0.0
    return _Change(step, settings, relative, abs(relative) > max(_JUMP, _STEEPER * ramp))


def _acting(settings: Settings) -> tuple[float, float, float]:
    return settings.lr, settings.weight_decay, 1 - settings.momentum


def _numbers(raw: tuple[Any, ...]) -> tuple[Any, ...]:
    """lr, weight decay, momentum and each beta; a list of betas stays a list, because it can change in place."""
    return (*raw[:3], *(raw[3] if isinstance(raw[3], tuple) else (raw[3],)))


def _on_device(raw: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in _numbers(raw))
