"""Size and memory of Muon's orthogonalised update, by the shape of the matrix.

Muon steps by O = f(M), M its momentum and f five Newton-Schulz steps, which bring singular values near 1 but not to it.
With Gaussian M the equilibrium needs two facts about f:

- the size U = E||O||^2;
- how a correlation rho of two momenta survives: r(rho) = E<f(M1), f(M2)> / U. As for any odd function of Gaussian
  variables, ``r(rho) = sum_j c_j rho^j`` over odd j with c_j >= 0 and sum c_j = 1 (its Hermite expansion; for Lion's
  sign the same series is the arcsine). Momentum is remembered geometrically, rho_k = rho_1 mu^(k-1), hence so is every
  power of it, and the update's autocorrelation is again a sum of geometric series (`memory.Memory`).

Both depend on the shape alone, not on momentum. They are computed from a few random matrices, with a fixed seed.
Singular values of large Gaussian matrices depend on the ratio of the sides only, so that a large shape is represented
by a smaller one whose normalised spectrum is the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from equilibria.errors import whole
from equilibria.theory._reals import Array
from equilibria.theory.citations import law

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of torch.optim.Muon's iteration."""
NEWTON_SCHULZ_STEPS = 5
"""Its steps."""
_SMALL = 1e-7  # torch's ns eps
_LONGEST_SHORT_SIDE = 32  # of a matrix that stands for a larger one; its spectrum is off by 1 / its square
_ENTRIES = 1 << 16  # per draw: 64 matrices of 32 x 32. Products of larger ones take threads, which trainings need
_MOST_ENTRIES = 1 << 15  # of one matrix
_CORRELATIONS = (0.35, 0.6, 0.8, 0.9, 0.97)
_POWERS = (1, 3, 5, 7, 9, 13, 17, 25, 33, 65)


def orthogonalised(matrices: Array, *, larger: float = 1.0) -> Array:
    """Five steps of Newton-Schulz on matrices of shape (..., rows, columns), as torch.optim.Muon takes them.

    Args:
        matrices: the momentum.
        larger: the number of singular values of the matrix that stands for, over those of the one given.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = np.swapaxes(matrices, -1, -2) if is_tall else matrices
    size = np.sqrt(np.sum(x * x, axis=(-2, -1), keepdims=True) * larger)
    x = x / (size + _SMALL)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ np.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return np.swapaxes(x, -1, -2) if is_tall else x


@dataclass(frozen=True, slots=True)
class OrthogonalUpdate:
    """Muon's update of a Gaussian momentum.

    Attributes:
        size: U = E||O||^2, before the factor of `Muon.gain`.
        powers: j.
        shares: c_j of r(rho) = sum_j c_j rho^j.
    """

    size: float
    powers: tuple[int, ...]
    shares: tuple[float, ...]

    def correlation(self, rho: float) -> float:
        """r(rho): correlation of two updates whose momenta are correlated by rho."""
        return math.fsum(share * rho**power for power, share in zip(self.powers, self.shares, strict=True))


@law(
    "", "torch.optim.Muon", derived="Hermite expansion of the orthogonalisation, its coefficients from random matrices"
)
def orthogonal_update(rows: int, columns: int) -> OrthogonalUpdate:
    """Size and memory of Muon's update of a matrix of this shape, for Gaussian gradients.

    Args:
        rows: of the matrix.
        columns: of the matrix.

    Returns:
        The update's size and the coefficients of its memory; good to about 1 %.

    Example:
        Orthogonalisation of square matrices forgets more than that of long ones:

        >>> square, long = orthogonal_update(32, 32), orthogonal_update(128, 16)
        >>> round(square.correlation(0.8), 1), round(long.correlation(0.8), 1)
        (0.6, 0.8)
    """
    sides = whole("rows", rows, low=1), whole("columns", columns, low=1)
    return _update(min(sides), max(sides))


@functools.lru_cache(maxsize=4096)
def _update(short: int, long: int) -> OrthogonalUpdate:
    from scipy.optimize import nnls

    ratio = long / short
    side = max(1, min(short, _LONGEST_SHORT_SIDE, math.isqrt(int(_MOST_ENTRIES / ratio))))
    other = min(max(side, round(side * ratio)), _MOST_ENTRIES)
    draw = np.random.default_rng([side, other])
    shape = max(4, _ENTRIES // (side * other)), side, other
    first, fresh = draw.standard_normal((2, *shape), dtype=np.float32)
    f = functools.partial(orthogonalised, larger=short / side)
    update = f(first)
    size = float(np.vdot(update, update)) / len(first)
    # Both signs of the fresh part: what is linear in it cancels.
    pairs = [
        (rho, float(np.vdot(update, f(rho * first + sign * math.sqrt(1 - rho * rho) * fresh))))
        for rho in _CORRELATIONS
        for sign in (1.0, -1.0)
    ]
    linear = (float(np.vdot(first, update)) / len(first)) ** 2 / (side * other * size)
    rows = [[rho**power for power in _POWERS[1:]] for rho, _ in pairs]
    linear = min(linear, 1.0)
    wanted = [product / len(first) / size - linear * rho for rho, product in pairs]
    # The weight of the last row makes the shares sum to 1.
    shares, _ = nnls(np.array([*rows, [1e3] * len(rows[0])]), np.array([*wanted, 1e3 * (1 - linear)]))
    shares *= (1 - linear) / max(shares.sum(), np.finfo(float).tiny)
    return OrthogonalUpdate(size * short / side, _POWERS, (linear, *shares.tolist()))
