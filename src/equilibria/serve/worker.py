"""One thread for heavy work, so that a server never takes more than its share; it does not keep the process alive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class EndedError(Exception):
    """The server ends: the work is not done any more."""


class Worker:
    """Does one thing after the other in a thread of its own, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._ended = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def do(self, work: Callable[[], Value]) -> Value:
        """What ``work`` returns or raises; who is cancelled while waiting in the queue takes the work out of it.

        Raises:
            EndedError: `close` was called.
        """
        if self._ended:
            raise EndedError
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        self._waiting.put((work, future))
        try:
            return await future
        finally:
            self._awaited.discard(future)

    def close(self) -> None:
        """Let go of all who wait, also of who waits for the work that is being done."""
        self._ended = True
        for future in list(self._awaited):
            _settle(future, None, EndedError())

    def _work(self) -> None:
        while True:
            work, future = self._waiting.get()
            if future.done():  # nobody waits for it any more
                continue
            try:
                value, error = work(), None
            except Exception as raised:
                value, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, value, error)
            except RuntimeError:  # the server has ended meanwhile
                return


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
