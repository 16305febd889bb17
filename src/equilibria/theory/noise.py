"""The share of noise in a gradient, its effect at another batch size, and the diffusion (SDE) view of the norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.rayleigh import norm_sq_at


@dataclass(frozen=True, slots=True)
class NoiseSplit:
    """A mean square gradient split into signal and noise.

    Attributes:
        signal_sq: ||E g||^2, unbiased (may come out slightly negative when it is small).
        noise_sq: trace of the covariance of one micro-batch gradient.
        batches: number of micro-batches m that one step averages.
    """

    signal_sq: float
    noise_sq: float
    batches: int

    @property
    def fraction(self) -> float:
        """Share of noise in the mean square gradient of the averaged step; 1 is the noise-dominated regime."""
        noise = self.noise_sq / self.batches
        total = noise + max(self.signal_sq, 0.0)
        return noise / total if total > 0 else 0.0

    def mean_square(self, batches: float) -> float:
        """E||g||^2 when one step averages ``batches`` such micro-batches: signal + noise / batches."""
        return self.signal_sq + self.noise_sq / positive("batches", batches)


@law("smd+", "Fig. 1, assumption 1", derived="unbiased estimators from m micro-batch gradients")
def noise_split(gradients: ArrayLike) -> NoiseSplit:
    """Split the gradient of one step into signal and noise, from its micro-batch gradients.

    ``noise = sum ||g_i - mean||^2 / (m-1)``, ``signal = ||mean||^2 - noise / m``.

    Args:
        gradients: m micro-batch gradients, shape (m, entries), m >= 2.

    Returns:
        The split.

    Example:
        >>> split = noise_split([[1.0, 1.0], [1.0, -1.0]])
        >>> split.noise_sq, split.signal_sq, split.fraction
        (2.0, 0.0, 1.0)
    """
    g = reals("gradients", gradients)
    if g.ndim != 2 or len(g) < 2:
        raise EquilibriaError(f"got gradients of shape {g.shape}; expected (m, entries) with m >= 2 micro-batches")
    mean = g.mean(axis=0)
    noise = float(np.sum((g - mean) ** 2) / (len(g) - 1))
    return NoiseSplit(float(mean @ mean) - noise / len(g), noise, len(g))


@law("smd+", "Lemma D.1, eq. (180), (181)")
def sde_norm_fourth(steps: ArrayLike, norm: float, *, lr: float, weight_decay: float, noise_sq: float) -> Array:
    """E||w_t||^4 over time by the diffusion approximation of SGD.

    The diffusion is ``dw = -lr wd w dt - lr grad dt + lr Sigma^(1/2) dB``, one time unit per step. With gamma = ||w||^4
    / lr^2 and e = lr wd: ``gamma_t = exp(-4 e t) gamma_0 + noise_sq / (2 e) (1 - exp(-4 e t))``. The diffusion drops
    the squared mean gradient, which the discrete step keeps: use L = noise + ||E g||^2 for the latter.

    Args:
        steps: t, a number or an array.
        norm: ||w_0||.
        lr: learning rate.
        weight_decay: weight decay.
        noise_sq: trace of the covariance of the unit gradient.

    Returns:
        ||w_t||^4; its limit is noise_sq lr / (2 wd). The square root is `rayleigh.norm_sq_at`.

    Example:
        >>> round(float(sde_norm_fourth(1e6, 1.0, lr=0.05, weight_decay=0.2, noise_sq=3.0)), 6)
        0.375
    """
    decay, noise = positive("weight_decay", weight_decay), within("noise_sq", noise_sq, low=0)
    times, start = reals("steps", steps, low=0), positive("norm", norm) ** 2
    return norm_sq_at(times, start, lr=positive("lr", lr), weight_decay=decay, unit_grad_sq=noise) ** 2
