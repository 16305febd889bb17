"""How fast, and how smoothly, a rule approaches its equilibrium: the exact linearised rate.

One step of a moment recursion, ``step(state, unit_grad_sq) -> (next state, squared chord)``, is differentiated at its
fixed point by complex steps, which is exact to rounding (`linearise`). The eigenvalue of largest modulus of that
derivative is the rate; `fluctuation` takes the stationary variances from the same derivative.

Notation of all laws here: eps = ``product`` = lr * wd, a = ``momentum``, and (b1, b2) = ``betas``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import one_of, positive, within
from equilibria.theory import moments
from equilibria.theory._reals import Array
from equilibria.theory.citations import law

ComplexArray = NDArray[np.complex128]
MomentumKind: TypeAlias = Literal["heavy_ball", "nesterov", "sgdw"]

_TINY = 1e-7  # lr * wd below which first-order laws are more exact than numerical eigenvalues
_INCREMENT = 1e-30  # of complex-step differentiation, which subtracts nothing: it can be arbitrarily small


@dataclass(frozen=True, slots=True)
class Linearisation:
    """First derivatives of one recursion step at its fixed point, in units where ||w||^2 = 1 and L = 1.

    Attributes:
        jacobian: d(next state) / d(state).
        by_unit_grad_sq: d(next state) / d(L).
        chord_gradient: d(log chord^2) / d(state).
        chord_by_unit_grad_sq: d(log chord^2) / d(L).
        chord_sq: squared chord of one step in equilibrium.
    """

    jacobian: Array
    by_unit_grad_sq: Array
    chord_gradient: Array
    chord_by_unit_grad_sq: float
    chord_sq: float

    def dominant(self) -> complex:
        """Eigenvalue of largest modulus: the factor per step on a small deviation."""
        eigenvalues = np.linalg.eigvals(self.jacobian)
        return complex(eigenvalues[np.argmax(np.abs(eigenvalues))])

    def norm_sq_variance(self) -> float:
        """Var(||w||^2) / ||w*||^4 per unit of Var(L) / L^2."""
        return float(self.covariance()[0, 0])

    def angle_variance(self) -> float:
        """Var(angle) / angle^2 per unit of Var(L) / L^2."""
        u = self.chord_gradient
        log_chord_sq = float(u @ self.covariance() @ u + self.chord_by_unit_grad_sq**2)
        half = math.asin(math.sqrt(self.chord_sq) / 2)
        return log_chord_sq / 4 * (math.tan(half) / half) ** 2

    def covariance(self) -> Array:
        """Stationary covariance S of the state per unit of Var(L) / L^2: S = J S J^T + f f^T (discrete Lyapunov)."""
        n = len(self.by_unit_grad_sq)
        noise = np.outer(self.by_unit_grad_sq, self.by_unit_grad_sq).ravel()
        solution = np.linalg.solve(np.eye(n * n) - np.kron(self.jacobian, self.jacobian), noise)
        return np.asarray(solution.reshape(n, n))


def linearise(
    step: Callable[[ComplexArray, complex], tuple[ComplexArray, complex]], fixed_point: Array, *, unit_grad_sq: float
) -> Linearisation:
    """Differentiate one recursion step at its fixed point.

    Args:
        step: the recursion; it must be built of complex-analytic operations.
        fixed_point: the state that the step maps to itself.
        unit_grad_sq: L at that fixed point; derivatives with respect to L are per relative change of L.

    Returns:
        The derivatives.

    Example:
        Plain SGD near equilibrium contracts by 1 - 4 eps + 2 eps^2:

        >>> eps = 0.05
        >>> def sgd(state, L):
        ...     p = (1 - eps) ** 2 * state[0] + L / state[0]
        ...     return np.array([p]), L / state[0] / (state[0] * p) ** 0.5
        >>> result = linearise(sgd, np.array([1.0]), unit_grad_sq=eps * (2 - eps))
        >>> round(result.dominant().real, 12) == round(1 - 4 * eps + 2 * eps**2, 12)
        True
    """
    n = len(fixed_point)
    jacobian, chord_gradient = np.empty((n, n)), np.empty(n)
    base = fixed_point.astype(np.complex128)
    for i in range(n):
        bumped = base.copy()
        bumped[i] += 1j * _INCREMENT
        after, chord = step(bumped, complex(unit_grad_sq))
        jacobian[:, i] = after.imag / _INCREMENT
        chord_gradient[i] = chord.imag / chord.real / _INCREMENT
    after, chord = step(base, unit_grad_sq * (1 + 1j * _INCREMENT))
    chord_change = chord.imag / chord.real / _INCREMENT
    return Linearisation(jacobian, after.imag / _INCREMENT, chord_gradient, chord_change, chord.real)


def fixed_point(step: moments.MomentStep, *settings: float) -> tuple[Array, float]:
    """The state (P=1, Q, R) and the N = E||g||^2 that a step with constant settings maps to itself.

    In exact rational arithmetic: in float64 the decay of P would be lost to rounding when lr * wd is small.

    Args:
        step: a step of `moments`.
        *settings: its settings, lr, weight decay, momentum, ...

    Returns:
        ``(state, N)``; the equilibrium of a weight with unit gradient L is then P* = sqrt(L / N).

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


def map_linearisation(step_function: moments.MomentStep, *settings: float) -> Linearisation:
    """Linearise a step of `moments` with lr = 1 and wd = eps, in units where the equilibrium has P = 1."""
    unit_map = moments.step_map(step_function, *settings)
    state, unit_grad_sq_star = fixed_point(step_function, *settings)

    def step(x: ComplexArray, unit_grad_sq: complex) -> tuple[ComplexArray, complex]:
        full = np.array([x[0], x[1], x[2], unit_grad_sq / x[0]])
        after = unit_map @ full
        return after[:3], _squared_chord(x[0], after[0], after[3])

    return linearise(step, state, unit_grad_sq=unit_grad_sq_star)


def adam_linearisation(
    product: float, *, betas: tuple[float, float], decoupled: bool, into_second: bool = True
) -> Linearisation:
    """Linearise the Adam recursion at its equilibrium, in units where P = 1, v = 1 and lr = 1.

    With ``into_second=False`` the noise of L reaches the first moment only, as the noise of <m, g> does.
    """
    b1 = betas[0]
    # With v frozen Adam is SGD whose gradient is multiplied by 1 - b1: dampening, but not on decoupled decay.
    if decoupled:
        state, unit_grad_sq_star = fixed_point(moments.sgdw_step, 1.0, product, b1, 1 - b1)
        entries = unit_grad_sq_star  # d such that v = (mean square gradient) / d = 1
    else:
        state, unit_grad_sq_star = fixed_point(moments.heavy_ball_step, 1.0, product, b1, 1 - b1)
        entries = unit_grad_sq_star + product**2

    def step(x: ComplexArray, unit_grad_sq: complex) -> tuple[ComplexArray, complex]:
        lost, coupled = (product, 0.0) if decoupled else (0.0, product)
        v, b2 = x[3], betas[1]
        if not into_second:  # take v's own step here, without the noise; b2 = 1 then leaves it alone
            v, b2 = b2 * v + (1 - b2) / entries * (unit_grad_sq_star / x[0] + coupled**2 * x[0]), 1.0
        after = moments.adam_step(x[0], x[1], x[2], v, unit_grad_sq, (1 - b2) / entries, 1.0, lost, coupled, b1, b2)
        return np.array(after[:4]), _squared_chord(x[0], after[0], after[4])

    return linearise(step, np.array([*state, 1.0]), unit_grad_sq=unit_grad_sq_star)


def _squared_chord(before: complex, after: complex, moved: complex) -> complex:
    """`moments.chord_sq` for complex arguments: the derivative is taken along the imaginary axis."""
    radial = after**0.5 - before**0.5
    return (moved - radial * radial) / (before * after) ** 0.5


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


def _from_eigenvalue(dominant: complex) -> Approach:
    monotone = dominant.real > 0 and abs(dominant.imag) <= 1e-9 * abs(dominant)
    return _approach(1 - abs(dominant), monotone=monotone)


def _checked(product: float, momentum: float) -> tuple[float, float]:
    return positive("product", product), within("momentum", momentum, low=0, below=1)


@law(
    "smd",
    "Thm 1, Thm 2, §5.1",
    corrected="contraction 1 - 4 eps/(1-a), not the bounds 1 - 2 eps, 1 - 4 eps of the squared error;"
    " realness of eig(A) is not the condition for a monotone approach",
)
def heavy_ball_approach(product: float, *, momentum: float = 0.0) -> Approach:
    """Rate of approach of SGD with momentum and coupled weight decay.

    The deviation shrinks by the larger root of ``z^2 - kappa z + a = 0`` per step,
    ``kappa = 1 + a - 4 eps + 2 eps^2/(1+a)``, eps = ``product`` = lr wd, a = ``momentum``. Above
    `oscillation_threshold` it oscillates and shrinks by exactly sqrt(a) per step.

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
    """Rate of approach of SGD with momentum and decoupled weight decay.

    The larger root of ``z^2 - kappa z + a s = 0``, s = 1 - eps,
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


@law("smd", "Thm 2", derived="linearised moment map of torch's Nesterov step")
def nesterov_approach(product: float, *, momentum: float) -> Approach:
    """Rate of approach of torch's Nesterov momentum with coupled weight decay.

    The dominant eigenvalue of the linearised moment map. Unlike heavy ball, Nesterov keeps speeding up with weight
    decay in the oscillatory regime.

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
    """Rate of approach for updates of constant size (Lion, Muon).

    The slower of ``(1-eps)^2``, at which the norm relaxes, and ``slowest_memory (1-eps)``, at which the update forgets.

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


@law("rotational", "AdamW, Adam with L2", derived="dominant eigenvalue of the four-variable mean field")
def adam_approach(product: float, *, betas: tuple[float, float], decoupled: bool) -> Approach:
    """Rate of approach of AdamW and of Adam with L2, including the lag of the second moment.

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


@law(
    "smd+",
    "assumption eps < (1 - sqrt(a))^2",
    corrected="that is only realness of eig(A); the approach is monotone below about a quarter of it",
)
def oscillation_threshold(momentum: float, *, kind: MomentumKind = "heavy_ball") -> float:
    """The lr * wd above which the norm oscillates around its equilibrium.

    Heavy ball: ``(1+a) [1 - sqrt(1 - (1-sqrt(a))^2 / (2(1+a)))]``, about (1-sqrt(a))^2 / 4. Nesterov and SGDW: by
    bisection on the linearised rate.

    Args:
        momentum: a.
        kind: "heavy_ball", "nesterov" or "sgdw".

    Returns:
        The threshold (times 1 / (1 - dampening) if there is dampening).

    Example:
        >>> f"{oscillation_threshold(0.9):.3g}", f"{oscillation_threshold(0.9, kind='nesterov'):.3g}"
        ('0.000658', '0.000691')
    """
    a = within("momentum", momentum, low=0, below=1)
    one_of("kind", kind, get_args(MomentumKind))
    gap = (1 - a) / (1 + math.sqrt(a))  # 1 - sqrt(a) with all its digits
    if kind == "heavy_ball":
        x = gap**2 / (2 * (1 + a))
        return (1 + a) * x / (1 + math.sqrt(1 - x))
    approach = nesterov_approach if kind == "nesterov" else sgdw_approach
    low, high = 1e-3 * gap**2, min(0.5, 1 - a)  # decoupled decay is monotone again above about 14 (1-a)
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if approach(middle, momentum=a).monotone else (low, middle)
    return math.sqrt(low * high)
