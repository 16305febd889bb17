"""Excursions of lr: it leaves its level and comes back within a few samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.series import SETTINGS, Array
from equilibria.findings import plain

CHANGED = math.log(1.5)  # change of ln lr between two samples that is a jump
SAME = 0.1  # relative difference of settings that count as the same
_FEW_SAMPLES = 10  # that an excursion of lr lasts at most


@dataclass(frozen=True, slots=True)
class Excursion:
    """An lr that left its level and came back within a few samples.

    Attributes:
        before: step of the last sample at the level.
        first: step of the first sample away from it.
        last: step of the last sample away from it.
        after: step of the first sample back at it.
        level: lr before.
        factor: lr furthest from the level, over the level.
    """

    before: int
    first: int
    last: int
    after: int
    level: float
    factor: float

    @property
    def text(self) -> str:
        """The excursion in words, with the samples that limit it."""
        times = f"{plain(max(self.factor, 1 / self.factor), digits=3)} times {'higher' if self.factor > 1 else 'lower'}"
        steps = f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"
        if self.first - self.before <= 1 and self.after - self.last <= 1:
            return f"lr was {times} at {steps}"
        return f"lr was {times} in the samples of {steps} (usual at steps {self.before:,} and {self.after:,})"


def excursions(rows: Mapping[str, Array]) -> list[Excursion]:
    """The excursions of lr in the samples of one layer; the other settings are the same before and after."""
    step, lr = rows["step"], rows["lr"]
    logs, result, resume = np.log(lr), [], 2
    for row in (np.flatnonzero(np.abs(np.diff(logs)) > CHANGED) + 1).tolist():
        if row < resume or not _alike(rows, row - 2, row - 1):
            continue
        returns = [end for end in range(row + 1, min(row + _FEW_SAMPLES + 1, len(lr))) if _alike(rows, row - 1, end)]
        if not returns or (returns[0] + 1 < len(lr) and not _alike(rows, returns[0], returns[0] + 1)):
            continue
        end = returns[0]
        furthest = row + int(np.argmax(np.abs(logs[row:end] - logs[row - 1])))
        before, first, last, after = (int(step[place]) for place in (row - 1, row, end - 1, end))
        factor = float(lr[furthest] / lr[row - 1])
        result.append(Excursion(before, first, last, after, level=float(lr[row - 1]), factor=factor))
        resume = end + 1
    return result


def _alike(rows: Mapping[str, Array], one: int, other: int) -> bool:
    pairs = ((float(rows[name][one]), float(rows[name][other])) for name in SETTINGS)
    return all(
        abs(first - second) <= SAME * max(abs(first), abs(second))
        for first, second in pairs
        if math.isfinite(first) or math.isfinite(second)
    )
