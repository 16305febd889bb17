"""Size and memory of Muon's update by shape, against torch, singular values and brute-force filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.theory import Muon
from equilibria.theory.muon import orthogonal_update, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (32, 4), (4, 32), (1, 5)])
def test_orthogonalisation_is_that_of_torch(shape):
    g = np.random.default_rng(0).standard_normal(shape)
    w = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0)
    w.grad = torch.from_numpy(g)
    optimizer.step()
    ours = -Muon(1.0).gain(shape) * orthogonalised(g)
    # torch computes in bfloat16, 0.4 % per rounding; five steps multiply small singular values by up to 3.4 each.
    assert np.linalg.norm(ours - w.detach().numpy()) < 0.06 * np.linalg.norm(ours)


def test_orthogonalisation_acts_on_singular_values():
    g = np.random.default_rng(1).standard_normal((6, 9))
    left, values, right = np.linalg.svd(g, full_matrices=False)
    x = values / (np.linalg.norm(values) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    np.testing.assert_allclose(orthogonalised(g), left * x @ right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (7, 3)])
def test_size_and_correlation_against_other_draws(shape):
    update = orthogonal_update(*shape)
    draw = np.random.default_rng(99)
    count = 40_000 // (shape[0] * shape[1])
    first, fresh = draw.standard_normal((2, count, *shape))
    o = orthogonalised(first)
    size = np.mean(np.sum(o * o, axis=(1, 2)))
    assert update.size == pytest.approx(size, rel=0.02)
    for rho in (0.2, 0.5, 0.75, 0.95):
        other = orthogonalised(rho * first + math.sqrt(1 - rho**2) * fresh)
        assert update.correlation(rho) == pytest.approx(np.mean(np.sum(o * other, axis=(1, 2))) / size, abs=0.02)


def test_one_entry_is_lions_sign():
    """Newton-Schulz of a 1 x 1 matrix is a sign, whose correlation is the arcsine."""
    for rho in (0.3, 0.6, 0.9):
        assert orthogonal_update(1, 1).correlation(rho) == pytest.approx(2 / math.pi * math.asin(rho), abs=0.01)


@pytest.mark.parametrize("shape", [(32, 32), (300, 5), (1000, 1000), (768, 50_257), (1, 1)])
def test_coefficients_are_shares(shape):
    update = orthogonal_update(*shape)
    assert min(update.shares) >= 0 and math.fsum(update.shares) == pytest.approx(1, abs=1e-9)
    assert orthogonal_update(*shape[::-1]) == update


@pytest.mark.slow
def test_a_small_matrix_stands_for_a_large_one():
    draw = np.random.default_rng(3)
    first, fresh = draw.standard_normal((2, 2, 320, 640))
    o, other = orthogonalised(first), orthogonalised(0.8 * first + 0.6 * fresh)
    size = np.sum(o * o) / 2
    update = orthogonal_update(320, 640)
    assert update.size == pytest.approx(size, rel=0.01)
    assert update.correlation(0.8) == pytest.approx(np.sum(o * other) / 2 / size, abs=0.01)


@pytest.mark.parametrize("nesterov", [True, False])
def test_memory_against_a_filtered_walk(nesterov):
    """The sum of the correlations of updates, from white gradients through momentum and orthogonalisation."""
    mu, shape, steps = 0.8, (12, 12), 6000
    draw = np.random.default_rng(4)
    buffer, updates = np.zeros(shape), np.empty((steps, 144))
    for step in range(steps):
        g = draw.standard_normal(shape)
        buffer = mu * buffer + (1 - mu) * g
        updates[step] = orthogonalised((1 - mu) * g + mu * buffer if nesterov else buffer).ravel()
    products = [np.vdot(updates[lag:], updates[: steps - lag]) / (steps - lag) for lag in range(30)]
    total = 1 + 2 * sum(products[1:]) / products[0]
    rule = Muon(0.1, momentum=mu, nesterov=nesterov, shape=shape)
    assert rule.memory.total() == pytest.approx(total, rel=0.03)
    assert rule.update_sq(shape) == pytest.approx(products[0], rel=0.01)


@pytest.mark.parametrize("shape", [(0, 4), (-3, 4), (2.5, 4)])
def test_shapes_of_no_matrix_are_refused(shape):
    with pytest.raises(EquilibriaError, match="rows"):
        orthogonal_update(*shape)
