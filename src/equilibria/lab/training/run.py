"""`train`: runs a recipe to completion, and `by_layer`: the samples of its watched layers as arrays."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from equilibria.curvature._batches import ONE_BATCH, as_weighted_batches
from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab.training.recipe import Recipe, first_batch, present_device
from equilibria.lab.training.training import (
    CHECKPOINT,
    RECORD,
    Checkpoint,
    State,
    Training,
    of_the_first,
    read_checkpoint,
    refuse_foreign,
    remove_leftovers,
)
from equilibria.objectives._isolation import preserved_rng
from equilibria.objectives._objective import objective
from equilibria.records import read_record
from equilibria.watching import WatchedRun, watch


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A completed training.

    Attributes:
        model: the network.
        curves: measurements by name, a row each: ``step`` (steps done), ``loss`` (mean training loss of the steps since
            the last measurement), and those of the recipe's measures.
        samples: samples of the watched parameters, None if nothing was watched; `by_layer` makes arrays of them.
        state: the last checkpoint, from which other trainings can branch off.
        covers: the loss that a step minimises: of "one batch"; if batches are cut into chunks, of the "full batch" if
            that makes no difference, or of "ghost batches" if the samples of a chunk are coupled.
    """

    model: torch.nn.Module
    curves: dict[str, NDArray[np.float64]]
    samples: pa.Table | None
    state: State
    covers: str

    def arrays(self, columns: Sequence[str], *, prefix: str = "") -> dict[str, NDArray[Any]]:
        """Curves and samples of the watched layers as arrays by name, for the result of a task.

        Args:
            columns: of the samples; arrays of steps by layers, with ``sampled_step`` and the ``names`` of the layers.
            prefix: of all names.
        """
        arrays: dict[str, NDArray[Any]] = dict(self.curves)
        if self.samples is not None:
            layers = by_layer(self.samples, columns)
            arrays |= {**layers.columns, "sampled_step": layers.step, "names": np.array(layers.names)}
        return {f"{prefix}{name}": values for name, values in arrays.items()}


def train(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    record: str | Path | None = None,
    start: State | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoint_steps: int | None = None,
    progress: Callable[[int], None] = lambda step: None,
    threads: int = 1,
) -> Trained:
    """Run a recipe to completion, resuming from its checkpoint if there is one.

    With a folder, checkpoints and samples are kept in it. A training that was killed resumes when this is called again
    with the same recipe and folder, and ends with the same weights, measurements and samples, bit for bit; one that is
    complete is only read. With more steps than before it continues beyond its old end.

    Under `torch.distributed` (torchrun) every process calls this with its share of the data
    (``Batches(..., share=process())``); gradients are averaged, every process normalises its own chunks, and the first
    one writes folder and record.

    Args:
        recipe: what to train.
        folder: for this training alone; created if absent.
        record: run directory for the samples, which others may read while it grows; without it they are kept in the
            folder. A training with a record cannot be resumed.
        start: `Trained.state` of another training, to branch off from: weights, optimizer state, random numbers and the
            position in the data are taken from it; control and measures are this recipe's, except that a measure with
            state resumes from the state of the measure of the same name. The recipes must have the same network and
            parameter groups, which is checked, and the same schedule up to there.
        checkpoint_seconds: from one checkpoint to the next.
        checkpoint_steps: the same in steps, if that is sooner.
        progress: called with the number of steps done, after each.
        threads: of torch; another number sums in another order.

    Raises:
        EquilibriaError: a start that is beyond the end, or was not made by `train`; a start or a folder with the
            training of another network or optimizer; a folder with one of another seed, data, loss, schedule, control
            or chunk, of more steps, or with other files; data that end before the last step, after a checkpoint of the
            steps before; a state that a checkpoint cannot hold; a device that this machine does not have.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from equilibria.lab.data import Batches, load_digits
        >>> from equilibria.lab.nets import BasicBlockResNet
        >>> from equilibria.lab.training import Evaluation, Recipe, train, decay_groups
        >>> digits = load_digits()
        >>> test = Evaluation([digits.train_images[:256]], test=(digits.test_images, digits.test_labels))
        >>> def optimizer(net):
        ...     invariant = [f"{name}.conv.weight" for name, _ in net.normalised()]
        ...     groups = decay_groups(net, invariant, lr=0.2, weight_decay=5e-3, other_lr=0.1)
        ...     return torch.optim.SGD(groups, momentum=0.9)
        >>> recipe = Recipe(
        ...     model=lambda: BasicBlockResNet(8, (1,)),
        ...     optimizer=optimizer,
        ...     data=Batches(digits.train_images, digits.train_labels, batch_size=64),
        ...     steps=60,
        ...     measures={"test": test},
        ...     measure_every=30,
        ... )
        >>> with TemporaryDirectory() as folder:  # after a kill, the same call with the same folder resumes
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
    if folder is not None and record is not None:
        raise EquilibriaError(f"got folder={str(folder)!r} and record={str(record)!r}; expected one of the two")
    path = None if folder is None else Path(folder)
    record_path = Path(record) if record is not None else None if path is None else path / RECORD
    device = present_device(recipe.device)
    with preserved_rng([torch.empty(0, device=device)]), _torch_threads(whole("threads", threads, low=1)):
        training = Training(recipe)
        covers = _covers(training)
        if training.rank > 0:
            record_path = None  # the first process writes
        writes = path is not None and training.rank == 0
        saved = of_the_first(_prepare(path) if path is not None and writes else None)
        checkpoint = Checkpoint(path / CHECKPOINT) if path is not None and writes else None
        _restore(training, saved, start, path)
        with ExitStack() as stack:
            watcher = _Watcher(stack, training, record_path, saved or start)
            if saved is None and start is None:
                training.measure()
            for batch in training.batches() if training.step < recipe.steps else ():
                training.advance(batch)
                if recipe.is_measured(training.step):
                    training.measure()
                if checkpoint is not None and (training.step == recipe.steps or clock.is_due(training.step)):
                    checkpoint.write(watcher.state_dict())
                    clock.reset(training.step)
                progress(training.step)
                if training.step == recipe.steps:
                    break
            if training.step < recipe.steps:
                if checkpoint is not None:
                    checkpoint.write(watcher.state_dict())
                raise EquilibriaError(
                    f"got data that end after {training.step} batches; expected {recipe.steps}, one for each step: "
                    "batches without end, such as equilibria.lab.data.Batches"
                )
            state = copy.deepcopy(watcher.state_dict())
            samples = watcher.samples()
    if record_path is not None and recipe.watch_every is not None:
        samples = read_record(record_path).samples()
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


class _Watcher:
    """Watches a training if its recipe asks for it, and saves the state of both together."""

    def __init__(self, stack: ExitStack, training: Training, record: Path | None, saved: State | None) -> None:
        self._training = training
        self._monitor: WatchedRun | None = None
        recipe = training.recipe
        if recipe.watch_every is None:
            return
        self._monitor = monitor = stack.enter_context(
            watch(
                training.model,
                training.optimizer,
                log_dir=record,
                every=recipe.watch_every,
                select=recipe.watch_select,
                steps_per_epoch=getattr(recipe.data, "per_epoch", None),
            )
        )
        if saved is not None:
            monitor.load_state_dict(saved.get("monitor") or _counted_from(training.step, monitor.state_dict()))
            monitor.mark_weights()  # a control may rescale them before the next step

    def state_dict(self) -> State:
        """The state of training and monitor, after flushing all samples: a checkpoint must not be ahead of them."""
        monitor = {} if self._monitor is None else self._monitor.state_dict()
        if self._monitor is not None:
            self._monitor.flush()
        return {**self._training.state_dict(), "monitor": monitor}

    def samples(self) -> pa.Table | None:
        return None if self._monitor is None else self._monitor.samples()


def _counted_from(step: int, fresh: State) -> State:
    """The state of a monitor that starts in the middle of a training."""
    return {**fresh, "hooks": [{**hooks, "count": step, "last_step": step - 1} for hooks in fresh["hooks"]]}


def _prepare(path: Path) -> State | None:
    """Create the folder and read its checkpoint; without one, samples in it are removed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise EquilibriaError(f"got folder={str(path)!r}, where a file is; expected a folder, or nothing") from None
    remove_leftovers(path / CHECKPOINT)
    saved = read_checkpoint(path / CHECKPOINT)
    if saved is None:
        refuse_foreign(path)
        with suppress(FileNotFoundError):
            shutil.rmtree(path / RECORD)
    return saved


def _restore(training: Training, saved: State | None, start: State | None, path: Path | None) -> None:
    if saved is not None:
        training.load_state_dict(saved, source=f"the folder {path}")
        if training.step > training.recipe.steps:
            raise EquilibriaError(
                f"got the folder {path}, whose training has done {training.step} steps; expected at most the "
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
    return as_weighted_batches(objective(training.model, recipe.loss), chunks).covers


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- samples by layer


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Samples of several layers at the same steps.

    Attributes:
        step: of each row, counted from 0.
        names: of the layers.
        columns: name of a column of the sample table -> values, steps by layers.
    """

    step: NDArray[np.int64]
    names: tuple[str, ...]
    columns: dict[str, NDArray[np.float64]]


def by_layer(samples: pa.Table, columns: Sequence[str] = ("angle", "angle_equilibrium", "norm")) -> LayerTable:
    """Arrange the samples of a watched run by step and layer.

    Args:
        samples: of `equilibria.watch` or `equilibria.read_run`.
        columns: of the sample table.

    Raises:
        EquilibriaError: the layers were not all sampled at the same steps.

    Example:
        >>> table = pa.table({"step": [0, 0, 5, 5], "param": ["a", "b", "a", "b"], "angle": [0.1, 0.2, 0.3, 0.4]})
        >>> layers = by_layer(table, ["angle"])
        >>> layers.step.tolist(), layers.names, layers.columns["angle"].tolist()
        ([0, 5], ('a', 'b'), [[0.1, 0.2], [0.3, 0.4]])
    """
    params = [str(name) for name in samples["param"].to_pylist()]
    names = tuple(dict.fromkeys(params))
    places = {name: place for place, name in enumerate(names)}
    step, row = np.unique(samples["step"].to_numpy(), return_inverse=True)
    if samples.num_rows != len(step) * len(names):
        raise EquilibriaError(
            f"got {samples.num_rows} samples of {len(names)} layers at {len(step)} steps; expected one for each"
        )
    column = np.array([places[name] for name in params], dtype=np.int64)
    arrays = {name: np.empty((len(step), len(names))) for name in columns}
    for name, values in arrays.items():
        values[row, column] = samples[name].to_numpy(zero_copy_only=False)
    return LayerTable(step, names, arrays)
