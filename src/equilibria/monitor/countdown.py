"""Steps to settle of many weights, estimated now and then and counted down in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_SAMPLES = 200  # from one estimate to the next: an estimate costs as much as several samples
_SOONER = 3  # times the samples so far
_FEWEST_FOR_COUNTDOWN = 20  # samples to the next estimate after a count of 0 whose weight does not turn as it should
_JUMP = 0.1  # relative change of lr or weight decay that invalidates a count


class Countdown:
    """Caches the expensive steps-to-settle estimate of many weights and counts down between refreshes.

    The first estimates rest on few samples, so they are refreshed sooner: at the 1st, 5th, 21st, ... sample.

    Example:
        >>> count = Countdown(1)
        >>> def left(step):
        ...     fifty, turns = (lambda: np.array([50.0])), np.array([True])
        ...     return count.left(step, (0.1, 0.01), fifty, restart=False, turns=turns).item()
        >>> [left(step) for step in (0, 10, 20, 30, 40, 90)]
        [50.0, 40.0, 30.0, 20.0, 50.0, 50.0]
    """

    def __init__(self, count: int) -> None:
        self._left = np.full(count, np.nan)
        self._refreshed = self._samples = self._next = self._since = 0
        self._settings = (0.0, 0.0)

    def left(
        self, step: int, settings: tuple[float, float], estimate: Callable[[], Array], *, restart: bool, turns: Flags
    ) -> Array:
        """Steps left at a sample.

        Args:
            step: the optimizer's count of steps.
            settings: lr and weight decay.
            estimate: computes the steps left.
            restart: whether the recursion of some weights starts here.
            turns: whether each weight turns about as in equilibrium, which a count of 0 promises.
        """
        self._samples += 1
        self._since += 1
        left: Array = np.maximum(self._left - (step - self._refreshed), 0.0)
        has_run_out = bool(np.any((left == 0) & (self._left > 0)))
        is_wrong = self._since >= _FEWEST_FOR_COUNTDOWN and bool(np.any((left == 0) & ~turns))
        if restart or has_run_out or is_wrong or self._samples >= self._next or self._jumped(settings):
            self._left, self._refreshed, self._settings, self._since = estimate(), step, settings, 0
            self._next = self._samples + 1 + min(_SOONER * self._samples, _MOST_SAMPLES)
            left = self._left
        return left

    def _jumped(self, settings: tuple[float, float]) -> bool:
        pairs = zip(settings, self._settings, strict=True)
        return any(abs(now - before) > _JUMP * max(now, before) for now, before in pairs)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint."""
        counts = {"refreshed": self._refreshed, "samples": self._samples, "next": self._next, "since": self._since}
        return {"left": torch.from_numpy(self._left.copy()), **counts, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._left = state["left"].cpu().numpy().copy()
        names = ("refreshed", "samples", "next", "since")
        self._refreshed, self._samples, self._next, self._since = (int(state[name]) for name in names)
        lr, weight_decay = state["settings"]
        self._settings = float(lr), float(weight_decay)
