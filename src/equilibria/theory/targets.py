"""The equilibrium of every step of a schedule: where the weight would settle if the settings stayed as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive
from equilibria.theory import equilibrium
from equilibria.theory._reals import reals
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import SMALLEST_SETTING, FixedPoint
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule, check_rule

Array = NDArray[np.float64]


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
            norm_sq, one_minus_cos = _adam_l2(rule, eta, lam, unit_grad_sq=grad_sq, dim=d)
        else:
            point = _point(rule, eta, lam, momentum)
            norm_sq = point.norm_sq * (grad_sq**0.5 if isinstance(rule, SGD | SGDW) else d)
            one_minus_cos = point.one_minus_cos
        relative = np.sqrt(2 * np.where(still, 0.0, one_minus_cos))
        angle = 2 * np.arcsin(relative / 2)
    tiny = ~still & (np.minimum(np.minimum(eta, lam), product) < SMALLEST_SETTING)
    if tiny.any():
        worst_lr, worst_decay = (float(np.broadcast_to(x, tiny.shape)[tiny].flat[0]) for x in (eta, lam))
        raise EquilibriaError(
            f"got lr={worst_lr:g}, weight_decay={worst_decay:g}; expected both and their product to be 0 or at least "
            f"{SMALLEST_SETTING:g}: below it norms and times leave the range of float64"
        )
    bad = ~still & ~(np.isfinite(norm_sq) & np.isfinite(angle))
    if not isinstance(rule, SGD | AdamL2):
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
    assert not isinstance(rule, AdamL2)
    return equilibrium.constant_update_point(lr, weight_decay, rule.memory)


def _adam_l2(rule: AdamL2, lr: Array, weight_decay: Array, *, unit_grad_sq: float, dim: float) -> tuple[Array, Array]:
    b1 = rule.betas[0]
    norm_sq = equilibrium.adam_l2_norm_sq(lr, weight_decay, b1=b1, dim=dim, unit_grad_sq=unit_grad_sq)
    k = equilibrium.adam_step_size(norm_sq, weight_decay, dim=dim, unit_grad_sq=unit_grad_sq)
    return norm_sq, lr * weight_decay * k * (1 - b1) / (1 + b1)
