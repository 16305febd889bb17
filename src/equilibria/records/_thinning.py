"""A bounded part of a growing run's samples: all of a short run; every second, fourth, eighth, ... of a long one.

Each kept row also has the root mean square, the smallest and the largest angle of the samples that it stands for, so
that charts lose no extreme. In all else the kept rows are those of a run that was sampled less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.records.tables import NOTES, NUMBERS, SAMPLE_FIELDS, WORDS

Columns = dict[str, NDArray[Any]]
Integers = NDArray[np.int64]

MOST_ROWS, LEAST_PER_LAYER = 100_000, 100
_PENDING = 20_000  # rows that wait for the next thinning


@dataclass(slots=True)
class SampleCounts:
    """Counts over all samples of a run, kept or not.

    Attributes:
        rows: samples.
        steps: sampled steps.
        last_step: the last of them, None without any.
        notes: by note: how many samples carry it, and the last step with it.
    """

    rows: int = 0
    steps: int = 0
    last_step: int | None = None
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollback:
    """A place where a run went back: it supersedes the later steps recorded before, and this step in earlier sessions.

    Attributes:
        session: the session that went back.
        row: the first row after it, counted in that session.
        step: the step of that row.
    """

    session: int
    row: int
    step: int


class ThinnedSamples:
    """Takes batches of the sample table; keeps at most `MOST_ROWS` rows (or `LEAST_PER_LAYER` of every layer).

    Args:
        most: the number of rows to keep.
        rollbacks: where the run is known to go back, from an earlier reading; superseded rows are then never taken.

    Attributes:
        stride: of each layer, one sample in ``stride`` is kept.
        counts: over all samples; exact if ``is_exact``.
        rollbacks: where the run went back.
        is_exact: False once the run went back over samples that were already thinned. Then read it again from the
            start, with these ``rollbacks``.
    """

    def __init__(self, *, most: int = MOST_ROWS, rollbacks: Sequence[Rollback] = ()) -> None:
        self.stride = 1
        self.counts = SampleCounts()
        self.rollbacks = list(rollbacks)
        self.is_exact = True
        self._most = most
        self._rows_read: dict[int, int] = {}  # by session, superseded rows included
        self._layers: dict[str, int] = {}
        self._places = np.zeros(0, dtype=np.int64)  # samples of each layer so far
        self._session = -1
        self._kept: Columns = _empty()
        self._pending: list[Columns] = []

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of their first samples."""
        return tuple(self._layers)

    def add(self, batches: Sequence[pa.RecordBatch], *, session: int) -> None:
        """Take rows of one session; where they go back, drop the rows that they supersede."""
        table = pa.Table.from_batches(batches).unify_dictionaries()
        steps = table["step"].to_numpy()
        if not len(steps):
            return
        first = self._rows_read.get(session, 0)
        self._rows_read[session] = first + len(steps)
        valid = self._not_superseded(steps, session=session, first=first)
        new = self._new_rollbacks(steps, valid, session=session, first=first)
        if new:
            self.rollbacks = sorted([*self.rollbacks, *new], key=lambda rollback: (rollback.session, rollback.row))
            self._go_back(min(rollback.step for rollback in new), session=session)
            valid = self._not_superseded(steps, session=session, first=first)
        self._session = session
        if not valid.any():
            return
        table, steps = (table, steps) if valid.all() else (table.filter(pa.array(valid)), steps[valid])
        columns = self._columns(table, steps) | {"session": np.full(len(steps), session)}
        self._count(steps, columns["note"])
        self._pending.append(columns)
        if sum(len(pending["step"]) for pending in self._pending) > _PENDING:
            self._thin()

    def resume(self, session: int, step: int) -> None:
        """Drop what earlier sessions have from a step on: a session resumed there, whether it sampled it or not."""
        begin = Rollback(session, 0, step)
        if begin not in self.rollbacks:
            self.rollbacks = sorted([*self.rollbacks, begin], key=lambda rollback: (rollback.session, rollback.row))
            if self._session < session:
                self._go_back(step, session=session)

    def table(self) -> pa.Table:
        """The kept rows as a sample table, one layer after the other."""
        self._thin()
        return _sample_table(self._kept, self.layers)

    def chart_table(self) -> pa.Table:
        """The kept rows for `equilibria.views.run.curves`: each with the angles of all samples that it stands for."""
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

    def _columns(self, table: pa.Table, steps: Integers) -> Columns:
        """Columns as arrays, with the layer of every row and its place among that layer's samples."""
        layer = self._layer_codes(table["param"])
        order = np.argsort(layer, kind="stable")
        counts = np.bincount(layer, minlength=len(self._layers))
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        place = np.empty(len(layer), dtype=np.int64)
        place[order] = np.arange(len(layer)) - np.repeat(before, counts) + np.repeat(self._places, counts)
        self._places += counts
        recorded = set(table.column_names)  # an earlier version had fewer columns
        missing, no_word = np.full(len(steps), np.nan), np.full(len(steps), -1)
        columns: Columns = {
            name: table[name].to_numpy().astype(np.float64) if name in recorded else missing for name in NUMBERS
        }
        columns |= {
            name: _word_codes(table[name], words) if name in recorded else no_word for name, words in WORDS.items()
        }
        angle = columns["angle"]
        known = np.isfinite(angle)
        columns |= {"step": steps.copy(), "layer": layer, "place": place, "count": known.astype(np.int64)}
        return columns | {"square": np.where(known, angle, 0.0) ** 2, "low": angle, "high": angle}

    def _layer_codes(self, column: pa.ChunkedArray) -> Integers:
        names, codes = _dictionary(column)
        for name in names:
            self._layers.setdefault(name, len(self._layers))
        self._places = np.pad(self._places, (0, len(self._layers) - len(self._places)))
        return np.array([self._layers[name] for name in names], dtype=np.int64)[codes]

    def _count(self, steps: Integers, notes: Integers) -> None:
        counts = self.counts
        counts.steps += int(np.count_nonzero(np.diff(steps))) + int(steps[0] != counts.last_step)
        counts.rows += len(steps)
        counts.last_step = int(steps[-1])
        for code, note in enumerate(NOTES):
            noted = steps[notes == code]
            if len(noted):
                counts.notes[note] = counts.notes.get(note, (0, 0))[0] + len(noted), int(noted[-1])

    # ---- going back

    def _not_superseded(self, steps: Integers, *, session: int, first: int) -> NDArray[np.bool_]:
        """Which rows of a session, from its row ``first``, no known rollback supersedes."""
        valid = np.ones(len(steps), dtype=bool)
        later = [rollback for rollback in self.rollbacks if (rollback.session, rollback.row) > (session, first)]
        if not later:
            return valid
        ends = [rollback.row - first if rollback.session == session else len(steps) for rollback in later]
        bounds = [rollback.step + (rollback.session == session) for rollback in later]
        lowest = np.minimum.accumulate(bounds[::-1])[::-1]
        place = np.searchsorted(ends, np.arange(len(steps)), side="right")
        return valid & (steps < np.append(lowest, np.iinfo(np.int64).max)[place])

    def _new_rollbacks(self, steps: Integers, valid: NDArray[np.bool_], *, session: int, first: int) -> list[Rollback]:
        """Rollbacks that are not known yet: before the first valid row, or between valid rows."""
        rows = np.flatnonzero(valid)
        if not len(rows):
            return []
        own = steps[rows]
        rollbacks = [Rollback(session, first + int(row), int(steps[row])) for row in rows[1:][np.diff(own) < 0]]
        last, step, is_new_session = self.counts.last_step, int(own[0]), session != self._session
        if last is not None and (step < last or (step == last and is_new_session)):
            rollbacks.insert(0, Rollback(session, first + int(rows[0]), step))
        return rollbacks

    def _go_back(self, step: int, *, session: int) -> None:
        """Drop the rows of later steps."""
        last = self.counts.last_step
        if last is None or last < step + (session == self._session):
            return
        self._thin()
        self.is_exact &= self.stride == 1
        keep = self._kept["step"] < step + (self._kept["session"] == session)
        self._kept = {name: values[keep] for name, values in self._kept.items()}
        self._places = np.bincount(self._kept["layer"], minlength=len(self._layers)) * self.stride
        self.counts = SampleCounts()
        order = np.argsort(self._kept["step"], kind="stable")
        if len(order):
            self._count(self._kept["step"][order], self._kept["note"][order])

    # ---- thinning

    def _thin(self) -> None:
        """Gather rows into blocks of ``stride`` samples of a layer; double the stride while there are too many."""
        if self._pending:
            parts = [self._kept, *self._pending]
            self._kept = {name: np.concatenate([part[name] for part in parts]) for name in self._kept}
            self._pending = []
            self._gather_blocks()
        while len(self._kept["step"]) > max(self._most, LEAST_PER_LAYER * len(self._layers)):
            self.stride *= 2
            self._gather_blocks()

    def _gather_blocks(self) -> None:
        """Keep the first row of each block, with the sums and extremes of the block's angles."""
        rows = self._kept
        layer, place = rows["layer"], rows["place"]
        order = np.lexsort((place, layer))
        block = place[order] // self.stride
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (block[1:] != block[:-1]) | (layer[order][1:] != layer[order][:-1])
        starts = np.flatnonzero(begins)
        first = order[starts]
        self._kept = {name: values[first] for name, values in rows.items()}
        if len(first) < len(order):
            for name, gather in (("square", np.add), ("count", np.add), ("low", np.fmin), ("high", np.fmax)):
                self._kept[name] = gather.reduceat(rows[name][order], starts)


def _empty() -> Columns:
    numbers = {name: np.zeros(0) for name in (*NUMBERS, "square", "low", "high")}
    integers = ("step", "session", "layer", "place", "count", *WORDS)
    return {**numbers, **{name: np.zeros(0, dtype=np.int64) for name in integers}}


def _dictionary(column: pa.ChunkedArray) -> tuple[list[str], Integers]:
    """The words of a column, and the code of every row; -1 for null."""
    coded = column.combine_chunks()
    if not pa.types.is_dictionary(column.type):
        coded = coded.dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _word_codes(column: pa.ChunkedArray, words: Sequence[str]) -> Integers:
    """The place of every row's word in ``words``; -1 for null and for other words."""
    own, codes = _dictionary(column)
    places = np.array([*(words.index(word) if word in words else -1 for word in own), -1], dtype=np.int64)
    return places[codes]


def _sample_table(rows: Columns, layers: Sequence[str]) -> pa.Table:
    names = pa.DictionaryArray.from_arrays(pa.array(rows["layer"].astype(np.int32)), pa.array(layers, pa.string()))
    columns: dict[str, pa.Array] = {"step": pa.array(rows["step"]), "param": names}
    columns |= {name: pa.array(rows[name], from_pandas=True) for name in NUMBERS}
    for name, words in WORDS.items():
        codes = pa.array(rows[name].astype(np.int32), mask=rows[name] < 0)
        columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string()))
    return pa.table([columns[name] for name in SAMPLE_FIELDS.names], schema=SAMPLE_FIELDS)
