"""Child processes that end with their parent: started out of reach of Ctrl-C, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

SPAWN = multiprocessing.get_context("spawn")  # a forked child of a process that has used torch's threads may hang
SECONDS_TO_END = 5.0


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A process started meanwhile never gets Ctrl-C, not even while it imports; this one gets it a moment later.

    It is for the parent to end its children, without a traceback from each.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield  # on Windows, or where no Ctrl-C arrives
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    held: list[int] = []  # another thread of this process, a library's, may take the signal in place of this one
    handler = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held:
            signal.raise_signal(signal.SIGINT)


def end_process(connection: Connection, process: BaseProcess) -> None:
    """Close the connection and wait for the process; one that does not end is killed."""
    connection.close()
    process.join(SECONDS_TO_END)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
