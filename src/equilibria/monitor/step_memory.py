"""What connects a step with earlier ones, from a few coordinates of every weight (`equilibria.tensors.subsample`).

- How far weights turn over many steps, D(n): one reference, compared 1, 2, 4, ..., 1024 steps later, then the next.
- How far the gradient pulls back the last move: <g, w - w of the step before>, at sampled steps.

Neither copies a weight. The coordinates are read at eleven of 1,024 steps, and for the pull at sampled steps, not more
often than at every second step, and right before these.
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
from equilibria.tensors.parameters import Watched
from equilibria.tensors.subsample import Subsample, Vector

Array = NDArray[np.float64]
WriteRows: TypeAlias = Callable[[Mapping[str, Any]], None]

LONGEST = 1024  # steps from a reference to the next
_PULL_EVERY = 2  # steps from one pull to the next at least: under AdamW it costs a third of a sample
_MOST_ROWS = 500_000  # of the diffusion table in memory, about 15 MB


class Comparison(NamedTuple):
    """A reference and the weights some steps later, still on the device that formed their products.

    Attributes:
        step: number of the step before which the reference was taken.
        distance: steps between the two.
        rows: the compared units.
        products: <a, a>, <a, e> and <e, e> of reference a and move e.
    """

    step: int
    distance: int
    rows: NDArray[np.int64]
    products: tuple[Vector, Vector, Vector]

    def turned(self) -> Array:
        """-ln cos of the angle between the two; infinite from a right angle on, NaN where it could not be formed.

        cos^-2 - 1 = tan^2 comes from the move itself, so that small angles lose no digits.
        """
        aa, ae, ee = (np.asarray(part if isinstance(part, np.ndarray) else part.cpu()) for part in self.products)
        along = aa + ae
        turned = np.where(np.isfinite(along), np.inf, np.nan)
        acute = (along > 0) & (aa > 0)
        aa, ae, ee, along = aa[acute], ae[acute], ee[acute], along[acute]
        turned[acute] = np.log1p(np.maximum(ee - ae * ae / aa, 0.0) * aa / (along * along)) / 2
        return turned


@dataclass(slots=True)
class _Reference:
    """The coordinates that later ones are compared with.

    Attributes:
        count: steps that the optimizer had taken before.
        step: number of the step that followed.
        distance: of the next comparison.
        weights: the coordinates; NaN for a tensor that something else has changed since.
    """

    count: int
    step: int
    distance: int
    weights: Vector


class StepMemory:
    """Keeps coordinates of one optimizer's weights from step to step.

    Args:
        watched: its tensors; sharded ones are left out, because each process holds other coordinates.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._made: Subsample | None = None
        self._reference: _Reference | None = None
        self._kept: list[tuple[int, Vector]] = []  # at most two: count of a step and the weights before it
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

    def look(self, count: int, step: int, *, keep: bool) -> None:
        """Compare with the reference if that is due; call it before every step.

        Args:
            count: steps that the optimizer has taken.
            step: number of the coming step.
            keep: whether `pull` is wanted at this step or the next.
        """
        reference = self._reference
        is_due = reference is None or not 0 < count - reference.count < reference.distance
        if not (keep or is_due) or not self._subsample.tensors:
            return
        weights = self._subsample.weights()
        if keep:
            self._kept = [*(kept for kept in self._kept[-1:] if kept[0] == count - 1), (count, weights)]
        if is_due:
            self._compare(reference, count, step, weights)

    def _compare(self, reference: _Reference | None, count: int, step: int, weights: Vector) -> None:
        if reference is not None and count - reference.count == reference.distance:
            move = weights - reference.weights
            pairs = (reference.weights, reference.weights), (reference.weights, move), (move, move)
            aa, ae, ee = (self._subsample.sums(first * second) for first, second in pairs)
            rows = self._subsample.rows
            self._comparisons.append(Comparison(reference.step, reference.distance, rows, (aa, ae, ee)))
            if reference.distance < LONGEST:
                reference.distance *= 2
                return
        self._reference = _Reference(count, step, 1, weights)

    def take_comparisons(self) -> list[Comparison]:
        """The comparisons since the last call."""
        taken, self._comparisons = self._comparisons, []
        return taken

    def pull(self, count: int, gradients: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Inner products with the gradients of the coming step; call it after `look` with ``keep``.

        Args:
            count: as for `look`.
            gradients: one for each tensor, None where it is unknown.
            second: Adam's second moments v, None for other optimizers.

        Returns:
            The rows of the units, and estimates for the whole of each: <g, w - w of the step before> and
            <g, g/sqrt(v)>. NaN where one of them is unknown.
        """
        sample = self._subsample
        slope = sample.of(gradients)
        scale: Any = sample.scale if isinstance(slope, np.ndarray) else torch.as_tensor(sample.scale).to(slope)
        moved = None
        if len(self._kept) == 2 and self._kept[1][0] == count:
            moved = sample.sums(slope * (self._kept[1][1] - self._kept[0][1])) * scale
            self._next_pull = count + _PULL_EVERY
        scaled = None
        if any(moment is not None for moment in second):
            root: Any = sample.of(second) ** 0.5
            root[root == 0] = np.inf  # a coordinate that never had a gradient
            scaled = sample.sums(slope * slope / root) * scale
        return sample.rows, moved, scaled

    def forget(self, tensor: int) -> None:
        """Compare a tensor with nothing that was kept: something other than a step has changed it."""
        held = [*([self._reference.weights] if self._reference else []), *(weights for _, weights in self._kept)]
        for weights in held if tensor in self._subsample.tensors else ():
            weights[self._subsample.slice_of(tensor)] = np.nan

    def forget_last(self) -> None:
        """Do not take the next move for that of a step: a controller has rescaled weights in between."""
        self._kept = []

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint."""
        held = self._reference
        return {
            "reference": None if held is None else (held.count, held.step, held.distance, _saved(held.weights)),
            "kept": [(count, _saved(weights)) for count, weights in self._kept],
            "next_pull": self._next_pull,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint of the same weights."""
        self._reference, self._kept, self._comparisons = None, [], []
        self._next_pull = int(state.get("next_pull", 0))
        if state.get("reference") is not None:
            count, step, distance, weights = state["reference"]
            self._reference = _Reference(count, step, distance, self._subsample.restored(weights))
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

    def add(self, comparison: Comparison, names: Sequence[str]) -> None:
        """Take a comparison; units whose angle could not be formed are left out."""
        turned = comparison.turned()
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
