"""Whether a run is stable, will cross the edge of stability, or is there: from stability ratios as they come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from equilibria.measure.sharpness_table import APPROACHING, DIVERGED, DIVERGING, EDGE, PAST, STABLE

_BAND = 2e-3  # around R = 1, within which a run stays on the side where it was
_TURNING, _NOT_TURNING = 0.8, 0.5  # share of steps that turn back
_LEFT = 0.9  # R below which a run that no longer turns back has left the edge
_GROWS = 1.01  # times the loss of the query before
_FAR = 10.0  # times the loss at the first query: beyond it a run that still grows diverges
_AS_DECAY = 0.1  # relative deviation of the growth of R from that by weight decay alone


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands.

    Attributes:
        state: one of `equilibria.measure.sharpness_table.STATES`.
        ratio_mean: R averaged over this step and the one before, if both were queried; else R.
    """

    state: str
    ratio_mean: float


class EdgeDetector:
    """Follows R from query to query.

    Where two consecutive steps were queried their mean counts: at the edge R alternates from step to step. The run is
    at the edge once R has crossed 1 and steps turn back on each other: after the crossing the oscillation has to grow
    out of rounding first. Where the loss is told, it must also have stopped growing: on a valley that does not become
    flatter off its floor nothing holds the oscillation, and the run diverges. A scale-invariant loss always does hold
    it, for the weights grow and the effective learning rate falls.

    Example:
        >>> detector = EdgeDetector()
        >>> growth = 2 * 1e-3  # of log R per step, by weight decay alone
        >>> states = [detector.take(step, 0.5 * math.exp(growth * step), turned_back=0.4, growth=growth).state
        ...           for step in (0, 100, 200, 300, 400, 500)]
        >>> states
        ['stable', 'approaching', 'approaching', 'approaching', 'past the edge', 'past the edge']
        >>> detector.take(501, 1.1, turned_back=1.0, growth=growth).state
        'edge of stability'
    """

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None
        self._losses: list[float] = []  # the first, and the last four
        self._state = STABLE

    def take(
        self, step: int, ratio: float, *, turned_back: float | None, growth: float | None, loss: float | None = None
    ) -> Standing:
        """The standing after one more query.

        Args:
            step: of the query.
            ratio: R.
            turned_back: share of the last steps that turned back; None if not known.
            growth: of log R per step by weight decay alone; None if there is no such law.
            loss: where it could grow without limit; None where it cannot, as if it is scale-invariant.
        """
        self._losses = [*self._losses[:1], *self._losses[1:][-3:], *([] if loss is None else [loss])]
        follows = self._before is not None and step == self._before[0] + 1
        mean = (ratio + self._before[1]) / 2 if self._before is not None and follows else ratio
        self._state = self._next(step, ratio, mean, turned_back, growth)
        self._before = step, ratio
        return Standing(self._state, mean)

    def _next(self, step: int, ratio: float, mean: float, turned_back: float | None, growth: float | None) -> str:
        turns = self._state == EDGE if turned_back is None else turned_back >= _TURNING
        beyond = mean > 1 - _BAND if self._state in (PAST, DIVERGING) else mean > 1 + _BAND
        growing, far = self._is_growing(), self._is_far()
        if beyond and growing and far and turned_back != 0.0:
            return DIVERGING
        if self._state == EDGE and not self._has_left(mean, turned_back):
            return EDGE
        if beyond:
            return EDGE if turns and not growing else PAST
        if far:  # where a network is dead there is no curvature left
            return DIVERGED
        return APPROACHING if self._grows_by_decay(step, ratio, growth) else STABLE

    def _is_growing(self) -> bool:
        """Whether the loss has grown from query to query, three times if there were as many."""
        recent = self._losses[-4:]
        return len(recent) > 1 and all(now > _GROWS * before for before, now in pairwise(recent))

    def _is_far(self) -> bool:
        return bool(self._losses) and self._losses[-1] > _FAR * self._losses[0] > 0

    def _has_left(self, mean: float, turned_back: float | None) -> bool:
        return mean < _LEFT and turned_back is not None and turned_back < _NOT_TURNING

    def _grows_by_decay(self, step: int, ratio: float, growth: float | None) -> bool:
        if self._before is None or growth is None or growth <= 0 or not ratio > 0 or not 0 < self._before[1] < math.inf:
            return False
        measured = math.log(ratio / self._before[1]) / (step - self._before[0])
        return abs(measured / growth - 1) < _AS_DECAY
