r"""The stationary law of the noisy Rayleigh quotient with a two-level spectrum: the Watson distribution.

Write ``f`` for the squared cosine between a direction and the best eigenvector, ``p`` for the dimension and ``b`` for
the concentration. The law of ``f`` has density ``exp(b f) f^(-1/2) (1-f)^((p-3)/2) / Z`` on [0, 1].

One quadrature serves every regime. With ``u = 1-f = 1/(1+exp(-y))`` the integrand over the whole line is
``exp(-b u) u^a (1-u)^(1/2)`` with ``a = (p-1)/2``; it has exactly one maximum for every real ``b``, analytic in closed
form, and everything is evaluated relative to that maximum. Nothing overflows, ``f`` and ``1-f`` both keep their
relative accuracy, and no switch between series and asymptotics is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import number, whole
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
