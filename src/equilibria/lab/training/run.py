"""`train`: a recipe from its first or its last saved step to its end."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from equilibria.curvature._batches import ONE_BATCH, as_chunks
from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab.training.checkpoint import (
    CHECKPOINT,
    RECORD,
    Checkpoint,
    State,
    read_checkpoint,
    refuse_foreign,
    remove_leftovers,
)
from equilibria.lab.training.device import present_device
from equilibria.lab.training.fingerprint import first_batch
from equilibria.lab.training.recipe import Recipe
from equilibria.lab.training.training import Training
from equilibria.objectives._objective import objective, preserved_rng
from equilibria.records import read_run
from equilibria.watching import WatchedRun, watch


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A training that reached its end.

    Attributes:
        model: the network.
        curves: what was measured, name -> a row per measurement: ``step`` (steps done), ``loss`` (mean loss of the
            steps since the last measurement, of the batches as they were trained on), and what the measures gave.
        samples: what watching found, None if nothing was watched; `by_layer` makes arrays of it.
        state: the last checkpoint, from which other trainings can branch off.
        covers: whose loss a step minimises: "one batch" as the data gave it; where it was cut into chunks, "full batch"
            if that makes no difference, or "ghost batches" if the samples of a chunk are coupled.
    """

    model: torch.nn.Module
    curves: dict[str, NDArray[np.float64]]
    samples: pa.Table | None
    state: State
    covers: str


def train(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    start: State | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoint_steps: int | None = None,
    progress: Callable[[int], None] = lambda step: None,
    threads: int = 1,
) -> Trained:
    """Train to the end, or go on to it.

    With a folder, checkpoints and samples are kept in it. A training that was killed, by whatever means, goes on when
    this is called again with the same recipe and folder, and ends with the same weights, measurements and samples, bit
    for bit; one that has ended is only read. With more steps than before it goes on beyond its old end.

    Args:
        recipe: what to train.
        folder: for this training alone; created if absent. One that holds anything else, and no training, is refused.
        start: `Trained.state` of another training, to branch off: weights, optimizer state, random numbers and the
            place in the data are its; control and measures are this recipe's, but a measure that remembers something
            goes on with what the one of the same name remembered. The recipes must have the same networks and parameter
            groups, which is checked, and the same schedule up to there.
        checkpoint_seconds: from one checkpoint to the next.
        checkpoint_steps: the same in steps, if that is sooner.
        progress: called with the number of steps done, after each.
        threads: of torch; sums are taken in another order with another number.

    Returns:
        The network, what was measured, what was seen, and the state at the end.

    Raises:
        EquilibriaError: a start that is beyond the end, or was not made by `train`; a start or a folder with the
            training of another network or optimizer, or a folder with one of another seed, data, loss, schedule,
            control or chunk, of more steps, or with files that are no training's; data that end before the last step,
            with a checkpoint of what was done before; what a checkpoint cannot hold; a device that is not there.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from equilibria.lab.data import Batches, load_digits
        >>> from equilibria.lab.nets import BasicBlockResNet
        >>> from equilibria.lab.training import Evaluation, Recipe, train, two_groups
        >>> digits = load_digits()
        >>> test = Evaluation([digits.train_images[:256]], test=(digits.test_images, digits.test_labels))
        >>> def optimizer(net):
        ...     invariant = [f"{name}.conv.weight" for name, _ in net.normalised()]
        ...     groups = two_groups(net, invariant, lr=0.2, weight_decay=5e-3, other_lr=0.1)
        ...     return torch.optim.SGD(groups, momentum=0.9)
        >>> recipe = Recipe(
        ...     model=lambda: BasicBlockResNet(8, (1,)),
        ...     optimizer=optimizer,
        ...     data=Batches(digits.train_images, digits.train_labels, batch_size=64),
        ...     steps=60,
        ...     measures={"test": test},
        ...     measure_every=30,
        ... )
        >>> with TemporaryDirectory() as folder:  # killed, the same call with the same folder goes on
        ...     trained = train(recipe, folder=folder)
        >>> trained.curves["step"].tolist(), bool(trained.curves["test_accuracy"][-1] > 0.5)
        ([0.0, 30.0, 60.0], True)
    """
    if start is not None and not isinstance(start, Mapping):
        raise EquilibriaError(
            f"got start of type {type(start).__name__}; expected the state of another training: start=trained.state"
        )
    clock = _Clock(
        positive("checkpoint_seconds", checkpoint_seconds),
        None if checkpoint_steps is None else whole("checkpoint_steps", checkpoint_steps, low=1),
    )
    place = None if folder is None else Path(folder)
    device = present_device(recipe.device)
    with preserved_rng([torch.empty(0, device=device)]), _torch_threads(whole("threads", threads, low=1)):
        training = Training(recipe)
        covers = _covers(training)
        held = None if place is None else _prepare(place)
        checkpoint = None if place is None else Checkpoint(place / CHECKPOINT)
        _restore(training, held, start, place)
        with ExitStack() as stack:
            eyes = _Eyes(stack, training, place, held or start)
            if held is None and start is None:
                training.measure()
            for batch in training.batches() if training.step < recipe.steps else ():
                training.advance(batch)
                if recipe.is_measured(training.step):
                    training.measure()
                if checkpoint is not None and (training.step == recipe.steps or clock.is_due(training.step)):
                    checkpoint.write(eyes.state_dict())
                    clock.reset(training.step)
                progress(training.step)
                if training.step == recipe.steps:
                    break
            if training.step < recipe.steps:
                if checkpoint is not None:
                    checkpoint.write(eyes.state_dict())
                raise EquilibriaError(
                    f"got data that end after {training.step} batches; expected {recipe.steps}, one for each step: "
                    "batches without end, such as equilibria.lab.data.Batches"
                )
            state = copy.deepcopy(eyes.state_dict())
            samples = eyes.samples()
    if place is not None and recipe.watch_every is not None:
        samples = read_run(place / RECORD).samples()
    return Trained(training.model, training.curves(), samples, state, covers)


class _Clock:
    """When the next checkpoint is due."""

    def __init__(self, seconds: float, steps: int | None) -> None:
        self._seconds, self._steps = seconds, steps
        self._time, self._step = time.monotonic(), 0

    def is_due(self, step: int) -> bool:
        by_step = self._steps is not None and step - self._step >= self._steps
        return by_step or time.monotonic() - self._time >= self._seconds

    def reset(self, step: int) -> None:
        self._time, self._step = time.monotonic(), step


class _Eyes:
    """What watches a training, if its recipe asks for it, and the state of both together."""

    def __init__(self, stack: ExitStack, training: Training, place: Path | None, held: State | None) -> None:
        self._training = training
        self._monitor: WatchedRun | None = None
        recipe = training.recipe
        if recipe.watch_every is None:
            return
        self._monitor = monitor = stack.enter_context(
            watch(
                training.model,
                training.optimizer,
                log_dir=None if place is None else place / RECORD,
                every=recipe.watch_every,
                select=recipe.watch_select,
            )
        )
        if held is not None:
            monitor.load_state_dict(held.get("monitor") or _counted_from(training.step, monitor.state_dict()))
            monitor.mark_weights()  # a control may rescale them before the first step

    def state_dict(self) -> State:
        """With all samples up to here on the disk: a checkpoint must not be ahead of them."""
        seen = {} if self._monitor is None else self._monitor.state_dict()
        if self._monitor is not None:
            self._monitor.flush()
        return {**self._training.state_dict(), "monitor": seen}

    def samples(self) -> pa.Table | None:
        return None if self._monitor is None else self._monitor.samples()


def _counted_from(step: int, fresh: State) -> State:
    """The state of a monitor that begins in the middle of a training."""
    return {**fresh, "hooks": [{**hooks, "count": step, "last_step": step - 1} for hooks in fresh["hooks"]]}


def _prepare(place: Path) -> State | None:
    """What was saved there; samples without a checkpoint are of a training that begins anew."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise EquilibriaError(f"got folder={str(place)!r}, where a file is; expected a folder, or nothing") from None
    remove_leftovers(place / CHECKPOINT)
    held = read_checkpoint(place / CHECKPOINT)
    if held is None:
        refuse_foreign(place)
        with suppress(FileNotFoundError):
            shutil.rmtree(place / RECORD)
    return held


def _restore(training: Training, held: State | None, start: State | None, place: Path | None) -> None:
    if held is not None:
        training.load_state_dict(held, source=f"the folder {place}")
        if training.step > training.recipe.steps:
            raise EquilibriaError(
                f"got the folder {place}, whose training has done {training.step} steps; expected at most the "
                f"{training.recipe.steps} steps of this recipe: give each training a folder of its own"
            )
    elif start is not None:
        if "step" not in start or start["step"] >= training.recipe.steps:
            raise EquilibriaError(
                f"got a start with {start.get('step', 'no')} steps; expected the state of a training with fewer than "
                f"the {training.recipe.steps} steps of this recipe"
            )
        training.load_state_dict(copy.deepcopy(start), source="a start", branch=True)


def _covers(training: Training) -> str:
    recipe = training.recipe
    if recipe.chunk is None:
        return ONE_BATCH
    inputs, targets = training.placed(first_batch(recipe))
    chunks = list(zip(torch.split(inputs, recipe.chunk), torch.split(targets, recipe.chunk), strict=True))
    return as_chunks(objective(training.model, recipe.loss), chunks).covers


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
