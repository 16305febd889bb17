"""Read what was appended to a run since the last look, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

import pyarrow as pa

from equilibria.errors import EquilibriaError
from equilibria.records._segment import _check_batch, _check_schema, _required, segment_paths
from equilibria.records.tables import TABLES

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, as the Arrow format has it


class _Growing:
    """A file that ends, for who reads it, where its last whole message does; Arrow asks on when there is more."""

    closed = False

    def __init__(self) -> None:
        self.at = self.limit = 0
        self.file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        if self.file is None:
            return b""
        left = self.limit - self.at
        found = self.file.read(left if size < 0 else min(size, left))
        self.at += len(found)
        return found

    def close(self) -> None:
        self.closed = True


class SegmentTail:
    """One Arrow stream that may be growing.

    Attributes:
        note: what is wrong with what was read so far; "" if nothing is.
    """

    def __init__(self, path: Path, *, table: str) -> None:
        self.note = ""
        self._path, self._table = path, table
        self._size = 0
        self._bytes = _Growing()
        self._stream: pa.RecordBatchReader | None = None
        self._broken = False

    def read(self) -> Iterator[pa.RecordBatch]:
        """The batches that are whole by now and were not given before.

        Raises:
            EquilibriaError: the file is of a newer format, became shorter, or is no regular file.
            OSError: it cannot be read.
        """
        stat = self._path.stat()
        if not S_ISREG(stat.st_mode):  # opening a pipe would wait for ever
            raise EquilibriaError(f"{self._path.name} is not a file")
        size = stat.st_size
        if size < self._size:
            raise EquilibriaError(f"{self._path.name} became shorter: the run was replaced or damaged")
        if size == self._size or self._broken:
            return
        self._size = size
        self._find_limit()
        with self._path.open("rb") as file:
            file.seek(self._bytes.at)
            self._bytes.file = file
            try:
                yield from self._batches()
            finally:
                self._bytes.file = None

    def _find_limit(self) -> None:
        """Where the last whole message ends; a writer may be in the middle of the next one."""
        ended = False
        with pa.OSFile(str(self._path)) as source:
            source.seek(self._bytes.limit)
            try:
                while True:
                    pa.ipc.read_message(source)
                    self._bytes.limit = source.tell()
            except EOFError:
                source.seek(self._bytes.limit)
                ended = source.read(len(_END)) in (_END, b"")
            except (pa.ArrowException, OSError):
                pass
        left = self._size - self._bytes.limit
        self.note = "" if ended else f"{self._path.name}: last batch incomplete, {left:,} bytes left out"

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if self._bytes.limit == 0:
            return
        try:
            if self._stream is None:
                self._stream = pa.ipc.open_stream(self._bytes)
                _check_schema(self._stream.schema, self._path.name, self._table)
            while True:
                found = self._stream.read_next_batch_with_custom_metadata()
                _check_batch(found.batch, found.custom_metadata, _required(self._table))
                yield found.batch
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            self._broken = True
            self.note = f"{self._path.name}: damaged after byte {self._bytes.at:,}, the rest is left out ({error})"


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """A batch, and the session that it is of."""

    table: str
    session: int
    batch: pa.RecordBatch


class RunTail:
    """All streams of a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments: dict[tuple[str, int], SegmentTail] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with them, as sentences; a writer may be about to complete the last batch of the last one."""
        return tuple(segment.note for segment in self._segments.values() if segment.note)

    def read(self) -> Iterator[Appended]:
        """What was appended, session by session."""
        for table in TABLES:
            for session, path in segment_paths(self._directory, table=table).items():
                segment = self._segments.setdefault((table, session), SegmentTail(path, table=table))
                for batch in segment.read():
                    yield Appended(table, session, batch)

    def updated(self) -> float | None:
        """When something was last written, in seconds since 1970; None if nothing was yet."""
        files = [path for table in TABLES for path in segment_paths(self._directory, table=table).values()]
        return max((path.stat().st_mtime for path in files), default=None)
