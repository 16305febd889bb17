"""Append samples to a run directory, and never stop training because of it."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from equilibria.errors import EquilibriaError, one_of, positive, warn_in_training
from equilibria.records._at_exit import close_at_exit, forget
from equilibria.records._batches import Column, to_batch
from equilibria.records._lock import LOCK_FILE, RunLock
from equilibria.records._manifest import (
    TEMPORARY,
    Manifest,
    Session,
    check_metadata,
    find_manifest,
    now,
    write_manifest,
)
from equilibria.records._segment import SegmentWriter, all_segments, segment_name
from equilibria.records.tables import FORMAT, SAMPLES, TABLES, TableName

_MOST_ROWS = 65_536  # about 10 MB in memory


class RecordWarning(UserWarning):
    """Recording has stopped, or a second writer could go unnoticed; training goes on."""


class RecordWriter:
    """Appends samples to a run directory.

    `append` keeps rows in memory; a thread writes them once the oldest is ``flush_seconds`` old, also while training
    pauses. Written rows survive ``kill -9``; a crash of the whole machine may cost the last half minute or so, see
    `SegmentWriter`. If the disk is full or goes away, recording stops and the next call gives one `RecordWarning`. The
    interpreter closes an open writer when it exits. In a forked child the writer does nothing. Its methods may be
    called from several threads and from signal handlers.

    Args:
        directory: the run directory; created if absent.
        metadata: anything JSON can hold; recorded with this session.
        resume: append a session to the run in the directory (or begin one if there is none). If its steps begin below
            those of earlier sessions, readers take the later session's.
        flush_seconds: the longest time that a sample stays in memory only, in seconds.
        after: the last step sampled before this session, where the caller knows it from a checkpoint: readers then
            notice if samples before this session are missing.
        resumed_at: the first step of this session, from the same checkpoint: readers then leave out what earlier
            sessions recorded from this step on.

    Raises:
        EquilibriaError: if the directory holds a run and ``resume`` is False, holds other files, is locked by another
            writer, or cannot be written.

    Example:
        >>> import tempfile
        >>> from equilibria.records import RecordWriter, read_record
        >>> directory = tempfile.TemporaryDirectory()
        >>> with RecordWriter(directory.name, metadata={"model": "digits"}) as writer:
        ...     writer.append({"step": [0, 0], "param": ["conv1", "conv2"], "norm": [1.0, 2.0]})
        >>> record = read_record(directory.name)
        >>> record.metadata, record.samples(["param", "norm"]).to_pylist()[1]
        ({'model': 'digits'}, {'param': 'conv2', 'norm': 2.0})
        >>> directory.cleanup()
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        metadata: Mapping[str, Any],
        resume: bool = False,
        flush_seconds: float = 5.0,
        after: int | None = None,
        resumed_at: int | None = None,
    ) -> None:
        self._flush_seconds = positive("flush_seconds", flush_seconds)
        kept = check_metadata(metadata)
        self._directory = Path(directory)
        self._pid = os.getpid()
        self._buffer_lock = threading.RLock()  # re-entrant: a signal handler may close while the main thread appends
        self._write_lock = threading.RLock()  # apart from the other, so that append does not wait for the disk
        self._pending: dict[TableName, list[pa.RecordBatch]] = {}
        self._rows = 0
        self._oldest = 0.0
        self._failure: str | None = None
        self._warned = False
        self._closed = False
        self._ended = threading.Event()
        self._append_waiting: Callable[[], bool] | None = None
        try:
            self._open(kept, resume=resume, after=after, resumed_at=resumed_at)
        except OSError as error:
            raise EquilibriaError(f"cannot record into {directory}: {_reason(error)}") from error
        self._thread = threading.Thread(target=self._flush_on_time, name="equilibria-record", daemon=True)
        self._thread.start()
        close_at_exit(self)
        if not self._lock.certain:
            self._warn(f"{directory} is on a file system without locks: a second writer may go unnoticed")

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory

    @property
    def failure(self) -> str | None:
        """Why recording has stopped, or None."""
        return self._failure

    def append(self, columns: Mapping[str, Column], *, table: TableName = SAMPLES) -> None:
        """Add rows; copies the values.

        Args:
            columns: name -> values, all of one length; ``step`` and ``param`` are required, other columns of the
                sample table may be absent and are then null.
            table: "samples"; or "sharpness" or "metrics", which have other columns.

        Raises:
            EquilibriaError: if the columns do not fit the table, or the writer is closed.
        """
        one_of("table", table, TABLES)
        if not self._is_active():
            return
        batch = to_batch(columns, table=table)
        with self._buffer_lock:
            if batch.num_rows and not self._pending:
                self._oldest = time.monotonic()
            if batch.num_rows:
                self._pending.setdefault(table, []).append(batch)
            self._rows += batch.num_rows
            full = self._rows >= _MOST_ROWS
        if full:
            self._write_pending()
        self._warn_if_stopped()

    def collect(self, append_waiting: Callable[[], bool]) -> None:
        """Call a function every ``flush_seconds``, in the writer's thread: it may append rows that wait elsewhere.

        Args:
            append_waiting: returns whether it has appended any; they are then written at once.
        """
        self._append_waiting = append_waiting

    def flush(self) -> None:
        """Write all rows in memory; once this returns, ``kill -9`` no longer loses them (unless `failure` is set)."""
        if self._is_active():
            self._write_pending()
            self._warn_if_stopped()

    def close(self, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write all rows in memory, end the session and release the lock; a second call does nothing.

        Args:
            metadata: added to that of this session, for values that are known only at its end.
        """
        final_metadata = check_metadata(metadata or {})
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ended.set()
        forget(self)
        with self._write_lock:
            self._write_pending()
            if self._failure is None:
                self._end_session(final_metadata)
            for segment in self._segments.values():
                segment.abandon()
            self._lock.release()
        self._warn_if_stopped()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, metadata: dict[str, Any], *, resume: bool, after: int | None, resumed_at: int | None) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        _check_no_other_files(self._directory)
        self._lock = RunLock(self._directory)
        try:
            before = find_manifest(self._directory)
            if before is not None and not resume:
                raise EquilibriaError(
                    f"{self._directory} already holds a run; pass resume=True to append to it, "
                    "or choose another directory"
                )
            known = before.sessions if before else ()  # a session killed early has no file; a moved file has no session
            files = [number for numbers in all_segments(self._directory).values() for number in numbers]
            number = max(len(known), max(files, default=-1) + 1)
            host = socket.gethostname()
            session = Session(segment_name(number), now(), None, self._pid, host, metadata, after, resumed_at)
            begun = before or Manifest(uuid.uuid4().hex, FORMAT, session.started, session.started, ())
            self._manifest = begun.begin(session)
            write_manifest(self._directory, self._manifest)
            self._number = number
            self._segments: dict[TableName, SegmentWriter] = {}
            self._segment_of(SAMPLES)
        except BaseException:
            self._lock.release()
            raise

    def _is_active(self) -> bool:
        if os.getpid() != self._pid:
            return False
        if self._closed:
            raise EquilibriaError(f"the writer of {self._directory} is closed; make a new one with resume=True")
        self._warn_if_stopped()
        return self._failure is None

    def _write_pending(self) -> None:
        with self._write_lock:
            with self._buffer_lock:
                pending, self._pending, self._rows = self._pending, {}, 0
            if pending and self._failure is None:
                try:
                    for table, batches in pending.items():
                        self._segment_of(table).write(batches)
                except (OSError, pa.ArrowException) as error:
                    self._stop(error)

    def _segment_of(self, table: TableName) -> SegmentWriter:
        if table not in self._segments:
            name = segment_name(self._number, table=table)
            description = self._manifest.describe_last()
            self._segments[table] = SegmentWriter(self._directory / name, table=table, description=description)
        return self._segments[table]

    def _end_session(self, metadata: dict[str, Any]) -> None:
        try:
            rows = {table: segment.rows for table, segment in self._segments.items()}
            ending = {"ended": now(), "rows": rows, "metadata": metadata}
            for segment in self._segments.values():
                segment.close(ending)
            write_manifest(self._directory, self._manifest.end(ending))
        except (OSError, pa.ArrowException) as error:
            self._stop(error)

    def _flush_on_time(self) -> None:
        while not self._ended.wait(self._seconds_left()):
            try:
                has_more = self._append_waiting is not None and self._append_waiting()
            except Exception as error:
                if not self._closed:
                    self._stop(error)
                return
            if has_more or self._seconds_left() <= 0:
                self._write_pending()

    def _seconds_left(self) -> float:
        """Time until the oldest row is due. Without rows, none can be due before ``flush_seconds`` have passed."""
        with self._buffer_lock:
            if not self._pending:
                return self._flush_seconds
            return max(0.0, self._oldest + self._flush_seconds - time.monotonic())

    def _stop(self, error: Exception) -> None:
        self._failure = _reason(error)
        self._ended.set()

    def _warn_if_stopped(self) -> None:
        if self._failure is not None and not self._warned:
            self._warned = True
            self._warn(
                f"recording into {self._directory} has stopped: {self._failure}; training goes on, and the samples "
                "written before can be read"
            )

    def _warn(self, message: str) -> None:
        warn_in_training(message, RecordWarning)


def _check_no_other_files(directory: Path) -> None:
    """Raise if a directory holds files and no run: mixed with a run, nobody could tell which files may be deleted."""
    names = {path.name for path in directory.iterdir()} - {LOCK_FILE, TEMPORARY}
    if names and find_manifest(directory) is None:
        raise EquilibriaError(
            f"{directory} holds other files ({', '.join(sorted(names)[:3])}) and no run; choose a new directory"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)
