"""The growth gain: how much the squared norm grows per squared angle, and the balance of norms that follows from it.

A step ``w' = (1-s) w + e`` changes ||w||^2 by decay, by alignment and by turning, without any assumption
(`norm_budget`). Momentum hides the meaning of the alignment: it repeats past steps, which point away from the weight
they have moved. Over a window of steps the budget that keeps its meaning is

    change of ln ||w||^2 = -2 sum eps + pull + F sum angle^2,

with eps the decay in force per step. F is what an invariant weight gains under evenly spread noise (`growth_gain`), and
the pull is that of the gradient before momentum. Both together are one measured number, G = F + pull / sum angle^2
(`measured_gain`), which needs norms and angles only. Equilibrium is where ``G angle^2 = 2 eps``
(`equilibrium_from_gain`), for weights that are invariant and for weights that are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule, check_rule

_ROUNDING = 1e-5  # relative, of inner products of float32 vectors


@law("smd", "Thm 1, Thm 2", derived="F = 2 eps / angle^2 in equilibrium, eps the decay in force, as lr wd goes to 0")
def growth_gain(rule: Rule) -> float:
    """F: growth of ln ||w||^2 per squared angle, for an invariant weight under evenly spread uncorrelated noise.

    Squared steps add up to F times the squared angles because an update repeats a part of the earlier ones. SGD:
    ``(1+a)/(1-a)`` with momentum a, Nesterov ``(1+a)/((1-a)(1+2a-2a^3))``; SGDW likewise; AdamW and Adam with L2
    ``(1+b1)/(1-b1)``; Lion and Muon S = ``rule.memory.total()``, for Muon of the rule's shape. Uneven coordinates lower
    it (`violations.violation_error`), so that a measured gain of F alone proves no invariance.

    Args:
        rule: the optimizer; learning rate and weight decay do not matter.

    Returns:
        F, in the limit of a small lr * wd; 1 for plain SGD.

    Example:
        >>> from equilibria.theory import SGD, AdamW
        >>> round(growth_gain(SGD(0.1, momentum=0.9, nesterov=True)), 2), round(growth_gain(AdamW(1e-3)), 2)
        (14.16, 19.0)
    """
    check_rule(rule)
    if isinstance(rule, SGD | SGDW):
        a = rule.momentum
        nesterov = isinstance(rule, SGD) and rule.nesterov
        return (1 + a) / ((1 - a) * (1 + 2 * a - 2 * a**3 if nesterov else 1))
    if isinstance(rule, AdamW | AdamL2):
        return (1 + rule.betas[0]) / (1 - rule.betas[0])
    return float(rule.memory.total())


# ---- one step, exactly


@dataclass(frozen=True, slots=True)
class NormBudget:
    """The relative change of ||w||^2 in one step, by its causes.

    Attributes:
        decay: -2 s + s^2.
        alignment: 2 (1-s) <w, e> / ||w||^2: the update's component along the weight, momentum's memory included.
        turning: ||e||^2 / ||w||^2.
    """

    decay: Array
    alignment: Array
    turning: Array

    @property
    def total(self) -> Array:
        """||w'||^2 / ||w||^2 - 1."""
        return self.decay + self.alignment + self.turning


@law("smd", "Thm 1", derived="the square of w' = (1-s) w + e, term by term; exact for every weight and optimizer")
def norm_budget(norm_sq: ArrayLike, *, shrink: ArrayLike, w_dot_update: ArrayLike, update_sq: ArrayLike) -> NormBudget:
    """Why a norm changes in one step: decay, alignment, turning; exact for invariant and other weights alike.

    ``||w'||^2/||w||^2 - 1 = (-2s + s^2) + 2(1-s) <w,e>/||w||^2 + ||e||^2/||w||^2`` for ``w' = (1-s) w + e``. For plain
    SGD on an invariant weight the alignment is 0. With momentum it is positive through past steps alone; over many
    steps `growth_budget` tells the pull of the gradient from them.

    Args:
        norm_sq: ||w||^2 before the step, a number or an array as all the others.
        shrink: s, the share that decay takes.
        w_dot_update: <w, e>, e the rest of the step.
        update_sq: ||e||^2.

    Returns:
        The three parts; they sum to the relative change of ||w||^2.

    Example:
        >>> budget = norm_budget(4.0, shrink=0.01, w_dot_update=0.0, update_sq=0.04)
        >>> round(float(budget.decay), 4), round(float(budget.turning), 4), round(float(budget.total), 4)
        (-0.0199, 0.01, -0.0099)
    """
    p, s = reals("norm_sq", norm_sq, above=0), reals("shrink", shrink)
    along, size = reals("w_dot_update", w_dot_update), reals("update_sq", update_sq, low=0)
    if np.any(along**2 > p * size * (1 + _ROUNDING)):
        raise EquilibriaError(
            f"got w_dot_update={w_dot_update!r} with norm_sq={norm_sq!r} and update_sq={update_sq!r}; expected an "
            "inner product of these vectors, |<w, e>| <= ||w|| ||e||",
            argument="w_dot_update",
        )
    return NormBudget(np.asarray(s * (s - 2)), np.asarray(2 * (1 - s) * along / p), np.asarray(size / p))


# ---- a window of steps


@law("smd", "Thm 1", derived="norms and angles alone: (change of ln ||w||^2 + 2 sum eps) / sum angle^2")
def measured_gain(log_growth: ArrayLike, *, decay: ArrayLike, angle_sq: ArrayLike) -> Array:
    """G of a weight over a window of steps: ``(change of ln ||w||^2 + 2 sum eps) / sum angle^2``.

    It is `growth_gain` for an invariant weight under evenly spread noise. A matrix that is not invariant has a gain of
    its own, which persists: above F the gradient pushes it outward, below F it pulls it inward.

    Args:
        log_growth: ln of ||w||^2 after the window over that before, one number or one per weight.
        decay: sum over the window of eps, the decay in force per step: lr wd; with coupled decay and momentum a
            lr wd / (1-a).
        angle_sq: sum over the window of the squared angles per step.

    Returns:
        G; NaN where nothing turned.

    Example:
        >>> float(measured_gain(0.0, decay=0.02, angle_sq=0.04))  # a constant norm
        1.0
    """
    change, lost = reals("log_growth", log_growth), reals("decay", decay, low=0)
    turned = reals("angle_sq", angle_sq, low=0)
    return np.asarray((change + 2 * lost) / np.where(turned > 0, turned, np.nan))


@dataclass(frozen=True, slots=True)
class GrowthBudget:
    """The change of ln ||w||^2 over a window of steps, by its causes.

    Attributes:
        decay: -2 sum eps.
        pull: of the gradient before momentum, as the optimizer scales it; negative where it pulls inward.
        diffusion: F sum angle^2, what random steps alone add.
    """

    decay: Array
    pull: Array
    diffusion: Array


@law("smd", "Thm 1", derived="pull = (G - F) sum angle^2, without a gradient")
def growth_budget(gain: float, *, log_growth: ArrayLike, decay: ArrayLike, angle_sq: ArrayLike) -> GrowthBudget:
    """Why a norm changes over a window of steps under momentum: decay, pull of the gradient, diffusion.

    ``change of ln ||w||^2 = -2 sum eps + pull + F sum angle^2``; the pull is what the other two leave. On small
    transformers it agreed with the pull measured on gradients (correlation .996 or more). Under strongly uneven
    gradients (coordinate scales lognormal, sigma 2) F itself is too large, and the pull comes out too far inward.

    Args:
        gain: F, `growth_gain` of the optimizer.
        log_growth: as in `measured_gain`.
        decay: as in `measured_gain`.
        angle_sq: as in `measured_gain`.

    Returns:
        The three parts; they sum to ``log_growth``.

    Example:
        >>> budget = growth_budget(19.0, log_growth=0.062, decay=0.009, angle_sq=0.01326)
        >>> [round(100 * float(part), 1) for part in (budget.diffusion, budget.pull, budget.decay)]
        [25.2, -17.2, -1.8]
    """
    change, lost = reals("log_growth", log_growth), reals("decay", decay, low=0)
    diffusion = np.asarray(reals("gain", gain, above=0) * reals("angle_sq", angle_sq, low=0))
    return GrowthBudget(np.asarray(-2 * lost), np.asarray(change + 2 * lost - diffusion), diffusion)


@law("smd", "Thm 1", derived="<w, g> acts on ||w||^2 as weight decay does")
def effective_decay(weight_decay: ArrayLike, *, w_dot_grad: ArrayLike, norm_sq: ArrayLike) -> Array:
    """Weight decay and the gradient's pull in one number: ``wd + <w, g>/||w||^2``.

    The angle of a weight that is not invariant is then ``sqrt(2 lr wd_eff / F)`` in equilibrium, F of `growth_gain`
    (coupled decay with momentum: ``lr wd_eff / (1 - momentum)`` in place of ``lr wd_eff``).

    Args:
        weight_decay: wd.
        w_dot_grad: mean of <w, g>, g the gradient as the optimizer uses it before momentum (g / sqrt(v) for Adam). The
            inner product with the update itself also holds momentum's memory and does not serve.
        norm_sq: ||w||^2.

    Returns:
        wd_eff; negative where the gradient pushes outward more strongly than decay pulls inward.

    Example:
        >>> float(effective_decay(0.1, w_dot_grad=2.0, norm_sq=100.0).round(3))
        0.12
    """
    pull = reals("w_dot_grad", w_dot_grad) / reals("norm_sq", norm_sq, above=0)
    return np.asarray(reals("weight_decay", weight_decay, low=0) + pull)


@dataclass(frozen=True, slots=True)
class GainEquilibrium:
    """Equilibrium of weights with a measured growth gain.

    Attributes:
        angle: radians per step; NaN where the gain is not positive: there decay and pull point the same way.
        norm: ||w||; None unless present norms and angles were given.
    """

    angle: Array
    norm: Array | None


@law("smd", "Thm 1", derived="G angle^2 = 2 eps where the norm is stationary")
def equilibrium_from_gain(
    gain: ArrayLike,
    *,
    decay_in_force: ArrayLike,
    norm: ArrayLike | None = None,
    angle: ArrayLike | None = None,
    norm_power: int = 1,
) -> GainEquilibrium:
    """Equilibrium of a weight, invariant or not, from its measured gain: ``angle* = sqrt(2 eps / G)``.

    A step turns as 1/||w||^p, so the norm at which it turns by angle* is ``||w|| (angle / angle*)^(1/p)``. Equilibrium
    is reached only where 1/(2 eps) steps are few against the length of the run.

    Args:
        gain: G of `measured_gain`, one number or one per weight.
        decay_in_force: eps per step: lr wd; with coupled decay and momentum a lr wd / (1-a).
        norm: the present ||w||.
        angle: the present angle per step.
        norm_power: p of `requested.norm_power`: 1 for updates of constant size (Adam, Lion, Muon), 2 for SGD and SGDW.

    Returns:
        Angle and norm.

    Raises:
        EquilibriaError: bad input, or one of norm and angle without the other.

    Example:
        >>> there = equilibrium_from_gain(19.0, decay_in_force=1e-4, norm=10.0, angle=0.0065)
        >>> f"{there.angle:.6f} {there.norm:.2f}"
        '0.003244 20.03'
    """
    g, eps = reals("gain", gain), reals("decay_in_force", decay_in_force, above=0)
    power = within("norm_power", whole("norm_power", norm_power), low=1, high=2)
    star = np.sqrt(2 * eps / np.where(g > 0, g, np.nan))
    if (norm is None) != (angle is None):
        raise EquilibriaError(f"got norm={norm!r}, angle={angle!r}; expected both or neither")
    if norm is None or angle is None:
        return GainEquilibrium(star, None)
    present = reals("norm", norm, above=0), reals("angle", angle, above=0)
    return GainEquilibrium(star, np.asarray(present[0] * (present[1] / star) ** (1 / power)))


@law("smd", "Thm 1", derived="d ln ||w||^2 = (-2 eps + G (lr u)^2 / ||w||^(2p)) dt, linear in ||w||^(2p) and solved")
def advance_by_gain(state: Array, fed: Array, *, decay: Array | float, lr_sq: Array | float, power: float) -> Array:
    """||w||^(2p) after some steps in which a weight turns by ``lr u / ||w||^p`` and gains G per squared angle.

    ``y' = -2p eps y + p G u^2 lr^2`` with ``y = ||w||^(2p)``, for steps that are alike. Not checked: the monitor calls
    it at every sample.

    Args:
        state: y before the steps.
        fed: G u^2.
        decay: sum of eps, the decay in force, over the steps; one number or one per weight.
        lr_sq: sum of lr^2 over them.
        power: p of `requested.norm_power`.

    Returns:
        y after the steps.

    Example:
        >>> y = advance_by_gain(np.array([1.0]), np.array([2.0]), decay=50.0, lr_sq=50.0, power=1)
        >>> y  # settled: G u^2 lr^2 = 2 eps y
        array([1.])
    """
    rate = 2 * power * decay
    grown = power * lr_sq
    if isinstance(rate, float):  # a number for all weights, without numpy's overhead
        return state * math.exp(-rate) + fed * (grown * (-math.expm1(-rate) / rate if rate > 0 else 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(state * np.exp(-rate) + fed * (grown * np.where(rate > 0, -np.expm1(-rate) / rate, 1.0)))
