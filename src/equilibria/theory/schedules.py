"""A schedule is a function of the optimizer step, counted from 0.

Every position (`every`, `milestones`, `steps`, ...) is in optimizer steps; write ``60 * steps_per_epoch`` for
epochs, or wrap a schedule written in epochs with `in_epochs`. Values are finite and never negative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.theory._torch_scheduler import SteppedCopy

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "FromCallable",
    "FromValues",
    "Linear",
    "MultiStep",
    "Piecewise",
    "Polynomial",
    "Schedule",
    "ScheduleLike",
    "Step",
    "Warmup",
    "WarmupStableDecay",
    "as_schedule",
    "in_epochs",
    "scaled",
]

Array: TypeAlias = NDArray[np.float64]
Steps: TypeAlias = NDArray[np.int64]

# Beyond this a step is no longer exact as a float64.
_LAST_STEP = 2**53


class Schedule(ABC):
    """A value for every optimizer step.

    Call it for one step, or use `values` for many at once; the two agree exactly.
    """

    __slots__ = ()

    @abstractmethod
    def _at(self, steps: Steps) -> Array:
        """The values at ``steps``, which are ascending and at least 0; the caller checks the result."""

    def __call__(self, step: int) -> float:
        """The value at one step."""
        return float(self.values(1, start=_position("step", step))[0])

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
            >>> Linear(1.0, 0.0, steps=4).values(3, start=1)
            array([0.75, 0.5 , 0.25])
        """
        first = _position("start", start)
        wanted = np.arange(first, _position("start + steps", first + whole("steps", steps)))
        with np.errstate(all="ignore"):  # an overflow raises below, with its step
            result = self._at(wanted)
        bad = ~(np.isfinite(result) & (result >= 0))
        if bad.any():
            where = int(bad.argmax())
            raise EquilibriaError(
                f"got {float(result[where])} at step {wanted[where]} of {type(self).__name__}; "
                "expected a finite value >= 0"
            )
        return result


def _mix(start: float, end: float, fraction: Array) -> Array:
    """From ``start`` (fraction 0) to ``end`` (fraction 1), exact at both ends and never negative."""
    return start * (1 - fraction) + end * fraction


def _level(name: str, value: object) -> float:
    """``value`` as a finite float of at least 0."""
    return within(name, value, low=0)


def _position(name: str, value: object, *, low: int = 0) -> int:
    """``value`` as a whole number of steps."""
    within(name, value, high=_LAST_STEP)
    return whole(name, value, low=low)


def _items(name: str, values: Iterable[object]) -> list[object]:
    """A non-empty list of ``values``."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise EquilibriaError(f"got {name}={values!r}; expected a list", argument=name)
    items = list(values)
    if not items:
        raise EquilibriaError(f"got no {name}; expected at least one", argument=name)
    return items


def _ascending(name: str, positions: list[int], *, argument: str) -> tuple[int, ...]:
    """``positions`` as a tuple, each after the one before."""
    for before, after in pairwise(positions):
        if after <= before:
            raise EquilibriaError(
                f"got {name} {before}, {after}; expected each one after the one before", argument=argument
            )
    return tuple(positions)


def _check(
    schedule: Schedule,
    *,
    levels: tuple[str, ...] = (),
    rates: tuple[str, ...] = (),
    lengths: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
) -> None:
    """Replace the named fields of a frozen dataclass by checked ones: >= 0, > 0, whole >= 1, whole >= 0."""
    checks: list[tuple[tuple[str, ...], Callable[[str, object], float]]] = [
        (levels, _level),
        (rates, positive),
        (lengths, partial(_position, low=1)),
        (counts, _position),
    ]
    for names, check in checks:
        for name in names:
            object.__setattr__(schedule, name, check(name, getattr(schedule, name)))


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same value at every step.

    Example:
        >>> Constant(0.1)(1000)
        0.1
    """

    value: float

    def __post_init__(self) -> None:
        _check(self, levels=("value",))

    def _at(self, steps: Steps) -> Array:
        return np.full(len(steps), self.value)


@dataclass(frozen=True, slots=True)
class Step(Schedule):
    """``peak * factor ** (step // every)``: multiplied by ``factor`` every ``every`` steps (torch: StepLR).

    Example:
        >>> Step(1.0, every=10, factor=0.5)(25)
        0.25
    """

    peak: float
    _: KW_ONLY
    every: int
    factor: float

    def __post_init__(self) -> None:
        _check(self, levels=("peak",), lengths=("every",), rates=("factor",))

    def _at(self, steps: Steps) -> Array:
        return self.peak * np.power(self.factor, (steps // self.every).astype(np.float64))


@dataclass(frozen=True, slots=True)
class MultiStep(Schedule):
    """Multiplied by ``factor`` at each milestone, from the milestone's own step on (torch: MultiStepLR).

    Example:
        >>> MultiStep(1.0, milestones=[60, 120], factor=0.5).values(2, start=119)
        array([0.5 , 0.25])
    """

    peak: float
    _: KW_ONLY
    milestones: Sequence[int]
    factor: float

    def __post_init__(self) -> None:
        _check(self, levels=("peak",), rates=("factor",))
        milestones = [_position("milestone", step, low=1) for step in _items("milestones", self.milestones)]
        object.__setattr__(self, "milestones", _ascending("milestones", milestones, argument="milestones"))

    def _at(self, steps: Steps) -> Array:
        passed = np.searchsorted(np.array(self.milestones), steps, side="right")
        return self.peak * np.power(self.factor, passed.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Linear(Schedule):
    """Linear from ``start`` at step 0 to ``end`` at step ``steps``, then ``end`` (torch: LinearLR).

    Example:
        >>> Linear(0.0, 1.0, steps=4).values(6)
        array([0.  , 0.25, 0.5 , 0.75, 1.  , 1.  ])
    """

    start: float
    end: float
    _: KW_ONLY
    steps: int

    def __post_init__(self) -> None:
        _check(self, levels=("start", "end"), lengths=("steps",))

    def _at(self, steps: Steps) -> Array:
        return _mix(self.start, self.end, np.minimum(steps, self.steps) / self.steps)


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Half a cosine wave from ``peak`` down to ``end``, once or with warm restarts.

    ``end + (peak - end) * (1 + cos(pi * t / T)) / 2`` at step ``t`` of a cycle of ``T`` steps. The first
    cycle has ``steps`` steps, each further one ``cycle_growth`` times as many as the one before. After the
    last of ``cycles`` cycles the value stays at ``end`` (torch's CosineAnnealingLR would climb again).
    ``cycles=None`` restarts without end, as torch's CosineAnnealingWarmRestarts does with ``T_0=steps`` and
    ``T_mult=cycle_growth``.

    Example:
        >>> once = Cosine(1.0, steps=4)
        >>> [round(once(step), 4) for step in (0, 1, 2, 4, 9)]
        [1.0, 0.8536, 0.5, 0.0, 0.0]
        >>> restarting = Cosine(1.0, steps=4, cycles=None, cycle_growth=2)
        >>> [round(restarting(step), 4) for step in (4, 8, 12)]
        [1.0, 0.5, 1.0]
    """

    peak: float
    _: KW_ONLY
    steps: int
    end: float = 0.0
    cycles: int | None = 1
    cycle_growth: int = 1

    def __post_init__(self) -> None:
        _check(self, levels=("peak", "end"), lengths=("steps", "cycle_growth"))
        if self.cycles is not None:
            _check(self, lengths=("cycles",))

    def _at(self, steps: Steps) -> Array:
        local, length = self._same_length(steps) if self.cycle_growth == 1 else self._growing(steps)
        # sin^2 of the rest of the cycle: equal to (1 + cos)/2, but exactly 0 at the end and without
        # its cancellation just before.
        left = np.maximum(length - local, 0) / length
        return _mix(self.end, self.peak, np.sin(np.pi / 2 * left) ** 2)

    def _same_length(self, steps: Steps) -> tuple[Steps, float]:
        cycle = steps // self.steps
        if self.cycles is not None:
            cycle = np.minimum(cycle, self.cycles - 1)
        return steps - cycle * self.steps, float(self.steps)

    def _growing(self, steps: Steps) -> tuple[Steps, Array]:
        last = int(steps[-1]) if len(steps) else 0
        begins, lengths = [0], [self.steps]
        while begins[-1] + lengths[-1] <= last and len(begins) != self.cycles:
            begins.append(begins[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.cycle_growth)
        cycle = np.searchsorted(np.array(begins), steps, side="right") - 1
        return steps - np.array(begins)[cycle], np.array(lengths, dtype=np.float64)[cycle]


@dataclass(frozen=True, slots=True)
class Polynomial(Schedule):
    """``end + (start - end) * (1 - step / steps) ** power``, then ``end`` (torch: PolynomialLR, with end 0).

    Example:
        >>> Polynomial(1.0, 0.0, steps=4, power=2.0).values(5)
        array([1.    , 0.5625, 0.25  , 0.0625, 0.    ])
    """

    start: float
    end: float
    _: KW_ONLY
    steps: int
    power: float

    def __post_init__(self) -> None:
        _check(self, levels=("start", "end"), lengths=("steps",), rates=("power",))

    def _at(self, steps: Steps) -> Array:
        left = np.maximum(self.steps - steps, 0) / self.steps
        return _mix(self.end, self.start, left**self.power)


@dataclass(frozen=True, slots=True)
class Exponential(Schedule):
    """``start * gamma ** step`` (torch: ExponentialLR); ``gamma`` above 1 grows until float64 overflows.

    Example:
        >>> Exponential(1.0, gamma=0.5)(3)
        0.125
    """

    start: float
    _: KW_ONLY
    gamma: float

    def __post_init__(self) -> None:
        _check(self, levels=("start",), rates=("gamma",))

    def _at(self, steps: Steps) -> Array:
        return self.start * np.power(self.gamma, steps.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Warmup(Schedule):
    """A linear ramp from ``start`` to the first value of ``after``, then ``after``.

    The clock of ``after`` starts when the warm-up ends: step ``steps`` of this schedule is step 0 of
    ``after``, so the whole is ``steps`` longer. Step 0 has the value ``start`` (torch: SequentialLR).

    Example:
        >>> Warmup(Step(1.0, every=2, factor=0.5), steps=2).values(6)
        array([0. , 0.5, 1. , 1. , 0.5, 0.5])
    """

    after: ScheduleLike
    _: KW_ONLY
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _check(self, levels=("start",), lengths=("steps",))
        object.__setattr__(self, "after", as_schedule(self.after, name="after"))

    def _at(self, steps: Steps) -> Array:
        body = as_schedule(self.after)
        cut = int(np.searchsorted(steps, self.steps))
        ramp = _mix(self.start, body(0), steps[:cut] / self.steps) if cut else np.empty(0)
        return np.concatenate([ramp, body._at(steps[cut:] - self.steps)])


@dataclass(frozen=True, slots=True)
class WarmupStableDecay(Schedule):
    """A linear ramp from 0 to ``peak``, a constant phase, and a linear ramp to ``end``, where it stays.

    The three parts last ``warmup``, ``stable`` and ``decay`` steps; the first two may be 0.

    Example:
        >>> WarmupStableDecay(1.0, warmup=2, stable=3, decay=2).values(9)
        array([0. , 0.5, 1. , 1. , 1. , 1. , 0.5, 0. , 0. ])
    """

    peak: float
    _: KW_ONLY
    warmup: int
    stable: int
    decay: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _check(self, levels=("peak", "end"), lengths=("decay",), counts=("warmup", "stable"))

    def _at(self, steps: Steps) -> Array:
        falling_from = self.warmup + self.stable
        fall = np.clip(steps - falling_from, 0, self.decay) / self.decay
        result = _mix(self.peak, self.end, fall)
        rising = int(np.searchsorted(steps, self.warmup))
        result[:rising] = self.peak * (steps[:rising] / max(self.warmup, 1))
        return result


@dataclass(frozen=True, slots=True)
class Piecewise(Schedule):
    """One schedule after another: ``(first_step, schedule or value)`` pairs, the first at step 0.

    Each piece counts its steps from 0 at its first step.

    Example:
        >>> Piecewise([(0, 1.0), (3, Linear(0.5, 0.0, steps=2))]).values(6)
        array([1.  , 1.  , 1.  , 0.5 , 0.25, 0.  ])
    """

    pieces: Sequence[tuple[int, ScheduleLike]]

    def __post_init__(self) -> None:
        firsts, bodies = [], []
        for piece in _items("pieces", self.pieces):
            if not (isinstance(piece, tuple | list) and len(piece) == 2):
                raise EquilibriaError(
                    f"got piece {piece!r}; expected (first_step, schedule or value)", argument="pieces"
                )
            firsts.append(_position("first_step", piece[0]))
            bodies.append(as_schedule(piece[1], name="piece"))
        if firsts[0] != 0:
            raise EquilibriaError(f"got a first piece at step {firsts[0]}; expected it at step 0", argument="pieces")
        pieces = tuple(zip(_ascending("first steps", firsts, argument="pieces"), bodies, strict=True))
        object.__setattr__(self, "pieces", pieces)

    def _at(self, steps: Steps) -> Array:
        result = np.empty(len(steps))
        cuts = np.searchsorted(steps, [first for first, _ in self.pieces])
        for (first, body), low, high in zip(self.pieces, cuts, [*cuts[1:], len(steps)], strict=True):
            if low < high:
                result[low:high] = as_schedule(body)._at(steps[low:high] - first)
        return result


@dataclass(frozen=True, slots=True)
class FromValues(Schedule):
    """A table: ``points[step]``, and its last value afterwards.

    Example:
        >>> FromValues([0.3, 0.2, 0.1]).values(5)
        array([0.3, 0.2, 0.1, 0.1, 0.1])
    """

    points: Sequence[float] | Array = field(repr=False)
    _table: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            table = np.array(self.points, dtype=np.float64)
        except (TypeError, ValueError):
            raise EquilibriaError(
                f"got points={self.points!r}; expected a list of numbers", argument="points"
            ) from None
        if table.ndim != 1 or not table.size:
            raise EquilibriaError(
                f"got points of shape {table.shape}; expected one value per step, at least one", argument="points"
            )
        bad = ~(np.isfinite(table) & (table >= 0))
        if bad.any():
            where = int(bad.argmax())
            raise EquilibriaError(
                f"got {table[where]} at step {where}; expected a finite value >= 0", argument="points"
            )
        object.__setattr__(self, "points", tuple(table.tolist()))
        object.__setattr__(self, "_table", table)

    def _at(self, steps: Steps) -> Array:
        return self._table[np.minimum(steps, len(self._table) - 1)]


@dataclass(frozen=True, slots=True)
class FromCallable(Schedule):
    """Any function of the step, called once per step with a plain int.

    Example:
        >>> FromCallable(lambda step: 0.1 / (1 + step))(4)
        0.02
    """

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise EquilibriaError(
                f"got function={self.function!r}; expected a function of the step", argument="function"
            )

    def _at(self, steps: Steps) -> Array:
        return np.array([self._checked(step) for step in steps.tolist()], dtype=np.float64)

    def _checked(self, step: int) -> float:
        value = self.function(step)
        try:
            return _level("value", value)
        except EquilibriaError:
            raise EquilibriaError(
                f"got {value!r} from the schedule function at step {step}; expected a finite number >= 0"
            ) from None


@dataclass(frozen=True, slots=True)
class _Scaled(Schedule):
    body: Schedule
    factor: float

    def _at(self, steps: Steps) -> Array:
        return self.body._at(steps) * self.factor


@dataclass(frozen=True, slots=True)
class _InEpochs(Schedule):
    body: Schedule
    steps_per_epoch: int

    def _at(self, steps: Steps) -> Array:
        epochs, which = np.unique(steps // self.steps_per_epoch, return_inverse=True)
        return self.body._at(epochs)[which]


@dataclass(frozen=True, slots=True)
class _Stepped(Schedule):
    copy: SteppedCopy

    def _at(self, steps: Steps) -> Array:
        return self.copy.values(steps)


class TorchScheduler(Protocol):
    """A scheduler of torch, as far as its later values need it."""

    optimizer: Any

    def step(self) -> None:
        """Set the next learning rate."""

    def get_last_lr(self) -> list[Any]:
        """The present learning rates."""


ScheduleLike: TypeAlias = Schedule | float | Sequence[float] | Array | Callable[[int], float] | TorchScheduler


def as_schedule(value: ScheduleLike, *, name: str = "schedule") -> Schedule:
    """Convert a number, list, array, function or torch scheduler to a `Schedule`.

    Args:
        value: a number (constant), a `Schedule` (returned as it is), a 1-D list or array (one value per step,
            the last one holds), a function of the step, or a torch scheduler that is stepped after every step (after
            every epoch: `in_epochs`), from its present step on; a copy of it is stepped.
        name: name of the argument, for error messages.

    Returns:
        The schedule.

    Raises:
        EquilibriaError: the value is none of these, or is not finite and >= 0.

    Example:
        >>> as_schedule(0.1)
        Constant(value=0.1)
        >>> as_schedule([0.3, 0.1])(7)
        0.1
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return Constant(_level(name, value))
    if isinstance(value, np.ndarray | list | tuple):
        try:
            return FromValues(value)
        except EquilibriaError as error:
            error.argument = name  # not "points", which the caller did not type
            raise
    if hasattr(value, "get_last_lr") and hasattr(value, "optimizer"):
        return _Stepped(SteppedCopy(value, name=name))
    if callable(value):
        return FromCallable(value)
    raise EquilibriaError(
        f"got {name}={value!r}; expected a number, a list with one value per step, "
        "a Schedule, a torch scheduler, or a function of the step",
        argument=name,
    )


def scaled(schedule: ScheduleLike, k: float) -> Schedule:
    """Multiply every value of a schedule by ``k >= 0``.

    Example:
        >>> scaled(Linear(1.0, 0.0, steps=2), 0.1).values(3)
        array([0.1 , 0.05, 0.  ])
    """
    return _Scaled(as_schedule(schedule), _level("k", k))


def in_epochs(schedule: ScheduleLike, *, steps_per_epoch: int) -> Schedule:
    """Convert a schedule written in epochs to one in steps, constant during each epoch.

    ``schedule(step // steps_per_epoch)``, as with a torch scheduler that is stepped once per epoch.

    Example:
        >>> in_epochs(MultiStep(1.0, milestones=[2], factor=0.1), steps_per_epoch=3).values(8)
        array([1. , 1. , 1. , 1. , 1. , 1. , 0.1, 0.1])
    """
    return _InEpochs(as_schedule(schedule), _position("steps_per_epoch", steps_per_epoch, low=1))
