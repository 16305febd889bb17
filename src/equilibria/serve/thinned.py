"""A bounded part of a run's samples: every sample of a short run, every second, fourth, ... one of a long one.

Each kept row also knows the root mean square, the smallest and the largest angle of the samples it stands for, so that
charts lose no extreme. What is kept is as good as a record with a longer distance from sample to sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.records.tables import NOTES, NUMBERS, SAMPLE_FIELDS, STATES

Rows = dict[str, NDArray[Any]]
Integers = NDArray[np.int64]

MOST_ROWS, LEAST_PER_LAYER = 100_000, 100
_PENDING = 20_000  # rows that wait until they are thinned
_WORDS = {"state": STATES, "note": NOTES}


@dataclass(slots=True)
class Totals:
    """What is counted exactly, however much is left out.

    Attributes:
        rows: samples.
        steps: sampled steps.
        last_step: the last of them, None without any.
        notes: how many samples carry a note, and the last step with it, by note.
    """

    rows: int = 0
    steps: int = 0
    last_step: int | None = None
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Return:
    """Where a run went back: of what was recorded before, later steps than this do not count any more.

    Of earlier sessions this step does not count either, as in `equilibria.read_run`.

    Attributes:
        session: in which it went back.
        row: of that session, the first after it.
        step: of that row.
    """

    session: int
    row: int
    step: int


class Thinned:
    """Takes batches of the sample table; keeps at most `MOST_ROWS` rows (or `LEAST_PER_LAYER` of every layer).

    Args:
        most: rows to keep.
        returns: where the run is known to go back, from an earlier reading: what does not count is never taken then.

    Attributes:
        stride: one sample of so many of a layer is kept.
        totals: exact counts, as long as ``exact``.
        returns: where the run went back.
        exact: False once it went back over samples that were thinned already: read it again, with its ``returns``.
    """

    def __init__(self, *, most: int = MOST_ROWS, returns: Sequence[Return] = ()) -> None:
        self.stride = 1
        self.totals = Totals()
        self.returns = list(returns)
        self.exact = True
        self._most = most
        self._taken: dict[int, int] = {}  # rows of each session so far, with those that do not count
        self._names: dict[str, int] = {}
        self._seen = np.zeros(0, dtype=np.int64)  # samples of each layer so far
        self._session = -1
        self._kept: Rows = _rows(0)
        self._pending: list[Rows] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The layers, in the order in which they first appear."""
        return tuple(self._names)

    def add(self, batches: Sequence[pa.RecordBatch], *, session: int) -> None:
        """Take rows of one session; where they go back, what they go back over is dropped."""
        table = pa.Table.from_batches(batches).unify_dictionaries()
        steps = table["step"].to_numpy()
        if not len(steps):
            return
        first = self._taken.get(session, 0)
        self._taken[session] = first + len(steps)
        counts = self._counting(steps, session=session, first=first)
        new = self._new_returns(steps, counts, session=session, first=first)
        if new:
            self.returns += new
            self._go_back(min(each.step for each in new), session=session)
            counts = self._counting(steps, session=session, first=first)
        self._session = session
        if not counts.any():
            return
        table, steps = (table, steps) if counts.all() else (table.filter(pa.array(counts)), steps[counts])
        rows = self._numbered(table, steps) | {"session": np.full(len(steps), session)}
        self._count(steps, rows)
        self._pending.append(rows)
        if sum(len(each["step"]) for each in self._pending) > _PENDING:
            self._compact()

    def table(self) -> pa.Table:
        """What is kept, as a sample table, one layer after the other."""
        self._compact()
        return _table(self._kept, self.names)

    def drawn(self) -> pa.Table:
        """The same for `equilibria.views.run.curves`: with the angles of all samples that a row stands for."""
        table = self.table()
        if self.stride == 1:
            return table
        rms = np.sqrt(self._kept["square"] / np.maximum(self._kept["count"], 1))
        angle = pa.array(np.where(self._kept["count"] > 0, rms, np.nan), from_pandas=True)
        table = table.set_column(table.column_names.index("angle"), "angle", angle)
        for name in ("low", "high"):
            table = table.append_column(f"angle_{name}", pa.array(self._kept[name], from_pandas=True))
        return table

    # ---- taking rows

    def _numbered(self, table: pa.Table, steps: Integers) -> Rows:
        """Columns as arrays, with the layer of every row and its place among that layer's samples."""
        layer = self._codes(table["param"])
        order = np.argsort(layer, kind="stable")
        counts = np.bincount(layer, minlength=len(self._names))
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        place = np.empty(len(layer), dtype=np.int64)
        place[order] = np.arange(len(layer)) - np.repeat(before, counts) + np.repeat(self._seen, counts)
        self._seen += counts
        empty = np.full(len(steps), np.nan)
        rows: Rows = {
            name: table[name].to_numpy().astype(np.float64) if name in table.column_names else empty for name in NUMBERS
        }
        rows |= {name: _places(table[name], words) for name, words in _WORDS.items()}
        angle = rows["angle"]
        known = np.isfinite(angle)
        rows |= {"step": steps.copy(), "layer": layer, "place": place, "count": known.astype(np.int64)}
        return rows | {"square": np.where(known, angle, 0.0) ** 2, "low": angle, "high": angle}

    def _codes(self, column: pa.ChunkedArray) -> Integers:
        words, codes = _decoded(column)
        for word in words:
            self._names.setdefault(word, len(self._names))
        self._seen = np.pad(self._seen, (0, len(self._names) - len(self._seen)))
        return np.array([self._names[word] for word in words], dtype=np.int64)[codes]

    def _count(self, steps: Integers, rows: Rows) -> None:
        totals = self.totals
        fresh = int(steps[0] != totals.last_step)
        totals.rows += len(steps)
        totals.steps += int(np.count_nonzero(np.diff(steps))) + fresh
        totals.last_step = int(steps[-1])
        for number, word in enumerate(NOTES):
            found = steps[rows["note"] == number]
            if len(found):
                totals.notes[word] = totals.notes.get(word, (0, 0))[0] + len(found), int(found[-1])

    # ---- going back

    def _counting(self, steps: Integers, *, session: int, first: int) -> NDArray[np.bool_]:
        """Of rows of a session, from its row ``first``: which of them the run does not go back over later."""
        later = [each for each in self.returns if (each.session, each.row) > (session, first)]
        counts = np.ones(len(steps), dtype=bool)
        if not later:
            return counts
        ends = [each.row - first if each.session == session else len(steps) for each in later]
        lowest = np.minimum.accumulate([each.step + (each.session == session) for each in later][::-1])[::-1]
        place = np.searchsorted(ends, np.arange(len(steps)), side="right")
        bounds = np.append(lowest, np.iinfo(np.int64).max)
        return counts & (steps < bounds[place])

    def _new_returns(self, steps: Integers, counts: NDArray[np.bool_], *, session: int, first: int) -> list[Return]:
        """Where rows go back that are not known to: before the first of them, or inside."""
        rows = np.flatnonzero(counts)
        if not len(rows):
            return []
        own = steps[rows]
        back = rows[1:][np.diff(own) < 0]
        found = [Return(session, first + int(row), int(steps[row])) for row in back]
        last, step, new_session = self.totals.last_step, int(own[0]), session != self._session
        if last is not None and (step < last or (step == last and new_session)):
            found.insert(0, Return(session, first + int(rows[0]), step))
        return found

    def _go_back(self, step: int, *, session: int) -> None:
        """Drop what was taken of later steps."""
        last = self.totals.last_step
        if last is None or last < step + (session == self._session):
            return
        self._compact()
        self.exact &= self.stride == 1
        keep = self._kept["step"] < step + (self._kept["session"] == session)
        self._kept = {name: values[keep] for name, values in self._kept.items()}
        self._seen = np.bincount(self._kept["layer"], minlength=len(self._names)) * self.stride
        self.totals = Totals()
        order = np.argsort(self._kept["step"], kind="stable")
        if len(order):
            self._count(self._kept["step"][order], {"note": self._kept["note"][order]})

    # ---- thinning

    def _compact(self) -> None:
        """Gather rows into blocks of ``stride`` samples of a layer; where that leaves too many, of twice as many."""
        if self._pending:
            parts = [self._kept, *self._pending]
            self._kept = {name: np.concatenate([part[name] for part in parts]) for name in self._kept}
            self._pending = []
            self._gather()
        while len(self._kept["step"]) > max(self._most, LEAST_PER_LAYER * len(self._names)):
            self.stride *= 2
            self._gather()

    def _gather(self) -> None:
        rows = self._kept
        layer, place = rows["layer"], rows["place"]
        order = np.lexsort((place, layer))
        block = place[order] // self.stride
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (block[1:] != block[:-1]) | (layer[order][1:] != layer[order][:-1])
        starts = np.flatnonzero(begins)
        first = order[starts]
        kept = {name: values[first] for name, values in rows.items()}
        if len(first) < len(order):
            for name, gather in (("square", np.add), ("count", np.add), ("low", np.fmin), ("high", np.fmax)):
                kept[name] = gather.reduceat(rows[name][order], starts)
        self._kept = kept


def _rows(count: int) -> Rows:
    numbers = {name: np.zeros(count) for name in (*NUMBERS, "square", "low", "high")}
    whole = {name: np.zeros(count, dtype=np.int64) for name in ("step", "session", "layer", "place", "count", *_WORDS)}
    return {**numbers, **whole}


def _decoded(column: pa.ChunkedArray) -> tuple[list[str], Integers]:
    coded = column.combine_chunks()
    if not pa.types.is_dictionary(column.type):
        coded = coded.dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _places(column: pa.ChunkedArray, words: Sequence[str]) -> Integers:
    found, codes = _decoded(column)
    table = np.array([*(words.index(word) if word in words else -1 for word in found), -1], dtype=np.int64)
    return table[codes]


def _table(rows: Rows, names: Sequence[str]) -> pa.Table:
    layers = pa.DictionaryArray.from_arrays(pa.array(rows["layer"].astype(np.int32)), pa.array(names, pa.string()))
    columns: dict[str, pa.Array] = {"step": pa.array(rows["step"]), "param": layers}
    columns |= {name: pa.array(rows[name], from_pandas=True) for name in NUMBERS}
    for name, words in _WORDS.items():
        codes = pa.array(rows[name].astype(np.int32), mask=rows[name] < 0)
        columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string()))
    return pa.table([columns[name] for name in SAMPLE_FIELDS.names], schema=SAMPLE_FIELDS)
