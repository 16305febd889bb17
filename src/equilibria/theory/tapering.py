"""Tapered-exponential schedules step by step, for a run whose settings become known as it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibria.errors import EquilibriaError, number, positive, within
from equilibria.theory.citations import law
from equilibria.theory.exponential import decay_roots
from equilibria.theory.folding import FoldState, FoldStep

_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Taper:
    """Where a tapered-exponential schedule stands.

    Attributes:
        log_lr: natural logarithm of the learning rate of this step, without weight decay.
        lr: the step decay's learning rate in this step.
        first_lr: the step decay's learning rate at the start.
        log_root: ``log z1`` of this step's phase.
    """

    log_lr: float
    lr: float
    first_lr: float
    log_root: float


@law(
    "explr",
    "Theorem 2.4, eq. 5",
    corrected="the drop happens at the first step of the new phase with the factor (lr_I/lr_{I-1})/(z_{I-1} z_I)",
)
def taper(
    before: Taper | None, lr: float, *, weight_decay: float, momentum: float = 0.0, instant_drop: bool = True
) -> Taper:
    """The next step of `texp.texp`, or of `texp.texp_without_drop`.

    Args:
        before: the step before; None for the first step.
        lr: the step decay's learning rate in this step, above 0.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).
        instant_drop: whether the learning rate follows a drop at once; without, only its growth does.

    Returns:
        The schedule at this step.

    Raises:
        EquilibriaError: bad input, or complex roots.

    Example:
        >>> from equilibria.theory.texp import texp
        >>> first = taper(None, 0.1, weight_decay=5e-4, momentum=0.9)
        >>> second = taper(first, 0.01, weight_decay=5e-4, momentum=0.9)
        >>> log_lr = texp([(0, 0.1), (1, 0.01)], 5e-4, steps=2, momentum=0.9).log_lr
        >>> bool(abs(second.log_lr - log_lr[1]) < 1e-15)
        True
    """
    eta = positive("lr", lr)
    log_root = math.log1p(-float(decay_roots(eta, weight_decay, momentum=momentum).decay))
    if before is None:
        return Taper(math.log(eta), eta, eta, log_root)
    log_ratio = -2 * log_root
    if instant_drop and eta != before.lr:
        log_ratio = math.log(eta / before.lr) - before.log_root - log_root
    return Taper(before.log_lr + log_ratio, eta, before.first_lr, log_root)


@law(
    "",
    "inverse of Theorem 2.5 of Li & Arora",
    derived="one step of `folding.unfold`: 1/alpha = 1 + e u with e = lr~/P²",
)
def explain(state: FoldState, log_lr: float, *, weight_decay: float, momentum: float = 0.0) -> FoldStep:
    """One step at a given learning rate without weight decay, as a step of a folded run.

    Every run without weight decay is the folded form of a run with ``weight_decay``, at another learning rate. This
    gives that run's P and q, which say how statistics follow and how to switch back.

    Args:
        state: the state before the step.
        log_lr: natural logarithm of the learning rate, before powers of two are divided out.
        weight_decay: the coupled weight decay to explain it by, at least 0.
        momentum: in [0, 1).

    Returns:
        The step; its ``lr`` is that of the stored, renormalised weights.

    Raises:
        EquilibriaError: bad input, or a learning rate beyond float64.

    Example:
        >>> from equilibria.theory.folding import advance
        >>> folded = advance(FoldState(), 0.1, weight_decay=0.5)
        >>> again = explain(FoldState(), folded.log_lr, weight_decay=0.5)
        >>> bool(abs(again.alpha - folded.alpha) < 1e-15 and abs(again.lr - folded.lr) < 1e-15)
        True
    """
    decay, g = within("weight_decay", weight_decay, low=0), within("momentum", momentum, low=0, below=1)
    log_effective = number("log_lr", log_lr) - 2 * state.log_scale
    if log_effective > 700:
        raise EquilibriaError(f"got log_lr={log_lr:g} at log_scale={state.log_scale:g}; expected a smaller one")
    velocity = decay + g * state.q
    growth = 1 + math.exp(log_effective) * velocity
    after = FoldState(state.log_scale + math.log(growth), velocity * growth if g else 0.0, state.exponent)
    whole_part = round(log_lr / _LN2)  # a mantissa that does not depend on the exponent, to the bit
    lr = math.ldexp(math.exp(log_lr - whole_part * _LN2), whole_part - 2 * state.exponent)
    return FoldStep(after, lr, log_lr - 2 * state.exponent * _LN2, 1 / growth)
