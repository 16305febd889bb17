"""Where an optimizer settles: norm, angle per step, relative update, rate of approach, and the assumptions of the law.

One function per optimizer takes numbers and returns an `Equilibrium`. The dataclasses in `rules` call them; so can you.
At equilibrium the norm is stationary, hence ``relative update = 2 sin(angle / 2)`` for every optimizer, and each law
below gives half the squared relative update, 1 - cos(angle), in a form without cancellation.

An `Assumption` states a condition of the law as data: whether it holds, and how large the error is otherwise. The
functions here list those that their arguments decide; the rules add those about weight, gradients and number format
(`violations.assumptions`).

The fixed points themselves, the ``..._point`` functions, check nothing and take numbers and arrays alike: `targets`
evaluates them along a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, positive, within
from equilibria.theory import approach, moments
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.memory import Memory, ema_memory

SMALLEST_SETTING = 1e-150  # of lr, weight decay and their product: float64 still holds their squares and quotients

ROUNDED_AWAY = {"float32": 2.0**-25, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative change per step below which rounding to nearest leaves every weight unchanged: half an ulp at worst."""


# ---- the assumptions


@dataclass(frozen=True, slots=True)
class Assumption:
    """One condition under which a prediction holds.

    Attributes:
        name: short name of the assumption.
        met: True or False where the inputs decide it, None where only a measurement of the run can.
        angle_error: angle of the run over the law's, minus 1: at these inputs if ``met`` is decided, else for the
            failure that ``detail`` names; None where no number is known.
        norm_error: the same of the norm ||w||.
        affects: the predicted quantities that it affects.
        detail: one sentence with the condition and the consequence if it fails.
    """

    name: str
    met: bool | None
    angle_error: float | None
    norm_error: float | None
    affects: str
    detail: str


def _stationary_gradient(time_constant: float) -> Assumption:
    """The unit gradient changes little within three time constants."""
    return Assumption(
        "stationary unit gradient",
        None,
        None,
        None,
        "norm, angle",
        f"L must stay put for about {3 * time_constant:,.0f} steps (3 time constants); "
        "if it drifts, ||w||^2 lags by half the relative drift per time constant",
    )


def _no_oscillation(product: float, threshold: float, *, saturates: bool) -> Assumption:
    """The approach is monotone near equilibrium: lr·wd is below the oscillation threshold."""
    met = product <= threshold
    faster = "more weight decay no longer speeds it up" if saturates else "it still speeds up with weight decay"
    return Assumption(
        "no oscillation near equilibrium",
        met,
        None,
        None,
        "rate, time_constant",
        f"lr*wd = {product:.3g} against the threshold {threshold:.3g}; above it the norm overshoots and {faster}",
    )


# ---- fixed points


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """A fixed point in units without the gradient's scale.

    Attributes:
        norm_sq: ||w||^2 for L = 1 (SGD-type rules, where it grows as sqrt(L)) or per unit of the mean square update.
        one_minus_cos: 1 - cos(angle), half the squared relative update.
    """

    norm_sq: Any
    one_minus_cos: Any


def heavy_ball_point(lr: Any, weight_decay: Any, a: Any, dampening: float) -> FixedPoint:
    """Fixed point of SGD with momentum a and coupled decay."""
    eta = lr * (1 - dampening)
    eps = eta * weight_decay
    return FixedPoint((eta / (weight_decay * (1 - a) * (2 - eps / (1 + a)))) ** 0.5, eps / (1 + a))


def nesterov_point(lr: Any, weight_decay: Any, a: Any) -> FixedPoint:
    """Fixed point of torch's Nesterov with coupled decay, uncorrelated gradients."""
    eps = lr * weight_decay
    denominator = 1 + a + a * eps * (1 + 2 * a)
    fourth = lr**2 * denominator / (eps * (1 - a + a * eps) * (2 + 2 * a - eps * (1 + 2 * a)))
    return FixedPoint(fourth**0.5, eps * (1 + 2 * a - 2 * a**3 + a * (1 + a) * (1 + 2 * a) * eps) / denominator)


def sgdw_point(lr: Any, weight_decay: Any, a: Any) -> FixedPoint:
    """Fixed point of SGD with momentum a and decoupled decay."""
    eps = lr * weight_decay
    s = 1 - eps
    fourth = lr**2 * (1 + a * s) / ((1 - a * a) * (1 - a * s) * eps * (2 - eps))
    return FixedPoint(fourth**0.5, eps * (1 - a) / (1 + a * s))


def constant_update_point(lr: Any, weight_decay: Any, memory: Memory, *, recall: Any = 1.0) -> FixedPoint:
    """Fixed point with decoupled decay and an update of constant size that keeps the share ``recall`` of a memory."""
    eps = lr * weight_decay
    total = 1 + recall * (memory.total(eps) - 1)
    norm_sq = lr**2 * total / (eps * (2 - eps))
    return FixedPoint(norm_sq, eps * ((2 - eps) / total - eps) / (2 * (1 - eps)))


def adamw_point(lr: Any, weight_decay: Any, b1: float) -> FixedPoint:
    """Fixed point of AdamW; ``norm_sq`` is per entry."""
    point = constant_update_point(lr, weight_decay, ema_memory(b1))
    # An exponential average of unit gradients has this mean square.
    return FixedPoint(point.norm_sq * (1 - b1) / (1 + b1), point.one_minus_cos)


def adam_step_size(norm_sq: Any, weight_decay: Any, *, dim: Any, unit_grad_sq: Any) -> Any:
    """1 / sqrt(v) of Adam with coupled decay, at the equilibrium of v for a weight of squared norm ``norm_sq``."""
    return (dim * norm_sq / (unit_grad_sq + (weight_decay * norm_sq) ** 2)) ** 0.5


def adam_l2_norm_sq(
    lr: Any, weight_decay: Any, *, b1: float, dim: Any, unit_grad_sq: Any, update_gain: Any = 1.0
) -> Any:
    """P = ||w||^2 of Adam with L2 in equilibrium; NaN where there is none.

    Solves P^2 wd (2 - eps (1-b1)/(1+b1)) = kappa L lr k(P), eps = wd lr k(P). The iteration contracts by about 1/4 per
    round (P' is proportional to P^(1/4)).
    """
    p = (lr * (dim * unit_grad_sq) ** 0.5 / (2 * weight_decay)) ** (2 / 3)
    for _ in range(60):
        k = adam_step_size(p, weight_decay, dim=dim, unit_grad_sq=unit_grad_sq)
        slack = 2 - weight_decay * lr * k * (1 - b1) / (1 + b1)
        p = np.sqrt(update_gain * unit_grad_sq * lr * k / (weight_decay * np.where(slack > 0, slack, np.nan)))
    return p


def adam_l2_point(lr: Any, weight_decay: Any, b1: float, *, dim: Any, unit_grad_sq: Any) -> FixedPoint:
    """Fixed point of Adam with L2, whose norm and angle both depend on the gradient: ``norm_sq`` is ||w||^2 itself."""
    norm_sq = adam_l2_norm_sq(lr, weight_decay, b1=b1, dim=dim, unit_grad_sq=unit_grad_sq)
    size = adam_step_size(norm_sq, weight_decay, dim=dim, unit_grad_sq=unit_grad_sq)
    return FixedPoint(norm_sq, lr * weight_decay * size * (1 - b1) / (1 + b1))


@dataclass(frozen=True, slots=True)
class Equilibrium:
    """Equilibrium of one rule.

    Attributes:
        norm: ||w||; None when neither the unit gradient nor the dimension that fixes it was given.
        angle: radians turned per step.
        relative_update: ||w' - w|| / ||w||.
        rate: factor by which a small deviation shrinks per step (exact linearised rate).
        time_constant: -1 / ln(rate), in steps.
        monotone: whether the approach is free of oscillation near equilibrium.
        validity: the assumptions of the prediction; see `Assumption`.
    """

    norm: float | Array | None
    angle: float | Array
    relative_update: float | Array
    rate: float
    time_constant: float
    monotone: bool
    validity: tuple[Assumption, ...]


def decay_product(lr: float, weight_decay: float, *, below: float) -> float:
    """lr * wd; raises EquilibriaError outside the range in which an equilibrium exists."""
    if weight_decay == 0:
        raise EquilibriaError(
            "got weight_decay=0; expected weight_decay > 0: without decay the norm of a scale-invariant "
            "weight grows without limit and there is no equilibrium",
            argument="weight_decay",
        )
    if lr == 0:
        raise EquilibriaError("got lr=0; expected lr > 0: nothing moves at learning rate 0", argument="lr")
    product = lr * weight_decay
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("lr*weight_decay", product)):
        if not SMALLEST_SETTING <= value <= 1 / SMALLEST_SETTING:
            raise EquilibriaError(
                f"got {name}={value:g} (lr={lr:g}, weight_decay={weight_decay:g}); expected {SMALLEST_SETTING:g} <= "
                f"{name} <= {1 / SMALLEST_SETTING:g}: beyond it norms and times leave the range of float64"
            )
    if not 0 < product < below:
        raise EquilibriaError(
            f"got lr*weight_decay={product:g} (lr={lr:g}, weight_decay={weight_decay:g}); "
            f"expected 0 < lr*weight_decay < {below:g}, the range in which an equilibrium is stable"
        )
    return product


def _scalar(value: Array) -> float | Array:
    return float(value) if value.ndim == 0 else value


def _grad_norm(point: FixedPoint, unit_grad_sq: ArrayLike | None) -> float | Array | None:
    """||w|| of an SGD-type rule; its squared norm grows as sqrt(L)."""
    if unit_grad_sq is None:
        return None
    return _scalar(np.sqrt(point.norm_sq * np.sqrt(reals("unit_grad_sq", unit_grad_sq, above=0))))


def equilibrium_from(
    norm: float | Array | None, one_minus_cos: float, how: approach.Approach, *assumptions: Assumption
) -> Equilibrium:
    """The equilibrium of a fixed point and its approach, with the assumptions that all of them share."""
    relative = math.sqrt(2 * one_minus_cos)
    validity = (_stationary_gradient(how.time_constant), *assumptions)
    angle = 2 * math.asin(relative / 2)
    return Equilibrium(norm, angle, relative, how.rate, how.time_constant, how.monotone, validity)


@law(
    "smd",
    "Thm 1, Thm 2, eq. (4), (5)",
    corrected="exact fixed point; (5) is the relative update, the angle is arccos(1 - eps/(1+a))",
)
def heavy_ball(
    lr: float,
    weight_decay: float,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    unit_grad_sq: ArrayLike | None = None,
) -> Equilibrium:
    """Exact equilibrium of SGD with momentum and coupled (L2) weight decay.

    ``cos(angle) = 1 - eps/(1+a)``, ``||w||^4 = L eta / (wd (1-a)(2 - eps/(1+a)))``, with eta = lr (1 - dampening),
    eps = eta wd, a = momentum. ``L = E[||g||^2 + 2 a <v, g>/(1-dampening)] ||w||^2``, the buffer before the step.

    Args:
        lr: learning rate.
        weight_decay: coupled weight decay.
        momentum: a.
        dampening: as in torch.
        unit_grad_sq: L, a number or one per layer; without it the norm is None.

    Returns:
        The equilibrium.

    Raises:
        EquilibriaError: lr * wd is outside 0 < eps < 2(1+a) (or equal to 1+a, where the weight is reset each step).

    Example:
        >>> e = heavy_ball(0.1, 0.001, momentum=0.9, unit_grad_sq=10.0)
        >>> f"{e.norm**2:.6f} {e.angle:.9f}"
        '70.711609 0.010259829'
    """
    a = momentum
    eps = decay_product(lr * (1 - dampening), weight_decay, below=2 * (1 + a))
    if eps == 1 + a:
        raise EquilibriaError(f"got lr*weight_decay={eps:g}; expected lr*weight_decay != 1 + momentum")
    how = approach.heavy_ball_approach(eps, momentum=a)
    point = heavy_ball_point(lr, weight_decay, a, dampening)
    threshold = approach.oscillation_threshold(a)
    smooth = _no_oscillation(eps, threshold, saturates=True)
    return equilibrium_from(_grad_norm(point, unit_grad_sq), point.one_minus_cos, how, smooth)


@law("smd", "Thm 2", derived="exact fixed point of torch's Nesterov step, which neither paper treats")
def nesterov(
    lr: float,
    weight_decay: float,
    *,
    momentum: float,
    unit_grad_sq: ArrayLike | None = None,
    correlation: float = 0.0,
) -> Equilibrium:
    """Exact equilibrium of SGD with torch's Nesterov momentum and coupled weight decay.

    With D = 1 + a + a eps (1+2a): ``||w||^4 = L lr^2 D / [eps (1-a+a eps)(2+2a - eps(1+2a))]``,
    ``1 - cos(angle) = eps [1 + 2a - 2a^3 + a(1+a)(1+2a) eps] / D`` for uncorrelated gradients.
    L = N + 2 a^2 (1+a)/D C with N = E||g||^2 ||w||^2 and C = E<v, g> ||w||^2; the angle also depends on C/N.

    Args:
        lr: learning rate.
        weight_decay: coupled weight decay.
        momentum: a.
        unit_grad_sq: L as defined above.
        correlation: C / N.

    Returns:
        The equilibrium; at momentum 0.9 the angle is 16 % larger than heavy ball's.

    Example:
        >>> round(nesterov(0.1, 0.001, momentum=0.9).angle, 7)
        0.0118868
    """
    a = momentum
    eps = decay_product(lr, weight_decay, below=2 * (1 + a) / (1 + 2 * a))
    how = approach.nesterov_approach(eps, momentum=a)
    if math.isinf(how.time_constant):
        raise EquilibriaError(f"got lr*weight_decay={eps:g}; expected a smaller one: no stable equilibrium here")
    point = nesterov_point(lr, weight_decay, a)
    one_minus_cos = point.one_minus_cos
    if number("correlation", correlation) != 0:
        if 1 + 2 * a**2 * (1 + a) / (1 + a + a * eps * (1 + 2 * a)) * correlation <= 0:
            raise EquilibriaError(
                f"got correlation={correlation:g}; expected a larger one: L = N + 2 a^2 (1+a)/D C must be positive",
                argument="correlation",
            )
        unit_map = moments.step_map(moments.nesterov_step, 1.0, eps, a, correlation)
        state, unit_grad_sq_star = approach.fixed_point(moments.nesterov_step, 1.0, eps, a, correlation)
        one_minus_cos = float(unit_map[3] @ [*state, unit_grad_sq_star]) / 2
    return equilibrium_from(_grad_norm(point, unit_grad_sq), one_minus_cos, how)


@law("rotational", "SGDM with decoupled decay", derived="exact fixed point")
def sgdw(
    lr: float, weight_decay: float, *, momentum: float = 0.0, unit_grad_sq: ArrayLike | None = None
) -> Equilibrium:
    """Exact equilibrium of SGD with momentum and decoupled weight decay.

    ``1 - cos(angle) = eps (1-a) / (1 + a s)``, ``||w||^4 = lr^2 L (1+a s) / [(1-a^2)(1-a s) eps (2-eps)]``,
    s = 1 - eps.

    Args:
        lr: learning rate.
        weight_decay: decoupled weight decay (multiplied by lr, as in torch).
        momentum: a.
        unit_grad_sq: L = E[||g||^2 + 2 a <v, g>] ||w||^2.

    Returns:
        The equilibrium.

    Example:
        >>> round(sgdw(0.1, 0.001, momentum=0.9).angle, 7), round(math.sqrt(2e-4 * 0.1 / 1.9), 7)
        (0.0032445, 0.0032444)
    """
    a = momentum
    eps = decay_product(lr, weight_decay, below=1)
    point = sgdw_point(lr, weight_decay, a)
    how = approach.sgdw_approach(eps, momentum=a)
    return equilibrium_from(_grad_norm(point, unit_grad_sq), point.one_minus_cos, how)


@law(
    "rotational",
    "constant-size updates",
    derived="general theorem for a stationary update with decoupled decay",
)
def constant_update(
    lr: float, weight_decay: float, *, memory: Memory, update_sq: ArrayLike | None = None, gain: float = 1.0
) -> Equilibrium:
    """Equilibrium of any optimizer whose update has constant size, with decoupled decay.

    The step is ``w' = (1 - lr wd) w - lr gain u``. With S = ``memory.total(eps)``: ``||w||^2 = (lr gain)^2 U S / (eps
    (2-eps))`` and ``1 - cos(angle) = eps [(2-eps)/S - eps] / (2 (1-eps))``, to first order angle = sqrt(2 eps / S).

    Args:
        lr: learning rate.
        weight_decay: decoupled weight decay.
        memory: autocorrelation of the update.
        update_sq: U = E||u||^2; without it the norm is None.
        gain: factor on the update but not on the decay (Muon's adjusted lr).

    Returns:
        The equilibrium.

    Example:
        >>> from equilibria.theory.memory import ema_memory
        >>> a = constant_update(0.1, 0.001, memory=ema_memory(0.9)).angle
        >>> a == sgdw(0.1, 0.001, momentum=0.9).angle or abs(a / sgdw(0.1, 0.001, momentum=0.9).angle - 1) < 1e-12
        True
    """
    eps = decay_product(lr, weight_decay, below=1)
    point = constant_update_point(lr, weight_decay, memory)
    norm = None
    if update_sq is not None:
        norm = _scalar(gain * np.sqrt(point.norm_sq * reals("update_sq", update_sq, above=0)))
    slowest = max(memory.decay, default=0.0)
    how = approach.constant_update_approach(eps, slowest_memory=slowest)
    lag = eps / max(1 - slowest, eps)
    fast_memory = Assumption(
        "memory shorter than the time constant",
        2 * lag < 0.1,
        None,
        None,
        "rate, time_constant",
        f"2 lr*wd / (1 - slowest memory) = {2 * lag:.2g} must be small; the transient is off by about that share",
    )
    return equilibrium_from(norm, point.one_minus_cos, how, fast_memory)


def _long_average(b1: float, b2: float, *, power: float = 1.0) -> Assumption:
    """Adam's second moment averages over many steps; ||w|| goes as the update's size to this power."""
    norm_sq, update_sq = second_moment_shift(b1, b2)
    norm, angle = (1 + norm_sq) ** (power / 2) - 1, ((1 + update_sq) / (1 + norm_sq)) ** 0.5 - 1
    return Assumption(
        "second moment averages over many steps",
        b2 >= 0.99,
        angle,
        norm,
        "norm, angle",
        f"an average over 1/(1-beta2) = {1 / (1 - b2):,.4g} steps scatters, and shares gradients with the update: "
        f"the norm is {'higher' if norm > 0 else 'lower'} by some {100 * abs(norm):.2g} % (below 0.5 % if "
        "beta2 >= .99; several times that for sparse or heavy-tailed gradients)",
    )


@law(
    "rotational",
    "AdamW",
    derived="fixed point and rate of the four-variable mean field (P, Q, R, v); first order agrees with the paper",
)
def adamw(
    lr: float,
    weight_decay: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    dim: ArrayLike | None = None,
    update_gain: ArrayLike = 1.0,
) -> Equilibrium:
    """Equilibrium of AdamW: the angle is independent of the gradient, the norm depends on the number of entries only.

    As `sgdw` with a = b1 for the angle; ``||w||^2 = kappa lr^2 d (1-b1)/(1+b1) S / (eps(2-eps))``,
    S = (1 + b1 s)/(1 - b1 s), s = 1 - eps: to first order ``||w|| = sqrt(kappa lr d / (2 wd))``,
    ``angle = sqrt(2 eps (1-b1)/(1+b1))``. The rate includes the lag of the second moment.

    Args:
        lr: learning rate.
        weight_decay: decoupled weight decay.
        betas: (b1, b2).
        dim: number of entries d, a number or one per layer; without it the norm is None.
        update_gain: kappa = (1+b1)/(1-b1) mean((m/sqrt(v))^2), measured: the mean square of the update over that of
            uncorrelated gradients. Correlated gradients average to a larger update, at which decay balances a larger
            norm at the same angle. A ratio, because it is 1 where the law holds and then may be left out.

    Returns:
        The equilibrium.

    Example:
        >>> e = adamw(1e-3, 0.1, dim=1_000_000)
        >>> f"{e.norm:.3f} {e.angle:.6f}"
        '70.679 0.003245'
        >>> round(adamw(1e-3, 0.1, dim=1_000_000, update_gain=1.69).norm / e.norm, 6)
        1.3
    """
    b1, b2 = betas
    eps = decay_product(lr, weight_decay, below=1)
    point = adamw_point(lr, weight_decay, b1)
    kappa = reals("update_gain", update_gain, above=0)
    norm = None if dim is None else _scalar(np.sqrt(point.norm_sq * kappa * reals("dim", dim, above=0)))
    how = approach.adam_approach(eps, betas=betas, decoupled=True)
    return equilibrium_from(norm, point.one_minus_cos, how, _long_average(b1, b2))


def second_moment_shift(b1: float, b2: float) -> tuple[float, float]:
    """Relative change of ||w||^2 and of the mean square update of AdamW because v averages few squared gradients.

    First order in 1 - b2, for Gaussian gradients; in proportion to E g^4 - 1 for others. The norm depends on the sum of
    all autocorrelations of u = m / sqrt(v). With v = 1 + d and 1/sqrt(v) = 1 - d/2 + 3 d^2/8, Gaussian gradients give
    <d_0 d_k> = 2 s b2^|k| / (1+b2), s = 1 - b2, and each of the two <m_0 m_k d> sums to 2 s (1-b1)/(1-b1 b2). The
    gradients that v and m share lower both, the scatter of v raises both.
    """
    s = 1 - b2
    shared = 2 * s * (1 - b1) / (1 - b1 * b2)
    scatter = s / (2 * (1 + b2)) * (3 + (1 - b1) * (1 + b1 * b2) / ((1 + b1) * (1 - b1 * b2)))
    return scatter - shared, 2 * s / (1 + b2) - 2 * s * (1 - b1 * b1) / (1 - b1 * b1 * b2)


@law("rotational", "Adam with L2", derived="fixed point of the mean field; depends on the gradient scale")
def adam_l2(
    lr: float,
    weight_decay: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    dim: float,
    unit_grad_sq: float,
    homogeneity: float = 1.0,
    update_gain: float = 1.0,
) -> Equilibrium:
    """Equilibrium of Adam with coupled (L2) decay: the angle depends on the gradient scale, so layers do not balance.

    Heavy ball with the effective rate lr k, ``k = sqrt(h d P / (L + wd^2 P^2))``, dampened by b1, solved for
    P = ||w||^2. To first order ``||w|| = (lr sqrt(h d L) / (2 wd))^(1/3)``, ``angle = lr sqrt(d (1-b1) / ((1+b1) P))``.

    Args:
        lr: learning rate.
        weight_decay: coupled decay.
        betas: (b1, b2).
        dim: number of entries d.
        unit_grad_sq: L.
        homogeneity: h = (sum_i sqrt(s_i))^2 / (d sum_i s_i) of the per-entry gradient variances s_i; 1 if all alike.
        update_gain: kappa as in `adamw`; to first order the norm goes as kappa^(1/3), the angle as kappa^(1/6).

    Returns:
        The equilibrium.

    Example:
        >>> e = adam_l2(1e-3, 1e-3, dim=1000, unit_grad_sq=1.0)
        >>> abs(e.norm / (1e-3 * math.sqrt(1000) / 2e-3) ** (1 / 3) - 1) < 1e-2
        True
    """
    b1, b2 = betas
    decay_product(lr, weight_decay, below=math.inf)
    grad_sq, d = positive("unit_grad_sq", unit_grad_sq), within("dim", dim, low=1)
    h = within("homogeneity", homogeneity, above=0, high=1)
    kappa = within("update_gain", update_gain, above=0)
    squared = _adam_l2_norm_sq(lr, weight_decay, b1=b1, dim=h * d, unit_grad_sq=grad_sq, update_gain=kappa)
    ratio = weight_decay * squared / math.sqrt(grad_sq)
    eps = weight_decay * lr * adam_step_size(squared, weight_decay, dim=h * d, unit_grad_sq=grad_sq)
    how = approach.adam_approach(eps, betas=betas, decoupled=False)
    one_minus_cos = eps * (1 - b1) / (1 + b1) / h
    small_decay = Assumption(
        "decay small relative to the gradient",
        ratio < 0.05,
        ratio**2,
        ratio**2,
        "norm, angle",
        f"wd ||w||^2 / sqrt(L) = {ratio:.2g} must be small (tested at .01 to .04)",
    )
    # ||w||^3 goes as the update's size, where AdamW's ||w|| does.
    return equilibrium_from(math.sqrt(squared), one_minus_cos, how, small_decay, _long_average(b1, b2, power=2 / 3))


def _adam_l2_norm_sq(
    lr: float, weight_decay: float, *, b1: float, dim: float, unit_grad_sq: float, update_gain: float = 1.0
) -> float:
    squared = float(
        adam_l2_norm_sq(lr, weight_decay, b1=b1, dim=dim, unit_grad_sq=unit_grad_sq, update_gain=update_gain)
    )
    if not math.isfinite(squared):
        raise EquilibriaError(
            f"got lr={lr:g}, weight_decay={weight_decay:g}, unit_grad_sq={unit_grad_sq:g}, dim={dim:g}; "
            "expected a smaller lr*weight_decay: Adam with L2 has no equilibrium here"
        )
    return squared


def adam_l2_decay(
    lr: float, weight_decay: float, *, betas: tuple[float, float], dim: float, unit_grad_sq: float
) -> float:
    """Share by which Adam's L2 decay shrinks the weight per step in equilibrium, lr wd / sqrt(v)."""
    squared = _adam_l2_norm_sq(lr, weight_decay, b1=betas[0], dim=dim, unit_grad_sq=unit_grad_sq)
    return float(lr * weight_decay * adam_step_size(squared, weight_decay, dim=dim, unit_grad_sq=unit_grad_sq))
