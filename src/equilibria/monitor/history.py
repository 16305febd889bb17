"""The samples of a run in memory, within a bound."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import SAMPLE_FIELDS

_MOST_ROWS = 610_000  # at most 200 MB: 310 bytes a row where a step has one row, 270 where it has sixty
_BLOCK = 256  # sampled steps per table: an Arrow table of one row takes as much memory as one of a hundred
_BLOCK_ROWS = 65_536  # of the largest block: thinning copies one block at a time


def read_only(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Columns that nobody can change: neither the mapping nor, unlike a view of them, the arrays.

    Example:
        >>> columns = read_only({"norm": np.array([1.0, 2.0]), "param": ["a", "b"]})
        >>> columns["norm"].flags.writeable, columns["param"]
        (False, ('a', 'b'))
    """
    return MappingProxyType({name: _frozen(values) for name, values in columns.items()})


def _frozen(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return tuple(values)
    owner = values if values.base is None else values.copy()
    owner.flags.writeable = False
    return owner.view()  # which cannot be made writable again, while its owner can


class History:
    """Samples in memory; beyond 640,000 rows it drops every second sampled step, again and again.

    The record on disk is complete; this is for looking at a run while it trains. `equilibria.records` thins a recorded
    run by layer, keeps the first sample of every block with the extremes of the others, and forgets rows after a
    rollback; a history is appended to in the training loop, so it drops whole steps and keeps the latest.
    """

    def __init__(self) -> None:
        self._blocks: list[pa.Table] = []
        self._newest: list[Mapping[str, Any]] = []  # not yet in a block
        self._newest_rows = 0
        # For each kept step: its place among its optimizer's sampled steps, and its rows.
        self._places, self._counts = array("q"), array("q")
        self._rows = 0
        self._stride = 1
        self._sampled: dict[str, int] = {}  # steps of each optimizer
        self._words: dict[str, dict[str, int]] = {name: {} for name in _TEXT}  # of each text column, with their codes

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take the rows of one sampled step of one optimizer, as `read_only` makes them."""
        # The first weight identifies the optimizer. Thinned together, one of two optimizers could lose all its samples.
        optimizer, rows = str(columns["param"][0]), len(columns["param"])
        place = self._sampled[optimizer] = self._sampled.get(optimizer, 0) + 1
        if place % self._stride:
            return
        self._newest.append(columns)
        self._newest_rows += rows
        self._places.append(place)
        self._counts.append(rows)
        self._rows += rows
        if len(self._newest) >= _BLOCK or self._newest_rows >= _BLOCK_ROWS:
            self._make_block()
        if self._rows > _MOST_ROWS:
            self._thin()

    def table(self) -> pa.Table:
        """All kept rows, as the sample table; shares their memory."""
        self._make_block()
        words = {name: pa.array(codes, pa.string()) for name, codes in self._words.items()}
        columns = []
        for field in SAMPLE_FIELDS:
            chunks = [chunk for block in self._blocks for chunk in block[field.name].chunks]
            if field.name in words:
                chunks = [pa.DictionaryArray.from_arrays(chunk, words[field.name], safe=False) for chunk in chunks]
            columns.append(pa.chunked_array(chunks, field.type))
        return pa.table(columns, schema=SAMPLE_FIELDS)

    def _make_block(self) -> None:
        if not self._newest:
            return
        columns = []
        for field in _CODED:
            values = [step[field.name] for step in self._newest]
            if field.name in self._words:
                columns.append(self._codes(field.name, values))
            else:
                columns.append(pa.array(np.concatenate(values), field.type, from_pandas=False))
        self._newest, self._newest_rows = [], 0
        self._add_block(pa.table(columns, schema=_CODED))

    def _add_block(self, block: pa.Table) -> None:
        """Append a block, together with smaller ones before it: there are never many."""
        while self._blocks and self._blocks[-1].num_rows <= min(block.num_rows, _BLOCK_ROWS - block.num_rows):
            block = pa.concat_tables([self._blocks.pop(), block]).combine_chunks()
        self._blocks.append(block)

    def _codes(self, name: str, steps: Sequence[Sequence[str | None]]) -> pa.Array:
        """Words as numbers; most steps have the same words as others."""
        known, distinct = self._words[name], {words: place for place, words in enumerate(dict.fromkeys(steps))}
        codes = [[None if word is None else known.setdefault(word, len(known)) for word in words] for words in distinct]
        coded = pa.array(codes, pa.list_(pa.int32()))
        return coded.take(pa.array([distinct[words] for words in steps])).flatten()

    def _thin(self) -> None:
        """Drop every second sampled step, unless none would be left."""
        places, counts = np.array(self._places), np.array(self._counts)
        stays = places % (2 * self._stride) == 0
        if not stays.any():
            return
        self._make_block()
        rows = np.repeat(stays, counts)
        blocks, self._blocks, begin = self._blocks[::-1], [], 0
        while blocks:  # one at a time: the dropped rows make room for the kept ones
            block = blocks.pop()
            kept = pa.array(rows[begin : begin + block.num_rows])
            begin += block.num_rows
            self._add_block(block.filter(kept).combine_chunks())
        self._places, self._counts = (array("q", values[stays].tobytes()) for values in (places, counts))
        self._rows, self._stride = int(counts[stays].sum()), 2 * self._stride


_TEXT = [field.name for field in SAMPLE_FIELDS if pa.types.is_dictionary(field.type)]
_CODED = pa.schema([field.with_type(pa.int32()) if field.name in _TEXT else field for field in SAMPLE_FIELDS])
