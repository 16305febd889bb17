"""Adam's norm and second moment relax together: the mean field without momentum, and how long it takes to settle.

After the 1/(1-b1) steps that the first moment needs, P = ||w||^2 and the second moment v are left. In units of their
equilibrium, p and v, with a = 2 lr wd (coupled decay: 2 lr wd / sqrt(v*)) and phi = (wd P*)^2 / L (decoupled: 0),

    dp/dt = a (1/(p v) - p v^(-c/2)),   dv/dt = (1 - b2) ((1/p + phi p)/(1 + phi) - v),   angle/angle* = 1/(p sqrt(v))

with c = 1 for coupled decay, else 0. A single rate cannot describe this: it holds for the last stretch only, and where
v remembers for as long as the norm needs, the angle may have arrived long before. The full recursion, with the first
moment, is `moments.adam_step`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import positive, whole, within
from equilibria.theory._reals import Array
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import adam_step_size
from equilibria.theory.rules import AdamL2, AdamW
from equilibria.theory.schedules import ScheduleLike, as_schedule

_GAMMA = 1 - math.sqrt(0.5)  # coefficient of the stiffly stable Rosenbrock method of order 2
_STRIDES = 64
_SHARE, _FURTHEST = 0.12, 0.5  # length of a stride: this share of |ln p| + |ln v|, at most this much
_NEAR = 0.02  # added to |ln p| + |ln v|: keeps strides from becoming ever shorter
_SLOWEST = 1e-9  # added to the rate, in units of 1 - b2: nothing is divided by 0


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
    """Squared norm under AdamW step by step, by the two-variable mean field without momentum.

    ``v' = b2 v + (1-b2)/P;  P' = (1 - lr wd)^2 P + lr^2 d / (P vhat)`` with vhat = v / (1 - b2^t), v in units of L/d.
    It misses the delay of the first moment (about b1/(1-b1) steps) and its correction of P*; `transient.evolve` has
    both. Kept as a reference to compare with.

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
    """Steps after which Adam's angle stays within a tolerance of equilibrium, for many weights at once.

    Integrates the two equations of the module docstring. The error is a few per cent and about 1/(1-b1) steps;
    `settling.settling_steps` is exact, for one weight at a time.

    Args:
        rule: the optimizer.
        norm_ratio: norm / equilibrium norm.
        second_ratio: bias-corrected second moment / equilibrium second moment.
        norm_sq: ||w*||^2.
        unit_grad_sq: L.
        dim: number of entries.
        tolerance: relative width of the band.

    Returns:
        Steps, one number per weight; NaN where a ratio is not positive and finite, or so far from 1 (for instance a
        norm 100 times too large) that 64 strides do not reach equilibrium.

    Example:
        With a fast second moment AdamW needs the ln(..) / (2 lr wd) steps of `settling.steps_to_tolerance`:

        >>> from equilibria.theory.settling import steps_to_tolerance
        >>> rule = AdamW(1e-3, 0.01, betas=(0.9, 0.9))
        >>> slow = adam_settling_steps(rule, 2.0, second_ratio=0.25, norm_sq=1.0)
        >>> round(float(slow) / steps_to_tolerance(rule, 2.0), 2)
        1.0
    """
    p, v, star, grad, size = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (norm_ratio, second_ratio, norm_sq, unit_grad_sq, dim))
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

    def rates(self, x: Array, y: Array) -> tuple[Array, Array]:
        """dx/dt and dy/dt."""
        push, decay, noise, coupling = self._parts(x, y)
        return push - decay, noise + coupling - self.forgetting

    def with_derivatives(self, x: Array, y: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array, Array]]:
        """dx/dt and dy/dt, then the derivatives of dx/dt by x and y and those of dy/dt."""
        push, decay, noise, coupling = self._parts(x, y)
        both = noise + coupling
        rates = push - decay, both - self.forgetting
        return rates, (-2 * push, self.coupled * decay - push, coupling - noise, -both)

    def _parts(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """Growth and decay of the norm, then the contributions of noise and coupled decay to the second moment."""
        squeeze, fresh = np.exp(-x), np.exp(-y)
        decay = self.pull * np.sqrt(fresh) if self.coupled else self.pull
        noise = self._noise * squeeze * fresh
        coupling = self._coupling / squeeze * fresh if self.coupled else self._coupling
        return self.pull * squeeze * squeeze * fresh, decay, noise, coupling


def _last_outside(field: _Field, x: Array, y: Array, tolerance: float) -> Array:
    """Time at which the angle enters its band for good; NaN where it has not done so after the last stride."""
    deviations, times = [_deviation(x, y)], [np.zeros_like(x)]
    for _ in range(_STRIDES):
        x, y, stride = _stride(field, x, y)
        deviations.append(_deviation(x, y))
        times.append(times[-1] + stride)
    off, time = np.array(deviations), np.array(times)
    outside = np.abs(off) > tolerance
    last = np.minimum(_STRIDES - np.argmax(outside[::-1], axis=0), _STRIDES - 1)
    before, after, begin, end = (
        np.take_along_axis(table, row[np.newaxis], axis=0)[0] for table in (off, time) for row in (last, last + 1)
    )
    edge = np.copysign(tolerance, before)
    share = np.where(
        before * after > 0, np.log(before / edge) / np.log(before / after), (before - edge) / (before - after)
    )
    steps = np.where(outside.any(axis=0), begin + share * (end - begin), 0.0)
    return np.where(np.abs(x) + np.abs(y) < tolerance, steps, np.nan)


def _deviation(x: Array, y: Array) -> Array:
    """Signed relative deviation of the angle from equilibrium: it may pass through the band and come back."""
    return np.expm1(-x - y / 2)


def _stride(field: _Field, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """One stride of the Rosenbrock method, and its length.

    The method is linearly implicit, so strides may exceed the fast time scale once the fast mode has decayed.
    """
    (f, g), derivatives = field.with_derivatives(x, y)
    reach = np.minimum(_SHARE * (np.abs(x) + np.abs(y) + _NEAR), _FURTHEST)
    stride = reach / (np.abs(f) + np.abs(g) + _SLOWEST * field.forgetting)
    xx, xy, yx, yy = (_GAMMA * stride * derivative for derivative in derivatives)
    scale = 1 / ((1 - xx) * (1 - yy) - xy * yx)

    def solve(f: Array, g: Array) -> tuple[Array, Array]:
        return scale * ((1 - yy) * f + xy * g), scale * (yx * f + (1 - xx) * g)

    first = solve(f, g)
    f, g = field.rates(x + stride * first[0], y + stride * first[1])
    second = solve(f - 2 * first[0], g - 2 * first[1])
    return (
        x + stride * (1.5 * first[0] + 0.5 * second[0]),
        y + stride * (1.5 * first[1] + 0.5 * second[1]),
        stride,
    )
