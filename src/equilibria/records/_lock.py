"""The lock that keeps a run directory to one writer, and whether that writer is alive.

The lock is advisory, and the system releases it when the process dies. Where the file system has no locks, the process
id in the lock file decides: a living process on this machine keeps others out, anything else does not
(`RunLock.certain` is then False). Two writers still cannot damage each other's samples, since each writes its own file.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from equilibria.errors import EquilibriaError
from equilibria.records._manifest import Session

LOCK_FILE = "writer.lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_LARGEST_PID = 2**31 - 1  # of the system's type
_SILENCE = 120  # seconds after which a writer on another machine, whose process cannot be checked, counts as gone
_LONG_SILENCE = 3600  # the same for a process on this machine whose start is unknown
_CLOCK_TOLERANCE = 10  # seconds between the clock of processes and that of records
_PROC = Path("/proc")
_NAME_PLACE = 1 if sys.platform == "win32" else 0  # there nobody else may read the first byte: it is what is locked
_LONGEST_NAME = 1000  # bytes


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_on_this_machine(self) -> bool:
        """Whether its host is this one."""
        return self.host == socket.gethostname()

    def is_alive_here(self) -> bool:
        """Whether it runs on this machine; False if that cannot be known."""
        # Windows has no signal that only probes: os.kill(pid, 0) would interrupt the process.
        if not self.is_on_this_machine() or sys.platform == "win32":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it runs, and belongs to another user
            return True
        return True


def read_holder(directory: Path) -> Holder | None:
    """The process that the lock file of a run directory names, None if it names none."""
    path = directory / LOCK_FILE
    try:
        if not path.is_file():  # opening a pipe would block
            return None
        with path.open("rb", buffering=0) as file:
            file.seek(_NAME_PLACE)
            pid, host = file.read(_LONGEST_NAME).decode("utf-8").split()
        number = int(pid)
    except (OSError, ValueError):  # empty after a release, and between the lock and the name
        return None
    return Holder(number, host) if 0 < number <= _LARGEST_PID else None  # 0 and below are groups of processes


class RunLock:
    """The lock of a run directory, from construction to `release`.

    Attributes:
        certain: False where the file system has no locks, so that a writer on another machine goes unnoticed.

    Raises:
        EquilibriaError: if another writer has it; the message names the directory and the process.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._pid = os.getpid()
        # In a forked child (a data loader's worker) filelock lets go: it would keep the lock after its parent's death.
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)
        self._is_held = False
        self.certain = self._acquire()
        try:
            self._write_name(f"{self._pid} {socket.gethostname()}\n")
        except BaseException:
            self._lock.release(force=True)
            raise
        self._is_held = True
        _locks.add(self)

    def release(self) -> None:
        """Let the next writer in; a second call does nothing. The file stays: removing it would race with a writer."""
        if self._is_held and os.getpid() == self._pid:
            self._is_held = False
            with suppress(OSError):
                self._write_name("")
            with suppress(OSError):
                self._lock.release(force=True)

    def _acquire(self) -> bool:
        """Whether the lock was taken; False if there are no locks here, and no living process is named."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if self._named_holder_lives():
                raise self._taken() from None
            return False
        return True

    def _taken(self) -> EquilibriaError:
        holder = read_holder(self._path.parent)
        own = holder is not None and holder.pid == os.getpid() and holder.is_on_this_machine()
        hint = " (a tracker records into the directory of equilibria.watch by monitor=monitor)" if own else ""
        return EquilibriaError(
            f"{self._path.parent} is being recorded by {holder or 'another process'}{', this one' if own else ''}; "
            f"close that run, or choose another directory{hint}"
        )

    def _named_holder_lives(self) -> bool:
        holder = read_holder(self._path.parent)
        if holder is None:
            return False
        if holder.pid == os.getpid():  # in a container a restarted process may get its predecessor's number
            return any(lock._is_held and lock._path == self._path for lock in _locks)
        return holder.is_alive_here()

    def _write_name(self, name: str) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(file, _NAME_PLACE)
            os.lseek(file, _NAME_PLACE, os.SEEK_SET)
            os.write(file, name.encode())
        finally:
            os.close(file)


_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


# ---- looking at a run from outside


def is_writer_alive(directory: Path, session: Session, *, last_write: float | None) -> bool:
    """Whether the process that records a session is alive, without trying its lock, which could keep a writer out.

    Args:
        directory: the run directory.
        session: its last session.
        last_write: when it last wrote samples, in seconds since 1970; None if it has written none.
    """
    holder = read_holder(directory)
    if holder is None or (holder.pid, holder.host) != (session.pid, session.host):
        return False
    silence = math.inf if last_write is None else time.time() - last_write
    if not holder.is_on_this_machine():
        return silence < _SILENCE
    if not holder.is_alive_here():
        return False
    if silence < _SILENCE:
        return True
    start = process_start(holder.pid)
    if start is None:
        return silence < _LONG_SILENCE
    # A process that began after the session has only inherited the number.
    return start <= datetime.fromisoformat(session.started).timestamp() + _CLOCK_TOLERANCE


def process_start(pid: int) -> float | None:
    """When a process began, in seconds since 1970, to about a second; None on systems other than Linux."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        lines = (_PROC / "stat").read_text(encoding="utf-8").splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all, after the name in parentheses
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return None
