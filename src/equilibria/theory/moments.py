"""One optimizer step as a map on second moments: the formulas that every recursion of the theory steps through.

For a scale-invariant weight ``w`` with momentum buffer ``v`` the expected step of SGD is linear in

    P = ||w||^2,   Q = <w, v>,   R = ||v||^2,   N = E||g||^2 = L / P,

and gives P', Q', R' after the step and D = ||w' - w||^2. It is exact up to E[1/P] = 1/E[P], a relative error of
Var(P)/P^2, for any lr, weight decay and momentum schedule (Spherical Motion Dynamics, Thm 1 and 2, in a form that
survives changes of the learning rate). Adam adds the second moment v, which follows the gradient with a lag.

The ``..._step`` functions are the inner loops, so they take positional numbers or arrays and check nothing. Those of
SGD take four settings, and `step_map` turns any of them into a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.theory._reals import Array
from equilibria.theory.citations import law

MomentStep = Callable[..., tuple[Any, Any, Any, Any]]


@law("smd", "Thm 2", corrected="moment form: valid for schedules, and for dampening, where the papers' map is not")
def heavy_ball_step(p: Any, q: Any, r: Any, n: Any, lr: Any, wd: Any, a: Any, c: Any = 1) -> tuple[Any, Any, Any, Any]:
    """One step of SGD with momentum and coupled decay on the moments P, Q, R, N.

    ``v' = a v + c (g + wd w);  w' = w - lr v'`` with momentum a and c = 1 - dampening. torch leaves the first buffer
    undamped: c = 1 at the first step.

    Returns:
        (P', Q', R', D).

    Example:
        Plain SGD contracts the squared norm by (1 - lr wd)^2 and adds lr^2 N:

        >>> round(heavy_ball_step(1.0, 0.0, 0.0, 2.0, 0.5, 0.1, 0.0)[0], 12)
        1.4025
    """
    buffer_sq = a * (a * r + 2 * c * wd * q) + c * c * (n + wd * wd * p)
    w_dot_buffer = a * q + c * wd * p
    moved = lr * buffer_sq
    return p - 2 * lr * w_dot_buffer + lr * moved, w_dot_buffer - moved, buffer_sq, lr * moved


@law("smd", "Thm 2", derived="torch's Nesterov step, which neither paper treats")
def nesterov_step(p: Any, q: Any, r: Any, n: Any, lr: Any, wd: Any, a: Any, rho: Any = 0) -> tuple[Any, Any, Any, Any]:
    """One step of torch's Nesterov momentum with coupled decay on the moments P, Q, R, N.

    ``v' = a v + h;  w' = w - lr (h + a v')``, h = g + wd w; rho = E<v, g> / E||g||^2. Under correlated gradients n is L
    / P with Nesterov's own L; see `rules.momentum_unit_grad_sq`.

    Returns:
        (P', Q', R', D).

    Example:
        >>> nesterov_step(1.0, 0.0, 0.0, 2.0, 0.5, 0.1, 0.0) == heavy_ball_step(1.0, 0.0, 0.0, 2.0, 0.5, 0.1, 0.0)
        True
    """
    n = n / nesterov_correlation(lr * wd, a, rho)
    h_sq = n + wd * wd * p
    buffer_sq = a * (a * r + 2 * wd * q + 2 * rho * n) + h_sq
    w_dot_buffer = a * q + wd * p
    h_dot_buffer = h_sq + a * (wd * q + rho * n)
    w_dot_step = wd * p + a * w_dot_buffer
    step_sq = h_sq + a * (2 * h_dot_buffer + a * buffer_sq)
    moved = lr * lr * step_sq
    return p - 2 * lr * w_dot_step + moved, w_dot_buffer - lr * (h_dot_buffer + a * buffer_sq), buffer_sq, moved


def nesterov_correlation(eps: Any, a: Any, rho: Any) -> Any:
    """Ratio L / N of Nesterov under correlated gradients, 1 + 2 a^2 (1+a) rho / (1 + a + a eps (1+2a))."""
    return 1 + 2 * a * a * (1 + a) * rho / (1 + a + a * eps * (1 + 2 * a))


@law("rotational", "decoupled weight decay", derived="moment form of SGD with momentum and decoupled decay")
def sgdw_step(p: Any, q: Any, r: Any, n: Any, lr: Any, wd: Any, a: Any, c: Any = 1) -> tuple[Any, Any, Any, Any]:
    """One step of SGD with momentum and decoupled decay on the moments P, Q, R, N.

    ``v' = a v + c g;  w' = (1 - lr wd) w - lr v'``; c = 1 for SGDW, 1 - b1 for AdamW at a constant second moment.

    Returns:
        (P', Q', R', D).

    Example:
        >>> round(sgdw_step(1.0, 0.0, 0.0, 2.0, 0.5, 0.1, 0.0)[0], 12)
        1.4025
    """
    lost = lr * wd
    kept = 1 - lost
    buffer_sq = a * a * r + c * c * n
    radial = lr * a * q
    moved = lr * lr * buffer_sq
    after = kept * kept * p - 2 * kept * radial + moved
    return after, kept * a * q - lr * buffer_sq, buffer_sq, lost * lost * p + 2 * lost * radial + moved


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
    update_gain: Any = 1.0,
) -> tuple[Any, Any, Any, Any, Any]:
    """One step of Adam on the moments P, Q, R and the second moment v; floats, arrays and complex numbers alike.

    Isotropic mean field: every coordinate has the gradient variance L / (d P). With G = L/P (+ wd^2 P if coupled),

        R' = b1^2 R + (1-b1)^2 (kappa L/P + wd^2 P) + 2 b1 (1-b1) wd Q    (the wd terms only if the decay is coupled)
        v' = b2 v + (1-b2) G / d
        k  = lr / ((1 - b1^t) sqrt(v' / (1 - b2^t)))
        P' = s^2 P - 2 s k <w,m'> + k^2 R',   s = 1 - lr wd if decoupled, else 1

    Args:
        p: P = ||w||^2.
        q: Q = <w, m>.
        r: R = ||m||^2.
        v: second moment per entry.
        unit_grad_sq: L.
        share: (1 - b2) / d.
        step_size: learning rate with its bias corrections, lr sqrt(1 - b2^t) / (1 - b1^t) at the t-th step.
        lost: lr * wd for AdamW, 0 for Adam with L2.
        coupled: wd for Adam with L2, 0 for AdamW.
        b1: first-moment coefficient.
        b2: second-moment coefficient.
        update_gain: kappa, by which correlated gradients raise the mean square of the update.

    Returns:
        (P', Q', R', v', ||w' - w||^2).
    """
    fresh = 1.0 - b1
    grad_sq = unit_grad_sq / p
    w_dot_m = b1 * q
    if coupled:
        decay_sq = coupled * coupled * p
        r = b1 * b1 * r + fresh * (fresh * (update_gain * grad_sq + decay_sq) + 2 * coupled * w_dot_m)
        grad_sq = grad_sq + decay_sq
        w_dot_m = w_dot_m + fresh * coupled * p
    else:
        r = b1 * b1 * r + fresh * fresh * update_gain * grad_sq
    v = b2 * v + share * grad_sq
    k = step_size / v**0.5
    radial = k * w_dot_m
    size = k * k * r
    if lost:
        kept = 1.0 - lost
        after = kept * (kept * p - 2 * radial) + size
        return after, kept * w_dot_m - k * r, r, v, lost * (lost * p + 2 * radial) + size
    return p - 2 * radial + size, w_dot_m - k * r, r, v, size


def step_map(step: MomentStep, *settings: ArrayLike) -> Array:
    """The matrix of a step: columns P, Q, R, N; rows P', Q', R', D. Array settings give a stack of matrices.

    Args:
        step: one of the steps above.
        *settings: its settings, lr, weight decay, momentum, ...

    Returns:
        Shape (..., 4, 4).

    Example:
        >>> step_map(heavy_ball_step, 0.5, 0.1, 0.0)[0].round(4).tolist()
        [0.9025, 0.0, 0.0, 0.25]
    """
    arrays = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in settings))
    matrix = np.empty((*arrays[0].shape, 4, 4))
    for column, unit in enumerate(np.eye(4).tolist()):  # linear, so unit vectors give the columns
        for row, value in enumerate(step(*unit, *arrays)):
            matrix[..., row, column] = value
    return matrix


def chord_sq(before: ArrayLike, after: ArrayLike, moved: ArrayLike) -> Array:
    """Squared chord between the directions before and after a step.

    ``(||w'-w||^2 - (||w'|| - ||w||)^2) / (||w|| ||w'||)``: no cancellation at small angles, unlike 2 - 2 cos.

    Args:
        before: ||w||^2.
        after: ||w'||^2.
        moved: ||w' - w||^2.

    Returns:
        Squared chord length on the unit sphere; the angle is 2 asin(chord / 2).
    """
    p, p1, d = (np.asarray(x) for x in (before, after, moved))
    n, n1 = np.sqrt(p), np.sqrt(p1)
    radial = (p1 - p) / (n1 + n)
    return np.asarray((d - radial * radial) / (n * n1))


def angle_from_chord_sq(squared_chord: ArrayLike) -> Array:
    """Angle in radians from its squared chord on the unit sphere; values outside [0, 4] by rounding are clamped.

    The squared chord is 2 (1 - cos(angle)): from 1 - cos this keeps the digits of small angles, which arccos drops.

    Example:
        >>> round(float(angle_from_chord_sq(2.0)), 6)
        1.570796
    """
    result: Array = 2.0 * np.arcsin(np.sqrt(np.clip(squared_chord, 0.0, 4.0)) / 2.0)
    return result
