"""Long series made short without losing an extreme: smallest, largest and root mean square per stretch of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.diagnosis.series import sample_weights

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Rows of a sample table, grouped by layer and by stretch of steps.

    All arrays but `order` have one entry per layer and stretch with rows: those of layer 0 first, in the order of
    their steps.

    Attributes:
        order: the rows, sorted by layer and step.
        starts: the place in ``order`` where each stretch begins.
        layer: the layer.
        stretch: the number of the stretch, the same for the same steps in all layers.
        first: the lowest step in it.
        last: the highest step in it.
        weight: of every row of ``order``, the steps that it stands for.
        single: whether every stretch is one step, so that no value is lost.
    """

    order: Integers
    starts: Integers
    layer: Integers
    stretch: Integers
    first: Integers
    last: Integers
    weight: Floats
    single: bool

    def envelope(self, values: ArrayLike) -> tuple[Floats, Floats]:
        """Smallest and largest finite value of each stretch; NaN if it has none."""
        rows = self._finite(values)
        return np.fmin.reduceat(rows, self.starts), np.fmax.reduceat(rows, self.starts)

    def rms(self, values: ArrayLike) -> Floats:
        """Root mean square of the finite values of each stretch, weighted by their steps; NaN if it has none."""
        rows = self._finite(values)
        weight = np.where(np.isfinite(rows), self.weight, 0.0)
        steps = np.add.reduceat(weight, self.starts)
        total = np.add.reduceat(weight * np.nan_to_num(rows) ** 2, self.starts)
        mean = np.divide(total, steps, out=np.full(len(steps), np.nan), where=steps > 0)
        return np.asarray(np.sqrt(mean))

    def line(self, values: ArrayLike) -> Floats:
        """A line through the envelope, at `line_steps`: of each stretch both extremes, in the order of their steps.

        For stretches of single steps these are the values themselves.
        """
        low, high = self.envelope(values)
        if self.single:
            return low
        rows = self._finite(values)
        falling = self._first_place(rows, high) < self._first_place(rows, low)
        return np.stack([np.where(falling, high, low), np.where(falling, low, high)], axis=1).ravel()

    def line_steps(self) -> Integers:
        """The steps of the values of `line`."""
        return self.first if self.single else np.stack([self.first, self.last], axis=1).ravel()

    def _first_place(self, rows: Floats, extremes: Floats) -> Integers:
        """The place in ``order`` at which each stretch first has its extreme."""
        counts = np.diff(self.starts, append=len(self.order))
        places = np.where(rows == np.repeat(extremes, counts), np.arange(len(rows)), len(rows))
        return np.asarray(np.minimum.reduceat(places, self.starts))

    def _finite(self, values: ArrayLike) -> Floats:
        rows = np.asarray(values, float)[self.order]
        return np.where(np.isfinite(rows), rows, np.nan)


def stretches(steps: ArrayLike, layers: ArrayLike, *, most: int, breaks: ArrayLike = ()) -> Stretches:
    """Group rows by layer and by at most ``most`` stretches of steps, and one more for every break.

    Args:
        steps: the step of every row.
        layers: the layer of every row, from 0; rows with a negative layer are left out.
        most: the number of stretches that a layer may have. If no more steps were sampled, each step is a stretch.
        breaks: steps at which a new stretch begins; sorted.

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
    number, single = _stretch_numbers(step, most, np.asarray(breaks, np.int64))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (number[1:] != number[:-1]) | (layer[1:] != layer[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order)) - 1 if len(starts) else starts
    weight = sample_weights(step, np.append(np.flatnonzero(np.diff(layer, prepend=-1)), len(step)))
    return Stretches(order, starts, layer[starts], number[starts], step[starts], step[ends], weight, single)


def _stretch_numbers(step: Integers, most: int, breaks: Integers) -> tuple[Integers, bool]:
    """The number of every step's stretch; stretches have equal lengths, for the axis of a chart."""
    known, number = np.unique(step, return_inverse=True)
    if len(known) <= most:
        return number, True
    length = int(known[-1] - known[0]) + 1
    # Both terms grow with the step, so two steps have the same sum only if they agree in both.
    return (step - known[0]) * most // length + np.searchsorted(breaks, step, side="right"), False
