"""Rescaling along a schedule: what `equilibria.control.RescaleOnDecay` does to the norm before every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.rules import SGD, SGDW, AdamL2, Rule
from equilibria.theory.targets import targets

Array = NDArray[np.float64]


def rescaled_sq(rule: Rule, lr: Array, weight_decay: Array, *, unit_grad_sq: float = 1.0, dim: float = 1.0) -> Array:
    """What ||w||^2 is multiplied by before every step so that each change starts in its new equilibrium.

    Args:
        rule: the optimizer.
        lr: of every step.
        weight_decay: of every step.
        unit_grad_sq: L; matters for Adam with L2 only.
        dim: number of entries; matters for Adam with L2 only.

    Returns:
        One factor per step, 1 where nothing changes. Steps without an equilibrium (lr or weight decay 0) are passed
        over: the next one that has one is reached from the last one that had.

    Example:
        >>> from equilibria.theory import SGD
        >>> factors = rescaled_sq(SGD(0.1, 5e-4), np.array([0.1, 0.1, 0.0, 0.025]), np.full(4, 5e-4))
        >>> factors.round(3).tolist()
        [1.0, 1.0, 1.0, 0.5]
    """
    firsts = np.flatnonzero(np.concatenate([[True], (lr[1:] != lr[:-1]) | (weight_decay[1:] != weight_decay[:-1])]))
    goal = targets(rule, lr[firsts], weight_decay=weight_decay[firsts], unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
    moving = lr[firsts] * weight_decay[firsts] > 0
    found = np.ones(len(lr))
    if np.count_nonzero(moving) > 1:
        found[firsts[moving][1:]] = goal[moving][1:] / goal[moving][:-1]
    return found


def in_scale(rule: Rule, lr: Array, weight_decay: Array, scale: Array) -> tuple[Array, Array]:
    """The lr and weight decay under which w / scale moves by itself as a rescaled w does.

    With c the scale, gradients grow as 1/c, momentum buffers are divided by it and second moments by its square: what
    is left is lr / c^2 and wd c^2 (SGD, SGDW), lr / c and wd c (updates of a fixed size), lr / c and wd c^2 (Adam with
    L2). So a rescaling at every step costs no more than none.
    """
    if isinstance(rule, SGD | SGDW):
        return lr / scale**2, weight_decay * scale**2
    return lr / scale, weight_decay * scale ** (2 if isinstance(rule, AdamL2) else 1)
