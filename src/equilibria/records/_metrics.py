"""Numbers that a training logs itself, such as its loss: in one line of steps, and within a bound."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.records.tables import METRIC_FIELDS

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_NUMBERS = 1_000_000  # 20 MB


@dataclass(slots=True)
class _Kept:
    """The numbers of one name: one in ``stride`` of all ``count``."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    sessions: array[int] = field(default_factory=lambda: array("i"))
    stride: int = 1
    count: int = 0

    def extend(self, steps: Sequence[int], values: Sequence[float], session: int) -> None:
        first = -self.count % self.stride
        self.count += len(steps)
        chosen = steps[first :: self.stride]
        self.steps.extend(chosen)
        self.values.extend(values[first :: self.stride])
        self.sessions.extend([session] * len(chosen))

    def thin(self) -> None:
        self.stride *= 2
        self.steps, self.values, self.sessions = self.steps[::2], self.values[::2], self.sessions[::2]


class KeptMetrics:
    """Numbers by name. Beyond a million of them, the longest series loses every second number, again and again.

    Args:
        most: the number of numbers to keep.

    Example:
        >>> metrics = KeptMetrics()
        >>> metrics.add("loss", [0, 1], [2.3, 2.1])
        >>> metrics.add("loss", [1], [2.2], session=1)  # a later session goes back to step 1
        >>> metrics.table().to_pylist()[-1]
        {'step': 1, 'name': 'loss', 'value': 2.2}
    """

    def __init__(self, *, most: int = MOST_NUMBERS) -> None:
        self._most = most
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return sum(len(kept.steps) for kept in self._kept.values())

    @property
    def count(self) -> int:
        """Of all numbers taken, kept or not."""
        return sum(kept.count for kept in self._kept.values())

    def add(self, name: str, steps: Sequence[int], values: Sequence[float], *, session: int = 0) -> None:
        """Take numbers of one name, in the order in which they were logged."""
        self._kept.setdefault(name, _Kept()).extend(steps, values, session)
        while len(self) > self._most:
            max(self._kept.values(), key=lambda kept: len(kept.steps)).thin()

    def add_batch(self, batch: pa.RecordBatch, *, session: int) -> None:
        """Take rows of the metrics table."""
        for name, (steps, values) in _by_name(pa.Table.from_batches([batch])):
            self.add(name, steps.tolist(), values.tolist(), session=session)

    def drop_from(self, step: int) -> None:
        """Forget the numbers of a step and of later ones: training goes on from a checkpoint before it."""
        for kept in self._kept.values():
            stays = [place for place, own in enumerate(kept.steps) if own < step]
            for name in ("steps", "values", "sessions"):
                column = getattr(kept, name)
                setattr(kept, name, array(column.typecode, [column[place] for place in stays]))

    def table(self, *, resumed: Mapping[int, int] | None = None) -> pa.Table:
        """The metrics table, sorted by step, without superseded numbers.

        Args:
            resumed: by session, its first sampled step.
        """
        kept = list(self._kept.values())
        steps, values, sessions = (
            np.concatenate([np.zeros(0, kind), *(np.array(getattr(own, name), kind) for own in kept)])
            for name, kind in (("steps", np.int64), ("values", np.float64), ("sessions", np.int32))
        )
        codes = np.repeat(np.arange(len(kept), dtype=np.int32), [len(own.steps) for own in kept])
        names = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(list(self._kept), pa.string()))
        table = pa.table([steps, names, values], schema=METRIC_FIELDS)
        return in_one_line(table, sessions.astype(np.int64), resumed=resumed or {})


def in_one_line(table: pa.Table, sessions: Integers, *, resumed: Mapping[int, int]) -> pa.Table:
    """The rows that no later row supersedes, sorted by step.

    A number is superseded if a later session sampled its step or an earlier one, or logged the same name at its step.
    Within a session nothing is: numbers may be logged for any step, in any order.

    Args:
        table: a metrics table.
        sessions: of every row.
        resumed: by session, its first sampled step.
    """
    steps = table["step"].to_numpy()
    kept = np.ones(len(steps), dtype=bool)
    for session, first in resumed.items():
        kept &= (sessions >= session) | (steps < first)
    _, codes = _coded(table["name"])
    rank = np.unique(steps, return_inverse=True)[1].astype(np.int64)  # instead of steps, so that no product overflows
    places = np.unique(codes * (len(steps) + 1) + rank, return_inverse=True)[1]
    latest = np.full(len(steps), -1)
    np.maximum.at(latest, places[kept], sessions[kept])
    kept &= sessions == latest[places]
    rows = np.flatnonzero(kept)
    return table.take(rows[np.argsort(steps[rows], kind="stable")]).unify_dictionaries()


def metric_series(table: pa.Table) -> dict[str, tuple[Integers, Floats]]:
    """The steps and numbers of every name, sorted by step.

    Example:
        >>> metrics = KeptMetrics()
        >>> metrics.add("loss", [0, 1], [2.3, 2.1])
        >>> metric_series(metrics.table())["loss"][1].tolist()
        [2.3, 2.1]
    """
    return dict(_by_name(table.take(np.argsort(table["step"].to_numpy(), kind="stable"))))


def _by_name(table: pa.Table) -> Iterator[tuple[str, tuple[Integers, Floats]]]:
    """The steps and numbers of every name, in the order of the rows."""
    names, codes = _coded(table["name"])
    order = np.argsort(codes, kind="stable")
    steps, values = (table[column].to_numpy()[order] for column in ("step", "value"))
    edges = np.searchsorted(codes[order], np.arange(len(names) + 1))
    for name, (begin, end) in zip(names, itertools.pairwise(edges.tolist()), strict=True):
        if begin < end:
            yield name, (steps[begin:end], values[begin:end])


def _coded(column: pa.ChunkedArray) -> tuple[list[str], Integers]:
    """The names, and the place of every row's name among them."""
    coded = column.unify_dictionaries().combine_chunks()
    return coded.dictionary.to_pylist(), np.asarray(coded.indices.to_numpy(), dtype=np.int64)
