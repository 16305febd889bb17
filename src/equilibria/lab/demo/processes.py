"""Jobs in processes of their own, side by side, with progress, and none left behind."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from equilibria.lab.processes import SECONDS_TO_END, SPAWN, end_process, interrupts_held_back

Result = TypeVar("Result")
Job = Callable[[Callable[[int], None]], Result]
"""Does the work, calls its argument with the number of steps done, returns what it found. Must be picklable."""


class JobError(RuntimeError):
    """A job raised or died; the message has its traceback or its exit code."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What a job tells: "steps" done, its "result", or the traceback of its "failure"."""

    kind: str
    value: Any


def run_jobs(
    jobs: Mapping[str, Job[Result]], *, at_once: int, progress: Callable[[str, int], None]
) -> dict[str, Result]:
    """Run every job in a new process.

    Whatever happens, an error in a job or Ctrl-C, all processes have ended when this returns or raises.

    Args:
        jobs: the work, by name.
        at_once: how many may run at the same time.
        progress: called here with a job's name and the number of steps it has done.

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
                _start(*waiting.pop(0), running)
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


def _start(name: str, job: Job[Any], running: dict[Connection, BaseProcess]) -> None:
    here, there = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work, args=(there, job), name=name, daemon=True)
    with interrupts_held_back():  # until it is among those that run, and so is ended with them
        process.start()
        running[here] = process
    there.close()  # so that the death of the child closes the last writing end, and reading here ends


def _work(connection: Connection, job: Job[Any]) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, there is nobody to work for
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
