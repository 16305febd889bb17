"""A run directory as a place where a monitor's samples go."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError, warn_caller
from equilibria.records import RecordWarning, RecordWriter
from equilibria.records._lock import RunLock
from equilibria.records._manifest import read_manifest
from equilibria.records.tables import SAMPLES, TableName


def record_at(directory: Path | None) -> dict[str, str]:
    """What a checkpoint keeps of the run that is recorded there; empty if there is none."""
    found = None if directory is None else _run_id(directory)
    return {} if found is None else {"directory": str(directory), "id": found}


def own_run(log_dir: Path, record: Mapping[str, str]) -> Path | None:
    """The directory of the run that a checkpoint is of: ``log_dir`` or one beside it; None if it is not there.

    A second run with the same ``log_dir`` was recorded beside it (``runs/a-2``), so the name alone does not tell.

    Args:
        log_dir: what was asked for.
        record: what `record_at` gave when the checkpoint was saved.
    """
    own = [each for each in _with_same_name(log_dir) if record and _run_id(each) == record["id"]]
    # of copies, the one of the same name
    return min(own, key=lambda each: each.name != Path(record["directory"]).name, default=None)


def _with_same_name(log_dir: Path) -> list[Path]:
    """It, and the numbered ones beside it."""
    pattern = re.compile(re.escape(log_dir.name) + r"(-\d+)?")
    beside = log_dir.parent.iterdir() if log_dir.parent.is_dir() else ()
    return sorted(each for each in beside if pattern.fullmatch(each.name))


def _run_id(directory: Path) -> str | None:
    with contextlib.suppress(OSError, EquilibriaError):  # damaged, or not a run's: not the one that is looked for
        manifest = read_manifest(directory)
        return None if manifest is None else manifest.id
    return None


_FLUSH_SECONDS = 1.0  # what a kill may lose
_LOAD_STATE = "To append to the first, load the monitor's state (monitor.load_state_dict) before training goes on"


class Recording:
    """Writes samples into a run directory.

    A run that the directory holds already is appended to if the monitor was resumed from a checkpoint of that run.
    Otherwise a new run goes into a directory beside it (``runs/a-2``): running a script a second time destroys nothing.

    Args:
        directory: where to record; created if absent.
        describe: gives the metadata of the run.
        count_steps: gives the steps taken so far: samples do not tell how many came after the last of them.
        advice: what to do to append to a run instead, for the warning; "" if it cannot be done.

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
        self._advice = advice
        self._asked, self._describe, self._count_steps = Path(directory), describe, count_steps
        self._writer: RecordWriter | None = None
        self._last_words: list[Callable[[], Mapping[str, Any]]] = []
        self._resumes = False
        if _holds_a_run(self._asked):
            _refuse_a_second_writer(self._asked)
        else:
            self._writer = self._begin(self._asked)

    @property
    def directory(self) -> Path:
        """Where the samples are, or will be."""
        if self._writer is not None:
            return self._writer.directory
        return self._asked if self._resumes else _beside(self._asked)

    @property
    def failure(self) -> str | None:
        """Why nothing is written any more, or None."""
        return None if self._writer is None else self._writer.failure

    def go_on_from(self, record: Mapping[str, str]) -> None:
        """Append to the run that a checkpoint is of; if it is not there, record beside what is, and say so.

        Args:
            record: what `record_at` gave when the checkpoint was saved.

        Raises:
            EquilibriaError: if another process records into that run.
        """
        if self._writer is not None:  # a new directory: nothing to append to
            return
        own = own_run(self._asked, record)
        if own is None:
            whose = f"the run in {record['directory']}" if record else "a run that was not recorded"
            self._advice = f"The checkpoint that was loaded is of {whose}"
        else:
            _refuse_a_second_writer(own)
            self._asked, self._resumes = own, True

    def tell_at_end(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Add to the metadata what is known only when the recording is closed."""
        self._last_words.append(describe)

    def append(self, columns: Mapping[str, Any], *, table: TableName = SAMPLES) -> None:
        """Take some rows of a table."""
        if self._writer is None:
            self._writer = self._open()
        self._writer.append(columns, table=table)

    def flush(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what waits, and let others in."""
        if self._writer is not None:
            told = {name: value for describe in self._last_words for name, value in describe().items()}
            self._writer.close(metadata={**told, "steps": self._count_steps()})

    def _open(self) -> RecordWriter:
        if self._resumes:
            return self._begin(self._asked, resume=True)
        writer = self._begin_beside()
        warn_caller(
            ". ".join(
                filter(
                    None,
                    [f"{self._asked} holds a run already; this one is recorded into {writer.directory}", self._advice],
                )
            ),
            RecordWarning,
        )
        return writer

    def _begin_beside(self) -> RecordWriter:
        while True:
            directory = _beside(self._asked)
            try:
                return self._begin(directory)
            except EquilibriaError:
                if not directory.exists():
                    raise
                # Another run, started at the same time, was quicker: the next number.

    def _begin(self, directory: Path, *, resume: bool = False) -> RecordWriter:
        writer = RecordWriter(directory, metadata=self._describe(), resume=resume, flush_seconds=_FLUSH_SECONDS)
        # At exit the run closes it, after the last samples. The writer would come first and shut them out.
        atexit.unregister(writer.close)
        return writer


def _beside(directory: Path) -> Path:
    """The first free name: runs/a-2, runs/a-3, ..."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def _refuse_a_second_writer(directory: Path) -> None:
    try:
        RunLock(directory).release()
    except OSError as error:
        raise EquilibriaError(f"cannot record into {directory}: {error.strerror}") from error


def _holds_a_run(directory: Path) -> bool:
    try:
        return read_manifest(directory) is not None
    except NotADirectoryError:
        raise EquilibriaError(f"got log_dir={str(directory)!r}, which is a file; expected a directory") from None
    except OSError as error:
        raise EquilibriaError(f"got log_dir={str(directory)!r}, which cannot be read: {error.strerror}") from error
