"""Services for a running task: a scratch folder that survives a kill, progress, a device, and training in them.

`task_context` sets them up around a task; the task calls `scratch`, `progress_reporter`, `device`, `train_in_task` and
`train_branches`. The process that waits for the tasks reads their progress with a `ProgressPoll`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from equilibria.errors import EquilibriaError, whole
from equilibria.records._lock import RunLock

if TYPE_CHECKING:
    from equilibria.lab.training import Recipe, Trained

_SECONDS_BETWEEN_WRITES = 1.0
_SECONDS_BETWEEN_POLLS = 1.0
_PREFIX = "equilibria-task-"


class _TaskFolder:
    """The scratch folder of one task, created on first use; replaced by a temporary one if it cannot be used."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._used: Path | None = None

    @property
    def progress_file(self) -> Path:
        return progress_file(self._path)

    def is_on_this_machine(self) -> bool:
        """Whether the results folder is on this machine; if not, nothing is written outside temporary folders."""
        if not self._path.parent.parent.is_dir():
            return False
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        return self._path.parent.is_dir()

    def path(self) -> Path:
        if self._used is None:
            self._used = self._lock() if self.is_on_this_machine() else self._temporary()
        return self._used

    def _lock(self) -> Path:
        try:
            self._path.mkdir(exist_ok=True)
            self._stack.callback(RunLock(self._path).release)
        except (OSError, EquilibriaError):  # a cluster took a slow worker for dead and gave its task to another
            return self._temporary()
        return self._path

    def _temporary(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))


_FOLDER: ContextVar[_TaskFolder | None] = ContextVar("folder", default=None)
_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")


@contextmanager
def task_context(folder: str | Path, *, device: str = "cpu") -> Iterator[None]:
    """Run a task with this scratch folder and device; the folder is created only if the task uses it."""
    with ExitStack() as stack:
        folder_token, device_token = _FOLDER.set(_TaskFolder(Path(folder), stack)), _DEVICE.set(device)
        try:
            yield
        finally:
            _FOLDER.reset(folder_token)
            _DEVICE.reset(device_token)


def device() -> str:
    """The device to train networks on, such as "cuda"; "cpu" unless `task_context` was given another."""
    return _DEVICE.get()


def scratch() -> Path:
    """The folder of the running task, for checkpoints and records.

    A task that is run again after a kill gets the same folder; it is removed when the task is done. Outside of a task
    this is a new temporary folder, removed when the process ends.
    """
    folder = _FOLDER.get()
    if folder is not None:
        return folder.path()
    path = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


# ---- progress


def progress_reporter(total: int) -> Callable[[int], None]:
    """Return a function to call with the number of steps done, as often as you like: it writes once per second.

    Args:
        total: steps of the whole task.
    """
    folder = _FOLDER.get()
    whole("total", total, low=1)
    if folder is None or not folder.is_on_this_machine():
        return lambda done: None
    file, last = folder.progress_file, -_SECONDS_BETWEEN_WRITES

    def report(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_WRITES:
            last = now
            with contextlib.suppress(OSError):  # progress is not worth failing for
                _replace(file, f"{done} {total}")

    return report


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    temporary.write_text(text, encoding="ascii")
    temporary.replace(file)


def progress_file(folder: Path) -> Path:
    """The file in which the task with this scratch folder writes its progress."""
    return folder.with_name(f"{folder.name}.progress")


def read_progress(file: Path) -> float:
    """The share of a task that is done; 0 if unknown."""
    try:
        done, total = map(int, file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 0.0
    return min(done / total, 1.0) if total > 0 else 0.0


class ProgressPoll:
    """Reads the progress files of unfinished tasks every second, in a thread, and reports their sum.

    Args:
        files: progress file of each task, by name; `finished` removes one.
        report: called with the sum over tasks of the share that is done.
        seconds: from one poll to the next.
    """

    def __init__(
        self, files: Mapping[str, Path], report: Callable[[float], None], *, seconds: float = _SECONDS_BETWEEN_POLLS
    ) -> None:
        self._files, self._report, self._seconds = dict(files), report, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="equilibria-progress", daemon=True)

    def finished(self, name: str) -> None:
        """Leave this task out from now on."""
        self._files.pop(name, None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(self._seconds):
            self._report(sum(read_progress(file) for file in list(self._files.values())))


# ---- training inside a task


def train_in_task(recipe: Recipe) -> Trained:
    """Train a recipe in the scratch folder, reporting progress; resumes after a kill."""
    from equilibria.lab.training import train

    return train(recipe, folder=scratch(), progress=progress_reporter(recipe.steps))


def train_branches(trunk: Recipe, branches: Mapping[str, Recipe], *, name: str = "before") -> dict[str, Trained]:
    """Train a trunk, then every branch from the trunk's last state to its own end.

    Args:
        trunk: the common part, up to the step where the branches part.
        branches: recipes by name, each of all steps from the first weights on.
        name: of the trunk in the result and in the scratch folder.
    """
    from equilibria.lab.training import train

    folder = scratch()
    report = progress_reporter(trunk.steps + sum(branch.steps - trunk.steps for branch in branches.values()))
    trained = {name: train(trunk, folder=folder / name, progress=report)}
    done = 0
    for branch, recipe in branches.items():
        trained[branch] = train(
            recipe,
            folder=folder / branch,
            start=trained[name].state,
            progress=lambda step, done=done: report(step + done),  # type: ignore[misc]
        )
        done += recipe.steps - trunk.steps
    return trained
