"""Small losses whose manifold of minimisers is known, for the tests of the manifold tools."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

import equilibria as eq


def weights_at(*numbers):
    return {"w": torch.tensor(numbers, dtype=torch.float64)}


def world(loss, *numbers):
    """An objective of one vector ``w``, which stands at the given numbers."""
    return eq.Objective(lambda params, _: loss(params["w"]), weights_at(*numbers))


def three_d(w):
    """The paper's example: minimisers x = y > 0, lambda1 = 6/(1 - z^2)."""
    x, y, _ = w
    return 2 - (x + y) / torch.sqrt(x * x - x * y + y * y)


def on_three_d(z):
    side = math.sqrt((1 - z * z) / 2)
    return side, side, z


def meridian(w):
    """Minimisers x = 0, lambda1 = 1 + 8 y^2 on the unit sphere."""
    x, y, _ = w / w.norm()
    return x**2 * (1 + 8 * y**2) / 2


def valley(w):
    """In the full space: minimisers x = 0, lambda1 = 1 + y^2."""
    x, y = w
    return (1 + y * y) * x * x / 2


def curved_residual(t):
    return t[0] + 0.6 * t[1] * t[2] - 0.3 * t[3] ** 2


def curved(w):
    """A surface in the sphere of four dimensions."""
    t = w / w.norm()
    return (1 + 2 * t[3] ** 2) * curved_residual(t) ** 2 / 2


def curved_log_sharpness(t):
    """Closed form, numpy, at a point of the surface: the weight times the squared tangent gradient of the residual."""
    slope = np.array([1.0, 0.6 * t[2], 0.6 * t[1], -0.6 * t[3]])
    slope -= t * (slope @ t)
    return math.log((1 + 2 * t[3] ** 2) * slope @ slope)


def onto_curved(t):
    """The minimiser next to a point: Newton's method in the first coordinate and the norm, by hand."""
    for _ in range(60):
        t = t / np.linalg.norm(t)
        t = t - np.array([curved_residual(t), 0, 0, 0])
    return t / np.linalg.norm(t)


def curved_gradient_by_differences(t, step=1e-5):
    """Gradient of log lambda1 along the surface, by central differences between points that are put back on it."""
    normal = np.array([1.0, 0.6 * t[2], 0.6 * t[1], -0.6 * t[3]])
    basis = np.linalg.svd(np.stack([t, normal]))[2][2:]  # tangent to the sphere and to the surface
    slopes = [
        curved_log_sharpness(onto_curved(t + step * e)) - curved_log_sharpness(onto_curved(t - step * e)) for e in basis
    ]
    return (np.array(slopes) / (2 * step)) @ basis


class Regression:
    """Linear regression with BatchNorm, as a network, and a weight that fits the data exactly."""

    def __init__(self, seed=0, dim=8, samples=4):
        rng = np.random.default_rng(seed)
        self.inputs, self.targets = rng.standard_normal((samples, dim)), rng.standard_normal(samples)
        centred = self.inputs - self.inputs.mean(axis=0)
        null_part = rng.standard_normal(dim)
        null_part -= np.linalg.pinv(centred) @ (centred @ null_part)
        self.weight = np.linalg.pinv(centred) @ (self.targets - self.targets.mean()) + 0.4 * null_part
        self.batch = torch.tensor(self.inputs), torch.tensor(self.targets)
        mean, spread = self.targets.mean(), self.targets.std()
        net = nn.Sequential(nn.Linear(dim, 1, bias=False), nn.BatchNorm1d(1, affine=False, eps=1e-14)).double()
        with torch.no_grad():
            net[0].weight.copy_(3 * torch.tensor(self.weight)[None])  # any scale
        self.net = net
        self.objective = eq.objective(net, lambda out, y: (spread * out[:, 0] + mean - y).square().mean())

    def effective(self, weights):
        """The coefficients that BatchNorm makes of the rows of raw weights."""
        centred = self.inputs - self.inputs.mean(axis=0)
        return weights * (self.targets.std() / (weights @ centred.T).std(axis=1))[:, None]


def train(loss, start, *, lr, intrinsic, steps):
    """Gradient descent with weight decay, by torch; the weights at every step."""
    w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=lr, weight_decay=intrinsic / lr)
    path = []
    for _ in range(steps):
        path.append({"w": w.detach().clone()})
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
    return path
