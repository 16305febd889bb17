"""Which steps the sharpness tracker queries: every so many, or as many as a share of the training time pays for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from equilibria.optimizers.budget import TimeBudget, steady_mean

_SHARE = 0.03  # of the training time for queries; the cost of watching every step comes on top
_LARGEST_SHARE = 0.05  # of the training time so far, with the next query: the first search is paid for in advance
_LARGEST_SHARE_EARLY = 0.06  # the same for a query that the motion of the weights calls for
_CHEAP = 0.01  # of a step: watching every step then costs next to nothing
_WARM_PRODUCTS = 3.0  # products of a warm query, to estimate its cost before there was one
_TIMED_STEPS = 3  # steps to time before planning anything
_WATCHED_STEPS = 14  # before a query: it wants ten comparisons of three weights each


class QuerySchedule:
    """Decides which steps the tracker queries, and which it watches in between.

    With every="auto" it spends a share of the training time, and waits until training has paid for the first search,
    which costs up to ten times as much as the others.

    Args:
        every: 1, 2, ... or "auto".

    Attributes:
        together: how many consecutive steps form one query.

    Example:
        >>> schedule = QuerySchedule(20)
        >>> queried = []
        >>> for step in range(70):
        ...     if schedule.is_due(step):
        ...         schedule.add_query(step, 0.0, hvps=2, cold=False)
        ...         queried.append(step)
        >>> queried
        [0, 20, 40, 60]
    """

    def __init__(self, every: int | str) -> None:
        self._budget = TimeBudget(every, share=_SHARE)
        self.together = 1
        self._first = self._last = -1  # steps of the first and the last query of the present group
        self._left: float | None = None  # when the last hook returned to training
        self._trained = self._spent = self._watch_cost = 0.0  # seconds
        self._steps = 0

    @property
    def every(self) -> float:
        """Present number of steps from one query to the next; infinite before the first steps are timed."""
        if self._budget.automatic and self._steps < _TIMED_STEPS:
            return math.inf
        return self._budget.interval(measurements=self.together)

    def enter(self) -> None:
        """Training has reached its next step: time the step."""
        if self._left is not None:
            seconds = time.perf_counter() - self._left
            self._trained += seconds
            self._budget.add_step(seconds)
            self._steps += 1

    def leave(self) -> None:
        """Return to training."""
        self._left = time.perf_counter()

    def add_watch(self, seconds: float) -> None:
        """Record the time that watching a step took."""
        self._watch_cost = steady_mean(self._watch_cost, seconds)

    def add_query(self, step: int, seconds: float, *, hvps: int, cold: bool) -> None:
        """Record a query; of a cold search only the part that a warm one would cost counts for the interval."""
        if self._last < 0 or step - self._first >= self.together:
            self._first = step
        self._last = step
        self._spent += seconds
        self._budget.add_cost(seconds * min(1.0, _WARM_PRODUCTS / max(hvps, 1)) if cold else seconds)

    def state_dict(self) -> dict[str, int]:
        """Which steps were queried last, for a checkpoint; times are measured again."""
        return {"first": self._first, "last": self._last, "together": self.together}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a checkpoint."""
        self._first, self._last, self.together = (int(state[name]) for name in ("first", "last", "together"))
        self._left = None  # the time since then was not a step

    def is_due(self, step: int) -> bool:
        """Whether to query this step."""
        if self._last < 0 or self._is_within_group(step):
            return True
        if self._budget.fixed is None:
            return step >= self._due(step)
        return step // self._budget.fixed > self._first // self._budget.fixed

    def may_wait(self, step: int) -> bool:
        """Whether a due query may wait until more steps are watched: not at a fixed interval, nor within a group."""
        return self._budget.automatic and self._last >= 0 and step > self._last + 1

    def may_watch(self, step: int) -> bool:
        """Whether to watch this step: always if that is cheap or the interval is fixed, else before a query."""
        cheap = self._watch_cost <= _CHEAP * self._budget.step_time
        if not self._budget.automatic or cheap or self._is_within_group(step):
            return True
        return step >= self._due(step) - _WATCHED_STEPS

    def may_be_early(self, step: int) -> bool:
        """Whether a query is affordable before it is due: after a quarter of the interval."""
        return step >= self._last + max(4.0, self.every / 4) and self._unpaid(_LARGEST_SHARE_EARLY) <= 0

    def _is_within_group(self, step: int) -> bool:
        """Whether some of the consecutive steps of a query are still to come."""
        return 0 < step - self._first < self.together

    def _due(self, step: int) -> float:
        """The step of the next query, at present costs."""
        wait = self._unpaid(_LARGEST_SHARE) / max(self._budget.step_time, 1e-9)
        return max(self._first + self.every, step + wait)

    def _unpaid(self, share: float) -> float:
        """Seconds of training until such a share of it pays for all queries so far and the next one."""
        spent = self._spent + self.together * self._budget.cost
        return spent / share - self._trained if self._budget.automatic else 0.0
