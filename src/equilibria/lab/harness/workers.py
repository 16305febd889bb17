"""Where tasks run: in this process, on processes of this machine, or on a Dask cluster.

A task that raises, or whose process dies, fails alone. A Dask cluster repeats the task of a lost worker on another one.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from equilibria._version import __version__
from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab import import_extra
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.task import task_context
from equilibria.lab.processes import SECONDS_TO_END, end_process, start_child

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True, slots=True)
class TaskCall:
    """Everything a process needs to run a task.

    Attributes:
        function: `Experiment.run_task`.
        config: the settings.
        task: the task.
        version: of equilibria in the process that sends the call; the process that runs it must have the same.
        folder: scratch folder of the task; see `equilibria.lab.harness.task.scratch`.
        device: device to train networks on; see `equilibria.lab.harness.task.device`.
    """

    function: Callable[[Any, Any], Arrays]
    config: Any
    task: Any
    version: str
    folder: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A finished task.

    Attributes:
        arrays: its result.
        seconds: of CPU time, which other processes on the machine do not lengthen.
    """

    arrays: Arrays
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task that raised, or whose process died.

    Attributes:
        reason: the traceback, or the exit code of the process.
    """

    reason: str


Finished = Callable[[str, TaskDone | TaskFailed], None]


class Workers(Protocol):
    """Runs tasks."""

    def run(self, calls: Mapping[str, TaskCall], finished: Finished) -> None:
        """Run every task once and call ``finished`` as soon as each ends; an exception leaves none running."""


def run_call(call: TaskCall) -> TaskDone | TaskFailed:
    """Run a task with one thread for linear algebra, so that sums are the same on every machine."""
    threadpool_limits = import_extra("threadpoolctl").threadpool_limits
    if __version__ != call.version:
        return TaskFailed(
            f"this process has equilibria {__version__}, the one that asks has {call.version}; install the same version"
        )
    started = time.thread_time()  # of this thread: a worker of a cluster may run several tasks at once
    try:
        with threadpool_limits(1), task_context(call.folder, device=call.device):
            arrays = {name: np.asarray(value) for name, value in call.function(call.config, call.task).items()}
    except Exception:
        return TaskFailed(traceback.format_exc())
    return TaskDone(arrays, time.thread_time() - started)


class InProcess:
    """Runs the tasks in this process, one after the other."""

    def run(self, calls: Mapping[str, TaskCall], finished: Finished) -> None:
        """See `Workers.run`."""
        for key, call in calls.items():
            finished(key, run_call(call))


@dataclass(slots=True)
class _Worker:
    """A process and the key of the task it runs, "" for none."""

    process: BaseProcess
    key: str = ""


class Processes:
    """Runs the tasks on a number of processes; each takes the next task when it has finished one.

    A script that uses this needs the usual ``if __name__ == "__main__":``, because the processes import it.
    """

    def __init__(self, count: int) -> None:
        self._count = whole("workers", count, low=1)

    def run(self, calls: Mapping[str, TaskCall], finished: Finished) -> None:
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

    def _hand_out(self, waiting: deque[tuple[str, TaskCall]], workers: dict[Connection, _Worker]) -> None:
        free = [connection for connection, worker in workers.items() if not worker.key]
        while waiting and (free or len(workers) < self._count):
            connection = free.pop() if free else _start(workers)
            key, call = waiting.popleft()
            workers[connection].key = key
            with contextlib.suppress(BrokenPipeError):  # it died while idle: receiving from it reports that
                connection.send(call)


def _start(workers: dict[Connection, _Worker]) -> Connection:
    return start_child(
        _serve, register=lambda connection, process: workers.__setitem__(connection, _Worker(process)), duplex=True
    )


def _receive(connection: Connection, workers: dict[Connection, _Worker]) -> tuple[str, TaskDone | TaskFailed]:
    worker = workers[connection]
    key, worker.key = worker.key, ""
    try:
        return key, connection.recv()
    except (EOFError, OSError):
        worker.process.join(SECONDS_TO_END)
        code = worker.process.exitcode
        end_process(connection, workers.pop(connection).process)
        return key, TaskFailed(f"its process ended with exit code {code}")


def _serve(connection: Connection) -> None:
    """Run tasks in the child process until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where interrupts could not be blocked before the start
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(run_call(connection.recv()))


# ---- Dask

_ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):\d{1,5}/?")
_EXPECTED = "expected the address that `dask scheduler` prints, such as tcp://host:8786"


class DaskCluster:
    """Runs the tasks on the workers of a Dask scheduler, which must have the same equilibria installed.

    Raises:
        EquilibriaError: if distributed is not installed, or no scheduler with a worker answers in time.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self._client = _connect(address, positive("timeout", timeout))

    def run(self, calls: Mapping[str, TaskCall], finished: Finished) -> None:
        """See `Workers.run`."""
        from distributed import as_completed

        run = uuid.uuid4().hex  # a scheduler that has seen a key before would answer with its old result
        futures = {self._client.submit(run_call, call, key=f"{key}-{run}"): key for key, call in calls.items()}
        try:
            for future in as_completed(futures, loop=self._client.loop):
                failure = future.exception()
                outcome = future.result() if failure is None else TaskFailed(f"{type(failure).__name__}: {failure}")
                finished(futures[future], outcome)
                future.release()  # the result is on disk here: the scheduler may forget it
        except BaseException:
            self._client.cancel(list(futures), force=True)
            raise

    def close(self) -> None:
        """Disconnect; the cluster keeps running."""
        self._client.close()


def _connect(address: str, timeout: float) -> Client:
    client_of = import_extra("distributed").Client
    if not _ADDRESS.fullmatch(address):  # a Client of a malformed address complains again when it is collected
        raise EquilibriaError(f"got cluster={address!r}; {_EXPECTED}")
    try:
        client: Client = client_of(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # ValueError: an unknown form of address
        raise EquilibriaError(
            f"got cluster={address!r}, where no Dask scheduler answers within {timeout:g} s ({_first_line(error)}); "
            f"{_EXPECTED}"
        ) from None
    try:
        client.wait_for_workers(1, timeout=timeout)
    except TimeoutError:
        client.close()
        raise EquilibriaError(
            f"got cluster={address!r}, which has no worker; start one: dask worker {address}"
        ) from None
    return client


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
