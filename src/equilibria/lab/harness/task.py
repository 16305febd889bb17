"""What a task may ask for while it runs: a folder that survives a kill, somebody to tell how far it is, a device."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from equilibria.errors import EquilibriaError, whole
from equilibria.records._lock import RunLock

_SECONDS_BETWEEN = 1.0  # two words about progress
_PREFIX = "equilibria-task-"


class _Workplace:
    """The folder of one task, made when it is asked for; one that cannot be had is replaced by a temporary one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._had: Path | None = None

    @property
    def progress_file(self) -> Path:
        return progress_file(self._folder)

    def has_room(self) -> bool:
        """Whether the results are on this machine; on another one nothing is strewn about."""
        if not self._folder.parent.parent.is_dir():
            return False
        with contextlib.suppress(OSError):
            self._folder.parent.mkdir(exist_ok=True)
        return self._folder.parent.is_dir()

    def folder(self) -> Path:
        if self._had is None:
            self._had = self._take() if self.has_room() else self._temporary()
        return self._had

    def _take(self) -> Path:
        try:
            self._folder.mkdir(exist_ok=True)
            self._stack.callback(RunLock(self._folder).release)
        except (OSError, EquilibriaError):  # a cluster took a slow worker for a dead one and gave its task away
            return self._temporary()
        return self._folder

    def _temporary(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))


_HERE: ContextVar[_Workplace | None] = ContextVar("workplace", default=None)
_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")


@contextmanager
def workplace(folder: str | Path, *, device: str = "cpu") -> Iterator[None]:
    """Within it, `scratch` is this folder and `tell_progress` writes beside it, only if they are used, and `device`."""
    with ExitStack() as stack:
        token, held = _HERE.set(_Workplace(Path(folder), stack)), _DEVICE.set(device)
        try:
            yield
        finally:
            _HERE.reset(token)
            _DEVICE.reset(held)


def device() -> str:
    """Where networks are to be trained, such as "cuda"; "cpu" unless somebody asked for another."""
    return _DEVICE.get()


def scratch() -> Path:
    """The folder of the task that runs, for checkpoints and records.

    It is found again when the task is run again after a kill, and removed when the task is done. Outside of a task it
    is a new temporary folder, which goes when the process ends.
    """
    here = _HERE.get()
    if here is not None:
        return here.folder()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def tell_progress(total: int) -> Callable[[int], None]:
    """Gives the function to call with the number of steps done, as often as one likes; nobody needs to listen.

    Args:
        total: steps of the whole task.
    """
    here = _HERE.get()
    whole("total", total, low=1)
    if here is None or not here.has_room():
        return lambda done: None
    file, last = here.progress_file, -_SECONDS_BETWEEN

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN:
            last = now
            with contextlib.suppress(OSError):  # it is only progress
                _write(file, f"{done} {total}")

    return tell


def _write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}-{os.getpid()}")
    beside.write_text(text, encoding="ascii")
    beside.replace(file)


def progress_file(folder: Path) -> Path:
    """Where the task with this folder tells how far it is."""
    return folder.with_name(f"{folder.name}.progress")


def read_progress(file: Path) -> float:
    """The share of the task that is done; 0 where nothing is known."""
    try:
        done, total = map(int, file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 0.0
    return min(done / total, 1.0) if total > 0 else 0.0
