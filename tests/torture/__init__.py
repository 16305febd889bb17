"""Attacks on the promises of the library, repeated with random seeds: `make torture` at length, `make test` briefly.

An attack is a generator: it yields once per trial, "" if the promise held and a sentence if it did not.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Trials = Iterator[str]


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to break a promise.

    Attributes:
        name: on the page, and for the counts.
        promise: what must hold, a sentence.
        trials: the trials, in an empty folder; ends by itself or when it is closed.
        goal: trials of one run of `make torture`.
        seconds: that they may take.
        summary: what else to print about the trials of the last run.
    """

    name: str
    promise: str
    trials: Callable[[random.Random, Path], Trials]
    goal: int
    seconds: float
    summary: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Result:
    """Trials of an attack, and the sentences of those in which the promise did not hold."""

    trials: int
    broken: list[str]
    seconds: float


def run_attack(
    attack: Attack, folder: Path, *, seed: int, goal: int, seconds: float, progress: Callable[[int, int], None]
) -> Result:
    """Attack until the goal or the time is reached; an exception in a trial breaks the promise and ends the attack."""
    folder.mkdir(parents=True)
    begun, count, broken = time.monotonic(), 0, []
    trials = attack.trials(random.Random(f"{attack.name} {seed}"), folder)
    try:
        for sentence in trials:
            count += 1
            broken += [sentence] if sentence else []
            progress(count, len(broken))
            if count >= goal or time.monotonic() - begun > seconds:
                break
    except Exception:
        broken.append(f"trial {count} of seed {seed}: {traceback.format_exc()}")
    finally:
        trials.close()  # type: ignore[attr-defined]  # a generator: ends its processes
    return Result(count, broken, time.monotonic() - begun)
