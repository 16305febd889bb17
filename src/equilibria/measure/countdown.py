"""Steps to settle where they are dear to work out: done now and then, and counted down in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MOST_SAMPLES = 200  # from one working out to the next: that takes as long as several samples
_SOONER = 3  # times the samples so far
_JUMP = 0.1  # relative change of lr or weight decay after which a count no longer holds


class Countdown:
    """Counts down the steps of many weights.

    The first counts rest on few samples, so that they are renewed sooner: at the 1st, 5th, 21st, ... sample.

    Example:
        >>> count = Countdown(1)
        >>> [count.left(step, (0.1, 0.01), lambda: np.array([50.0]), anew=False).item() for step in (0, 10, 20, 30, 40)]
        [50.0, 40.0, 30.0, 20.0, 50.0]
    """

    def __init__(self, count: int) -> None:
        self._left = np.full(count, np.nan)
        self._at = self._samples = self._next = 0
        self._settings = (0.0, 0.0)

    def left(self, step: int, settings: tuple[float, float], work_out: Callable[[], Array], *, anew: bool) -> Array:
        """Steps left at a sample.

        Args:
            step: the optimizer's count of steps.
            settings: lr and weight decay.
            work_out: gives the steps that are left.
            anew: whether some weights begin anew here.
        """
        self._samples += 1
        if anew or self._samples >= self._next or self._jumped(settings):
            self._left, self._at, self._settings = work_out(), step, settings
            self._next = self._samples + 1 + min(_SOONER * self._samples, _MOST_SAMPLES)
        left: Array = np.maximum(self._left - (step - self._at), 0.0)
        return left

    def _jumped(self, settings: tuple[float, float]) -> bool:
        pairs = zip(settings, self._settings, strict=True)
        return any(abs(now - before) > _JUMP * max(now, before) for now, before in pairs)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {"at": self._at, "samples": self._samples, "next": self._next, "settings": self._settings}
        return {"left": torch.from_numpy(self._left.copy()), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._left = state["left"].cpu().numpy().copy()
        self._at, self._samples, self._next = (int(state[name]) for name in ("at", "samples", "next"))
        lr, weight_decay = state["settings"]
        self._settings = float(lr), float(weight_decay)
