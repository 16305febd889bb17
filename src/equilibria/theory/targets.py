"""The equilibrium of every step of a schedule, and the rescaling that keeps a weight in it.

A target is where the weight would settle if the settings of that step stayed as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive
from equilibria.theory import equilibrium
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import SMALLEST_SETTING, FixedPoint
from equilibria.theory.identified import Identified, identified_point
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule, check_rule


@dataclass(frozen=True, slots=True)
class Targets:
    """Equilibrium values along a schedule.

    Attributes:
        angle: radians per step; 0 where lr or weight decay is 0.
        norm_sq: ||w||^2; NaN where lr or weight decay is 0, which has no equilibrium.
    """

    angle: Array
    norm_sq: Array


@law("smd", "Thm 1, Thm 2, eq. (4), (5)", corrected="exact fixed points of every rule, vectorised over a schedule")
def targets(
    rule: Rule,
    lr: ArrayLike,
    *,
    weight_decay: ArrayLike | None = None,
    momentum: ArrayLike | None = None,
    unit_grad_sq: float = 1.0,
    dim: float = 1.0,
) -> Targets:
    """Equilibrium angle and squared norm for every learning rate, weight decay and momentum of a schedule.

    Args:
        rule: the optimizer.
        lr: learning rates.
        weight_decay: weight decays; by default the rule's.
        momentum: momenta of SGD and SGDW; by default the rule's.
        unit_grad_sq: L.
        dim: number of entries; for Muon the mean square of the adjusted update.

    Returns:
        The targets, broadcast over the arguments.

    Raises:
        EquilibriaError: bad input, or an lr * wd too large for an equilibrium.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 5e-4, momentum=0.9)
        >>> float(targets(rule, [0.1, 0.02]).angle[0]) == rule.equilibrium().angle
        True
    """
    check_rule(rule)
    eta = reals("lr", lr, low=0)
    lam = reals("weight_decay", rule.weight_decay if weight_decay is None else weight_decay, low=0)
    grad_sq, d = positive("unit_grad_sq", unit_grad_sq), positive("dim", dim)
    product = eta * lam
    still = product == 0
    eta, lam = np.where(still, np.nan, eta), np.where(still, np.nan, lam)
    with np.errstate(all="ignore"):  # NaN and infinite results raise below
        if isinstance(rule, AdamL2):
            point = equilibrium.adam_l2_point(eta, lam, rule.betas[0], dim=d, unit_grad_sq=grad_sq)
            norm_sq = point.norm_sq
        elif isinstance(rule, Identified):
            point = identified_point(rule, eta, lam, unit_grad_sq=grad_sq, dim=d)
            norm_sq = point.norm_sq
        else:
            point = _point(rule, eta, lam, momentum)
            norm_sq = point.norm_sq * (grad_sq**0.5 if isinstance(rule, SGD | SGDW) else d)
        relative = np.sqrt(2 * np.where(still, 0.0, point.one_minus_cos))
        angle = 2 * np.arcsin(relative / 2)
    tiny = ~still & (np.minimum(np.minimum(eta, lam), product) < SMALLEST_SETTING)
    if tiny.any():
        worst_lr, worst_decay = (float(np.broadcast_to(x, tiny.shape)[tiny].flat[0]) for x in (eta, lam))
        raise EquilibriaError(
            f"got lr={worst_lr:g}, weight_decay={worst_decay:g}; expected both and their product to be 0 or at least "
            f"{SMALLEST_SETTING:g}: below it norms and times leave the range of float64"
        )
    bad = ~still & ~(np.isfinite(norm_sq) & np.isfinite(angle))
    if not isinstance(rule, SGD | AdamL2 | Identified):
        bad |= product >= 1
    if bad.any():
        worst = float(np.broadcast_to(product, bad.shape)[bad].flat[0])
        raise EquilibriaError(f"got lr*weight_decay={worst:g}; expected a smaller one: no equilibrium here")
    return Targets(angle, norm_sq)


def _point(rule: Rule, lr: Array, weight_decay: Array, momentum: ArrayLike | None) -> FixedPoint:
    if isinstance(rule, SGD | SGDW):
        a = reals("momentum", rule.momentum if momentum is None else momentum, low=0, below=1)
        if isinstance(rule, SGDW):
            return equilibrium.sgdw_point(lr, weight_decay, a)
        if rule.nesterov:
            return equilibrium.nesterov_point(lr, weight_decay, a)
        return equilibrium.heavy_ball_point(lr, weight_decay, a, rule.dampening)
    if isinstance(rule, AdamW):
        return equilibrium.adamw_point(lr, weight_decay, rule.betas[0])
    assert not isinstance(rule, AdamL2 | Identified)
    return equilibrium.constant_update_point(lr, weight_decay, rule.memory)


# ---- every step of a schedule, and the rescaling that keeps a weight in equilibrium


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
    if isinstance(rule, Identified):  # the powers that keep the relative step and the decay
        step, decay = rule.step, rule.decay
        factor = scale ** ((step.radial - 1) / step.lr)
        return lr * factor, weight_decay * (factor**-decay.lr * scale**decay.radial) ** (1 / decay.weight_decay)
    return lr / scale, weight_decay * scale ** (2 if isinstance(rule, AdamL2) else 1)


def _constant_stretches(lr: Array, weight_decay: Array) -> Steps:
    """The first step of every stretch of constant lr and weight decay."""
    changed = (lr[1:] != lr[:-1]) | (weight_decay[1:] != weight_decay[:-1])
    return np.flatnonzero(np.concatenate([[True], changed]))
