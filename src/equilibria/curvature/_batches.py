"""The data that a Hessian is computed on: one batch, or several whose mean loss is meant."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from equilibria.errors import EquilibriaError
from equilibria.objectives._isolation import preserved_rng
from equilibria.objectives._objective import ModelObjective, Objective

Coverage: TypeAlias = Literal["one batch", "full batch", "ghost batches"]

ONE_BATCH: Final = "one batch"
FULL_BATCH: Final = "full batch"
GHOST_BATCHES: Final = "ghost batches"


@dataclass(frozen=True, slots=True, eq=False)
class WeightedBatches:
    """Batches with the weights of their losses.

    Attributes:
        batches: in order.
        weights: of their losses in the mean, proportional to their numbers of samples; they sum to 1.
        covers: meaning of the mean. "one batch": the loss of that batch. "full batch": that of all samples together,
            because the loss is a mean over independent samples. "ghost batches": the mean of the batches' losses, which
            is not the loss of all samples together, because something (BatchNorm in training mode, a loss over pairs, a
            sum) couples the samples of a batch.
    """

    batches: tuple[Any, ...]
    weights: tuple[float, ...]
    covers: Coverage


def as_weighted_batches(objective: Objective, data: Any) -> WeightedBatches:
    """Convert the caller's data to batches with weights.

    Args:
        objective: the loss.
        data: one batch; or several: a DataLoader, or a list of tuples, lists or dicts; or an earlier result of this
            function. A DataLoader is read once, by separate workers, and its generators are restored: another reader
            gets the same batches as without this one.

    Raises:
        EquilibriaError: if there are no batches, or several whose numbers of samples are unknown.
    """
    if isinstance(data, WeightedBatches):
        return data
    if not _are_several(data):
        return WeightedBatches((data,), (1.0,), ONE_BATCH)
    with preserved_rng(objective.params.values()):  # a DataLoader that shuffles draws random numbers
        batches = _read(data) if isinstance(data, DataLoader) else tuple(data)
    if not batches:
        raise EquilibriaError("got an empty list of batches; expected at least one batch", argument="batch")
    if len(batches) == 1:
        return WeightedBatches(batches, (1.0,), ONE_BATCH)
    sizes = [_sample_count(objective, batch) for batch in batches]
    covers: Coverage = GHOST_BATCHES if _couples_samples(objective, batches) else FULL_BATCH
    return WeightedBatches(batches, tuple(size / sum(sizes) for size in sizes), covers)


def _read(loader: DataLoader[Any]) -> tuple[Any, ...]:
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    generators = [getattr(source, "generator", None) for source in (loader, *samplers)]
    states = [(source, source.get_state()) for source in generators if isinstance(source, torch.Generator)]
    reader = copy.copy(loader)
    reader._iterator = None  # persistent workers serve one reader at a time, and that is training
    try:
        return tuple(reader)
    finally:
        for generator, state in states:
            generator.set_state(state)


def _couples_samples(objective: Objective, batches: Sequence[Any]) -> bool:
    """Whether the loss of all batches together differs from the mean of their losses.

    A BatchNorm in training mode settles it. Otherwise every batch is compared with its halves, and with its neighbour
    joined to it: padding or class weights make some losses a mean over another number than that of the samples.
    """
    if isinstance(objective, ModelObjective) and any(map(_normalises_by_batch, objective.modules.modules())):
        return True
    with torch.no_grad():
        return any(_differs_from_halves(objective, batch) for batch in batches) or any(
            _differs_when_joined(objective, *pair) for pair in pairwise(batches)
        )


def _differs_from_halves(objective: Objective, batch: Any) -> bool:
    count = _sample_count(objective, batch)
    if count < 2:
        return False
    halves = [_rows(batch, rows, count) for rows in (slice(None, count // 2), slice(count // 2, None))]
    return _differs_from_parts(objective, batch, halves)


def _differs_when_joined(objective: Objective, one: Any, other: Any) -> bool:
    sizes = [_sample_count(objective, batch) for batch in (one, other)]

    def join(left: Any, right: Any) -> Any:
        has_samples = isinstance(left, Tensor) and left.ndim > 0 and [len(left), len(right)] == sizes
        return torch.cat([left, right]) if has_samples else left

    try:
        joined = pytree.tree_map(join, one, other)
    except (RuntimeError, ValueError, TypeError):
        return True  # batches of different shapes cannot be joined: do not claim a full batch
    return _differs_from_parts(objective, joined, [one, other])


def _differs_from_parts(objective: Objective, whole: Any, parts: Sequence[Any]) -> bool:
    sizes = [_sample_count(objective, part) for part in parts]
    losses = [float(objective({}, part)) for part in parts]
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    # Rounding of a mean is about 1e-7 in float32; coupling changes the loss of a half by far more.
    return not abs(float(objective({}, whole)) - mean) <= 1e-4 * max(map(abs, losses))


def _are_several(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return True
    return isinstance(data, list) and all(isinstance(batch, tuple | list | Mapping) for batch in data)


def _normalises_by_batch(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.training or module.running_mean is None


def _sample_count(objective: Objective, batch: Any) -> int:
    parts = reversed(objective.split(batch)) if isinstance(objective, ModelObjective) else (batch,)
    for part in parts:  # targets first: inputs may hold tensors without a sample axis, such as masks
        lengths = [len(tensor) for tensor in _tensors(part)]
        if lengths:
            return lengths[0]
    raise EquilibriaError(
        f"got several batches of type {type(batch).__name__} without tensors, so their numbers of samples are unknown; "
        "expected tensors whose first axis numbers the samples, or one batch alone",
        argument="batch",
    )


def _tensors(part: Any) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor) and leaf.ndim > 0)


def _rows(batch: Any, rows: slice, count: int) -> Any:
    def take(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count else leaf

    return pytree.tree_map(take, batch)
