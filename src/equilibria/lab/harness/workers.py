"""Tasks on processes of this machine; one that dies fails its task alone."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np

from equilibria._version import __version__
from equilibria.errors import whole
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.task import workplace
from equilibria.lab.processes import SECONDS_TO_END, SPAWN, end_process, interrupts_held_back


@dataclass(frozen=True, slots=True)
class Call:
    """What a process needs to do a task.

    Attributes:
        function: `Experiment.run_task`.
        config: the settings.
        task: the task.
        version: of equilibria in the process that asks; the process that works must have the same.
        folder: for what the task keeps while it runs; see `equilibria.lab.harness.task.scratch`.
        device: where it trains networks; see `equilibria.lab.harness.task.device`.
    """

    function: Callable[[Any, Any], Arrays]
    config: Any
    task: Any
    version: str
    folder: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Done:
    """A finished task.

    Attributes:
        arrays: what it found.
        seconds: of CPU time: another process on the machine does not lengthen them.
    """

    arrays: Arrays
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A task that raised, or whose process died.

    Attributes:
        reason: the traceback, or what happened to the process.
    """

    reason: str


class Workers(Protocol):
    """Something that does tasks."""

    def run(self, calls: Mapping[str, Call], finished: Callable[[str, Done | Failed], None]) -> None:
        """Do every task once and tell of each as soon as it is done; an exception leaves none running."""


def work(call: Call) -> Done | Failed:
    """Do a task with one thread for linear algebra: the sums are then the same on every machine."""
    from threadpoolctl import threadpool_limits

    if __version__ != call.version:
        return Failed(
            f"this process has equilibria {__version__}, the one that asks has {call.version}; install the same version"
        )
    started = time.thread_time()  # a worker of a cluster may do several tasks at once
    try:
        with threadpool_limits(1), workplace(call.folder, device=call.device):
            arrays = {name: np.asarray(value) for name, value in call.function(call.config, call.task).items()}
    except Exception:
        return Failed(traceback.format_exc())
    return Done(arrays, time.thread_time() - started)


class Here:
    """Does the tasks in this process, one after the other."""

    def run(self, calls: Mapping[str, Call], finished: Callable[[str, Done | Failed], None]) -> None:
        """See `Workers.run`."""
        for key, call in calls.items():
            finished(key, work(call))


@dataclass(slots=True)
class _Worker:
    """A process and the task it does, "" for none."""

    process: BaseProcess
    key: str = ""


class Processes:
    """Does the tasks on a number of processes, each of which takes the next one when it has done one.

    A script that uses this needs the usual ``if __name__ == "__main__":``, because the processes import it.
    """

    def __init__(self, count: int) -> None:
        self._count = whole("workers", count, low=1)

    def run(self, calls: Mapping[str, Call], finished: Callable[[str, Done | Failed], None]) -> None:
        """See `Workers.run`."""
        waiting = deque(calls.items())
        workers: dict[Connection, _Worker] = {}
        try:
            while waiting or any(worker.key for worker in workers.values()):
                self._hand_out(waiting, workers)
                busy = [connection for connection, worker in workers.items() if worker.key]
                for ready in wait(busy):
                    assert isinstance(ready, Connection)
                    key, outcome = _receive(ready, workers)
                    finished(key, outcome)
        finally:
            for connection, worker in workers.items():
                worker.process.terminate()
                end_process(connection, worker.process)

    def _hand_out(self, waiting: deque[tuple[str, Call]], workers: dict[Connection, _Worker]) -> None:
        free = [connection for connection, worker in workers.items() if not worker.key]
        while waiting and (free or len(workers) < self._count):
            connection = free.pop() if free else _start(workers)
            key, call = waiting.popleft()
            workers[connection].key = key
            with contextlib.suppress(BrokenPipeError):  # it died idle: reading from it will tell
                connection.send(call)


def _start(workers: dict[Connection, _Worker]) -> Connection:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(there,), daemon=True)
    with interrupts_held_back():  # until it is among those that are ended
        process.start()
        workers[here] = _Worker(process)
    there.close()  # so that the death of the child closes the last other end, and reading here ends
    return here


def _receive(connection: Connection, workers: dict[Connection, _Worker]) -> tuple[str, Done | Failed]:
    worker = workers[connection]
    key, worker.key = worker.key, ""
    try:
        return key, connection.recv()
    except (EOFError, OSError):
        worker.process.join(SECONDS_TO_END)
        code = worker.process.exitcode
        end_process(connection, workers.pop(connection).process)
        return key, Failed(f"its process ended with exit code {code}")


def _serve(connection: Connection) -> None:
    """In the child, until the parent goes or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(work(connection.recv()))
