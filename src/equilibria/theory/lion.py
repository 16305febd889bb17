"""How far a weight points against the coming update, when updates have constant size: Lion and Muon step by step.

With ``w' = (1-eps) w - lr u`` and ||u||^2 = U the squared norm follows from z = -<w, u> / U alone:
``P' = (1-eps)^2 P + (lr^2 + 2 (1-eps) lr z) U``. A pull computes z from what past updates left behind.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.citations import law
from equilibria.theory.memory import Memory, arcsine_coefficients, lion_correlation

Array = NDArray[np.float64]


@law("", "torch.optim.Muon", derived="a linear filter remembers geometrically")
class MuonPull:
    """Muon: a linear filter with a geometric memory, the same for every layer until weights are rescaled.

    Attributes:
        traces: one number (or array over layers) per component of the memory.
    """

    def __init__(self, memory: Memory, traces: list[Any]) -> None:
        self.first, self.decay, self.traces = memory.first, memory.decay, traces

    def __call__(self, norm_sq: Any, lr: float, kept: float) -> Any:
        """z at this step; then remember the update."""
        z = 0.0
        for j, (weight, decay) in enumerate(zip(self.first, self.decay, strict=True)):
            z = z + weight * self.traces[j]
            self.traces[j] = lr + kept * decay * self.traces[j]
        return z


@law(
    "rotational", "Lion", derived="every power of the correlation factorises, so <w, sign(c)> is exact off equilibrium"
)
class LionPull:
    """Lion under Gaussian gradients whose size follows 1/||w||.

    ``c = b1 m + (1-b1) g`` is Gaussian and E<c_j, c_t> = b1 b2^(t-j-1) <c_j, m_(j+1)> factorises, so every power of
    the correlation does: the arcsine series of <w, sign(c)> becomes one geometric sum per term. Nothing is assumed
    stationary: the first moment may start at zero, and an lr or norm that changes fast is followed.

    A trace is a sum over past updates in units of ||m||^(2n+1): every factor below is then a cosine or a share, between
    0 and 1, however many terms there are, and under `states.rescaled` traces scale as the weight does.

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
        """z at this step; then remember the update."""
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


def settled_lion(betas: tuple[float, float], norm_sq: Array, *, lr: float, kept: float) -> tuple[Any, Any]:
    """||m||^2 and the traces of a weight that has long settled."""
    b1, b2 = betas
    r = (1 - b2) / (1 + b2)
    size = math.sqrt(b1 * b1 * r + (1 - b1) ** 2)
    stored = (b1 * b2 * r + (1 - b1) * (1 - b2)) / size
    powers, _ = arcsine_coefficients(lion_correlation(betas))
    return r / norm_sq, lr * (stored / math.sqrt(r)) ** powers / (1 - kept * b2**powers)
