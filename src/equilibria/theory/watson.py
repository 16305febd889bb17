r"""The stationary laws of the noisy Rayleigh quotient: Watson's for a two-level spectrum, Bingham's for any.

**Watson.** Write ``f`` for the squared cosine between a direction and the best eigenvector, ``p`` for the dimension and
``b`` for the concentration. The law of ``f`` has density ``exp(b f) f^(-1/2) (1-f)^((p-3)/2) / Z`` on [0, 1].

One quadrature serves every regime. With ``u = 1-f = 1/(1+exp(-y))`` the integrand over the whole line is
``exp(-b u) u^a (1-u)^(1/2)`` with ``a = (p-1)/2``; it has exactly one maximum for every real ``b``, analytic in closed
form, and everything is evaluated relative to that maximum. Nothing overflows, ``f`` and ``1-f`` both keep their
relative accuracy, and no switch between series and asymptotics is needed.

**Bingham.** The density on the unit sphere is ``exp(-x' diag(lambda) x) / Z`` with ``lambda_i = c a_i``, ``c`` the
inverse temperature. The Laplace transform of ``Z`` in the squared radius is a Gaussian integral, so

    Z = 2 pi^(p/2) (1/(2 pi i)) \int e^s prod_i (lambda_i + s)^(-1/2) ds

around the branch cut on the negative real axis: one dimension for every ``p``. The contour here is a parabola through
the saddle point, on which the trapezoidal rule converges geometrically. In few dimensions it bends as the path of
steepest descent does; in many it is straighter and keeps clear of heavy clusters of eigenvalues further out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, number, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law

_PANELS = 48  # even, so that the maximum is an edge
_ORDER = 20
_DROP = 45.0  # exp(-45) = 3e-20: the mass outside the window is below rounding
_REACH = 120.0  # the log-integrand falls at least half as fast as |y|, so it has dropped by _DROP within this distance
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(_ORDER)
_WIDTH = 2 / _PANELS
_GRID = (-1 + _WIDTH * (np.arange(_PANELS)[:, None] + (_NODES + 1) / 2)).ravel()
_GRID_WEIGHTS = np.tile(_WEIGHTS * _WIDTH / 2, _PANELS)


@dataclass(frozen=True, slots=True)
class WatsonMoments:
    """Moments of ``f``, the squared cosine with the best direction; all without unit.

    Attributes:
        risk: 1 - E f.
        mean: E f.
        variance: Var f.
        mixing: E f (1-f), the factor with which the gradient acts on the risk.
        log_normaliser: log Z, the logarithm of the integral of exp(b f) f^(-1/2) (1-f)^((p-3)/2).
    """

    risk: Array
    mean: Array
    variance: Array
    mixing: Array
    log_normaliser: Array


@dataclass(frozen=True, slots=True)
class _Peak:
    """Where the integrand is largest, and its shape around that point."""

    a: float
    b: Array
    u: Array
    v: Array

    def relative(self, d: Array) -> tuple[Array, Array, Array]:
        """``log(u/u*)``, ``log(v/v*)`` and the log-integrand at a distance ``d`` from the maximum, relative to it."""
        log_u = -np.log1p(np.expm1(-d) * self.v)
        log_v = -np.log1p(np.expm1(d) * self.u)
        return log_u, log_v, -self.b * self.u * np.expm1(log_u) + self.a * log_u + log_v / 2

    def edge(self, sign: float) -> Array:
        """The distance on one side at which the integrand has fallen by exp(-_DROP)."""
        near, far = np.zeros_like(self.b), np.full_like(self.b, _REACH)
        for _ in range(40):
            middle = (near + far) / 2
            inside = self.relative(sign * middle)[2] > -_DROP
            near, far = np.where(inside, middle, near), np.where(inside, far, middle)
        return far

    def window(self) -> _Window:
        """The window outside which the integrand is negligible."""
        return _Window(self.edge(-1.0), self.edge(1.0))


@dataclass(frozen=True, slots=True)
class _Window:
    """Distances ``d = t |t| edge`` from the maximum for ``t`` in [-1, 1]: dense at the maximum, which may be narrow."""

    left: Array
    right: Array

    def distance(self, t: Array) -> Array:
        return t * np.abs(t) * np.where(t > 0, self.right, self.left)

    def slope(self, t: Array) -> Array:
        return 2 * np.abs(t) * np.where(t > 0, self.right, self.left)

    def inverse(self, d: Array) -> Array:
        share = np.sign(d) * np.sqrt(np.abs(d) / np.where(d > 0, self.right, self.left))
        result: Array = np.clip(share, -1.0, 1.0)
        return result


def _peak(b: Array, dim: int) -> _Peak:
    """The only root in (0, 1) of ``b u^2 - (b+a+1/2) u + a``, and its complement, each without cancellation."""
    a = (dim - 1) / 2
    root = np.hypot(b - a + 0.5, np.sqrt(2 * a))
    up, down = b + a + 0.5, a + 0.5 - b
    with np.errstate(divide="ignore"):
        u = np.where(up > 0, 2 * a / (np.abs(up) + root), 0.0)
        v = np.where(down > 0, 1 / (np.abs(down) + root), 1 - u)
    return _Peak(a, b, np.where(up > 0, u, 1 - v), v)


@law("nrq", "Theorem 2", corrected="The concentration is 2 kappa, and kappa carries the gap of the spectrum.")
def watson_moments(concentration: ArrayLike, dim: int) -> WatsonMoments:
    r"""Moments and normaliser of the Watson law: the squared cosine ``f`` with the best direction in equilibrium.

    ``E f^k (1-f)^m = (1/Z) \int_0^1 f^k (1-f)^m e^(b f) f^(-1/2) (1-f)^((p-3)/2) df`` with ``b = concentration`` and
    ``p = dim``. In terms of Kummer's function ``Z = B(1/2, (p-1)/2) 1F1(1/2; p/2; b)`` and
    ``1 - E f = ((p-1)/p) 1F1((p+1)/2; p/2+1; -b) / 1F1((p-1)/2; p/2; -b)``. Relative error below 1e-11 for every
    moment, for 2 <= dim <= 1e5 and abs(concentration) <= 1e8.

    Args:
        concentration: ``b``, any real number or array; for the noisy Rayleigh quotient ``gap M* / (lr noise^2)``.
        dim: ``p >= 2``.

    Returns:
        `WatsonMoments`, each field of the shape of ``concentration``.

    Raises:
        EquilibriaError: ``concentration`` is not finite or ``dim`` is not a whole number of at least 2.

    Example:
        In three dimensions the mean is 1/(2 sqrt(b) Dawson(sqrt(b))) - 1/(2 b):

        >>> from scipy.special import dawsn
        >>> b = 9.0
        >>> round(float(watson_moments(b, 3).mean / (1 / (2 * 3 * dawsn(3)) - 1 / (2 * b))), 12)
        1.0
    """
    b = reals("concentration", concentration)
    peak = _peak(b[..., None], whole("dim", dim, low=2))
    window = peak.window()
    log_u, log_v, log_w = peak.relative(window.distance(_GRID))
    u, v, w = peak.u * np.exp(log_u), peak.v * np.exp(log_v), np.exp(log_w) * window.slope(_GRID) * _GRID_WEIGHTS
    mass = w.sum(-1)
    risk, mean, mixing = (((w * g).sum(-1) / mass) for g in (u, v, u * v))
    # The smaller of f and 1-f is the one whose deviation keeps its digits.
    deviation = np.where(risk[..., None] < 0.5, u - risk[..., None], v - mean[..., None])
    variance = (w * deviation**2).sum(-1) / mass
    log_peak_u = np.where(peak.v < 0.5, np.log1p(-np.minimum(peak.v, 0.5)), np.log(peak.u))
    top = (peak.b * peak.v + peak.a * log_peak_u + np.log(peak.v) / 2)[..., 0]
    return WatsonMoments(risk, mean, variance, mixing, top + np.log(mass))


@law("nrq", "Theorem 2, Eq. 26", corrected="Eq. 26 prints roughly lim E f; the risk is half the term it subtracts.")
def watson_risk(concentration: ArrayLike, dim: int) -> Array:
    """The limiting risk ``r*(b) = 1 - E f``, decreasing in ``b`` from 1 through (p-1)/p at ``b = 0`` to 0.

    ``r* = (p-1)/(2 b) (1 + 1/(2 b) + ...)`` for large ``b``. See `watson_moments` for the accuracy.

    Args:
        concentration: ``b``, any real number or array.
        dim: ``p >= 2``.

    Returns:
        The risk, without unit, of the shape of ``concentration``.

    Raises:
        EquilibriaError: bad ``concentration`` or ``dim``.

    Example:
        >>> round(float(watson_risk(67.0820393, 10)), 4)
        0.0676
    """
    return watson_moments(concentration, dim).risk


@law("nrq", "Theorem 2", corrected="The exponent is 2 kappa f with kappa proportional to the gap.")
def watson_log_density(f: ArrayLike, concentration: float, *, dim: int) -> Array:
    """The logarithm of the stationary density of the squared cosine ``f`` with the best direction.

    ``log rho(f) = b f - (1/2) log f + ((p-3)/2) log(1-f) - log Z``. At the ends it is the one-sided limit: +inf at 0,
    and at 1 +inf, finite or -inf for ``dim`` 2, 3 or more. Absolute error about 1e-16 (|b| + p).

    Args:
        f: squared cosine with the best direction, in [0, 1].
        concentration: ``b``.
        dim: ``p >= 2``.

    Returns:
        log density with respect to ``f``, of the shape of ``f``.

    Raises:
        EquilibriaError: ``f`` outside [0, 1], bad ``concentration`` or ``dim``.

    Example:
        At ``b = 0`` in three dimensions the density is 1/(2 sqrt(f)):

        >>> round(float(np.exp(watson_log_density(0.25, 0.0, dim=3))), 12)
        1.0
    """
    from scipy.special import xlogy

    x = reals("f", f, low=0, high=1)
    b = number("concentration", concentration)
    log_z = watson_moments(b, dim).log_normaliser
    return b * x - xlogy(0.5, x) + xlogy((dim - 3) / 2, 1 - x) - log_z


@law("nrq", "Theorem 2, Eq. 27", corrected="As the density; this is the stationary tail probability of f.")
def watson_cdf(f: ArrayLike, concentration: float, *, dim: int) -> Array:
    r"""The stationary probability that the squared cosine is at most ``f``.

    ``P(F <= f) = \int_0^f rho(s) ds``, absolute error below 1e-12. This is the tail probability ``epsilon*`` that
    Theorem 1's upper bound needs, with ``f`` in the role of ``xi``.

    Args:
        f: squared cosine with the best direction, in [0, 1].
        concentration: ``b``.
        dim: ``p >= 2``.

    Returns:
        Probabilities of the shape of ``f``.

    Raises:
        EquilibriaError: ``f`` outside [0, 1], bad ``concentration`` or ``dim``.

    Example:
        At ``b = 0`` in three dimensions ``P(F <= f) = sqrt(f)``:

        >>> round(float(watson_cdf(0.25, 0.0, dim=3)), 12)
        0.5
    """
    x = reals("f", f, low=0, high=1)
    peak = _peak(np.array(number("concentration", concentration)), whole("dim", dim, low=2))
    window = peak.window()

    def weight(t: Array) -> Array:
        return np.exp(peak.relative(window.distance(t))[2]) * window.slope(t)

    panels = (weight(_GRID) * _GRID_WEIGHTS).reshape(_PANELS, _ORDER).sum(1)
    beyond = np.append(np.cumsum(panels[::-1])[::-1], 0.0)  # mass at and after each panel's left edge
    with np.errstate(divide="ignore"):
        t = window.inverse(np.log1p(-x) - np.log(x) - np.log(peak.u / peak.v))
    index = np.minimum(((t + 1) / _WIDTH).astype(np.intp), _PANELS - 1)
    rest = -1 + _WIDTH * (index + 1) - t
    partial = (weight(t[..., None] + rest[..., None] * (_NODES + 1) / 2) * _WEIGHTS).sum(-1) * rest / 2
    result: Array = np.clip((beyond[index + 1] + partial) / beyond[0], 0.0, 1.0)
    return result


@law("nrq", "Theorem 2", derived="Inverse of r*(b); bracket from E f(1-f) <= r(1-r) and the bounds of Sra and Karp.")
def watson_concentration(risk: ArrayLike, dim: int) -> Array:
    """The concentration ``b(r)`` at which the stationary risk equals ``risk``: the inverse of `watson_risk`.

    The moment identity ``2 b E f(1-f) = (p-1) - p r`` with ``E f(1-f) <= r (1-r)`` gives
    ``|b| >= |(p-1) - p r| / (2 r (1-r))``, and ``|b|`` is at most three times that. Newton's method inside this bracket
    (slope ``-Var f``), with bisection as the safeguard.

    Args:
        risk: ``r`` in (0, 1).
        dim: ``p >= 2``.

    Returns:
        ``b``, of the shape of ``risk``; negative when ``risk > (p-1)/p``.

    Raises:
        EquilibriaError: ``risk`` outside (0, 1) or bad ``dim``.

    Example:
        >>> b = watson_concentration(0.0676, 10)
        >>> round(float(watson_risk(b, 10)), 12)
        0.0676
    """
    r = reals("risk", risk, above=0, below=1)
    p = whole("dim", dim, low=2)
    target = r.ravel()
    base = ((p - 1) - p * target) / (2 * target * (1 - target))
    low, high = np.minimum(base, 3 * base), np.maximum(base, 3 * base)
    b, todo = base * (1 + 1 / p), np.arange(base.size)
    for _ in range(60):
        now = b[todo]
        moments = watson_moments(now, p)
        surplus = moments.risk - target[todo]
        low[todo] = np.where(surplus >= 0, now, low[todo])
        high[todo] = np.where(surplus <= 0, now, high[todo])
        newton = now + surplus / moments.variance
        inside = (newton >= low[todo]) & (newton <= high[todo])
        b[todo] = np.where(inside, newton, (low[todo] + high[todo]) / 2)
        # Near r = 1 rounding of r alone moves b by more than any tolerance on b could allow.
        settled = (np.abs(b[todo] - now) <= 1e-14 * np.abs(now)) | (np.abs(surplus) <= 4e-16 * target[todo])
        todo = todo[~settled]
        if todo.size == 0:
            break
    result: Array = b.reshape(r.shape)[()]
    return result


# ---- any spectrum: the Bingham distribution


_STEP = 0.04  # in widths of the saddle; the nearest singularity is at least 0.7 widths away
_POINTS = 1500  # covers 60 widths, where exp(s) has vanished
_BENDS = (0.0, 0.015625, 0.0625, 0.25, 1.0)  # shares of the steepest-descent bend


@dataclass(frozen=True, slots=True)
class BinghamMoments:
    """Second moments of a Bingham direction.

    Attributes:
        second_moments: ``E x_i^2``, in the order of the spectrum; they add up to 1.
        log_normaliser: log Z with respect to the surface area of the unit sphere, for ``exp(-c x'Ax)``.
    """

    second_moments: Array
    log_normaliser: float


def _exponents(spectrum: ArrayLike, inverse_temperature: float) -> Array:
    values = reals("spectrum", spectrum)
    if values.ndim != 1 or values.size < 2:
        raise EquilibriaError(
            f"got a spectrum of shape {values.shape}; expected one axis of at least 2 eigenvalues", argument="spectrum"
        )
    return within("inverse_temperature", inverse_temperature, low=0) * values


@dataclass(frozen=True, slots=True)
class _Path:
    """The upper half of the contour; the lower half is its conjugate."""

    weights: NDArray[np.complex128]
    factors: NDArray[np.complex128]

    @classmethod
    def through(cls, bend: float, *, step: float, inverse: Array, counts: NDArray[np.int64]) -> _Path:
        """Trapezoidal weights of the integrand on ``s = t0 - bend v^2 + i v``, relative to the saddle point ``t0``."""
        v = np.arange(_POINTS) * step
        shift = -bend * v**2 + 1j * v
        factors = np.asarray(1 + shift[:, None] * inverse, dtype=np.complex128)
        exponent = shift - (np.log(factors) @ counts) / 2
        exponent.real = np.minimum(exponent.real, 300.0)  # a path this bad is never chosen, but must not overflow
        weights = np.exp(exponent) * (1 + 2j * bend * v)
        weights[0] /= 2
        return cls(weights, factors)

    def loss(self) -> float:
        """Estimated loss of the sum to cancellation and truncation; comparable between paths, whose sums are equal."""
        size = np.abs(self.weights)
        return float(size.sum() + _POINTS * size[-1] / np.finfo(float).eps)


@law("nrq", "Theorem 2", derived="The diffusion on the sphere at constant norm is reversible: its law is exp(-c x'Ax).")
def bingham_moments(spectrum: ArrayLike, inverse_temperature: float) -> BinghamMoments:
    """Second moments and normaliser of the stationary direction, for any spectrum.

    ``E x_i^2 = -d log Z / d lambda_i``, ``lambda_i = c a_i``, ``c = inverse_temperature``. Relative error below 1e-11
    for each moment, also when it is tiny. The cost is 7500 complex logarithms per distinct eigenvalue.

    Args:
        spectrum: eigenvalues ``a_i``, in any order, repeated or not.
        inverse_temperature: ``c >= 0``; for the noisy Rayleigh quotient ``M*/(lr noise^2)``.

    Returns:
        `BinghamMoments`.

    Raises:
        EquilibriaError: fewer than two eigenvalues, a non-finite number, or a negative temperature.

    Example:
        At infinite temperature the direction is uniform and ``Z`` is the area of the sphere:

        >>> moments = bingham_moments([1.0, 2.0, 5.0], 0.0)
        >>> bool(np.allclose(moments.second_moments, 1 / 3)), round(float(np.exp(moments.log_normaliser) / np.pi), 12)
        (True, 4.0)
    """
    from scipy.optimize import brentq

    exponents = _exponents(spectrum, inverse_temperature)
    lowest, dim = float(exponents.min()), exponents.size
    levels, level_of, counts = np.unique(exponents - lowest, return_inverse=True, return_counts=True)

    def slope(t: float) -> float:
        return float(1 - (counts / (levels + t)).sum() / 2)

    # 1/(2t) <= sum/2 <= p/(2t) brackets the saddle point.
    saddle = brentq(slope, 0.5 * (1 - 1e-9), dim / 2 * (1 + 1e-9), xtol=1e-15, rtol=1e-14)
    inverse = 1 / (levels + saddle)
    curvature = (counts * inverse**2).sum() / 2
    bend = (counts * inverse**3).sum() / (6 * curvature)
    step = _STEP / np.sqrt(curvature)
    paths = [_Path.through(bend * share, step=step, inverse=inverse, counts=counts) for share in _BENDS]
    best = min(path.loss() for path in paths)
    path = next(path for path in paths if path.loss() <= 2 * best)
    mass = path.weights.real.sum()
    moments = (path.weights @ (inverse / path.factors)).real / (2 * mass)
    log_peak = saddle - (counts * np.log(levels + saddle)).sum() / 2
    log_integral = log_peak + np.log(mass * step / np.pi)
    return BinghamMoments(moments[level_of], float(np.log(2) + dim / 2 * np.log(np.pi) + log_integral - lowest))


@law("nrq", "Theorem 2", derived="The stationary density for any spectrum; Theorem 2 is its two-level case.")
def bingham_log_density(direction: ArrayLike, spectrum: ArrayLike, *, inverse_temperature: float) -> Array:
    """The logarithm of the stationary density of the direction, with respect to surface area.

    ``log density = -c x'Ax / x'x - log Z``.

    Args:
        direction: vectors along the last axis, of any non-zero length.
        spectrum: eigenvalues ``a_i``.
        inverse_temperature: ``c >= 0``.

    Returns:
        log density, one number per vector.

    Raises:
        EquilibriaError: a zero or non-finite vector, lengths that differ, or a bad spectrum or temperature.

    Example:
        On the circle at infinite temperature it is -log(2 pi):

        >>> density = bingham_log_density([3.0, 4.0], [1.0, 2.0], inverse_temperature=0.0)
        >>> round(float(np.exp(density) * 2 * np.pi), 12)
        1.0
    """
    exponents = _exponents(spectrum, inverse_temperature)
    x = reals("direction", direction)
    if x.ndim < 1 or x.shape[-1] != exponents.size:
        raise EquilibriaError(
            f"got vectors of shape {x.shape}; expected {exponents.size} entries on the last axis", argument="direction"
        )
    squares = x**2
    length_sq = reals("squared length", squares.sum(-1), above=0)
    result: Array = -(squares @ exponents) / length_sq - bingham_moments(spectrum, inverse_temperature).log_normaliser
    return result
