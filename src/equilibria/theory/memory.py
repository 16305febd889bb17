"""How long an update remembers itself: updates of constant size (Lion, Muon, EMA momentum).

With decoupled decay ``w' = (1-eps) w - lr u`` and a stationary update u of mean square U and autocorrelation
r_k = E<u_t, u_{t+k}> / U, the equilibrium depends on one number,

    S_eps = 1 + 2 sum_{k>=1} r_k (1-eps)^k:      P* = lr^2 U S_eps / (eps (2-eps)),   angle ~ sqrt(2 eps / S).

All autocorrelations here are sums of geometric series, ``r_k = sum_j first_j decay_j^(k-1)``.

Step by step, outside equilibrium, the squared norm follows from z = -<w, u> / U, which tells how far the weight points
against the coming update: ``P' = (1-eps)^2 P + (lr^2 + 2 (1-eps) lr z) U``. `MuonPull` and `LionPull` compute z from
traces of past updates.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.muon import orthogonal_update

_NEGLIGIBLE = 1e-12  # the arcsine series ends where its rest is below this; the law itself is good to 3e-3


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
        """This memory with its correlations scaled to a measured `total` (without decay)."""
        wanted, own = within("total", total, above=0) - 1.0, self.total() - 1.0
        if own == 0 and wanted != 0:
            raise EquilibriaError(
                f"got total={total:g}; expected 1: this update has no memory to scale", argument="total"
            )
        factor = wanted / own if own else 0.0
        return Memory(tuple(a * factor for a in self.first), self.decay)


@law("rotational", "momentum as a linear filter", derived="autocorrelation of an EMA of white noise: r_k = b^k")
def ema_memory(beta: float) -> Memory:
    """Autocorrelation of an exponential moving average of uncorrelated gradients, ``r_k = beta^k``.

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


@law("rotational", "Lion", derived="<c_t, c_(t+1)> / ||c||^2 of c = b1 m + (1-b1) g, white gradients")
def lion_correlation(betas: tuple[float, float]) -> float:
    """Correlation rho_1, one step apart, of the vector c whose sign Lion takes; see `lion_memory`.

    Args:
        betas: Lion's (b1, b2).

    Returns:
        rho_1.

    Example:
        >>> round(lion_correlation((0.5, 0.0)), 12)  # (g_t + g_(t-1)) / 2
        0.5
    """
    b1 = within("beta1", betas[0], low=0, below=1)
    b2 = within("beta2", betas[1], low=0, below=1)
    tail = (1 - b2) / (1 + b2)
    variance = (1 - b1) ** 2 + b1**2 * tail
    return b1 * (1 - b2) * (b1 * b2 / (1 + b2) + 1 - b1) / variance


@law(
    "rotational",
    "Lion",
    corrected="r_k = (2/pi) asin(rho_k) instead of the linearised 2/(pi nu): up to 20 % in the angle",
)
def lion_memory(betas: tuple[float, float]) -> Memory:
    """Autocorrelation of Lion's sign update under Gaussian gradients.

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
    b2, rho = betas[1], lion_correlation(betas)
    powers, coefficients = arcsine_coefficients(rho)
    return Memory(tuple((coefficients * rho**powers).tolist()), tuple((b2**powers).tolist()))


@law(
    "rotational",
    "Lion",
    derived="<w, m> decays by b2 per step and gains <sign(c), m'>; the sign passes <c, m'> / ||c||^2 of it on",
)
def lion_total(
    betas: tuple[float, float], *, grad_sq: ArrayLike, buffer_sq: ArrayLike, buffer_dot_grad: ArrayLike
) -> Array:
    """S of Lion's update, 1 + 2 sum of its correlations, from measured inner products of momentum and gradient.

    Lion's update has a fixed size; correlated gradients change how long it lasts. Of an update sign(c), c = b1 m +
    (1-b1) g, the momentum after the step, m' = b2 m + (1-b2) g, keeps the share h = <c, m'>/||c||^2. The memory is
    proportional to it: ``S = 1 + (S0 - 1) h/h0``, S0 and h0 those of uncorrelated gradients.

    Args:
        betas: Lion's (b1, b2).
        grad_sq: mean of ||g||^2, one number or one per layer.
        buffer_sq: mean of ||m||^2, the momentum before the step.
        buffer_dot_grad: mean of <m, g>.

    Returns:
        S, for the ``memory_total`` of `Lion.equilibrium`.

    Example:
        >>> tail = 0.01 / 1.99  # ||m||^2 of uncorrelated gradients
        >>> round(float(lion_total((0.9, 0.99), grad_sq=1.0, buffer_sq=tail, buffer_dot_grad=0.0)), 2)
        45.93
    """
    b1, b2 = betas
    total = lion_memory(betas).total()

    def kept(g: Any, m: Any, mg: Any) -> Any:
        c_dot_m = b1 * b2 * m + (b1 * (1 - b2) + (1 - b1) * b2) * mg + (1 - b1) * (1 - b2) * g
        return c_dot_m / (b1 * b1 * m + 2 * b1 * (1 - b1) * mg + (1 - b1) ** 2 * g)

    measured = kept(
        reals("grad_sq", grad_sq, above=0),
        reals("buffer_sq", buffer_sq, low=0),
        reals("buffer_dot_grad", buffer_dot_grad),
    )
    return np.asarray(1 + (total - 1) * measured / kept(1.0, (1 - b2) / (1 + b2), 0.0))


@functools.lru_cache(maxsize=64)
def arcsine_coefficients(largest: float) -> tuple[Array, Array]:
    """Powers p and coefficients c of (2/pi) asin(x) = sum_j c_j x^p_j, for 0 <= x <= ``largest`` < 1.

    The power series needs about 10 / (1 - largest) terms. This keeps its first 16 and replaces every further octave of
    terms by the 8 nodes of a Gauss rule for sums: about 100 powers for any largest x.

    Example:
        >>> powers, coefficients = arcsine_coefficients(0.9999)
        >>> len(powers) < 150, abs(float(coefficients @ 0.9999**powers) - 2 / math.pi * math.asin(0.9999)) < 1e-9
        (True, True)
    """
    terms, weights, first = [np.arange(16.0)], [np.ones(16)], 16
    while first * largest ** (2 * first) * _arcsine_coefficient(first) > _NEGLIGIBLE:
        nodes, shares = _gauss_sum(first)
        terms.append(first + nodes)
        weights.append(shares)
        first *= 2
    n = np.concatenate(terms)
    return 2 * n + 1, np.concatenate(weights) * [_arcsine_coefficient(term) for term in n.tolist()]


def _arcsine_coefficient(n: float) -> float:
    """The coefficient of x^(2n+1), a smooth function of n: 2/pi Gamma(n + 1/2) / (sqrt(pi) Gamma(n + 1) (2n + 1))."""
    return math.exp(math.lgamma(n + 0.5) - math.lgamma(n + 1) - 1.5 * math.log(math.pi)) / (n + 0.5)


def _gauss_sum(count: int) -> tuple[Array, Array]:
    """Eight nodes and weights that sum f(0) + ... + f(count - 1), exact for polynomials of degree 15."""
    k = np.arange(1.0, 8.0)
    # Golub and Welsch: the Gauss rule from the recurrence of the discrete Chebyshev polynomials.
    off_diagonal = np.sqrt(k**2 * (count**2 - k**2) / (4 * (4 * k**2 - 1)))
    nodes, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return nodes + (count - 1) / 2, count * vectors[0] ** 2


@law(
    "",
    "torch.optim.Muon",
    derived="linear filter, then orthogonalisation, which shortens the memory by 5 % (long matrices) to 30 % (square)",
)
def muon_memory(momentum: float, *, nesterov: bool = True, shape: tuple[int, int] | None = None) -> Memory:
    """Autocorrelation of Muon's update for a matrix of one shape, or of its momentum.

    Nesterov: the momentum filters white noise with psi_0 = 1 - mu^2, psi_k = (1-mu) mu^(k+1); plain: an EMA. Either way
    its correlation is rho_k = rho_1 mu^(k-1), and that of the update ``sum_j c_j rho_k^j``, with the shares c_j of
    `muon.orthogonal_update`.

    Args:
        momentum: mu.
        nesterov: as in torch.
        shape: (rows, columns); without it the memory is that of the momentum before orthogonalisation.

    Returns:
        The autocorrelation.

    Example:
        >>> round(muon_memory(0.95).total(), 1), round(muon_memory(0.95, shape=(32, 32)).total())
        (32.9, 24)
    """
    mu = within("momentum", momentum, low=0, below=1)
    first = mu
    if nesterov:
        tail = (1 - mu) / (1 + mu)
        first = ((1 - mu**2) * (1 - mu) * mu**2 + mu**5 * tail) / ((1 - mu**2) ** 2 + mu**4 * tail)
    if shape is None:
        return Memory((first,), (mu,))
    update = orthogonal_update(*shape)
    shares = [(power, share) for power, share in zip(update.powers, update.shares, strict=True) if share > 0]
    return Memory(tuple(share * first**power for power, share in shares), tuple(mu**power for power, _ in shares))


@law("", "torch.optim.Muon", derived="a linear filter remembers geometrically")
class MuonPull:
    """How far a weight points against Muon's coming update, ``z = -<w, u> / U``, step by step.

    The momentum is a linear filter with geometric memory; its traces are equal for all layers until weights are
    rescaled.

    Attributes:
        traces: one number (or array over layers) per component of the memory.
    """

    def __init__(self, memory: Memory, traces: list[Any]) -> None:
        self.first, self.decay, self.traces = memory.first, memory.decay, traces

    def __call__(self, norm_sq: Any, lr: float, kept: float) -> Any:
        """Return z of this step, then add its update to the traces."""
        z = 0.0
        for j, (weight, decay) in enumerate(zip(self.first, self.decay, strict=True)):
            z = z + weight * self.traces[j]
            self.traces[j] = lr + kept * decay * self.traces[j]
        return z


@law(
    "rotational", "Lion", derived="every power of the correlation factorises, so <w, sign(c)> is exact off equilibrium"
)
class LionPull:
    """How far a weight points against Lion's coming update, ``z = -<w, u> / U``, step by step.

    Gradients are Gaussian, of a size proportional to 1/||w||. ``c = b1 m + (1-b1) g`` is Gaussian and E<c_j, c_t> = b1
    b2^(t-j-1) <c_j, m_(j+1)> factorises, so every power of the correlation does: the arcsine series of <w, sign(c)>
    becomes one geometric sum per term. This assumes no stationarity: the first moment may start at zero, and lr and
    norm may change fast.

    A trace is a sum over past updates in units of ||m||^(2n+1). Every factor below is then a cosine or a share, between
    0 and 1, and under `states.rescaled` traces scale as the weight does.

    Attributes:
        buffer_sq: ||m||^2 in units of the unit gradient.
        traces: one row (of one number, or one per layer) per term of the series.
    """

    def __init__(self, betas: tuple[float, float], buffer_sq: Any, traces: Array) -> None:
        self.b1, self.b2 = betas
        self.buffer_sq, self.traces = buffer_sq, traces
        powers, self.coefficients = arcsine_coefficients(lion_correlation(betas))
        self.powers = powers.reshape(-1, *(1,) * (traces.ndim - 1))

    def __call__(self, norm_sq: Any, lr: float, kept: float) -> Any:
        """Return z of this step, then add its update to the traces."""
        b1, b2, r = self.b1, self.b2, self.buffer_sq
        n = 1.0 / norm_sq
        after = b2 * b2 * r + (1 - b2) ** 2 * n
        size = (b1 * b1 * r + (1 - b1) ** 2 * n) ** 0.5
        recalled = b1 * r**0.5 / size
        stored = (b1 * b2 * r + (1 - b1) * (1 - b2) * n) / (size * after**0.5)
        faded = b2 * (r / after) ** 0.5
        z = self.coefficients @ (recalled**self.powers * self.traces)
        self.traces = kept * faded**self.powers * self.traces + lr * stored**self.powers
        self.buffer_sq = after
        return z


def lion_equilibrium_traces(betas: tuple[float, float], norm_sq: Array, *, lr: float, kept: float) -> tuple[Any, Any]:
    """||m||^2 and the traces of `LionPull` in equilibrium."""
    b1, b2 = betas
    r = (1 - b2) / (1 + b2)
    size = math.sqrt(b1 * b1 * r + (1 - b1) ** 2)
    stored = (b1 * b2 * r + (1 - b1) * (1 - b2)) / size
    powers, _ = arcsine_coefficients(lion_correlation(betas))
    return r / norm_sq, lr * (stored / math.sqrt(r)) ** powers / (1 - kept * b2**powers)
