"""The samples of a run in memory, thinned out when they become too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import SAMPLE_FIELDS

_MOST_ROWS = 1_000_000  # about 200 MB
_BLOCK = 256  # sampled steps that are put together: a batch of one row takes as much memory as one of a hundred


class History:
    """Keeps samples; beyond a million rows it drops every second sampled step, again and again.

    What a run directory holds is complete; this is for looking at a run while it goes on.
    """

    def __init__(self) -> None:
        self._blocks: list[pa.Table] = []
        self._tail: list[Mapping[str, Any]] = []
        self._kept: list[tuple[int, int]] = []  # place among the sampled steps of its optimizer, and rows
        self._rows = 0
        self._keep_every = 1
        self._seen: dict[str, int] = {}

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take the rows of one sampled step of one optimizer."""
        # Optimizers are told apart by their first weight: thinned together, one of two could lose all its samples.
        source = str(columns["param"][0])
        place = self._seen[source] = self._seen.get(source, 0) + 1
        if place % self._keep_every:
            return
        self._tail.append(columns)
        self._kept.append((place, len(columns["param"])))
        self._rows += len(columns["param"])
        if len(self._tail) >= _BLOCK:
            self._gather()
        if self._rows > _MOST_ROWS:
            self._thin()

    def table(self) -> pa.Table:
        """Everything kept, as the sample table."""
        self._gather()
        tables = self._blocks or [_PLAIN.empty_table()]
        return pa.concat_tables(tables).combine_chunks().cast(SAMPLE_FIELDS)

    def _gather(self) -> None:
        if self._tail:
            columns = [_column(field, [each[field.name] for each in self._tail]) for field in _PLAIN]
            self._blocks.append(pa.table(columns, schema=_PLAIN))
            self._tail = []

    def _thin(self) -> None:
        """Drop every second sampled step, unless nothing would be left."""
        places, rows = np.array(self._kept).T
        stays = places % (2 * self._keep_every) == 0
        if not stays.any():
            return
        self._gather()
        self._blocks = [pa.concat_tables(self._blocks).filter(pa.array(np.repeat(stays, rows))).combine_chunks()]
        self._kept = [each for each, stay in zip(self._kept, stays, strict=True) if stay]
        self._rows, self._keep_every = int(rows[stays].sum()), 2 * self._keep_every


def _column(field: pa.Field, parts: Sequence[Any]) -> pa.Array:
    return pa.array(np.concatenate(parts), field.type, from_pandas=False)


_PLAIN = pa.schema(  # words not yet encoded: one dictionary for all steps is made when the table is asked for
    [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in SAMPLE_FIELDS]
)
