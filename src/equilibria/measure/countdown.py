"""Steps to settle where they are dear to work out: done now and then, and counted down in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_SAMPLES = 200  # from one working out to the next: that takes as long as several samples
_SOONER = 3  # times the samples so far
_FEWEST_SAMPLES = 20  # from one to the next where a count has run out and the weight does not turn as it should
_JUMP = 0.1  # relative change of lr or weight decay after which a count no longer holds


class Countdown:
    """Counts down the steps of many weights.

    The first counts rest on few samples, so that they are renewed sooner: at the 1st, 5th, 21st, ... sample.

    Example:
        >>> count = Countdown(1)
        >>> def left(step):
        ...     fifty, turns = (lambda: np.array([50.0])), np.array([True])
        ...     return count.left(step, (0.1, 0.01), fifty, anew=False, turns=turns).item()
        >>> [left(step) for step in (0, 10, 20, 30, 40, 90)]
        [50.0, 40.0, 30.0, 20.0, 50.0, 50.0]
    """

    def __init__(self, count: int) -> None:
        self._left = np.full(count, np.nan)
        self._at = self._samples = self._next = self._since = 0
        self._settings = (0.0, 0.0)

    def left(
        self, step: int, settings: tuple[float, float], work_out: Callable[[], Array], *, anew: bool, turns: Flags
    ) -> Array:
        """Steps left at a sample.

        Args:
            step: the optimizer's count of steps.
            settings: lr and weight decay.
            work_out: gives the steps that are left.
            anew: whether some weights begin anew here.
            turns: whether each weight turns about as in equilibrium, which a count of 0 promises.
        """
        self._samples += 1
        self._since += 1
        left: Array = np.maximum(self._left - (step - self._at), 0.0)
        has_run_out = bool(np.any((left == 0) & (self._left > 0)))
        is_wrong = self._since >= _FEWEST_SAMPLES and bool(np.any((left == 0) & ~turns))
        if anew or has_run_out or is_wrong or self._samples >= self._next or self._jumped(settings):
            self._left, self._at, self._settings, self._since = work_out(), step, settings, 0
            self._next = self._samples + 1 + min(_SOONER * self._samples, _MOST_SAMPLES)
            left = self._left
        return left

    def _jumped(self, settings: tuple[float, float]) -> bool:
        pairs = zip(settings, self._settings, strict=True)
        return any(abs(now - before) > _JUMP * max(now, before) for now, before in pairs)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {"at": self._at, "samples": self._samples, "next": self._next, "since": self._since}
        return {"left": torch.from_numpy(self._left.copy()), **counts, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._left = state["left"].cpu().numpy().copy()
        names = ("at", "samples", "next", "since")
        self._at, self._samples, self._next, self._since = (int(state[name]) for name in names)
        lr, weight_decay = state["settings"]
        self._settings = float(lr), float(weight_decay)
