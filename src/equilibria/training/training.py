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

from equilibria.training.checkpoint import State
from equilibria.training.recipe import Batch, Recipe


class Training:
    """A training at its start, and further on as it is stepped; `train` makes and drives it.

    Attributes:
        recipe: what it consists of.
        model: the network.
        optimizer: of the network.
        schedule: the scheduler of the recipe's learning rates.
        scheduler: the same, or what the recipe's control made of it.
        step: how many steps are done.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        self.model: nn.Module = recipe.model()
        self.optimizer: Optimizer = recipe.optimizer(self.model)
        self.schedule: LRScheduler = LambdaLR(self.optimizer, recipe.schedule)
        self.scheduler = self.schedule if recipe.control is None else recipe.control(self.schedule, self.model)
        self.step = 0
        self._device = next(self.model.parameters()).device
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)  # summed since the last measurement
        self._summed = 0
        self._curves: dict[str, list[NDArray[Any]]] = {}
        self.model.train()

    def batches(self) -> Iterator[Batch]:
        """The batches from the present step on."""
        data: Any = self.recipe.data
        return data.starting_at(self.step) if hasattr(data, "starting_at") else islice(data, self.step, None)

    def advance(self, batch: Batch) -> None:
        """One optimizer step.

        The learning rate is set right before the step it is for: what was saved after the step before knows nothing of
        a change, so that branches may take it differently.
        """
        if self.step > 0:
            self.scheduler.step()
        inputs, targets = (part.to(self._device) for part in batch)
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
            loss = recipe.loss(self.model(inputs), targets)
            torch.autograd.backward(loss)
            return loss.detach()
        total = torch.zeros_like(self._loss)
        for some, wanted in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
            loss = recipe.loss(self.model(some), wanted) * (len(some) / len(inputs))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def measure(self) -> None:
        """Take all measures of the recipe, and the mean loss of the steps since the last time."""
        found: dict[str, Any] = {
            "step": self.step,
            "loss": float(self._loss) / self._summed if self._summed else np.nan,
        }
        for measure in self.recipe.measures.values():
            found |= measure(self)
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
            "random": _random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, branch: bool = False) -> None:
        """Go on from there; as a branch, with this recipe's control and measures from now on."""
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
                measure.load_state_dict(held)
        _set_random_state(state["random"])


def _state(measure: Any) -> Any:
    return measure.state_dict() if hasattr(measure, "state_dict") else None


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
