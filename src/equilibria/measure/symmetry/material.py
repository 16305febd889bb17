"""The batches a search draws on: many different ones, made from the few that were given."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import ModelObjective, Objective

_FEWEST_SAMPLES = 8
_FEWEST_OPAQUE = 2


class Material:
    """Batches of a size to compute with; used a second time, a batch has other samples and shuffled targets.

    Args:
        objective: what splits a batch into input and target.
        batches: what the caller gave.
        most: how many of them to take at most.
        samples: the largest number of samples to compute with at once.
        generator: random numbers.
    """

    def __init__(
        self, objective: Objective, batches: Iterable[Any], *, most: int, samples: int, generator: torch.Generator
    ) -> None:
        given = _taken(batches, most)
        self._pairs = isinstance(objective, ModelObjective)
        self._batches = [objective.split(batch) for batch in given] if isinstance(objective, ModelObjective) else given
        self._samples, self._generator = samples, generator
        sizes = [self._count(batch) for batch in self._batches]
        _check_enough(sizes)

    def __len__(self) -> int:
        return len(self._batches)

    def draw(self, index: int, *, few: int | None = None) -> Any:
        """Batch number ``index``: as it was given in the first round, apart from its size, then made anew.

        Args:
            index: counts up from 0.
            few: take no more than this number of samples.
        """
        batch = self._batches[index % len(self._batches)]
        count, most = self._count(batch), few or self._samples
        if count is None:
            return batch
        if count > most or index >= len(self._batches):
            chosen = torch.randperm(count, generator=self._generator)[: min(count, most)]
            batch = _at(batch, chosen, count)
        if self._pairs and index >= len(self._batches):
            batch = (batch[0], self._shuffled(batch[1]))
        return batch

    def _count(self, batch: Any) -> int | None:
        """How many samples are in a batch; None if it cannot be divided: its tensors do not agree, or it is but one.

        A tensor alone, for a loss that is not known to be a network's, may be a vector of numbers that belong together.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        lengths = {len(tensor) for tensor in tensors}
        divisible = len(lengths) == 1 and (self._pairs or len(tensors) > 1)
        return lengths.pop() if divisible else None

    def _shuffled(self, target: Any) -> Any:
        """Targets that a trained network does not know: where it fits its data the gradient would vanish."""
        if not isinstance(target, Tensor) or target.ndim == 0:
            return target
        return target[torch.randperm(len(target), generator=self._generator).to(target.device)]


def _taken(batches: Iterable[Any], most: int) -> list[Any]:
    if isinstance(batches, Tensor | str | dict) or not isinstance(batches, Iterable):
        raise EquilibriaError(
            f"got batches of type {type(batches).__name__}; expected a list of batches or a DataLoader: one batch "
            "alone is given as [batch]"
        )
    pair = isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(each, Tensor) for each in batches)
    given = [batches] if pair else list(itertools.islice(batches, most))
    if not given:
        raise EquilibriaError("got no batches; expected at least one (an iterator that was used before is empty)")
    return given


def _check_enough(sizes: list[int | None]) -> None:
    known = [size for size in sizes if size is not None]
    if known and len(known) == len(sizes) and sum(known) < _FEWEST_SAMPLES:
        raise EquilibriaError(
            f"got too few data: {len(sizes)} batches with {sum(known)} samples in all; expected at least "
            f"{_FEWEST_SAMPLES} samples: with few, the loss ignores parameters that matter"
        )
    if not known and len(sizes) < _FEWEST_OPAQUE:
        raise EquilibriaError(
            f"got too few batches: {len(sizes)}, which cannot be divided into samples; expected at least "
            f"{_FEWEST_OPAQUE} different ones"
        )


def _at(batch: Any, chosen: Tensor, count: int) -> Any:
    def pick(leaf: Any) -> Any:
        divisible = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count
        return leaf[chosen.to(leaf.device)] if divisible else leaf

    return pytree.tree_map(pick, batch)
