"""A training under way: one step after the other, and a state from which it goes on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from equilibria.errors import EquilibriaError, within
from equilibria.lab.training.checkpoint import State
from equilibria.lab.training.device import present_device
from equilibria.lab.training.fingerprint import FIRST_BATCH, SEED, difference, made_of
from equilibria.lab.training.pixels import refuse_pixels
from equilibria.lab.training.recipe import Batch, Recipe, Schedule
from equilibria.objectives._isolation import preserved_rng

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
    "made_of",
)


class Training:
    """A training at its start, and further on as it is stepped; `train` makes and drives it.

    Attributes:
        recipe: what it consists of.
        model: the network.
        optimizer: of the network.
        schedule: the scheduler of the recipe's learning rates.
        scheduler: the same, or what the recipe's control made of it.
        step: how many steps are done.
        device: where the network is.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = present_device(recipe.device)
        torch.manual_seed(recipe.seed)
        self.model: nn.Module = recipe.model().to(self.device)
        if next(self.model.parameters(), None) is None:
            raise EquilibriaError(f"got a {type(self.model).__name__} without parameters; expected a network to train")
        self.optimizer: Optimizer = recipe.optimizer(self.model)
        self._made_of = made_of(recipe, self.model, self.optimizer)
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
        with preserved_rng():  # a DataLoader draws a number whenever it is begun
            return data.starting_at(self.step) if hasattr(data, "starting_at") else islice(data, self.step, None)

    def placed(self, batch: Batch) -> Batch:
        """The batch where the network is."""
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)

    def advance(self, batch: Batch) -> None:
        """One optimizer step.

        The learning rate is set right before the step it is for: what was saved after the step before knows nothing of
        a change, so that branches may take it differently.
        """
        if self.step > 0:
            self.scheduler.step()
        inputs, targets = self.placed(batch)
        self.optimizer.zero_grad()
        self._loss += self._backward(inputs, targets)
        self.optimizer.step()
        self.step += 1
        self._summed += 1

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the mean loss, chunk by chunk; gives the loss."""
        recipe = self.recipe
        size = recipe.chunk or len(inputs)
        if size >= len(inputs):
            loss = recipe.loss(self._outputs(inputs, of=len(inputs)), targets)
            torch.autograd.backward(loss)
            return loss.detach()
        total = torch.zeros_like(self._loss)
        for some, wanted in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
            loss = recipe.loss(self._outputs(some, of=len(inputs)), wanted) * (len(some) / len(inputs))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _outputs(self, some: Tensor, *, of: int) -> Any:
        try:
            return self.model(some)
        except ValueError as error:
            if len(some) > 1:
                raise
            raise EquilibriaError(
                f"got a single sample to train on, of a batch of {of} with chunk={self.recipe.chunk} ({error}); "
                "expected chunks of two or more, the last one too"
            ) from error
        except RuntimeError as error:
            refuse_pixels(some, error, mend="images.standardised(), or Batches(..., transform=images.standardiser())")
            raise

    def measure(self) -> None:
        """Take all measures of the recipe, and the mean loss of the steps since the last time.

        Raises:
            EquilibriaError: two measures that give one name, or one that gives ``step`` or ``loss``.
        """
        found: dict[str, Any] = {
            "step": self.step,
            "loss": float(self._loss) / self._summed if self._summed else np.nan,
        }
        for key, measure in self.recipe.measures.items():
            given = measure(self)
            twice = sorted(given.keys() & found.keys())
            if twice:
                raise EquilibriaError(
                    f"got a measure {key!r} that gives {twice[0]!r}, which is there already; expected each name once, "
                    "and neither step nor loss"
                )
            found |= given
        for name, value in found.items():
            self._curves.setdefault(name, []).append(np.asarray(value, dtype=np.float64))
        self._loss.zero_()
        self._summed = 0

    def curves(self) -> dict[str, NDArray[np.float64]]:
        """All that was measured, by name; a row per measurement."""
        return {name: np.stack(values) for name, values in self._curves.items()}

    # ---- checkpoints

    def state_dict(self) -> State:
        """Everything that the steps to come depend on, and what was measured."""
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
            "made_of": self._made_of,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, source: str = "a state", branch: bool = False) -> None:
        """Go on from there; as a branch, with this recipe's control and curves from now on.

        Measures that remember something go on with what those of the same names remembered, in a branch too.

        Args:
            state: what `state_dict` gave.
            source: where it is from, for messages.
            branch: whether it is of another training, whose seed and data may have been others.

        Raises:
            EquilibriaError: it is not of a training, or of one with another network, optimizer, seed or data.
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
            held = state["measures"].get(name)
            if held is not None and hasattr(measure, "load_state_dict"):
                measure.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.to(self.device), held))
        _set_random_state(state["random"], self.device)

    def _check(self, state: Mapping[str, Any], *, source: str, branch: bool) -> None:
        lacking = [name for name in _PARTS if name not in state]
        if lacking:
            raise EquilibriaError(
                f"got {source} without {', '.join(lacking)}; expected the state of a training: Trained.state"
            )
        found = difference(state["made_of"], self._made_of, besides=(SEED, FIRST_BATCH) if branch else ())
        if found is not None:
            kept = "network and optimizer" if branch else "recipe; give each training a folder of its own"
            raise EquilibriaError(f"got {source}, of another training: {found}; expected the same {kept}")


def _factor(schedule: Schedule) -> Schedule:
    """As a plain number, which a checkpoint can hold."""
    return lambda step: within(f"schedule({step})", schedule(step), low=0)


def _state(measure: Any) -> Any:
    return measure.state_dict() if hasattr(measure, "state_dict") else None


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else ())]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    """The device's own too, if the training was on one of that kind."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
