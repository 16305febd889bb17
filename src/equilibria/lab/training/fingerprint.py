"""What tells one training from another, short enough to be kept in its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError
from equilibria.lab.training.recipe import Batch, Recipe
from equilibria.objectives._isolation import preserved_rng

SEED, FIRST_BATCH = "seed", "first batch"
_DRAWN = ("label_noise", "flip", "crop")  # settings of `equilibria.lab.data.Batches` that a first batch need not show
_LOSS, _CONTROL, _CHUNK, _FACTORS = "loss", "control", "chunk", "schedule in steps"
_DATA = "data's"
_OF_STEPS = (_LOSS, _CONTROL, _CHUNK, _FACTORS, _DATA)
_LONGEST = 120  # characters that a message can bear
_BLOCK = 50  # steps whose factors are compared together


def made_of(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What a training consists of, each in words, by what it is.

    Of a loss and a control their names count, and the plain values that they hold; what a function does cannot be told.

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
    found |= {_LOSS: _named(recipe.loss), _CONTROL: _named(recipe.control), _CHUNK: str(recipe.chunk)}
    found |= {f"{_DATA} {name}": str(getattr(recipe.data, name)) for name in _DRAWN if hasattr(recipe.data, name)}
    return {**found, **_factors(recipe), FIRST_BATCH: _hash(first_batch(recipe))}


def difference(held: Mapping[str, str], made: Mapping[str, str], *, besides: Collection[str] = ()) -> str | None:
    """The first thing that differs, in words; None if nothing does.

    Args:
        held: of one training.
        made: of the other.
        besides: what may differ; with the first batch, all that makes the steps to come: of a branch.
    """
    may_differ = (*besides, *(_OF_STEPS if FIRST_BATCH in besides else ()))
    for what in dict.fromkeys([*held, *made]):
        if what.startswith(may_differ) or (what.startswith((_FACTORS, _DATA)) and not (what in held and what in made)):
            continue  # where only one has it, there are more steps, or the data are of another type
        one, other = held.get(what, "none"), made.get(what, "none")
        if one != other:
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


def _factors(recipe: Recipe) -> dict[str, str]:
    """The factors of the learning rate, block by block: a training that goes on beyond its end keeps the first ones."""
    found = {}
    for first in range(0, recipe.steps, _BLOCK):
        steps = range(first, min(first + _BLOCK, recipe.steps))
        values = [str(_shown(recipe.schedule(step))) for step in steps]
        same = len(set(values)) == 1
        words = values[0] if same else f"{values[0]} to {values[-1]} ({_digest(', '.join(values))})"
        found[f"{_FACTORS} {steps[0]} to {steps[-1]}"] = words
    return found


def _named(function: Any) -> str:
    """The name of a function or of an object's type, and the plain values that it holds."""
    if function is None:
        return "none"
    if isinstance(function, partial):
        held: dict[str, Any] = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        name = _named(function.func)
    elif isinstance(function, FunctionType):
        code = function.__code__
        written = [value for value in code.co_consts if value is not None and value != function.__doc__]
        held = {str(place): value for place, value in enumerate([*written, *(function.__defaults__ or ())])}
        held |= function.__kwdefaults__ or {}
        held |= dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        name = f"{function.__module__}.{function.__qualname__}"
    else:
        held = {key: value for key, value in getattr(function, "__dict__", {}).items() if not key.startswith("_")}
        kind = function if isinstance(function, type) else type(function)
        name = f"{kind.__module__}.{kind.__qualname__}"
    shown = {key: _shown(value) for key, value in held.items()}
    values = ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
    return f"{name}({values if len(values) <= _LONGEST else _digest(values)})"


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


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]
