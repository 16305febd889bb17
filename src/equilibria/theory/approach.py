"""How fast, and how smoothly, a rule approaches its equilibrium: the true linearised rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from equilibria.errors import one_of, positive, within
from equilibria.theory import moments
from equilibria.theory.adam import adam_step
from equilibria.theory.citations import law
from equilibria.theory.linear import ComplexArray, Linearisation, linearise

_TINY = 1e-7  # lr * wd below which first-order laws are more exact than numerical eigenvalues


@dataclass(frozen=True, slots=True)
class Approach:
    """How a small deviation from equilibrium shrinks.

    Attributes:
        rate: factor per step; below 1 where the equilibrium is stable.
        time_constant: steps per factor e, -1 / ln(rate).
        monotone: True if there is no oscillation near equilibrium (far from it the norm may still overshoot).
    """

    rate: float
    time_constant: float
    monotone: bool


def _approach(gap: float, *, monotone: bool) -> Approach:
    """From 1 - rate, which keeps its digits when the rate is close to 1."""
    if gap >= 1:
        return Approach(max(1 - gap, 0.0), 0.0, monotone)
    return Approach(1 - gap, -1 / math.log1p(-gap) if gap > 0 else math.inf, monotone)


def _from_quadratic(b: float, c: float) -> Approach:
    """Dominant root of z^2 - (2-b) z + (1-b+c) = 0, written in y = 1 - z: y^2 - b y + c = 0."""
    kappa, product, discriminant = 2 - b, 1 - b + c, b * b - 4 * c
    if discriminant < 0:
        return _approach(1 - math.sqrt(product), monotone=False)
    root = math.sqrt(discriminant)
    if kappa < 0:
        return _approach(1 - (root - kappa) / 2, monotone=False)
    return _approach(2 * c / (b + root), monotone=True)


def _checked(product: float, momentum: float) -> tuple[float, float]:
    return positive("product", product), within("momentum", momentum, low=0, below=1)


def _from_eigenvalue(dominant: complex) -> Approach:
    monotone = dominant.real > 0 and abs(dominant.imag) <= 1e-9 * abs(dominant)
    return _approach(1 - abs(dominant), monotone=monotone)


@law(
    "smd",
    "Thm 1, Thm 2, §5.1",
    corrected="contraction 1 - 4 eps/(1-a), not the bounds 1 - 2 eps, 1 - 4 eps of the squared error;"
    " realness of eig(A) is not the condition for a monotone approach",
)
def heavy_ball_approach(product: float, *, momentum: float = 0.0) -> Approach:
    """Rate for SGD with momentum and coupled decay.

    The deviation shrinks with the larger root of ``z^2 - kappa z + a = 0``,
    ``kappa = 1 + a - 4 eps + 2 eps^2/(1+a)``, eps = ``product`` = lr wd, a = ``momentum``; above the threshold
    (`oscillation_threshold`) it oscillates and shrinks by exactly sqrt(a) per step.

    Args:
        product: eps = lr * wd (times 1 - dampening).
        momentum: a.

    Returns:
        The rate; without momentum it is 1 - 4 eps + 2 eps^2.

    Example:
        >>> round(heavy_ball_approach(0.05).rate, 12) == 0.805
        True
        >>> round(heavy_ball_approach(0.01, momentum=0.9).rate, 5)  # sqrt(0.9): oscillates
        0.94868
    """
    eps, a = _checked(product, momentum)
    c = 4 * eps - 2 * eps**2 / (1 + a)
    return _from_quadratic(1 - a + c, c)


@law("rotational", "SGDW", derived="linearised moment map of decoupled decay")
def sgdw_approach(product: float, *, momentum: float = 0.0) -> Approach:
    """Rate for SGD with momentum and decoupled decay.

    Larger root of ``z^2 - kappa z + a s = 0``, s = 1 - eps,
    ``kappa = [a^2 (2-s^2) + 2 a s + 2 s^2 - 1] / (1 + a s)``; about 1 - 4 eps.

    Args:
        product: eps = lr * wd.
        momentum: a.

    Returns:
        The rate.

    Example:
        >>> sgdw_approach(0.05).rate == heavy_ball_approach(0.05).rate
        True
    """
    eps, a = _checked(product, momentum)
    s = 1 - eps
    c = 2 * eps * (2 - eps) * (1 - a**2) / (1 + a * s)
    return _from_quadratic(1 - a * s + c, c)


def _squared_chord(before: complex, after: complex, moved: complex) -> complex:
    """`moments.chord_sq` for complex arguments: the derivative is taken along the imaginary axis."""
    radial = after**0.5 - before**0.5
    return (moved - radial * radial) / (before * after) ** 0.5


def map_linearisation(step_function: moments.Step, *settings: float) -> Linearisation:
    """Linearise a step of `moments` with lr = 1 and wd = eps, in units where the equilibrium has P = 1."""
    unit_map = moments.step_map(step_function, *settings)
    state, forcing = fixed_point(step_function, *settings)

    def step(x: ComplexArray, unit_grad_sq: complex) -> tuple[ComplexArray, complex]:
        full = np.array([x[0], x[1], x[2], unit_grad_sq / x[0]])
        after = unit_map @ full
        return after[:3], _squared_chord(x[0], after[0], after[3])

    return linearise(step, state, unit_grad_sq=forcing)


def fixed_point(step: moments.Step, *settings: float) -> tuple[moments.Array, float]:
    """The state (P=1, Q, R) and the forcing N that a step with constant settings maps to itself.

    In exact rational arithmetic: in float64 the decay of P would vanish beside P when lr * wd is small.

    Args:
        step: a step of `moments`.
        *settings: its settings, lr, weight decay, momentum, ...

    Returns:
        ``(state, N)``; the equilibrium for a given L is then P* = sqrt(L / N).

    Example:
        The radial part -wd/(1+a) of heavy ball keeps its digits at lr * wd = 1e-20:

        >>> state, _ = fixed_point(moments.heavy_ball_step, 1e-10, 1e-10, 0.5)
        >>> round(float(state[1]) * 1.5e10, 12)
        -1.0
    """
    exact = [Fraction(float(value)) for value in settings]
    columns = [step(*(Fraction(i == j) for i in range(4)), *exact)[:3] for j in range(4)]
    # X = A X + b N with X = (1, Q, R): three equations for Q, R, N.
    rows = [
        [columns[1][i] - (i == 1), columns[2][i] - (i == 2), columns[3][i], (i == 0) - columns[0][i]] for i in range(3)
    ]
    q, r, n = _solved(rows)
    return np.array([1.0, float(q), float(r)]), float(n)


def _solved(rows: list[list[Fraction]]) -> list[Fraction]:
    """Gauss-Jordan elimination of a square system with its right-hand side as the last column."""
    for column in range(len(rows)):
        pivot = next(i for i in range(column, len(rows)) if rows[i][column] != 0)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i, row in enumerate(rows):
            if i != column and row[column] != 0:
                rows[i] = [value - row[column] * own for value, own in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


@law("smd", "Thm 2", derived="linearised moment map of torch's Nesterov step")
def nesterov_approach(product: float, *, momentum: float) -> Approach:
    """Rate for torch's Nesterov momentum with coupled decay: dominant eigenvalue of the linearised moment map.

    Unlike heavy ball it keeps speeding up in the oscillatory regime.

    Args:
        product: eps = lr * wd.
        momentum: a.

    Returns:
        The rate.

    Example:
        >>> nesterov_approach(5e-4, momentum=0.9).monotone, nesterov_approach(8e-4, momentum=0.9).monotone
        (True, False)
    """
    eps, a = _checked(product, momentum)
    if eps < _TINY * (1 - a) ** 2:
        return heavy_ball_approach(eps, momentum=a)  # the same to first order, and without rounding
    return _from_eigenvalue(map_linearisation(moments.nesterov_step, 1.0, eps, a).dominant())


@law("rotational", "constant-size updates", derived="P relaxes linearly, by (1-eps)^2 per step")
def constant_update_approach(product: float, *, slowest_memory: float = 0.0) -> Approach:
    """Rate for updates of constant size (Lion, Muon): the slower of (1-eps)^2 and the update's own memory.

    Args:
        product: eps = lr * wd.
        slowest_memory: largest geometric factor of the update's autocorrelation.

    Returns:
        The rate; about 1 - 2 eps, half as fast as SGD.

    Example:
        >>> round(constant_update_approach(1e-3).time_constant)
        500
    """
    eps = positive("product", product)
    gap = eps * (2 - eps)
    memory_gap = 1 - within("slowest_memory", slowest_memory, low=0, below=1) * (1 - eps)
    return _approach(min(gap, memory_gap), monotone=True)


@law(
    "smd+",
    "assumption eps < (1 - sqrt(a))^2",
    corrected="that is only realness of eig(A); the approach is monotone below about a quarter of it",
)
def oscillation_threshold(momentum: float, *, kind: str = "heavy_ball") -> float:
    """The lr * wd above which the norm oscillates around its equilibrium.

    Heavy ball: ``(1+a) [1 - sqrt(1 - (1-sqrt(a))^2 / (2(1+a)))]``, about (1-sqrt(a))^2 / 4.

    Args:
        momentum: a.
        kind: "heavy_ball", "nesterov" or "sgdw"; the last two are found by bisection on the linearised rate.

    Returns:
        The threshold (times 1 / (1 - dampening) if there is dampening).

    Example:
        >>> f"{oscillation_threshold(0.9):.3g}", f"{oscillation_threshold(0.9, kind='nesterov'):.3g}"
        ('0.000658', '0.000691')
    """
    a = within("momentum", momentum, low=0, below=1)
    one_of("kind", kind, ["heavy_ball", "nesterov", "sgdw"])
    gap = (1 - a) / (1 + math.sqrt(a))  # 1 - sqrt(a) with all its digits
    if kind == "heavy_ball":
        x = gap**2 / (2 * (1 + a))
        return (1 + a) * x / (1 + math.sqrt(1 - x))
    rules: dict[str, Callable[[float], Approach]] = {
        "nesterov": lambda eps: nesterov_approach(eps, momentum=a),
        "sgdw": lambda eps: sgdw_approach(eps, momentum=a),
    }
    low, high = 1e-3 * gap**2, min(0.5, 1 - a)  # decoupled decay is monotone again above about 14 (1-a)
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rules[kind](middle).monotone else (low, middle)
    return math.sqrt(low * high)


@law("rotational", "AdamW, Adam with L2", derived="dominant eigenvalue of the four-variable mean field")
def adam_approach(product: float, *, betas: tuple[float, float], decoupled: bool) -> Approach:
    """Rate for AdamW and for Adam with L2, with the lag of the second moment included.

    Without the lag it would be 1 - 2 eps (AdamW) and 1 - 3 eps (Adam+L2); with s = 1 - b2 it solves, to first order,
    ``r^2 - (4 eps + s) r + 2 eps s = 0`` (AdamW), ``r^2 - (4 eps + s) r + 3 eps s = 0`` (Adam+L2), rate = 1 - r.

    Args:
        product: relative decay of the weight per step: lr * wd (AdamW), lr * wd / sqrt(v) (Adam+L2).
        betas: (b1, b2).
        decoupled: True for AdamW.

    Returns:
        The rate.

    Example:
        >>> gap = 1 - adam_approach(5e-4, betas=(0.9, 0.999), decoupled=True).rate
        >>> f"{gap:.2e}"  # not 2 eps = 1e-3
        '3.83e-04'
    """
    eps = positive("product", product)
    if eps < _TINY:
        # The eigenvalue is 1 to rounding; the first-order law is exact here, written without cancellation.
        lag, order = 1 - betas[1], 2 if decoupled else 3
        both = 4 * eps + lag
        return _approach(2 * order * eps * lag / (both + math.sqrt(both**2 - 4 * order * eps * lag)), monotone=True)
    return _from_eigenvalue(adam_linearisation(eps, betas=betas, decoupled=decoupled).dominant())


def adam_linearisation(
    product: float, *, betas: tuple[float, float], decoupled: bool, into_second: bool = True
) -> Linearisation:
    """Linearise the Adam recursion at its equilibrium, in units where P = 1, v = 1 and lr = 1.

    Without ``into_second`` the noise of L reaches the first moment only, as that of <m, g> does.
    """
    b1 = betas[0]
    # With v frozen Adam is SGD whose gradient is multiplied by 1 - b1: dampening, but not on decoupled decay.
    if decoupled:
        state, unit_grad_sq = fixed_point(moments.sgdw_step, 1.0, product, b1, 1 - b1)
        entries = unit_grad_sq  # d such that v = (mean square gradient) / d = 1
    else:
        state, unit_grad_sq = fixed_point(moments.heavy_ball_step, 1.0, product, b1, 1 - b1)
        entries = unit_grad_sq + product**2

    def step(x: ComplexArray, big_l: complex) -> tuple[ComplexArray, complex]:
        lost, coupled = (product, 0.0) if decoupled else (0.0, product)
        v, b2 = x[3], betas[1]
        if not into_second:  # take v's own step here, without the noise; b2 = 1 then leaves it alone
            v, b2 = b2 * v + (1 - b2) / entries * (unit_grad_sq / x[0] + coupled**2 * x[0]), 1.0
        after = adam_step(x[0], x[1], x[2], v, big_l, (1 - b2) / entries, 1.0, lost, coupled, b1, b2)
        return np.array(after[:4]), _squared_chord(x[0], after[0], after[4])

    return linearise(step, np.array([*state, 1.0]), unit_grad_sq=unit_grad_sq)
