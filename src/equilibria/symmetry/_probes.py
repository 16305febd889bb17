"""Probes: how the loss reacts to scaling each tensor, from one backward pass at a generic point.

In order of use: the batches, the point that is probed, the probes themselves. Everything is computed in float64, or in
the type that the caller asks for, with a negligible eps (see `_precise`).
"""

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
from equilibria.symmetry._precise import DOUBLE, Precision, precise, precision_of
from equilibria.tensors.layout import as_real, rows

_FEWEST_SAMPLES = 8
_FEWEST_OPAQUE = 2
_SEEDS = 16  # a branch that is taken half the time escapes all of them once in 30000
_JITTER = 0.1  # relative
_ZERO_SIZE = 0.1  # typical size of the entries that replace an all-zero tensor
# Root mean square of a row's product with inputs of size one: sqrt(2) keeps the signal through ReLU, GELU and tanh at
# any depth; a sigmoid's slope of 1/4, and its mean, take 8.
_GAINS = (math.sqrt(2.0), 8.0)
# For every probe each tensor is scaled by a new factor of up to this, up or down: an activation that clips, but looks
# linear at the present point, then shows that it clips.
_SCALE = 2.0

# ---- batches


class ProbeBatches:
    """Draws batches for the probes; from its second use on, a batch has other samples and shuffled targets.

    Args:
        objective: splits a batch into input and target.
        batches: the caller's batches.
        most: the largest number of them to read.
        samples: the largest number of samples in a drawn batch.
        generator: of random numbers.
    """

    def __init__(
        self, objective: Objective, batches: Iterable[Any], *, most: int, samples: int, generator: torch.Generator
    ) -> None:
        self._batches = _first(batches, most)
        self._pairs = isinstance(objective, ModelObjective)
        if isinstance(objective, ModelObjective):
            self._batches = [objective.split(batch) for batch in self._batches]
        self._samples, self._generator = samples, generator
        sizes = [self._count(batch) for batch in self._batches]
        _check_enough(sizes)

    def __len__(self) -> int:
        return len(self._batches)

    def draw(self, index: int, *, few: int | None = None) -> Any:
        """Draw batch number ``index``: in the first round the caller's batch, at most shortened, then a new mixture.

        Args:
            index: counts up from 0.
            few: a smaller limit on the number of samples.
        """
        batch = self._batches[index % len(self._batches)]
        count, most = self._count(batch), few or self._samples
        if count is None:
            return batch
        if count > most or index >= len(self._batches):
            chosen = torch.randperm(count, generator=self._generator)[: min(count, most)]
            batch = _samples_of(batch, chosen, count)
        if self._pairs and index >= len(self._batches):
            batch = (batch[0], self._shuffled(batch[1]))
        return batch

    def _count(self, batch: Any) -> int | None:
        """Number of samples in a batch; None if it cannot be divided, because its tensors do not agree.

        A single tensor for a loss that is not a network's may be a vector of numbers that belong together.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
        lengths = {len(tensor) for tensor in tensors}
        divisible = len(lengths) == 1 and (self._pairs or len(tensors) > 1)
        return lengths.pop() if divisible else None

    def _shuffled(self, target: Any) -> Any:
        """Targets that a trained network has not fitted: where it fits its data, the gradient would vanish."""
        if not isinstance(target, Tensor) or target.ndim == 0:
            return target
        return target[torch.randperm(len(target), generator=self._generator).to(target.device)]


def _first(batches: Iterable[Any], most: int) -> list[Any]:
    if isinstance(batches, Tensor | str | dict) or not isinstance(batches, Iterable):
        raise EquilibriaError(
            f"got batches of type {type(batches).__name__}; expected a list of batches or a DataLoader: pass a "
            "single batch as [batch]",
            argument="batches",
        )
    is_pair = isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(part, Tensor) for part in batches)
    first = [batches] if is_pair else list(itertools.islice(batches, most))
    if not first:
        raise EquilibriaError(
            "got no batches; expected at least one (an iterator that was used before is empty)", argument="batches"
        )
    return first


def _check_enough(sizes: list[int | None]) -> None:
    known = [size for size in sizes if size is not None]
    if known and len(known) == len(sizes) and sum(known) < _FEWEST_SAMPLES:
        raise EquilibriaError(
            f"got too few data: {len(sizes)} batches with {sum(known)} samples in all; expected at least "
            f"{_FEWEST_SAMPLES} samples: with fewer, the loss ignores parameters that matter",
            argument="batches",
        )
    if not known and len(sizes) < _FEWEST_OPAQUE:
        raise EquilibriaError(
            f"got too few batches: {len(sizes)}, which cannot be divided into samples; expected at least "
            f"{_FEWEST_OPAQUE} different ones",
            argument="batches",
        )


def _samples_of(batch: Any, chosen: Tensor, count: int) -> Any:
    def pick(leaf: Any) -> Any:
        divisible = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count
        return leaf[chosen.to(leaf.device)] if divisible else leaf

    return pytree.tree_map(pick, batch)


def check_determined(objective: Objective, batch: Any) -> None:
    """Raise EquilibriaError if the loss depends on the random numbers of torch, numpy or Python."""
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
            "Dropout is off already; expected a model and a loss that draw no random numbers (such as noise)",
            argument="objective",
        )


# ---- the point


def generic(param: Tensor, generator: torch.Generator) -> Tensor:
    """A generic point nearby: no zeros, which scaling would not change, and no equal entries."""

    def noise() -> Tensor:
        drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        return drawn.to(device=param.device, dtype=param.dtype.to_real())

    filled = param.abs() > 0
    typical = float(param.abs().square().sum() / filled.sum()) ** 0.5 if bool(filled.any()) else _ZERO_SIZE
    return torch.where(filled, param * (1 + _JITTER * noise()), typical * noise())


def probing_point(twin: Objective, base: Params, batch: Any) -> tuple[Params, int]:
    """Choose the point that is probed: one at which every tensor that matters has a measurable gradient.

    In a deep network without normalisation the first layers' share of the gradient falls by a factor with every layer,
    at the usual initial weights to 1e-12 and less, where rounding hides it. Symmetries belong to the network, not to
    its present norms, so the search may probe where the matrices are larger.

    Args:
        twin: the objective in the type to compute in.
        base: the preferred point.
        batch: the data to try it on.

    Returns:
        The base if no tensor is silent there, else the candidate with the largest gradients; and the number of backward
        passes.
    """
    sizes, precision = _sizes(twin, base, batch), _precision_at(base)
    if sizes is not None and not silent_among(sizes, precision).any():
        return base, 1
    points = [base, *(_with_larger_rows(twin, base, gain) for gain in _GAINS)]
    sizes_by_point = [sizes, *(_sizes(twin, point, batch) for point in points[1:])]
    best = int(np.argmax([_mean_log_share(candidate, faintest=precision.noise) for candidate in sizes_by_point]))
    return points[best], len(points)


def silent_among(sizes: np.ndarray, precision: Precision = DOUBLE) -> np.ndarray:
    """Which tensors have no gradient, from the sizes of their radial derivatives."""
    result: np.ndarray = sizes <= precision.silent * sizes.max()
    return result


def _precision_at(point: Params) -> Precision:
    return precision_of(next(iter(point.values())))


def _with_larger_rows(twin: Objective, base: Params, gain: float) -> Params:
    """The base with every matrix scaled up so that the norms of its rows reach ``gain`` in root mean square."""
    point = dict(base)
    for name, param in base.items():
        if param.ndim >= 2 and param.numel():
            norm = float(rows(param, axis=twin.row_axis[name]).norm(dim=1).square().mean().sqrt())
            point[name] = param * max(1.0, gain / norm)
    return point


def _sizes(twin: Objective, point: Params, batch: Any) -> np.ndarray | None:
    """The size of every tensor's radial derivative, as in `Probe`; None if one is not finite or all are zero."""
    with precise(_precision_at(point).dtype):
        _, grads = twin.value_and_grad(batch, params=point)
    axes = twin.row_axis
    norms = [_row_products(point[name], grad, axis=axes[name]).norm() for name, grad in grads.items()]
    sizes = torch.stack(norms).cpu().numpy()
    return sizes if np.isfinite(sizes).all() and sizes.any() else None


def _mean_log_share(sizes: np.ndarray | None, *, faintest: float) -> float:
    """Mean logarithm of the sizes relative to the largest; large if no tensor is silent."""
    return -math.inf if sizes is None else float(np.log(np.maximum(sizes / sizes.max(), faintest)).mean())


# ---- probes


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Radial derivatives from one backward pass.

    Attributes:
        radial: <w_i, dL/dw_i> of every tensor, the derivative of the loss in the logarithm of its scale.
        size: the scale of ``radial``: root of the sum over rows of (norm of the row times norm of its gradient)
            squared. With norms of whole tensors, one tiny row with a huge gradient would hide all others.
        row_radial: ``radial`` by rows, for tensors with two axes or more.
        row_size: ``size`` by rows.
        precision: of the computation.
    """

    radial: np.ndarray
    size: np.ndarray
    row_radial: dict[str, np.ndarray]
    row_size: dict[str, np.ndarray]
    precision: Precision = DOUBLE


class Prober:
    """Takes probes of an objective.

    Args:
        twin: the objective in the type to compute in, on batches as `ProbeBatches` draws them.
        base: the point whose tensors are scaled.
        batches: the data.
        generator: of random numbers.
    """

    def __init__(self, twin: Objective, base: Params, *, batches: ProbeBatches, generator: torch.Generator) -> None:
        self._twin, self.base, self._batches, self._generator = twin, base, batches, generator
        self._axes, self._precision = twin.row_axis, _precision_at(base)
        self.taken = 0

    def take(self, *, along: Mapping[str, float] | None = None, by_row: bool = False) -> Probe:
        """Take one more probe at a random point, optionally shifted ``along`` a direction of log-scales.

        Raises:
            EquilibriaError: if the loss or a gradient is not finite there, nor closer to the base point.
        """
        batch = self._batches.draw(self.taken)
        for spread in (1.0, 0.25, 0.0):  # a loss without normalisation may overflow far away
            point = self._point(spread, along or {})
            with precise(self._precision.dtype):
                value, grads = self._twin.value_and_grad(batch, params=point)
            if bool(torch.isfinite(value)) and all(bool(torch.isfinite(grad).all()) for grad in grads.values()):
                self.taken += 1
                return self._probe(point, grads, by_row=by_row)
        bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        raise EquilibriaError(
            f"got a loss of {float(value):g}"
            + (f" and a gradient of {bad[0]} that is not finite" if bad else "")
            + f" on batch {self.taken % len(self._batches)}; expected finite numbers: check the weights and the batch",
            argument="batches",
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
            products = _row_products(param, grads[name], axis=self._axes[name])
            radial[index] = float((as_real(param).double() * as_real(grads[name])).sum())
            size[index] = float(products.norm())
            if by_row and param.ndim >= 2:
                w, g = (rows(as_real(tensor).double(), axis=self._axes[name]) for tensor in (param, grads[name]))
                row_radial[name] = (w * g).sum(1).cpu().numpy()
                row_size[name] = products.cpu().numpy()
        return Probe(radial, size, row_radial, row_size, self._precision)


def _row_products(param: Tensor, grad: Tensor, *, axis: int) -> Tensor:
    """Norm of every row times norm of its gradient; a vector counts as one row."""
    w, g = (
        rows(as_real(tensor), axis=axis) if param.ndim >= 2 else as_real(tensor).reshape(1, -1)
        for tensor in (param, grad)
    )
    products: Tensor = w.norm(dim=1) * g.norm(dim=1)
    return products
