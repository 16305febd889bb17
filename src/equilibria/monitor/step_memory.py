"""What connects a step with earlier ones, from a few coordinates of every weight (`equilibria.tensors.subsample`).

- How far weights turn over many steps, D(n): pairs of weights n = 1, 2, 4, ..., 1024 steps apart.
- How far the gradient pulls back the last move: <g, w - w of the step before>, at sampled steps.

Neither copies a weight. D(n) of one pair scatters by 20 to 60 % on networks, so that short distances need many pairs.
In 1,024 steps the coordinates are read 21 times: at 0, 1, 2, 4, ..., 512 and in short bursts, 2, 4, 8, 16 and 32 steps
after 256 and 512. Each read ends a pair and begins the next, which makes six pairs of 2 to 16 steps, four of 32, two up
to 512 and one of 1,024. At sampled steps more are read where they belong to a burst, one of which begins every 64
steps: with a sample every 4 steps, 32 pairs of 4 to 32 steps. The pull is read at sampled steps, not more often than at
every second step, and right before these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.errors import WatchWarning, warn_in_training
from equilibria.records.tables import DIFFUSION_FIELDS
from equilibria.tensors.device_queue import Sent
from equilibria.tensors.inner_products import CopyPass
from equilibria.tensors.parameters import Watched
from equilibria.tensors.subsample import Subsample, Vector

Array = NDArray[np.float64]
WriteRows: TypeAlias = Callable[[Mapping[str, Any]], None]

LONGEST = 1024  # steps, after which the pattern of reads begins again
_DISTANCES = tuple(2**power for power in range(11))
_BURST = 64  # steps from one burst to the next
_IN_BURST = frozenset((0, 2, 4, 8, 16, 32))  # steps of a burst at which coordinates are read
_LONG = frozenset(distance for distance in _DISTANCES if distance >= _BURST)
_READ = frozenset({1, *_LONG, *(begin + step for begin in (0, 256, 512) for step in _IN_BURST)}) - {LONGEST}
_PULL_EVERY = 2  # steps from one pull to the next at least: under AdamW it costs a third of a sample
_MOST_ROWS = 500_000  # of the diffusion table in memory, about 15 MB


class Comparison(NamedTuple):
    """A reference and the weights some steps later.

    Attributes:
        step: number of the step before which the reference was taken.
        distance: steps between the two.
        rows: the compared units.
        table: products of every unit, on their way to main memory.
        column: the first of three columns of it: <a, a>, <a, e> and <e, e> of reference a and move e.
        scale: of every compared unit, its entries over those that are read; None if all are.
    """

    step: int
    distance: int
    rows: NDArray[np.int64]
    table: Sent
    column: int = 0
    scale: Array | None = None

    def turned(self, norms: Array | None = None) -> Array:
        """-ln cos of the angle between the two; infinite from a right angle on, NaN where it could not be formed.

        cos^-2 - 1 = tan^2 comes from the move itself, so that small angles lose no digits. Of a large tensor 1,024
        coordinates know the move well, and the norm badly where few entries hold most of it (it was off by a third on
        networks); tan^2 is over the square of the norm, which is known.

        Args:
            norms: of all units, NaN where they are unknown: then those of the coordinates are used.
        """
        aa, ae, ee = self.table.read()[:, self.column : self.column + 3].T
        along = aa + ae
        turned = np.where(np.isfinite(along), np.inf, np.nan)
        acute = (along > 0) & (aa > 0)
        aa, ae, ee, along = aa[acute], ae[acute], ee[acute], along[acute]
        tan_sq = np.maximum(ee - ae * ae / aa, 0.0) * aa / (along * along)
        if norms is not None and self.scale is not None:
            own, scale = norms[self.rows[acute]], self.scale[acute]
            is_known = (scale > 1) & (own > 0)
            tan_sq[is_known] *= (scale * (aa + 2 * ae + ee))[is_known] / own[is_known] ** 2
        turned[acute] = np.log1p(tan_sq) / 2
        return turned


class Pull(NamedTuple):
    """Products with the gradient of a coming step, for some units.

    Attributes:
        rows: the units.
        table: of every unit, on its way to main memory; the last two columns are <g, w - w of the step before> and
            Adam's <g, g/sqrt(v)>, of a few coordinates.
        scale: makes estimates of the whole of each unit from them.
    """

    rows: NDArray[np.int64]
    table: Sent
    scale: Array

    def read(self) -> Array:
        """The estimates, (units, 2); NaN where one is unknown."""
        return self.table.read()[:, -2:] * self.scale[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """The coordinates that later ones are compared with.

    Attributes:
        count: steps that the optimizer had taken before.
        step: number of the step that followed.
        weights: the coordinates; NaN for a tensor that something else has changed since.
    """

    count: int
    step: int
    weights: Vector


class StepMemory:
    """Keeps coordinates of one optimizer's weights from step to step.

    Args:
        watched: its tensors; sharded ones are left out, because each process holds other coordinates.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._made: Subsample | None = None
        self._begin: int | None = None  # count of the step at which the pattern of reads began
        self._open: dict[int, _Reference] = {}  # by distance, the reference of the pair that has begun
        self._kept: list[tuple[int, Vector]] = []  # at most one: count of a step and the weights before it
        self._vectors: list[Vector] = []  # memory for the coordinates of one step each: as many as were ever held
        self._next_pull = 0  # count of the first step at which a pull may be read
        self._comparisons: list[Comparison] = []

    def may_pull(self, count: int) -> bool:
        """Whether enough steps lie between the last pull and the step after ``count`` others."""
        return count >= self._next_pull

    @property
    def _subsample(self) -> Subsample:
        if self._made is None:  # at the first step, not when watching begins
            self._made = Subsample(self._watched)
        return self._made

    def look(
        self,
        count: int,
        step: int,
        *,
        keep: bool,
        sampled: bool,
        gradients: Sequence[Tensor | None] | None = None,
        second: Sequence[Tensor | None] | None = None,
        copies: CopyPass | None = None,
    ) -> Pull | None:
        """Compare with earlier weights if that is due; call it before every step.

        Args:
            count: steps that the optimizer has taken.
            step: number of the coming step.
            keep: whether a pull is wanted at this step or the next.
            sampled: whether the coming step is sampled.
            gradients: of the coming step, one for each tensor, None where it is unknown; None if no pull is wanted.
            second: Adam's second moments v, None for other optimizers.
            copies: made in the same pass as far as possible.
        """
        passed = LONGEST if self._begin is None else count - self._begin
        if not 0 <= passed <= LONGEST:
            passed = LONGEST
            self._open = {}
        offset = passed % LONGEST
        is_due = offset in _READ or (sampled and offset % _BURST in _IN_BURST)
        if passed == LONGEST:
            self._begin = count
        sample = self._subsample
        if not (keep or is_due) or not sample.tensors:
            return None
        ended = self._ended(count)
        before = self._kept[-1][1] if self._kept and self._kept[-1][0] == count - 1 else None
        weights, sums = sample.look(
            [reference.weights for _, reference in ended],
            out=self._unused([*(reference.weights for _, reference in ended), before]),
            before=before,
            gradients=gradients,
            second=second,
            copies=copies,
        )
        self._begin_pairs(_Reference(count, step, weights), offset)
        if keep:
            self._kept = [(count, weights)]
        if not ended and gradients is None:
            return None
        table = Sent(sums)
        self._comparisons += [
            Comparison(reference.step, distance, sample.rows, table, 3 * place, sample.scale)
            for place, (distance, reference) in enumerate(ended)
        ]
        if gradients is None:
            return None
        self._next_pull = self._next_pull if before is None else count + _PULL_EVERY
        return Pull(sample.rows, table, sample.scale)

    def _unused(self, needed: Sequence[Vector | None]) -> Vector:
        """A vector that holds nothing which is still needed."""
        held = {id(vector) for vector in (*needed, *self._held())}
        for vector in self._vectors:
            if id(vector) not in held:
                return vector
        self._vectors.append(self._subsample.empty())
        return self._vectors[-1]

    def _held(self) -> list[Vector]:
        return [*(reference.weights for reference in self._open.values()), *(weights for _, weights in self._kept)]

    def _ended(self, count: int) -> list[tuple[int, _Reference]]:
        """Close the pairs that are as far apart as they shall be; their distances and references."""
        reached = {n: one for n, one in self._open.items() if count - one.count >= n}
        self._open = {n: one for n, one in self._open.items() if n not in reached}
        return [(n, one) for n, one in sorted(reached.items()) if count - one.count == n]

    def _begin_pairs(self, here: _Reference, offset: int) -> None:
        """Begin the pairs that start with the present weights, ``offset`` steps after the pattern began."""
        for distance in _DISTANCES:
            if offset % (LONGEST if distance in _LONG else _BURST) in (0, distance):
                self._open[distance] = here

    def take_comparisons(self, *, wait: bool) -> list[Comparison]:
        """The comparisons since the last call; without ``wait`` only those that a device has sent."""
        arrived = len(self._comparisons)
        if not wait:
            is_here = [comparison.table.has_arrived() for comparison in self._comparisons]
            arrived = (*is_here, False).index(False)
        taken, self._comparisons = self._comparisons[:arrived], self._comparisons[arrived:]
        return taken

    def forget(self, tensor: int) -> None:
        """Compare a tensor with nothing that was kept: something other than a step has changed it."""
        for weights in self._held() if tensor in self._subsample.tensors else ():
            weights[self._subsample.slice_of(tensor)] = np.nan

    def forget_last(self) -> None:
        """Do not take the next move for that of a step: a controller has rescaled weights in between."""
        self._kept = []

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint."""
        references = {id(reference): reference for reference in self._open.values()}
        return {
            "begin": self._begin,
            "references": [(one.count, one.step, _saved(one.weights)) for one in references.values()],
            "open": {distance: list(references).index(id(one)) for distance, one in self._open.items()},
            "kept": [(count, _saved(weights)) for count, weights in self._kept],
            "next_pull": self._next_pull,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint of the same weights."""
        self._comparisons = []
        self._begin, self._next_pull = state.get("begin"), int(state.get("next_pull", 0))
        references = [
            _Reference(count, step, self._subsample.restored(weights))
            for count, step, weights in state.get("references", ())
        ]
        self._open = {distance: references[place] for distance, place in state.get("open", {}).items()}
        self._kept = [(count, self._subsample.restored(weights)) for count, weights in state.get("kept", ())]


def _saved(weights: Vector) -> Tensor:
    return torch.from_numpy(weights.copy()) if isinstance(weights, np.ndarray) else weights.detach().clone()


class DiffusionLog:
    """The diffusion table in memory; beyond 500,000 rows it forgets the oldest. The record has all of them."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, list[str], Array]] = []  # step, distance, parameters, turned
        self._rows = 0
        self._write: WriteRows | None = None

    def record(self, write: WriteRows) -> None:
        """Hand all further rows to a record."""
        self._write = write

    def add(self, comparison: Comparison, names: Sequence[str], norms: Array | None = None) -> None:
        """Take a comparison; units whose angle could not be formed are left out."""
        turned = comparison.turned(norms)
        known = ~np.isnan(turned)
        params = [names[row] for row in comparison.rows[known].tolist()]
        if not params:
            return
        part = comparison.step, comparison.distance, params, turned[known]
        self._parts.append(part)
        self._rows += len(params)
        while self._rows > _MOST_ROWS and len(self._parts) > 1:
            self._rows -= len(self._parts.pop(0)[2])
        if self._write is not None:
            try:
                self._write(_columns([part]))
            except Exception as error:  # a defect of the record must not end the training
                self._write = None
                warn_in_training(f"D(n) is no longer recorded: {type(error).__name__}: {error}", WatchWarning)

    def drop_from(self, step: int) -> None:
        """Forget comparisons made before a step or a later one: training goes on from a checkpoint before it."""
        self._parts = [part for part in self._parts if part[0] + part[1] < step]
        self._rows = sum(len(part[2]) for part in self._parts)

    def table(self) -> pa.Table:
        """The diffusion table so far."""
        columns = _columns(self._parts)
        params = pa.array(columns["param"], pa.string()).dictionary_encode()
        arrays = [columns["step"], params, columns["distance"], pa.array(columns["turned"], pa.float64())]
        return pa.table(arrays, schema=DIFFUSION_FIELDS)


def _columns(parts: Sequence[tuple[int, int, list[str], Array]]) -> dict[str, Any]:
    counts = [len(part[2]) for part in parts]
    return {
        "step": np.repeat(np.array([part[0] for part in parts], dtype=np.int64), counts),
        "param": [name for part in parts for name in part[2]],
        "distance": np.repeat(np.array([part[1] for part in parts], dtype=np.int64), counts),
        "turned": [None if value == np.inf else value for part in parts for value in part[3].tolist()],
    }
