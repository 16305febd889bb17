"""`Training`: a recipe in progress, which advances step by step; its checkpoints resume it bit for bit."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from equilibria.errors import EquilibriaError, within
from equilibria.lab.training.recipe import Batch, LRFactor, Recipe, fingerprint, fingerprint_difference, present_device
from equilibria.objectives._isolation import preserved_rng
from equilibria.records._files import write_whole
from equilibria.records._lock import LOCK_FILE
from equilibria.records._manifest import TEMPORARY, read_manifest
from equilibria.records._segment import segment_paths
from equilibria.records.tables import TABLES

CHECKPOINT, RECORD = "checkpoint.pt", "record"


def refuse_foreign(folder: Path) -> None:
    """Check that a folder without a readable checkpoint holds only files that a training wrote.

    If there is a damaged checkpoint, the folder is a training's: only the record, which will be removed, is checked.

    Raises:
        EquilibriaError: the folder holds other files.
    """
    is_damaged = (folder / CHECKPOINT).exists()
    foreign = [
        path.name
        for path in folder.iterdir()
        if not (_is_record(path) if path.name == RECORD else is_damaged or path.name == LOCK_FILE)
    ]
    if foreign:
        raise EquilibriaError(
            f"got folder={str(folder)!r}, which holds other things ({', '.join(sorted(foreign)[:3])}); expected a "
            "folder that is new, empty or of an earlier training: choose another"
        )


def _is_record(path: Path) -> bool:
    """Whether it is a run, or the remains of one that was killed while it was created or removed."""
    if not path.is_dir():
        return False
    segments = {file.name for table in TABLES for file in segment_paths(path, table=table).values()}
    names = {file.name for file in path.iterdir()}
    return read_manifest(path) is not None or names <= {LOCK_FILE, TEMPORARY, *segments}


State = dict[str, Any]
"""Numbers, strings and tensors in dicts, lists and tuples."""

_EXPECTED = "expected numbers, strings and tensors in dicts, lists and tuples"


class Checkpoint:
    """The checkpoint of one training, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_checked = False

    def write(self, state: State) -> None:
        """Write a state atomically: a kill leaves the old one or the new one.

        Raises:
            EquilibriaError: the state could not be read again; checked at the first write.
        """
        content = io.BytesIO()
        torch.save(state, content)
        if not self._is_checked:
            _check_readable(content.getvalue())
            self._is_checked = True
        write_whole(self._path, content.getvalue())


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that kills in the middle of a write left."""
    for left in path.parent.glob(f".{path.name}-*.tmp"):
        left.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> State | None:
    """The state with its tensors on the CPU, or None if there is none or it is damaged. Reading runs no code.

    Raises:
        EquilibriaError: the checkpoint is whole but holds objects whose reading would run code.
        OSError: the file exists but cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = _read(content)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        if _is_unsafe(error):
            raise EquilibriaError(f"got the checkpoint {path}, which holds {_unsafe(error)}; {_EXPECTED}") from error
        return None  # damaged: counts as none
    return state if isinstance(state, dict) else None


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_readable(content: bytes) -> None:
    try:
        _read(content)
    except pickle.UnpicklingError as error:
        raise EquilibriaError(
            f"got a state with {_unsafe(error)}, which could not be read again; {_EXPECTED}, from the optimizer's "
            "settings, control and measures alike"
        ) from error


def _is_unsafe(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "Unsupported" in str(error)


def _unsafe(error: Exception) -> str:
    """The object that torch refuses to read, from its long message."""
    words = str(error).partition("GLOBAL ")[2].split()
    return f"an object of {words[0]}" if words else "an object that torch does not read"


_FINGERPRINT = "made_of"  # its name in checkpoints
_PARTS = (
    "step",
    "model",
    "optimizer",
    "schedule",
    "control",
    "measures",
    "curves",
    "loss",
    "summed",
    "random",
    _FINGERPRINT,
)


Shared = TypeVar("Shared")


def process() -> tuple[int, int]:
    """Number of this process, from 0, and how many train together under `torch.distributed`: (0, 1) for one alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def of_the_first(value: Shared) -> Shared:
    """The value that the first process has, in all of them."""
    if process()[1] == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


class Training:
    """A recipe in progress; `train` creates and drives it.

    Under `torch.distributed` every process trains on its share of the batches, and gradients are averaged.

    Attributes:
        recipe: its settings.
        model: the network.
        optimizer: of the network.
        schedule: the scheduler of the recipe's learning rates.
        scheduler: the same, or the recipe's control around it.
        step: number of steps done.
        device: device of the network.

    Raises:
        EquilibriaError: several processes, and data that are not the share of this one.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rank, self._processes = process()
        if self._processes > 1 and getattr(recipe.data, "share", None) != process():
            raise EquilibriaError(
                f"got data without the share of process {self.rank} of {self._processes}; expected "
                f"Batches(..., share={process()}): the share of equilibria.lab.training.process()"
            )
        self.device = present_device(recipe.device)
        torch.manual_seed(recipe.seed)
        self.model: nn.Module = recipe.model().to(self.device)
        if next(self.model.parameters(), None) is None:
            raise EquilibriaError(f"got a {type(self.model).__name__} without parameters; expected a network to train")
        self.optimizer: Optimizer = recipe.optimizer(self.model)
        self._network = DistributedDataParallel(self.model) if self._processes > 1 else self.model
        self._fingerprint = of_the_first(fingerprint(recipe, self.model, self.optimizer))
        self.schedule: LRScheduler = LambdaLR(self.optimizer, _factor(recipe.schedule))
        self.scheduler = self.schedule if recipe.control is None else recipe.control(self.schedule, self.model)
        self.step = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)  # summed since the last measurement
        self._summed = 0
        self._curves: dict[str, list[NDArray[Any]]] = {}
        self.model.train()

    def batches(self) -> Iterator[Batch]:
        """The batches from the present step on."""
        data: Any = self.recipe.data
        with preserved_rng():  # a DataLoader draws a random number whenever it is iterated
            return data.starting_at(self.step) if hasattr(data, "starting_at") else islice(data, self.step, None)

    def placed(self, batch: Batch) -> Batch:
        """The batch on the device of the network."""
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)

    def advance(self, batch: Batch) -> None:
        """Do one optimizer step.

        The learning rate is set right before the step it applies to: a state saved after the step before does not
        contain the change, so that branches may apply it differently.
        """
        if self.step > 0:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self._loss += self._backward(batch)
        self.optimizer.step()
        self.step += 1
        self._summed += 1

    def chunks(self, batch: Batch) -> list[tuple[Tensor, Tensor, float]]:
        """The parts of a batch that pass through the network together, placed, with their shares of the batch."""
        inputs, targets = self.placed(batch)
        size, count = self.recipe.chunk or len(inputs), len(inputs)
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        return [(chunk, wanted, len(chunk) / count) for chunk, wanted in pairs]

    def _backward(self, batch: Batch) -> Tensor:
        """Compute the gradient of the mean loss, chunk by chunk; returns the loss."""
        total, chunks = torch.zeros_like(self._loss), self.chunks(batch)
        for place, (chunk, wanted, share) in enumerate(chunks):
            with nullcontext() if place == len(chunks) - 1 else self._unaveraged():
                loss = self.recipe.loss(self._outputs(chunk, of=len(batch[0])), wanted) * share
                torch.autograd.backward(loss)
            total += loss.detach()
        if self._processes > 1:
            distributed.all_reduce(total)
        return total / self._processes

    def _unaveraged(self) -> Any:
        """A context in which gradients stay in their process: they are averaged with those of the last chunk."""
        return self._network.no_sync() if isinstance(self._network, DistributedDataParallel) else nullcontext()

    def _outputs(self, inputs: Tensor, *, of: int) -> Any:
        try:
            return self._network(inputs)
        except ValueError as error:
            if len(inputs) > 1:
                raise
            raise EquilibriaError(
                f"got a single sample to train on, of a batch of {of} with chunk={self.recipe.chunk} ({error}); "
                "expected chunks of two or more, the last one too"
            ) from error
        except RuntimeError as error:
            raise_if_pixels(
                inputs, error, remedy="images.standardised(), or Batches(..., transform=images.standardiser())"
            )
            raise

    def measure(self) -> None:
        """Run all measures of the recipe, and record the mean loss of the steps since the last measurement.

        Raises:
            EquilibriaError: two measures give the same name, or one gives ``step`` or ``loss``.
        """
        values: dict[str, Any] = {
            "step": self.step,
            "loss": float(self._loss) / self._summed if self._summed else np.nan,
        }
        for key, measure in self.recipe.measures.items():
            measured = measure(self)
            twice = sorted(measured.keys() & values.keys())
            if twice:
                raise EquilibriaError(
                    f"got a measure {key!r} that gives {twice[0]!r}, which is there already; expected each name once, "
                    "and neither step nor loss"
                )
            values |= measured
        for name, value in values.items():
            self._curves.setdefault(name, []).append(np.asarray(value, dtype=np.float64))
        self._loss.zero_()
        self._summed = 0

    def curves(self) -> dict[str, NDArray[np.float64]]:
        """All measurements by name; a row per measurement."""
        return {name: np.stack(values) for name, values in self._curves.items()}

    # ---- checkpoints

    def state_dict(self) -> State:
        """Everything that later steps depend on, and the measurements."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "control": self.scheduler.state_dict() if self.scheduler is not self.schedule else {},
            "measures": {name: _state(measure) for name, measure in self.recipe.measures.items()},
            "curves": {name: torch.from_numpy(values) for name, values in self.curves().items()},
            "loss": self._loss,
            "summed": self._summed,
            "random": _random_state(self.device),
            _FINGERPRINT: self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, source: str = "a state", branch: bool = False) -> None:
        """Resume from a state; as a branch, with this recipe's control and new curves.

        Measures with state resume from the state of the measure of the same name, in a branch too.

        Args:
            state: returned by `state_dict`.
            source: of the state, for messages.
            branch: whether it is the state of another training, with possibly another seed and other data.

        Raises:
            EquilibriaError: the state is not a training's, or is of another network, optimizer, seed or data.
        """
        self._check(state, source=source, branch=branch)
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if not branch:
            if state["control"]:
                self.scheduler.load_state_dict(state["control"])
            self._curves = {name: list(values.numpy()) for name, values in state["curves"].items()}
            self._loss.copy_(state["loss"])
            self._summed = int(state["summed"])
        for name, measure in self.recipe.measures.items():
            saved = state["measures"].get(name)
            if saved is not None and hasattr(measure, "load_state_dict"):
                measure.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.to(self.device), saved))
        _set_random_state(state["random"], self.device)

    def _check(self, state: Mapping[str, Any], *, source: str, branch: bool) -> None:
        lacking = [name for name in _PARTS if name not in state]
        if lacking:
            raise EquilibriaError(
                f"got {source} without {', '.join(lacking)}; expected the state of a training: Trained.state"
            )
        difference = fingerprint_difference(state[_FINGERPRINT], self._fingerprint, branch=branch)
        if difference is not None:
            same = "network and optimizer" if branch else "recipe; give each training a folder of its own"
            raise EquilibriaError(f"got {source}, of another training: {difference}; expected the same {same}")


def _factor(schedule: LRFactor) -> LRFactor:
    """The schedule with plain numbers, which a checkpoint can hold."""
    return lambda step: within(f"schedule({step})", schedule(step), low=0)


def _state(measure: Any) -> Any:
    return measure.state_dict() if hasattr(measure, "state_dict") else None


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else ())]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set torch's generator, and the device's if the training was on the same kind of device."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def raise_if_pixels(inputs: Tensor, error: RuntimeError, *, remedy: str) -> None:
    """Explain the failure of a network on uint8 inputs; networks that convert them to floats never fail on them.

    Args:
        inputs: of the network.
        error: that the network raised.
        remedy: what to do.

    Raises:
        EquilibriaError: the inputs are uint8.
    """
    if inputs.dtype == torch.uint8:
        raise EquilibriaError(
            f"got inputs of uint8 {tuple(inputs.shape)}, pixels as files have them, which the network does not take "
            f"({error}); expected floats: {remedy}"
        ) from error
