"""The largest curvature at which an optimizer is stable: momentum, Nesterov and Adam.

On a quadratic valley of curvature ``lambda`` an optimizer is a linear recursion of second order; it becomes unstable
when a root of its characteristic polynomial leaves the unit circle, at -1. Weight decay shifts this threshold, by twice
as much where the loss is scale-invariant: there the weights shrink too, and the direction is unstable as soon as the
displacement across the valley shrinks more slowly than they do.

Plain gradient descent on a scale-invariant loss is in `stability.raw_threshold`. Compare all thresholds with the top
eigenvalue of the Hessian at the weights themselves; multiply by ``|w|^2`` for spherical sharpness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from equilibria.theory._reals import Array, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law


@law(
    "eos",
    "maximum stable sharpness of heavy-ball momentum",
    derived="weight decay and dampening added: the transverse root against the root by which the weights shrink",
)
def momentum_threshold(
    lr: ArrayLike,
    weight_decay: ArrayLike,
    *,
    momentum: ArrayLike,
    dampening: ArrayLike = 0.0,
    scale_invariant: bool = True,
) -> Array:
    """Top Hessian eigenvalue at which SGD with heavy-ball momentum becomes unstable.

    ``2(1 + momentum)/(lr (1 - dampening)) - 2 wd``; only ``- wd`` if the loss is not scale-invariant. The update is
    that of ``torch.optim.SGD``: ``v <- momentum v + (1 - dampening)(grad + wd w)``, ``w <- w - lr v``.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient.
        momentum: heavy-ball coefficient, below 1.
        dampening: of ``torch.optim.SGD``, below 1.
        scale_invariant: whether the loss is scale-invariant in the weights.

    Returns:
        Raw Hessian eigenvalue at the edge of stability.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> float(momentum_threshold(0.5, 0.25, momentum=0.0))  # raw_threshold(0.5, 0.25)
        3.5
        >>> round(float(momentum_threshold(0.1, 0.0, momentum=0.9)), 9)
        38.0
    """
    rate = positive_reals("lr", lr) * (1 - reals("dampening", dampening, low=0, below=1))
    decay = nonnegative_reals("weight_decay", weight_decay)
    shift = (2 if scale_invariant else 1) * decay
    return 2 * (1 + reals("momentum", momentum, low=0, below=1)) / rate - shift


@law(
    "eos",
    "maximum stable sharpness of Nesterov momentum",
    derived="weight decay added: the transverse root against the root by which the weights shrink",
)
def nesterov_threshold(
    lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike, scale_invariant: bool = True
) -> Array:
    """Top Hessian eigenvalue at which SGD with Nesterov momentum becomes unstable.

    Without weight decay ``(2 + 2m)/(lr (1 + 2m))``, ``m = momentum``. With it,
    ``lr (lambda + wd) = 1 + a^2/((1+m)a + m)``, where ``a`` is the factor per step by which the weights themselves
    shrink, the larger root of ``a^2 - (1+m)(1 - lr wd) a + m (1 - lr wd)``; ``a = 1`` if the loss is not
    scale-invariant.

    Args:
        lr: learning rate.
        weight_decay: coupled L2 coefficient.
        momentum: Nesterov coefficient, below 1.
        scale_invariant: whether the loss is scale-invariant in the weights.

    Returns:
        Raw Hessian eigenvalue at the edge of stability.

    Raises:
        EquilibriaError: a value is out of range, or the loss is scale-invariant and weight decay is so strong that the
            weights oscillate.

    Example:
        >>> round(float(nesterov_threshold(0.1, 0.0, momentum=0.5)), 9)
        15.0
    """
    rate, decay = positive_reals("lr", lr), nonnegative_reals("weight_decay", weight_decay)
    m = reals("momentum", momentum, low=0, below=1)
    shrink = _shrink_by_nesterov(rate * decay, m) if scale_invariant else np.ones_like(m)
    return (1 + shrink**2 / ((1 + m) * shrink + m)) / rate - decay


def _shrink_by_nesterov(intrinsic: Array, m: Array) -> Array:
    """The factor per step by which the weights shrink, with no gradient along them."""
    kept = reals("1 - lr*weight_decay", 1 - intrinsic, above=0)
    half = (1 + m) * kept / 2
    inside = nonnegative_reals("((1 + momentum)/2)^2 (1 - lr*weight_decay) - momentum", half**2 / kept - m)
    return half + np.sqrt(inside * kept)


@law(
    "aeos",
    "maximum stable preconditioned sharpness of Adam",
    derived="decoupled weight decay added; exact for a preconditioner that stands still",
)
def adam_threshold(lr: ArrayLike, weight_decay: ArrayLike = 0.0, *, beta1: ArrayLike = 0.9) -> Array:
    """Top eigenvalue of the preconditioned Hessian at which Adam or AdamW becomes unstable.

    ``(2 - lr wd)(1 + beta1) / ((1 - beta1) lr)`` for ``P^(-1/2) H P^(-1/2)`` with Adam's preconditioner
    ``P = sqrt(v/(1 - beta2^t)) + eps``, taken to stand still: 38/lr for ``beta1 = 0.9``. For a loss that is not
    scale-invariant; for coupled weight decay (Adam, not AdamW) add ``wd`` to the Hessian instead.

    Args:
        lr: learning rate.
        weight_decay: decoupled coefficient of AdamW.
        beta1: decay of the first moment.

    Returns:
        Preconditioned Hessian eigenvalue at the edge of stability.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> round(float(adam_threshold(1e-3)), 6)
        38000.0
    """
    rate, memory = positive_reals("lr", lr), reals("beta1", beta1, low=0, below=1)
    intrinsic = reals("lr*weight_decay", rate * nonnegative_reals("weight_decay", weight_decay), below=1)
    return (2 - intrinsic) * (1 + memory) / ((1 - memory) * rate)
