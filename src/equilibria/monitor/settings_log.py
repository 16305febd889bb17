"""The settings of a parameter group at every step, kept as the list of their changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_UNKNOWN = float("nan")  # one object, which equals itself as part of a tuple


_JUMP = 0.1  # relative change of a setting that is worth a sample of its own
_STEEPER = 3  # times the change of the step before that is no longer part of a ramp
_TINY = 1e-300


class Settings(NamedTuple):
    """What a schedule may change from step to step."""

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float] | None


def read_settings(group: Mapping[str, Any]) -> Settings:
    """The settings of a group now; an optimizer that chooses its own learning rate has NaN there.

    Example:
        >>> read_settings({"lr": torch.tensor(0.5), "weight_decay": 0.0, "betas": (0.9, 0.99)})
        Settings(lr=0.5, weight_decay=0.0, momentum=0.9, betas=(0.9, 0.99))
        >>> read_settings({"lr": None})
        Settings(lr=nan, weight_decay=0.0, momentum=0.0, betas=None)
    """
    betas = group.get("betas")
    pair = (_number(betas[0]), _number(betas[1])) if isinstance(betas, Sequence) and len(betas) > 1 else None
    momentum = _number(group.get("momentum", 0.0)) if pair is None else pair[0]
    return Settings(_number(group.get("lr")), _number(group.get("weight_decay", 0.0)), momentum, pair)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return _UNKNOWN


class _Change(NamedTuple):
    """New settings, the step that is the first to have them, and how much they differ from those before."""

    step: int
    settings: Settings
    relative: float
    is_jump: bool


class SettingsLog:
    """Remembers the settings of a group step by step; `note` is called at every step and is cheap."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._seen: tuple[object, ...] | None = None  # settings as they were found, if they cannot change in place

    def note(self, step: int, group: Mapping[str, Any], *, sampled: bool) -> None:
        """Remember the settings with which this step is taken, if they are new.

        Settings on a device are read at sampled steps only: reading them waits for the device.
        """
        found = group.get("lr"), group.get("weight_decay"), group.get("momentum"), group.get("betas")
        if self._seen is not None and found == self._seen:
            return
        if not sampled and self._changes and _on_device(found):
            return
        self._seen = found if all(isinstance(value, float | int | None) for value in _numbers(found)) else None
        settings = read_settings(group)
        if not self._changes:
            self._changes.append(_Change(step, settings, 0.0, False))
        elif settings != self._changes[-1].settings:
            self._changes.append(_change(self._changes[-1], step, settings))

    def jumps(self, group: Mapping[str, Any]) -> bool:
        """Whether lr or weight decay are about to differ by more than a tenth from those of the last step."""
        if not self._changes:
            return False
        held = self._changes[-1].settings
        pairs = ((group["lr"], held.lr), (group.get("weight_decay"), held.weight_decay))
        return any(
            isinstance(now, float) and abs(now - before) > _JUMP * max(abs(now), abs(before)) for now, before in pairs
        )

    def at(self, step: int) -> Settings:
        """The settings of a step."""
        place = bisect_right(self._changes, step, key=lambda change: change.step)
        return self._changes[max(place - 1, 0)].settings

    def jumped(self, first: int, after: int) -> bool:
        """Whether a setting jumped at one of the steps ``first`` to ``after - 1``.

        That is by more than a tenth at once, and not as part of a steep ramp. A schedule that moves on smoothly has no
        jump, however often it is sampled.
        """
        return any(change.is_jump and first <= change.step < after for change in self._changes)

    def between(self, first: int, after: int) -> list[Settings]:
        """The settings of the steps ``first`` to ``after - 1``."""
        found: list[Settings] = []
        bounds = [change.step for change in self._changes[1:]] + [after]
        for change, end in zip(self._changes, bounds, strict=True):
            found += [change.settings] * (min(end, after) - first - len(found))
        return found

    def forget_before(self, step: int) -> None:
        """Drop what is older than a step."""
        place = bisect_right(self._changes, step, key=lambda change: change.step)
        del self._changes[: max(place - 1, 0)]

    def state_dict(self) -> list[tuple[Any, ...]]:
        """What is remembered, for a checkpoint: plain numbers, which torch.load takes with ``weights_only``."""
        return [(step, *settings, relative, is_jump) for step, settings, relative, is_jump in self._changes]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from a checkpoint."""
        self._changes = [
            _Change(step, Settings(*settings), relative, is_jump) for step, *settings, relative, is_jump in state
        ]
        self._seen = None


def _change(before: _Change, step: int, settings: Settings) -> _Change:
    """The largest relative change of lr, weight decay and momentum, which acts through 1 - momentum."""
    pairs = zip(_acting(before.settings), _acting(settings), strict=True)
    relative = max(((new - old) / max(abs(new), abs(old), _TINY) for old, new in pairs), key=abs)
    goes_on = before.step == step - 1 and before.relative * relative > 0
    ramp = abs(before.relative) if goes_on else 0.0
    return _Change(step, settings, relative, abs(relative) > max(_JUMP, _STEEPER * ramp))


def _acting(settings: Settings) -> tuple[float, float, float]:
    return settings.lr, settings.weight_decay, 1 - settings.momentum


def _numbers(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """lr, weight decay, momentum and the single betas; a list of betas stays one, for it can change in place."""
    return (*found[:3], *(found[3] if isinstance(found[3], tuple) else (found[3],)))


def _on_device(found: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in _numbers(found))
