"""Weight decay as an exponential learning rate for constant settings, in closed form.

With constant ``lr``, ``weight_decay`` and ``momentum`` the decay factor of the recursion in
`equilibria.theory.folding` has the fixed points ``z1 >= z2`` of
``x² - (1 + momentum - lr·weight_decay) x + momentum``. Everything here follows from these two roots; settings
that vary freely need `equilibria.theory.folding.fold`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, one_of, positive, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law

Dtype: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]
Root: TypeAlias = Literal["larger", "smaller"]

LARGEST: dict[Dtype, float] = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": (2 - 2**-52) * 2.0**1023,
}
"""Largest finite value of each floating-point type."""


@dataclass(frozen=True, slots=True, eq=False)
class Roots:
    """Fixed points of the decay factor for constant settings; every field is dimensionless, per step.

    Attributes:
        z1: the attracting root: the weight-decay run shrinks by ``z1`` per step relative to the folded run.
        z2: the repelling root, ``momentum / z1``.
        decay: ``1 - z1``, computed without cancellation.
        amplitude: ``A`` in ``1/P_t = A z1^t + (1 - A) z2^t`` for an empty start buffer; infinite at a double
            root.
    """

    z1: Array
    z2: Array
    decay: Array
    amplitude: Array

    @property
    def growth(self) -> Array:
        """``z1^-2``, the factor by which the folded learning rate grows per step in the long run."""
        growth: Array = np.exp(-2 * np.log1p(-self.decay))
        return growth


@law("explr", "Remark 2.2", derived="the discriminant of eq. 4 is positive and both roots are below 1")
def decay_limit(momentum: ArrayLike) -> Array:
    """Largest ``lr·weight_decay`` that keeps constant settings from flipping the weights: ``(1 - sqrt(momentum))²``.

    Sufficient for constant settings only; a learning rate that jumps up can flip the weights below it.

    Args:
        momentum: in [0, 1).

    Returns:
        The limit, dimensionless. At momentum 0 it is 1, which itself is excluded.

    Raises:
        EquilibriaError: momentum outside [0, 1).

    Example:
        >>> print(f"{decay_limit(0.9):.7f}")
        0.0026334
    """
    g = reals("momentum", momentum, low=0, below=1)
    limit: Array = (((1 - g) / (1 + np.sqrt(g))) ** 2)[()]
    return limit


@law(
    "explr",
    "Theorem 2.1, eq. 4",
    corrected="weight decay 0 has the roots {1, momentum}, not momentum alone; it is momentum 0 that has "
    "the single"
    " non-zero root 1 - lr·weight_decay",
)
def decay_roots(lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike = 0.0) -> Roots:
    """Factors per step by which constant settings shrink the weights relative to the folded run.

    The roots ``z1 >= z2`` of ``x² - (1 + momentum - lr·weight_decay) x + momentum = 0``. They are real and positive if
    and only if ``lr·weight_decay <= (1 - sqrt(momentum))²`` (strictly less for momentum 0). ``A = z1 (1 - z2)/(z1 -
    z2)``. Li & Arora, Theorem 2.1, eq. 4.

    Args:
        lr: learning rate, at least 0; arrays broadcast.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).

    Returns:
        `Roots`, each field of the broadcast shape.

    Raises:
        EquilibriaError: bad input, or the roots are complex: the weights would change sign.

    Example:
        >>> roots = decay_roots(0.1, 5e-4, momentum=0.9)
        >>> print(f"{roots.z1:.14f} {roots.growth:.10f} {1 / roots.amplitude:.7f}")
        0.99949772836789 1.0010053006 0.9954545
    """
    g = reals("momentum", momentum, low=0, below=1)
    product = reals("lr", lr, low=0) * reals("weight_decay", weight_decay, low=0)
    threshold = decay_limit(g)
    excess = threshold - product
    bad = (excess < 0) | ((g == 0) & (product == 1))
    if bad.any():
        index = np.unravel_index(np.argmax(bad), bad.shape)
        got, limit, bad_momentum = (np.broadcast_to(x, bad.shape)[index] for x in (product, threshold, g))
        raise EquilibriaError(
            f"got lr*weight_decay={got:g} with momentum={bad_momentum:g}; expected lr*weight_decay "
            f"{'<' if bad_momentum == 0 else '<='} (1-sqrt(momentum))^2 = {limit:g}, beyond which the weights "
            "change sign"
        )
    gap = np.sqrt(excess * (excess + 4 * np.sqrt(g)))
    decay = product / ((1 - g + product + gap) / 2)
    z1 = 1 - decay
    z2 = g / z1
    with np.errstate(divide="ignore"):
        amplitude = 1 + np.divide(z2 * decay, gap)
    return Roots(z1[()], z2[()], decay[()], amplitude[()])


@dataclass(frozen=True, slots=True)
class DecayBounds:
    """Two-sided bound on ``1 - z1``, per step.

    Attributes:
        low: ``t/(1 + t)``.
        high: ``2t/(1 + t)``.
    """

    low: Array
    high: Array


@law(
    "explr",
    "Appendix A, lemma on z1 and z2",
    corrected="the paper prints 1 - z1 <= t/(1+t): that is the lower bound; the upper one is 2t/(1+t)",
)
def decay_bounds(lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike = 0.0) -> DecayBounds:
    """Two-sided bound on the decay per step ``1 - z1`` of `decay_roots`.

    ``t/(1+t) <= 1 - z1 <= 2t/(1+t)`` with ``t = lr·weight_decay/(1 - momentum)``.

    Args:
        lr: learning rate, at least 0.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).

    Returns:
        `DecayBounds`.

    Raises:
        EquilibriaError: bad input, or complex roots.

    Example:
        >>> bounds = decay_bounds(0.1, 5e-4, momentum=0.9)
        >>> print(f"{bounds.low:.8f} <= {decay_roots(0.1, 5e-4, momentum=0.9).decay:.8f} <= {bounds.high:.8f}")
        0.00049975 <= 0.00050227 <= 0.00099950
    """
    decay_roots(lr, weight_decay, momentum=momentum)
    t = np.asarray(lr, float) * np.asarray(weight_decay, float) / (1 - np.asarray(momentum, float))
    return DecayBounds((t / (1 + t))[()], (2 * t / (1 + t))[()])


@dataclass(frozen=True, slots=True, eq=False)
class ClosedForm:
    """An exponential schedule at the requested steps.

    Attributes:
        lr: weight-decay-free learning rate; ``inf`` where it exceeds float64.
        log_lr: its natural logarithm, always finite for ``lr > 0``.
        log_scale: ``log P_t``, the norm of the folded weights over that of the weight-decay run.
        start_buffer: coefficient of ``w_0`` to add to the momentum buffer before the first step.
    """

    lr: Array
    log_lr: Array
    log_scale: Array
    start_buffer: float


def _log_scale(roots: Roots, step: Array) -> Array:
    """``log P_t``; the sum over powers of z2/z1 stays accurate where A diverges (double root)."""
    ratio = roots.z2 / roots.z1
    powers = step if ratio == 1 else (1 - ratio**step) / (1 - ratio)
    return -(step * np.log1p(-roots.decay) + np.log1p(roots.z2 * roots.decay / roots.z1 * powers))


def _closed_form(lr: float, log_gain: Array, log_scale: Array, start_buffer: float) -> ClosedForm:
    log_lr = log_gain + math.log(lr)
    with np.errstate(over="ignore"):
        return ClosedForm(np.exp(log_lr), log_lr, log_scale, start_buffer)


def _whole_steps(step: ArrayLike) -> Array:
    steps = reals("step", step, low=0)
    if (steps % 1 != 0).any():
        raise EquilibriaError(f"got step={step!r}; expected whole numbers", argument="step")
    return steps


@law(
    "explr",
    "Theorem 2.1",
    derived="solves the recursion for the usual empty start buffer, for which the printed alpha^(-2t-1) is not exact",
)
def constant_schedule(lr: float, weight_decay: float, *, step: ArrayLike, momentum: float = 0.0) -> ClosedForm:
    """Exact folded learning rate at any step for constant settings and an empty start buffer.

    ``1/P_t = Q_t = A z1^t + (1 - A) z2^t`` and ``lr~_t = lr/(Q_t Q_{t+1})``; derived here from Li & Arora's
    recursion.

    Args:
        lr: learning rate, above 0.
        weight_decay: coupled weight decay, at least 0.
        step: steps counted from 0, a number or an array.
        momentum: in [0, 1).

    Returns:
        `ClosedForm` with ``start_buffer = 0``.

    Raises:
        EquilibriaError: bad input, or complex roots.

    Example:
        >>> exact = constant_schedule(0.1, 5e-4, step=[0, 391], momentum=0.9)
        >>> print(f"{exact.lr[0]:.6f} {exact.lr[1]:.6f}")
        0.100005 0.146854
    """
    eta = positive("lr", lr)
    steps = _whole_steps(step)
    roots = decay_roots(eta, within("weight_decay", weight_decay, low=0), momentum=momentum)
    log_scale = _log_scale(roots, steps)
    return _closed_form(eta, log_scale + _log_scale(roots, steps + 1), log_scale, 0.0)


@law(
    "explr",
    "Theorem 1.1 and Theorem 2.1",
    corrected="exact only with the start buffer w_0 (1 - 1/alpha)/lr; step t = 0, 1, ... uses "
    "alpha^(-2t-1), and the"
    " differences are divided by their own learning rate",
)
def power_schedule(
    lr: float, weight_decay: float, *, step: ArrayLike, momentum: float = 0.0, root: Root = "larger"
) -> ClosedForm:
    """The paper's purely exponential schedule ``lr~_t = alpha^(-2t-1) lr`` and the start buffer that makes it exact.

    ``buf~ = buf + w_0 (1 - 1/alpha)/lr`` before step 0, with ``alpha`` either root and ``P_t = alpha^-t``.
    Without that buffer it differs from weight decay by the constant factor of `Roots.amplitude`. Li & Arora,
    Theorem 1.1.

    Args:
        lr: learning rate, above 0.
        weight_decay: coupled weight decay, at least 0.
        step: steps counted from 0, a number or an array.
        momentum: in [0, 1).
        root: ``"larger"`` (z1) or ``"smaller"`` (z2, needs momentum above 0).

    Returns:
        `ClosedForm`; add ``start_buffer * w_0`` to the momentum buffer before the first step.

    Raises:
        EquilibriaError: bad input, complex roots, or the smaller root at momentum 0.

    Example:
        >>> power = power_schedule(0.1, 5e-4, step=391, momentum=0.9)
        >>> print(f"{power.lr / power_schedule(0.1, 5e-4, step=0, momentum=0.9).lr:.7f}")
        1.4812334
    """
    eta = positive("lr", lr)
    steps = _whole_steps(step)
    roots = decay_roots(eta, within("weight_decay", weight_decay, low=0), momentum=momentum)
    larger = one_of("root", root, get_args(Root)) == "larger"
    if not larger and roots.z2 == 0:
        raise EquilibriaError(
            "got root='smaller' with momentum=0; expected momentum > 0: that root is 0", argument="root"
        )
    log_alpha = math.log1p(-float(roots.decay)) if larger else math.log(float(roots.z2))
    return _closed_form(eta, -(2 * steps + 1) * log_alpha, -steps * log_alpha, -math.expm1(-log_alpha) / eta)


@dataclass(frozen=True, slots=True)
class OverflowHorizon:
    """First step, from 0, at which a folded run leaves a floating-point type; None: not within 2^53 steps.

    Attributes:
        variance: ``P² > max``: batch-norm variances and sums of squares overflow.
        lr: the folded learning rate overflows.
        weight: ``P > max``: the weights themselves overflow.
    """

    variance: int | None
    lr: int | None
    weight: int | None


def _first_above(curve: Callable[[int], float], limit: float) -> int | None:
    """Smallest whole t with ``curve(t) > limit`` for an increasing curve."""
    high = 1
    while curve(high) <= limit:
        high *= 2
        if high > 2**53:
            return None
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if curve(middle) > limit else (middle, high)
    return high


@law(
    "",
    "closed form of the folded scale",
    derived="P_t = 1/Q_t from constant_schedule, solved for the step at which P², lr~ or P passes the largest float",
)
def overflow_horizon(
    lr: float, weight_decay: float, *, momentum: float = 0.0, dtype: Dtype = "float32"
) -> OverflowHorizon:
    """Steps after which a constant folded schedule overflows a floating-point type, for weights of order 1 at step 0.

    The quantities ``P_t²``, ``lr~_t = P_t P_{t+1} lr`` and ``P_t`` are compared with the largest finite
    value. Derived here.

    Args:
        lr: learning rate, above 0.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.

    Returns:
        `OverflowHorizon`.

    Raises:
        EquilibriaError: bad input, or complex roots.

    Example:
        >>> overflow_horizon(0.1, 5e-4, momentum=0.9)
        OverflowHorizon(variance=88309, lr=90600, weight=176608)
    """
    log_lr = math.log(positive("lr", lr))
    one_of("dtype", dtype, LARGEST)
    limit = math.log(LARGEST[dtype])
    roots = decay_roots(lr, within("weight_decay", weight_decay, low=0), momentum=momentum)

    def log_scale(t: int) -> float:
        return float(_log_scale(roots, np.float64(t)))  # type: ignore[arg-type]

    return OverflowHorizon(
        variance=_first_above(lambda t: 2 * log_scale(t), limit),
        lr=_first_above(lambda t: log_scale(t) + log_scale(t + 1) + log_lr, limit),
        weight=_first_above(log_scale, limit),
    )
