"""How far above its estimate the largest eigenvalue can lie, given that Lanczos started at random.

A small residual says that an eigenvalue is near, not that it is the largest. What can be said about the largest one
rests on the random start b. Lanczos' vectors are polynomials of the matrix, q_j = p_j(A) b, with coefficients that are
known. If A had an eigenvalue x with unit eigenvector v, then <v, q_j> = p_j(x) <v, b>; and as the q_j are orthonormal,
the squares of these sum to at most 1:

    <v, b>^2 K(x) <= 1,    K(x) = p_0(x)^2 + ... + p_m(x)^2.

A direction b that is uniform on the sphere in n dimensions has <v, b>^2 < 1/N with probability at most
sqrt(2n / (pi N)). Above the largest Ritz value K grows without bound, so x cannot be far above it: with probability
1 - risk over the start, no eigenvalue lies where K(x) > 2n / (pi risk^2). This holds for every matrix, and at every
number of steps at once, so that one may stop as soon as the bound is good enough (J. L. M. van Dorsselaer,
M. E. Hochstenbach and H. A. van der Vorst, SIAM J. Matrix Anal. Appl. 22, 837, 2000, bound eigenvalues in this way).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Distances above the Ritz value, relative to the scale of the matrix; rounded up to the next one.
_DISTANCES = np.logspace(-14, 4, 18 * 24 + 1)
_LARGE = 1e100


def distance_to_top(diagonal: NDArray[np.float64], beside: NDArray[np.float64], *, size: int, risk: float) -> float:
    """How far above the largest Ritz value the largest eigenvalue is at most, with probability ``1 - risk``.

    Args:
        diagonal: Lanczos' alphas, m of them.
        beside: its betas, m of them: the last is the norm of the remainder of the last product.
        size: n, the dimension of the matrix.
        risk: the probability, over a start uniform on the sphere, that the bound is wrong.

    Returns:
        The distance, in units of the matrix; 0 if the Krylov space is invariant.

    Example:
        >>> bool(distance_to_top(np.array([1.0, 2.0]), np.array([1.0, 1e-9]), size=10, risk=0.01) < 1e-5)
        True
    """
    tridiagonal = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    top = float(np.linalg.eigvalsh(tridiagonal)[-1])
    scale = float(np.abs(tridiagonal).max())
    if beside[-1] == 0.0:
        return 0.0
    unlikely = _log_kernel(diagonal, beside, top + scale * _DISTANCES) >= np.log(2 * size / (np.pi * risk**2))
    return scale * float(_DISTANCES[np.argmax(unlikely)]) if unlikely.any() else float("inf")


def _log_kernel(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64], at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """log K at points above the largest Ritz value, by the three-term recurrence, rescaled before it overflows."""
    before, now = np.zeros_like(at), np.ones_like(at)
    total, log_scale, previous = np.ones_like(at), np.zeros_like(at), 0.0
    for alpha, beta in zip(diagonal, beside, strict=True):
        before, now = now, ((at - alpha) * now - previous * before) / beta
        total = total + now * now
        previous = beta
        shrink = np.where(total > _LARGE, np.sqrt(total), 1.0)
        before, now, total = before / shrink, now / shrink, total / shrink**2
        log_scale += 2 * np.log(shrink)
    found: NDArray[np.float64] = np.log(total) + log_scale
    return found
