"""The samples of a run in memory, thinned when they become too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import SAMPLE_FIELDS

_MOST_ROWS = 1_000_000  # about 200 MB
_BLOCK = 256  # sampled steps per Arrow table: a table of one row takes as much memory as one of a hundred


class History:
    """Keeps samples in memory. Each time they exceed a million rows it drops every second sampled step.

    The record in a run directory stays complete.
    """

    def __init__(self) -> None:
        self._blocks: list[pa.Table] = []
        self._tail: list[Mapping[str, Any]] = []
        self._kept: list[tuple[int, int]] = []  # position among the sampled steps of its optimizer, and rows
        self._rows = 0
        self._keep_every = 1
        self._seen: dict[str, int] = {}

    def append(self, columns: Mapping[str, Any]) -> None:
        """Add the rows of one sampled step of one optimizer."""
        # The first weight identifies the optimizer. Thinned together, one of two optimizers could lose all its samples.
        optimizer = str(columns["param"][0])
        position = self._seen[optimizer] = self._seen.get(optimizer, 0) + 1
        if position % self._keep_every:
            return
        self._tail.append(columns)
        self._kept.append((position, len(columns["param"])))
        self._rows += len(columns["param"])
        if len(self._tail) >= _BLOCK:
            self._gather()
        if self._rows > _MOST_ROWS:
            self._thin()

    def table(self) -> pa.Table:
        """All samples kept, as the sample table."""
        self._gather()
        tables = self._blocks or [_PLAIN.empty_table()]
        return pa.concat_tables(tables).combine_chunks().cast(SAMPLE_FIELDS)

    def _gather(self) -> None:
        if self._tail:
            columns = [_column(field, [step[field.name] for step in self._tail]) for field in _PLAIN]
            self._blocks.append(pa.table(columns, schema=_PLAIN))
            self._tail = []

    def _thin(self) -> None:
        """Drop every second sampled step, unless nothing would be left."""
        positions, rows = np.array(self._kept).T
        stays = positions % (2 * self._keep_every) == 0
        if not stays.any():
            return
        self._gather()
        self._blocks = [pa.concat_tables(self._blocks).filter(pa.array(np.repeat(stays, rows))).combine_chunks()]
        self._kept = [step for step, stay in zip(self._kept, stays, strict=True) if stay]
        self._rows, self._keep_every = int(rows[stays].sum()), 2 * self._keep_every


def _column(field: pa.Field, parts: Sequence[Any]) -> pa.Array:
    return pa.array(np.concatenate(parts), field.type, from_pandas=False)


_PLAIN = pa.schema(  # words are encoded only in table(): one dictionary for all steps
    [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in SAMPLE_FIELDS]
)
