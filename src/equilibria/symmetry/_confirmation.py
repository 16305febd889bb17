"""Confirmation of symmetries: scale the tensors and compare the outputs of the network, or its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.objectives._objective import Objective, Params
from equilibria.symmetry._precise import Precision, precise, precision_of

# A symmetry holds for any factor. Far away, where activations clip or saturate, an apparent symmetry fails.
FACTORS = (0.5, 2.0, 1 / 32, 32.0)
FAR = 2.0**16  # applied to all vectors alike: different factors this large would make one channel rounding of another
# Powers of two scale floating-point numbers without rounding; this factor does not, so that rounding shows as well.
ROUNDED_FACTORS = (0.6,)  # below 1, because eps weighs more when norms are small
_LARGEST_POWER = 12.0  # largest power of a factor on a tensor; with larger exponents the factor is closer to one


class Confirmer:
    """Compares outputs before and after scaling, relative to their spread between samples.

    The loss itself proves less: it may barely move although the network changes. Losses are compared, over several
    batches, where an objective has no outputs, and where the loss may ignore a change of outputs (a cosine).

    Args:
        objective: the loss and its outputs.
        point: the parameters before scaling.
        batches: the data.
        exact: whether to compute in the type of the point with a negligible eps, or as the network really computes.
        losses: whether to compare losses, relative to their size, instead of outputs.

    Attributes:
        sharp: whether outputs differ enough between samples for every effect to show.
    """

    def __init__(
        self, objective: Objective, point: Params, batches: Sequence[Any], *, exact: bool, losses: bool = False
    ) -> None:
        self._objective, self._point, self._batches, self._exact = objective, point, batches, exact
        self._losses, self._precision = losses, precision_of(next(iter(point.values())))
        parts = self._parts(point)
        self._before = _joined(parts)
        if losses:
            self._spread, self.sharp = _size_of_losses(self._before, self._precision), True
        else:
            self._spread, self.sharp = _spread(parts, self._before, self._precision)

    def with_replaced(self, replaced: Params) -> Confirmer:
        """A confirmer at another point, where some tensors are replaced."""
        point = {**self._point, **replaced}
        return Confirmer(self._objective, point, self._batches, exact=self._exact, losses=self._losses)

    @property
    def can_tell(self) -> bool:
        """Whether outputs are finite, and not all zero."""
        return 0 < self._spread < math.inf

    def change(self, exponents: Mapping[str, float]) -> float:
        """The largest change of an output, relative to the spread, when each tensor is scaled by c to its exponent.

        NaN if the outputs are all zero or not finite.
        """
        return self._largest_change([exponents])

    def changes(self, vectors: Sequence[Mapping[str, float]], *, enough: float) -> list[float]:
        """`change` for many vectors: all at once with different factors, then by bisection where outputs change.

        Scalings commute, so if outputs stay the same while every vector has another factor, all are confirmed.

        Args:
            vectors: exponents.
            enough: a change up to this is not bisected further.
        """
        if not vectors:
            return []
        together = self._largest_change(vectors)
        if together <= enough or len(vectors) == 1:
            return [together] * len(vectors)
        middle = len(vectors) // 2
        return self.changes(vectors[:middle], enough=enough) + self.changes(vectors[middle:], enough=enough)

    def _largest_change(self, vectors: Sequence[Mapping[str, float]]) -> float:
        most = self._precision.largest_log
        scaled = (_scaled(self._point, vectors, factors, largest_log=most) for factors in self._rounds(vectors))
        return max((self._relative(self._responses(point)) for point in scaled), key=nan_last)

    def _rounds(self, vectors: Sequence[Mapping[str, float]]) -> list[list[float]]:
        """Factors for the vectors, one list per round: neighbours differ, each gets every factor; last, all go far.

        A vector goes far down only if it also scales something up: a weight much smaller than its bias would vanish in
        rounding.
        """
        if not self._exact:
            return [[factor] * len(vectors) for factor in ROUNDED_FACTORS]
        count = len(FACTORS)
        near = [[FACTORS[(index + turn) % count] for index in range(len(vectors))] for turn in range(count)]
        down = [1 / FAR if min(vector.values()) < 0 else 1.0 for vector in vectors]
        return [*near, [FAR] * len(vectors), *([down] if min(down) < 1 else [])]

    def likeness(self, one: Params, other: Params) -> float:
        """Cosine between the changes of outputs by two replacements; NaN if there is no change."""
        first, second = (self._responses({**self._point, **part}) - self._before for part in (one, other))
        return float(first @ second / (first.norm() * second.norm()))

    def relative_to_size(self, change: float) -> float:
        """Convert a change relative to the spread of outputs to one relative to the largest output."""
        return change * self._spread / max(float(self._before.abs().max()), torch.finfo(torch.float64).tiny)

    def change_with(self, replaced: Params) -> float:
        """The largest change of an output, relative to the spread, when some tensors are replaced."""
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
        with (
            precise(self._precision.dtype),
            torch.enable_grad(),
        ):  # `precise` takes small numbers without a graph for an eps
            return [self._response(leaves, batch).detach() for batch in self._batches]

    def _response(self, point: Params, batch: Any) -> Tensor:
        outputs = None if self._losses else self._objective.outputs(point, batch)
        if outputs is None:
            return self._objective(point, batch)
        return torch.view_as_real(outputs.resolve_conj()) if outputs.is_complex() else outputs


def _scaled(
    point: Params, vectors: Sequence[Mapping[str, float]], factors: Sequence[float], *, largest_log: float
) -> Params:
    """The point with each vector's tensors scaled by its factor to their exponents.

    Many vectors together may go beyond what numbers can be: then outputs change, and fewer are tried at once.
    """
    logs: dict[str, float] = {}
    for vector, factor in zip(vectors, factors, strict=True):
        log = math.log2(factor) * min(1.0, _LARGEST_POWER / max(map(abs, vector.values())))
        for name, exponent in vector.items():
            logs[name] = logs.get(name, 0.0) + log * exponent
    bounded = {name: max(-largest_log, min(largest_log, log)) for name, log in logs.items()}
    return {**point, **{name: point[name] * 2.0**log for name, log in bounded.items()}}


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.double().flatten() for part in parts])


def _spread(parts: list[Tensor], joined: Tensor, precision: Precision) -> tuple[float, bool]:
    """Spread of outputs between samples, at least a small part of their size; and whether it is above that."""
    overall = float(joined.std()) if joined.numel() > 1 else 0.0
    if not all(part.ndim > 1 and len(part) > 1 for part in parts):
        return overall or float(joined.abs().max()), True
    between = float(_joined([part - part.mean(0, keepdim=True) for part in parts]).square().mean().sqrt())
    least = precision.smallest_spread * (overall or float(joined.abs().max()))
    return max(between, least), between > least


def _size_of_losses(losses: Tensor, precision: Precision) -> float:
    """The largest loss; 0 if batches do not differ, so that nothing is confirmed."""
    size = float(losses.abs().max())
    return size if float(losses.max() - losses.min()) > precision.losses_differ * size else 0.0


def nan_last(value: float) -> float:
    """Sort key that makes NaN the largest."""
    return math.inf if math.isnan(value) else value
