"""The data of a Hessian: one batch, or several whose mean is meant, and what that mean stands for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from equilibria.errors import EquilibriaError
from equilibria.objectives._isolation import preserved_rng
from equilibria.objectives._objective import ModelObjective, Objective

ONE_BATCH = "one batch"
FULL_BATCH = "full batch"
GHOST_BATCHES = "ghost batches"


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Batches with the weights of their losses.

    Attributes:
        batches: in order.
        weights: of their losses in the mean, proportional to their numbers of samples; they sum to 1.
        covers: what the mean is. "one batch": the loss of that batch. "full batch": the loss of all samples together,
            for the loss is a mean over samples that know nothing of each other. "ghost batches": the mean of the
            batches' losses, which is not the loss of all samples together, because something (BatchNorm in training
            mode, a loss over pairs, a sum) couples the samples of a batch.
    """

    batches: tuple[Any, ...]
    weights: tuple[float, ...]
    covers: str


def as_chunks(objective: Objective, data: Any) -> Chunks:
    """What the caller gave, as batches with weights.

    Args:
        objective: the loss.
        data: one batch; or several: a DataLoader, or a list of tuples, lists or dicts; or chunks made before. A
            DataLoader is read once, by workers of its own, and its generators are put back: nobody else who reads it
            sees other batches for it.

    Raises:
        EquilibriaError: if there are no batches, or several whose numbers of samples are unknown.
    """
    if isinstance(data, Chunks):
        return data
    if not _several(data):
        return Chunks((data,), (1.0,), ONE_BATCH)
    with preserved_rng(objective.params.values()):  # a DataLoader that shuffles draws some
        batches = _read(data) if isinstance(data, DataLoader) else tuple(data)
    if not batches:
        raise EquilibriaError("got an empty list of batches; expected at least one batch")
    if len(batches) == 1:
        return Chunks(batches, (1.0,), ONE_BATCH)
    sizes = [_sample_count(objective, batch) for batch in batches]
    covers = GHOST_BATCHES if couples_samples(objective, batches) else FULL_BATCH
    return Chunks(batches, tuple(size / sum(sizes) for size in sizes), covers)


def _read(loader: DataLoader[Any]) -> tuple[Any, ...]:
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    drawn = [getattr(each, "generator", None) for each in (loader, *samplers)]
    states = [(each, each.get_state()) for each in drawn if isinstance(each, torch.Generator)]
    own = copy.copy(loader)
    own._iterator = None  # persistent workers serve one reader at a time, and that is training
    try:
        return tuple(own)
    finally:
        for generator, state in states:
            generator.set_state(state)


def couples_samples(objective: Objective, batches: Sequence[Any]) -> bool:
    """Whether the loss of all batches together differs from the mean of theirs: looked up in the modules, or tried out.

    Every batch is compared with its halves, and with its neighbour joined to it: padding or class weights make the loss
    of some of them a mean over another number than that of their samples.
    """
    if isinstance(objective, ModelObjective) and any(map(_normalises_by_batch, objective.modules.modules())):
        return True
    with torch.no_grad():
        return any(_halves_differ(objective, batch) for batch in batches) or any(
            _together_differ(objective, *pair) for pair in pairwise(batches)
        )


def _halves_differ(objective: Objective, batch: Any) -> bool:
    count = _sample_count(objective, batch)
    if count < 2:
        return False
    halves = [_rows(batch, rows, count) for rows in (slice(None, count // 2), slice(count // 2, None))]
    return _differ(objective, batch, halves)


def _together_differ(objective: Objective, one: Any, other: Any) -> bool:
    sizes = [_sample_count(objective, batch) for batch in (one, other)]

    def join(left: Any, right: Any) -> Any:
        has_samples = isinstance(left, Tensor) and left.ndim > 0 and [len(left), len(right)] == sizes
        return torch.cat([left, right]) if has_samples else left

    try:
        both = pytree.tree_map(join, one, other)
    except (RuntimeError, ValueError, TypeError):
        return True  # batches of other shapes: nothing can be tried out, so nothing is promised
    return _differ(objective, both, [one, other])


def _differ(objective: Objective, whole: Any, parts: Sequence[Any]) -> bool:
    sizes = [_sample_count(objective, part) for part in parts]
    losses = [float(objective({}, part)) for part in parts]
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    # Rounding of a mean is some 1e-7 in float32; what couples samples changes the loss of a half by far more.
    return not abs(float(objective({}, whole)) - mean) <= 1e-4 * max(map(abs, losses))


def _several(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return True
    return isinstance(data, list) and all(isinstance(each, tuple | list | dict) for each in data)


def _normalises_by_batch(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.training or module.running_mean is None


def _sample_count(objective: Objective, batch: Any) -> int:
    parts = reversed(objective.split(batch)) if isinstance(objective, ModelObjective) else (batch,)
    for part in parts:  # targets first: inputs may hold tensors without samples, such as masks
        lengths = [len(tensor) for tensor in _tensors(part)]
        if lengths:
            return lengths[0]
    raise EquilibriaError(
        f"got several batches of type {type(batch).__name__} without tensors, so their numbers of samples are unknown; "
        "expected tensors whose first axis numbers the samples, or one batch alone"
    )


def _tensors(part: Any) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor) and leaf.ndim > 0)


def _rows(batch: Any, rows: slice, count: int) -> Any:
    def take(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count else leaf

    return pytree.tree_map(take, batch)
