"""Notices gradients that were clipped by norm, which a folded run cannot follow."""

from __future__ import annotations

import itertools
import math

import torch
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError
from equilibria.tensors.layout import is_sharded

_SUCCESSIVE = 3  # steps read in a row
_EVERY = 200  # steps from one such reading to the next: reading all gradients takes time
_KEPT = 9  # norms compared: three readings
_SAME = 5e-6  # clip_grad_norm_ divides by norm + 1e-6, and the sum of float32 squares rounds
_MOVED = 200 * _SAME  # a larger change of a tensor's share shows that gradients are not merely repeated


class ClippingCheck:
    """Reads the norms of all gradients in three steps out of 200 and raises if they were clipped by norm.

    Clipped gradients have the same total norm whatever their directions. If three of the last nine norms agree to six
    digits while the tensors' shares in them do not, chance is excluded: 84 triples times (1e-5)^2. Where the shares
    agree too (a single tensor, or the same batch again at a tiny learning rate), three successive norms must agree and
    be a number that people type: two digits. Clipping by value, by layer, or above the norms seen goes unnoticed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._recent: list[list[float]] = []

    def check(self, optimizer: Optimizer) -> None:
        """Check before a step, if it is one of the three.

        Raises:
            EquilibriaError: if the gradients were clipped by norm.
        """
        place = self._count % _EVERY
        self._count += 1
        if place >= _SUCCESSIVE:
            return
        self._recent = [*self._recent, _norms(optimizer)][-_KEPT:]
        norm = math.hypot(*self._recent[-1])
        equal = [norms for norms in self._recent if _same(math.hypot(*norms), norm)]
        last = self._recent[-_SUCCESSIVE:]
        typed = place == _SUCCESSIVE - 1 and all(_is_typed(math.hypot(*norms), norm) for norms in last)
        if typed or (len(equal) >= _SUCCESSIVE and _pairwise_apart(equal)):
            raise EquilibriaError(
                f"got gradients with the same norm {norm:.5g} in {_SUCCESSIVE} steps of {len(self._recent)}; expected "
                "gradients that were not clipped: clipping by norm depends on the scale of the weights, so that a "
                "folded run is not equal to the run with weight decay. Train without clip_grad_norm_, or with weight "
                "decay (unfold())"
            )


def _norms(optimizer: Optimizer) -> list[float]:
    """One norm per gradient; NaN if gradients cannot be read."""
    gradients = [
        weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
    ]
    if not gradients or any(is_sharded(gradient) or gradient.layout != torch.strided for gradient in gradients):
        return [math.nan]
    # In 16 bits, norms would agree by chance.
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    return [float(norm) for norm in torch._foreach_norm(gradients, 2, dtype=dtype)]


def _same(norm: float, other: float) -> bool:
    return math.isfinite(norm) and norm > 0 and abs(norm - other) <= _SAME * other


def _pairwise_apart(norms: list[list[float]]) -> bool:
    """Whether no two of these gradients have the same norms, tensor by tensor."""
    return all(_apart(a, b) for a, b in itertools.combinations(norms, 2))


def _apart(a: list[float], b: list[float]) -> bool:
    return len(a) != len(b) or max(abs(x - y) for x, y in zip(a, b, strict=True)) > _MOVED * math.hypot(*a)


def _is_typed(norm: float, other: float) -> bool:
    """Whether a norm is a number of two digits, the same as the other norm rounded to two digits."""
    return _same(norm, float(f"{other:.1e}"))
