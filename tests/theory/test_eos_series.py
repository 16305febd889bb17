"""Smoothing, crossings and the secant estimate on runs at the edge of stability."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.edge_runs import hessian_at, rotated_run, settled_run, three_d_gradient, three_d_loss

from equilibria.errors import EquilibriaError
from equilibria.theory.eos_series import ratio_crossings, secant_sharpness, two_step_mean
from equilibria.theory.hamiltonian import orbit, period_steps
from equilibria.theory.stability import stability_ratio


def ratios_at_theta(path, intrinsic):
    """Stability ratio with the sharpness taken at theta itself, which brings in the period-2 component."""
    h, z, norm_sq = path.T
    side = np.sqrt((1 - z**2 - h**2) / 2)
    points = np.column_stack([side + h / math.sqrt(2), side - h / math.sqrt(2), z])
    top = np.array([np.linalg.eigvalsh(hessian_at(three_d_loss, point))[-1] for point in points])
    return stability_ratio(0.5 / ((1 - intrinsic) * norm_sq), top)


def test_crossings_of_a_real_run():
    """Periods from the detector lie between the small-amplitude limit and the orbit of the starting energy."""
    intrinsic = 1e-4
    path = rotated_run(intrinsic, 2500, z0=0.0, ratio=1.0, push=0.02 * math.sqrt(intrinsic / 2))
    h, _, norm_sq = path.T
    ratio = stability_ratio(0.5 / ((1 - intrinsic) * norm_sq), 6.0)
    periods = np.diff(ratio_crossings(ratio).downward)
    small = float(period_steps(intrinsic))
    eta = math.sqrt(2 * intrinsic)
    start = np.abs(h[0]) / eta
    excess = 4 * start**2 - 2 * math.log(start) - (1 + math.log(4))
    longest = float(orbit(excess).period) / eta
    assert len(periods) >= 5
    assert np.all(np.diff(periods) <= 1)
    assert small - 4 < periods[-1] < periods[0] < longest + 4
    assert periods[0] > 1.15 * small


def test_period_two_component_is_removed():
    rng = np.random.default_rng(0)
    steps = np.arange(1200)
    smooth = 1 + 0.03 * np.sin(2 * np.pi * steps / 200)
    noisy = smooth + 0.04 * (-1.0) ** steps + 1e-4 * rng.standard_normal(len(steps))
    raw = np.flatnonzero((noisy[:-1] >= 1) & (noisy[1:] < 1))
    assert np.median(np.diff(raw)) == 2  # what the naive detector sees
    actual = ratio_crossings(noisy)
    assert actual.downward == pytest.approx(np.arange(100, 1200, 200), abs=3)
    assert actual.upward == pytest.approx(np.arange(200, 1200, 200), abs=3)


def test_two_step_mean_of_an_asymmetric_valley():
    """In a lop-sided valley the sharpness at theta alternates; its two-step mean is steady."""
    intrinsic = 1e-3
    angle, log_eta, ratio = math.sqrt(intrinsic / 2), math.log(2.0), []
    for _ in range(8000):
        slope, curvature = angle + angle**2, 1 + 2 * angle
        ratio.append(math.exp(log_eta) * curvature / 2)
        push = math.exp(log_eta) * slope
        angle, log_eta = angle - math.atan(push), log_eta - 2 * math.log1p(-intrinsic) - math.log1p(push * push)
    tail = np.array(ratio[-100:])
    assert tail.std() > 0.03
    assert two_step_mean(tail).std() < 1e-3 * tail.std()


def test_crossing_dates_and_hysteresis():
    series = np.array([0.9, 0.9, 1.0004, 0.9, 0.9, 1.1, 1.1, 1.1, 0.9, 0.9, 0.9])
    actual = ratio_crossings(series)
    mean = two_step_mean(series)
    assert actual.upward.tolist() == [6]
    assert mean[5] > 1 >= mean[4]
    assert actual.downward.tolist() == [9]
    assert ratio_crossings(series, band=0.2).upward.size == 0
    # A slow ramp is dated to the level, not to the edge of the band that confirms it.
    ramp = np.concatenate([np.linspace(0.9, 1.1, 201), np.linspace(1.1, 0.9, 201)])
    slow = ratio_crossings(ramp, band=0.02)
    assert slow.upward == pytest.approx([101], abs=1)
    assert slow.downward == pytest.approx([302], abs=1)
    assert ratio_crossings(np.full(5, 1.0)).downward.size == 0


def test_secant_estimates_sharpness_only_at_the_edge():
    intrinsic = 1e-3
    path = settled_run(intrinsic, 3000)
    h, z, _ = path.T
    side = np.sqrt((1 - z**2 - h**2) / 2)
    theta = np.column_stack([side + h / math.sqrt(2), side - h / math.sqrt(2), z])
    gradient = np.array([three_d_gradient(t) for t in theta])
    estimate = secant_sharpness(theta[:-1], theta[1:], grad=gradient[:-1], next_grad=gradient[1:])
    assert estimate.shape == (2999,)
    assert np.median(np.abs(estimate / 6 - 1)) < 0.03
    ratio = ratios_at_theta(path[-20:], intrinsic)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    # A step along a flat direction of a quadratic says nothing about the top eigenvalue.
    flat = secant_sharpness([0.0, 0.0], [0.0, 1.0], grad=[0.0, 0.0], next_grad=[0.0, 0.1])
    assert float(flat) == pytest.approx(0.1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), dim=st.integers(1, 6))
def test_secant_is_a_rayleigh_quotient_on_quadratics(seed, dim):
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((dim, dim))
    hessian = half @ half.T
    a, b = rng.standard_normal((2, dim))
    spectrum = np.linalg.eigvalsh(hessian)
    estimate = float(secant_sharpness(a, b, grad=hessian @ a, next_grad=hessian @ b))
    assert spectrum[0] - 1e-9 <= estimate <= spectrum[-1] * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: two_step_mean([1.0]),
        lambda: two_step_mean([[1.0, 2.0]]),
        lambda: ratio_crossings([1.0, math.nan]),
        lambda: ratio_crossings([1.0, 2.0], band=-1.0),
        lambda: secant_sharpness([1.0], [1.0], grad=[0.0], next_grad=[1.0]),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
