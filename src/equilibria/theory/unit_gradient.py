"""The unit gradient L of each optimizer, which fixes its norm, for gradients that may correlate with the buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.theory._reals import reals
from equilibria.theory.citations import law
from equilibria.theory.moments import nesterov_correlation
from equilibria.theory.rules import SGD, SGDW, Rule, check_rule

Array = NDArray[np.float64]


@law(
    "smd",
    "Thm 2",
    corrected="the factor of <v, g> depends on dampening and on Nesterov; the plain 2 a is up to 3.8 % off there",
)
def momentum_unit_grad_sq(rule: Rule, grad_sq: ArrayLike, *, buffer_dot_grad: ArrayLike) -> Array:
    """The unit gradient L that fixes the norm of an optimizer with momentum.

    With N = ||g||^2 ||w||^2 and C = <v, g> ||w||^2, buffer and weight before the step: heavy ball and SGDW
    ``N + 2 a C``, with dampening ``N + 2 a C / (1 - dampening)``, Nesterov ``N + 2 a^2 (1+a) C / D``,
    D = 1 + a + a eps (1 + 2a). AdamW, Lion and Muon, whose update has a fixed size, and Adam with L2: ``N``.

    Args:
        rule: the optimizer.
        grad_sq: N, one number or one per layer.
        buffer_dot_grad: C.

    Returns:
        L.

    Example:
        >>> from equilibria.theory import SGD
        >>> float(momentum_unit_grad_sq(SGD(0.1, 5e-4, momentum=0.9), 10.0, buffer_dot_grad=-0.5))
        9.1
    """
    check_rule(rule)
    n, c = reals("grad_sq", grad_sq, low=0), reals("buffer_dot_grad", buffer_dot_grad)
    if isinstance(rule, SGDW):
        return n + 2 * rule.momentum * c
    if not isinstance(rule, SGD):
        return n
    if rule.nesterov:
        return np.asarray(n + (nesterov_correlation(rule.decay_per_step, rule.momentum, 1.0) - 1) * c)
    return n + 2 * rule.momentum * c / (1 - rule.dampening)


@law("smd", "Thm 2", derived="first order in eps of the exact fixed point with correlated gradients")
def nesterov_angle_factor(momentum: float, *, correlation: ArrayLike) -> Array:
    """Factor on the equilibrium angle of Nesterov momentum when gradients correlate with the buffer.

    ``f^2 = (1 + 2a - 2a^3 + 2 a^2 rho (1 + a - a^2)) / ((1 + 2 a^2 rho)(1 + 2a - 2a^3))``, to first order in eps; use
    `SGD.equilibrium(correlation=...)` for the exact number of one layer.

    Args:
        momentum: a.
        correlation: rho = E<v, g> / E||g||^2, one number or one per layer.

    Returns:
        Angle / angle at rho = 0; NaN where rho is so negative that there is no equilibrium.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 1e-4, momentum=0.9, nesterov=True)
        >>> exact = rule.equilibrium(correlation=0.1).angle / rule.equilibrium().angle
        >>> round(float(nesterov_angle_factor(0.9, correlation=0.1)), 3) == round(exact, 3)
        True
    """
    a, rho = momentum, reals("correlation", correlation)
    plain = 1 + 2 * a - 2 * a**3
    squared = (plain + 2 * a * a * rho * (1 + a - a * a)) / ((1 + 2 * a * a * rho) * plain)
    return np.sqrt(np.where((1 + 2 * a * a * rho > 0) & (squared > 0), squared, np.nan))
