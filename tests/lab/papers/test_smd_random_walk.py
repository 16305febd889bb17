"""The random-walk model: noise as promised, and torch's own SGD on it."""

from __future__ import annotations

import numpy as np
import torch

from equilibria.lab.papers.smd.random_walk import tangent_noise, turned, walk_heavy_ball


def test_noise_is_tangent_and_of_the_right_size():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((20_000, 5)) * 10 ** rng.uniform(-3, 3, (20_000, 1))
    g = tangent_noise(w, rng, unit_grad_sq=7.0)
    sizes = np.linalg.norm(w, axis=1), np.linalg.norm(g, axis=1)
    assert np.max(np.abs(np.einsum("ij,ij->i", w, g)) / (sizes[0] * sizes[1])) < 1e-14
    unit = (sizes[0] * sizes[1]) ** 2
    assert abs(unit.mean() - 7.0) < 5 * unit.std() / np.sqrt(len(unit))


def test_angles_survive_where_cosines_do_not():
    before = np.array([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    after = np.array([[3.0, 3e-9], [-1.0, 0.0], [0.0, 1.0]])
    assert np.allclose(turned(before, after), [1e-9, np.pi, np.pi / 2], rtol=1e-12)


def test_the_steps_are_those_of_torch():
    rng = np.random.default_rng(1)
    start = rng.standard_normal((3, 6))
    gradients = rng.standard_normal((50, 3, 6))
    w = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.05)
    for gradient in gradients:
        w.grad = torch.tensor(gradient)
        optimizer.step()
    given = iter(gradients)
    ours, _, norms, _ = walk_heavy_ball(
        start,
        np.zeros_like(start),
        50,
        lr=0.1,
        weight_decay=0.05,
        momentum=0.9,
        gradient=lambda w: next(given),
    )
    assert np.allclose(ours, w.detach().numpy(), rtol=1e-12, atol=1e-12)
    assert np.isclose(norms[0], np.mean(np.sum(start**2, axis=1)))
