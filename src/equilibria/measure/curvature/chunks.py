"""The data of a Hessian: one batch, or several whose mean is meant, and what that mean stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import ModelObjective, Objective, preserved_rng

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
        data: one batch; or several: a DataLoader (read once), or a list of tuples, lists or dicts.

    Raises:
        EquilibriaError: if there are no batches, or several whose numbers of samples are unknown.
    """
    if not _several(data):
        return Chunks((data,), (1.0,), ONE_BATCH)
    with preserved_rng(objective.params.values()):  # a DataLoader that shuffles draws some
        batches = tuple(data)
    if not batches:
        raise EquilibriaError("got an empty list of batches; expected at least one batch")
    if len(batches) == 1:
        return Chunks(batches, (1.0,), ONE_BATCH)
    sizes = [_sample_count(objective, batch) for batch in batches]
    covers = GHOST_BATCHES if couples_samples(objective, batches[0]) else FULL_BATCH
    return Chunks(batches, tuple(size / sum(sizes) for size in sizes), covers)


def couples_samples(objective: Objective, batch: Any) -> bool:
    """Whether the loss of a batch differs from the mean over its samples: looked up in the modules, then tried out."""
    if isinstance(objective, ModelObjective) and any(map(_normalises_by_batch, objective.modules.modules())):
        return True
    count = _sample_count(objective, batch)
    if count < 2:
        return True  # nothing can be tried out with one sample, so nothing is promised
    cut = count // 2
    with torch.no_grad():
        whole = float(objective({}, batch))
        first = float(objective({}, _rows(batch, slice(None, cut), count)))
        second = float(objective({}, _rows(batch, slice(cut, None), count)))
    mean = (cut * first + (count - cut) * second) / count
    # Rounding of a mean is some 1e-7 in float32; what couples samples changes the loss of a half by far more.
    return not abs(whole - mean) <= 1e-4 * max(abs(first), abs(second))


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
