"""Signal and noise of a gradient by Monte Carlo, and the diffusion law of the norm by Euler-Maruyama."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.noise import NoiseSplit, noise_split, sde_norm_fourth

SIGNAL_SQ, NOISE_SQ = 0.49, 4.0


def sampled_splits(trials, batches, *, entries=12, seed=0):
    """Micro-batch gradients with mean of squared length .49 and a covariance of trace 4, unequal and correlated."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(entries, entries)) * np.linspace(0.1, 3, entries)
    mix *= math.sqrt(NOISE_SQ / np.sum(mix**2))
    mean = rng.normal(size=entries)
    mean *= math.sqrt(SIGNAL_SQ) / np.linalg.norm(mean)
    gradients = mean + rng.normal(size=(trials, batches, entries)) @ mix.T
    return gradients, [noise_split(g) for g in gradients]


@pytest.mark.parametrize("batches", [2, 8])
def test_both_estimators_are_unbiased(batches):
    """True values 4 and .49; the naive ||mean||^2 would be off by 4/m, which this test could not miss."""
    trials = 20_000
    gradients, splits = sampled_splits(trials, batches)
    noise = np.array([split.noise_sq for split in splits])
    signal = np.array([split.signal_sq for split in splits])
    for values, true in ((noise, NOISE_SQ), (signal, SIGNAL_SQ)):
        error = values.std(ddof=1) / math.sqrt(trials)
        assert error < 0.05 and abs(values.mean() - true) < 4 * error
    naive = np.mean(np.sum(gradients.mean(axis=1) ** 2, axis=1))
    assert naive - SIGNAL_SQ > 0.9 * NOISE_SQ / batches


@pytest.mark.parametrize("batches", [1, 3, 16])
def test_mean_square_at_another_batch_size(batches):
    """L(B) = signal + noise / B, against averages of B fresh micro-batches."""
    gradients, _ = sampled_splits(4000, 16, seed=1)
    squared = np.sum(gradients[:, :batches].mean(axis=1) ** 2, axis=1)
    error = squared.std(ddof=1) / math.sqrt(len(squared))
    assert abs(NoiseSplit(SIGNAL_SQ, NOISE_SQ, 16).mean_square(batches) - squared.mean()) < 4 * error


def test_fraction_is_of_the_averaged_step():
    assert NoiseSplit(0.5, 4.0, 8).fraction == pytest.approx(0.5)
    assert NoiseSplit(-0.1, 4.0, 8).fraction == 1.0
    assert NoiseSplit(0.5, 0.0, 8).fraction == 0.0
    assert NoiseSplit(0.0, 0.0, 8).fraction == 0.0


@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.integers(2, 6))
def test_split_adds_up_and_scales(seed, scale, batches):
    """signal + noise/m is the squared mean, exactly; everything scales with the square; shifts leave the noise."""
    g = np.random.default_rng(seed).normal(size=(batches, 5))
    split, scaled, moved = noise_split(g), noise_split(scale * g), noise_split(g + 3.0)
    assert split.mean_square(batches) == pytest.approx(float(np.sum(g.mean(axis=0) ** 2)), rel=1e-9, abs=1e-12)
    assert scaled.noise_sq == pytest.approx(scale**2 * split.noise_sq)
    assert moved.noise_sq == pytest.approx(split.noise_sq)
    assert 0 <= split.fraction <= 1


@pytest.mark.parametrize("start", [0.5, 1.6])
def test_norm_of_the_diffusion_by_euler_maruyama(start):
    """lr .05, wd .2, noise 3, dt .1, from below and above the equilibrium; one time unit is one step."""
    lr, wd, noise_sq, dt, dim, replicas = 0.05, 0.2, 3.0, 0.1, 40, 48
    rng = np.random.default_rng(3)
    w = rng.normal(size=(replicas, dim))
    w *= start / np.linalg.norm(w, axis=1, keepdims=True)
    times, sampled = [], []
    for step in range(1, 1201):
        norm_sq = np.sum(w * w, axis=1, keepdims=True)
        kick = rng.normal(size=w.shape)
        kick -= w * np.sum(kick * w, axis=1, keepdims=True) / norm_sq
        kick *= np.sqrt(noise_sq / ((dim - 1) * norm_sq))  # covariance of trace noise_sq / ||w||^2, tangent
        w = w - lr * wd * w * dt + lr * kick * math.sqrt(dt)
        if step % 100 == 0:
            times.append(step * dt)
            sampled.append(np.mean(np.sum(w * w, axis=1) ** 2))
    law = sde_norm_fourth(times, start, lr=lr, weight_decay=wd, noise_sq=noise_sq)
    np.testing.assert_allclose(np.array(sampled) / law, 1, atol=0.006)
    assert float(sde_norm_fourth(0, start, lr=lr, weight_decay=wd, noise_sq=noise_sq)) == pytest.approx(start**4)


@given(
    lr=st.floats(1e-3, 1),
    wd=st.floats(1e-4, 1),
    noise=st.floats(0, 10),
    norm=st.floats(0.1, 10),
    t=st.floats(0.5, 100),
)
def test_diffusion_law_solves_its_equation(lr, wd, noise, norm, t):
    """d||w||^4/dt = -4 lr wd ||w||^4 + 2 lr^2 noise, by central differences; it tends to noise lr / (2 wd)."""
    h = 1e-4
    low, here, high = sde_norm_fourth([t - h, t, t + h], norm, lr=lr, weight_decay=wd, noise_sq=noise)
    right = -4 * lr * wd * here + 2 * lr**2 * noise
    scale = 4 * lr * wd * here + 2 * lr**2 * noise
    assert (high - low) / (2 * h) == pytest.approx(right, abs=1e-6 * scale + 1e-9 * here)
    end = sde_norm_fourth(1e4 / (lr * wd), norm, lr=lr, weight_decay=wd, noise_sq=noise)
    assert float(end) == pytest.approx(noise * lr / (2 * wd))


@pytest.mark.parametrize(
    "call",
    [
        lambda: noise_split([1.0, 2.0]),
        lambda: noise_split([[1.0, 2.0]]),
        lambda: noise_split([[1.0, math.nan], [1.0, 2.0]]),
        lambda: noise_split([["a"], ["b"]]),
        lambda: NoiseSplit(1.0, 1.0, 2).mean_square(0),
        lambda: sde_norm_fourth(1.0, 0.0, lr=0.1, weight_decay=0.1, noise_sq=1.0),
        lambda: sde_norm_fourth(1.0, 1.0, lr=0.0, weight_decay=0.1, noise_sq=1.0),
        lambda: sde_norm_fourth(1.0, 1.0, lr=0.1, weight_decay=0.0, noise_sq=1.0),
        lambda: sde_norm_fourth(1.0, 1.0, lr=0.1, weight_decay=0.1, noise_sq=-1.0),
        lambda: sde_norm_fourth(math.nan, 1.0, lr=0.1, weight_decay=0.1, noise_sq=1.0),
        lambda: sde_norm_fourth(-1.0, 1.0, lr=0.1, weight_decay=0.1, noise_sq=1.0),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()
