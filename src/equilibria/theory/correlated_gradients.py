"""What gradients that are correlated in time do to the updates of AdamW and Lion, which are no linear filters of them.

A gradient orthogonal to its weight never enters <w, buffer>: the part of an update that is linear in past gradients
knows of correlations only through its size (`violations`). The rest of an update is not linear, sees no projection, and
lasts as long as the gradients do: Lion's sign of a Gaussian average, and AdamW's division by a second moment that
follows the square of a lasting signal. Derivations: docs/laws/violations.md.

Gradients are sums of independent AR(1) processes, given as (share of E||g||^2, correlation of successive gradients).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria.theory._reals import Array
from equilibria.theory.citations import law

Parts: TypeAlias = Sequence[tuple[float, float]]

_LINEAR = 2 / math.pi  # share of the sign of a Gaussian that is linear in it
_LIFETIMES = 20  # of the longest memory, after which a sum over lags ends
_APART = 1e-6  # two rates that differ by less count as different by this much
_LARGEST_SCATTER = 1 / 8  # relative variance of Adam's second moment, to which its law was within a factor of 2
_ROUNDS = 30


@law("", "docs/laws/violations.md", derived="arcsine law: its linear term forgets by beta2, the others with the signal")
def lion_total_correlated(betas: tuple[float, float], parts: Parts, *, decay_per_step: float) -> float:
    """S_eps of Lion's update, 1 + 2 sum of its correlations through weight decay, under correlated gradients.

    With c = b1 m + (1-b1) g, rho_k its autocorrelation and h = <c, m'>/||c||^2, the correlation of sign(c) with the
    weight's past k steps ago is ``(2/pi) (b1 h b2^(k-1) - rho_k) + (2/pi) asin(rho_k)``: the linear term of the arcsine
    series acts through <w, m>, which no gradient enters, the others with all of the signal's own memory.

    Args:
        betas: Lion's (b1, b2).
        parts: the gradients.
        decay_per_step: eps = lr wd.

    Example:
        Uncorrelated gradients leave the law's own memory:

        >>> from equilibria.theory.memory import lion_memory
        >>> total = lion_total_correlated((0.9, 0.99), [(1.0, 0.0)], decay_per_step=1e-3)
        >>> abs(total / lion_memory((0.9, 0.99)).total(1e-3) - 1) < 1e-6
        True
    """
    b1, b2 = betas
    slowest = max(b2, *(abs(rho) for _, rho in parts))
    k = np.arange(math.ceil(_LIFETIMES / max(1 - slowest, decay_per_step)) + 1)
    covariance, kept = np.zeros(len(k)), 0.0
    for share, rho in parts:
        r = rho if abs(rho - b2) > _APART else b2 - _APART
        overlap = r / (1 - b2 * r)
        m_sq, m_dot_g = (1 - b2) / (1 + b2) * (1 + 2 * b2 * overlap), (1 - b2) * overlap
        m, g = b1 * m_sq + (1 - b1) * m_dot_g, b1 * m_dot_g + (1 - b1)  # covariances with c
        powers = np.power(r, k) if r else (k == 0).astype(np.float64)
        momentum = b2**k * m + (1 - b2) * g * (powers - b2**k) / (r - b2)  # of c with the momentum k steps later
        covariance += share * (b1 * momentum + (1 - b1) * g * powers)
        kept += share * (b2 * m + (1 - b2) * g)
    correlation = np.clip(covariance[1:] / covariance[0], -1.0, 1.0)
    own = b1 * kept / covariance[0] * b2 ** (k[1:] - 1)
    others = np.arcsin(correlation) - correlation
    return float(1 + 2 * _LINEAR * np.sum((own + others) * (1 - decay_per_step) ** k[1:]))


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """AdamW's update under correlated gradients of unit size.

    Attributes:
        norm_sq: ||w||^2 over that of uncorrelated gradients and a known second moment.
        update_sq: mean square of m/sqrt(v), in the same unit.
    """

    norm_sq: float
    update_sq: float


@law(
    "",
    "docs/laws/violations.md",
    derived="m/sqrt(v) to second order in the scatter of v: its linear part by orthogonality, the rest with the signal",
)
def adamw_correlated(betas: tuple[float, float], parts: Parts, *, decay_per_step: float) -> AdamUpdate | None:
    """Size of AdamW's weight and update when its second moment follows correlated gradients.

    With v = 1 + d the update is m (1 - d/2 + 3 d^2/8). Its part linear in past gradients g_(t-l) has the coefficients
    ``phi_l = a_l (1 + 3 <d^2>/8) - q_l C_l + 3 q_l sum_j gamma_(l-j) q_j C_j`` with a_l and q_l the weights of a
    gradient in m and v, gamma its autocovariance, C_l = <m g_(t-l)>. It meets <w, g_(t-l)>, which holds the updates
    since then alone. The rest, -(m d)/2 without its linear part, is remembered for as long as <m m_k><d d_k>/4 lasts.

    Args:
        betas: (b1, b2).
        parts: the gradients.
        decay_per_step: eps = lr wd.

    Returns:
        The sizes; None where the relative variance of v exceeds 1/8, beyond which the expansion fails.

    Example:
        Uncorrelated gradients and a long average leave the law:

        >>> update = adamw_correlated((0.9, 0.999), [(1.0, 0.0)], decay_per_step=1e-4)
        >>> abs(update.norm_sq - 1) < 2e-3, abs(update.update_sq - 1) < 2e-3
        (True, True)
    """
    b1, b2 = betas
    slowest = max(b1, b2, *(abs(rho) for _, rho in parts))
    half = 1 << math.ceil(math.log2(_LIFETIMES / (1 - slowest)))
    lag = np.arange(2 * half)
    apart, past = np.minimum(lag, 2 * half - lag), lag < half
    gamma = np.sum([share * np.where(apart > 0, np.power(rho, apart), 1.0) for share, rho in parts], axis=0)
    a, q = (np.where(past, (1 - b) * np.power(b, lag), 0.0) for b in (b1, b2))
    spectrum, of_a, of_q = (np.fft.rfft(values) for values in (gamma, a, q))

    def back(transform: NDArray[np.complex128]) -> Array:
        return np.asarray(np.fft.irfft(transform, 2 * half))

    scatter = 2 * back(np.fft.rfft(gamma**2) * np.abs(of_q) ** 2)  # <d d_k>
    if scatter[0] > _LARGEST_SCATTER:
        return None
    shared = q * back(spectrum * of_a)
    phi = a * (1 + 3 / 8 * scatter[0]) - shared + 3 * q * back(spectrum * np.fft.rfft(shared))
    of_phi = np.fft.rfft(phi)
    linear = back(spectrum * np.abs(of_phi) ** 2)[:half]
    rest = (back(spectrum * np.abs(of_a) ** 2) * scatter)[:half] / 4
    update_sq = linear[0] + rest[0]
    response = back(spectrum * of_phi)[:half]  # <u_(t+j) g_t>
    since = np.cumsum(response) - response  # over the updates since a gradient, without the coming one
    # The projection that keeps gradients orthogonal pulls weights back: they forget faster than by decay alone.
    forgotten = decay_per_step
    for _ in range(_ROUNDS):
        kept = (1 - forgotten) ** lag[1:half]
        norm_sq = float(update_sq) + 2 * float(phi[:half] @ since + rest[1:] @ kept)
        free = float(update_sq) + 2 * float((linear + rest)[1:] @ kept)
        forgotten = (forgotten + min(decay_per_step * free / norm_sq, 0.5)) / 2
    return AdamUpdate(norm_sq, float(update_sq * (1 + b1) / (1 - b1)))
