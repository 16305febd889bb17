"""The fingerprint of a recipe: short texts, kept in checkpoints, that distinguish one training from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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

_SEED, _FIRST_BATCH = "seed", "first batch"
_DRAWN = ("label_noise", "flip", "crop")  # settings of `Batches` that the first batch may not reveal
_LOSS, _CONTROL, _CHUNK, _FACTORS = "loss", "control", "chunk", "schedule in steps"
_DATA = "data's"
_MAY_BRANCH = (_SEED, _FIRST_BATCH, _LOSS, _CONTROL, _CHUNK, _FACTORS, _DATA)
_LONGEST = 120  # characters in a message
_BLOCK = 50  # steps whose factors are compared together


def fingerprint(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """The parts of a training as texts, by the name of the part.

    A loss or a control is represented by its name and its plain values; the code of a function is not compared.

    Args:
        recipe: of the training.
        model: as the recipe made it.
        optimizer: as the recipe made it, before a scheduler or control changed its settings.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    parts = {_SEED: str(recipe.seed)}
    parts |= {f"shape of {name}": str(list(param.shape)) for name, param in model.named_parameters()}
    for place, group in enumerate(optimizer.param_groups):
        parts[f"parameters of group {place}"] = ", ".join(names.get(id(param), "another") for param in group["params"])
        shown = {key: _shown(value) for key, value in group.items() if key != "params"}
        parts |= {f"{key} of group {place}": value for key, value in shown.items() if value is not None}
    parts |= {_LOSS: _named(recipe.loss), _CONTROL: _named(recipe.control), _CHUNK: str(recipe.chunk)}
    parts |= {f"{_DATA} {name}": str(getattr(recipe.data, name)) for name in _DRAWN if hasattr(recipe.data, name)}
    return {**parts, **_factors(recipe), _FIRST_BATCH: _hash(first_batch(recipe))}


def fingerprint_difference(saved: Mapping[str, str], present: Mapping[str, str], *, branch: bool) -> str | None:
    """The first difference between two fingerprints in words, or None.

    Args:
        saved: of a checkpoint.
        present: of the training that loads it.
        branch: whether the training may differ in everything that only later steps depend on.
    """
    for part in dict.fromkeys([*saved, *present]):
        if branch and part.startswith(_MAY_BRANCH):
            continue
        if part.startswith((_FACTORS, _DATA)) and not (part in saved and part in present):
            continue  # one training has more steps, or its data are of another type
        there, here = saved.get(part, "none"), present.get(part, "none")
        if there != here:
            return f"{part} is {there} there and {here} here"
    return None


def first_batch(recipe: Recipe) -> Batch:
    """The first batch of the data, read without changing random numbers.

    Raises:
        EquilibriaError: data that can be iterated only once, or hold nothing.
    """
    with preserved_rng():  # a DataLoader draws a random number whenever it is iterated
        batches = iter(recipe.data)
        if batches is recipe.data:
            raise EquilibriaError(
                f"got data of type {type(recipe.data).__name__}, which can be gone through only once; expected batches "
                "that are the same each time: a training that goes on takes them from the first one on"
            )
        batch = next(batches, None)
    if batch is None:
        raise EquilibriaError(f"got data without a batch; expected {recipe.steps}, one for each step")
    return batch


def _factors(recipe: Recipe) -> dict[str, str]:
    """The learning-rate factors in blocks: a training that is continued beyond its end keeps the first blocks."""
    blocks = {}
    for first in range(0, recipe.steps, _BLOCK):
        steps = range(first, min(first + _BLOCK, recipe.steps))
        values = [str(_shown(recipe.schedule(step))) for step in steps]
        same = len(set(values)) == 1
        words = values[0] if same else f"{values[0]} to {values[-1]} ({_digest(', '.join(values))})"
        blocks[f"{_FACTORS} {steps[0]} to {steps[-1]}"] = words
    return blocks


def _named(function: Any) -> str:
    """The name of a function or of an object's type, with its plain values."""
    if function is None:
        return "none"
    if isinstance(function, partial):
        values: dict[str, Any] = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        name = _named(function.func)
    elif isinstance(function, FunctionType):
        code = function.__code__
        written = [value for value in code.co_consts if value is not None and value != function.__doc__]
        values = {str(place): value for place, value in enumerate([*written, *(function.__defaults__ or ())])}
        values |= function.__kwdefaults__ or {}
        values |= dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        name = f"{function.__module__}.{function.__qualname__}"
    else:
        values = {key: value for key, value in getattr(function, "__dict__", {}).items() if not key.startswith("_")}
        kind = function if isinstance(function, type) else type(function)
        name = f"{kind.__module__}.{kind.__qualname__}"
    shown = {key: _shown(value) for key, value in values.items()}
    text = ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
    return f"{name}({text if len(text) <= _LONGEST else _digest(text)})"


def _shown(value: Any) -> str | None:
    """A setting as text that is the same in every process; None if it has none, such as a function."""
    if isinstance(value, Tensor | np.generic):
        value = value.tolist()
    if isinstance(value, tuple | list):
        parts = [_shown(item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None


def _hash(batch: Batch) -> str:
    digest = hashlib.sha256()
    for part in batch:
        digest.update(f"{part.dtype} {list(part.shape)}".encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]
