"""Norm identities on brute-force trajectories with tangent gradients, and the exit-time theorem by simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.norms import cone_exit_bound, decay_free_norm, norm_residual, window_identity


@dataclass
class Trajectory:
    norm_sq: np.ndarray
    step_sq: np.ndarray


def trajectory(lr, wd, momentum, *, steps: int, seed: int = 0, dim: int = 6, trials: int = 1, noise=1.0, start=1.0):
    """SGD with momentum, one step at a time, on gradients that are exactly tangent and scale like 1/norm."""
    rng = np.random.default_rng(seed)
    lr, wd, momentum = (np.broadcast_to(x, steps) for x in (lr, wd, momentum))
    w = rng.standard_normal((trials, dim))
    w *= start / np.linalg.norm(w, axis=1, keepdims=True)
    buffer = np.zeros_like(w)
    norms, moved = [(w * w).sum(1)], []
    for t in range(steps):
        xi = noise * rng.standard_normal(w.shape)
        r = (w * w).sum(1, keepdims=True)
        gradient = (xi - (xi * w).sum(1, keepdims=True) * w / r) / np.sqrt(r)
        buffer = momentum[t] * buffer + gradient + wd[t] * w
        after = w - lr[t] * buffer
        moved.append(((after - w) ** 2).sum(1))
        w = after
        norms.append((w * w).sum(1))
    return Trajectory(np.array(norms), np.array(moved))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.0, 0.95), st.floats(0.0, 0.5))
def test_norm_identity_holds_for_varying_settings(seed, g, wd):
    rng = np.random.default_rng(seed)
    lr, decay = rng.uniform(0.01, 0.2, 60), wd * rng.uniform(size=60)
    momentum = g * rng.uniform(size=60)
    path = trajectory(lr, decay, momentum, steps=60, seed=seed, trials=3)
    residual = norm_residual(path.norm_sq, path.step_sq, lr=lr, weight_decay=decay, momentum=momentum)
    size = path.norm_sq.max() / lr.min()
    assert residual.shape == (59, 3)
    assert np.abs(residual).max() < 1e-13 * size


def test_norm_identity_notices_a_radial_gradient():
    path = trajectory(0.1, 0.01, 0.9, steps=50)
    shifted = path.norm_sq * np.linspace(1, 1.01, 51)[:, None]
    residual = norm_residual(shifted, path.step_sq, lr=0.1, weight_decay=0.01, momentum=0.9)
    assert np.abs(residual).max() > 1e-4


@pytest.mark.parametrize("g", [0.0, 0.9])
def test_window_identity_is_exact_out_of_equilibrium(g):
    path = trajectory(0.1, 1e-2, g, steps=400, trials=4, start=8.0)
    b = 50
    window = window_identity(path.norm_sq[b - 1 :], path.step_sq[b - 1 :], lr=0.1, weight_decay=1e-2, momentum=g)
    np.testing.assert_allclose(window.implied_step_sq, window.step_sq, rtol=1e-10)
    np.testing.assert_allclose(window.step_sq, path.step_sq[b:].mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(window.norm_sq, path.norm_sq[b:-1].mean(axis=0), rtol=1e-14)
    # without the end terms it would be off by more than a percent
    assert (np.abs(window.stationary_step_sq / window.step_sq - 1) > 0.01).all()


def test_theorem_b2_at_stationarity():
    lr, wd, g = 0.1, 5e-3, 0.9
    path = trajectory(lr, wd, g, steps=6000, trials=8, dim=100, noise=0.1, start=3.16)
    window = window_identity(path.norm_sq[3000:], path.step_sq[3000:], lr=lr, weight_decay=wd, momentum=g)
    relative = math.sqrt(window.step_sq.mean() / window.norm_sq.mean())
    assert relative == pytest.approx(math.sqrt(2 * lr * wd / (1 + g)), rel=0.005)
    assert relative == pytest.approx(0.02294, rel=0.005)


@pytest.mark.parametrize("g", [0.0, 0.5, 0.9])
def test_decay_free_norm_is_the_direct_sum(g):
    path = trajectory(0.1, 0.0, g, steps=201)
    R, D = path.norm_sq[:, 0], path.step_sq[:, 0]
    result = decay_free_norm(R[0], D, lr=0.1, momentum=g)
    np.testing.assert_allclose(result.norm_sq, R, rtol=1e-12)
    t = 200
    weights = [(1 - g ** (t - i + 1)) / (1 - g) for i in range(t + 1)]
    direct = R[0] + sum(weights[i] * (D[i] + (g * D[i - 1] if i else 0.0)) for i in range(t + 1))
    assert result.norm_sq[t + 1] == pytest.approx(direct, rel=1e-12)
    assert (np.diff(result.norm_sq) >= 0).all() and (result.least_increase == 0).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.0, 0.95), st.integers(1, 30))
def test_decay_free_norm_from_a_running_buffer_with_varying_lr(seed, g, cut):
    lr = np.random.default_rng(seed).uniform(0.01, 0.2, 80)
    path = trajectory(lr, 0.0, g, steps=80, seed=seed)
    R, D = path.norm_sq[:, 0], path.step_sq[:, 0]
    result = decay_free_norm(
        R[cut],
        D[cut:],
        lr=lr[cut:],
        momentum=g,
        earlier_increase=R[cut] - R[cut - 1],
        earlier_step_sq=D[cut - 1],
        earlier_lr=lr[cut - 1],
    )
    np.testing.assert_allclose(result.norm_sq, R[cut:], rtol=1e-11)
    assert (np.diff(R[cut:]) >= result.least_increase - 1e-12).all()


def test_the_printed_bound_has_the_wrong_sign():
    """After weight decay the norm falls at first; the paper's -momentum^(t+1) (R_0 - R_{-1}) would forbid that."""
    decayed = trajectory(0.1, 0.5, 0.9, steps=20, start=10.0, noise=0.1)
    rng = np.random.default_rng(1)
    falling = decayed.norm_sq[-1, 0] - decayed.norm_sq[-2, 0]
    assert falling < 0
    steps = rng.uniform(0, 1e-6, 20)
    result = decay_free_norm(
        decayed.norm_sq[-1, 0], steps, lr=0.1, momentum=0.9, earlier_increase=falling, earlier_lr=0.1
    )
    printed = -(0.9 ** np.arange(1, 21)) * falling
    assert (np.diff(result.norm_sq) >= result.least_increase).all()
    assert (np.diff(result.norm_sq) < printed).all()


def simulate_cone(steps: int, *, trials: int, lr: float, wd: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Case 3 of section 3 in two dimensions: angles to e_1 and norms before each step."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((trials, 2))
    angles, norms = np.empty((steps, trials)), np.empty((steps, trials))
    for t in range(steps):
        norm = np.linalg.norm(w, axis=1)
        unit = w / norm[:, None]
        angles[t], norms[t] = np.abs(np.arctan2(w[:, 1], w[:, 0])), norm
        x = rng.standard_normal((trials, 2))
        y = np.sign(x[:, 0])
        along = (x * unit).sum(1)
        pull = y / (1 + np.exp(y * along))
        w = (1 - lr * wd) * w + lr * (pull / norm)[:, None] * (x - along[:, None] * unit)
    return angles, norms


def test_cone_is_left_within_the_bound():
    angles, norms = simulate_cone(6000, trials=16, lr=0.5, wd=0.1, seed=0)
    outside = angles > 0.1
    assert outside[1000:].mean() == pytest.approx(0.82, abs=0.01)
    assert np.sqrt((angles[1000:] ** 2).mean()) == pytest.approx(0.407, abs=0.01)
    bound = cone_exit_bound(0.5, 0.1, angle=0.1, norm=norms, dim=2)
    assert np.median(bound[1000:]) == pytest.approx(44.7, abs=2)
    steps_to_exit = np.full(outside.shape, np.inf)
    wait = np.full(outside.shape[1], np.inf)
    for t in range(len(outside) - 1, -1, -1):
        wait = np.where(outside[t], 0, wait + 1)
        steps_to_exit[t] = wait
    early = slice(0, len(outside) - 100)
    assert (steps_to_exit[early] <= bound[early]).all()
    assert steps_to_exit[1000:-100].max() < 15


def test_cone_bound_closed_form():
    assert cone_exit_bound(0.5, 0.1, angle=0.1, norm=1e-3, dim=2, failure=math.exp(-1)) == pytest.approx(6)
    base = cone_exit_bound(0.5, 0.1, angle=0.1, norm=2.0, dim=2)
    assert cone_exit_bound(0.5, 0.1, angle=0.1, norm=2 * math.e, dim=2) - base == pytest.approx(1 / 0.03)
    assert cone_exit_bound(0.5, 0.1, angle=0.1, norm=np.ones((2, 3)), dim=2).shape == (2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: norm_residual([1.0, 1.0], [0.1, 0.1], lr=0.1, weight_decay=0.0),
        lambda: norm_residual([1.0, math.nan, 1.0], [0.1, 0.1], lr=0.1, weight_decay=0.0),
        lambda: norm_residual([1.0, -1.0, 1.0], [0.1, 0.1], lr=0.1, weight_decay=0.0),
        lambda: norm_residual([1.0] * 3, [0.1] * 2, lr=0.0, weight_decay=0.0),
        lambda: norm_residual([1.0] * 3, [0.1] * 2, lr=[0.1] * 3, weight_decay=0.0),
        lambda: norm_residual([1.0] * 2, [0.1], lr=0.1, weight_decay=0.0),
        lambda: window_identity([1.0] * 3, [0.1] * 2, lr=0.1, weight_decay=0.0, momentum=1.0),
        lambda: window_identity([1.0] * 2, [0.1], lr=0.1, weight_decay=0.0),
        lambda: window_identity(1.0, 0.1, lr=0.1, weight_decay=0.0),
        lambda: decay_free_norm(1.0, [], lr=0.1),
        lambda: decay_free_norm(1.0, [[0.1]], lr=0.1),
        lambda: decay_free_norm(1.0, [0.1], lr=0.1, earlier_increase=math.nan),
        lambda: decay_free_norm(-1.0, [0.1], lr=0.1),
        lambda: cone_exit_bound(0.5, 0.01, angle=0.1, norm=1.0, dim=2),
        lambda: cone_exit_bound(0.5, 0.1, angle=0.1, norm=1.0, dim=1),
        lambda: cone_exit_bound(0.5, 0.1, angle=0.1, norm=0.0, dim=2),
        lambda: cone_exit_bound(0.5, 0.1, angle=0.1, norm=1.0, dim=2, failure=1.0),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(EquilibriaError, match="got "):
        call()
