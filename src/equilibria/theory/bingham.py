r"""The stationary law of the noisy Rayleigh quotient with any spectrum: the Bingham distribution.

The density on the unit sphere is ``exp(-x' diag(lambda) x) / Z`` with ``lambda_i = c a_i``, ``c`` the inverse
temperature. The Laplace transform of ``Z`` in the squared radius is a Gaussian integral, so

    Z = 2 pi^(p/2) (1/(2 pi i)) \int e^s prod_i (lambda_i + s)^(-1/2) ds

around the branch cut on the negative real axis: one dimension for every ``p``. The contour here is a parabola through
the saddle point, on which the trapezoidal rule converges geometrically. In few dimensions it bends as the path of
steepest descent does; in many it is straighter and keeps clear of heavy clusters of eigenvalues further out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law

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
        raise EquilibriaError(f"got a spectrum of shape {values.shape}; expected one axis of at least 2 eigenvalues")
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
        raise EquilibriaError(f"got vectors of shape {x.shape}; expected {exponents.size} entries on the last axis")
    squares = x**2
    length_sq = reals("squared length", squares.sum(-1), above=0)
    result: Array = -(squares @ exponents) / length_sq - bingham_moments(spectrum, inverse_temperature).log_normaliser
    return result
