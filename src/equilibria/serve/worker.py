"""A thread for heavy work: one task at a time, so that the server takes a bounded share of the machine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class WorkerClosedError(Exception):
    """The server is shutting down: the work will not be done."""


class Worker:
    """Runs one task after the other in its own thread, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._closed = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def do(self, work: Callable[[], Value]) -> Value:
        """Run ``work`` in the thread; cancelling the caller removes a task that has not begun.

        Raises:
            WorkerClosedError: after `close`.
        """
        if self._closed:
            raise WorkerClosedError
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        self._tasks.put((work, future))
        try:
            return await future
        finally:
            self._awaited.discard(future)

    def close(self) -> None:
        """Raise WorkerClosedError in every caller of `do`, also for the task that is running."""
        self._closed = True
        for future in list(self._awaited):
            _resolve(future, None, WorkerClosedError())

    def _run(self) -> None:
        while True:
            work, future = self._tasks.get()
            if future.done():  # its caller was cancelled
                continue
            try:
                value, error = work(), None
            except Exception as raised:
                value, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_resolve, future, value, error)
            except RuntimeError:  # the server has ended meanwhile
                return


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
