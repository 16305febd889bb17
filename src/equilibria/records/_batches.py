"""Conversion of a caller's columns to the Arrow batches of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.records.tables import SAMPLES, TABLES, TableName

Column = Sequence[Any] | NDArray[Any]


def to_batch(columns: Mapping[str, Column], *, table: TableName = SAMPLES) -> pa.RecordBatch:
    """One batch with the columns of its table, text not yet encoded; absent columns become null.

    Copies the values, so the caller may reuse its arrays.

    Args:
        columns: name -> values, all of one length; columns that are never null (``step``, ``param``) are required.
        table: the name of the table.

    Raises:
        EquilibriaError: for unknown or missing columns, unequal lengths, or values of the wrong kind.

    Example:
        >>> batch = to_batch({"step": [0, 0], "param": ["conv1", "conv2"], "norm": np.array([1.0, 2.0])})
        >>> batch.num_rows, batch["norm"].to_pylist(), batch["angle"].null_count
        (2, [1.0, 2.0], 2)
    """
    kinds = _KINDS[table]
    unknown = sorted(set(columns) - kinds.keys())
    if unknown:
        raise EquilibriaError(f"got unknown columns {unknown}; expected some of: {', '.join(kinds)}")
    required = [name for name, kind in kinds.items() if kind.required]
    missing = [name for name in required if name not in columns]
    if missing:
        raise EquilibriaError(f"got no column {' nor '.join(missing)}; every sample needs {' and '.join(required)}")
    arrays = {name: _array(name, values, kinds[name]) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise EquilibriaError(f"got columns of different lengths {lengths}; expected one length")
    rows = lengths["step"]
    filled = [arrays[name] if name in arrays else pa.nulls(rows, kind.arrow) for name, kind in kinds.items()]
    return pa.record_batch(filled, names=list(kinds))


def merge(batches: Iterable[pa.RecordBatch], *, table: TableName = SAMPLES) -> pa.RecordBatch:
    """Merge batches from `to_batch` into one batch of their table, its text dictionary-encoded."""
    together = pa.Table.from_batches(batches)
    merged = []
    for field in TABLES[table]:
        values = together[field.name].combine_chunks()
        merged.append(values.dictionary_encode() if pa.types.is_dictionary(field.type) else values)
    return pa.record_batch(merged, schema=TABLES[table])


def _array(name: str, values: Column, kind: _Kind) -> pa.Array:
    try:
        if isinstance(values, str | bytes):  # a sequence of its letters, too
            raise TypeError
        array = kind.convert(values)
        if kind.required and array.null_count:
            raise ValueError
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        raise EquilibriaError(f"got {name}={_shown(values)}; expected a sequence of {kind.expected}") from None
    return array


def _text(values: Column) -> pa.Array:
    return pa.array(values, pa.string())


def _integers(values: Column) -> pa.Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int64).max):
        raise OverflowError
    return pa.array(array.astype(np.int64))


def _numbers(values: Column) -> pa.Array:
    array = np.asarray(values)
    if array.ndim == 1 and array.dtype.kind == "O":  # None: not measured
        return pa.array(array.tolist(), pa.float64())
    if array.ndim != 1 or array.dtype.kind not in "biuf":  # numpy would read the text "0.1"
        raise TypeError
    return pa.array(array.astype(np.float64))


def _shown(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class _Kind:
    """The Arrow type of a column in memory, and the values that it accepts."""

    arrow: pa.DataType
    convert: Callable[[Column], pa.Array]
    expected: str
    required: bool


def _kind(field: pa.Field) -> _Kind:
    if pa.types.is_dictionary(field.type):
        return _Kind(field.type.value_type, _text, "strings", not field.nullable)
    if pa.types.is_integer(field.type):
        return _Kind(field.type, _integers, "whole numbers from 0", not field.nullable)
    return _Kind(field.type, _numbers, "numbers", not field.nullable)


# Computed once: `append` runs in the training loop.
_KINDS = {table: {field.name: _kind(field) for field in schema} for table, schema in TABLES.items()}
