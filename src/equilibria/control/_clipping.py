"""Notices gradients that were clipped by their norm, which has no equivalent in a folded run."""

from __future__ import annotations

import itertools
import math

import torch
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError
from equilibria.measure.layout import is_sharded

_IN_A_ROW = 3
_EVERY = 200  # steps between two looks of three steps each: reading all gradients is not free
_KEPT = 9  # norms that are compared: three looks
_SAME = 5e-6  # clip_grad_norm_ divides by norm + 1e-6, and the sum of float32 squares rounds
_MOVED = 200 * _SAME  # change of a tensor's share from which on the gradients are not simply the same ones again


class ClippingWatch:
    """Looks at the norms of all gradients in three steps out of 200.

    Clipped gradients have one and the same norm, whatever their directions. Three of the last nine that agree to six
    digits, while the shares of the tensors in them do not, are no chance: 84 triples times (1e-5)^2. Where the shares
    agree too (a single tensor, or the same batch again at a tiny learning rate) three in a row must agree, and be a
    number that people type: two digits. Clipping by value, by layer, or above the norms met is not noticed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._seen: list[list[float]] = []

    def look(self, optimizer: Optimizer) -> None:
        """Look before a step, if it is time; refuse clipped gradients."""
        place = self._count % _EVERY
        self._count += 1
        if place >= _IN_A_ROW:
            return
        self._seen = [*self._seen, _norms(optimizer)][-_KEPT:]
        norm = math.hypot(*self._seen[-1])
        alike = [each for each in self._seen if _same(math.hypot(*each), norm)]
        typed = place == _IN_A_ROW - 1 and all(_is_typed(math.hypot(*each), norm) for each in self._seen[-_IN_A_ROW:])
        if typed or (len(alike) >= _IN_A_ROW and _pairwise_apart(alike)):
            raise EquilibriaError(
                f"got gradients with the same norm {norm:.5g} in {_IN_A_ROW} steps of {len(self._seen)}; expected "
                "gradients that were not clipped: clipping by norm depends on the scale of the weights, so that a "
                "folded run is not equal to the run with weight decay. Train without clip_grad_norm_, or with weight "
                "decay (unfold())"
            )


def _norms(optimizer: Optimizer) -> list[float]:
    """One norm per gradient; NaN if they cannot be read."""
    gradients = [
        weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
    ]
    if not gradients or any(is_sharded(each) or each.layout != torch.strided for each in gradients):
        return [math.nan]
    # Norms of 16-bit gradients in 16 bits would agree by chance.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in gradients) else torch.float32
    return [float(norm) for norm in torch._foreach_norm(gradients, 2, dtype=dtype)]


def _same(norm: float, other: float) -> bool:
    return math.isfinite(norm) and norm > 0 and abs(norm - other) <= _SAME * other


def _pairwise_apart(seen: list[list[float]]) -> bool:
    """Whether no two of these gradients have the same norms, tensor by tensor."""
    return all(_apart(a, b) for a, b in itertools.combinations(seen, 2))


def _apart(a: list[float], b: list[float]) -> bool:
    return len(a) != len(b) or max(abs(x - y) for x, y in zip(a, b, strict=True)) > _MOVED * math.hypot(*a)


def _is_typed(norm: float, other: float) -> bool:
    """Whether this is a number of two digits, and the same one as another."""
    return _same(norm, float(f"{other:.1e}"))
