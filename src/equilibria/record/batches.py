"""Columns as a caller has them -> Arrow batches as the stream keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.record.schema import SAMPLE_SCHEMA

Column = Sequence[Any] | NDArray[Any]

_REQUIRED = ("step", "param")


def to_batch(columns: Mapping[str, Column]) -> pa.RecordBatch:
    """One batch in the order of the sample table, words not yet encoded; columns that are absent become null.

    The values are copied, so the caller may reuse its arrays.

    Args:
        columns: name -> values; ``step`` and ``param`` are required and all lengths are equal.

    Raises:
        EquilibriaError: for unknown or missing columns, unequal lengths, or values of the wrong kind.

    Example:
        >>> batch = to_batch({"step": [0, 0], "param": ["conv1", "conv2"], "norm": np.array([1.0, 2.0])})
        >>> batch.num_rows, batch["norm"].to_pylist(), batch["angle"].null_count
        (2, [1.0, 2.0], 2)
    """
    unknown = sorted(set(columns) - _KINDS.keys())
    if unknown:
        raise EquilibriaError(f"got unknown columns {unknown}; expected some of: {', '.join(SAMPLE_SCHEMA.names)}")
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise EquilibriaError(f"got no column {' nor '.join(missing)}; every sample needs step and param")
    arrays = {name: _array(name, values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise EquilibriaError(f"got columns of different lengths {lengths}; expected one length")
    rows = lengths["step"]
    filled = [arrays[name] if name in arrays else pa.nulls(rows, kind.arrow) for name, kind in _KINDS.items()]
    return pa.record_batch(filled, names=list(_KINDS))


def merge(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches from `to_batch` as one batch of the sample table, its words encoded."""
    table = pa.Table.from_batches(batches)
    merged = []
    for field in SAMPLE_SCHEMA:
        values = table[field.name].combine_chunks()
        merged.append(values.dictionary_encode() if pa.types.is_dictionary(field.type) else values)
    return pa.record_batch(merged, schema=SAMPLE_SCHEMA)


def _array(name: str, values: Column) -> pa.Array:
    kind = _KINDS[name]
    try:
        if isinstance(values, str | bytes):  # a sequence too, of its letters
            raise TypeError
        array = kind.convert(values)
        if name in _REQUIRED and array.null_count:
            raise ValueError
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        raise EquilibriaError(f"got {name}={_shown(values)}; expected a sequence of {kind.expected}") from None
    return array


def _words(values: Column) -> pa.Array:
    return pa.array(values, pa.string())


def _whole_numbers(values: Column) -> pa.Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int64).max):
        raise OverflowError
    return pa.array(array.astype(np.int64))


def _numbers(values: Column) -> pa.Array:
    array = np.asarray(values)
    if array.ndim == 1 and array.dtype.kind == "O":  # with None for what was not measured
        return pa.array(array.tolist(), pa.float64())
    if array.ndim != 1 or array.dtype.kind not in "biuf":  # numpy would read the text "0.1"
        raise TypeError
    return pa.array(array.astype(np.float64))


def _shown(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a column is held in memory, and what a caller may give for it."""

    arrow: pa.DataType
    convert: Callable[[Column], pa.Array]
    expected: str


def _kind(field: pa.Field) -> _Kind:
    if pa.types.is_dictionary(field.type):
        return _Kind(field.type.value_type, _words, "words")
    if pa.types.is_integer(field.type):
        return _Kind(field.type, _whole_numbers, "whole numbers from 0")
    return _Kind(field.type, _numbers, "numbers")


_KINDS = {field.name: _kind(field) for field in SAMPLE_SCHEMA}  # once: append is called in the training loop
