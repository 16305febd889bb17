"""One session's rows of one table: an Arrow IPC stream in a file of its own, written whole batches at a time.

The stream has no index at its end, so its rows can be read at any moment: while it grows, and after a kill of its
writer. A session never writes into another session's file, so no file ever needs repair.
"""

from __future__ import annotations

import errno
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.errors import EquilibriaError
from equilibria.records._batches import merge
from equilibria.records.tables import FORMAT_KEY, FORMER_STATES, SAMPLES, TABLES, TableName, check_format

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, in the Arrow format
_CHECKSUM = b"equilibria.steps.crc32"
_NAME = re.compile(r"(\w+)-(\d{3,})\.arrows")


def segment_name(number: int, *, table: TableName = SAMPLES) -> str:
    """The file name of a session's rows of a table.

    Example:
        >>> segment_name(7), segment_name(7, table="sharpness")
        ('samples-007.arrows', 'sharpness-007.arrows')
    """
    return f"{table}-{number:03d}.arrows"


def segment_paths(directory: Path, *, table: TableName = SAMPLES) -> dict[int, Path]:
    """The files of a table by session number, in the order of the sessions."""
    files = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[2]), path) for match, path in files if match and match[1] == table))


class SegmentWriter:
    """Writes one stream; every method may raise OSError.

    `write` hands a batch to the operating system before it returns, so the batch survives ``kill -9``. It does not
    force the batch onto the disk: that can stall training for seconds during a checkpoint, and only guards against a
    crash of the machine, which may cost the last half minute or so. `close` does force it.
    """

    def __init__(self, path: Path, *, table: TableName = SAMPLES) -> None:
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
        """Close the file without marking the end of the stream."""
        with suppress(OSError):
            self._file.close()

    def _drain(self) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # writing would succeed, into a file that nobody can open
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self._path))
        left = memoryview(self._encoded.getvalue())
        self._encoded.seek(0)
        self._encoded.truncate()
        while left:
            left = left[self._file.write(left) :]


@dataclass(frozen=True, slots=True)
class Segment:
    """The readable part of one stream: its whole batches, memory-mapped, and a note on the bytes after them, if any."""

    name: str
    table: pa.Table
    note: str = ""


def read_segment(path: Path, *, table: TableName = SAMPLES) -> Segment:
    """Read the whole batches of a stream; a torn or damaged rest becomes a note.

    Raises:
        EquilibriaError: if the stream has a newer major format, or is not of this table, or is no regular file.
        OSError: if the file cannot be opened.
    """
    reader = SegmentReader(path, table=table, mapped=True)
    batches = list(reader.read())
    return Segment(path.name, pa.Table.from_batches(batches, schema=reader.schema), reader.note)


class SegmentReader:
    """Reads one stream, which may be growing: each call of `read` gives the batches that were appended since the last.

    Args:
        path: the file.
        table: the table whose rows it holds.
        mapped: map the file into memory, so that a column is read only when its values are used. The file must not
            become shorter while batches are in use: the process would crash.

    Attributes:
        schema: of the batches; that of the table until the file has one.
        note: a sentence about bytes that cannot be read, "" if there are none.
    """

    def __init__(self, path: Path, *, table: TableName = SAMPLES, mapped: bool = False) -> None:
        self.schema = TABLES[table]
        self.note = ""
        self._path, self._table, self._mapped = path, table, mapped
        self._required = [field.name for field in TABLES[table] if not field.nullable]
        self._size = self._rows = 0
        self._source = _WholeMessages()
        self._stream: pa.RecordBatchReader | None = None
        self._has_batches = self._damaged = False

    def read(self) -> Iterator[pa.RecordBatch]:
        """The batches that are whole by now and that no earlier call gave, with the present names of states.

        Raises:
            EquilibriaError: if the stream has a newer major format, is not of this table, became shorter, or is no
                regular file.
            OSError: if the file cannot be read.
        """
        stat = self._path.stat()
        if not S_ISREG(stat.st_mode):  # opening a pipe would block
            raise EquilibriaError(f"{self._path.name} is not a file")
        if stat.st_size < self._size:
            raise EquilibriaError(f"{self._path.name} became shorter: the run was replaced or damaged")
        if stat.st_size == self._size or self._damaged:
            return
        self._size = stat.st_size
        file = pa.memory_map(str(self._path)) if self._mapped else pa.OSFile(str(self._path))
        with file:
            is_ended = self._find_limit(file)
            self._source.open(file)
            try:
                yield from self._batches()
            finally:
                self._source.file = None
        if not is_ended and not self._damaged:
            self.note = self._torn()

    def _find_limit(self, file: pa.NativeFile) -> bool:
        """Move the limit of the source to the end of the last whole batch; whether the stream or the file ends there.

        A writer may be in the middle of the next batch. The dictionaries of a batch are messages of their own, before
        it: a source that ends after one of them would be damaged for Arrow.
        """
        file.seek(self._source.limit)
        self.note = ""
        try:
            while True:
                message = pa.ipc.read_message(file)
                if message.type != "dictionary":
                    self._source.limit = file.tell()
                    self._has_batches |= message.type == "record batch"
        except EOFError:  # at the end of the file, or at zeros, or at the mark of the end
            file.seek(self._source.limit)
            return file.read(len(_END) + 1) in (_END, b"")
        except (pa.ArrowException, OSError):
            return False

    def _torn(self) -> str:
        if self._source.limit == 0:
            return f"{self._path.name}: no whole batch, 0 rows read"
        left = self._size - self._source.limit
        return f"{self._path.name}: last batch incomplete, {self._rows:,} rows read, {left:,} bytes after them left"

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if not self._has_batches:  # for Arrow, a stream whose first batch is missing stays empty
            return
        try:
            if self._stream is None:
                self._stream = pa.ipc.open_stream(self._source)
                _check_schema(self._stream.schema, self._path.name, self._table)
                self.schema = self._stream.schema
            while True:
                batch, metadata = self._stream.read_next_batch_with_custom_metadata()
                _check_batch(batch, metadata, self._required)
                self._rows += batch.num_rows
                yield _with_present_states(batch) if self._table == SAMPLES else batch
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            self._damaged = True
            self.note = f"{self._path.name}: damaged after {self._rows:,} rows, the rest is left out ({error})"


class _WholeMessages:
    """File-like view that reports end of file after the last whole batch; Arrow reads on once the limit has grown."""

    closed = False

    def __init__(self) -> None:
        self.position = self.limit = 0
        self.file: pa.NativeFile | None = None

    def open(self, file: pa.NativeFile) -> None:
        """Go on in a newly opened file where the last one was left."""
        file.seek(self.position)
        self.file = file

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> pa.Buffer:  # Arrow prefers it for what is large: no copy of a mapped file
        left = self.limit - self.position
        if self.file is None:
            return pa.py_buffer(b"")
        buffer = self.file.read_buffer(left if size < 0 else min(size, left))
        self.position += buffer.size
        return buffer

    def close(self) -> None:
        self.closed = True


def _with_present_states(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace state names of earlier versions in the dictionary of ``state``; indices and other columns are shared."""
    names = batch.schema.names
    if "state" not in names:
        return batch
    place = names.index("state")
    column = batch.column(place)
    if not pa.types.is_dictionary(column.type) or column.type.value_type != pa.string():
        return batch
    words = column.dictionary
    for former, present in FORMER_STATES.items():
        words = pc.if_else(pc.equal(words, former), present, words)
    if words.equals(column.dictionary):
        return batch
    state = pa.DictionaryArray.from_arrays(column.indices, words, ordered=column.type.ordered, safe=False)
    return batch.set_column(place, batch.schema.field(place), state)


def _check_batch(batch: pa.RecordBatch, metadata: pa.KeyValueMetadata | None, required: Sequence[str]) -> None:
    """Raise if the batch is damaged so that reading it could crash, or hide the rows of others."""
    batch.validate()
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):  # a damaged index would be read out of bounds
            column.validate(full=True)
    if any(batch[name].null_count for name in required):
        raise pa.ArrowInvalid("a row without step or parameter")
    checksum = (metadata or {}).get(_CHECKSUM)
    if checksum is not None and checksum != _checksum(batch):
        raise pa.ArrowInvalid("the steps do not match their checksum")


def _checksum(batch: pa.RecordBatch) -> bytes:
    """Checksum of the steps, which decide which rows belong to the run.

    Zeros left by a power cut would read as a return to step 0. The other columns have no checksum: to verify it, a
    reader would have to read them all.
    """
    return b"%08x" % zlib.crc32(batch["step"].to_numpy())


def _check_schema(schema: pa.Schema, name: str, table: TableName) -> None:
    try:
        names = schema.names
    except UnicodeDecodeError:
        raise EquilibriaError(f"{name}: the names of its columns are damaged") from None
    version = (schema.metadata or {}).get(FORMAT_KEY)
    check_format(version.decode("ascii", "replace") if version else None, where=name)
    for column in TABLES[table]:
        if not column.nullable:
            kind = schema.field(names.index(column.name)).type if column.name in names else "none"
            if kind != column.type:
                raise EquilibriaError(f"{name}: got column {column.name} of type {kind}; expected {column.type}")
