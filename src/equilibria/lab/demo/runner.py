"""`run_demo`: both trainings, their runs and pages on disk, and what they show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.lab.demo.folder import Folder, prepare_folder
from equilibria.lab.demo.processes import JobError, run_jobs
from equilibria.lab.demo.recipe import Recipe
from equilibria.lab.demo.results import Branch, DemoResult, read_layers
from equilibria.lab.processes import usable_cores
from equilibria.records import read_record

PLAIN, RESCALED = "plain", "rescaled"
BRANCHES = (PLAIN, RESCALED)
_TITLES = {
    PLAIN: "Demo: a plain drop of the learning rate",
    RESCALED: "Demo: weights and momentum rescaled at the drop",
}
_STEPS_PER_MESSAGE = 25


class DemoError(RuntimeError):
    """A training of the demo did not reach its end; the message says why."""


def _silent(branch: str, steps: int) -> None:
    """Show no progress."""


def run_demo(
    out: str | Path = "equilibria-demo",
    *,
    recipe: Recipe | None = None,
    progress: Callable[[str, int], None] = _silent,
) -> DemoResult:
    """Train a small network on real digits twice, watched, and compare its layers with the theory.

    Each training has a process and a core of its own; with a single core they run one after the other. A script that
    calls this needs the usual ``if __name__ == "__main__":``, because the processes import it.

    Args:
        out: the folder for the runs, the pages and the numbers; new, empty or of an earlier demo.
        recipe: the settings; about a minute of training without it.
        progress: called with "plain" or "rescaled" and the number of steps done.

    Returns:
        What was measured and predicted, and where the files are.

    Raises:
        EquilibriaError: if ``out`` holds something else or cannot be written.
        DemoError: if a training failed.
    """
    recipe = recipe or Recipe()
    folder = prepare_folder(out, BRANCHES)
    jobs = {branch: functools.partial(train_branch, recipe, folder, branch) for branch in BRANCHES}
    try:
        found = run_jobs(jobs, at_once=min(len(jobs), usable_cores()), progress=progress)
        branches = {branch: _read_branch(folder, branch, recipe, *found[branch]) for branch in BRANCHES}
        result = DemoResult(folder.path, recipe, branches[PLAIN], branches[RESCALED])
        folder.write_results(result.as_dict(), complete=True)
    except (JobError, EquilibriaError, OSError) as error:
        raise DemoError(f"the demo did not reach its end: {error}") from error
    return result


def train_branch(
    recipe: Recipe, folder: Folder, branch: str, progress: Callable[[int], None]
) -> tuple[float, tuple[str, ...]]:
    """Train one branch, in a process of its own.

    Returns:
        The test accuracy and the names of the convolutions' weights.
    """
    import torch

    from equilibria.lab.demo.training import prepare, train
    from equilibria.watching import WatchedRun, watch

    torch.set_num_threads(1)  # the network is small: a second thread would only take the other training's core
    training = prepare(recipe)
    layers = tuple(f"{name}.conv.weight" for name, _ in training.model.normalised())

    def every_few(steps: int) -> None:
        if steps % _STEPS_PER_MESSAGE == 0 or steps == recipe.steps:
            progress(steps)

    def finish(monitor: WatchedRun) -> None:
        monitor.report(folder.report(branch), title=_TITLES[branch])

    watching = watch(
        training.model,
        training.optimizer,
        log_dir=folder.run(branch),
        every=1,
        steps_per_epoch=training.batches.per_epoch,
    )
    accuracy = train(training, watching, rescale=branch == RESCALED, progress=every_few, finish=finish)
    return accuracy, layers


def _read_branch(folder: Folder, branch: str, recipe: Recipe, accuracy: float, layers: tuple[str, ...]) -> Branch:
    run = read_record(folder.run(branch))
    turns = read_layers(run.samples(), run.metadata, recipe=recipe, layers=layers)
    return Branch(folder.run(branch), folder.report(branch), accuracy, turns)
