"""One optimizer step as a linear map on second moments.

For a scale-invariant weight ``w`` with momentum buffer ``v`` the expected step is linear in

    P = ||w||^2,   Q = <w, v>,   R = ||v||^2,   N = E||g||^2 = L / P,

and this module builds that map: a 4 x 4 matrix with the columns P, Q, R, N and the rows

    P', Q', R'  (the moments after the step)   and   D = ||w' - w||^2.

It is exact up to E[1/P] = 1/E[P], a relative error of Var(P)/P^2, for any lr, weight decay and momentum schedule
(Spherical Motion Dynamics, Thm 1 and 2, in a form that survives changes of the learning rate).
All arguments broadcast: arrays over steps give a stack of matrices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.theory.citations import law

Array = NDArray[np.float64]

P, Q, R, N, D = 0, 1, 2, 3, 3  # columns P, Q, R, N; rows P', Q', R', D


def _row(p: ArrayLike, q: ArrayLike, r: ArrayLike, n: ArrayLike) -> Array:
    """A linear form in (P, Q, R, N)."""
    return np.stack(np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (p, q, r, n))), axis=-1)


def _matrix(p: Array, q: Array, r: Array, d: Array) -> Array:
    return np.stack(np.broadcast_arrays(p, q, r, d), axis=-2)


@law("smd", "Thm 2 (eq. 86-90 of the appendix)", corrected="moment form, valid for schedules and for dampening")
def heavy_ball_map(
    lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike = 0.0, dampening: ArrayLike = 0.0
) -> Array:
    """The moment map of ``v' = momentum v + (1 - dampening)(g + wd w);  w' = w - lr v'``.

    Args:
        lr: learning rate.
        weight_decay: coupled (L2) weight decay.
        momentum: momentum coefficient.
        dampening: dampening; torch leaves the first buffer undamped, so pass 0 for the first step.

    Returns:
        The 4 x 4 map of this module, stacked over the broadcast shape of the arguments.

    Example:
        Plain SGD contracts the squared norm by (1 - lr wd)^2 and adds lr^2 N:

        >>> heavy_ball_map(0.5, 0.1)[0].round(4).tolist()
        [0.9025, 0.0, 0.0, 0.25]
    """
    eta, lam, a = (np.asarray(x, dtype=np.float64) for x in (lr, weight_decay, momentum))
    c = 1.0 - np.asarray(dampening, dtype=np.float64)
    buffer_sq = _row(c**2 * lam**2, 2 * a * c * lam, a**2, c**2)
    w_dot_buffer = _row(c * lam, a, 0, 0)
    weight_sq = _row(1, 0, 0, 0)
    eta = eta[..., None]
    return _matrix(
        weight_sq - 2 * eta * w_dot_buffer + eta**2 * buffer_sq,
        w_dot_buffer - eta * buffer_sq,
        buffer_sq,
        eta**2 * buffer_sq,
    )


@law("smd", "Thm 2", derived="torch's Nesterov step, which neither paper treats")
def nesterov_map(lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike, correlation: ArrayLike = 0.0) -> Array:
    """The moment map of torch's Nesterov step ``v' = momentum v + h;  w' = w - lr (h + momentum v')``, h = g + wd w.

    Args:
        lr: learning rate.
        weight_decay: coupled (L2) weight decay.
        momentum: momentum coefficient.
        correlation: E<v, g> / E||g||^2, nonzero when successive gradients are correlated.

    Returns:
        The 4 x 4 map of this module.

    Example:
        >>> bool(np.allclose(nesterov_map(0.5, 0.1, momentum=0.0), heavy_ball_map(0.5, 0.1)))
        True
    """
    eta, lam, a, rho = (np.asarray(x, dtype=np.float64) for x in (lr, weight_decay, momentum, correlation))
    buffer_sq = _row(lam**2, 2 * a * lam, a**2, 1 + 2 * a * rho)
    w_dot_buffer = _row(lam, a, 0, 0)
    h_dot_buffer = _row(lam**2, a * lam, 0, 1 + a * rho)
    h_sq = _row(lam**2, 0, 0, 1)
    weight_sq = _row(1, 0, 0, 0)
    w_dot_h = _row(lam, 0, 0, 0)
    a, eta = a[..., None], eta[..., None]
    w_dot_step = w_dot_h + a * w_dot_buffer
    step_sq = h_sq + 2 * a * h_dot_buffer + a**2 * buffer_sq
    buffer_dot_step = h_dot_buffer + a * buffer_sq
    return _matrix(
        weight_sq - 2 * eta * w_dot_step + eta**2 * step_sq,
        w_dot_buffer - eta * buffer_dot_step,
        buffer_sq,
        eta**2 * step_sq,
    )


@law("rotational", "decoupled weight decay", derived="moment form of SGD with momentum and decoupled decay")
def sgdw_map(lr: ArrayLike, weight_decay: ArrayLike, *, momentum: ArrayLike = 0.0) -> Array:
    """The moment map of ``v' = momentum v + g;  w' = (1 - lr wd) w - lr v'``.

    Args:
        lr: learning rate.
        weight_decay: decoupled weight decay, multiplied by the learning rate as in torch.
        momentum: momentum coefficient.

    Returns:
        The 4 x 4 map of this module.

    Example:
        >>> bool(np.allclose(sgdw_map(0.5, 0.1)[:1], heavy_ball_map(0.5, 0.1)[:1]))
        True
    """
    eta, lam, a = (np.asarray(x, dtype=np.float64) for x in (lr, weight_decay, momentum))
    shrink = 1.0 - eta * lam
    buffer_sq = _row(0, 0, a**2, 1)
    w_dot_buffer = _row(0, a, 0, 0)
    weight_sq = _row(1, 0, 0, 0)
    eta, s = eta[..., None], shrink[..., None]
    return _matrix(
        s**2 * weight_sq - 2 * s * eta * w_dot_buffer + eta**2 * buffer_sq,
        s * w_dot_buffer - eta * buffer_sq,
        buffer_sq,
        (1 - s) ** 2 * weight_sq + 2 * (1 - s) * eta * w_dot_buffer + eta**2 * buffer_sq,
    )


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
    """The angle in radians whose squared chord on the unit sphere is ``squared_chord``; rounding is clamped.

    Example:
        >>> round(float(angle_from_chord_sq(2.0)), 6)
        1.570796
    """
    return np.asarray(2.0 * np.arcsin(np.sqrt(np.clip(squared_chord, 0.0, 4.0)) / 2.0))
