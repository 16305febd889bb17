"""Rows of a tensor, or groups of rows, that are invariant by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibria.objectives._objective import Params
from equilibria.symmetry._confirmation import FACTORS, FAR
from equilibria.symmetry._precise import Precision
from equilibria.symmetry._probes import Probe

_SMALL = 1e-3  # rounding in a row is at least that of rows a thousand times larger, which are computed with it
_GOLDEN = 0.5 * (5**0.5 - 1)  # the fractional parts of its multiples are all different


@dataclass(frozen=True, slots=True)
class Rows:
    """The smallest blocks of rows of a tensor that are invariant by themselves.

    Attributes:
        block: number of rows in a block: 1 if every row is invariant alone (before BatchNorm), the rows of a group
            (GroupNorm) or head (QK-norm), or all rows (LayerNorm).
        rows: number of rows of the tensor.
        invariant: for every block, whether it is invariant and has a gradient.
    """

    block: int
    rows: int
    invariant: tuple[bool, ...]

    @property
    def covered(self) -> int:
        """Number of rows in invariant blocks."""
        return self.block * sum(self.invariant)


def find_rows(probes: Sequence[Probe], *, zero: float) -> dict[str, Rows]:
    """Find the finest invariant blocks of every tensor; tensors without invariant blocks are left out.

    Args:
        probes: taken by row.
        zero: a radial derivative below this, relative to the product of the norms, is zero.
    """
    names = probes[0].row_radial if probes else {}
    blocks = {}
    for name in names:
        radial = np.stack([probe.row_radial[name] for probe in probes])
        size = np.stack([probe.row_size[name] for probe in probes])
        finest = _finest(radial, size, zero=zero, precision=probes[0].precision)
        if finest is not None:
            blocks[name] = finest
    return blocks


def confirmed_rows(
    candidates: Mapping[str, Rows], base: Params, *, axes: Mapping[str, int], stays: Callable[[Params], bool]
) -> dict[str, Rows]:
    """Confirm blocks by scaling: every invariant block by another factor, then all of them far; bisect on failure.

    Args:
        candidates: result of `find_rows`.
        base: the parameters before scaling.
        axes: the axis that numbers the rows of each tensor.
        stays: whether the network stays the same with some tensors replaced.
    """
    if not candidates:
        return {}
    if all(stays(scaled) for scaled in _scalings(candidates, base, axes)):
        return dict(candidates)
    names = list(candidates)
    halves = (names[: len(names) // 2], names[len(names) // 2 :]) if len(names) > 1 else ()
    kept: dict[str, Rows] = {}
    for half in halves:
        kept |= confirmed_rows({name: candidates[name] for name in half}, base, axes=axes, stays=stays)
    return kept


def _scalings(candidates: Mapping[str, Rows], base: Params, axes: Mapping[str, int]) -> Iterator[Params]:
    """Scale the invariant blocks: by different factors, by their inverses, then all by each common factor."""
    logs = {name: _different_logs(len(rows.invariant)) for name, rows in candidates.items()}
    for sign in (1, -1):
        yield {name: _scaled(base[name], rows, axes[name], sign * logs[name]) for name, rows in candidates.items()}
    for factor in (*FACTORS, FAR):
        log = np.log2(factor)
        yield {name: _scaled(base[name], rows, axes[name], log) for name, rows in candidates.items()}


def _different_logs(count: int) -> np.ndarray:
    """Base-2 logarithms of factors between 1.5 and 4, up and down alternately, all different."""
    index = np.arange(count)
    logs: np.ndarray = (-1.0) ** index * (0.6 + 1.4 * (_GOLDEN * index % 1))
    return logs


def _scaled(tensor: Tensor, rows: Rows, axis: int, logs: np.ndarray | float) -> Tensor:
    """The tensor with its invariant blocks scaled by two to the powers of ``logs``."""
    factors = np.exp2(logs * np.array(rows.invariant)).repeat(rows.block)
    shape = [1] * tensor.ndim
    shape[axis] = rows.rows
    return tensor * torch.from_numpy(factors).reshape(shape).to(device=tensor.device, dtype=tensor.dtype)


def _finest(radial: np.ndarray, size: np.ndarray, *, zero: float, precision: Precision) -> Rows | None:
    """The smallest block size that covers the most rows; a row without gradient (dead unit, unused token) fits any."""
    count = radial.shape[1]
    most, best = 0, None
    for block in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
        invariant, alive = _invariant_and_alive(radial, size, block, zero=zero, silent=precision.silent_row)
        if (invariant & alive).any() and invariant.sum() * block > most:
            most, best = int(invariant.sum()) * block, Rows(block, count, tuple((invariant & alive).tolist()))
    return best


def _invariant_and_alive(
    radial: np.ndarray, size: np.ndarray, block: int, *, zero: float, silent: float
) -> tuple[np.ndarray, np.ndarray]:
    """For every block, whether its radial derivative is zero and whether it has a gradient.

    A row whose gradient is ``silent`` times as large as that of others counts as without gradient.
    """
    by_block = radial.reshape(len(radial), -1, block).sum(axis=2)
    sizes = np.sqrt((size.reshape(len(size), -1, block) ** 2).sum(axis=2))
    typical = sizes.max(axis=1, keepdims=True)
    alive = (sizes > silent * typical).any(axis=0)
    invariant = (np.abs(by_block) <= zero * np.maximum(sizes, _SMALL * typical)).all(axis=0)
    return invariant, alive
