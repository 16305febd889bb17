"""Which steps are sampled: every so many, or as many as cost less than a per cent of the time."""

from __future__ import annotations

import math
import time

from equilibria.errors import EquilibriaError, whole

_SHARE = 0.006  # of the training time that sampling may take when it chooses for itself
_LARGEST = 1000  # steps between samples, however cheap the steps are
_FORGETS = 0.2  # weight of the newest measurement
_SURPRISE = 4.0  # times the mean that one measurement counts for at most: a hiccup is no reason to stop looking


class Cadence:
    """Decides which steps are sampled.

    Args:
        every: 1, 2, ... or "auto".

    Example:
        >>> cadence = Cadence(3)
        >>> [step for step in range(8) if cadence.is_due(step)]
        [0, 3, 6]
    """

    def __init__(self, every: int | str) -> None:
        if every == "auto":
            self.automatic, self.every = True, 1
        elif isinstance(every, str):
            raise EquilibriaError(f"got every={every!r}; expected 'auto' or a whole number of steps, 1 or more")
        else:
            self.automatic, self.every = False, whole("every", every, low=1)
        self._next = 0
        self._spent = 0.0
        self._last: tuple[int, float, float] | None = None  # step, when, sampling time spent until then
        self._cost = self._step_time = 0.0  # means: seconds per sample, and per step without it

    def is_due(self, step: int) -> bool:
        """Whether this step is to be sampled."""
        return step >= self._next if self.automatic else step % self.every == 0

    def spent(self, seconds: float) -> None:
        """Take note of time that sampling took."""
        self._spent += seconds

    def wish(self, step: int) -> float:
        """After a sample: how many steps this process would like to wait for the next one."""
        now = time.perf_counter()
        if self._last is None:
            self._last = step, now, self._spent
        elif step > self._last[0]:
            before, when, spent = self._last
            cost = self._spent - spent
            self._cost = steady_mean(self._cost, cost)
            self._step_time = steady_mean(self._step_time, max(now - when - cost, 1e-9) / (step - before))
            self._last = step, now, self._spent
        if not self._step_time:
            return 1.0
        return min(max(1.0, self._cost / (_SHARE * self._step_time)), float(_LARGEST))

    def plan_next(self, step: int, wish: float) -> None:
        """Fix the next sample; processes that sample together give the same ``wish``."""
        if self.automatic:
            self.every = math.ceil(wish)
        self._next = step + self.every

    def resume(self, step: int) -> None:
        """Go on from a checkpoint that was written before ``step``."""
        self._next, self._last = step, None


def steady_mean(before: float, newest: float) -> float:
    """A mean that forgets slowly, and takes a single long pause for a short one; ``before`` is 0 at the start."""
    return before + _FORGETS * (min(newest, _SURPRISE * before) - before) if before else newest
