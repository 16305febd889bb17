"""The random-walk model: gradients are isotropic noise, orthogonal to the weight and inverse to its norm.

The laws of `equilibria.theory` are exact or first-order on it, so that a real optimizer on it must obey them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.rules import SGD

Array = NDArray[np.float64]


def tangent_noise(w: Array, rng: np.random.Generator, *, unit_grad_sq: float) -> Array:
    """A gradient per row of ``w``, orthogonal to it, with E||g||^2 ||w||^2 = ``unit_grad_sq``."""
    noise = rng.standard_normal(w.shape)
    norm_sq = np.einsum("ij,ij->i", w, w)[:, None]
    noise -= np.einsum("ij,ij->i", w, noise)[:, None] / norm_sq * w
    return np.asarray(noise * np.sqrt(unit_grad_sq / (w.shape[1] - 1) / norm_sq))


def turned(before: Array, after: Array) -> Array:
    """Angle between the rows in radians, also accurate for tiny angles."""
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (before, after)]
    return np.asarray(2 * np.arcsin(np.minimum(np.linalg.norm(unit[1] - unit[0], axis=1) / 2, 1)))


def walk_heavy_ball(
    w: Array,
    buffer: Array,
    steps: int,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    gradient: Callable[[Array], Array],
) -> tuple[Array, Array, Array, Array]:
    """Run torch's SGD with momentum and coupled weight decay, one weight per row.

    Returns:
        Weights and buffers at the end; mean squared norm before each step and mean squared angle of each step.
    """
    norms, angles = np.empty(steps), np.empty(steps)
    for step in range(steps):
        buffer = momentum * buffer + gradient(w) + weight_decay * w
        moved = w - lr * buffer
        norms[step] = np.mean(np.einsum("ij,ij->i", w, w))
        angles[step] = np.mean(turned(w, moved) ** 2)
        w = moved
    return w, buffer, norms, angles


def next_order(rule: SGD) -> float:
    """Relative error of first-order rates: the second term of their series in lr * wd."""
    a, eps = rule.momentum, rule.lr * rule.weight_decay
    return abs(7 * a**2 + 10 * a - 1) * eps / (2 * (1 - a) ** 2 * (1 + a))
