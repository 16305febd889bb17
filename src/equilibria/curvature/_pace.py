"""Which steps are queried: every so many, or as many as a share of the training time pays for."""

from __future__ import annotations

import math
import time

from equilibria.errors import EquilibriaError, whole
from equilibria.optimizers.budget import steady_mean

_SHARE = 0.03  # of the training time for queries; what every step costs comes on top
_MOST = 0.05  # of the training time so far, with the next query: the first search takes part of what is to come
_MOST_EARLY = 0.06  # the same for a query that the motion calls for
_CHEAP = 0.01  # of a step: looking at every step then costs next to nothing
_WARM = 3.0  # products of a warm query, to guess its cost before there was one
_TIMED = 3  # steps to be timed before anything is planned
_LOOKS = 14  # before a query: it wants ten comparisons of three weights each


class Pace:
    """Decides which steps are queried.

    On its own account it spends a share of the training time, and waits until training has paid for the first search,
    which is up to ten times as dear as the others.

    Args:
        every: 1, 2, ... or "auto".

    Attributes:
        together: how many queries, at consecutive steps, are taken at a time.

    Example:
        >>> pace = Pace(20)
        >>> found = []
        >>> for step in range(70):
        ...     if pace.is_due(step):
        ...         pace.queried(step, 0.0, hvps=2, cold=False)
        ...         found.append(step)
        >>> found
        [0, 20, 40, 60]
    """

    def __init__(self, every: int | str) -> None:
        if isinstance(every, str) and every != "auto":
            raise EquilibriaError(f"got every={every!r}; expected 'auto' or a whole number of steps, 1 or more")
        self._fixed = None if isinstance(every, str) else whole("every", every, low=1)
        self.together = 1
        self._first = self._last = -1
        self._left: float | None = None
        self._trained = self._spent = self._step_time = self._look_cost = self._query_cost = 0.0
        self._steps = 0

    @property
    def every(self) -> float:
        """How many steps from one query to the next, as things are now."""
        if self._fixed is not None:
            return self._fixed
        if self._steps < _TIMED:
            return math.inf
        return max(1.0, self.together * self._query_cost / (_SHARE * self._step_time))

    def enter(self) -> None:
        """Training has got to its next step."""
        now = time.perf_counter()
        if self._left is not None:
            self._trained += now - self._left
            self._step_time = steady_mean(self._step_time, max(now - self._left, 1e-9))
            self._steps += 1

    def leave(self) -> None:
        """Training goes on."""
        self._left = time.perf_counter()

    def looked(self, seconds: float) -> None:
        """Take note of what it cost to look at a step."""
        self._look_cost = steady_mean(self._look_cost, seconds)

    def is_due(self, step: int) -> bool:
        """Whether this step is to be queried."""
        if self._last < 0:
            return True
        if self._is_between(step):
            return True
        if self._fixed is None:
            return step >= self._due(step)
        return step // self._fixed > self._first // self._fixed

    def may_wait(self, step: int) -> bool:
        """Whether a query that is due may come after some more looks; not the second of two, nor one that was asked."""
        return self._fixed is None and self._last >= 0 and step > self._last + 1

    def may_look(self, step: int) -> bool:
        """Whether this step is to be looked at: always if that is cheap or was asked for, else before a query."""
        if self._fixed is not None or self._look_cost <= _CHEAP * self._step_time or self._is_between(step):
            return True
        return step >= self._due(step) - _LOOKS

    def may_be_early(self, step: int) -> bool:
        """Whether a query is affordable before its time: after a quarter of the time."""
        return step >= self._last + max(4.0, self.every / 4) and self._unpaid(_MOST_EARLY) <= 0

    def _is_between(self, step: int) -> bool:
        """Whether some of the queries that belong together are still to come."""
        return 0 < step - self._first < self.together

    def _due(self, step: int) -> float:
        """The step of the next query, as things are now."""
        return max(self._first + self.every, step + self._unpaid(_MOST) / max(self._step_time, 1e-9))

    def _unpaid(self, share: float) -> float:
        """Seconds of training until such a share of it pays for what was spent and for the next query."""
        spent = self._spent + self.together * self._query_cost
        return spent / share - self._trained if self._fixed is None else 0.0

    def queried(self, step: int, seconds: float, *, hvps: int, cold: bool) -> None:
        """Take note of a query."""
        if self._last < 0 or step - self._first >= self.together:
            self._first = step
        self._last = step
        self._spent += seconds
        warm = seconds * min(1.0, _WARM / max(hvps, 1)) if cold else seconds
        self._query_cost = steady_mean(self._query_cost, warm)
