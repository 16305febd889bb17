"""How the loss reacts to scaling each tensor: one backward pass per probe, at points where nothing is special."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.errors import EquilibriaError
from equilibria.objectives._isolation import preserved_rng
from equilibria.objectives._objective import ModelObjective, Objective, Params
from equilibria.symmetry._precise import precise
from equilibria.tensors.layout import as_real, rows

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


# Every tensor is scaled by a factor of up to this, either way, anew for each probe: a clipped activation that looks
# linear at the present point is then seen to be none.
_SCALE = 2.0
_JITTER = 0.1  # relative
_SEEDS = 16  # a branch that is taken half the time escapes all of them once in 30000
_ZERO_SIZE = 0.1  # typical size that entries of an all-zero tensor get


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """One backward pass.

    Attributes:
        radial: <w_i, dL/dw_i> of every tensor, the derivative of the loss in ln of its scale.
        size: what ``radial`` is measured by: the root of the sum over rows of (norm of the row times that of its
            gradient) squared. The norms of whole tensors would let one tiny row, whose gradient is huge, hide all else.
        row_radial: the same by rows, for tensors with two axes or more.
        row_size: the same by rows.
    """

    radial: np.ndarray
    size: np.ndarray
    row_radial: dict[str, np.ndarray]
    row_size: dict[str, np.ndarray]


class Prober:
    """Takes probes of an objective in float64.

    Args:
        twin: the objective in float64, on batches as `Material` draws them.
        base: the point whose tensors are scaled.
        material: the batches.
        generator: random numbers.
    """

    def __init__(self, twin: Objective, base: Params, *, material: Material, generator: torch.Generator) -> None:
        self._twin, self.base, self._material, self._generator = twin, base, material, generator
        self._axes = twin.row_axis
        self.taken = 0

    def take(self, *, along: Mapping[str, float] | None = None, by_row: bool = False) -> Probe:
        """One more probe at a random point, shifted along a direction of log-scales if one is given.

        Raises:
            EquilibriaError: if the loss or a gradient is not finite there, and not closer to the present point either.
        """
        batch = self._material.draw(self.taken)
        for spread in (1.0, 0.25, 0.0):  # a loss without normalisation may overflow far away
            point = self._point(spread, along or {})
            with precise():
                value, grads = self._twin.value_and_grad(batch, params=point)
            if bool(torch.isfinite(value)) and all(bool(torch.isfinite(grad).all()) for grad in grads.values()):
                self.taken += 1
                return self._probe(point, grads, by_row=by_row)
        bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        raise EquilibriaError(
            f"got a loss of {float(value):g}"
            + (f" and a gradient of {bad[0]} that is not finite" if bad else "")
            + f" on batch {self.taken % len(self._material)}; expected finite numbers: check the weights and the batch"
        )

    def _point(self, spread: float, along: Mapping[str, float]) -> Params:
        logs = (2 * torch.rand(len(self.base), generator=self._generator) - 1) * spread * math.log(_SCALE)
        return {
            name: param * math.exp(float(log) + along.get(name, 0.0))
            for (name, param), log in zip(self.base.items(), logs, strict=True)
        }

    def _probe(self, point: Params, grads: Params, *, by_row: bool) -> Probe:
        radial, size = np.empty(len(point)), np.empty(len(point))
        row_radial: dict[str, np.ndarray] = {}
        row_size: dict[str, np.ndarray] = {}
        for index, (name, param) in enumerate(point.items()):
            products = row_products(param, grads[name], axis=self._axes[name])
            radial[index] = float((as_real(param) * as_real(grads[name])).sum())
            size[index] = float(products.norm())
            if by_row and param.ndim >= 2:
                w, g = (rows(as_real(each), axis=self._axes[name]) for each in (param, grads[name]))
                row_radial[name] = (w * g).sum(1).cpu().numpy()
                row_size[name] = products.cpu().numpy()
        return Probe(radial, size, row_radial, row_size)


def row_products(param: Tensor, grad: Tensor, *, axis: int) -> Tensor:
    """The norm of every row times that of its gradient; a vector is one row."""
    w, g = (
        rows(as_real(each), axis=axis) if param.ndim >= 2 else as_real(each).reshape(1, -1) for each in (param, grad)
    )
    products: Tensor = w.norm(dim=1) * g.norm(dim=1)
    return products


def generic(param: Tensor, generator: torch.Generator) -> Tensor:
    """A point nearby where nothing is special: no zeros, which scaling does not change, and no equal entries."""

    def noise() -> Tensor:
        return torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.device)

    filled = param.abs() > 0
    typical = float(param.abs().square().sum() / filled.sum()) ** 0.5 if bool(filled.any()) else _ZERO_SIZE
    return torch.where(filled, param * (1 + _JITTER * noise()), typical * noise())


def check_determined(objective: Objective, batch: Any) -> None:
    """Refuse a loss that is random.

    Raises:
        EquilibriaError: if evaluations that differ only in random numbers, of torch, numpy and Python, give different
            results.
    """
    values: list[float] = []
    with preserved_rng(objective.params.values()):
        for seed in range(_SEEDS):
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            values.append(float(objective({}, batch).detach()))
    different = [value for value in values if value != values[0]]
    if different and not any(math.isnan(value) for value in values):
        raise EquilibriaError(
            f"got a loss that is random: {values[0]:.12g} and {different[0]:.12g} for the same weights and batch. "
            "Dropout is switched off already; expected a model and loss that draw no random numbers (such as noise)"
        )
