"""What is still open when the interpreter exits is closed then, the latest first."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None:
        """Finish."""


_open: weakref.WeakValueDictionary[int, _Closable] = weakref.WeakValueDictionary()


def close_at_exit(run: _Closable) -> None:
    """Close an object when the interpreter exits, if it still exists and was not forgotten."""
    _open[id(run)] = run


def forget(run: _Closable) -> None:
    """Leave an object alone at exit, because it is closed or somebody else closes it."""
    _open.pop(id(run), None)


@atexit.register  # once: atexit keeps a slot for every function that it ever had
def _close_all() -> None:
    for run in reversed(list(_open.values())):
        run.close()
