"""Factors that carry a running training between weight decay, folded weight decay and smaller numbers.

All of them are plain numbers for a scale-invariant group of weights that shares one learning rate. A momentum
buffer is in gradient units, so it scales inversely to the weights; batch-norm statistics right behind the
weights scale with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, whole
from equilibria.theory._reals import reals
from equilibria.theory.citations import law
from equilibria.theory.folding import FoldState

_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Switch:
    """Factors on weights and optimizer state between two steps.

    First ``w <- weight · w``, then ``buf <- buffer · buf + buffer_from_weight · w`` with the new ``w``
    (nothing if the optimizer holds no buffer).

    Attributes:
        weight: factor on the weights.
        buffer: factor on the momentum buffer.
        buffer_from_weight: coefficient of the new weights to add to the buffer.
    """

    weight: float
    buffer: float
    buffer_from_weight: float

    @property
    def running_mean(self) -> float:
        """Factor on the running mean of the batch norm right after the weights."""
        return self.weight

    @property
    def running_var(self) -> float:
        """Factor on that batch norm's running variance."""
        return self.weight**2


def _log_stored_scale(state: FoldState) -> float:
    """``log(P/C)``: stored weights over those of the weight-decay run."""
    log_ratio = state.log_scale - state.exponent * _LN2
    if abs(log_ratio) > 350:
        raise EquilibriaError(
            f"got log_scale={state.log_scale:g} with exponent={state.exponent}; expected stored weights "
            "within "
            "exp(350) of the weight-decay run: renormalise before the numbers overflow"
        )
    return log_ratio


@law(
    "explr",
    "Theorem 2.5, initial conditions",
    corrected="buf = P buf~ + q w in place of the previous weights; the printed start velocity has the wrong sign",
)
def to_weight_decay(state: FoldState) -> Switch:
    """Factors that turn a folded run into the weight-decay run it stands for.

    ``w = w~ C/P`` and ``buf = (P/C) buf~ + q w`` with ``P = exp(state.log_scale)`` and
    ``C = 2^state.exponent``. Afterwards use the original learning rate and weight decay. Derived here from Li
    & Arora, Theorem 2.5.

    Args:
        state: the folded run's state.

    Returns:
        `Switch`.

    Raises:
        EquilibriaError: the scale is outside float64.

    Example:
        >>> switch = to_weight_decay(FoldState(log_scale=math.log(4.0), q=0.5, exponent=1))
        >>> print(f"{switch.weight:.3f} {switch.buffer:.3f} {switch.buffer_from_weight:.3f} {switch.running_var:.3f}")
        0.500 2.000 0.500 0.250
    """
    log_ratio = _log_stored_scale(state)
    return Switch(math.exp(-log_ratio), math.exp(log_ratio), state.q)


@law(
    "explr",
    "Theorem 2.5, initial conditions",
    corrected="buf~ = buf - q w_0 with q = (1/alpha_0 - 1)/lr_{-1}: sign and divisor of the printed start velocity",
)
def to_folded(state: FoldState | None = None) -> Switch:
    """Factors that turn a weight-decay run into a folded run that starts at ``state``.

    ``w~ = w P/C`` and ``buf~ = (C/P) (buf - q w)``. At the usual start ``FoldState()`` nothing changes: keep
    weights and buffer as they are. A start at ``q = (1/z1 - 1)/lr`` makes a constant schedule purely
    exponential.

    Args:
        state: the state to start from; by default ``FoldState()``.

    Returns:
        `Switch`, the inverse of `to_weight_decay` at the same state.

    Raises:
        EquilibriaError: the scale is outside float64.

    Example:
        >>> to_folded()
        Switch(weight=1.0, buffer=1.0, buffer_from_weight=0.0)
    """
    start = state or FoldState()
    log_ratio = _log_stored_scale(start)
    return Switch(math.exp(log_ratio), math.exp(-log_ratio), 0.0 - math.exp(-2 * log_ratio) * start.q)


@dataclass(frozen=True, slots=True)
class Renormalisation:
    """Dividing the stored weights by ``c = 2^exponent`` without changing training; every factor is a power of two.

    Bit-identical as long as nothing becomes subnormal and batch-norm eps is below half an ulp of the
    variance.

    Attributes:
        exponent: ``log2 c``; also give it to `FoldState.renormalised`, so that later learning rates follow.
    """

    exponent: int

    @property
    def weight(self) -> float:
        """Factor on the weights, ``1/c``."""
        return math.ldexp(1.0, -self.exponent)

    @property
    def buffer(self) -> float:
        """Factor on the momentum buffer, ``c``: it is in gradient units."""
        return math.ldexp(1.0, self.exponent)

    @property
    def lr(self) -> float:
        """Factor on every later learning rate, ``1/c²``."""
        return math.ldexp(1.0, -2 * self.exponent)

    @property
    def running_mean(self) -> float:
        """Factor on the running mean of the batch norm right after the weights, ``1/c``."""
        return self.weight

    @property
    def running_var(self) -> float:
        """Factor on that batch norm's running variance, ``1/c²``."""
        return self.lr


@law("", "scale invariance", derived="w/c, buf·c and lr/c² give the same network; powers of two round nothing")
def renormalisation(norm: ArrayLike) -> Renormalisation:
    """Power of two that brings the largest norm of a group back to [1, 2).

    ``exponent = floor(log2 max(norm))``, exactly. Weights of one group share ``c``, because they share a
    learning rate.

    Args:
        norm: norm of the group's weights, or of each of its tensors; above 0.

    Returns:
        `Renormalisation`.

    Raises:
        EquilibriaError: a norm is not positive and finite, or none is given.

    Example:
        >>> change = renormalisation([3.0, 1500.0])
        >>> print(change.exponent, change.weight * 1500.0, change.buffer, change.lr == change.weight**2)
        10 1.46484375 1024.0 True
    """
    norms = reals("norm", norm, above=0)
    whole("number of norms", norms.size, low=1)
    return Renormalisation(math.frexp(float(np.max(norms)))[1] - 1)
