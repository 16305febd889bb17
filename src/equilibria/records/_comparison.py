"""Two runs side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from equilibria.records._reader import Record, read_record, without_dictionaries

_KEYS = ["step", "param"]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The samples that two runs have in common, and the parameters that only one of them has.

    Attributes:
        table: one row per step and parameter that both runs sampled, in the order of the first; every other column
            twice, ``norm_a`` and ``norm_b``, in the units of the sample table.
        only_in_a: parameters that only the first run has.
        only_in_b: parameters that only the second run has.
        notes: sentences about rows that are missing and why; empty if both records are complete.
    """

    table: pa.Table = field(repr=False)
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    notes: tuple[str, ...]


def compare(a: Record | str | Path, b: Record | str | Path) -> Comparison:
    """Join two runs on step and parameter.

    Args:
        a: a record or its directory.
        b: another one.

    Raises:
        EquilibriaError: if either cannot be read.

    Example:
        >>> import tempfile
        >>> from equilibria.records import RecordWriter, compare
        >>> directory = tempfile.TemporaryDirectory()
        >>> for name, norm in [("a", 1.0), ("b", 1.5)]:
        ...     with RecordWriter(f"{directory.name}/{name}", metadata={}) as writer:
        ...         writer.append({"step": [0], "param": ["conv1"], "norm": [norm]})
        >>> both = compare(f"{directory.name}/a", f"{directory.name}/b")
        >>> both.table.select(["step", "param", "norm_a", "norm_b"]).to_pylist()
        [{'step': 0, 'param': 'conv1', 'norm_a': 1.0, 'norm_b': 1.5}]
        >>> directory.cleanup()
    """
    first, second = (run if isinstance(run, Record) else read_record(run) for run in (a, b))
    params, others = first.params, second.params
    table = _common(first.samples(), second.samples())
    notes = [f"{name}: {note}" for name, run in (("a", first), ("b", second)) for note in run.notes]
    if table.num_rows == 0:
        notes.append("the two runs sampled no step and parameter in common")
    return Comparison(
        table=table,
        only_in_a=tuple(name for name in params if name not in others),
        only_in_b=tuple(name for name in others if name not in params),
        notes=tuple(notes),
    )


def _common(first: pa.Table, second: pa.Table) -> pa.Table:
    """The rows that both have, in the order of the first. Joins keys only: a join loses the order and the units."""
    rows = _keys(first, "row_a").join(_keys(second, "row_b"), keys=_KEYS, join_type="inner").sort_by("row_a")
    left = _suffixed(first.take(rows["row_a"]), "_a")
    right = _suffixed(second.take(rows["row_b"]), "_b").drop_columns(_KEYS)
    for column in right.schema:
        left = left.append_column(column, right[column.name])
    return left


def _keys(table: pa.Table, row: str) -> pa.Table:
    keys = without_dictionaries(table.select(_KEYS))  # the codes of two runs stand for different names
    return keys.append_column(row, pa.array(np.arange(table.num_rows)))


def _suffixed(table: pa.Table, suffix: str) -> pa.Table:
    return table.rename_columns([name if name in _KEYS else name + suffix for name in table.column_names])
