"""`reproduce`: run the tasks of experiments, store every result, and write the pages over all results."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria._version import __version__
from equilibria.errors import EquilibriaError, one_of
from equilibria.lab import import_extra
from equilibria.lab.harness import figures
from equilibria.lab.harness.experiment import SCALES, Experiment, plain, settings
from equilibria.lab.harness.pages import write_gallery, write_results_page
from equilibria.lab.harness.results import Result, ResultsFolder, ScaleFolder, open_results
from equilibria.lab.harness.task import ProgressPoll, progress_file
from equilibria.lab.harness.workers import InProcess, TaskCall, TaskDone, TaskFailed, Workers
from equilibria.records._lock import RunLock

Progress = Callable[[int, int], None]
"""Called with the number of finished tasks and of all tasks."""
RunningShare = Callable[[float], None]
"""Called with the sum over running tasks of the share that is done."""
Started = Callable[[Sequence[str], int], None]
"""Called with the ids of the experiments that start and the number of their unfinished tasks."""


@dataclass(frozen=True, slots=True)
class ExperimentReport:
    """The outcome of one experiment of a call of `reproduce`.

    Attributes:
        experiment: its id.
        result: its claims, numbers and figures; None if it failed or was left out.
        reused: whether the result was there before.
        failure: why there is no result; "" if there is one.
        lacks: what this machine lacks to run it; "" if nothing.
    """

    experiment: str
    result: Result | None
    reused: bool = False
    failure: str = ""
    lacks: str = ""

    @property
    def good(self) -> bool:
        """Whether it finished and no claim fails, or was left out."""
        return bool(self.lacks) or (self.result is not None and not self.result.fails)


@dataclass(slots=True)
class _Run:
    """A running experiment."""

    experiment: Experiment[Any]
    scale: str
    config: Any
    folder: ScaleFolder
    fingerprint: str
    tasks: dict[str, Any]
    data: str = ""
    task_fingerprint: str = ""  # set once the data are known
    done: dict[str, TaskDone] = field(default_factory=dict)
    failure: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.failure) or len(self.done) == len(self.tasks)


def reproduce(
    experiments: Sequence[Experiment[Any]],
    *,
    scale: str = "desk",
    results: str | Path = "results",
    force: bool = False,
    workers: Workers | None = None,
    device: str = "cpu",
    progress: Progress = lambda done, total: None,
    running: RunningShare | None = None,
    started: Started = lambda ids, left: None,
    finished: Callable[[ExperimentReport], None] = lambda report: None,
) -> list[ExperimentReport]:
    """Run experiments, store their results, and rewrite the pages over all results.

    Every finished task is stored at once: an interrupted run resumes from there when it is started again. A result of
    the same version, settings and data is reused. An experiment that needs something this machine does not have, such
    as a data set, is left out.

    Args:
        experiments: from `registry.find`.
        scale: smoke, desk or paper.
        results: the results folder; new, empty or with earlier results.
        force: recompute existing results.
        workers: runs the tasks; by default this process runs them one after the other.
        device: device to train networks on; "cuda" has never been run by us. Tasks finished on another device count.
        progress: called when a task ends.
        running: called every second from another thread, with the progress of running tasks.
        started: called once before the work.
        finished: called with the report of every experiment when it ends.

    Returns:
        One report per experiment, in their order.

    Raises:
        EquilibriaError: bad settings, a folder that holds other things, or one that another process writes to.
    """
    one_of("scale", scale, SCALES)
    import_extra("matplotlib")  # before any work
    configs = [experiment.config(scale) for experiment in experiments]
    folder = open_results(results)
    runs = [
        _prepare(experiment, scale, config, folder) for experiment, config in zip(experiments, configs, strict=True)
    ]
    lacking = _find_data(runs)
    reports = lacking | _reuse(runs, force=force)
    pending = [run for run in runs if run.experiment.id not in reports]
    for run in runs:
        if (report := reports.get(run.experiment.id)) is not None and report.result is not None:
            run.folder.write(report.result)  # judged again, in case the rules for verdicts have changed
    with ExitStack() as locks:
        for run in pending:
            locks.callback(_lock(run.folder.path).release)
        for report in list(reports.values()):
            finished(report)

        def ended(run: _Run) -> None:
            report = reports[run.experiment.id] = _conclude(run, device)
            finished(report)

        try:
            left = _begin(pending, force=force)
            if left:
                started([run.experiment.id for run in pending if not run.ended], left)
            _run_tasks(pending, workers or InProcess(), device=device, progress=progress, running=running, ended=ended)
        finally:  # also after Ctrl-C: some experiments may have ended
            write_gallery(folder)
            write_results_page(folder)
    return [reports[run.experiment.id] for run in runs]


def _lock(folder: Path) -> RunLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return RunLock(folder)
    except OSError as error:
        raise EquilibriaError(
            f"got {str(folder)!r}, which cannot be written: {error.strerror or error}; expected a folder or nothing"
        ) from error


def _prepare(experiment: Experiment[Any], scale: str, config: Any, folder: ResultsFolder) -> _Run:
    return _Run(
        experiment,
        scale,
        config,
        folder.at_scale(experiment.id, scale),
        experiment.fingerprint(config),
        dict(experiment.tasks(config)),
    )


def _reuse(runs: Sequence[_Run], *, force: bool) -> dict[str, ExperimentReport]:
    """Reports of the results that exist already, if they are of the data on this machine."""
    stored = {run.experiment.id: None if force else run.folder.read() for run in runs}
    return {
        run.experiment.id: ExperimentReport(run.experiment.id, result, reused=True)
        for run in runs
        if (result := stored[run.experiment.id]) is not None
        and result.fingerprint == run.fingerprint
        and (not run.data or result.data in ("", run.data))
        and run.folder.has_figures(result)
    }


def _find_data(runs: Sequence[_Run]) -> dict[str, ExperimentReport]:
    """Find the data of each run, whose digest its tasks are keyed by; reports of the runs that lack theirs."""
    lacking = {}
    for run in runs:
        try:
            run.data = run.experiment.data(run.config)
        except EquilibriaError as error:
            lacking[run.experiment.id] = ExperimentReport(run.experiment.id, None, lacks=str(error))
        run.task_fingerprint = run.experiment.fingerprint(run.config, data=run.data)
    return lacking


def _begin(runs: Sequence[_Run], *, force: bool) -> int:
    """Read the tasks that were finished before; the number of those that are left."""
    for run in runs:
        run.folder.prepare(run.task_fingerprint, run.tasks, force=force)
        stored = {key: run.folder.read_task(run.task_fingerprint, key) for key in run.tasks}
        run.done = {key: done for key, done in stored.items() if done is not None}
    return sum(len(run.tasks) - len(run.done) for run in runs)


def _run_tasks(
    runs: Sequence[_Run],
    workers: Workers,
    *,
    device: str,
    progress: Progress,
    running: RunningShare | None,
    ended: Callable[[_Run], None],
) -> None:
    """Run the tasks of all experiments together, so that no worker waits for the last task of one experiment."""
    owners = {f"{run.experiment.id}.{key}": (run, key) for run in runs for key in run.tasks if key not in run.done}
    total = sum(len(run.tasks) for run in runs)
    left = len(owners)
    progress(total - left, total)
    for run in runs:
        if run.ended:
            ended(run)

    files = {name: progress_file(_scratch(run, key)) for name, (run, key) in owners.items()}
    poll = None if running is None else ProgressPoll(files, running)

    def finish(name: str, outcome: TaskDone | TaskFailed) -> None:
        nonlocal left
        run, key = owners.pop(name)  # raises if a task were finished twice
        left -= 1
        if poll is not None:
            poll.finished(name)
        _store(run, key, outcome)
        progress(total - left, total)
        if run.ended and not any(other is run for other, _ in owners.values()):
            ended(run)

    calls = {name: _call(run, key, device) for name, (run, key) in owners.items()}
    with ExitStack() as stack:
        if poll is not None:
            stack.enter_context(poll)
        workers.run(calls, finish)


def _call(run: _Run, key: str, device: str) -> TaskCall:
    scratch = str(_scratch(run, key))
    return TaskCall(run.experiment.run_task, run.config, run.tasks[key], __version__, scratch, device)


def _scratch(run: _Run, key: str) -> Path:
    """The absolute path: a worker of a cluster has another working directory."""
    return run.folder.scratch(run.task_fingerprint, key).resolve()


def _store(run: _Run, key: str, outcome: TaskDone | TaskFailed) -> None:
    if isinstance(outcome, TaskFailed):
        run.failure = run.failure or f"task {key}: {outcome.reason}"
        return
    run.folder.store_task(run.task_fingerprint, key, outcome)
    run.done[key] = outcome


def _conclude(run: _Run, device: str) -> ExperimentReport:
    """Judge and draw an experiment whose tasks have all ended."""
    name = run.experiment.id
    if run.failure:
        return ExperimentReport(name, None, failure=run.failure)
    results = {key: run.done[key].arrays for key in run.tasks}  # in the order of the tasks, not of their ends
    try:
        outcome = run.experiment.collect(run.config, results)
        with figures.style():
            drawn = run.experiment.draw(run.config, results)
            for figure_name, figure in drawn.items():
                figures.save(figure, run.folder.path, figure_name)
    except Exception:  # fails this experiment alone: the others go on
        return ExperimentReport(name, None, failure=f"after all tasks: {traceback.format_exc()}")
    result = Result(
        id=name,
        title=run.experiment.title,
        source=run.experiment.source,
        scale=run.scale,
        config=settings(run.config),
        fingerprint=run.fingerprint,
        command=f"equilibria reproduce {name} --scale {run.scale}" + (f" --device {device}" if device != "cpu" else ""),
        version=__version__,
        packages=_packages(),
        seconds=round(sum(done.seconds for done in run.done.values()), 2),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        claims=tuple(outcome.claims),
        numbers=plain(outcome.numbers),
        figures=tuple(drawn),
        kind=run.experiment.kind,
        data=run.data,
        not_judged=dict(outcome.not_judged),
    )
    run.folder.write(result)
    return ExperimentReport(name, result)


def _packages() -> dict[str, str]:
    names = ("numpy", "scipy", "numba", "torch")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}
