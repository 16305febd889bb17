"""`run_demo`: all trainings in parallel processes, their runs and pages on disk, and the results."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.lab.demo.results import DemoArm, DemoResult, layer_turns
from equilibria.lab.demo.training import ARMS, LESS_DECAY, PLAIN, RESCALED, DemoSettings, arm_recipe, convolution_names
from equilibria.lab.processes import JobError, run_jobs, usable_cores
from equilibria.records import read_record

_TITLES = {
    PLAIN: "Demo: a plain drop of the learning rate",
    RESCALED: "Demo: weights and momentum rescaled at the drop",
    LESS_DECAY: "Demo: weight decay lowered at the drop",
}
_AT_ONCE = 2  # processes: each needs a core
_STEPS_PER_MESSAGE = 25
_MARK = "equilibria demo"
_FORMAT = 1


class DemoError(RuntimeError):
    """A training of the demo failed; the message says why."""


@dataclass(frozen=True, slots=True)
class ArmCurves:
    """What the process of an arm returns; the samples are on disk.

    Attributes:
        layers: names of the convolutions' weights.
        steps: steps done at each measurement.
        accuracies: share of the test images that are recognised.
    """

    layers: tuple[str, ...]
    steps: tuple[int, ...]
    accuracies: tuple[float, ...]


def _silent(arm: str, steps: int) -> None:
    """Show no progress."""


def run_demo(
    out: str | Path = "equilibria-demo",
    *,
    settings: DemoSettings | None = None,
    progress: Callable[[str, int], None] = _silent,
) -> DemoResult:
    """Train a small network on real digits three times, watched, and compare its layers with the theory.

    Each training has its own process, two at once; on a single core they run one after the other. A script that calls
    this needs the usual ``if __name__ == "__main__":``, because the processes import it.

    Args:
        out: the folder for the runs, the pages and the numbers; new, empty or of an earlier demo.
        settings: of the trainings; the default takes about a minute.
        progress: called with the name of an arm ("plain", "rescaled" or "less_decay") and the number of steps done.

    Returns:
        Measured and predicted angles, accuracies, and the paths of the files.

    Raises:
        EquilibriaError: if ``out`` holds other files or cannot be written.
        DemoError: if a training failed.
    """
    settings = settings or DemoSettings()
    folder = prepare_folder(out, ARMS)
    jobs = {arm: functools.partial(train_arm, settings, folder, arm) for arm in ARMS}
    try:
        curves = run_jobs(jobs, at_once=min(_AT_ONCE, usable_cores()), progress=progress)
        arms = {arm: _read_arm(folder, arm, settings, curves[arm]) for arm in ARMS}
        result = DemoResult(folder.path, settings, **arms)
        folder.write_results(result.as_dict(), complete=True)
    except (JobError, EquilibriaError, OSError) as error:
        raise DemoError(f"the demo did not reach its end: {error}") from error
    return result


def train_arm(settings: DemoSettings, folder: DemoFolder, arm: str, progress: Callable[[int], None]) -> ArmCurves:
    """Train one arm and write its page, in a process of its own."""
    from equilibria.lab.training import train
    from equilibria.watching import read_run as read_watched

    def every_few(steps: int) -> None:
        if steps % _STEPS_PER_MESSAGE == 0 or steps == settings.steps:
            progress(steps)

    trained = train(arm_recipe(settings, arm), record=folder.run(arm), progress=every_few)
    read_watched(folder.run(arm)).report(folder.report(arm), title=_TITLES[arm])
    return ArmCurves(
        tuple(convolution_names(trained.model)),
        tuple(int(step) for step in trained.curves["step"]),
        tuple(float(accuracy) for accuracy in trained.curves["test_accuracy"]),
    )


def _read_arm(folder: DemoFolder, arm: str, settings: DemoSettings, curves: ArmCurves) -> DemoArm:
    run = read_record(folder.run(arm))
    turns = layer_turns(run.samples(), run.metadata, settings=settings, layers=curves.layers)
    return DemoArm(folder.run(arm), folder.report(arm), curves.steps, curves.accuracies, turns)


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The folder that the demo writes.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def results(self) -> Path:
        """The numbers, as JSON; also the mark by which a later demo recognises the folder."""
        return self.path / "demo.json"

    def run(self, arm: str) -> Path:
        """The run directory of an arm."""
        return self.path / arm

    def report(self, arm: str) -> Path:
        """The HTML page of an arm."""
        return self.path / f"{arm}.html"

    def write_results(self, results: Mapping[str, Any], *, complete: bool) -> None:
        """Write the numbers; at the start only the mark."""
        content = {_MARK: _FORMAT, "complete": complete, **results}
        self.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def prepare_folder(path: str | Path, arms: tuple[str, ...]) -> DemoFolder:
    """Create the folder, or remove the runs and pages of an earlier demo from it.

    Raises:
        EquilibriaError: if ``path`` holds anything else, or cannot be written.
    """
    folder = DemoFolder(Path(path))
    try:
        _refuse_foreign(folder)
        for arm in arms:
            if folder.run(arm).exists():
                shutil.rmtree(folder.run(arm))
            folder.report(arm).unlink(missing_ok=True)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_results({}, complete=False)
    except OSError as error:
        raise EquilibriaError(f"cannot write the demo to {folder.path}: {error.strerror or error}") from error
    return folder


def _refuse_foreign(folder: DemoFolder) -> None:
    path = folder.path
    if path.exists() and not path.is_dir():
        raise EquilibriaError(f"got out={str(path)!r}, which is a file; expected a folder, new or of an earlier demo")
    if path.is_dir() and any(path.iterdir()) and not _is_demo(folder.results):
        raise EquilibriaError(
            f"got out={str(path)!r}, which holds other things; expected a folder that is new, empty or of an earlier "
            "demo: choose another"
        )


def _is_demo(results: Path) -> bool:
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and _MARK in content
