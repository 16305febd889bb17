"""The sharpness of a training loss, measured on the way and warm-started from the time before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from equilibria.curvature import Eigenpairs, WarmStart
from equilibria.curvature._sharpness import Sharpness, sharpness
from equilibria.lab.training.training import Training
from equilibria.objectives._objective import objective
from equilibria.tensors.parameters import Select

_MATRICES = ("matrix", "age")  # of what a search remembers


class SharpnessMeasure:
    """A `Measure`: the largest curvature of the loss on some data, as ``sharpness``; see `equilibria.sharpness`.

    Args:
        batch: (inputs, targets), or a list of such, whose mean loss is meant.
        select: the parameters; default: all that are trained.
        spherical: times the squared norm of these, for a loss that is scale-invariant in them together.
        tol: of the relative error.
        budget: Hessian-vector products, at most.
    """

    def __init__(
        self, batch: Any, *, select: Select | None = None, spherical: bool = False, tol: float = 1e-2, budget: int = 100
    ) -> None:
        self._batch, self._select, self._spherical = batch, select, spherical
        self._tol, self._budget = tol, budget
        self._last: Sharpness | None = None

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        loss = objective(training.model, training.recipe.loss, select=self._select)
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(training.device), self._batch)
        self._last = sharpness(
            loss, batch, spherical=self._spherical, tol=self._tol, budget=self._budget, warm=self._last
        )
        return {"sharpness": self._last.value, "norm_sq": self._last.norm_sq, "products": float(self._last.hvps)}

    def state_dict(self) -> dict[str, Any]:
        """What the next search begins with, as numbers, words and tensors."""
        if self._last is None:
            return {}
        state = asdict(self._last)
        memory = state["pairs"]["memory"]
        memory.update({name: torch.from_numpy(memory[name]) for name in _MATRICES})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if not state:
            self._last = None
            return
        memory = state["pairs"]["memory"]
        kept = WarmStart(**{**memory, **{name: memory[name].cpu().numpy() for name in _MATRICES}})
        self._last = Sharpness(**{**state, "pairs": Eigenpairs(**{**state["pairs"], "memory": kept})})
