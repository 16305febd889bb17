"""The proof by doing: scale the tensors, and look whether the network's outputs, or its losses, stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.objectives._objective import Objective, Params
from equilibria.symmetry._precise import precise

# A symmetry holds for any factor; far away, where activations clip or saturate, what only looks like one fails.
FACTORS = (0.5, 2.0, 1 / 32, 32.0)
FAR = 2.0**16  # of all tensors alike, lest one channel becomes rounding beside another
# Powers of two scale floating-point numbers without rounding; these do not, so that the type shows as well.
ROUNDED_FACTORS = (0.6,)  # smaller, for eps weighs more when norms are small
# Outputs that hardly depend on the sample (deep networks with small gradients) are looked at this closely, no closer:
# rounding, relative to all of their size, must stay far below what counts as a change.
_CLOSEST = 1e-6
_LARGEST_POWER = 12.0  # of a factor that a tensor is scaled by; with larger exponents the factor is closer to one
_LARGEST_LOG = 1000.0  # to the base of two, of what a float64 can be scaled by
_LOSSES_DIFFER = 1e-6  # of their size, between batches: a loss that is the same everywhere proves nothing


class Confirmer:
    """Compares outputs before and after scaling, relative to how much they differ among themselves.

    The loss itself proves less: it may barely move although the network changes. It is compared, over several batches,
    where an objective knows nothing but its loss, and where the loss may be blind to what outputs do (a cosine).

    Args:
        objective: what is evaluated.
        point: where.
        batches: on what.
        exact: whether in float64 with negligible eps, or as the network really computes.
        losses: whether to compare losses, relative to their size, in place of outputs.

    Attributes:
        sharp: whether outputs differ enough between samples for every effect to be seen.
    """

    def __init__(
        self, objective: Objective, point: Params, batches: Sequence[Any], *, exact: bool, losses: bool = False
    ) -> None:
        self._objective, self._point, self._batches, self._exact = objective, point, batches, exact
        self._losses = losses
        parts = self._parts(point)
        self._before = _joined(parts)
        self._spread, self.sharp = (_size_of_losses(self._before), True) if losses else _spread(parts, self._before)

    def at(self, replaced: Params) -> Confirmer:
        """The same where some tensors are replaced by others."""
        point = {**self._point, **replaced}
        return Confirmer(self._objective, point, self._batches, exact=self._exact, losses=self._losses)

    @property
    def can_tell(self) -> bool:
        """Whether outputs are finite, and not all zero."""
        return 0 < self._spread < math.inf

    def change(self, exponents: Mapping[str, float]) -> float:
        """The largest change of an output when each tensor is scaled by c to its exponent, over their spread.

        nan where the outputs are all zero or not finite, so that nothing can be said.
        """
        return self._largest_change([exponents])

    def changes(self, vectors: Sequence[Mapping[str, float]], *, enough: float) -> list[float]:
        """The same for many vectors: all at once, each with a factor of its own, and in halves where that shows more.

        Scalings commute, so outputs that stay although every vector is scaled by another factor confirm them all.

        Args:
            vectors: exponents.
            enough: a change up to this needs no closer look.
        """
        if not vectors:
            return []
        together = self._largest_change(vectors)
        if together <= enough or len(vectors) == 1:
            return [together] * len(vectors)
        middle = len(vectors) // 2
        return self.changes(vectors[:middle], enough=enough) + self.changes(vectors[middle:], enough=enough)

    def _largest_change(self, vectors: Sequence[Mapping[str, float]]) -> float:
        scaled = (_scaled(self._point, vectors, factors) for factors in self._rounds(vectors))
        return max((self._relative(self._responses(each)) for each in scaled), key=nan_last)

    def _rounds(self, vectors: Sequence[Mapping[str, float]]) -> list[list[float]]:
        """A factor for each vector, several times: neighbours differ, each gets every factor, then all go far.

        Far down only where something else goes up: a weight that is small beside its bias would vanish in rounding.
        """
        if not self._exact:
            return [[factor] * len(vectors) for factor in ROUNDED_FACTORS]
        turns = range(len(FACTORS))
        near = [[FACTORS[(index + turn) % len(FACTORS)] for index in range(len(vectors))] for turn in turns]
        down = [1 / FAR if min(vector.values()) < 0 else 1.0 for vector in vectors]
        return [*near, [FAR] * len(vectors), *([down] if min(down) < 1 else [])]

    def likeness(self, one: Params, other: Params) -> float:
        """The cosine between the changes of outputs that two replacements make; nan where there is no change."""
        first, second = (self._responses({**self._point, **each}) - self._before for each in (one, other))
        return float(first @ second / (first.norm() * second.norm()))

    def relative_to_size(self, change: float) -> float:
        """A change that is relative to the spread of outputs between samples, relative to the largest output."""
        return change * self._spread / max(float(self._before.abs().max()), torch.finfo(torch.float64).tiny)

    def change_with(self, replaced: Params) -> float:
        """The same for tensors that are replaced by others."""
        return self._relative(self._responses({**self._point, **replaced}))

    def _relative(self, after: Tensor) -> float:
        return float((after - self._before).abs().max()) / self._spread if self._spread > 0 else math.nan

    def _responses(self, point: Params) -> Tensor:
        return _joined(self._parts(point))

    def _parts(self, point: Params) -> list[Tensor]:
        if not self._exact:
            with torch.no_grad():
                return [self._response(point, batch) for batch in self._batches]
        leaves = {name: param.detach().requires_grad_() for name, param in point.items()}
        with precise(), torch.enable_grad():  # without history, what is computed could be taken for an eps
            return [self._response(leaves, batch).detach() for batch in self._batches]

    def _response(self, point: Params, batch: Any) -> Tensor:
        outputs = None if self._losses else self._objective.outputs(point, batch)
        if outputs is None:
            return self._objective(point, batch)
        return torch.view_as_real(outputs.resolve_conj()) if outputs.is_complex() else outputs


def _scaled(point: Params, vectors: Sequence[Mapping[str, float]], factors: Sequence[float]) -> Params:
    """The point with each vector's tensors scaled by its factor to their exponents.

    Many vectors together may go beyond what numbers can be: then outputs change, and fewer are tried at once.
    """
    logs: dict[str, float] = {}
    for vector, factor in zip(vectors, factors, strict=True):
        log = math.log2(factor) * min(1.0, _LARGEST_POWER / max(map(abs, vector.values())))
        for name, exponent in vector.items():
            logs[name] = logs.get(name, 0.0) + log * exponent
    bounded = {name: max(-_LARGEST_LOG, min(_LARGEST_LOG, log)) for name, log in logs.items()}
    return {**point, **{name: point[name] * 2.0**log for name, log in bounded.items()}}


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([each.double().flatten() for each in parts])


def _spread(parts: list[Tensor], joined: Tensor) -> tuple[float, bool]:
    """How much an output differs between samples, and whether that is far above rounding; else a share of its size."""
    overall = float(joined.std()) if joined.numel() > 1 else 0.0
    if not all(part.ndim > 1 and len(part) > 1 for part in parts):
        return overall or float(joined.abs().max()), True
    between = float(_joined([part - part.mean(0, keepdim=True) for part in parts]).square().mean().sqrt())
    least = _CLOSEST * (overall or float(joined.abs().max()))
    return max(between, least), between > least


def _size_of_losses(losses: Tensor) -> float:
    """The largest loss; 0, so that nothing is confirmed, where batches do not differ."""
    size = float(losses.abs().max())
    return size if float(losses.max() - losses.min()) > _LOSSES_DIFFER * size else 0.0


def nan_last(value: float) -> float:
    """As a key: not a number counts as the largest."""
    return math.inf if math.isnan(value) else value
