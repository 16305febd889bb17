"""Recording: a run directory that receives a monitor's samples."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from equilibria.errors import EquilibriaError, warn_in_training
from equilibria.records import RecordWarning, RecordWriter
from equilibria.records._at_exit import forget
from equilibria.records._lock import RunLock
from equilibria.records._manifest import find_manifest
from equilibria.records.tables import SAMPLES, TableName

_FLUSH_SECONDS = 1.0  # that a kill may lose
_LOAD_STATE = "To append to the first, load the monitor's state (monitor.load_state_dict) before training goes on"


def is_first_process() -> bool:
    """Whether this process writes: in a distributed training all processes measure, and the first one writes."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _find_run(log_dir: Path, record: Mapping[str, Any]) -> Path | None:
    """The directory of the run that a checkpoint belongs to, ``log_dir`` or a numbered one; None if it is not there.

    A second run with the same ``log_dir`` is recorded into ``runs/a-2``, so the name alone does not identify a run.

    Args:
        log_dir: the directory that the user asked for.
        record: the result of `Recording.state_dict` when the checkpoint was saved.
    """
    pattern = re.compile(re.escape(log_dir.name) + r"(-\d+)?")
    siblings = log_dir.parent.iterdir() if log_dir.parent.is_dir() else ()
    numbered = sorted(path for path in siblings if pattern.fullmatch(path.name))
    same = [path for path in numbered if record and _run_id(path) == record["id"]]
    # of several copies, the one with the recorded name
    return min(same, key=lambda path: path.name != Path(record["directory"]).name, default=None)


def _run_id(directory: Path) -> str | None:
    with contextlib.suppress(OSError, EquilibriaError):  # damaged, or no run: not the one that is looked for
        manifest = find_manifest(directory)
        return None if manifest is None else manifest.id
    return None


class Recording:
    """Writes samples into a run directory.

    If the directory holds a run already, samples are appended to it if the monitor was resumed from a checkpoint of
    that run. Otherwise a new run goes into a numbered directory (``runs/a-2``): a script run twice destroys nothing.

    Args:
        directory: where to record; created if absent.
        describe: returns the metadata of the run.
        count_steps: returns the steps taken so far: the samples do not tell how many followed the last of them.
        advice: for the warning that the directory holds a run already: how to append to it.

    Raises:
        EquilibriaError: if another process records there, or the directory holds other files or cannot be written.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        describe: Callable[[], Mapping[str, Any]],
        count_steps: Callable[[], int],
        advice: str = _LOAD_STATE,
    ) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise EquilibriaError(f"got log_dir={directory!r}; expected the path of a directory", argument="log_dir")
        self._advice = advice
        self._requested, self._describe, self._count_steps = Path(directory), describe, count_steps
        self._writer: RecordWriter | None = None
        self._is_closed = False
        self._final_metadata: list[Callable[[], Mapping[str, Any]]] = []
        self._append_waiting: Callable[[], bool] | None = None
        self._resumes = False
        self._last_step: int | None = None  # of the samples so far, those before a checkpoint included
        self._resumed_at: int | None = None
        if _holds_a_run(self._requested):
            _check_no_writer(self._requested)
        else:
            self._writer = self._begin(self._requested)

    @property
    def directory(self) -> Path:
        """The directory of the samples, or of those to come."""
        if self._writer is not None:
            return self._writer.directory
        return self._requested if self._resumes else _next_free(self._requested)

    @property
    def resumes(self) -> bool:
        """Whether rows are appended to the run that a checkpoint belongs to."""
        return self._resumes

    @property
    def failure(self) -> str | None:
        """The error that stopped the writing, or None."""
        return None if self._writer is None else self._writer.failure

    @property
    def is_open(self) -> bool:
        """Whether rows can be written without beginning a record."""
        return self._writer is not None and not self._is_closed

    def state_dict(self) -> dict[str, Any]:
        """Which record a checkpoint belongs to, and how far it goes; empty if there is no record yet.

        Hands all rows to the operating system first: the record is then as durable as the checkpoint. If that fails,
        ``failure`` says why, and nothing is raised: a checkpoint without a record is better than none.
        """
        failure = None
        try:
            self.flush()
        except Exception as error:  # of any kind: a checkpoint must not fail because of the record
            failure = str(error)
        run_id = _run_id(self.directory)
        if run_id is None:
            return {}
        record = {"directory": str(self.directory), "id": run_id, "after": self._last_step}
        failure = self.failure or failure
        return record if failure is None else {**record, "failure": failure}

    def resume_from(self, record: Mapping[str, Any], *, step: int) -> None:
        """Append to the run that a checkpoint belongs to; if it is not there, record into a numbered directory.

        Args:
            record: the result of `state_dict` when the checkpoint was saved.
            step: the first step after the checkpoint.

        Raises:
            EquilibriaError: if another process records into that run.
        """
        if self._writer is not None:  # a new directory: nothing to append to
            return
        directory = _find_run(self._requested, record)
        if directory is None:
            whose = f"the run in {record['directory']}" if record else "a run that was not recorded"
            self._advice = f"The checkpoint that was loaded is of {whose}"
        else:
            _check_no_writer(directory)
            self._requested, self._resumes = directory, True
            self._last_step, self._resumed_at = record.get("after"), step

    def add_final_metadata(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Add metadata that is known only when the recording is closed."""
        self._final_metadata.append(describe)

    def collect(self, append_waiting: Callable[[], bool]) -> None:
        """Call a function about once a second, in another thread: it may append rows, and returns whether it did."""
        self._append_waiting = append_waiting
        if self._writer is not None:
            self._writer.collect(append_waiting)

    def append(self, columns: Mapping[str, Any], *, table: TableName = SAMPLES) -> None:
        """Add rows to a table."""
        if self._writer is None:
            self._writer = self._open()
        self._writer.append(columns, table=table)
        if table == SAMPLES and len(columns["step"]):
            self._last_step = int(columns["step"][-1])

    def flush(self) -> None:
        """Write all rows so far to the disk."""
        if self._writer is not None and not self._is_closed:
            self._writer.flush()

    def close(self) -> None:
        """Write the last rows and the final metadata, and release the directory."""
        self._is_closed = True
        if self._writer is not None:
            final = {name: value for describe in self._final_metadata for name, value in describe().items()}
            self._writer.close(metadata={**final, "steps": self._count_steps()})

    def _open(self) -> RecordWriter:
        if self._resumes:
            return self._begin(self._requested, resume=True)
        writer = self._begin_numbered()
        sentence = f"{self._requested} holds a run already; this one is recorded into {writer.directory}"
        warn_in_training(". ".join(filter(None, [sentence, self._advice])), RecordWarning)
        return writer

    def _begin_numbered(self) -> RecordWriter:
        while True:
            directory = _next_free(self._requested)
            try:
                return self._begin(directory)
            except EquilibriaError:
                if not directory.exists():
                    raise
                # another run, started at the same time, has taken this number

    def _begin(self, directory: Path, *, resume: bool = False) -> RecordWriter:
        with _naming_log_dir():
            writer = RecordWriter(
                directory,
                metadata=self._describe(),
                resume=resume,
                flush_seconds=_FLUSH_SECONDS,
                after=self._last_step if resume else None,
                resumed_at=self._resumed_at if resume else None,
            )
        # At exit the monitor closes it, after the last samples. The writer itself would close before they come.
        forget(writer)
        if self._append_waiting is not None:
            writer.collect(self._append_waiting)
        return writer


def _next_free(directory: Path) -> Path:
    """The first name that does not exist: runs/a-2, runs/a-3, ..."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def _naming_log_dir() -> Iterator[None]:
    """Give an error about the directory the name of the argument that users typed."""
    try:
        yield
    except EquilibriaError as error:
        error.argument = "log_dir"
        raise


def _check_no_writer(directory: Path) -> None:
    try:
        with _naming_log_dir():
            RunLock(directory).release()
    except OSError as error:
        raise EquilibriaError(f"cannot record into {directory}: {error.strerror}", argument="log_dir") from error


def _holds_a_run(directory: Path) -> bool:
    try:
        return find_manifest(directory) is not None
    except NotADirectoryError:
        raise EquilibriaError(
            f"got log_dir={str(directory)!r}, which is a file; expected a directory", argument="log_dir"
        ) from None
    except OSError as error:
        raise EquilibriaError(
            f"got log_dir={str(directory)!r}, which cannot be read: {error.strerror}", argument="log_dir"
        ) from error
