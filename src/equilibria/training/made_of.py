"""What tells one training from another, short enough to be kept in its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import preserved_rng
from equilibria.training.recipe import Batch, Recipe

SEED, FIRST_BATCH = "seed", "first batch"


def made_of(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Seed, shapes, settings of the optimizer and a hash of the first batch, each in words, by what it is.

    Args:
        recipe: of the training.
        model: as the recipe made it.
        optimizer: as the recipe made it: schedules and controls change its settings.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    found = {SEED: str(recipe.seed)}
    found |= {f"shape of {name}": str(list(param.shape)) for name, param in model.named_parameters()}
    for place, group in enumerate(optimizer.param_groups):
        found[f"parameters of group {place}"] = ", ".join(names.get(id(param), "another") for param in group["params"])
        shown = {key: _shown(value) for key, value in group.items() if key != "params"}
        found |= {f"{key} of group {place}": value for key, value in shown.items() if value is not None}
    return {**found, FIRST_BATCH: _hash(first_batch(recipe))}


def difference(held: Mapping[str, str], made: Mapping[str, str], *, besides: Collection[str] = ()) -> str | None:
    """The first thing that differs, in words; None if nothing does."""
    for what in dict.fromkeys([*held, *made]):
        one, other = held.get(what, "none"), made.get(what, "none")
        if one != other and what not in besides:
            return f"{what} is {one} there and {other} here"
    return None


def first_batch(recipe: Recipe) -> Batch:
    """The first batch of the data, taken without a trace.

    Raises:
        EquilibriaError: data that can be gone through only once, or hold nothing.
    """
    with preserved_rng():  # a DataLoader draws a number whenever it is begun
        batches = iter(recipe.data)
        if batches is recipe.data:
            raise EquilibriaError(
                f"got data of type {type(recipe.data).__name__}, which can be gone through only once; expected batches "
                "that are the same each time: a training that goes on takes them from the first one on"
            )
        found = next(batches, None)
    if found is None:
        raise EquilibriaError(f"got data without a batch; expected {recipe.steps}, one for each step")
    return found


def _shown(value: Any) -> str | None:
    """A setting in words that are the same in every process; None for what has none, such as a function."""
    if isinstance(value, Tensor | np.generic):
        value = value.tolist()
    if isinstance(value, tuple | list):
        parts = [_shown(each) for each in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None


def _hash(batch: Batch) -> str:
    found = hashlib.sha256()
    for part in batch:
        found.update(f"{part.dtype} {list(part.shape)}".encode())
        found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
