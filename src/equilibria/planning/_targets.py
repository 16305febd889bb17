"""The equilibrium of every step of a schedule, and the rescaling that keeps a weight in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.rules import SGD, SGDW, AdamL2, Rule
from equilibria.theory.targets import Targets, targets

Array = NDArray[np.float64]
Steps = NDArray[np.int64]


def targets_per_step(
    rule: Rule, lr: Array, weight_decay: Array, *, unit_grad_sq: float = 1.0, dim: float = 1.0
) -> Targets:
    """`theory.targets` of every step, solved once per stretch of constant lr and weight decay."""
    firsts = _constant_stretches(lr, weight_decay)
    solved = targets(rule, lr[firsts], weight_decay=weight_decay[firsts], unit_grad_sq=unit_grad_sq, dim=dim)
    lengths = np.diff(firsts, append=len(lr))
    return Targets(np.repeat(solved.angle, lengths), np.repeat(solved.norm_sq, lengths))


def rescale_sq_factors(
    rule: Rule, lr: Array, weight_decay: Array, *, unit_grad_sq: float = 1.0, dim: float = 1.0
) -> Array:
    """The factors of ||w||^2 before every step that start each change of lr or weight decay in its new equilibrium.

    `equilibria.control.RescaleOnDecay` applies the same factors.

    Args:
        rule: the optimizer.
        lr: learning rate of every step.
        weight_decay: weight decay of every step.
        unit_grad_sq: L; matters for Adam with L2 only.
        dim: number of entries; matters for Adam with L2 only.

    Returns:
        One factor per step, 1 where nothing changes. Steps without an equilibrium (lr or weight decay 0) have 1; the
        next step with an equilibrium gets the factor from the last equilibrium before them.

    Example:
        >>> from equilibria.theory import SGD
        >>> factors = rescale_sq_factors(SGD(0.1, 5e-4), np.array([0.1, 0.1, 0.0, 0.025]), np.full(4, 5e-4))
        >>> factors.round(3).tolist()
        [1.0, 1.0, 1.0, 0.5]
    """
    firsts = _constant_stretches(lr, weight_decay)
    solved = targets(rule, lr[firsts], weight_decay=weight_decay[firsts], unit_grad_sq=unit_grad_sq, dim=dim)
    moving = lr[firsts] * weight_decay[firsts] > 0
    factors = np.ones(len(lr))
    if np.count_nonzero(moving) > 1:
        norm_sq = solved.norm_sq[moving]
        factors[firsts[moving][1:]] = norm_sq[1:] / norm_sq[:-1]
    return factors


def unscaled_settings(rule: Rule, lr: Array, weight_decay: Array, scale: Array) -> tuple[Array, Array]:
    """The lr and weight decay under which w / scale moves without rescaling as the rescaled w does.

    With c the scale, gradients grow as 1/c, momentum buffers are divided by c and second moments by c^2. What remains
    is lr / c^2 and wd c^2 (SGD, SGDW), lr / c and wd c (updates of a fixed size), or lr / c and wd c^2 (Adam with L2).
    So a rescaling at every step costs no more than none.
    """
    if isinstance(rule, SGD | SGDW):
        return lr / scale**2, weight_decay * scale**2
    return lr / scale, weight_decay * scale ** (2 if isinstance(rule, AdamL2) else 1)


def _constant_stretches(lr: Array, weight_decay: Array) -> Steps:
    """The first step of every stretch of constant lr and weight decay."""
    changed = (lr[1:] != lr[:-1]) | (weight_decay[1:] != weight_decay[:-1])
    return np.flatnonzero(np.concatenate([[True], changed]))
