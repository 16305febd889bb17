"""Child processes that never outlive their parent, and `run_jobs`: work in parallel processes, with progress."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = Callable[[Callable[[int], None]], Result]
"""Does the work, calls its argument with the number of steps done, returns a result. Must be picklable."""

SECONDS_TO_END = 5.0
_SPAWN = multiprocessing.get_context("spawn")  # a forked child of a process that has used torch's threads may hang


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- one child


def start_child(
    target: Callable[..., None],
    *args: Any,
    register: Callable[[Connection, BaseProcess], None],
    name: str | None = None,
    duplex: bool = False,
) -> Connection:
    """Start ``target(connection, *args)`` in a new process and return this end of the connection.

    Args:
        target: a function that the child can import.
        args: further arguments of it.
        register: stores connection and process where the caller ends them later; called before Ctrl-C can arrive, so
            that no child is left behind.
        name: of the process.
        duplex: whether the child also receives.
    """
    here, there = _SPAWN.Pipe(duplex=duplex)
    process = _SPAWN.Process(target=target, args=(there, *args), name=name, daemon=True)
    with interrupts_delayed():
        process.start()
        register(here, process)
    there.close()  # so that the death of the child closes the last other end, and receiving here ends
    return here


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C: a process started meanwhile never gets it, not even while it imports; this one gets it afterwards.

    The parent ends its children; otherwise each of them would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield  # on Windows, or in a thread that no Ctrl-C reaches
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    arrived: list[int] = []  # another thread of this process, such as a library's, may receive the signal
    handler = signal.signal(signal.SIGINT, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def end_process(connection: Connection, process: BaseProcess) -> None:
    """Close the connection and wait for the process; kill it if it does not end."""
    connection.close()
    process.join(SECONDS_TO_END)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


# ---- several jobs


class JobError(RuntimeError):
    """A job raised or died; the message has its traceback or its exit code."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A message from a job: the number of "steps" done, its "result", or the traceback of its "failure"."""

    kind: str
    value: Any


def run_jobs(
    jobs: Mapping[str, Job[Result]], *, at_once: int, progress: Callable[[str, int], None]
) -> dict[str, Result]:
    """Run every job in a new process.

    All processes have ended when this returns or raises, also after an error in a job or Ctrl-C.

    Args:
        jobs: the work, by name.
        at_once: how many may run at the same time.
        progress: called in this process with a job's name and the number of steps it has done.

    Returns:
        The results by name, in the order of ``jobs``.

    Raises:
        JobError: the first failure; the other jobs are ended.
    """
    waiting = list(jobs.items())
    running: dict[Connection, BaseProcess] = {}
    results: dict[str, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, job = waiting.pop(0)
                start_child(_work, job, register=running.__setitem__, name=name)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                message = _receive(ready, running[ready])
                if message.kind == "steps":
                    progress(running[ready].name, message.value)
                else:
                    results[running[ready].name] = message.value
                    end_process(ready, running.pop(ready))
    finally:
        for connection, process in running.items():
            process.terminate()
            end_process(connection, process)
    return {name: results[name] for name in jobs}


def _work(connection: Connection, job: Job[Any]) -> None:
    """Run the job in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where interrupts could not be blocked before the start
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: nobody needs the result
        try:
            result = job(lambda steps: connection.send(_Message("steps", steps)))
            connection.send(_Message("result", result))
        except BrokenPipeError:
            raise
        except Exception:
            connection.send(_Message("failure", traceback.format_exc()))


def _receive(connection: Connection, sender: BaseProcess) -> _Message:
    try:
        message: _Message = connection.recv()
    except (EOFError, OSError):
        sender.join(SECONDS_TO_END)
        raise JobError(f"{sender.name}: its process ended with exit code {sender.exitcode}") from None
    if message.kind == "failure":
        raise JobError(f"{sender.name}: {message.value}")
    return message
