"""Brute-force gradient descent with weight decay on the paper's 3-D example, for the tests of the edge of stability."""

from __future__ import annotations

import math

import numpy as np
import torch


def rotation(dim, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def three_d_loss(w):
    """The paper's example, torch."""
    x, y, _ = w
    return 2 - (x + y) / torch.sqrt(x * x - x * y + y * y)


def three_d_gradient(w):
    x, y, _ = w
    q = x * x - x * y + y * y
    pull = (x + y) / (2 * q)
    return np.array([pull * (2 * x - y) - 1, pull * (2 * y - x) - 1, 0 * x]) / np.sqrt(q)


def hessian_at(loss, point):
    return torch.autograd.functional.hessian(loss, torch.tensor(np.asarray(point), dtype=torch.float64)).numpy()


def rotated_run(intrinsic, steps, *, z0, ratio, push, seed=0, dtype=np.float64, lr=0.5):
    """GD with weight decay on the rotated 3-D loss. Rows: displacement, z, |w|^2, in the loss's own coordinates.

    Without the rotation the displacement underflows to exactly 0 and the edge of stability never begins.
    """
    turn = rotation(3, seed).astype(dtype)
    radius = math.sqrt((1 - z0**2) / 2)
    start = np.array([radius + push, radius - push, z0])
    norm_sq = lr * 3 / (1 - z0**2) / ((1 - intrinsic) * ratio)
    w = (turn.T @ (start / np.linalg.norm(start) * math.sqrt(norm_sq))).astype(dtype)
    c, rate, path = dtype(1 - intrinsic), dtype(lr), np.empty((steps, 3))
    for t in range(steps):
        v = turn @ w
        norm = np.sqrt(v @ v)
        path[t] = (v[0] - v[1]) / (math.sqrt(2) * norm), v[2] / norm, norm * norm
        w = c * w - rate * (turn.T @ three_d_gradient(v))
    return path


def settled_run(intrinsic=1e-3, steps=6000):
    return rotated_run(intrinsic, steps, z0=0.0, ratio=1.0, push=0.5 * math.sqrt(intrinsic / 2))


def descend(gradient, start, *, lr, intrinsic, steps):
    """GD with weight decay in rotated coordinates; rows are the weights in the loss's own coordinates."""
    turn = rotation(len(start))
    w, path = turn.T @ start, np.empty((steps, len(start)))
    for t in range(steps):
        path[t] = turn @ w
        w = (1 - intrinsic) * w - lr * (turn.T @ gradient(path[t]))
    return path


def at_the_edge(direction, sharpness, *, lr, intrinsic):
    """The weight along a direction whose stability ratio is 1."""
    return direction / np.linalg.norm(direction) * math.sqrt(lr * sharpness / (2 * (1 - intrinsic)))
