"""How far the tasks under way are: read from the files that they write, now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from equilibria.lab.harness.task import read_progress

_SECONDS = 1.0


class UnderWay:
    """Tells every second, from a thread of its own, how much of the tasks under way is done.

    Args:
        files: of the tasks, by name; `finished` takes one off.
        tell: called with the sum over tasks of the share that is done.
        seconds: from one look to the next.
    """

    def __init__(self, files: Mapping[str, Path], tell: Callable[[float], None], *, seconds: float = _SECONDS) -> None:
        self._files, self._tell, self._seconds = dict(files), tell, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="equilibria-progress", daemon=True)

    def finished(self, name: str) -> None:
        """This task is counted elsewhere from now on."""
        self._files.pop(name, None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._seconds):
            self._tell(sum(read_progress(file) for file in list(self._files.values())))
