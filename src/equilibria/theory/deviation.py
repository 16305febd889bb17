"""How far norm and angle may be from equilibrium: bounds that hold at every step, or with a given probability.

The theorems of spherical motion dynamics state such bounds. Each function here gives the paper's, in the form in which
it holds, and where the paper's is loose the one that follows from the variances of `fluctuation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.theory._reals import Array, positive_reals, reals
from equilibria.theory.citations import law
from equilibria.theory.fluctuation import fluctuation
from equilibria.theory.rules import SGD


@law(
    "smd+",
    "Lemma C.1, eq. (25), (35)",
    corrected="with (1 - lr wd)^2 in place of 1 - 2 lr wd it holds for the exact recursion",
)
def norm_sq_floor(
    steps: ArrayLike, norm_sq: float, *, lr: float, weight_decay: float, least_unit_grad_sq: float
) -> Array:
    """Lower bound on the squared norm under plain SGD if no squared unit gradient is below ``l``.

    ``x_t >= x_l - a^t |x_l - x_0|`` with ``a = (1 - lr wd)^2`` and ``x_l = lr sqrt(l/(1-a))``, the equilibrium of l.
    It holds for every sequence of gradients, random or not.

    Args:
        steps: numbers of steps t taken.
        norm_sq: ``x_0 = ||w_0||^2``.
        lr: learning rate.
        weight_decay: coupled, and small enough that ``(1 - lr wd)^2 > 1/2``.
        least_unit_grad_sq: ``l``, a lower bound of ``||g||^2 ||w||^2`` at every step.

    Returns:
        The bound at each number of steps.

    Raises:
        EquilibriaError: a value is out of range, or lr * wd is 0 or above 1 - sqrt(1/2).

    Example:
        >>> float(norm_sq_floor(1e9, 1.0, lr=0.1, weight_decay=0.1, least_unit_grad_sq=1.99).round(6))
        1.0
    """
    eta, eps = positive("lr", lr), lr * within("weight_decay", weight_decay, low=0)
    kept = (1 - within("lr * weight_decay", eps, above=0, below=1 - math.sqrt(0.5))) ** 2
    start = positive("norm_sq", norm_sq)
    level = eta * math.sqrt(positive("least_unit_grad_sq", least_unit_grad_sq) / (1 - kept))
    result: Array = level - kept ** reals("steps", steps, low=0) * abs(level - start)
    return result


@law(
    "explr",
    "Lemma A.1, eq. (12)",
    corrected="for shares up to 1, which is not said: above, the same number bounds the other tail; the moment behind "
    "it is E exp(t X^2) = (1 - 2t)^(-1/2), printed E[t X^2]",
)
def chi_square_tail(share: ArrayLike, dim: int) -> Array:
    """Upper bound on a tail of chi-square: ``(b e^(1-b))^(k/2)`` for the sum of k squares beyond ``k b``.

    Args:
        share: ``b``, positive. Up to 1 it bounds the probability of less than ``k b``, from 1 on that of more.
        dim: ``k``, degrees of freedom.

    Returns:
        The bound; 1 at the mean.

    Example:
        >>> chi_square_tail([0.125, 1, 2], 10).round(5).tolist()  # exactly 0.00047, and 0.0293 of more than 20
        [0.00242, 1.0, 0.21561]
    """
    b = positive_reals("share", share)
    result: Array = np.exp(whole("dim", dim, low=1) / 2 * (np.log(b) + 1 - b))
    return result


@dataclass(frozen=True, slots=True)
class Contraction:
    """Largest factor on the squared distance from equilibrium in one step of SGD with momentum.

    Attributes:
        exact: squared spectral norm of the step's matrix.
        bound: of the lemma.
    """

    exact: float
    bound: float


@law(
    "smd+",
    "Lemma C.2, eq. (59)",
    corrected="holds up to 4 decay^2/(1-a)^2, which its proof omits: without coupling the matrix is diagonal, and the "
    "square of its first entry exceeds the bound by just that",
)
def momentum_contraction(momentum: float, decay: float, *, coupling: float = 0.0) -> Contraction:
    """Contraction of the paper's linear map behind the equilibrium of SGD with momentum, exact and as bounded.

    With ``a = momentum``, ``b = decay`` and ``c = coupling`` the matrix is ``diag(1 - 2b/(1-a), a, a^2 + 2 a^2 b/(1-a))
    - c b k e'``, ``k = (1, -2a, a^2)``, ``e = (1, 1, 1)``; the bound is ``1 - 4b/(1-a)``. Near equilibrium a norm
    approaches it twice as fast as the bound says (`approach`).

    Args:
        momentum: a.
        decay: b = lr * wd.
        coupling: c, which the paper takes below 1 and below ``((1-a^2)/b - 8/(1-a))/3``.

    Returns:
        Both factors.

    Raises:
        EquilibriaError: a value is out of range, or the lemma's condition on ``coupling`` fails.

    Example:
        >>> factors = momentum_contraction(0.9, 1e-4)
        >>> round(factors.bound, 12), round(factors.exact - factors.bound, 12)  # 4 b^2/(1-a)^2 more
        (0.996, 4e-06)
    """
    a, b = within("momentum", momentum, above=0, below=1), within("decay", decay, above=0, below=1)
    most = ((1 - a * a) / b - 8 / (1 - a)) / 3
    if most <= 0:
        raise EquilibriaError(
            f"got decay={b:g} at momentum={a:g}; expected less than {(1 - a * a) * (1 - a) / 8:.3g}", argument="decay"
        )
    c = within("coupling", coupling, low=0, below=min(1.0, most))
    matrix = np.diag([1 - 2 * b / (1 - a), a, a * a * (1 + 2 * b / (1 - a))])
    matrix -= c * b * np.outer([1, -2 * a, a * a], np.ones(3))
    return Contraction(float(np.linalg.norm(matrix, 2)) ** 2, 1 - 4 * b / (1 - a))


@dataclass(frozen=True, slots=True)
class AngleDeviation:
    """How far the angle of a step is from equilibrium, and how rarely it is farther; radians and probabilities.

    Attributes:
        angle: in equilibrium.
        bound: on ``|angle of a step - angle|``.
        failure: probability that a step is farther off, at most.
        printed_bound: the paper's bound, its leading terms.
        printed_failure: the probability that goes with it.
    """

    angle: float
    bound: float
    failure: float
    printed_bound: float
    printed_failure: float


@law(
    "smd+",
    "Theorem 3, eq. (145), (160), (171)",
    corrected="from the true variance, by Chebyshev, for any probability; the printed bound lacks a factor sqrt(lr wd) "
    "and exceeds the angle itself; in eq. (159) the root of V/(2 L lr) is that of V/(2 L l)",
)
def angle_deviation(
    rule: SGD, grad_variance: float, *, failure: float = 0.05, least_unit_grad_sq: float = 1.0
) -> AngleDeviation:
    """Bound on the angle of a single step that holds with a given probability, in equilibrium.

    With ``v = Var(angle)/angle^2`` of `fluctuation`, ``|angle_t - angle| <= angle sqrt((v + v^2/4)/failure)``; the last
    term is the mean's distance from the root mean square. The paper's: with probability at least ``1 - q``,
    ``q = (V/(L l))^(1/3)``, the angle is within ``2 q + lr wd sqrt(V/(2 L l))`` for plain SGD and
    ``q sqrt(2 (1-a^2)(1 + 4a^2 + a^4))/(2 a^2)`` for momentum a.

    Args:
        rule: SGD, heavy ball or plain.
        grad_variance: V / L^2, as for `fluctuation`.
        failure: probability of a larger deviation.
        least_unit_grad_sq: l / L, a lower bound of the squared unit gradient over its mean; only the printed bound
            depends on it.

    Returns:
        Both bounds.

    Raises:
        EquilibriaError: the rule is not SGD, is Nesterov's, or a value is out of range.

    Example:
        Of a random walk in 400 dimensions (V/L^2 = 2/399) at least 99 of 100 steps turn by the angle within 35 %; the
        printed bound is 11 times the angle:

        >>> law = angle_deviation(SGD(0.1, 5e-3), 2 / 399, failure=0.01)
        >>> round(law.bound / law.angle, 2), round(law.printed_bound / law.angle)
        (0.35, 11)
    """
    if not isinstance(rule, SGD) or rule.nesterov or rule.dampening:
        raise EquilibriaError(f"got {rule}; expected SGD without Nesterov and dampening", argument="rule")
    least = within("least_unit_grad_sq", least_unit_grad_sq, above=0, high=1)
    q = (within("grad_variance", grad_variance, low=0) / least) ** (1 / 3)
    probability = within("failure", failure, above=0, below=1)
    variance, angle = fluctuation(rule, grad_variance).angle_variance, float(rule.equilibrium().angle)
    bound = angle * math.sqrt((variance + variance**2 / 4) / probability)
    return AngleDeviation(angle, bound, probability, _printed(rule, q), min(q, 1.0))


def _printed(rule: SGD, q: float) -> float:
    a = rule.momentum
    if not a:
        return 2 * q + rule.decay_per_step * math.sqrt(q**3 / 2)
    return q * math.sqrt(2 * (1 - a * a) * (1 + 4 * a * a + a**4)) / (2 * a * a)
