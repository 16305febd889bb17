"""The mean square error of outputs that are scaled to a given second moment: what both BatchNorm problems share.

Outputs ``a`` become ``f = a/s`` with ``s^2 = mean(a^2)``; the loss is ``mean((scale f - targets)^2)`` with
``scale^2 = mean(targets^2)``. Arrays are (trials, n); ``scale`` is a column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _mean(x: Array) -> Array:
    mean: Array = x.mean(axis=1, keepdims=True)
    return mean


def root_mean_square(a: Array) -> Array:
    """s, a column."""
    return np.sqrt(_mean(a * a))


def loss(a: Array, scale: Array, targets: Array) -> Array:
    """The loss, (trials,)."""
    residual = scale * (a / root_mean_square(a)) - targets
    return _mean(residual * residual)[:, 0]


def slope(a: Array, scale: Array, targets: Array) -> Array:
    """Its gradient in a, from the residual: no digits are lost near a minimum."""
    s = root_mean_square(a)
    f = a / s
    residual = scale * f - targets
    gradient: Array = 2 * scale / (a.shape[1] * s) * (residual - f * _mean(f * residual))
    return gradient


def curvature(a: Array, scale: Array, targets: Array, *, direction: Array) -> Array:
    """Its Hessian in a times a direction: that of ``-2 scale mean(f targets)``, the part that is not constant."""
    s = root_mean_square(a)
    f = a / s
    fit, across = _mean(f * targets), _mean(f * direction)
    turned = targets * across + f * _mean(targets * direction) + fit * direction
    bent: Array = 2 * scale / (a.shape[1] * s**2) * (turned - 3 * fit * across * f)
    return bent
