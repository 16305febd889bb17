"""One task, wherever it runs: in this process, in another one, or on a cluster."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from equilibria._version import __version__
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.task import workplace


@dataclass(frozen=True, slots=True)
class Call:
    """What a process needs to do a task.

    Attributes:
        function: `Experiment.run_task`.
        config: the settings.
        task: the task.
        version: of equilibria in the process that asks; the process that works must have the same.
        folder: for what the task keeps while it runs; see `equilibria.experiments.task.scratch`.
        device: where it trains networks; see `equilibria.experiments.task.device`.
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
