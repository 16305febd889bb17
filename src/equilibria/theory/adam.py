"""The moment recursion of Adam-type optimizers: P, Q, R as for SGD, and the second moment v that lags behind.

Isotropic mean field: every coordinate has the gradient variance L / (d P). Per step, G = L/P (+ wd^2 P if coupled),

    R' = b1^2 R + (1-b1)^2 G + 2 b1 (1-b1) wd Q      (the wd terms only if the decay is coupled)
    v' = b2 v + (1-b2) G / d
    k  = lr / ((1 - b1^t) sqrt(v' / (1 - b2^t)))
    P' = s^2 P - 2 s k <w,m'> + k^2 R',   s = 1 - lr wd if decoupled, else 1

The two-variable recursion in (P, v) that leaves the first moment out is `adamw_mean_field`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import positive, whole, within
from equilibria.theory.citations import law
from equilibria.theory.schedules import ScheduleLike, as_schedule

Array = NDArray[np.float64]


def adam_step(
    p: Any,
    q: Any,
    r: Any,
    v: Any,
    unit_grad_sq: Any,
    share: Any,
    step_size: float,
    lost: float,
    coupled: float,
    b1: float,
    b2: float,
) -> tuple[Any, Any, Any, Any, Any]:
    """One step of the recursion; works alike on floats, arrays over layers, and complex numbers (derivatives).

    Positional throughout because it is the inner loop. ``share`` is (1 - b2) / d and ``step_size`` the learning rate
    with its bias corrections, lr sqrt(1 - b2^t) / (1 - b1^t) at the t-th step. AdamW: ``lost`` is lr * wd and
    ``coupled`` 0; Adam with L2: ``lost`` is 0 and ``coupled`` wd.

    Returns:
        (P', Q', R', v', ||w' - w||^2).
    """
    fresh = 1.0 - b1
    grad_sq = unit_grad_sq / p
    w_dot_m = b1 * q
    if coupled:
        grad_sq = grad_sq + coupled * coupled * p
        r = b1 * b1 * r + fresh * (fresh * grad_sq + 2 * coupled * w_dot_m)
        w_dot_m = w_dot_m + fresh * coupled * p
    else:
        r = b1 * b1 * r + fresh * fresh * grad_sq
    v = b2 * v + share * grad_sq
    k = step_size / v**0.5
    radial = k * w_dot_m
    size = k * k * r
    if lost:
        kept = 1.0 - lost
        after = kept * (kept * p - 2 * radial) + size
        return after, kept * w_dot_m - k * r, r, v, lost * (lost * p + 2 * radial) + size
    return p - 2 * radial + size, w_dot_m - k * r, r, v, size


@law("rotational", "AdamW", derived="v lags the gradient scale, so (P, v) relax together")
def adamw_mean_field(
    lr: ScheduleLike,
    weight_decay: float,
    *,
    steps: int,
    dim: int,
    norm_sq: float,
    beta2: float = 0.999,
) -> Array:
    """Squared norm under AdamW by the two-variable mean field, momentum left out.

    ``v' = b2 v + (1-b2)/P;  P' = (1 - lr wd)^2 P + lr^2 d / (P vhat)`` with vhat = v / (1 - b2^t), v in units of L/d.
    It misses the delay of the first moment (about b1/(1-b1) steps) and its correction of P*; `transient.evolve`
    carries both. Kept because it is the law to compare with.

    Args:
        lr: learning rate or schedule.
        weight_decay: decoupled weight decay.
        steps: number of optimizer steps.
        dim: number of entries of the weight.
        norm_sq: ||w||^2 at the start.
        beta2: second-moment coefficient.

    Returns:
        ||w||^2 before each step and after the last: steps + 1 numbers.

    Example:
        It settles at lr d / (2 wd), up to the factor 1 / (1 - lr wd / 2):

        >>> end = adamw_mean_field(0.01, 0.1, steps=20_000, dim=400, norm_sq=50.0, beta2=0.9)[-1]
        >>> round(float(end), 3), 0.01 * 400 / (2 * 0.1)
        (20.01, 20.0)
    """
    whole("dim", dim, low=1)
    within("beta2", beta2, low=0, below=1)
    p = positive("norm_sq", norm_sq)
    wd = within("weight_decay", weight_decay, low=0)
    v, unbiased, out = 0.0, 1.0, [p]
    for eta in as_schedule(lr).values(whole("steps", steps)).tolist():
        v = beta2 * v + (1 - beta2) / p
        unbiased *= beta2
        p = (1 - eta * wd) ** 2 * p + eta * eta * dim * (1 - unbiased) / (p * v)
        out.append(p)
    return np.array(out)
