"""Notices gradients that were clipped by their norm, which has no equivalent in a folded run."""

from __future__ import annotations

import math

import torch
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError
from equilibria.measure.layout import is_sharded

_IN_A_ROW = 3
_EVERY = 200  # steps between two looks of three steps each: reading all gradients is not free
_SAME = 5e-6  # clip_grad_norm_ divides by norm + 1e-6, and the sum of float32 squares rounds


class ClippingWatch:
    """Looks at the norm of all gradients in three steps out of 200.

    Clipped gradients have one and the same norm, and it is a number that people type: two digits. Three of these in a
    row do not happen by chance. Clipping by value, by layer, or above the norms met is not noticed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._norms: list[float] = []

    def look(self, optimizer: Optimizer) -> None:
        """Look before a step, if it is time; refuse clipped gradients."""
        place = self._count % _EVERY
        self._count += 1
        if place >= _IN_A_ROW:
            return
        norm = _norm(optimizer)
        self._norms = [*self._norms, norm] if place else [norm]
        if len(self._norms) == _IN_A_ROW and all(_is_typed(each, self._norms[0]) for each in self._norms):
            raise EquilibriaError(
                f"got gradients with the same norm {norm:.5g} in {_IN_A_ROW} steps in a row; expected gradients that "
                "were not clipped: clipping by norm depends on the scale of the weights, so that a folded run is not "
                "equal to the run with weight decay. Train without clip_grad_norm_, or with weight decay (unfold())"
            )


def _norm(optimizer: Optimizer) -> float:
    gradients = [
        weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
    ]
    if not gradients or any(is_sharded(each) or each.layout != torch.strided for each in gradients):
        return math.nan
    norms = torch._foreach_norm(gradients)
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))


def _is_typed(norm: float, first: float) -> bool:
    """Whether this is a number of two digits, and the same one as before."""
    if not (math.isfinite(norm) and norm > 0):
        return False
    typed = float(f"{first:.1e}")
    return abs(norm - typed) <= _SAME * typed
