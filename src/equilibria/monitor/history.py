"""The samples of a run in memory, within a bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import SAMPLE_FIELDS

_MOST_ROWS = 1_000_000  # about 200 MB
_BLOCK = 256  # sampled steps per table: an Arrow table of one row takes as much memory as one of a hundred


class History:
    """Samples in memory; beyond a million rows it drops every second sampled step, again and again.

    The record on disk is complete; this is for looking at a run while it trains. `equilibria.records` thins a recorded
    run by layer, keeps the first sample of every block with the extremes of the others, and forgets rows after a
    rollback; a history is appended to in the training loop, so it drops whole steps and keeps the latest.
    """

    def __init__(self) -> None:
        self._blocks: list[pa.Table] = []
        self._newest: list[Mapping[str, Any]] = []  # not yet in a block
        self._kept: list[tuple[int, int]] = []  # for each step: place among its optimizer's sampled steps, and rows
        self._rows = 0
        self._stride = 1
        self._sampled: dict[str, int] = {}  # steps of each optimizer

    def append(self, columns: Mapping[str, Any]) -> None:
        """Take the rows of one sampled step of one optimizer."""
        # The first weight identifies the optimizer. Thinned together, one of two optimizers could lose all its samples.
        optimizer = str(columns["param"][0])
        place = self._sampled[optimizer] = self._sampled.get(optimizer, 0) + 1
        if place % self._stride:
            return
        self._newest.append(columns)
        self._kept.append((place, len(columns["param"])))
        self._rows += len(columns["param"])
        if len(self._newest) >= _BLOCK:
            self._make_block()
        if self._rows > _MOST_ROWS:
            self._thin()

    def table(self) -> pa.Table:
        """All kept rows, as the sample table."""
        self._make_block()
        tables = self._blocks or [_PLAIN.empty_table()]
        return pa.concat_tables(tables).combine_chunks().cast(SAMPLE_FIELDS)

    def _make_block(self) -> None:
        if self._newest:
            columns = [
                pa.array(np.concatenate([step[field.name] for step in self._newest]), field.type, from_pandas=False)
                for field in _PLAIN
            ]
            self._blocks.append(pa.table(columns, schema=_PLAIN))
            self._newest = []

    def _thin(self) -> None:
        """Drop every second sampled step, unless none would be left."""
        places, rows = np.array(self._kept).T
        stays = places % (2 * self._stride) == 0
        if not stays.any():
            return
        self._make_block()
        self._blocks = [pa.concat_tables(self._blocks).filter(pa.array(np.repeat(stays, rows))).combine_chunks()]
        self._kept = [step for step, stay in zip(self._kept, stays, strict=True) if stay]
        self._rows, self._stride = int(rows[stays].sum()), 2 * self._stride


_PLAIN = pa.schema(  # text not yet encoded: `table` makes one dictionary for all steps
    [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in SAMPLE_FIELDS]
)
