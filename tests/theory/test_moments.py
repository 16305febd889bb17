"""Moment steps against the optimizer itself on explicit vectors, and small angles against 60 digits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from tests.helpers import random_walk

from equilibria.theory import moments

DIM = 7
REAL = {"allow_nan": False, "allow_infinity": False}


def tangent_samples(w, grad_sq, mean):
    """Gradients orthogonal to w, with the given mean and E||g||^2 = grad_sq, whose covariance is isotropic.

    A quadratic form has the same average over these 2 (d-1) vectors as over the Gaussian: the expectation is exact.
    """
    basis = np.linalg.svd(w[None, :])[2][1:]
    spread = math.sqrt(grad_sq - mean @ mean)
    return np.concatenate([mean + spread * basis, mean - spread * basis])


def torch_step(make, w, v, g):
    """One real optimizer step from weight w, buffer v and gradient g."""
    p = torch.nn.Parameter(torch.tensor(w)[None])
    optimizer = make([p])
    optimizer.state[p]["momentum_buffer"] = torch.tensor(v)[None].clone()
    p.grad = torch.tensor(g)[None]
    optimizer.step()
    return p.detach().numpy()[0], optimizer.state[p]["momentum_buffer"].numpy()[0]


def measured_step(make, w, v, gradients):
    """(P', Q', R', D), averaged over the gradients."""
    rows = []
    for g in gradients:
        w1, v1 = torch_step(make, w, v, g)
        rows.append([w1 @ w1, w1 @ v1, v1 @ v1, (w1 - w) @ (w1 - w)])
    return np.mean(rows, axis=0)


def vectors(seed, aligned):
    """Weight and buffer; ``aligned`` gives them a radial overlap of either sign."""
    rng = np.random.default_rng(seed)
    w, v = rng.normal(size=(2, DIM))
    return w, v + aligned * w


settings_of_a_step = given(
    seed=st.integers(0, 10_000),
    aligned=st.floats(-1, 1, **REAL),
    lr=st.floats(1e-3, 2, **REAL),
    wd=st.floats(0, 0.6, **REAL),
    momentum=st.floats(0.01, 0.99, **REAL),
    grad_sq=st.floats(0.01, 30, **REAL),
    extra=st.floats(0, 0.95, **REAL),
)


def assert_step(step, settings, make, w, v, gradients, grad_sq):
    state = np.array([w @ w, w @ v, v @ v, grad_sq])
    expected = measured_step(make, w, v, gradients)
    matrix = moments.step_map(step, *settings)
    # Every entry is a sum of terms no larger than this, so rounding is relative to it.
    scale = float((np.abs(matrix) @ np.abs(state)).max())
    np.testing.assert_allclose(step(*state, *settings), expected, rtol=1e-12, atol=1e-14 * scale)
    np.testing.assert_allclose(matrix @ state, expected, rtol=1e-12, atol=1e-14 * scale)


@settings_of_a_step
def test_heavy_ball_step_is_the_expected_step_of_torch_sgd(seed, aligned, lr, wd, momentum, grad_sq, extra):
    w, v = vectors(seed, aligned)
    gradients = tangent_samples(w, grad_sq, np.zeros(DIM))

    def make(params):
        return torch.optim.SGD(params, lr=lr, weight_decay=wd, momentum=momentum, dampening=extra)

    assert_step(moments.heavy_ball_step, (lr, wd, momentum, 1 - extra), make, w, v, gradients, grad_sq)


@settings_of_a_step
def test_nesterov_step_is_the_expected_step_of_torch_sgd(seed, aligned, lr, wd, momentum, grad_sq, extra):
    w, v = vectors(seed, aligned)
    # A mean gradient along the tangent part of the buffer gives <v, g> any wanted value.
    tangent = v - w * (v @ w) / (w @ w)
    mean = extra * math.sqrt(grad_sq) * tangent / np.linalg.norm(tangent)
    gradients = tangent_samples(w, grad_sq, mean)

    def make(params):
        return torch.optim.SGD(params, lr=lr, weight_decay=wd, momentum=momentum, nesterov=True)

    # The step takes Nesterov's own L / P, in which <v, g> counts.
    rho = (v @ mean) / grad_sq
    counted = 1 + 2 * momentum**2 * (1 + momentum) / (1 + momentum + momentum * lr * wd * (1 + 2 * momentum)) * rho
    assert_step(moments.nesterov_step, (lr, wd, momentum, rho), make, w, v, gradients, counted * grad_sq)


@settings_of_a_step
def test_sgdw_step_is_the_expected_step(seed, aligned, lr, wd, momentum, grad_sq, extra):
    w, v = vectors(seed, aligned)
    gradients = tangent_samples(w, grad_sq, np.zeros(DIM))

    def make(params):
        return random_walk.SGDW(params, lr=lr, weight_decay=wd, momentum=momentum)

    assert_step(moments.sgdw_step, (lr, wd, momentum), make, w, v, gradients, grad_sq)


def test_arrays_over_steps_give_the_stack_of_single_maps():
    lrs, decays, moms = np.array([0.1, 0.2, 0.3]), np.array([[0.01], [0.5]]), np.array([0.0, 0.5, 0.9])
    cases = [(moments.heavy_ball_step, (0.7,)), (moments.nesterov_step, (0.2,)), (moments.sgdw_step, ())]
    for step, extra in cases:
        stack = moments.step_map(step, lrs, decays, moms, *extra)
        assert stack.shape == (2, 3, 4, 4)
        for i in range(2):
            for j in range(3):
                single = moments.step_map(step, lrs[j], decays[i, 0], moms[j], *extra)
                np.testing.assert_array_equal(stack[i, j], single)


@pytest.mark.parametrize(("lr", "wd", "momentum"), [(0.1, 0.001, 0.9), (0.4, 0.05, 0.5), (0.5, 0.1, 0.0)])
def test_moment_map_walks_the_path_of_the_three_weight_products(lr, wd, momentum):
    """The papers eliminate the buffer at constant lr: (||w||^2, <w, w_before>, ||w_before||^2)."""
    c, a = 1 + momentum - lr * wd, momentum
    big = np.array([[c * c, -2 * a * c, a * a], [c, -a, 0], [1, 0, 0]])
    x = np.full(3, 10.0)
    state = [10.0, 0.0, 0.0]
    rng = np.random.default_rng(1)
    for _ in range(300):
        unit_grad_sq = rng.uniform(5, 15)
        x = big @ x + np.array([unit_grad_sq * lr**2 / x[0], 0, 0])
        *state, moved = moments.heavy_ball_step(*state, unit_grad_sq / state[0], lr, wd, momentum)
        assert state[0] == pytest.approx(x[0], rel=1e-11)
        assert moved == pytest.approx(x[0] - 2 * x[1] + x[2], rel=1e-8)  # the right-hand side cancels


def test_plain_sgd_recursion_and_angle_are_exact_for_each_gradient():
    lr, wd = 0.3, 0.08
    steps = 50
    run = random_walk.walk(lambda p: torch.optim.SGD(p, lr=lr, weight_decay=wd), steps, norm=2.0, replicas=4, dim=12)
    x, big_g = run.norm_sq[:-1], run.grad_sq
    keep = 1 - lr * wd
    np.testing.assert_allclose(run.norm_sq[1:], keep**2 * x + big_g * lr**2 / x, rtol=1e-14)
    np.testing.assert_allclose(np.tan(run.angle), lr * np.sqrt(big_g) / (keep * x), rtol=1e-13)
    np.testing.assert_allclose(np.cos(run.angle), keep * np.sqrt(x / run.norm_sq[1:]), rtol=1e-13)
    # The step, given each replica's own squared gradient, is this recursion.
    after, _, _, moved = moments.heavy_ball_step(x, 0.0, 0.0, big_g / x, lr, wd, 0.0)
    np.testing.assert_allclose(after, run.norm_sq[1:], rtol=1e-14)
    np.testing.assert_allclose(moved, run.moved_sq, rtol=1e-12)
    chord = moments.chord_sq(x, run.norm_sq[1:], run.moved_sq)
    np.testing.assert_allclose(moments.angle_from_chord_sq(chord), run.angle, rtol=1e-11)


@pytest.mark.parametrize("angle", [1e-8, 3e-6, 1e-4, 0.01, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("growth", ["none", "as in equilibrium", "as large as the angle"])
def test_chord_keeps_small_angles(angle, growth):
    """The squared lengths are computed with 60 digits, rounded, and turned back into the angle."""
    mp.dps = 60
    delta = mpf(angle)
    grown = {"none": mpf(0), "as in equilibrium": delta**2 / 2, "as large as the angle": delta}[growth]
    before, after = mpf("1.7"), mpf("1.7") * (1 + grown)
    moved = (after - before) ** 2 + 4 * before * after * mp.sin(delta / 2) ** 2
    chord = moments.chord_sq(float(before**2), float(after**2), float(moved))
    # The stretch is known to one rounding of ||w||^2, so the squared stretch to rounding / stretch.
    rounding = 1e-15 + 2.3e-16 * float(grown) / angle**2
    assert float(moments.angle_from_chord_sq(chord)) == pytest.approx(angle, rel=4 * rounding + 1e-14)


def test_rounding_outside_the_range_of_a_chord_is_clamped():
    np.testing.assert_array_equal(moments.angle_from_chord_sq([-1e-18, 4 + 1e-12]), [0, np.pi])
