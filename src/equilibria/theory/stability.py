"""Effective learning rate, stability ratio, how training enters the edge of stability, and where each optimizer does.

Full-batch gradient descent with coupled weight decay, ``w <- (1 - lr*wd) w - lr grad L(w)``, on a
scale-invariant loss ``L(kw) = L(w)``. Directions are ``theta = w/|w|``; ``unit_grad_sq`` is
``|grad L(theta)|^2 = |w|^2 |grad L(w)|^2``; ``sharpness`` is the spherical sharpness ``lambda1``, the top
eigenvalue of the Hessian at ``theta``; the intrinsic learning rate is ``lr*wd`` and ``c = 1 - lr*wd``.
Laws broadcast over arrays, so one call serves all layers; numbers in give numpy floats out.

`effective_schedulers` treats the effective learning rate as a scheduler, `eos_series` reads a measured series at the
edge of stability, and `hamiltonian` describes the oscillation there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import one_of, within
from equilibria.theory._reals import Array, intrinsic_rate, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law
from equilibria.theory.hamiltonian import mean_square_displacement, period_steps
from equilibria.theory.moments import angle_from_chord_sq

TrainingDtype: TypeAlias = Literal["float64", "float32"]

# Where the transverse displacement stops shrinking after a long stable phase; measured on unit vectors.
ROUNDING_FLOOR: dict[TrainingDtype, float] = {"float64": 1e-16, "float32": 2e-7}


def _contraction(lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    """``c = 1 - lr*wd``, the factor by which weight decay alone shrinks the weight in one step."""
    intrinsic = positive_reals("lr", lr) * nonnegative_reals("weight_decay", weight_decay)
    return 1.0 - reals("lr*weight_decay", intrinsic, below=1)


@law("sharp", "Lemma 3.1")
def effective_lr(lr: ArrayLike, weight_decay: ArrayLike, *, norm_sq: ArrayLike) -> Array:
    """Learning rate of the projected gradient descent that the direction follows.

    ``eta = lr / (c |w|^2)``. Exact for every step size with ``lr*wd < 1``:
    ``theta' = unit(theta - eta grad L(theta))``. This is the quantity to compare with ``2/sharpness``; it
    differs from ``lr/|w|^2`` by the factor ``1/c``.

    Args:
        lr: learning rate of the optimiser.
        weight_decay: coupled L2 coefficient, as in ``torch.optim.SGD``.
        norm_sq: ``|w|^2`` of the scale-invariant group.

    Returns:
        Effective learning rate on the unit sphere.

    Raises:
        EquilibriaError: a value is not finite, ``lr`` or ``norm_sq`` is not positive, or ``lr*wd >= 1``.

    Example:
        >>> float(effective_lr(0.5, 0.4, norm_sq=2.5))  # 0.5 / (0.8 * 2.5)
        0.25
    """
    c = _contraction(lr, weight_decay)
    return np.asarray(lr, dtype=np.float64) / (c * positive_reals("norm_sq", norm_sq))


@law("sharp", "Lemma 3.1")
def projected_step(theta: ArrayLike, gradient: ArrayLike, *, effective_lr: ArrayLike) -> Array:
    """One step of projected gradient descent on the unit sphere, ``unit(theta - eta gradient)``.

    Args:
        theta: unit vectors along the last axis.
        gradient: gradient of the loss at ``theta``; same shape.
        effective_lr: ``eta`` of `effective_lr`, one per vector.

    Returns:
        The next unit vectors.

    Raises:
        EquilibriaError: a value is not finite, ``effective_lr`` is not positive, or a step ends at 0.

    Example:
        >>> projected_step([1.0, 0.0], [0.0, 2.0], effective_lr=0.375).round(12).tolist()  # sides 3, 4, 5
        [0.8, -0.6]
    """
    eta = positive_reals("effective_lr", effective_lr)[..., None]
    moved = reals("theta", theta) - eta * reals("gradient", gradient)
    norm = np.linalg.norm(moved, axis=-1, keepdims=True)
    return moved / positive_reals("|theta - effective_lr*gradient|", norm)


@law("sharp", "Lemma E.1, eq. (13)")
def norm_step(norm_sq: ArrayLike, unit_grad_sq: ArrayLike, *, lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    """Squared weight norm after one step, exactly.

    ``|w'|^2 = c^2 |w|^2 + lr^2 |grad L(theta)|^2 / |w|^2``. If the loss is invariant in several blocks
    separately, the law holds for each block with that block's gradient.

    Args:
        norm_sq: ``|w|^2`` now.
        unit_grad_sq: ``|grad L(theta)|^2`` now.
        lr: learning rate.
        weight_decay: coupled L2 coefficient.

    Returns:
        ``|w|^2`` after the step.

    Example:
        >>> float(norm_step(4.0, 0.0, lr=0.1, weight_decay=5.0))  # no gradient: only (1 - 0.5)^2
        1.0
    """
    squared = positive_reals("norm_sq", norm_sq)
    growth = np.asarray(lr, dtype=np.float64) ** 2 * nonnegative_reals("unit_grad_sq", unit_grad_sq) / squared
    return _contraction(lr, weight_decay) ** 2 * squared + growth


@law("sharp", "Lemma 3.1", derived="Pythagoras in the triangle (0, c*w, w'): the gradient is tangent")
def angle_from_norms(norm: ArrayLike, next_norm: ArrayLike, *, lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    """Angle between consecutive directions from the two norms alone, exactly.

    ``cos angle = c |w| / |w'|``. With a stationary norm: ``arccos(1 - lr*wd)``, about ``sqrt(2 lr wd)``.

    Args:
        norm: ``|w|`` before the step.
        next_norm: ``|w|`` after the step.
        lr: learning rate.
        weight_decay: coupled L2 coefficient.

    Returns:
        Angle in radians.

    Raises:
        EquilibriaError: a value is out of range, or the norm fell by more than weight decay can explain.

    Example:
        >>> float(angle_from_norms(1.0, 1.0, lr=1.0, weight_decay=0.5))  # arccos(1/2) = pi/3
        1.0471975511965976
    """
    kept = _contraction(lr, weight_decay) * positive_reals("norm", norm)
    after = positive_reals("next_norm", next_norm)
    # arctan of the two legs: arccos loses half the digits at the small angles of real training.
    # Norms measured in float32 may undercut a pure shrink by rounding; more than that is a wrong input.
    reals("next_norm/((1 - lr*weight_decay)*norm)", after / kept, low=1 - 1e-6)
    return np.arctan2(np.sqrt(np.maximum(after - kept, 0.0) * (after + kept)), kept)


@law("sharp", "Section 4.1", derived="the effective learning rate over its stability limit 2/lambda1")
def stability_ratio(effective_lr: ArrayLike, sharpness: ArrayLike) -> Array:
    """Stability ratio of gradient descent on the sphere, ``R = eta lambda1 / 2``: stable below 1, unstable above.

    Args:
        effective_lr: ``eta`` of `effective_lr`.
        sharpness: spherical sharpness ``lambda1``; never negative for a scale-invariant loss.

    Returns:
        Stability ratio, dimensionless.

    Raises:
        EquilibriaError: a value is not finite or negative.

    Example:
        >>> float(stability_ratio(0.25, 8.0))
        1.0
    """
    return positive_reals("effective_lr", effective_lr) * nonnegative_reals("sharpness", sharpness) / 2


@law(
    "sharp",
    "Appendix G.3, eq. (15)",
    corrected="the Hessian in eq. (15) is at w, not theta; the exact threshold is 2/lr - 2*wd, not 2/lr - wd",
)
def raw_threshold(lr: ArrayLike, weight_decay: ArrayLike) -> Array:
    """Top Hessian eigenvalue at the weights themselves at which gradient descent becomes unstable.

    ``lambda1(H(w)) = 2c/lr = 2/lr - 2 wd``, where the stability ratio ``R`` is 1.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient.

    Returns:
        Raw Hessian eigenvalue at the edge of stability.

    Example:
        >>> float(raw_threshold(0.5, 0.25))
        3.5
    """
    return 2 * _contraction(lr, weight_decay) / np.asarray(lr, dtype=np.float64)


@law("sharp", "Lemma 4.1")
def descent_bound(
    loss: ArrayLike, unit_grad_sq: ArrayLike, *, effective_lr: ArrayLike, max_sharpness: ArrayLike
) -> Array:
    """Upper bound on the loss after one step of gradient descent.

    ``L - eta (1 - eta lambda_max/2) |grad L(theta)|^2``, ``lambda_max = max_sharpness``.

    Args:
        loss: loss at ``theta``.
        unit_grad_sq: ``|grad L(theta)|^2``.
        effective_lr: ``eta``.
        max_sharpness: largest top Hessian eigenvalue along the *unprojected* segment
            ``theta - a grad L(theta)``, ``0 <= a <= eta``.

    Returns:
        Bound on the next loss; below ``loss`` exactly when ``eta < 2/max_sharpness``.

    Example:
        >>> float(descent_bound(1.0, 4.0, effective_lr=0.25, max_sharpness=4.0))
        0.5
    """
    slack = 1 - stability_ratio(effective_lr, max_sharpness)
    eta = np.asarray(effective_lr, dtype=np.float64)
    return reals("loss", loss) - eta * slack * nonnegative_reals("unit_grad_sq", unit_grad_sq)


@dataclass(frozen=True, slots=True)
class StationarityGuarantee:
    """Some step in ``0..steps`` has both quantities below their bounds.

    Attributes:
        steps: optimiser steps.
        unit_grad_sq: bound on ``|grad L(theta)|^2``.
        effective_lr: bound on the effective learning rate at that step.
    """

    steps: int
    unit_grad_sq: float
    effective_lr: float


@law(
    "sharp",
    "Theorem 3.2",
    corrected="Section 4.1 quotes effective_lr <= 1/(pi^2 rho); the theorem gives twice that",
)
def stationarity_guarantee(
    lr: float, weight_decay: float, *, norm_sq: float, smoothness: float
) -> StationarityGuarantee:
    """Steps within which GD with weight decay must meet a nearly stationary point; a loose guarantee, not a forecast.

    ``steps = ceil(ln(|w|^2/(pi^2 rho lr)) / (2 lr wd))``, ``unit_grad_sq = 8 pi^4 rho^2 lr wd``,
    ``effective_lr = 2/(pi^2 rho c)``. As ``8 pi^4`` is about 779, most runs satisfy it from the start.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient, positive.
        norm_sq: initial ``|w|^2``, at least ``pi^2 rho lr``.
        smoothness: ``rho``, the largest absolute Hessian eigenvalue on the unit sphere.

    Returns:
        Steps and the two bounds.

    Raises:
        EquilibriaError: ``lr*wd`` is outside (0, 1/2] or the initial norm is too small for the theorem.

    Example:
        >>> stationarity_guarantee(0.1, 0.1, norm_sq=100.0, smoothness=1.0).steps
        231
    """
    scale = float(np.pi**2 * within("smoothness", smoothness, above=0))
    rate = within("lr", lr, above=0)
    intrinsic = within("lr*weight_decay", rate * within("weight_decay", weight_decay), above=0, high=0.5)
    start = within("norm_sq", norm_sq, low=scale * rate)
    steps = int(np.ceil(np.log(start / (scale * rate)) / (2 * intrinsic)))
    return StationarityGuarantee(steps, 8 * scale**2 * intrinsic, 2 / (scale * (1 - intrinsic)))


@law(
    "sharp",
    "Theorem 4.3",
    derived="with a negligible gradient the effective learning rate grows by 1/c^2 per step",
)
def crossing_time(
    effective_lr: ArrayLike, sharpness: ArrayLike, *, intrinsic_lr: ArrayLike, start: ArrayLike = 0.0
) -> Array:
    """Step at which the stability ratio ``R`` reaches 1 after the loss has collapsed.

    ``start + ln(2/(lambda1 eta)) / (-2 ln c)``: with a negligible gradient ``eta`` grows by ``1/c^2`` per step.

    Args:
        effective_lr: ``eta`` at step ``start``, taken *after* the loss has collapsed: earlier the gradient
            still moves the norm and the answer can be thousands of steps off.
        sharpness: ``lambda1`` at that step.
        intrinsic_lr: ``lr*wd``.
        start: the step at which both were taken.

    Returns:
        Step number (real); before ``start`` if ``R`` already exceeds 1.

    Example:
        >>> round(float(crossing_time(1.0, 1.0, intrinsic_lr=1e-3)), 1)  # ln 2 / (2e-3)
        346.4
    """
    ratio = stability_ratio(effective_lr, positive_reals("sharpness", sharpness))
    steps: Array = np.log(ratio) / (2 * np.log1p(-intrinsic_rate(intrinsic_lr)))
    return reals("start", start) + steps


@law("sharp", "Theorem 4.3", derived="log|h| rises by 2*intrinsic_lr*s^2 in the s steps after R = 1")
def eos_delay(
    intrinsic_lr: ArrayLike, *, displacement: ArrayLike | None = None, dtype: TrainingDtype = "float64"
) -> Array:
    """Steps from the stability ratio ``R = 1`` until the oscillation is visible.

    ``sqrt(ln(h_seen/h)/(2 lr wd))`` with ``h_seen = sqrt(lr*wd/2)``. The displacement across the valley must grow back
    from where the stable phase left it, at worst from rounding noise; meanwhile ``R`` overshoots to about ``exp(2 lr wd
    delay)``. Lowest order in the overshoot: about 10 % short at ``lr*wd = 1e-2`` in float64, 6 % at 1e-3.

    Args:
        intrinsic_lr: ``lr*wd``.
        displacement: ``h`` at the crossing (unit sphere, positive). Default: the rounding floor of ``dtype``.
        dtype: "float64" or "float32", the arithmetic of the training run.

    Returns:
        Steps (real); 0 if the displacement is visible already.

    Raises:
        EquilibriaError: a value is not finite or out of range, or the dtype has no known floor.

    Example:
        >>> round(float(eos_delay(1e-3)), 1)
        128.5
    """
    if displacement is None:
        one_of("dtype", dtype, ROUNDING_FLOOR)
        displacement = ROUNDING_FLOOR[dtype]
    intrinsic = intrinsic_rate(intrinsic_lr)
    log_growth = np.log(np.sqrt(intrinsic / 2) / positive_reals("displacement", displacement))
    return np.sqrt(np.maximum(log_growth, 0.0) / (2 * intrinsic))


@dataclass(frozen=True, slots=True)
class EdgeOfStability:
    """Observables of a run at the edge of stability, averaged over its oscillation.

    Attributes:
        loss_above_minimum: training loss above its minimum, loss units.
        displacement_sq: mean squared displacement across the valley on the unit sphere, rad^2.
        unit_grad_sq: mean ``|grad L(theta)|^2``, loss^2.
        norm_sq: ``|w|^2`` of the invariant group.
        period: small-amplitude period of the slow oscillation, steps; large oscillations take longer.
        angular_step: angle turned per step at stationary norm, radians.
    """

    loss_above_minimum: Array
    displacement_sq: Array
    unit_grad_sq: Array
    norm_sq: Array
    period: Array
    angular_step: Array


@law(
    "sharp",
    "Section 4.2.3",
    corrected="the mean of h^2 (not of 2h^2) is 2*lr*wd/(4 + g^2), with the gradient norm squared; "
    "loss, norm and period derived from it",
)
def edge_of_stability(
    lr: ArrayLike, weight_decay: ArrayLike, *, sharpness: ArrayLike, grad_norm: ArrayLike = 0.0
) -> EdgeOfStability:
    """Loss, norm, period and angle of gradient descent with weight decay at the edge of stability.

    With ``e = lr*wd``, ``g = grad_norm``: ``<h^2> = 2e/(4+g^2)``, loss ``e lambda1/(4+g^2)``,
    ``<|grad L(theta)|^2> = 2 e lambda1^2/(4+g^2)``, ``|w|^2 = lr lambda1/(2c)``, period ``pi/sqrt(2e)``,
    angular step ``arccos(1-e)``. Leading order in ``e``.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient, positive.
        sharpness: spherical sharpness ``lambda1`` at the minimum.
        grad_norm: ``g = |grad log lambda1|`` along the manifold of minima; 0 at the flattest one.

    Returns:
        The observables.

    Example:
        >>> state = edge_of_stability(0.5, 2e-4, sharpness=4.0)
        >>> round(float(state.loss_above_minimum), 12), round(float(state.period))
        (0.0001, 222)
    """
    raw, top = raw_threshold(lr, weight_decay), positive_reals("sharpness", sharpness)
    intrinsic = np.asarray(lr, dtype=np.float64) * positive_reals("weight_decay", weight_decay)
    displacement_sq = mean_square_displacement(np.sqrt(2 * intrinsic), grad_norm=grad_norm)
    return EdgeOfStability(
        loss_above_minimum=top * displacement_sq / 2,
        displacement_sq=displacement_sq,
        unit_grad_sq=top**2 * displacement_sq,
        norm_sq=top / raw,
        period=period_steps(intrinsic),
        angular_step=angle_from_chord_sq(2 * intrinsic),
    )


# ---- momentum, Nesterov and Adam
#
# On a quadratic valley of curvature lambda an optimizer is a linear recursion of second order; it becomes unstable when
# a root of its characteristic polynomial leaves the unit circle, at -1. Weight decay shifts this threshold, by twice as
# much where the loss is scale-invariant: there the weights shrink too, and the direction is unstable as soon as the
# displacement across the valley shrinks more slowly than they do. Compare all thresholds, `raw_threshold` among them,
# with the top eigenvalue of the Hessian at the weights themselves; multiply by |w|^2 for spherical sharpness.


@law(
    "eos",
    "maximum stable sharpness of heavy-ball momentum",
    derived="weight decay and dampening added: the transverse root against the root by which the weights shrink",
)
def momentum_threshold(
    lr: ArrayLike,
    weight_decay: ArrayLike,
    *,
    momentum: ArrayLike,
    dampening: ArrayLike = 0.0,
    scale_invariant: bool = True,
) -> Array:
    """Top Hessian eigenvalue at which SGD with heavy-ball momentum becomes unstable.

    ``2(1 + momentum)/(lr (1 - dampening)) - 2 wd``; only ``- wd`` if the loss is not scale-invariant. The update is
    that of ``torch.optim.SGD``: ``v <- momentum v + (1 - dampening)(grad + wd w)``, ``w <- w - lr v``.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient.
        momentum: heavy-ball coefficient, below 1.
        dampening: of ``torch.optim.SGD``, below 1.
        scale_invariant: whether the loss is scale-invariant in the weights.

    Returns:
        Raw Hessian eigenvalue at the edge of stability.

    Example:
        >>> float(momentum_threshold(0.5, 0.25, momentum=0.0))  # raw_threshold(0.5, 0.25)
        3.5
        >>> round(float(momentum_threshold(0.1, 0.0, momentum=0.9)), 9)
        38.0
    """
    rate = positive_reals("lr", lr) * (1 - reals("dampening", dampening, low=0, below=1))
    decay = nonnegative_reals("weight_decay", weight_decay)
    shift = (2 if scale_invariant else 1) * decay
    return 2 * (1 + reals("momentum", momentum, low=0, below=1)) / rate - shift


@law(
    "eos",
    "maximum stable sharpness of Nesterov momentum",
    derived="weight decay added: the transverse root against the root by which the weights shrink",
)
def nesterov_threshold(
    lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike, scale_invariant: bool = True
) -> Array:
    """Top Hessian eigenvalue at which SGD with Nesterov momentum becomes unstable.

    Without weight decay ``(2 + 2m)/(lr (1 + 2m))``, ``m = momentum``. With it,
    ``lr (lambda + wd) = 1 + a^2/((1+m)a + m)``, where ``a`` is the factor per step by which the weights themselves
    shrink, the larger root of ``a^2 - (1+m)(1 - lr wd) a + m (1 - lr wd)``; ``a = 1`` if the loss is not
    scale-invariant.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient.
        momentum: Nesterov coefficient, below 1.
        scale_invariant: whether the loss is scale-invariant in the weights.

    Returns:
        Raw Hessian eigenvalue at the edge of stability.

    Raises:
        EquilibriaError: a value is out of range, or the loss is scale-invariant and weight decay is so strong that the
            weights oscillate.

    Example:
        >>> round(float(nesterov_threshold(0.1, 0.0, momentum=0.5)), 9)
        15.0
    """
    rate, decay = positive_reals("lr", lr), nonnegative_reals("weight_decay", weight_decay)
    m = reals("momentum", momentum, low=0, below=1)
    shrink = _shrink_by_nesterov(rate * decay, m) if scale_invariant else np.ones_like(m)
    return (1 + shrink**2 / ((1 + m) * shrink + m)) / rate - decay


def _shrink_by_nesterov(intrinsic: Array, m: Array) -> Array:
    """The factor per step by which the weights shrink, with no gradient along them."""
    kept = reals("1 - lr*weight_decay", 1 - intrinsic, above=0)
    half = (1 + m) * kept / 2
    inside = nonnegative_reals("((1 + momentum)/2)^2 (1 - lr*weight_decay) - momentum", half**2 / kept - m)
    return half + np.sqrt(inside * kept)


@law(
    "aeos",
    "maximum stable preconditioned sharpness of Adam",
    derived="decoupled weight decay added; exact for a preconditioner that stands still",
)
def adam_threshold(lr: ArrayLike, weight_decay: ArrayLike = 0.0, *, beta1: ArrayLike = 0.9) -> Array:
    """Top eigenvalue of the preconditioned Hessian at which Adam or AdamW becomes unstable.

    ``(2 - lr wd)(1 + beta1) / ((1 - beta1) lr)`` for ``P^(-1/2) H P^(-1/2)`` with Adam's preconditioner
    ``P = sqrt(v/(1 - beta2^t)) + eps``, taken to stand still: 38/lr for ``beta1 = 0.9``. For a loss that is not
    scale-invariant; for coupled weight decay (Adam, not AdamW) add ``wd`` to the Hessian instead.

    Args:
        lr: learning rate.
        weight_decay: decoupled coefficient of AdamW.
        beta1: decay of the first moment.

    Returns:
        Preconditioned Hessian eigenvalue at the edge of stability.

    Example:
        >>> round(float(adam_threshold(1e-3)), 6)
        38000.0
    """
    rate, memory = positive_reals("lr", lr), reals("beta1", beta1, low=0, below=1)
    intrinsic = reals("lr*weight_decay", rate * nonnegative_reals("weight_decay", weight_decay), below=1)
    return (2 - intrinsic) * (1 + memory) / ((1 - memory) * rate)
