"""Runs that are still open when the interpreter exits are closed then, the latest first."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None:
        """Finish."""


_open: weakref.WeakValueDictionary[int, _Closable] = weakref.WeakValueDictionary()


def close_at_exit(run: _Closable) -> None:
    """Close a run when the interpreter exits, if it still exists."""
    if not _open:
        atexit.register(_close_all)
    _open[id(run)] = run


def is_closed(run: _Closable) -> None:
    """Forget a run; once all are closed, nothing is left to do at exit."""
    _open.pop(id(run), None)
    if not _open:
        atexit.unregister(_close_all)


def _close_all() -> None:
    for run in reversed(list(_open.values())):
        run.close()
