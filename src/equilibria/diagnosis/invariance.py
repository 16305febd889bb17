"""Whether a weight looks scale-invariant, from the cosines of weight and gradient at its samples.

The gradient of a scale-invariant weight is orthogonal to it at every step, under any optimizer. A gradient whose mean
has a component along the weight acts like additional weight decay, and moves the equilibrium: with c the mean cosine
and eps the decay in force per step, the balance is y^2 + k y = 1 with

    k = |c| sqrt(2 / eps),

where 1/y is the angle in units of the law's (`equilibria.theory.radial`). Below k = 0.1 the angle is within 5 %. What
counts is the mean: a cosine that scatters around 0, as of a weight and a bias before a LayerNorm, leaves the law in
force.

The decision is made once. It is due after 8, 16, 32, 64, ... samples. A weight looks invariant if its cosines are 0 up
to rounding, below 1 % of a random direction's. Otherwise, from 32 samples on,

- if the standard error of k is below 0.1, it looks invariant if k is below 0.1 too, and does not if k is above 0.1 by
  two standard errors;
- if k is above 0.1 by five standard errors, it does not look invariant either;
- else it stays undecided: layers of one kind should get one verdict.

Successive cosines are correlated, so the standard error is that of the means of eight batches.

Without weight decay k does not exist, and only cosines that are 0 up to rounding make a weight look invariant.

The cosine is that of the raw gradient. For SGD this is the gradient that the optimizer uses. Adam divides it by
sqrt(v), entry by entry, and Lion takes signs; a scale-invariant weight is orthogonal to the raw gradient only, so that
this one decides, while k is then an estimate of the effect. Muon's orthogonal updates hardly go with the raw gradient:
under it only cosines that are 0 up to rounding make a weight look invariant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.identified import PowerLaw
from equilibria.theory.radial import radial_strength

Array = NDArray[Any]

NEARLY_RANDOM = 0.2  # of a random direction's cosine: above it a weight is not taken for invariant while undecided
_LIMIT = 0.1  # of k, and of its standard error
_EXACT = 0.01  # of a random direction's cosine: what rounding and the eps of a normalisation leave
_SURE, _LIKELY = 5, 2  # standard errors, each of eight batches
_BATCHES = 8  # and fewest samples
_FEWEST = 32  # samples for a standard error
_LEAST_DECAY = 1e-12  # from 0 and from 1, where k ends


def decay_in_force(
    rule: Mapping[str, Any], *, lr: Any, weight_decay: Any, momentum: Any, grad_norm: Any, norm: Any, entries: Any
) -> Array:
    """Share of the weight that decay removes per step, once momentum has added up.

    Args:
        rule: its kind, dampening and measured decay, as the metadata of a run describe a rule.
        lr: the learning rate, a number or an array as all the others.
        weight_decay: as torch defines it.
        momentum: beta1 for Adam and Lion.
        grad_norm: length of the gradient; counts for Adam with coupled L2 only.
        norm: of the weight; likewise.
        entries: numbers in the weight; likewise.

    Example:
        >>> options = {"lr": 0.1, "weight_decay": 1e-3, "momentum": 0.9, "grad_norm": 1.0, "norm": 1.0, "entries": 100}
        >>> float(decay_in_force({"kind": "SGD"}, **options)), float(decay_in_force({"kind": "AdamW"}, **options))
        (0.001..., 0.0001...)
    """
    decay = np.asarray(lr * weight_decay, dtype=np.float64)
    with np.errstate(all="ignore"):
        if rule.get("kind") == "SGD":
            damped = np.where(np.asarray(momentum) > 0, 1 - (rule.get("dampening") or 0.0), 1.0)
            return np.asarray(decay * damped / (1 - np.nan_to_num(momentum)))
        if rule.get("kind") == "AdamL2":
            return np.asarray(decay * np.sqrt(entries) / np.hypot(grad_norm, weight_decay * norm))
        if rule.get("kind") == "Identified":
            measured = PowerLaw(**dict(rule["decay"]))
            where = {"grad": grad_norm, "norm": norm, "entries": entries}
            return np.asarray(measured(lr=lr, weight_decay=weight_decay, **where), dtype=np.float64)
    return decay


def looks_invariant(cosine: Array, decay: Array, *, entries: Array) -> Array:
    """The decision for many weights: 1 for looks invariant, 0 for does not, NaN while undecided.

    Args:
        cosine: of weight and gradient, (weights, samples), in their order.
        decay: in force at each of them.
        entries: numbers in each weight.

    Example:
        >>> cosine = np.array([[1e-9, -1e-9] * 16, [0.1, 0.2] * 16])
        >>> looks_invariant(cosine, np.full((2, 32), 1e-4), entries=np.array([100.0, 100.0]))
        array([1., 0.])
    """
    verdict = np.full(len(cosine), np.nan)
    count = _BATCHES
    while count <= cosine.shape[1] and np.isnan(verdict).any():
        batches = cosine[:, :count].reshape(len(cosine), _BATCHES, -1).mean(axis=2)
        rms = np.sqrt(np.mean(cosine[:, :count] ** 2, axis=1))
        now = _decide(batches, rms * np.sqrt(entries), np.mean(decay[:, :count], axis=1), count=count)
        verdict = np.where(np.isnan(verdict), now, verdict)
        count *= 2
    return verdict


def _decide(batches: Array, share: Array, decay: Array, *, count: Array | int) -> Array:
    """The decision from the mean cosine of each batch, the rms over a random direction's, and the mean decay."""
    with np.errstate(all="ignore"):
        scale = radial_strength(1.0, decay_in_force=np.clip(np.nan_to_num(decay), _LEAST_DECAY, 1 - _LEAST_DECAY))
        k = np.abs(np.mean(batches, axis=1)) * scale
        error = np.std(batches, axis=1, ddof=1) / math.sqrt(_BATCHES) * scale
        is_small = error < _LIMIT
        is_above = k - _LIMIT > np.where(is_small, _LIKELY, _SURE) * error
        by_strength = np.where(is_above, 0.0, np.where(is_small & (k < _LIMIT), 1.0, np.nan))
        by_strength = np.where(np.asarray(count) < _FEWEST, np.nan, by_strength)
        return np.where(share < _EXACT, 1.0, np.where(decay > 0, by_strength, 0.0))


class InvarianceTest:
    """The same decision for weights whose samples come one by one.

    Attributes:
        verdict: 1 for looks invariant, 0 for does not, NaN while undecided.

    Example:
        >>> test = InvarianceTest(np.array([100.0]))
        >>> for _ in range(8):
        ...     test.add(np.array([1e-9]), np.array([1e-4]))
        >>> test.verdict
        array([1.])
    """

    def __init__(self, entries: Array) -> None:
        count = len(entries)
        self._entries = entries
        self.verdict = np.full(count, np.nan)
        self._batches = np.zeros((count, _BATCHES))  # sums of cosines
        self._size = np.ones(count, dtype=np.int64)  # samples in a batch
        self._count = np.zeros(count, dtype=np.int64)
        self._squares, self._decays = np.zeros(count), np.zeros(count)

    def add(self, cosine: Array, decay: Array) -> None:
        """Add one sample per weight; cosines that are not finite do not count."""
        rows = np.flatnonzero(np.isfinite(cosine) & np.isfinite(decay) & np.isnan(self.verdict))
        if not len(rows):
            return
        self._batches[rows, self._count[rows] // self._size[rows]] += cosine[rows]
        self._squares[rows] += cosine[rows] ** 2
        self._decays[rows] += decay[rows]
        self._count[rows] += 1
        full = rows[self._count[rows] == _BATCHES * self._size[rows]]
        if not len(full):
            return
        count, sums = self._count[full], self._batches[full]
        share = np.sqrt(self._squares[full] / count * self._entries[full])
        means = sums / self._size[full][:, np.newaxis]
        self.verdict[full] = _decide(means, share, self._decays[full] / count, count=count)
        pairs = sums.reshape(len(full), _BATCHES // 2, 2).sum(axis=2)
        self._batches[full] = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
        self._size[full] *= 2

    def state_dict(self) -> dict[str, Array]:
        """All arrays, for a checkpoint."""
        return {name: getattr(self, name).copy() for name in _ARRAYS}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the arrays from a checkpoint."""
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))


_ARRAYS = ("verdict", "_batches", "_size", "_count", "_squares", "_decays")
