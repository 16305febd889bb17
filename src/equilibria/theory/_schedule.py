"""What a schedule is, and the checks its shapes share; the shapes are in `schedules`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, positive, whole, within

Array: TypeAlias = NDArray[np.float64]
Steps: TypeAlias = NDArray[np.int64]

# Beyond this a step is no longer exact as a float64.
_LAST_STEP = 2**53


class Schedule(ABC):
    """A value for every optimizer step.

    Call it for one step, or ask `values` for many at once; the two agree exactly.
    """

    __slots__ = ()

    @abstractmethod
    def _at(self, steps: Steps) -> Array:
        """The values at ``steps``, which are ascending and at least 0; the caller checks the result."""

    def __call__(self, step: int) -> float:
        """The value at one step."""
        return float(self.values(1, start=position("step", step))[0])

    def values(self, steps: int, *, start: int = 0) -> Array:
        """The values at steps ``start``, ``start + 1``, ..., ``start + steps - 1``.

        Args:
            steps: how many values.
            start: the first step.

        Returns:
            A new array of length ``steps``.

        Raises:
            EquilibriaError: a count is not a whole number >= 0, or the schedule is not finite and >= 0 there.

        Example:
            >>> from equilibria.theory.schedules import Linear
            >>> Linear(1.0, 0.0, steps=4).values(3, start=1)
            array([0.75, 0.5 , 0.25])
        """
        first = position("start", start)
        wanted = np.arange(first, position("start + steps", first + whole("steps", steps)))
        with np.errstate(all="ignore"):  # an overflow is reported below, with its step
            result = self._at(wanted)
        bad = ~(np.isfinite(result) & (result >= 0))
        if bad.any():
            where = int(bad.argmax())
            raise EquilibriaError(
                f"got {float(result[where])} at step {wanted[where]} of {type(self).__name__}; "
                "expected a finite value >= 0"
            )
        return result


def mix(start: float, end: float, fraction: Array) -> Array:
    """From ``start`` (fraction 0) to ``end`` (fraction 1), exact at both ends and never negative."""
    return start * (1 - fraction) + end * fraction


def level(name: str, value: object) -> float:
    """``value`` as a finite float of at least 0."""
    return within(name, value, low=0)


def position(name: str, value: object, *, low: int = 0) -> int:
    """``value`` as a whole number of steps."""
    within(name, value, high=_LAST_STEP)
    return whole(name, value, low=low)


def items(name: str, values: Iterable[object]) -> list[object]:
    """A non-empty list of ``values``."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise EquilibriaError(f"got {name}={values!r}; expected a list")
    items = list(values)
    if not items:
        raise EquilibriaError(f"got no {name}; expected at least one")
    return items


def ascending(name: str, positions: list[int]) -> tuple[int, ...]:
    """``positions`` as a tuple, each after the one before."""
    for before, after in pairwise(positions):
        if after <= before:
            raise EquilibriaError(f"got {name} {before}, {after}; expected each one after the one before")
    return tuple(positions)


def check(
    schedule: Schedule,
    *,
    levels: tuple[str, ...] = (),
    rates: tuple[str, ...] = (),
    lengths: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
) -> None:
    """Replace the named fields of a frozen dataclass by checked ones: >= 0, > 0, whole >= 1, whole >= 0."""
    checks: list[tuple[tuple[str, ...], Callable[[str, object], float]]] = [
        (levels, level),
        (rates, positive),
        (lengths, partial(position, low=1)),
        (counts, position),
    ]
    for names, check in checks:
        for name in names:
            object.__setattr__(schedule, name, check(name, getattr(schedule, name)))
