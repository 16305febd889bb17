"""Closed-form flows against ODE solutions and brute-force training of the very problems they solve."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.optimize import minimize
from tests.helpers.edge_runs import at_the_edge, descend, three_d_gradient

from equilibria.errors import EquilibriaError
from equilibria.theory.eos_series import ratio_crossings
from equilibria.theory.flow import curve_time, flow_velocity, integrate_flow
from equilibria.theory.flow_examples import (
    gap_closing_step,
    regression_flow,
    regression_geometry,
    rmsprop_valley_position,
    sphere3d_angle,
)
from equilibria.theory.hamiltonian import mean_square_displacement, period_steps
from equilibria.theory.stability import crossing_time, edge_of_stability

# --- the 3-D example ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(start=st.floats(-1.5, 1.5), first=st.floats(0, 3), second=st.floats(0, 3))
def test_sphere3d_is_a_flow(start, first, second):
    """Composition, oddness, and the differential equation dphi/dt = -sin(2 phi)/2."""
    both = sphere3d_angle(start, time=first + second)
    assert both == pytest.approx(sphere3d_angle(sphere3d_angle(start, time=first), time=second), abs=1e-12)
    assert both == pytest.approx(-sphere3d_angle(-start, time=first + second), abs=1e-15)
    rate = (sphere3d_angle(start, time=first + 1e-5) - sphere3d_angle(start, time=first)) / 1e-5
    here = float(sphere3d_angle(start, time=first))
    assert rate == pytest.approx(-math.sin(2 * here) / 2, abs=1e-4)
    assert float(flow_velocity([2 * math.tan(here)])[0]) == pytest.approx(-math.sin(2 * here) / 2, abs=1e-12)


@pytest.mark.parametrize(
    ("intrinsic", "error", "share"),
    [
        (4e-2, 0.127, 0.971),
        (1e-2, 0.0561, 0.992),
        (2.5e-3, 0.0260, 0.9985),
        (6.25e-4, 0.0125, 0.9994),
        (1.56e-4, 0.00612, 1.0),
    ],
)
def test_three_d_table(intrinsic, error, share):
    lr, z0 = 0.5, 0.8
    direction = np.array([math.sqrt(0.18)] * 2 + [z0]) + 1e-3 * math.sqrt(intrinsic / 2) * np.array([1, -1, 0])
    start = at_the_edge(direction, 6 / (1 - z0**2), lr=lr, intrinsic=intrinsic)
    steps = int(2 / intrinsic) + 1
    path = descend(three_d_gradient, start, lr=lr, intrinsic=intrinsic, steps=steps)
    unit = path / np.linalg.norm(path, axis=1, keepdims=True)
    angle = sphere3d_angle(math.asin(z0), time=np.arange(steps) * intrinsic)
    assert np.abs(unit[:, 2] - np.sin(angle)).max() == pytest.approx(error, rel=0.01)
    h_sq = (unit[:, 0] - unit[:, 1]) ** 2 / 2
    predicted = mean_square_displacement(math.sqrt(2 * intrinsic), grad_norm=2 * np.abs(np.tan(angle)))
    assert h_sq.mean() / predicted.mean() == pytest.approx(share, abs=4e-3)
    # The gradient has no z part: the raw height decays by c per step, exactly.
    assert path[:, 2] == pytest.approx(path[0, 2] * (1 - intrinsic) ** np.arange(steps), rel=1e-9)


# --- scalar RMSprop -----------------------------------------------------------------------------------------------


def valley_run(eta, c_b, steps):
    x, y, decay = 0.01 * eta, 2.0, 1 - c_b * eta**2
    moment, heights = (eta * 5 / 2) ** 2, np.empty(steps)
    for t in range(steps):
        heights[t] = y
        gx, gy = (1 + y * y) * x, y * x * x
        rate = eta / math.sqrt(moment)
        x, y, moment = x - rate * gx, y - rate * gy, decay * moment + (1 - decay) * (gx * gx + gy * gy)
    return heights


@pytest.mark.parametrize(
    ("c_b", "end", "errors"),
    [
        (0.25, 1.7384, {0.1: 0.064, 0.05: 0.032, 0.025: 0.016}),
        (1.0, 1.5302, {0.1: 0.172, 0.05: 0.091, 0.025: 0.037}),
        (2.0, 1.4534, {0.1: 0.39, 0.05: 0.32, 0.025: 0.097}),
        (4.0, 1.4033, {0.1: 1.68, 0.05: 0.90, 0.025: 0.21}),
    ],
)
def test_rmsprop_table(c_b, end, errors):
    knots = np.linspace(0, 3, 121)
    flow = [rmsprop_valley_position(2.0, time=t, c_b=c_b) for t in knots]
    assert flow[-1] == pytest.approx(end, abs=5e-5)
    for eta, error in errors.items():
        steps = round(3 / eta**2) + 1
        gap = np.abs(valley_run(eta, c_b, steps) - np.interp(np.arange(steps) * eta**2, knots, flow)).max()
        assert gap == pytest.approx(error, rel=0.04)


@pytest.mark.parametrize("c_b", [0.25, 1.0, 4.0])
def test_rmsprop_valley_against_ode(c_b):
    def velocity(_, y):
        g = 2 * y / (1 + y * y)
        return -g / (4 + 2 / c_b * g * g)

    reference = solve_ivp(velocity, (0, 3), [2.0], method="DOP853", rtol=1e-12, atol=1e-14)
    assert rmsprop_valley_position(2.0, time=3.0, c_b=c_b) == pytest.approx(reference.y[0, -1], abs=1e-10)
    slope_time = curve_time(2.0, 1.6, slope=lambda y: 2 * y / (1 + y * y), c_b=c_b)
    assert rmsprop_valley_position(2.0, time=slope_time, c_b=c_b) == pytest.approx(1.6, rel=1e-10)
    assert rmsprop_valley_position(2.0, time=0.0, c_b=c_b) == pytest.approx(2.0, rel=1e-12)


# --- linear regression with batch normalisation -------------------------------------------------------------------


def regression_data(seed, n=20, d=40):
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(d)
    truth /= np.linalg.norm(truth)
    inputs = rng.standard_normal((n, d)) * np.sqrt(np.arange(1, d + 1) / d)
    start = rng.standard_normal(d)
    return inputs, inputs @ truth + 0.1 * rng.standard_normal(), start / np.linalg.norm(start)


def regression_loss_gradient(inputs, targets, w):
    """Loss and gradient of mean (std(y) a/std(a) - (y - mean y))^2 with a the centred pre-activation."""
    centred, n = inputs - inputs.mean(0), len(targets)
    a = centred @ w
    spread = math.sqrt(a @ a / n)
    unit, scale = a / spread, targets.std()
    residual = scale * unit - (targets - targets.mean())
    pull = 2 * scale * residual / n
    return residual @ residual / n, centred.T @ ((pull - unit * (unit @ pull) / n) / spread)


def test_regression_gradient_by_differences():
    inputs, targets, w = regression_data(0)
    gradient = regression_loss_gradient(inputs, targets, w)[1]
    for e in 1e-6 * np.eye(40)[::7]:
        up, down = (regression_loss_gradient(inputs, targets, w + s * e)[0] for s in (1, -1))
        assert gradient @ e / 1e-6 == pytest.approx((up - down) / 2e-6, abs=1e-8)
    assert gradient @ w == pytest.approx(0, abs=1e-14)


def test_regression_geometry():
    """Least norm among interpolants by constrained minimisation; sharpness by differencing the gradient."""
    inputs, targets, _ = regression_data(3, n=6, d=9)
    flat = regression_geometry(inputs, targets)
    assert inputs @ flat.min_norm_weight + flat.bias == pytest.approx(targets, abs=1e-12)
    design = np.column_stack([inputs, np.ones(6)])
    best = minimize(
        lambda p: p[:-1] @ p[:-1], np.zeros(10), jac=lambda p: np.append(2 * p[:-1], 0.0), method="SLSQP",
        constraints={"type": "eq", "fun": lambda p: design @ p - targets, "jac": lambda p: design},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert flat.min_norm_weight == pytest.approx(best.x[:-1], abs=1e-5)
    theta = flat.min_norm_weight / np.linalg.norm(flat.min_norm_weight)
    columns = [
        (
            regression_loss_gradient(inputs, targets, theta + e)[1]
            - regression_loss_gradient(inputs, targets, theta - e)[1]
        )
        / 2e-5
        for e in 1e-5 * np.eye(9)
    ]
    spectrum = np.linalg.eigvalsh(np.array(columns))
    assert spectrum[-1] == pytest.approx(flat.min_sharpness, rel=1e-7)
    assert np.sum(spectrum > 1e-6 * spectrum[-1]) == 6 - 2


def test_regression_flow_against_ode():
    """Integrate eq. (3) in the null space with lambda1 proportional to |w*|^2 + |v|^2, on the sphere of directions.

    On the manifold theta = w/|w| with w = w* + v, lambda1 = 2|w|^2 lambda1(S - zz^T): integrate numerically in theta.
    """
    inputs, targets, w0 = regression_data(5, n=4, d=6)
    flat = regression_geometry(inputs, targets)
    star = flat.min_norm_weight
    centred = inputs - inputs.mean(0)
    null = np.eye(6) - np.linalg.pinv(centred) @ centred
    start = regression_flow(inputs, targets, weight=w0, time=0.0).weight
    assert centred @ start == pytest.approx(targets - targets.mean(), abs=1e-12)
    axis = star / np.linalg.norm(star)

    def gradient(theta):
        # lambda1 = const/<theta, axis>^2 on the manifold {null directions + axis}.
        return -2 * axis / (theta @ axis)

    def project(theta, vector):
        kept = null @ vector + axis * (axis @ vector)
        return kept - theta * (theta @ kept)

    path = integrate_flow(
        gradient,
        start / np.linalg.norm(start),
        times=[0.0, 1.5],
        project=project,
        retract=lambda p: p / np.linalg.norm(p),
    )
    state = regression_flow(inputs, targets, weight=w0, time=1.5)
    assert path.points[-1] == pytest.approx(state.weight / np.linalg.norm(state.weight), abs=1e-8)
    begin = regression_flow(inputs, targets, weight=w0, time=0.0)
    assert path.log_sharpness[-1] == pytest.approx(math.log(state.sharpness / begin.sharpness), abs=1e-8)
    assert np.linalg.norm(project(path.points[-1], gradient(path.points[-1]))) == pytest.approx(
        state.grad_norm, abs=1e-7
    )
    assert state.sharpness == pytest.approx(2 * (state.weight @ state.weight) * flat.min_sharpness / (2 * star @ star))


@pytest.fixture(scope="module")
def regression_run():
    """40 000 steps as in Appendix Q.2: lr = 0.5, wd = 2e-4."""
    inputs, targets, w = regression_data(1)
    lr, wd, steps = 0.5, 2e-4, 40_000
    centred, n = inputs - inputs.mean(0), len(targets)
    scale, wanted = targets.std(), targets - targets.mean()
    weights, losses = np.empty((steps, 40)), np.empty(steps)
    for t in range(steps):
        weights[t] = w
        a = centred @ w
        spread = math.sqrt(a @ a / n)
        unit = a / spread
        residual = scale * unit - wanted
        losses[t] = residual @ residual / n
        pull = 2 * scale / n * residual
        w = (1 - lr * wd) * w - lr * (centred.T @ ((pull - unit * (unit @ pull) / n) / spread))
    return inputs, targets, weights, losses


def test_regression_run(regression_run):
    inputs, targets, weights, losses = regression_run
    lr, intrinsic = 0.5, 1e-4
    centred = inputs - inputs.mean(0)
    null = np.eye(40) - np.linalg.pinv(centred) @ centred
    flat = regression_geometry(inputs, targets)
    norm_sq = (weights**2).sum(1)

    # The null-space part only ever decays by c.
    decay = (1 - intrinsic) ** np.arange(len(weights))
    hidden = np.linalg.norm(weights @ null, axis=1)
    assert hidden == pytest.approx(hidden[0] * decay, rel=1e-10)

    # Crossing, predicted from a step after the loss has collapsed.
    settled = int(np.argmax(losses < 1e-12))
    sharpness = regression_flow(inputs, targets, weight=weights[settled], time=0.0).sharpness
    predicted = float(
        crossing_time(lr / ((1 - intrinsic) * norm_sq[settled]), sharpness, intrinsic_lr=intrinsic, start=settled)
    )
    ratio = lr / ((1 - intrinsic) * norm_sq) * sharpness / 2
    crossed = settled + int(np.argmax(ratio[settled:] >= 1))
    assert crossed == pytest.approx(predicted, abs=1.5)
    visible = crossed + int(np.argmax(losses[crossed:] > 1e-6))
    assert visible - crossed > 100

    # The flow runs from the crossing, not from the visible burst; compare null-space parts.
    final = len(weights) - 1
    spread = (centred @ weights[final]).std()
    distance = np.linalg.norm(weights[final] @ null) * targets.std() / spread
    from_crossing = regression_flow(inputs, targets, weight=weights[crossed], time=(final - crossed) * intrinsic)
    from_burst = regression_flow(inputs, targets, weight=weights[crossed], time=(final - visible) * intrinsic)
    assert distance == pytest.approx(from_crossing.distance, rel=3e-3)
    assert abs(from_burst.distance / distance - 1) > 5 * abs(from_crossing.distance / distance - 1)
    assert np.linalg.norm(weights[final] * targets.std() / spread - flat.min_norm_weight) > 1.05 * distance

    # The loss level is the same all along the flow, eta_in lambda1*/4.
    level = float(edge_of_stability(lr, intrinsic / lr, sharpness=flat.min_sharpness).loss_above_minimum)
    assert level == pytest.approx(intrinsic * flat.min_sharpness / 4, rel=1e-12)
    assert losses[-10_000:].mean() == pytest.approx(level, rel=2e-3)
    middle = slice(visible + 5000, visible + 15_000)
    assert losses[middle].mean() == pytest.approx(level, rel=0.02)
    halfway = regression_flow(inputs, targets, weight=weights[crossed], time=(visible + 10_000 - crossed) * intrinsic)
    assert halfway.grad_norm > 0.2
    here = edge_of_stability(lr, intrinsic / lr, sharpness=halfway.sharpness, grad_norm=halfway.grad_norm)
    assert float(here.loss_above_minimum) == pytest.approx(level, rel=1e-9)
    assert norm_sq[middle].mean() == pytest.approx(float(here.norm_sq), rel=0.02)

    # Steps to a tolerance, counted from the crossing.
    gap = regression_flow(inputs, targets, weight=weights[crossed], time=0.0).distance
    reach = float(gap_closing_step(gap, distance, intrinsic_lr=intrinsic, crossing=crossed))
    assert reach == pytest.approx(final, rel=1e-3)


def test_regression_periods(regression_run):
    """High energy at the start makes long periods; damping brings them down to pi/sqrt(2 lr wd) = 222 steps."""
    inputs, targets, weights, losses = regression_run
    lr, intrinsic = 0.5, 1e-4
    centred = inputs - inputs.mean(0)
    # At the foot point the row-space part lies along w*, so the ratio is lr lambda1*/(2 c |row part|^2).
    row_sq = ((weights @ np.linalg.pinv(centred) @ centred) ** 2).sum(1)
    ratio = lr * regression_geometry(inputs, targets).min_sharpness / (2 * (1 - intrinsic) * row_sq)
    settled = int(np.argmax(losses < 1e-12))
    periods = np.diff(ratio_crossings(ratio[settled:]).downward)
    small = float(period_steps(intrinsic))
    assert small == pytest.approx(222, abs=0.5)
    assert periods[0] > 1.7 * small
    assert periods[0] > periods[1] > periods[2]
    assert periods[-5:].mean() == pytest.approx(small, rel=0.05)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), k=st.floats(0.01, 100), first=st.floats(0, 3), second=st.floats(0, 3))
def test_regression_flow_composes_and_ignores_scale(seed, k, first, second):
    inputs, targets, w = regression_data(seed, n=5, d=8)
    whole = regression_flow(inputs, targets, weight=k * w, time=first + second)
    part = regression_flow(inputs, targets, weight=w, time=first)
    again = regression_flow(inputs, targets, weight=part.weight, time=second)
    assert again.weight == pytest.approx(whole.weight, rel=1e-6, abs=1e-9)
    assert again.sharpness == pytest.approx(whole.sharpness, rel=1e-8)
    assert whole.sharpness >= regression_geometry(inputs, targets).min_sharpness


def test_steps_to_tolerance():
    steps = gap_closing_step([1.0, 0.5, 0.01], 0.02, intrinsic_lr=1e-4, crossing=100)
    assert steps[2] == 100
    left = np.array([1.0, 0.5]) * (1 - 1e-4) ** (steps[:2] - 100)
    assert left == pytest.approx([0.02, 0.02], rel=1e-12)


# --- errors -------------------------------------------------------------------------------------------------------

INPUTS, TARGETS = [[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: sphere3d_angle(1.6, time=1.0),
        lambda: sphere3d_angle(1.0, time=-1.0),
        lambda: rmsprop_valley_position(0.0, time=1.0, c_b=1.0),
        lambda: rmsprop_valley_position(1.0, time=math.nan, c_b=1.0),
        lambda: regression_geometry(INPUTS, [1.0, 1.0]),
        lambda: regression_geometry(INPUTS, [1.0, 0.0, 2.0]),
        lambda: regression_geometry([[1.0], [2.0], [4.0]], [1.0, 2.0, 0.0]),
        lambda: regression_flow(INPUTS, TARGETS, weight=[1.0, 1.0], time=0.0),
        lambda: regression_flow(INPUTS, TARGETS, weight=[1.0], time=0.0),
        lambda: regression_flow(INPUTS, TARGETS, weight=[1.0, 0.0], time=-1.0),
        lambda: gap_closing_step(0.0, 0.1, intrinsic_lr=0.1),
        lambda: gap_closing_step(1.0, "small", intrinsic_lr=0.1),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
