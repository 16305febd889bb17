"""Counts the steps that a GradScaler skipped: it does not call the optimizer then, so that no hook sees them.

At a step that is taken the scaler is on the stack, and its scale tells what happened before: every skipped step has
multiplied it by the backoff factor, and every ``growth_interval`` steps taken in a row by the growth factor.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

_MOST_FRAMES = 16  # between our hook and the scaler: wrappers of torch and of schedulers
_CALLER = "_maybe_opt_step"  # the method of a scaler that calls the optimizer
_ROUNDING = 0.01  # of the number of backoffs; further from a whole number, somebody set the scale
_USERS: weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()  # watched ones


class SkippedSteps:
    """The steps of one optimizer that a GradScaler skipped.

    Not counted if several watched optimizers share a scaler: its scale does not tell which of them it skipped.

    Attributes:
        before: number of the step before which the last of them was; -1 without any.
    """

    def __init__(self) -> None:
        self.before, self._count, self._is_shared = -1, 0, False
        self._scaler: weakref.ref[GradScaler] | None = None
        self._expected: float | None = None  # the scale, if no step is skipped

    @property
    def count(self) -> int:
        """Steps skipped so far."""
        return 0 if self._is_shared else self._count

    def look(self, step: int, optimizer: Optimizer, *, search: bool) -> None:
        """Count the steps skipped since the last call; call it from a hook before every step.

        Args:
            step: number of the step that is about to be taken.
            optimizer: takes it.
            search: whether to look for a scaler on the stack, if none is known.
        """
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None:
            scaler = _on_stack(sys._getframe(1)) if search else None
            if scaler is None:
                return
            self._scaler = weakref.ref(scaler)
            self._expected = None if optimizer.state else getattr(scaler, "_init_scale", None)
            _USERS.setdefault(scaler, weakref.WeakSet()).add(optimizer)
        self._is_shared |= len(_USERS[scaler]) > 1
        state = scaler.state_dict()
        scale, backoff = float(state["scale"]), float(state["backoff_factor"])
        if self._expected is not None and (skipped := _backoffs(scale / self._expected, backoff)):
            self._count, self.before = self._count + skipped, step
        grows = state["_growth_tracker"] + 1 >= state["growth_interval"]
        self._expected = scale * (float(state["growth_factor"]) if grows else 1.0)

    def state_dict(self) -> dict[str, int]:
        """Two numbers for a checkpoint."""
        return {"count": self._count, "before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; steps skipped between it and the next look are not counted."""
        self._count, self.before = int(state.get("count", 0)), int(state.get("before", -1))
        self._scaler = self._expected = None


def _on_stack(frame: FrameType | None) -> GradScaler | None:
    """The scaler whose step is being taken."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == _CALLER:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


def _backoffs(ratio: float, factor: float) -> int:
    """How often a scale was multiplied by the backoff factor; 0 if the ratio is no power of it.

    Example:
        >>> _backoffs(0.25, 0.5), _backoffs(1.0, 0.5), _backoffs(0.3, 0.5)
        (2, 0, 0)
    """
    if not (0 < ratio < 1 and 0 < factor < 1):
        return 0
    times = math.log(ratio) / math.log(factor)
    return round(times) if abs(times - round(times)) < _ROUNDING else 0
