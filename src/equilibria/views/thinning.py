"""Long series made short without losing an extreme: smallest, largest and root mean square per stretch of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Rows of a sample table, gathered by layer and by stretch of steps.

    All arrays but `order` have one entry per layer and stretch that has rows: those of layer 0 first, in the order of
    their steps.

    Attributes:
        order: the rows, sorted by layer and step.
        starts: where each stretch begins in ``order``.
        layer: the layer.
        stretch: the number of the stretch, the same for the same steps in all layers.
        first: the lowest step in it.
        last: the highest step in it.
        single: whether every step has a stretch of its own, so that nothing is lost.
    """

    order: Integers
    starts: Integers
    layer: Integers
    stretch: Integers
    first: Integers
    last: Integers
    single: bool

    def envelope(self, values: ArrayLike) -> tuple[Floats, Floats]:
        """Smallest and largest value of each stretch; NaN where it has no finite value."""
        rows = self._finite(values)
        return np.fmin.reduceat(rows, self.starts), np.fmax.reduceat(rows, self.starts)

    def rms(self, values: ArrayLike) -> Floats:
        """Root mean square of the finite values of each stretch; NaN where it has none."""
        rows = self._finite(values)
        known = np.isfinite(rows)
        count = np.add.reduceat(known.astype(np.float64), self.starts)
        total = np.add.reduceat(np.where(known, rows, 0.0) ** 2, self.starts)
        mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
        return np.asarray(np.sqrt(mean))

    def line(self, values: ArrayLike) -> Floats:
        """Both ends of the envelope in the order in which they occur, stretch after stretch: a line through them.

        It goes with `line_steps`. Where the stretches are single steps it is the values themselves.
        """
        low, high = self.envelope(values)
        if self.single:
            return low
        rows = self._finite(values)
        falling = self._first_place(rows, high) < self._first_place(rows, low)
        return np.stack([np.where(falling, high, low), np.where(falling, low, high)], axis=1).ravel()

    def line_steps(self) -> Integers:
        """The steps that go with `line`."""
        return self.first if self.single else np.stack([self.first, self.last], axis=1).ravel()

    def _first_place(self, rows: Floats, wanted: Floats) -> Integers:
        """The place in ``order`` at which each stretch first has the wanted value."""
        places = np.where(rows == np.repeat(wanted, self._counts()), np.arange(len(rows)), len(rows))
        return np.asarray(np.minimum.reduceat(places, self.starts))

    def _finite(self, values: ArrayLike) -> Floats:
        rows = np.asarray(values, float)[self.order]
        return np.where(np.isfinite(rows), rows, np.nan)

    def _counts(self) -> Integers:
        return np.diff(self.starts, append=len(self.order))


def stretches(steps: ArrayLike, layers: ArrayLike, *, most: int, breaks: ArrayLike = ()) -> Stretches:
    """Gather rows by layer and by at most ``most`` stretches of steps, and one more for every break.

    Args:
        steps: the step of every row.
        layers: the layer of every row, from 0; rows below 0 are left out.
        most: how many stretches a layer may have. With fewer sampled steps than this each step is one of its own.
        breaks: steps at which a stretch begins, so that none goes across; sorted.

    Example:
        >>> long = stretches(range(1000), [0] * 1000, most=4)
        >>> spike = [1.0] * 1000
        >>> spike[321] = 9.0
        >>> long.envelope(spike)[1].tolist()
        [1.0, 9.0, 1.0, 1.0]
    """
    step, layer = np.asarray(steps, np.int64), np.asarray(layers, np.int64)
    order = np.lexsort((step, layer))
    order = order[layer[order] >= 0]
    step, layer = step[order], layer[order]
    number, single = _numbers(step, most, np.asarray(breaks, np.int64))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (number[1:] != number[:-1]) | (layer[1:] != layer[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order)) - 1 if len(starts) else starts
    return Stretches(order, starts, layer[starts], number[starts], step[starts], step[ends], single)


def _numbers(step: Integers, most: int, breaks: Integers) -> tuple[Integers, bool]:
    """The stretch of every step: stretches are equally long, as the axis of a chart is."""
    known, number = np.unique(step, return_inverse=True)
    if len(known) <= most:
        return number, True
    length = int(known[-1] - known[0]) + 1
    # Both terms grow with the step, so that their sum is the same only where both are.
    return (step - known[0]) * most // length + np.searchsorted(breaks, step, side="right"), False
