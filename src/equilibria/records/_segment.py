"""One session's rows of one table: an Arrow IPC stream in a file of its own, written whole batches at a time.

The stream has no index at its end, so what is there can be read at any moment: while it grows, and after the process
that wrote it was killed. A session never writes into another session's file, so nothing is ever repaired.
"""

from __future__ import annotations

import errno
import io
import os
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from equilibria.errors import EquilibriaError
from equilibria.records._batches import merge
from equilibria.records.tables import FORMAT_KEY, SAMPLES, TABLES, check_format

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, as the Arrow format has it
_CHECKSUM = b"equilibria.steps.crc32"
_NAME = re.compile(r"(\w+)-(\d{3,})\.arrows")


def segment_name(number: int, *, table: str = SAMPLES) -> str:
    """The file name of a session's rows of a table.

    Example:
        >>> segment_name(7), segment_name(7, table="sharpness")
        ('samples-007.arrows', 'sharpness-007.arrows')
    """
    return f"{table}-{number:03d}.arrows"


def segment_paths(directory: Path, *, table: str = SAMPLES) -> dict[int, Path]:
    """The files of a table by session number, in the order of the sessions."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[2]), path) for match, path in found if match and match[1] == table))


class SegmentWriter:
    """Writes one stream; every method may raise OSError.

    A batch is handed to the operating system before `write` returns, which is what survives ``kill -9``. It is not
    forced onto the disk: that can stall training for seconds while a checkpoint is being written, and only guards
    against a crash of the machine, after which the last half minute or so may be missing. `close` does force it.
    """

    def __init__(self, path: Path, *, table: str = SAMPLES) -> None:
        self._path, self._table = path, table
        self._file = path.open("xb", buffering=0)
        self._encoded = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._encoded, TABLES[table])

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append batches from `to_batch` as one batch."""
        batch = merge(batches, table=self._table)
        self._stream.write_batch(batch, {_CHECKSUM: _checksum(batch)})
        self._drain()

    def close(self) -> None:
        """Mark the end of the stream and force it onto the disk."""
        self._stream.close()
        self._drain()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        with suppress(OSError):
            self._file.close()

    def _drain(self) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # writing would succeed, and nobody could read it
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self._path))
        left = memoryview(self._encoded.getvalue())
        self._encoded.seek(0)
        self._encoded.truncate()
        while left:
            left = left[self._file.write(left) :]


@dataclass(frozen=True, slots=True)
class Segment:
    """What could be read of one stream: the whole batches, memory-mapped, and a note if something follows them."""

    name: str
    table: pa.Table
    note: str = ""


def read_segment(path: Path, *, table: str = SAMPLES) -> Segment:
    """The whole batches of a stream; what is torn or damaged after them is noted, not raised.

    Raises:
        EquilibriaError: if the stream is of a newer major format or is not a sample table.
        OSError: if the file cannot be opened.
    """
    size, nothing = path.stat().st_size, TABLES[table].empty_table()
    if size == 0:  # a session that has flushed nothing yet
        return Segment(path.name, nothing)
    source = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError):
        return Segment(path.name, nothing, f"{path.name}: no whole batch, 0 rows read")
    _check_schema(stream.schema, path.name, table)
    batches, whole = _whole_batches(stream, source, required=_required(table))
    found = pa.Table.from_batches(batches, schema=stream.schema)
    if whole == size:
        return Segment(path.name, found)
    note = f"{path.name}: last batch incomplete, {found.num_rows:,} rows read, {size - whole:,} bytes after them left"
    return Segment(path.name, found, note)


def _required(table: str) -> list[str]:
    return [field.name for field in TABLES[table] if not field.nullable]


def _whole_batches(
    stream: pa.RecordBatchReader, source: pa.MemoryMappedFile, *, required: Sequence[str]
) -> tuple[list[pa.RecordBatch], int]:
    """The batches up to the first that is not whole, and where they end in the file, the mark of the end included."""
    batches: list[pa.RecordBatch] = []
    end = source.tell()
    try:
        while True:
            found = stream.read_next_batch_with_custom_metadata()
            _check_batch(found.batch, found.custom_metadata, required)
            batches.append(found.batch)
            end = source.tell()
    except (StopIteration, pa.ArrowException, OSError):
        source.seek(end)
        return batches, end + (len(_END) if source.read(len(_END)) == _END else 0)


def _check_batch(batch: pa.RecordBatch, metadata: pa.KeyValueMetadata | None, required: Sequence[str]) -> None:
    """Raise if the batch is damaged so that reading it could crash, or hide the rows of others."""
    batch.validate()
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):  # a damaged index would be read out of bounds
            column.validate(full=True)
    if any(batch[name].null_count for name in required):
        raise pa.ArrowInvalid("a sample without step or parameter")
    checksum = (metadata or {}).get(_CHECKSUM)
    if checksum is not None and checksum != _checksum(batch):
        raise pa.ArrowInvalid("the steps do not match their checksum")


def _checksum(batch: pa.RecordBatch) -> bytes:
    """Of the steps, which decide what belongs to the run: zeros left by a power cut would read as a return to step 0.

    The other columns have none: to check it, a reader would have to read them all.
    """
    return b"%08x" % zlib.crc32(batch["step"].to_numpy())


def _check_schema(schema: pa.Schema, name: str, table: str) -> None:
    try:
        names = schema.names
    except UnicodeDecodeError:
        raise EquilibriaError(f"{name}: the names of its columns are damaged") from None
    version = (schema.metadata or {}).get(FORMAT_KEY)
    check_format(version.decode("ascii", "replace") if version else None, where=name)
    for column in _required(table):
        found = schema.field(names.index(column)).type if column in names else "none"
        expected = TABLES[table].field(column).type
        if found != expected:
            raise EquilibriaError(f"{name}: got column {column} of type {found}; expected {expected}")
