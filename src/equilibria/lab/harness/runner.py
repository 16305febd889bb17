"""`reproduce`: every task of the experiments that were asked for, once; then what they show."""

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
from equilibria.lab.harness import figures
from equilibria.lab.harness.experiment import SCALES, Experiment, plain, settings
from equilibria.lab.harness.gallery import write_gallery
from equilibria.lab.harness.progress import UnderWay
from equilibria.lab.harness.results import Place, Result, ResultsFolder, open_results
from equilibria.lab.harness.results_page import write_results_page
from equilibria.lab.harness.task import progress_file
from equilibria.lab.harness.workers import Call, Done, Failed, Here, Workers
from equilibria.records._lock import RunLock

Progress = Callable[[int, int], None]
"""Called with the number of tasks that are done and of all tasks."""
Share = Callable[[float], None]
"""Called with how much of the tasks under way is done, in tasks."""
Started = Callable[[Sequence[str], int], None]
"""Called with the ids of the experiments that begin and the number of their tasks that are left."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one experiment.

    Attributes:
        experiment: its id.
        result: what it shows; None if it failed.
        reused: whether the result was there before.
        failure: why there is no result; "" if there is one.
        lacks: what this machine lacks, so that it was not begun; "" if nothing.
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
    """An experiment under way."""

    experiment: Experiment[Any]
    scale: str
    config: Any
    place: Place
    fingerprint: str
    tasks: dict[str, Any]
    data: str = ""
    task_fingerprint: str = ""  # when the data are known
    done: dict[str, Done] = field(default_factory=dict)
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
    under_way: Share | None = None,
    started: Started = lambda ids, left: None,
    finished: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Run experiments, keep what they show, and renew the pages over all results.

    Every finished task is stored at once: a run that was interrupted goes on from there when it is started again. A
    result of the same version, settings and data is not computed again. An experiment that needs what this machine does
    not have, such as a data set, is left out.

    Args:
        experiments: from `registry.find`.
        scale: smoke, desk or paper.
        results: the folder; new, empty or with earlier results.
        force: compute again what is there.
        workers: who does the tasks; without it this process does, one after the other.
        device: where networks are trained; "cuda" has not been run by us. Tasks that were done elsewhere count too.
        progress: told how many tasks are done.
        under_way: told every second how much of the others is done, as far as they tell, from another thread.
        started: told once, before the work, of the experiments that have some, and of all their tasks that are left.
        finished: told of every experiment when it ends.

    Returns:
        One report per experiment, in their order.

    Raises:
        EquilibriaError: bad settings, a folder that is not ours, or one that another process writes to.
    """
    one_of("scale", scale, SCALES)
    figures.need_matplotlib()
    configs = [experiment.config(scale) for experiment in experiments]
    folder = open_results(results)
    runs = [
        _prepare(experiment, scale, config, folder) for experiment, config in zip(experiments, configs, strict=True)
    ]
    lacking = _find_data(runs)
    reports = lacking | _reuse(runs, force=force)
    pending = [run for run in runs if run.experiment.id not in reports]
    with ExitStack() as locks:
        for run in pending:
            locks.callback(_lock(run.place.path).release)
        for report in list(reports.values()):
            finished(report)

        def ended(run: _Run) -> None:
            report = reports[run.experiment.id] = _conclude(run, device)
            finished(report)

        try:
            left = _begin(pending, force=force)
            if left:
                started([run.experiment.id for run in pending if not run.ended], left)
            _work_off(pending, workers or Here(), device=device, progress=progress, under_way=under_way, ended=ended)
        finally:  # also after Ctrl-C: some experiments may have ended
            write_gallery(folder)
            write_results_page(folder)
    return [reports[run.experiment.id] for run in runs]


def _lock(place: Path) -> RunLock:
    try:
        place.mkdir(parents=True, exist_ok=True)
        return RunLock(place)
    except OSError as error:
        raise EquilibriaError(
            f"got {str(place)!r}, which cannot be written: {error.strerror or error}; expected a folder or nothing"
        ) from error


def _prepare(experiment: Experiment[Any], scale: str, config: Any, folder: ResultsFolder) -> _Run:
    return _Run(
        experiment,
        scale,
        config,
        folder.place(experiment.id, scale),
        experiment.fingerprint(config),
        dict(experiment.tasks(config)),
    )


def _reuse(runs: Sequence[_Run], *, force: bool) -> dict[str, Report]:
    """Reports of what is there already, from the data that are here if there are some."""
    found = {run.experiment.id: None if force else run.place.read() for run in runs}
    return {
        run.experiment.id: Report(run.experiment.id, result, reused=True)
        for run in runs
        if (result := found[run.experiment.id]) is not None
        and result.fingerprint == run.fingerprint
        and (not run.data or result.data in ("", run.data))
        and run.place.has_figures(result)
    }


def _find_data(runs: Sequence[_Run]) -> dict[str, Report]:
    """Note which data each run uses; reports of what cannot be run here. Tasks of other data are done again."""
    lacking = {}
    for run in runs:
        try:
            run.data = run.experiment.data(run.config)
        except EquilibriaError as error:
            lacking[run.experiment.id] = Report(run.experiment.id, None, lacks=str(error))
        run.task_fingerprint = run.experiment.fingerprint(run.config, data=run.data)
    return lacking


def _begin(runs: Sequence[_Run], *, force: bool) -> int:
    """Take the tasks that were done before; the number of those that are left."""
    for run in runs:
        run.place.begin(run.task_fingerprint, run.tasks, force=force)
        kept = {key: run.place.kept(run.task_fingerprint, key) for key in run.tasks}
        run.done = {key: done for key, done in kept.items() if done is not None}
    return sum(len(run.tasks) - len(run.done) for run in runs)


def _work_off(
    runs: Sequence[_Run],
    workers: Workers,
    *,
    device: str,
    progress: Progress,
    under_way: Share | None,
    ended: Callable[[_Run], None],
) -> None:
    """Do the tasks of all runs together, so that no worker waits for the last task of one experiment."""
    owners = {f"{run.experiment.id}.{key}": (run, key) for run in runs for key in run.tasks if key not in run.done}
    total = sum(len(run.tasks) for run in runs)
    left = len(owners)
    progress(total - left, total)
    for run in runs:
        if run.ended:
            ended(run)

    files = {name: progress_file(_scratch(run, key)) for name, (run, key) in owners.items()}
    poll = None if under_way is None else UnderWay(files, under_way)

    def take(name: str, outcome: Done | Failed) -> None:
        nonlocal left
        run, key = owners.pop(name)  # a second answer for a task would be an error, not a second count
        left -= 1
        if poll is not None:
            poll.finished(name)
        _take(run, key, outcome)
        progress(total - left, total)
        if run.ended and not any(other is run for other, _ in owners.values()):
            ended(run)

    calls = {name: _call(run, key, device) for name, (run, key) in owners.items()}
    with ExitStack() as stack:
        if poll is not None:
            stack.enter_context(poll)
        workers.run(calls, take)


def _call(run: _Run, key: str, device: str) -> Call:
    scratch = str(_scratch(run, key))
    return Call(run.experiment.run_task, run.config, run.tasks[key], __version__, scratch, device)


def _scratch(run: _Run, key: str) -> Path:
    """In full: a worker of a cluster has another working directory."""
    return run.place.scratch(run.task_fingerprint, key).resolve()


def _take(run: _Run, key: str, outcome: Done | Failed) -> None:
    if isinstance(outcome, Failed):
        run.failure = run.failure or f"task {key}: {outcome.reason}"
        return
    run.place.keep(run.task_fingerprint, key, outcome)
    run.done[key] = outcome


def _conclude(run: _Run, device: str) -> Report:
    """Claims, numbers and figures of an experiment whose tasks have all ended."""
    name = run.experiment.id
    if run.failure:
        return Report(name, None, failure=run.failure)
    findings = {key: run.done[key].arrays for key in run.tasks}  # in the order of the tasks, not of their ends
    try:
        outcome = run.experiment.collect(run.config, findings)
        with figures.style():
            drawn = run.experiment.draw(run.config, findings)
            for figure_name, figure in drawn.items():
                figures.save(figure, run.place.path, figure_name)
    except Exception:  # of this experiment alone: the others go on
        return Report(name, None, failure=f"after all tasks: {traceback.format_exc()}")
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
    )
    run.place.write(result)
    return Report(name, result)


def _packages() -> dict[str, str]:
    names = ("numpy", "scipy", "numba", "torch")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}
