"""Which rows of a tensor, or groups of rows, are invariant by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibria.objectives._objective import Params
from equilibria.symmetry._confirmation import FACTORS, FAR
from equilibria.symmetry._probes import Probe

_SILENT = 1e-11  # a row whose gradient is this much smaller than that of others has none
_SMALL = 1e-3  # rounding in a row is at least that of rows a thousand times larger, with which it is computed
_GOLDEN = 0.5 * (5**0.5 - 1)  # its multiples, without their whole parts, are all different


@dataclass(frozen=True, slots=True)
class Rows:
    """The smallest blocks of rows of a tensor that are invariant by themselves.

    Attributes:
        block: how many rows stand together: 1 if every row is invariant alone (BatchNorm behind it), the rows of a
            group (GroupNorm) or head (QK-norm), or all rows (LayerNorm).
        rows: how many rows the tensor has.
        invariant: for every block whether it is invariant, and has a gradient at all.
    """

    block: int
    rows: int
    invariant: tuple[bool, ...]

    @property
    def covered(self) -> int:
        """How many rows are in blocks that are invariant."""
        return self.block * sum(self.invariant)


def find_rows(probes: Sequence[Probe], *, zero: float) -> dict[str, Rows]:
    """The finest blocks for every tensor, from probes taken by row; tensors without such blocks are left out.

    Args:
        probes: those that were taken by row.
        zero: a radial derivative below this, relative to the product of the norms, is zero.
    """
    names = probes[0].row_radial if probes else {}
    found = {}
    for name in names:
        radial = np.stack([probe.row_radial[name] for probe in probes])
        size = np.stack([probe.row_size[name] for probe in probes])
        best = _finest(radial, size, zero=zero)
        if best is not None:
            found[name] = best
    return found


def confirmed_rows(
    found: Mapping[str, Rows], base: Params, *, axes: Mapping[str, int], stays: Callable[[Params], bool]
) -> dict[str, Rows]:
    """Those of the answers that scaling confirms: every invariant block by another factor, then all of them far.

    Args:
        found: what `find_rows` says.
        base: where.
        axes: that number the rows.
        stays: whether a network stays the same with some tensors replaced.
    """
    if not found:
        return {}
    if all(stays(scaled) for scaled in _ways(found, base, axes)):
        return dict(found)
    names = list(found)
    halves = (names[: len(names) // 2], names[len(names) // 2 :]) if len(names) > 1 else ()
    kept: dict[str, Rows] = {}
    for half in halves:
        kept |= confirmed_rows({name: found[name] for name in half}, base, axes=axes, stays=stays)
    return kept


def _ways(found: Mapping[str, Rows], base: Params, axes: Mapping[str, int]) -> Iterator[Params]:
    """Blocks that are invariant scaled: each by a factor of its own, there and back, then all by each common factor."""
    apart = {name: _logs_apart(len(rows.invariant)) for name, rows in found.items()}
    for sign in (1, -1):
        yield {name: _scaled(base[name], rows, axes[name], sign * apart[name]) for name, rows in found.items()}
    for factor in (*FACTORS, FAR):
        log = np.log2(factor)
        yield {name: _scaled(base[name], rows, axes[name], log) for name, rows in found.items()}


def _logs_apart(count: int) -> np.ndarray:
    """Of factors of 1.5 to 4 either way, no two alike, neighbours contrary."""
    index = np.arange(count)
    logs: np.ndarray = (-1.0) ** index * (0.6 + 1.4 * (_GOLDEN * index % 1))
    return logs


def _scaled(tensor: Tensor, rows: Rows, axis: int, logs: np.ndarray | float) -> Tensor:
    """The tensor with its invariant blocks scaled by two to the powers of ``logs``."""
    factors = np.exp2(logs * np.array(rows.invariant)).repeat(rows.block)
    shape = [1] * tensor.ndim
    shape[axis] = rows.rows
    return tensor * torch.from_numpy(factors).reshape(shape).to(tensor.device)


def _finest(radial: np.ndarray, size: np.ndarray, *, zero: float) -> Rows | None:
    """The smallest block that covers the most rows; a row without gradient (a dead unit, an unused token) fits any."""
    count = radial.shape[1]
    most, best = 0, None
    for block in (each for each in range(1, count + 1) if count % each == 0):
        still, alive = _still_and_alive(radial, size, block, zero=zero)
        if (still & alive).any() and still.sum() * block > most:
            most, best = int(still.sum()) * block, Rows(block, count, tuple((still & alive).tolist()))
    return best


def _still_and_alive(radial: np.ndarray, size: np.ndarray, block: int, *, zero: float) -> tuple[np.ndarray, np.ndarray]:
    by_block = radial.reshape(len(radial), -1, block).sum(axis=2)
    sizes = np.sqrt((size.reshape(len(size), -1, block) ** 2).sum(axis=2))
    typical = sizes.max(axis=1, keepdims=True)
    alive = (sizes > _SILENT * typical).any(axis=0)
    still = (np.abs(by_block) <= zero * np.maximum(sizes, _SMALL * typical)).all(axis=0)
    return still, alive
