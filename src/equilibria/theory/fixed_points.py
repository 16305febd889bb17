"""The fixed points themselves: formulas without checks, for numbers and arrays alike.

`equilibrium` wraps them with checks, rates and validity; `targets` follows them along a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from equilibria.theory.memory import Memory, ema_memory


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """A fixed point with the scale left out.

    Attributes:
        norm_sq: ||w||^2 for L = 1 (SGD-type rules, it grows as sqrt(L)) or per unit of the mean square update.
        one_minus_cos: 1 - cos(angle), half the squared relative update.
    """

    norm_sq: Any
    one_minus_cos: Any


def heavy_ball_point(lr: Any, weight_decay: Any, a: Any, dampening: float) -> FixedPoint:
    """SGD with momentum a and coupled decay."""
    eta = lr * (1 - dampening)
    eps = eta * weight_decay
    return FixedPoint((eta / (weight_decay * (1 - a) * (2 - eps / (1 + a)))) ** 0.5, eps / (1 + a))


def nesterov_point(lr: Any, weight_decay: Any, a: Any) -> FixedPoint:
    """torch's Nesterov with coupled decay, uncorrelated gradients."""
    eps = lr * weight_decay
    big = 1 + a + a * eps * (1 + 2 * a)
    fourth = lr**2 * big / (eps * (1 - a + a * eps) * (2 + 2 * a - eps * (1 + 2 * a)))
    return FixedPoint(fourth**0.5, eps * (1 + 2 * a - 2 * a**3 + a * (1 + a) * (1 + 2 * a) * eps) / big)


def sgdw_point(lr: Any, weight_decay: Any, a: Any) -> FixedPoint:
    """SGD with momentum a and decoupled decay."""
    eps = lr * weight_decay
    s = 1 - eps
    fourth = lr**2 * (1 + a * s) / ((1 - a * a) * (1 - a * s) * eps * (2 - eps))
    return FixedPoint(fourth**0.5, eps * (1 - a) / (1 + a * s))


def constant_update_point(lr: Any, weight_decay: Any, memory: Memory, *, recall: Any = 1.0) -> FixedPoint:
    """Decoupled decay and an update of constant size that keeps the share ``recall`` of this memory."""
    eps = lr * weight_decay
    total = 1 + recall * (memory.total(eps) - 1)
    norm_sq = lr**2 * total / (eps * (2 - eps))
    return FixedPoint(norm_sq, eps * ((2 - eps) / total - eps) / (2 * (1 - eps)))


def adamw_point(lr: Any, weight_decay: Any, b1: float) -> FixedPoint:
    """AdamW: the norm is that of one entry."""
    point = constant_update_point(lr, weight_decay, ema_memory(b1))
    # An exponential average of unit gradients has this mean square.
    return FixedPoint(point.norm_sq * (1 - b1) / (1 + b1), point.one_minus_cos)


def adam_step_size(norm_sq: Any, weight_decay: Any, *, dim: Any, unit_grad_sq: Any) -> Any:
    """1 / sqrt(v) once v has settled, with coupled decay."""
    return (dim * norm_sq / (unit_grad_sq + (weight_decay * norm_sq) ** 2)) ** 0.5


def adam_l2_norm_sq(lr: Any, weight_decay: Any, *, b1: float, dim: Any, unit_grad_sq: Any) -> Any:
    """Solves P^2 wd (2 - eps (1-b1)/(1+b1)) = L lr k(P), eps = wd lr k(P); NaN where there is no solution.

    The iteration contracts by about 1/4 per round (P' is proportional to P^(1/4)).
    """
    p = (lr * (dim * unit_grad_sq) ** 0.5 / (2 * weight_decay)) ** (2 / 3)
    for _ in range(60):
        k = adam_step_size(p, weight_decay, dim=dim, unit_grad_sq=unit_grad_sq)
        slack = 2 - weight_decay * lr * k * (1 - b1) / (1 + b1)
        p = np.sqrt(unit_grad_sq * lr * k / (weight_decay * np.where(slack > 0, slack, np.nan)))
    return p
