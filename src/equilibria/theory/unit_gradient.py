"""The L of each optimizer: what its norm balances, from gradients that may be correlated with its buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.theory._reals import reals
from equilibria.theory.citations import law
from equilibria.theory.moments import nesterov_correlation
from equilibria.theory.rules import SGD, SGDW, Rule

Array = NDArray[np.float64]


@law(
    "smd",
    "Thm 2",
    corrected="the factor of <v, g> depends on dampening and on Nesterov; the plain 2 a is up to 3.8 % off there",
)
def momentum_unit_grad_sq(rule: Rule, grad_sq: ArrayLike, *, buffer_dot_grad: ArrayLike) -> Array:
    """L, the number that fixes the norm of an optimizer with momentum.

    With N = ||g||^2 ||w||^2 and C = <v, g> ||w||^2, buffer and weight before the step: heavy ball and SGDW
    ``N + 2 a C``, with dampening ``N + 2 a C / (1 - dampening)``, Nesterov ``N + 2 a^2 (1+a) C / D``,
    D = 1 + a + a eps (1 + 2a). Optimizers whose update has a fixed size (AdamW, Lion, Muon) and Adam with L2: N.

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
    n, c = reals("grad_sq", grad_sq, low=0), reals("buffer_dot_grad", buffer_dot_grad)
    if isinstance(rule, SGDW):
        return n + 2 * rule.momentum * c
    if not isinstance(rule, SGD):
        return n
    if rule.nesterov:
        return np.asarray(n + (nesterov_correlation(rule.decay_per_step, rule.momentum, 1.0) - 1) * c)
    return n + 2 * rule.momentum * c / (1 - rule.dampening)
