"""How long Adam takes to settle, for many weights at once: its norm and its second moment relax together.

Where the first moment follows (1/(1-b1) steps), P = ||w||^2 and the second moment v are left. In units of their
equilibrium, p and v, with a = 2 lr wd (coupled decay: 2 lr wd / sqrt(v*)) and phi = (wd P*)^2 / L (decoupled: 0),

    dp/dt = a (1/(p v) - p v^(-c/2)),   dv/dt = (1 - b2) ((1/p + phi p)/(1 + phi) - v),   angle/angle* = 1/(p sqrt(v))

with c = 1 for coupled decay, else 0. A single rate is not enough: it is that of the last stretch, and where v remembers
for as long as the norm needs, the angle may have arrived long before.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.theory.citations import law
from equilibria.theory.fixed_points import adam_step_size
from equilibria.theory.rules import AdamL2, AdamW

Array = NDArray[np.float64]

_GAMMA = 1 - math.sqrt(0.5)  # of the Rosenbrock method of order 2 that is stable for stiff equations
_STRIDES = 64
_SHARE, _FURTHEST = 0.12, 0.5  # how far a stride goes: a share of |ln p| + |ln v|, and no further than this
_NEAR = 0.02  # added to them, so that strides do not become ever shorter
_SLOWEST = 1e-9  # a rate, in units of 1 - b2, so that nothing is divided by 0


@law("rotational", "AdamW", derived="`adam.adamw_mean_field` in continuous time, decay coupled or not")
def adam_settling_steps(
    rule: AdamW | AdamL2,
    norm_ratio: ArrayLike,
    *,
    second_ratio: ArrayLike,
    norm_sq: ArrayLike,
    unit_grad_sq: ArrayLike = 1.0,
    dim: ArrayLike = 1.0,
    tolerance: float = 0.05,
) -> Array:
    """Steps after which the angle stays within a tolerance of equilibrium.

    Good to a few per cent and some 1/(1-b1) steps; `settling.settling_steps` is exact, for one weight at a time.

    Args:
        rule: the optimizer.
        norm_ratio: norm / equilibrium norm.
        second_ratio: second moment, its bias corrected, over that in equilibrium.
        norm_sq: ||w*||^2.
        unit_grad_sq: L.
        dim: number of entries.
        tolerance: relative width of the band.

    Returns:
        Steps, one number per weight; NaN where a ratio is not positive and finite, or so far from 1 (a norm by a
        factor of 100, say) that the strides do not reach.

    Example:
        AdamW whose second moment follows at once needs ln(..) / (2 lr wd) steps, as `settling.steps_to_tolerance` says:

        >>> from equilibria.theory.settling import steps_to_tolerance
        >>> rule = AdamW(1e-3, 0.01, betas=(0.9, 0.9))
        >>> slow = adam_settling_steps(rule, 2.0, second_ratio=0.25, norm_sq=1.0)
        >>> round(float(slow) / steps_to_tolerance(rule, 2.0), 2)
        1.0
    """
    p, v, star, grad, size = np.broadcast_arrays(
        *(np.asarray(each, dtype=np.float64) for each in (norm_ratio, second_ratio, norm_sq, unit_grad_sq, dim))
    )
    with np.errstate(all="ignore"):
        field = _Field(rule, star, grad, size)
        x, y = 2 * np.log(p), np.log(v)
        known = np.isfinite(x) & np.isfinite(y) & np.isfinite(field.pull)
        steps = _last_outside(field, np.where(known, x, 0.0), np.where(known, y, 0.0), tolerance)
    return np.where(known, steps, np.nan)


class _Field:
    """The right-hand sides in x = ln p and y = ln v, and their derivatives."""

    def __init__(self, rule: AdamW | AdamL2, norm_sq: Array, unit_grad_sq: Array, dim: Array) -> None:
        self.forgetting = 1 - rule.betas[1]
        if isinstance(rule, AdamW):
            self.pull, self.coupled = np.full(norm_sq.shape, 2 * rule.decay_per_step), 0.0
            share = np.zeros(norm_sq.shape)
        else:
            size = adam_step_size(norm_sq, rule.weight_decay, dim=dim, unit_grad_sq=unit_grad_sq)
            self.pull = 2 * rule.lr * rule.weight_decay * size
            share = (rule.weight_decay * norm_sq) ** 2 / unit_grad_sq
            self.coupled = 0.5
        self._noise, self._coupling = self.forgetting / (1 + share), self.forgetting * share / (1 + share)

    def at(self, x: Array, y: Array) -> tuple[Array, Array]:
        """dx/dt and dy/dt."""
        push, decay, noise, gradient = self._parts(x, y)
        return push - decay, noise + gradient - self.forgetting

    def with_derivatives(self, x: Array, y: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array, Array]]:
        """The same, and the derivatives of dx/dt by x and y, then those of dy/dt."""
        push, decay, noise, coupling = self._parts(x, y)
        both = noise + coupling
        rates = push - decay, both - self.forgetting
        return rates, (-2 * push, self.coupled * decay - push, coupling - noise, -both)

    def _parts(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """What pushes the norm out and what pulls it in; what noise and coupled decay add to the second moment."""
        squeeze, fresh = np.exp(-x), np.exp(-y)
        decay = self.pull * np.sqrt(fresh) if self.coupled else self.pull
        noise = self._noise * squeeze * fresh
        coupling = self._coupling / squeeze * fresh if self.coupled else self._coupling
        return self.pull * squeeze * squeeze * fresh, decay, noise, coupling


def _last_outside(field: _Field, x: Array, y: Array, tolerance: float) -> Array:
    """The time at which the angle enters its band for good; NaN where it is not there in the end."""
    deviations, times = [_deviation(x, y)], [np.zeros_like(x)]
    for _ in range(_STRIDES):
        x, y, stride = _stride(field, x, y)
        deviations.append(_deviation(x, y))
        times.append(times[-1] + stride)
    off, time = np.array(deviations), np.array(times)
    outside = np.abs(off) > tolerance
    last = np.minimum(_STRIDES - np.argmax(outside[::-1], axis=0), _STRIDES - 1)
    before, after, begin, end = (
        np.take_along_axis(table, at[np.newaxis], axis=0)[0] for table in (off, time) for at in (last, last + 1)
    )
    edge = np.copysign(tolerance, before)
    share = np.where(
        before * after > 0, np.log(before / edge) / np.log(before / after), (before - edge) / (before - after)
    )
    steps = np.where(outside.any(axis=0), begin + share * (end - begin), 0.0)
    return np.where(np.abs(x) + np.abs(y) < tolerance, steps, np.nan)


def _deviation(x: Array, y: Array) -> Array:
    """Of the angle from equilibrium, with its sign: it may pass through the band and come back."""
    return np.expm1(-x - y / 2)


def _stride(field: _Field, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """One stride of the Rosenbrock method, and its length.

    It is implicit to first order, so that it may be long beside the fast rate once what is fast has died away.
    """
    (f, g), derivatives = field.with_derivatives(x, y)
    reach = np.minimum(_SHARE * (np.abs(x) + np.abs(y) + _NEAR), _FURTHEST)
    stride = reach / (np.abs(f) + np.abs(g) + _SLOWEST * field.forgetting)
    xx, xy, yx, yy = (_GAMMA * stride * each for each in derivatives)
    scale = 1 / ((1 - xx) * (1 - yy) - xy * yx)

    def solve(f: Array, g: Array) -> tuple[Array, Array]:
        return scale * ((1 - yy) * f + xy * g), scale * (yx * f + (1 - xx) * g)

    first = solve(f, g)
    f, g = field.at(x + stride * first[0], y + stride * first[1])
    second = solve(f - 2 * first[0], g - 2 * first[1])
    return (
        x + stride * (1.5 * first[0] + 0.5 * second[0]),
        y + stride * (1.5 * first[1] + 0.5 * second[1]),
        stride,
    )
