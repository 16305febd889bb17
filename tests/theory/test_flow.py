"""The sharpness-reduction flow against ODE solutions and brute-force training of a small exact problem."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from tests.helpers.edge_runs import at_the_edge, descend

from equilibria.errors import EquilibriaError
from equilibria.theory.flow import (
    curve_position,
    curve_time,
    flow_velocity,
    integrate_flow,
    log_sharpness_rate,
)
from equilibria.theory.flow_examples import sphere3d_angle
from equilibria.theory.hamiltonian import mean_square_displacement

# --- the velocity and its integration -----------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-3, 1e3), c_b=st.floats(0.05, 20))
def test_velocity_is_mean_square_times_gradient(seed, size, c_b):
    """Per step the flow moves by <h^2> (the drift of two steps is 2h^2), whatever the clock."""
    vector = np.random.default_rng(seed).standard_normal(4)
    vector *= size / np.linalg.norm(vector)
    eta = 1e-3
    per_step = -float(mean_square_displacement(eta, grad_norm=size, c_b=c_b)) * vector
    assert flow_velocity(vector, c_b=c_b) * eta**2 == pytest.approx(per_step, rel=1e-9)
    # Weight decay: eta^2 = 2 lr wd, c_b = 2, and its clock runs at half the speed.
    assert flow_velocity(vector) == pytest.approx(2 * flow_velocity(vector, c_b=2.0), rel=1e-12)
    assert float(log_sharpness_rate(size)) == pytest.approx(float(flow_velocity(vector) @ vector), rel=1e-9)
    assert -2 < float(log_sharpness_rate(size)) < 0
    assert -c_b / 2 < float(log_sharpness_rate(size, c_b=c_b)) < 0


def circle_gradient(point):
    """Not tangent: the full gradient of log(6/(1 - z^2)) extended homogeneously of degree -2, on x = y."""
    radius_sq = point[0] ** 2 + point[1] ** 2
    return np.array([-2 * point[0] / radius_sq, -2 * point[1] / radius_sq, 0.0])


def tangent_to_circle(point, vector):
    """Great circle through the pole and (1, 1, 0)."""
    z = point[2]
    direction = np.array([-z / math.sqrt(2), -z / math.sqrt(2), math.sqrt(1 - z * z)])
    return direction * (direction @ vector)


def test_integrated_flow_on_the_sphere():
    """Raw gradient, projection and retraction reproduce the closed form of the 3-D example."""
    angle = math.asin(0.8)
    start = np.array([math.cos(angle) / math.sqrt(2)] * 2 + [math.sin(angle)])
    assert circle_gradient(start) @ start == pytest.approx(-2, rel=1e-14)  # the radial part that must go
    times = np.linspace(0, 3, 7)
    path = integrate_flow(
        circle_gradient, start, times=times, project=tangent_to_circle, retract=lambda p: p / np.linalg.norm(p)
    )
    expected = sphere3d_angle(angle, time=times)
    assert np.arcsin(path.points[:, 2]) == pytest.approx(expected, abs=1e-8)
    assert np.linalg.norm(path.points, axis=1) == pytest.approx(np.ones(7), abs=1e-15)
    assert path.log_sharpness == pytest.approx(2 * np.log(math.cos(angle) / np.cos(expected)), abs=1e-8)


def test_integrated_flow_against_independent_ode():
    """A curved two-dimensional manifold (a plane with varying sharpness), with scipy's LSODA on eq. (8)."""

    def gradient(p):
        return np.array([math.cos(p[0]) + p[1], p[0] + 2 * p[1]])

    c_b = 0.7
    reference = solve_ivp(
        lambda _, p: -gradient(p) / (4 + 2 / c_b * gradient(p) @ gradient(p)), (0, 2), [0.4, -0.9],
        method="LSODA", rtol=1e-11, atol=1e-13,
    )  # fmt: skip
    path = integrate_flow(gradient, [0.4, -0.9], times=[0.5, 2.0], c_b=c_b)
    assert path.points[-1] == pytest.approx(reference.y[:, -1], abs=1e-8)
    assert integrate_flow(gradient, [0.4, -0.9], times=[0.0]).points[0].tolist() == [0.4, -0.9]


# --- example B: lambda1 = a + b sin^2(phi) ------------------------------------------------------------------------

A, B = 1.0, 8.0


def slope_b(phi):
    return 2 * B * math.sin(phi) * math.cos(phi) / (A + B * math.sin(phi) ** 2)


def clock_b(phi):
    """Antiderivative of (4/g + g)/2."""
    return A / B * math.log(math.tan(phi)) - math.log(math.cos(phi)) + math.log(A + B * math.sin(phi) ** 2) / 2


def gradient_b(w):
    """Gradient of (x/r)^2 (a + b (y/r)^2)/2."""
    x, y, _ = w
    norm_sq = w @ w
    x_sq, y_sq = x * x / norm_sq, y * y / norm_sq
    radial = x_sq * (A + 2 * B * y_sq)
    return (np.array([x * (A + B * y_sq), x_sq * B * y, 0.0]) - radial * w) / norm_sq


def test_gradient_b_by_differences():
    def loss(v):
        return v[0] ** 2 / (v @ v) * (A + B * v[1] ** 2 / (v @ v)) / 2

    w = np.array([0.3, 0.5, -0.7])
    differences = [(loss(w + e) - loss(w - e)) / 2e-6 for e in 1e-6 * np.eye(3)]
    assert gradient_b(w) == pytest.approx(differences, abs=1e-8)


def test_example_b_quadrature():
    end = curve_position(1.2, time=2.0, minimum=0.0, slope=slope_b)
    assert end == pytest.approx(0.302800, abs=6e-7)
    assert clock_b(1.2) - clock_b(end) == pytest.approx(2, abs=1e-10)
    assert curve_time(1.2, 0.4, slope=slope_b) == pytest.approx(clock_b(1.2) - clock_b(0.4), rel=1e-11)
    # Twice or half the speed would end at 0.000 or 0.794.
    assert curve_position(1.2, time=4.0, minimum=0.0, slope=slope_b) == pytest.approx(0.0, abs=5e-4)
    assert curve_position(1.2, time=1.0, minimum=0.0, slope=slope_b) == pytest.approx(0.794, abs=5e-4)
    path = integrate_flow(lambda p: np.array([slope_b(p[0])]), [1.2], times=[2.0])
    assert path.points[0, 0] == pytest.approx(end, abs=1e-8)


def test_far_along_the_curve():
    """The approach to the flattest point is exponential; the quadrature follows it over a hundred orders."""
    end = curve_position(1.2, time=40.0, minimum=0.0, slope=slope_b)
    assert 0 < end < 1e-100
    assert clock_b(1.2) - clock_b(end) == pytest.approx(40, rel=1e-9)


def test_a_slope_with_rounding_noise():
    """A slope in float32 gives the time to its own digits; one with six digits is refused, not integrated badly."""
    exact = math.log(math.tan(1.0) / math.tan(0.5))
    time = curve_time(1.0, 0.5, slope=lambda angle: float(np.float32(2 * math.tan(angle))))
    assert time == pytest.approx(exact, rel=1e-8)
    with pytest.raises(EquilibriaError, match=r"got a flow time of .*; expected .* not smooth"):
        curve_time(1.0, 0.5, slope=lambda angle: float(f"{2 * math.tan(angle):.6g}"))


@settings(deadline=None, max_examples=30)
@given(start=st.floats(0.1, 1.4), time=st.floats(0, 3), c_b=st.one_of(st.none(), st.floats(0.2, 5)))
def test_position_inverts_time(start, time, c_b):
    for sign in (1, -1):  # both sides of the minimum
        end = curve_position(sign * start, time=time, minimum=0.0, slope=slope_b, c_b=c_b)
        assert curve_time(sign * start, end, slope=slope_b, c_b=c_b) == pytest.approx(time, abs=1e-9)


@pytest.mark.parametrize(
    ("intrinsic", "end", "error"),
    [(1e-2, 0.359, 0.0853), (2.5e-3, 0.339, 0.0508), (6.25e-4, 0.333, 0.0297), (1.5625e-4, 0.2986, 0.0152)],
)
def test_example_b_table(intrinsic, end, error):
    """Start at R = 1, pushed by 0.01 sqrt(lr*wd)."""
    lr, steps = 0.5, round(2 / intrinsic) + 1
    direction = np.array([0.01 * math.sqrt(intrinsic), math.sin(1.2), math.cos(1.2)])
    start = at_the_edge(direction, A + B * math.sin(1.2) ** 2, lr=lr, intrinsic=intrinsic)
    path = descend(gradient_b, start, lr=lr, intrinsic=intrinsic, steps=steps)
    phi = np.arctan2(path[:, 1], path[:, 2])
    knots = np.linspace(0, 2, 81)
    flow = [curve_position(1.2, time=t, minimum=0.0, slope=slope_b) for t in knots]
    gap = np.abs(phi - np.interp(np.arange(steps) * intrinsic, knots, flow)).max()
    assert phi[-1] == pytest.approx(end, abs=2e-3)
    assert gap == pytest.approx(error, rel=0.02)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: flow_velocity([math.nan]),
        lambda: flow_velocity([1.0], c_b=0.0),
        lambda: log_sharpness_rate(-1.0),
        lambda: integrate_flow(lambda p: p, [1.0], times=[1.0, 0.5]),
        lambda: integrate_flow(lambda p: p, [1.0], times=[-1.0, 0.5]),
        lambda: integrate_flow(lambda p: p, [1.0], times=[]),
        lambda: integrate_flow(lambda p: p, [[1.0]], times=[1.0]),
        lambda: integrate_flow(lambda p: p * math.nan, [1.0], times=[1.0]),
        lambda: integrate_flow(lambda p: p, [1.0], times=[1.0], c_b=-1.0),
        lambda: integrate_flow(lambda p: p, [1.0], times=[1.0], rtol=0.0),
        lambda: curve_time(0.5, 1.0, slope=slope_b),
        lambda: curve_time(1.0, -1.0, slope=slope_b),
        lambda: curve_time(math.inf, 0.5, slope=slope_b),
        lambda: curve_time(1.0, 0.0, slope=lambda position: position),
        lambda: curve_time(1.0, 0.0, slope=lambda position: position**2),
        lambda: curve_time(1.0, 0.5, slope=lambda position: 1.0 - position),
        lambda: curve_position(1.2, time=-1.0, minimum=0.0, slope=slope_b),
        lambda: curve_position(1.2, time=1.0, minimum=2.0, slope=slope_b),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
