"""One writer per run directory: an advisory lock that the system takes back when its process dies.

Where the file system has no such lock, the process id in the lock file is asked instead: a living process on this
machine is refused, anything else is let through (`RunLock.certain` is then False). Two writers still cannot damage
each other's samples, since each has a file of its own.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from equilibria.errors import EquilibriaError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "writer.lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_alive_here(self) -> bool:
        """Whether it runs on this machine; False if that cannot be known."""
        # Windows has no signal that only asks: os.kill(pid, 0) would interrupt the process.
        if self.host != socket.gethostname() or sys.platform == "win32":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it runs, and belongs to somebody else
            return True
        return True


class RunLock:
    """Held from construction to `release`.

    Attributes:
        certain: False where the file system has no locks, so that another machine's writer goes unseen.

    Raises:
        EquilibriaError: if another writer holds it; the message names the directory and the process.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self.certain = self._acquire(self._file)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def release(self) -> None:
        """Let the next writer in; a second call does nothing. The file stays: removing it would race with a writer."""
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, 0)
            self._close()

    def _acquire(self, file: int) -> bool:
        free = _flock(file)
        if free is None and not self._named_holder_lives():
            return False
        if not free:
            holder = self._holder() or "another process"
            own = isinstance(holder, Holder) and holder.pid == os.getpid() and holder.host == socket.gethostname()
            beside = " (a tracker records into the directory of equilibria.watch by beside=monitor)" if own else ""
            raise EquilibriaError(
                f"{self._path.parent} is being recorded by {holder}{', this one' if own else ''}; close that run, or "
                f"choose another directory{beside}"
            )
        return True

    def _named_holder_lives(self) -> bool:
        holder = self._holder()
        if holder is None:
            return False
        if holder.pid == os.getpid():  # in a container a restarted process may get its predecessor's number
            return any(lock._file is not None and lock._path == self._path for lock in _held)
        return holder.is_alive_here()

    def _holder(self) -> Holder | None:
        try:
            pid, host = self._path.read_text(encoding="utf-8").split()
            return Holder(int(pid), host)
        except (OSError, ValueError):  # empty between the lock and the name
            return None

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)


def _flock(file: int) -> bool | None:
    """True if this call took the lock, False if somebody else has it, None if there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) shares the lock and would keep it after its parent is killed."""
    for lock in list(_held):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
