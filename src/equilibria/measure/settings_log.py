"""The settings of a parameter group at every step, kept as the list of their changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_UNKNOWN = float("nan")  # one object, which equals itself as part of a tuple


_JUMP = 0.1  # relative change of a setting that is worth a sample of its own


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


class SettingsLog:
    """Remembers the settings of a group step by step; `note` is called at every step and is cheap."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Settings]] = []
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
        if not self._changes or settings != self._changes[-1][1]:
            self._changes.append((step, settings))

    def jumps(self, group: Mapping[str, Any]) -> bool:
        """Whether lr or weight decay are about to differ by more than a tenth from those of the last step."""
        if not self._changes:
            return False
        held = self._changes[-1][1]
        pairs = ((group["lr"], held.lr), (group.get("weight_decay"), held.weight_decay))
        return any(
            isinstance(now, float) and abs(now - before) > _JUMP * max(abs(now), abs(before)) for now, before in pairs
        )

    def at(self, step: int) -> Settings:
        """The settings of a step."""
        place = bisect_right(self._changes, step, key=lambda change: change[0])
        return self._changes[max(place - 1, 0)][1]

    def between(self, first: int, after: int) -> list[Settings]:
        """The settings of the steps ``first`` to ``after - 1``."""
        found: list[Settings] = []
        bounds = [start for start, _ in self._changes[1:]] + [after]
        for (_, settings), end in zip(self._changes, bounds, strict=True):
            found += [settings] * (min(end, after) - first - len(found))
        return found

    def forget_before(self, step: int) -> None:
        """Drop what is older than a step."""
        place = bisect_right(self._changes, step, key=lambda change: change[0])
        del self._changes[: max(place - 1, 0)]

    def state_dict(self) -> list[tuple[Any, ...]]:
        """What is remembered, for a checkpoint: plain numbers, which torch.load takes with ``weights_only``."""
        return [(step, *settings) for step, settings in self._changes]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from a checkpoint."""
        self._changes = [(step, Settings(*settings)) for step, *settings in state]
        self._seen = None


def _numbers(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """lr, weight decay, momentum and the single betas; a list of betas stays one, for it can change in place."""
    return (*found[:3], *(found[3] if isinstance(found[3], tuple) else (found[3],)))


def _on_device(found: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in _numbers(found))
