"""Turning over many steps, D(n) = -ln cos(w_t, w_{t+n}): that of a run, and that of independent gradients.

One pair of weights says little: on networks its D(n) scatters by 20 to 60 % for n up to 32, and by half of that over
hundreds of steps. The scatter within each of these two ranges gives the standard errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.series import Array
from equilibria.theory.angles import n_step_angles
from equilibria.theory.rules import SGD, AdamL2, Rule

_SHORT = 32  # steps: up to here pairs scatter alike, and beyond
_NETWORK = 10  # pairs that the scatter of the whole network counts for in that of a layer
_COORDINATES = 1024, 64  # of a tensor and of a row at least, from which pairs are formed
_RIGHT_ANGLE = 1e-12  # cosine that stands for one, which no measured turning reaches
_FAINT = 1e-7  # decay per step that stands for none: it moves D(1024) by 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """How far a layer turned over n steps, in a stretch of a run.

    Attributes:
        distance: n, ascending; without those from the first on at which a weight turned by a right angle or more.
        turned: D(n), -ln of the mean cosine.
        error: relative standard error of D(n): the scatter between pairs and, of tensors with more than 1,024 entries,
            the coordinates that are left out. NaN where no distance has two pairs.
        pairs: of weights n steps apart.
    """

    distance: Array
    turned: Array
    error: Array
    pairs: Array


def measured_turning(
    table: pa.Table | None,
    names: Sequence[str],
    *,
    first: Array,
    last: Array,
    entries: Sequence[Mapping[str, Any]],
) -> list[Turning]:
    """D(n) of every layer from the pairs that lie in its stretch of steps.

    Args:
        table: the diffusion table, None if there is none.
        names: of the layers.
        first: first step of each stretch.
        last: last step of each stretch.
        entries: the metadata of each layer.
    """
    if table is None or not table.num_rows or not names:
        nothing = np.zeros(0)
        return [Turning(nothing, nothing, nothing, nothing) for _ in names]
    coded = table["param"].dictionary_encode().unify_dictionaries().combine_chunks()
    places = {name: place for place, name in enumerate(names)}
    layer = np.array([places.get(name, -1) for name in coded.dictionary.to_pylist()])[coded.indices.to_numpy()]
    step, distance = table["step"].to_numpy(), table["distance"].to_numpy()
    inside = (layer >= 0) & (step >= first[layer]) & (step + distance <= last[layer] + 1)
    layer, distance, turned = layer[inside], distance[inside], table["turned"].to_numpy()[inside]
    distances, which = np.unique(distance, return_inverse=True)
    shape = len(names), len(distances)
    key = layer * shape[1] + which

    def sums(values: Array | None) -> Array:
        return np.bincount(key, values, minlength=shape[0] * shape[1]).reshape(shape)

    pairs = sums(None).astype(np.float64)
    with np.errstate(all="ignore"):
        means = -np.log(sums(np.exp(-turned)) / pairs)  # null is NaN, and spoils the mean of its distance
        apart = sums((turned - (sums(turned) / pairs)[layer, which]) ** 2) / means**2
        squares = _scatter(distances, apart, pairs) / pairs + _left_out(names, entries)[:, None]
    known = np.isfinite(means) | (pairs == 0)
    known = np.logical_and.accumulate(known, axis=1) & (pairs > 0)
    return [
        Turning(distances[own].astype(np.float64), mean[own], np.sqrt(square[own]), count[own])
        for own, mean, square, count in zip(known, means, squares, pairs, strict=True)
    ]


def _scatter(distances: Array, apart: Array, pairs: Array) -> Array:
    """Relative variance of D of one pair, by layer and distance: that of a range, drawn to that of the network."""
    out = np.full(apart.shape, np.nan)
    for own in ((distances > 1) & (distances <= _SHORT), distances > _SHORT, distances == 1):
        squares = np.nansum(apart[:, own], axis=1)
        free = np.sum(np.where(np.isfinite(apart[:, own]), np.maximum(pairs[:, own] - 1, 0), 0), axis=1)
        network = np.sum(squares) / np.sum(free)
        out[:, own] = ((squares + _NETWORK * network) / (free + _NETWORK))[:, None]
    return out


def _left_out(names: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> Array:
    """Relative variance of D from the coordinates that are not read: 2/k of k, none if all are."""
    sizes = np.array([float(entry.get("entries", np.inf)) for entry in entries])
    read = np.minimum(sizes, [_COORDINATES[name.endswith("]")] for name in names])
    return np.asarray(2 / read * (1 - read / sizes))


@lru_cache(maxsize=64)
def independent_turning(rule: Rule, steps: int) -> Array:
    """D(n) / (n D(1)) of independent gradients for n = 1..steps: 1 for plain SGD, more within momentum's memory.

    That of the equilibrium; where there is none, that of the memory alone. Layers of a group share it.

    Example:
        >>> rule = SGD(0.05, 5e-3, momentum=0.9)
        >>> independent_turning(rule, 1024)[[0, 15, 1023]].round(1).tolist()
        [1.0, 9.9, 19.3]
    """
    if isinstance(rule, AdamL2):
        rule = SGD(1.0, _FAINT, momentum=rule.betas[0])
    elif not rule.lr * rule.weight_decay > 0:
        rule = replace(rule, lr=1.0, weight_decay=_FAINT)
    turned = -np.log(np.maximum(np.cos(n_step_angles(rule, steps)[1:]), _RIGHT_ANGLE))
    return np.asarray(turned / (np.arange(1, steps + 1) * turned[0]))
