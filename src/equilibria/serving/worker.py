"""One thread for heavy work, so that a server never takes more than its share; it does not keep the process alive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


class Worker:
    """Does one thing after the other in a thread of its own, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def do(self, work: Callable[[], Value]) -> Value:
        """What ``work`` returns or raises."""
        future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._waiting.put((work, future))
        return await future

    def _work(self) -> None:
        while True:
            work, future = self._waiting.get()
            if future.cancelled():  # nobody waits for it any more
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
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
