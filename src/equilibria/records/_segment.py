"""One session's rows of one table: an Arrow IPC stream in a file of its own, written whole blocks at a time.

The stream has no index at its end, so its rows can be read at any moment: while it grows, and after a kill of its
writer. A session never writes into another session's file, so no file ever needs repair. Every block has a checksum
(`equilibria.records._blocks`); a damaged one is left out, and reading goes on with the next whole one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.errors import EquilibriaError
from equilibria.records._batches import merge
from equilibria.records._blocks import (
    END,
    SCHEMA,
    Block,
    Bytes,
    FileBytes,
    MappedBytes,
    block_at,
    first_message,
    is_end,
    next_block,
    seal,
)
from equilibria.records._files import check_own_file
from equilibria.records.tables import (
    CHECKED_SINCE,
    FORMAT_KEY,
    FORMER_STATES,
    SAMPLES,
    TABLES,
    TableName,
    check_format,
)

_RUN = b"equilibria.run"  # in the schema's metadata: the run and its session, as run.json describes them
_ENDING = b"equilibria.end"  # in the metadata of an empty last batch: what is known only when a session ends
_FIELDS = b"equilibria.fields"  # in the metadata of every batch: which columns it has, should the schema be damaged
_STEPS = b"equilibria.steps.crc32"  # the only checksum before format 1.2
_NAME = re.compile(r"(\w+)-([0-9]{3,9})\.arrows")


def segment_name(number: int, *, table: TableName = SAMPLES) -> str:
    """The file name of a session's rows of a table.

    Example:
        >>> segment_name(7), segment_name(7, table="sharpness")
        ('samples-007.arrows', 'sharpness-007.arrows')
    """
    return f"{table}-{number:03d}.arrows"


def segment_paths(directory: Path, *, table: str = SAMPLES) -> dict[int, Path]:
    """The files of a table by session number, in the order of the sessions."""
    return all_segments(directory).get(table, {})


def all_segments(directory: Path) -> dict[str, dict[int, Path]]:
    """The files of a run by table and session number; later versions may have added tables."""
    files = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    tables: dict[str, dict[int, Path]] = {}
    for match, path in sorted(((match, path) for match, path in files if match), key=lambda pair: int(pair[0][2])):
        tables.setdefault(match[1], {})[int(match[2])] = path
    return tables


def session_number(file: str) -> int | None:
    """The session number in the name of a segment, None if it is no such name."""
    match = _NAME.fullmatch(file)
    return int(match[2]) if match else None


class SegmentWriter:
    """Writes one stream; every method may raise OSError.

    `write` hands a batch to the operating system before it returns, so the batch survives ``kill -9``. It does not
    force the batch onto the disk: that can stall training for seconds during a checkpoint, and only guards against a
    crash of the machine, which may cost the last half minute or so. `close` does force it.

    Args:
        path: the file, which must not exist.
        table: the table whose rows it holds.
        description: the run and its session, in values that JSON can hold.
    """

    def __init__(self, path: Path, *, table: TableName = SAMPLES, description: Mapping[str, Any]) -> None:
        self._path, self._table = path, table
        self._file = path.open("xb", buffering=0)
        fields = TABLES[table]
        self._fields = fields.remove_metadata()
        self._digest = _digest(self._fields)
        schema = fields.with_metadata({**fields.metadata, _RUN: json.dumps(description).encode()})
        self._unwritten = seal(schema.serialize().to_pybytes())
        self.rows = 0

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append batches from `to_batch` as one batch."""
        batch = merge(batches, table=self._table)
        self._unwritten += self._block(batch)
        self._drain()
        self.rows += batch.num_rows

    def close(self, ending: Mapping[str, Any]) -> None:
        """Write what is known only at the end, mark the end of the stream and force it onto the disk."""
        empty = pa.RecordBatch.from_pylist([], schema=TABLES[self._table])
        self._unwritten += self._block(empty, {_ENDING: json.dumps(ending)}) + END
        self._drain()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file without marking the end of the stream."""
        with suppress(OSError):
            self._file.close()

    def _block(self, batch: pa.RecordBatch, metadata: Mapping[bytes, str] | None = None) -> bytes:
        """The bytes of a batch with all of its dictionaries: a stream of its own, without the schema."""
        encoded = io.BytesIO()
        pa.ipc.new_stream(encoded, self._fields).write_batch(batch, {_FIELDS: self._digest, **(metadata or {})})
        content = encoded.getvalue()
        return seal(content[first_message(content).end :])

    def _drain(self) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # writing would succeed, into a file that nobody can open
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self._path))
        left, self._unwritten = memoryview(self._unwritten), b""
        while left:
            left = left[self._file.write(left) :]


class Segment:
    """One stream as it was when this object was made; its rows are verified, and mapped, when they are first used.

    Args:
        path: the file.
        table: the table whose rows it holds; None for one that this version does not know.

    Raises:
        EquilibriaError: if the stream has a newer major format, or is not of this table, or is no file of the run.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path, *, table: TableName | None = SAMPLES) -> None:
        self.name = path.name
        self._reader = SegmentReader(path, table=table)
        self._reader.begin()

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""
        return self._reader.schema

    def foreign_note(self, run_id: str) -> str:
        """As `SegmentReader.foreign_note`."""
        return self._reader.foreign_note(run_id)

    @property
    def description(self) -> Mapping[str, Any] | None:
        """The run and its session; None if the schema is damaged, or older than format 1.2."""
        return self._reader.description

    @cached_property
    def table(self) -> pa.Table:
        """The rows of all whole blocks."""
        return pa.Table.from_batches(list(self._reader.read()), schema=self._reader.schema)

    @property
    def ending(self) -> Mapping[str, Any] | None:
        """What the writer knew when it closed the stream; None if it did not, or before format 1.2."""
        return self._read().ending

    @property
    def is_closed(self) -> bool:
        """Whether the stream has its end mark."""
        return self._read().is_closed

    @property
    def is_checked(self) -> bool:
        """Whether the stream has checksums."""
        return self._read().is_checked

    @property
    def is_torn(self) -> bool:
        """Whether bytes follow the last whole block: a block that a kill left incomplete, or is being written."""
        return self._read().is_torn

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about bytes that cannot be read."""
        return self._read().notes

    def _read(self) -> SegmentReader:
        _ = self.table
        return self._reader


@dataclass(slots=True)
class _Gap:
    """Bytes that cannot be read, and the steps of the rows before and after them."""

    size: int
    after: int | None
    before: int | None = None

    def __str__(self) -> str:
        lost = f"{self.size:,} damaged bytes are left out"
        if self.after is None:
            return f"{lost}, before step {self.before:,}" if self.before is not None else lost
        if self.before is None:
            return f"{lost}, after step {self.after:,}"
        return f"{lost}, between step {self.after:,} and step {self.before:,}"


class SegmentReader:
    """Reads one stream, which may be growing: each call of `read` gives the batches that were appended since the last.

    Args:
        path: the file.
        table: the table whose rows it holds; None for one that this version does not know.

    Attributes:
        schema: of the batches; that of the table until the file has one.
        description: from the writer: the run and its session.
        ending: from the writer, when it closed the stream.
        is_closed: whether the stream has its end mark.
        is_checked: whether its blocks have checksums.
        is_torn: whether bytes follow the last whole block.
    """

    def __init__(self, path: Path, *, table: TableName | None = SAMPLES) -> None:
        self.schema = pa.schema([]) if table is None else TABLES[table]
        self.description: Mapping[str, Any] | None = None
        self.ending: Mapping[str, Any] | None = None
        self.is_closed = self.is_torn = False
        self.is_checked = True
        self._path, self._table = path, table
        self._required = [field.name for field in self.schema if not field.nullable]
        self._size = self._rows = self._position = 0
        self._last_step: int | None = None
        self._gaps: list[_Gap] = []
        self._fault = ""  # why nothing more can be read
        self._use(self.schema)
        self._has_begun = self._is_last_damaged = False
        self._map: MappedBytes | None = None
        self._source = _Source()
        self._stream: pa.RecordBatchReader | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about bytes that cannot be read; a living writer may be about to complete the last block."""
        sentences = [str(gap) for gap in self._gaps]
        if self._fault:
            sentences.append(f"damaged after {self._rows:,} rows, the rest is left out ({self._fault})")
        elif self.is_torn and not self._has_begun:
            sentences.append(f"no whole batch, {self._rows:,} rows read")
        elif self.is_torn and self._is_last_damaged:
            sentences.append(f"damaged after {self._rows:,} rows, the rest is left out")
        elif self.is_torn:
            left = self._size - self._position
            sentences.append(f"last batch incomplete, {self._rows:,} rows read, {left:,} bytes after them left")
        return tuple(f"{self._path.name}: {sentence}" for sentence in sentences)

    def foreign_note(self, run_id: str) -> str:
        """The note that the stream says it is of another run, as a copied file does; "" if it does not."""
        stated = (self.description or {}).get("id", run_id)
        return "" if stated == run_id else f"{self._path.name}: left out, it belongs to another run ({stated})"

    def begin(self) -> None:
        """Map the file into memory as it is now and check its schema; raises as `read` does.

        A column is then read only when its values are used. The file must not become shorter while batches are in use:
        the process would crash.
        """
        check_own_file(self._path)
        self._map = MappedBytes(self._path)
        self._read_schema(self._map)

    def read(self) -> Iterator[pa.RecordBatch]:
        """The batches that are whole by now and that no earlier call gave, with the present names of states.

        Raises:
            EquilibriaError: if the stream has a newer major format, is not of this table, became shorter, or is no
                file of the run.
            OSError: if the file cannot be read.
        """
        if self._map is not None:
            yield from self._read(self._map)
            return
        check_own_file(self._path)
        size = self._path.stat().st_size
        if size < self._size:
            raise EquilibriaError(f"{self._path.name} became shorter: the run was replaced or damaged")
        if size == self._size or self._fault:
            return
        data = FileBytes(self._path)
        try:
            yield from self._read(data)
        finally:
            data.close()

    def _read(self, data: Bytes) -> Iterator[pa.RecordBatch]:
        self._size = data.size
        self.is_torn = False
        if not self._has_begun:
            self._read_schema(data)
        while self._has_begun and not self._fault:
            block = block_at(data, self._position)
            if block is not None and (block.is_whole or not self.is_checked):
                batch = self._decoded(data, block)
                if batch is not None:
                    yield batch
                continue
            self._is_last_damaged = block is not None
            if not self.is_checked or not self._skip_damage(data):
                break
        self.is_closed = is_end(data, self._position)
        self.is_torn = not self.is_closed and self._position < data.size

    def _skip_damage(self, data: Bytes) -> bool:
        """Go on at the next whole block; False if there is none: the stream ends, or its writer is at work."""
        if self._position == data.size or is_end(data, self._position):
            return False
        following = next_block(data, self._position + 8)
        if following is None:
            return False
        self._gaps.append(_Gap(following - self._position, self._last_step))
        self._position = following
        return True

    def _read_schema(self, data: Bytes) -> None:
        block = block_at(data, 0)
        if block is not None and block.kind == SCHEMA and block.is_whole is not False:
            try:
                schema = pa.ipc.read_schema(data.buffer(0, block.end))
            except (pa.ArrowException, OSError) as error:
                self._fault = str(error)
                return
            version = _check_schema(schema, self._path.name, self._table)
            if block.is_whole or version < CHECKED_SINCE:
                self._use(schema)
                self.is_checked = bool(block.is_whole)
                self.description = _json((schema.metadata or {}).get(_RUN))
                self._source.add(data.buffer(0, block.end))
                self._position, self._has_begun = block.end, True
                return
        following = next_block(data, 8) if data.size else None
        if following is not None:  # only the schema is damaged: the batches say whether they have the usual columns
            self._source.add(self.schema.serialize())
            self._gaps.append(_Gap(following, None))
            self._position, self._has_begun = following, True

    def _use(self, schema: pa.Schema) -> None:
        self.schema, self._digest = schema, _digest(schema)
        # Columns with indices or offsets: a wrong one would be read out of bounds.
        self._indirect = [place for place, kind in enumerate(schema.types) if not pa.types.is_primitive(kind)]

    def _decoded(self, data: Bytes, block: Block) -> pa.RecordBatch | None:
        """The rows of a block; None if it has none, or cannot be decoded."""
        self._position = block.end
        try:
            self._source.add(data.buffer(block.start, block.end))
            if self._stream is None:
                self._stream = pa.ipc.open_stream(self._source)
            batch, metadata = self._stream.read_next_batch_with_custom_metadata()
            self._check_batch(batch, metadata or {})
        except (pa.ArrowException, OSError, StopIteration) as error:
            if not self.is_checked:
                self._fault = str(error)
                self._position = block.start
                return None
            self._source, self._stream = _Source(), None  # each block has all that it needs: begin again after it
            self._source.add(self.schema.serialize())
            self._gaps.append(_Gap(block.end - block.start, self._last_step))
            return None
        if batch.num_rows == 0:
            self.ending = _json((metadata or {}).get(_ENDING))
            return None
        self._rows += batch.num_rows
        if "step" in batch.schema.names:
            steps = batch["step"]
            for gap in reversed(self._gaps):
                if gap.before is not None:
                    break
                gap.before = steps[0].as_py()
            self._last_step = steps[-1].as_py()
        return _with_present_states(batch) if self._table == SAMPLES and not self.is_checked else batch

    def _check_batch(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> None:
        """Raise if the batch would crash its reader, or hide the rows of others, or has other columns."""
        batch.validate()
        for place in self._indirect:
            batch.column(place).validate(full=True)
        if any(batch[name].null_count for name in self._required):
            raise pa.ArrowInvalid("a row without step or parameter")
        if self.is_checked and metadata.get(_FIELDS) != self._digest:
            raise pa.ArrowInvalid("the columns are not those of the schema")
        steps = metadata.get(_STEPS)
        if steps is not None and steps != b"%08x" % zlib.crc32(batch["step"].to_numpy()):
            raise pa.ArrowInvalid("the steps do not match their checksum")


class _Source:
    """File-like view of some buffers, one after the other: Arrow reads on once another has been added."""

    closed = False

    def __init__(self) -> None:
        self._buffers: list[pa.Buffer] = []
        self._position = self._place = 0

    def add(self, buffer: pa.Buffer) -> None:
        self._buffers.append(buffer)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> pa.Buffer:  # Arrow prefers it for what is large: no copy of a mapped file
        while self._buffers and self._place == self._buffers[0].size:
            self._place = 0
            del self._buffers[0]
        if not self._buffers:
            return pa.py_buffer(b"")
        left = self._buffers[0].size - self._place
        buffer = self._buffers[0].slice(self._place, left if size < 0 else min(size, left))
        self._place += buffer.size
        self._position += buffer.size
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


def _json(text: bytes | None) -> dict[str, Any] | None:
    """An object from the metadata of a stream, None if there is none."""
    try:
        content = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _digest(schema: pa.Schema) -> bytes:
    """Names and types of the columns as a number."""
    return b"%08x" % zlib.crc32("\n".join(f"{field.name}: {field.type}" for field in schema).encode())


def _check_schema(schema: pa.Schema, name: str, table: TableName | None) -> tuple[int, int]:
    """The version of the stream; raises if it cannot be read as this table."""
    try:
        names = schema.names
    except UnicodeDecodeError:
        raise EquilibriaError(f"{name}: the names of its columns are damaged") from None
    version = (schema.metadata or {}).get(FORMAT_KEY)
    numbers = check_format(version.decode("ascii", "replace") if version else None, where=name)
    for column in TABLES[table] if table else ():
        if not column.nullable:
            kind = schema.field(names.index(column.name)).type if column.name in names else "none"
            if kind != column.type:
                raise EquilibriaError(f"{name}: got column {column.name} of type {kind}; expected {column.type}")
    return numbers
