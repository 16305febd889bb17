"""Time budgets for work inside optimizer hooks: which steps are measured, so that it costs a share of training time.

`TimeBudget` turns measured costs into an interval in steps. `Cadence` is the monitor's schedule of samples on top of
it. The sharpness tracker builds another schedule on it (`equilibria.curvature`), because its first query costs ten
times the others.
"""

from __future__ import annotations

import math
import time
from typing import Literal, TypeAlias

from equilibria.errors import EquilibriaError, whole

Every: TypeAlias = int | Literal["auto"]

_SAMPLING_SHARE = 0.006  # of the training time that sampling may take with every="auto"
_LONGEST_INTERVAL = 1000  # steps between samples, however cheap the steps are
_NEWEST_WEIGHT = 0.2  # of the newest measurement in the running means
_OUTLIER = 4.0  # times the mean: one measurement counts for at most this, so that a hiccup does not stop the sampling


class TimeBudget:
    """Converts the cost of a measurement into an interval in steps, given the share of training time it may take.

    Args:
        every: 1, 2, ... for a fixed interval, or "auto" for one that follows the measured times.
        share: of the training time that measurements may take.
        longest: the longest interval, in steps.

    Attributes:
        cost: running mean of the seconds that a measurement takes; 0 before the first.
        step_time: running mean of the seconds that a training step takes; 0 before the first.

    Example:
        >>> budget = TimeBudget("auto", share=0.01)
        >>> budget.add_cost(0.02)
        >>> budget.add_step(0.1)
        >>> round(budget.interval())  # 0.02 s every 20 steps of 0.1 s are 1 %
        20
    """

    def __init__(self, every: int | str, *, share: float, longest: float = math.inf) -> None:
        if isinstance(every, str) and every != "auto":
            raise EquilibriaError(f"got every={every!r}; expected 'auto' or a whole number of steps, 1 or more")
        self.fixed = None if isinstance(every, str) else whole("every", every, low=1)
        self._share, self._longest = share, longest
        self.cost = self.step_time = 0.0

    @property
    def automatic(self) -> bool:
        """Whether the interval follows the measured times."""
        return self.fixed is None

    def add_cost(self, seconds: float) -> None:
        """Record the time that a measurement took."""
        self.cost = steady_mean(self.cost, seconds)

    def add_step(self, seconds: float) -> None:
        """Record the time that a training step took, without measurements."""
        self.step_time = steady_mean(self.step_time, max(seconds, 1e-9))

    def interval(self, *, measurements: int = 1) -> float:
        """Steps from one measurement (or group of ``measurements``) to the next; 1 before anything was timed."""
        if self.fixed is not None:
            return float(self.fixed)
        if not self.step_time:
            return 1.0
        return min(max(1.0, measurements * self.cost / (self._share * self.step_time)), self._longest)


class Cadence:
    """Decides which steps the monitor samples.

    Args:
        every: 1, 2, ... or "auto".

    Attributes:
        every: the present number of steps between samples.

    Example:
        >>> cadence = Cadence(3)
        >>> [step for step in range(8) if cadence.is_due(step)]
        [0, 3, 6]
    """

    def __init__(self, every: int | str) -> None:
        self._budget = TimeBudget(every, share=_SAMPLING_SHARE, longest=_LONGEST_INTERVAL)
        self.every = self._budget.fixed or 1
        self._next = 0
        self._spent = 0.0
        self._last: tuple[int, float, float] | None = None  # step, time and sampling time spent at the last sample

    @property
    def automatic(self) -> bool:
        """Whether the interval follows the measured times."""
        return self._budget.automatic

    def is_due(self, step: int) -> bool:
        """Whether to sample this step."""
        return step >= self._next if self.automatic else step % self.every == 0

    def spent(self, seconds: float) -> None:
        """Record time that sampling took, including the bookkeeping at steps without a sample."""
        self._spent += seconds

    def wish(self, step: int) -> float:
        """After a sample: how many steps this process would wait for the next one."""
        now = time.perf_counter()
        if self._last is None:
            self._last = step, now, self._spent
        elif step > self._last[0]:
            last_step, then, spent = self._last
            cost = self._spent - spent
            self._budget.add_cost(cost)
            self._budget.add_step(max(now - then - cost, 1e-9) / (step - last_step))
            self._last = step, now, self._spent
        return self._budget.interval()

    def plan_next(self, step: int, wish: float) -> None:
        """Set the next sample; processes that sample together must pass the same ``wish``."""
        if self.automatic:
            self.every = math.ceil(wish)
        self._next = step + self.every

    def resume(self, step: int) -> None:
        """Continue from a checkpoint that was written before ``step``."""
        self._next, self._last = step, None


def steady_mean(before: float, newest: float) -> float:
    """Exponential running mean that limits outliers; ``before`` is 0 at the start."""
    return before + _NEWEST_WEIGHT * (min(newest, _OUTLIER * before) - before) if before else newest
