"""Time budgets for work inside optimizer hooks: which steps are measured, so that it costs a share of training time.

`TimeBudget` turns measured costs into an interval in steps. The monitor's `Sampler` and the sharpness tracker's
`QuerySchedule` choose their steps by it; they differ because the tracker's first query costs ten times the others.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from equilibria.errors import EquilibriaError, whole

Every: TypeAlias = int | Literal["auto"]
"""Steps from one measurement to the next; "auto" keeps the cost to a small share of the training time."""

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
            raise EquilibriaError(
                f"got every={every!r}; expected 'auto' or a whole number of steps, 1 or more", argument="every"
            )
        self.fixed = None if isinstance(every, str) else whole("every", every, low=1)
        self._share, self._longest = share, longest
        self.cost = self.step_time = 0.0

    @property
    def automatic(self) -> bool:
        """Whether the interval follows the measured times."""
        return self.fixed is None

    def add_cost(self, seconds: float) -> None:
        """Record the time that a measurement took. The first ones, which load code, are soon forgotten."""
        self.cost = steady_mean(min(self.cost, _OUTLIER * seconds), seconds)

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


def steady_mean(before: float, newest: float) -> float:
    """Exponential running mean that limits outliers; ``before`` is 0 at the start."""
    return before + _NEWEST_WEIGHT * (min(newest, _OUTLIER * before) - before) if before else newest
