"""Where a simulation stands: all that is needed to go on with the very same numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class State:
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
    def load(cls, path: str | Path) -> State:
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
            raise EquilibriaError(f"got {str(path)!r}; expected a file that State.save wrote") from None
        return cls(**parts | numbers)


def joined(states: list[State]) -> State:
    """The states of parts of the trials, side by side again."""
    first = states[0]
    names = ("weights", "buffers", "moments", "streams")
    together = {name: np.concatenate([getattr(state, name) for state in states]) for name in names}
    return State(first.step, **together, seed=first.seed, first_trial=first.first_trial)
