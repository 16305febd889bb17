"""The proof by doing: scale the tensors, and look whether the network's outputs stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from equilibria.measure.objective import Objective, Params
from equilibria.measure.symmetry.precise import precise

# A symmetry holds for any factor; far away, where activations clip or saturate, what only looks like one fails.
FACTORS = (0.5, 2.0, 1 / 32, 32.0)
# Powers of two scale floating-point numbers without rounding; these do not, so that the type shows as well.
ROUNDED_FACTORS = (0.6,)  # smaller, for eps weighs more when norms are small


class Confirmer:
    """Compares outputs before and after scaling, relative to how much they differ among themselves.

    The loss itself would prove little: it may barely move although the network changes. It is used, over several
    batches, where an objective knows nothing but its loss.

    Args:
        objective: what is evaluated.
        point: where.
        batches: on what.
        exact: whether in float64 with negligible eps, or as the network really computes.
    """

    def __init__(self, objective: Objective, point: Params, batches: Sequence[Any], *, exact: bool) -> None:
        self._objective, self._point, self._batches, self._exact = objective, point, batches, exact
        self._factors = FACTORS if exact else ROUNDED_FACTORS
        self._before = self._responses(point)
        spread = float(self._before.std()) if self._before.numel() > 1 else 0.0
        self._spread = spread or float(self._before.abs().max())

    def change(self, exponents: Mapping[str, float], *, at: Params | None = None) -> float:
        """The largest change of an output when each tensor is scaled by c to its exponent, over their spread.

        nan where the outputs are all zero or not finite, so that nothing can be said.

        Args:
            exponents: of the tensors that are scaled.
            at: tensors to be replaced by others first.
        """
        point = {**self._point, **(at or {})}
        before = self._responses(point) if at else self._before
        changes = []
        for factor in self._factors:
            scaled = {name: point[name] * factor**exponent for name, exponent in exponents.items()}
            changes.append(self._relative(self._responses({**point, **scaled}), before))
        return max(changes, key=_nan_last)

    def changes(self, vectors: Sequence[Mapping[str, float]], *, enough: float) -> list[float]:
        """The same for many vectors: all at once, each with a factor of its own, and in halves where that shows more.

        Scalings commute, so outputs that stay although every vector is scaled by another factor confirm them all.

        Args:
            vectors: exponents.
            enough: a change up to this needs no closer look.
        """
        if len(vectors) <= 1:
            return [self.change(vector) for vector in vectors]
        together = max((self._change_of_all(vectors, shift) for shift in range(len(self._factors))), key=_nan_last)
        if together <= enough:
            return [together] * len(vectors)
        middle = len(vectors) // 2
        return self.changes(vectors[:middle], enough=enough) + self.changes(vectors[middle:], enough=enough)

    def _change_of_all(self, vectors: Sequence[Mapping[str, float]], shift: int) -> float:
        logs: dict[str, float] = {}
        for index, vector in enumerate(vectors):
            log = math.log2(self._factors[(index + shift) % len(self._factors)])
            for name, exponent in vector.items():
                logs[name] = logs.get(name, 0.0) + log * exponent
        scaled = {name: self._point[name] * 2.0**log for name, log in logs.items()}
        return self._relative(self._responses({**self._point, **scaled}), self._before)

    def change_with(self, replaced: Params) -> float:
        """The same for tensors that are replaced by others."""
        return self._relative(self._responses({**self._point, **replaced}), self._before)

    def _relative(self, after: Tensor, before: Tensor) -> float:
        return float((after - before).abs().max()) / self._spread if self._spread > 0 else math.nan

    def _responses(self, point: Params) -> Tensor:
        context: AbstractContextManager[None] = precise() if self._exact else nullcontext()
        with context, torch.no_grad():
            found = [self._response(point, batch) for batch in self._batches]
        return torch.cat([each.double().flatten() for each in found])

    def _response(self, point: Params, batch: Any) -> Tensor:
        outputs = self._objective.outputs(point, batch)
        if outputs is None:
            return self._objective(point, batch)
        return torch.view_as_real(outputs.resolve_conj()) if outputs.is_complex() else outputs


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
