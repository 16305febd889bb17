"""Where a simulation stands: all that is needed to go on with the very same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, whole

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
    normal = np.stack([generator(seed, k, purpose=_DIRECTIONS).standard_normal(size) for k in range(trials)])
    unit: Array = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return unit


@dataclass(frozen=True, eq=False)
class SimulationState:
    """A simulation between two steps.

    Attributes:
        step: steps taken.
        weights: (trials, size).
        buffers: momentum buffers, (trials, size); zeros before the first step.
        moments: second moments, (trials, 1).
        streams: where the random numbers of every trial are, (trials, 4); (0, 4) for a deterministic problem.
        seed: of the random numbers.
        first_trial: number of the first trial.
    """

    step: int
    weights: Array
    buffers: Array
    moments: Array
    streams: NDArray[np.uint64]
    seed: int
    first_trial: int

    def save(self, path: str | Path) -> None:
        """Write it to a file; an existing one is replaced only when the new one is complete."""
        whole, part = Path(path), Path(f"{path}.part")
        with part.open("wb") as file:
            np.savez(file, **asdict(self))
        part.replace(whole)

    @classmethod
    def load(cls, path: str | Path) -> SimulationState:
        """Read what `save` wrote.

        Raises:
            EquilibriaError: there is no such file, or it is something else.
        """
        names = [field.name for field in fields(cls)]
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                parts: dict[str, Any] = {name: stored[name] for name in names}
            numbers = {name: int(part) for name, part in parts.items() if part.ndim == 0}
        except Exception:  # of a damaged file: whatever it makes zlib, zipfile or numpy stumble over
            raise EquilibriaError(f"got {str(path)!r}; expected a file that SimulationState.save wrote") from None
        return cls(**parts | numbers)


def joined_states(states: list[SimulationState]) -> SimulationState:
    """The states of parts of the trials, side by side again."""
    first = states[0]
    names = ("weights", "buffers", "moments", "streams")
    together = {name: np.concatenate([getattr(state, name) for state in states]) for name in names}
    return SimulationState(first.step, **together, seed=first.seed, first_trial=first.first_trial)
