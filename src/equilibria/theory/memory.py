"""How long an update remembers itself: the autocorrelation of updates of constant size (Lion, Muon, EMA momentum).

With decoupled decay ``w' = (1-eps) w - lr u`` and a stationary update u of mean square U and autocorrelation
r_k = E<u_t, u_{t+k}> / U, everything follows from the one number

    S_eps = 1 + 2 sum_{k>=1} r_k (1-eps)^k:      P* = lr^2 U S_eps / (eps (2-eps)),   angle ~ sqrt(2 eps / S).

All the autocorrelations here are sums of geometric series, ``r_k = sum_j first_j decay_j^(k-1)``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, within
from equilibria.theory.citations import law

Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-10  # relative size at which the arcsine series is cut; the law itself is good to 3e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """An autocorrelation r_k = sum_j first_j * decay_j^(k-1), k >= 1.

    Attributes:
        first: correlation one step apart, per geometric component.
        decay: factor per further step, per component.
    """

    first: tuple[float, ...]
    decay: tuple[float, ...]

    def correlation(self, lag: int) -> float:
        """r_k at ``lag`` = k >= 0."""
        if lag == 0:
            return 1.0
        return math.fsum(a * b ** (lag - 1) for a, b in zip(self.first, self.decay, strict=True))

    def total(self, shrink: Any = 0.0) -> Any:
        """S_eps = 1 + 2 sum_k r_k (1 - shrink)^k, the sum of correlations through a decay of ``shrink`` per step.

        Example:
            An EMA with coefficient b has S = (1+b)/(1-b):

            >>> round(ema_memory(0.9).total(), 12)
            19.0
        """
        kept = 1.0 - shrink
        return 1.0 + 2.0 * sum(a * kept / (1.0 - b * kept) for a, b in zip(self.first, self.decay, strict=True))

    def scaled_to(self, total: float) -> Memory:
        """The same decays with the correlations scaled so that `total` (at no decay) becomes a measured value."""
        wanted, own = within("total", total, above=0) - 1.0, self.total() - 1.0
        if own == 0 and wanted != 0:
            raise EquilibriaError(f"got total={total:g}; expected 1: this update has no memory to scale")
        factor = wanted / own if own else 0.0
        return Memory(tuple(a * factor for a in self.first), self.decay)


@law("rotational", "momentum as a linear filter", derived="autocorrelation of an EMA of white noise: r_k = b^k")
def ema_memory(beta: float) -> Memory:
    """The memory of an exponential moving average of uncorrelated gradients: r_k = beta^k.

    Args:
        beta: EMA coefficient.

    Returns:
        The autocorrelation.

    Example:
        >>> ema_memory(0.5).correlation(3)
        0.125
    """
    b = within("beta", beta, low=0, below=1)
    return Memory((b,), (b,))


@law(
    "rotational",
    "Lion",
    corrected="r_k = (2/pi) asin(rho_k) instead of the linearised 2/(pi nu): up to 20 % in the angle",
)
def lion_memory(betas: tuple[float, float]) -> Memory:
    """The memory of Lion's sign update under Gaussian gradients.

    ``c = b1 m + (1-b1) g`` has correlation ``rho_k = [b1^2 b2^k (1-b2)/(1+b2) + (1-b1) b1 (1-b2) b2^(k-1)] / nu``,
    ``nu = (1-b1)^2 + b1^2 (1-b2)/(1+b2)``, and its sign has r_k = (2/pi) asin(rho_k). The arcsine series turns r_k into
    a sum of geometric series.

    Args:
        betas: Lion's (b1, b2).

    Returns:
        The autocorrelation.

    Example:
        >>> round(lion_memory((0.9, 0.99)).total(), 2), round(lion_memory((0.9, 0.99)).total(1e-3), 2)
        (45.93, 41.86)
    """
    b1 = within("beta1", betas[0], low=0, below=1)
    b2 = within("beta2", betas[1], low=0, below=1)
    variance = (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)
    rho = (b1**2 * b2 * (1 - b2) / (1 + b2) + (1 - b1) * b1 * (1 - b2)) / variance
    terms = 1
    while rho ** (2 * terms) * arcsine_coefficients(terms + 1)[-1] > _NEGLIGIBLE:
        terms += 1
    first = [coefficient * rho ** (2 * n + 1) for n, coefficient in enumerate(arcsine_coefficients(terms))]
    return Memory(tuple(first), tuple(b2 ** (2 * n + 1) for n in range(terms)))


@functools.cache
def arcsine_coefficients(terms: int) -> tuple[float, ...]:
    """Coefficients of (2/pi) asin(x) = sum_n c_n x^(2n+1).

    Example:
        >>> x = 0.3
        >>> total = sum(c * x ** (2 * n + 1) for n, c in enumerate(arcsine_coefficients(12)))
        >>> abs(total - 2 / math.pi * math.asin(x)) < 1e-15
        True
    """
    result, coefficient = [], 2 / math.pi
    for n in range(terms):
        result.append(coefficient / (2 * n + 1))
        coefficient *= (2 * n + 1) / (2 * n + 2)
    return tuple(result)


@law(
    "",
    "torch.optim.Muon",
    derived="linear filter before orthogonalisation; the polar factor decorrelates by 6-29 %",
)
def muon_memory(momentum: float, *, nesterov: bool = True) -> Memory:
    """The memory of Muon's momentum before orthogonalisation.

    Nesterov: the update filters white noise with psi_0 = 1 - mu^2, psi_k = (1-mu) mu^(k+1); plain: an EMA.
    Orthogonalisation shortens the memory: the total falls to .92-.94 of this for 4:1 matrices, .71-.74 for square ones.

    Args:
        momentum: mu.
        nesterov: as in torch.

    Returns:
        The autocorrelation.

    Example:
        >>> round(muon_memory(0.95).total(), 1)
        32.9
    """
    mu = within("momentum", momentum, low=0, below=1)
    if not nesterov:
        return ema_memory(mu)
    tail = (1 - mu) / (1 + mu)
    power = (1 - mu**2) ** 2 + mu**4 * tail
    return Memory((((1 - mu**2) * (1 - mu) * mu**2 + mu**5 * tail) / power,), (mu,))
