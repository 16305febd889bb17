"""How a moment recursion behaves near its equilibrium: rate of approach and stationary fluctuations.

A recursion is given as one step ``step(state, unit_grad_sq) -> (next state, squared chord)`` on a few numbers.
Its derivative at the fixed point is taken by complex-step differentiation, which is exact to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
Step = Callable[[ComplexArray, complex], tuple[ComplexArray, complex]]

_TINY = 1e-30  # complex-step increment: no subtraction happens, so it can be as small as we like


@dataclass(frozen=True, slots=True)
class Linearisation:
    """First derivatives of one recursion step at its fixed point, in units where ||w||^2 = 1 and L = 1.

    Attributes:
        jacobian: d(next state) / d(state).
        forcing: d(next state) / d(L).
        chord_gradient: d(log chord^2) / d(state).
        chord_forcing: d(log chord^2) / d(L).
        chord_sq: squared chord of one step in equilibrium.
    """

    jacobian: Array
    forcing: Array
    chord_gradient: Array
    chord_forcing: float
    chord_sq: float

    def dominant(self) -> complex:
        """The eigenvalue of largest modulus: how a small deviation shrinks per step."""
        eigenvalues = np.linalg.eigvals(self.jacobian)
        return complex(eigenvalues[np.argmax(np.abs(eigenvalues))])

    def norm_sq_variance(self) -> float:
        """Var(||w||^2) / ||w*||^4 per unit of Var(L) / L^2."""
        return float(self._covariance()[0, 0])

    def angle_variance(self) -> float:
        """Var(angle) / angle^2 per unit of Var(L) / L^2."""
        u = self.chord_gradient
        log_chord_sq = float(u @ self._covariance() @ u + self.chord_forcing**2)
        half = math.asin(math.sqrt(self.chord_sq) / 2)
        return log_chord_sq / 4 * (math.tan(half) / half) ** 2

    def _covariance(self) -> Array:
        """Solves S = J S J^T + f f^T (discrete Lyapunov equation)."""
        n = len(self.forcing)
        noise = np.outer(self.forcing, self.forcing).ravel()
        solution = np.linalg.solve(np.eye(n * n) - np.kron(self.jacobian, self.jacobian), noise)
        return np.asarray(solution.reshape(n, n))


def linearise(step: Step, fixed_point: Array, *, unit_grad_sq: float) -> Linearisation:
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
        bumped[i] += 1j * _TINY
        after, chord = step(bumped, complex(unit_grad_sq))
        jacobian[:, i] = after.imag / _TINY
        chord_gradient[i] = chord.imag / chord.real / _TINY
    after, chord = step(base, unit_grad_sq * (1 + 1j * _TINY))
    return Linearisation(jacobian, after.imag / _TINY, chord_gradient, chord.imag / chord.real / _TINY, chord.real)
