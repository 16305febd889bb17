"""Random numbers that belong to a trial: the same whichever worker draws them, and in blocks of whatever length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from equilibria.errors import whole

Array = NDArray[np.float64]
States = NDArray[np.uint64]

_STEPS, _DIRECTIONS = 0, 1  # what the numbers are for
_HALF = 1 << 64


def generator(seed: int, trial: int, *, purpose: int = _STEPS) -> Generator:
    """The generator of one trial, from the seed and the trial's number alone."""
    return Generator(PCG64(SeedSequence(whole("seed", seed), spawn_key=(trial, purpose))))


def generators(seed: int, first: int, count: int) -> list[Generator]:
    """Those of ``count`` trials from number ``first`` on, for the noise of their steps."""
    return [generator(seed, first + trial) for trial in range(count)]


def fill(streams: Sequence[Generator], draws: Array) -> None:
    """The next standard normal numbers of every trial into ``draws`` (trials, ...), step after step.

    numpy takes them one after the other from the stream, so it makes no difference in how many calls they are drawn.
    """
    for stream, mine in zip(streams, draws, strict=True):
        stream.standard_normal(out=mine)


def positions(streams: Sequence[Generator]) -> States:
    """Where the generators are, (trials, 4)."""
    rows = [stream.bit_generator.state["state"] for stream in streams]
    halves = [(*divmod(row["state"], _HALF), *divmod(row["inc"], _HALF)) for row in rows]
    return np.array(halves, np.uint64).reshape(len(rows), 4)


def restored(states: States) -> list[Generator]:
    """Generators that go on where `positions` saw them."""
    return [_at(*(int(half) for half in row)) for row in states]


def _at(high: int, low: int, inc_high: int, inc_low: int) -> Generator:
    bits = PCG64(0)
    there = bits.state
    there["state"]["state"], there["state"]["inc"] = high * _HALF + low, inc_high * _HALF + inc_low
    bits.state = there
    return Generator(bits)


def directions(trials: int, size: int, *, seed: int) -> Array:
    """Uniformly random unit vectors, (trials, size)."""
    found = np.stack([generator(seed, k, purpose=_DIRECTIONS).standard_normal(size) for k in range(trials)])
    unit: Array = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit
