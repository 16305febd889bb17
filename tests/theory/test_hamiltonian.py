"""The slow oscillation against ODE solutions, the literal RMS-drift map and true dynamics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.optimize import fsolve
from scipy.special import lambertw

from equilibria.errors import EquilibriaError
from equilibria.theory.hamiltonian import (
    energy,
    full_space_energy_rate,
    mean_square_displacement,
    orbit,
    period_steps,
    potential,
    rest_point,
    rms_drift,
    sphere_anharmonicity,
    sphere_energy_rate,
    stability_offset,
    two_cycle_angle,
)

FIGURE_5 = {"grad_norm": math.sqrt(2), "c_b": 1.0}  # K = 2, C_b = 1


def ode(time, state, coupling, c_b):
    """Eq. (17): position x = log|h| and offset u; third entry integrates h^2."""
    x, u, _ = state
    return [-u, 2 * coupling * math.exp(2 * x) - c_b, math.exp(2 * x)]


def one_period(excess, grad_norm, c_b):
    """Start at the outer turning point (u = 0) and integrate until u falls through 0 again from above."""
    coupling = 2 * c_b + grad_norm**2
    start = math.log(orbit(excess, grad_norm=grad_norm, c_b=c_b).largest)

    def returned(time, state, *_):
        return state[1]

    returned.direction = 1.0
    solution = solve_ivp(
        ode, (0, 100), [start, 0.0, 0.0], args=(coupling, c_b), method="DOP853", rtol=1e-12, atol=1e-14,
        events=returned, dense_output=False,
    )  # fmt: skip
    times = solution.t_events[0]
    index = int(np.argmax(times > 1e-3))
    return times[index], solution.y_events[0][index], solution


# --- the well ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("excess", "period", "smallest", "largest", "fastest"),
    [
        (0.1, 4.517224, 0.24830, 0.470671, 0.4472),
        (0.5, 4.818838, 0.1408, 0.627116, 1.0000),
        (1.0, 5.198546, 0.080985, 0.750437, 1.4142),
        (2.0, 5.933974, 0.02912, 0.931185, 2.0000),
        (5.0, 7.794842, 1.445e-3, 1.304361, 3.1623),
        (10.0, 10.133480, 9.74e-6, 1.738741, 4.4721),
    ],
)
def test_figure_5_table(excess, period, smallest, largest, fastest):
    result = orbit(excess, **FIGURE_5)
    assert float(result.period) == pytest.approx(period, abs=5.1e-7)
    assert float(result.smallest) == pytest.approx(smallest, rel=5e-4)
    assert float(result.largest) == pytest.approx(largest, abs=5.1e-7)
    assert float(result.fastest) == pytest.approx(fastest, abs=5.1e-5)


def test_figure_5_rest_point():
    rest = rest_point(**FIGURE_5)
    assert float(rest.displacement) == pytest.approx(0.353553, abs=5e-7)
    assert float(rest.position) == pytest.approx(-1.039721, abs=5e-7)
    assert float(rest.energy) == pytest.approx(1.539721, abs=5e-7)
    assert float(rest.period) == pytest.approx(4.442883, abs=5e-7)


@pytest.mark.parametrize(
    ("excess", "grad_norm", "c_b"), [(0.01, 0.0, 2.0), (0.7, 1.3, 2.0), (3.0, 1.4142, 1.0), (4.0, 0.5, 0.25)]
)
def test_orbit_against_ode(excess, grad_norm, c_b):
    result = orbit(excess, grad_norm=grad_norm, c_b=c_b)
    period, end, solution = one_period(excess, grad_norm, c_b)
    assert float(result.period) == pytest.approx(period, rel=1e-9)
    within_period = solution.t <= period
    assert np.exp(solution.y[0, within_period].min()) >= float(result.smallest) * (1 - 1e-9)
    # The average of h^2 over the orbit is that of the rest point, at every energy.
    assert end[2] / period == pytest.approx(float(rest_point(grad_norm, c_b).displacement) ** 2, rel=1e-8)
    energies = energy(np.exp(solution.y[0]), solution.y[1], grad_norm=grad_norm, c_b=c_b)
    expected = float(rest_point(grad_norm, c_b).energy) + excess
    assert energies == pytest.approx(np.full_like(energies, expected), abs=1e-8)


@settings(deadline=None, max_examples=60)
@given(excess=st.floats(1e-4, 200), grad_norm=st.floats(0, 5), c_b=st.floats(0.1, 10))
def test_turning_points_are_lambert_w(excess, grad_norm, c_b):
    result, rest = orbit(excess, grad_norm=grad_norm, c_b=c_b), rest_point(grad_norm, c_b)
    argument = -np.exp(-1 - 2 * excess / c_b)
    if argument == 0:
        return
    for value, branch in ((result.smallest, 0), (result.largest, -1)):
        square = float(rest.displacement) ** 2 * -lambertw(argument, branch).real
        assert float(value) ** 2 == pytest.approx(square, rel=1e-7)
        if value > 0:
            level = float(rest.energy) + excess
            assert float(energy(value, 0.0, grad_norm=grad_norm, c_b=c_b)) == pytest.approx(level, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(excess=st.floats(1e-3, 50), c_b=st.floats(0.1, 10), g1=st.floats(0, 5), g2=st.floats(0, 5))
def test_period_scaling(excess, c_b, g1, g2):
    """The period does not feel g, and is homogeneous: T(E, c_b) = T(E/c_b, 1)/sqrt(c_b)."""
    period = float(orbit(excess, grad_norm=g1, c_b=c_b).period)
    assert period == pytest.approx(float(orbit(excess, grad_norm=g2, c_b=c_b).period), rel=1e-12)
    assert period == pytest.approx(float(orbit(excess / c_b, c_b=1.0).period) / math.sqrt(c_b), rel=1e-10)


def test_period_limits():
    assert float(orbit(1e-12, c_b=1.0).period) == pytest.approx(2 * math.pi / math.sqrt(2), rel=1e-11)
    # Next order in the amplitude: T = T0 (1 + E/(6 c_b)).
    excess = np.array([1e-3, 1e-4])
    growth = orbit(excess, c_b=1.0).period / (2 * math.pi / math.sqrt(2)) - 1
    assert growth / excess == pytest.approx([1 / 6, 1 / 6], rel=2e-3)
    # A ball thrown against a wall: 2 sqrt(2E)/c_b, with a remainder of 12.6 against 13.6 at E = 20.
    assert float(orbit(20.0, c_b=1.0).period) == pytest.approx(13.6, abs=0.05)
    assert float(orbit(1e6, c_b=2.0).period) == pytest.approx(math.sqrt(2e6), rel=1e-4)


def test_potential_minimum_by_search():
    grid = np.linspace(-3, 1, 400_001)
    values = potential(grid, grad_norm=1.7, c_b=1.3)
    rest = rest_point(1.7, 1.3)
    assert grid[values.argmin()] == pytest.approx(float(rest.position), abs=1e-5)
    assert values.min() == pytest.approx(float(rest.energy), abs=1e-9)


def test_gradient_descent_constants():
    assert float(mean_square_displacement(math.sqrt(2e-3), grad_norm=1.5)) == pytest.approx(2e-3 / (4 + 2.25))
    assert float(period_steps(1e-4)) == pytest.approx(float(rest_point().period) / math.sqrt(2e-4))
    assert period_steps([1e-4, 1e-3, 1e-2]).round().tolist() == [222, 70, 22]


# --- the RMS-drift map ------------------------------------------------------------------------------------------


def literal_drift(h, u, *, pairs, eta, coupling, c_b):
    """Definition H.2 as printed, iterated."""
    path = np.empty((pairs + 1, 2))
    path[0] = h, u
    for t in range(pairs):
        h, u = (1 - 2 * eta * u) * h, u + 4 * eta * h * h * coupling - 2 * eta * c_b
        path[t + 1] = h, u
    return path


@pytest.mark.parametrize(("eta", "c_b"), [(0.01, 1.0), (0.005, 1.0), (0.01, 2.0)])
def test_literal_map_gains_energy_at_the_stated_rate(eta, c_b):
    rest = rest_point(0.0, c_b)
    pairs = int(0.5 / (2 * eta**2))  # flow time 1/2
    path = literal_drift(float(rest.displacement) * 1.01, 0.0, pairs=pairs, eta=eta, coupling=2 * c_b, c_b=c_b)
    excess = energy(path[:, 0], path[:, 1], c_b=c_b) - rest.energy
    cycle = round(float(rest.period) / (2 * eta))
    smooth = np.convolve(excess, np.full(cycle, 1 / cycle), mode="valid")
    rate = np.polyfit(np.arange(len(smooth)) * 2 * eta**2, np.log(smooth), 1)[0]
    assert rate == pytest.approx(4 * c_b, rel=0.02)


def test_literal_map_explodes_and_symplectic_map_does_not():
    eta, pairs = 0.01, 10_000  # flow time 2
    start = float(orbit(1.0, **FIGURE_5).largest)
    literal = literal_drift(start, 0.0, pairs=pairs, eta=eta, coupling=4.0, c_b=1.0)
    drifted = energy(literal[:, 0], literal[:, 1], **FIGURE_5)
    assert drifted[-1] - drifted[0] > 100
    path = rms_drift(start, 0.0, pairs=pairs, eta=eta, **FIGURE_5)
    conserved = energy(path.displacement, path.offset, **FIGURE_5)
    assert np.abs(conserved - conserved[0]).max() < 0.03


def test_symplectic_map_is_a_transition_of_the_definition():
    """It differs from the printed one-step form by O(eta^2), so it satisfies Definition H.2's error terms."""
    gaps = []
    for eta in (1e-2, 1e-3):
        path = rms_drift(0.6, 0.8, pairs=1, eta=eta, grad_norm=1.0, c_b=2.0)
        literal = literal_drift(0.6, 0.8, pairs=1, eta=eta, coupling=5.0, c_b=2.0)[1]
        gaps.append(max(abs(path.displacement[1] - literal[0]), abs(path.offset[1] - literal[1])))
    assert gaps[1] == pytest.approx(gaps[0] / 100, rel=0.05)
    # Frozen u solves to an exponential: h keeps its sign however large the step, where 1 - 2 eta u would flip it.
    assert rms_drift(0.5, 2.0, pairs=1, eta=0.5).displacement[1] == pytest.approx(0.5 * math.exp(-2), rel=1e-14)


@settings(deadline=None, max_examples=25)
@given(excess=st.floats(0.01, 3), grad_norm=st.floats(0, 3), c_b=st.floats(0.5, 4), sign=st.sampled_from([-1, 1]))
def test_symplectic_energy_is_bounded(excess, grad_norm, c_b, sign):
    start = sign * float(orbit(excess, grad_norm=grad_norm, c_b=c_b).largest)
    eta = 0.005
    path = rms_drift(start, 0.0, pairs=4000, eta=eta, grad_norm=grad_norm, c_b=c_b)
    energies = energy(path.displacement, path.offset, grad_norm=grad_norm, c_b=c_b)
    # A symplectic map of step 2 eta conserves a nearby energy: the error is eta times u times the force.
    bound = 6 * eta * math.sqrt(2 * excess) * 2 * (2 * c_b + grad_norm**2) * start**2
    assert np.abs(energies - energies[0]).max() < bound
    assert np.all(np.sign(path.displacement) == sign)


@settings(deadline=None, max_examples=50)
@given(x=st.floats(-3, 1), u=st.floats(-3, 3), eta=st.floats(0.01, 0.3), grad_norm=st.floats(0, 2))
def test_map_preserves_area(x, u, eta, grad_norm):
    """Symplectic: the Jacobian in (log h, u), by differences, has determinant 1."""

    def step(position, offset):
        path = rms_drift(math.exp(position), offset, pairs=1, eta=eta, grad_norm=grad_norm)
        return np.array([math.log(path.displacement[1]), path.offset[1]])

    by_x = (step(x + 1e-5, u) - step(x - 1e-5, u)) / 2e-5
    by_u = (step(x, u + 1e-5) - step(x, u - 1e-5)) / 2e-5
    scale = max(1.0, np.abs(by_x).max() * np.abs(by_u).max())
    assert by_x[0] * by_u[1] - by_x[1] * by_u[0] == pytest.approx(1, abs=1e-7 * scale)


def test_drift_path_broadcasts_and_averages():
    start = np.array([0.3, -0.5, 0.9])
    path = rms_drift(start, 0.0, pairs=40_000, eta=0.01, grad_norm=1.0)
    assert path.displacement.shape == (40_001, 3)
    alone = rms_drift(0.9, 0.0, pairs=50, eta=0.01, grad_norm=1.0)
    assert path.displacement[:51, 2] == pytest.approx(alone.displacement, rel=1e-12)
    # 2 eta^2 h^2 per pair is 2 <h^2> per pair: twice the unscaled mean square.
    assert path.descent.mean(axis=0) == pytest.approx(
        np.full(3, 2 * float(mean_square_displacement(0.01, grad_norm=1.0))), rel=5e-3
    )


# --- true dynamics: scalar RMSprop on 0.5 (1 + y^2) x^2, and the 3-D example ----------------------------------------


def valley_run(eta, c_b, steps, x=None, y=2.0):
    decay = 1 - c_b * eta**2
    x = 0.3 * eta if x is None else x
    moment = (eta * (1 + y * y) / 2) ** 2
    path = np.empty((steps, 3))
    for t in range(steps):
        path[t] = x, y, moment
        gx, gy = (1 + y * y) * x, y * x * x
        rate = eta / math.sqrt(moment)
        x, y, moment = x - rate * gx, y - rate * gy, decay * moment + (1 - decay) * (gx * gx + gy * gy)
    return path


def valley_foot(x, y):
    """Gradient-flow projection: ln y + y^2/2 - x^2/2 is conserved; solve for y at x = 0 by Newton's method."""
    level, foot = np.log(y) + y**2 / 2 - x**2 / 2, y.copy()
    for _ in range(30):
        foot -= (np.log(foot) + foot**2 / 2 - level) / (1 / foot + foot)
    return foot


@pytest.mark.parametrize(("eta", "accuracy"), [(0.02, 2e-3), (0.005, 5e-4)])
def test_two_step_drift_is_minus_two(eta, accuracy):
    """Regression of the move of the foot point on h^2 grad log lambda1: -2, not -4 (Section 4.2.3)."""
    path = valley_run(eta, 1.0, 6000)
    x, y = path[:, 0], path[:, 1]
    foot = valley_foot(x, y)
    h_sq = (x[:-1] ** 2 + x[1:] ** 2) / 2
    drive = h_sq[:-1] * (2 * foot / (1 + foot**2))[:-2]
    move = foot[2:] - foot[:-2]
    assert (move @ drive) / (drive @ drive) == pytest.approx(-2, abs=accuracy)


def three_d_run(intrinsic, steps, z0=0.8):
    """GD with weight decay on 2 - (x+y)/sqrt(x^2-xy+y^2) from R = 1, pushed across the valley.

    Rows: unscaled displacement, height z on the sphere, effective learning rate.
    """
    lr, c = 0.5, 1 - intrinsic
    radius = math.sqrt((1 - z0**2) / 2)
    push = 0.1 * math.sqrt(intrinsic / 2)
    w = np.array([radius + push, radius - push, z0]) * math.sqrt(lr * 3 / (1 - z0**2) / c)
    path = np.empty((steps, 3))
    for t in range(steps):
        (x, y, z), norm_sq = w, w @ w
        path[t] = (x - y) / math.sqrt(2 * norm_sq), z / math.sqrt(norm_sq), lr / (c * norm_sq)
        q = x * x - x * y + y * y
        pull = (x + y) / (2 * q)
        gradient = np.array([pull * (2 * x - y) - 1, pull * (2 * y - x) - 1, 0]) / math.sqrt(q)
        w = c * w - lr * gradient
    return path


def test_residuals_of_the_definition_in_true_dynamics():
    """One transition of Definition H.2 leaves O(eta^2), O(eta^2), O(eta^3), with the same constants at every eta."""
    for intrinsic in (1e-2, 1e-3, 1e-4):
        eta = math.sqrt(2 * intrinsic)
        h, z, rate = three_d_run(intrinsic, int(2 / intrinsic)).T
        h, top = h / eta, 6 / (1 - z**2)
        u = ((2 / (top * rate)) ** 2 - 1) / eta
        angle, g = np.arcsin(z), 2 * z / np.sqrt(1 - z**2)
        dh = h[2:] - (1 - 2 * eta * u[:-2]) * h[:-2]
        du = u[2:] - (u[:-2] + 4 * eta * h[:-2] ** 2 * (4 + g[:-2] ** 2) - 4 * eta)
        dphi = angle[2:] - (angle[:-2] - 2 * eta**2 * h[:-2] ** 2 * g[:-2])
        assert np.abs(dh).max() < 16 * eta**2
        assert np.abs(du).max() < 25 * eta**2
        assert np.abs(dphi).max() < 4.5 * eta**3


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: orbit(0.0),
        lambda: orbit(math.nan),
        lambda: orbit(1.0, c_b=-1.0),
        lambda: orbit(1.0, grad_norm=-0.1),
        lambda: energy(0.0, 1.0),
        lambda: energy(1.0, math.inf),
        lambda: potential("deep"),
        lambda: rest_point(math.nan),
        lambda: rms_drift(0.0, 0.0, pairs=3, eta=0.1),
        lambda: rms_drift(1.0, 0.0, pairs=0, eta=0.1),
        lambda: rms_drift(1.0, 0.0, pairs=2.5, eta=0.1),
        lambda: rms_drift(1.0, 0.0, pairs=2, eta=-0.1),
        lambda: period_steps(0.0),
        lambda: period_steps([0.1, 1.0]),
        lambda: mean_square_displacement(0.0),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()


# ---- damping


def three_d_slope(angle):
    """Slope of 2 - (x+y)/sqrt(x^2-xy+y^2) over the angle from the diagonal, at z = 0."""
    q = 1 - np.cos(2 * angle) / 2
    return math.sqrt(2) * (np.sin(angle) / np.sqrt(q) + np.cos(angle) * np.sin(2 * angle) / (2 * q**1.5))


def polynomial(p2, p3):
    return lambda a: a + p2 * a * a + p3 * a**3


PROFILES = {  # name: slope, lambda1, p2, p3
    "3-D example": (three_d_slope, 6.0, 0.0, -19 / 6),
    "normalised quadratic": (lambda a: np.sin(2 * a) / 2, 1.0, 0.0, -2 / 3),
    "p3=-2": (polynomial(0, -2), 1.0, 0.0, -2.0),
    "harmonic": (polynomial(0, 0), 1.0, 0.0, 0.0),
    "p2=1": (polynomial(1, 0), 1.0, 1.0, 0.0),
    "p2=p3=1": (polynomial(1, 1), 1.0, 1.0, 1.0),
}
RATES = {
    "3-D example": -5,
    "normalised quadratic": 0,
    "p3=-2": -8 / 3,
    "harmonic": 4 / 3,
    "p2=1": -8 / 3,
    "p2=p3=1": -2 / 3,
}


def sphere_step(angle, log_eta, intrinsic, slope):
    """Exact GD with weight decay in a plane: turn by arctan(eta slope), then the norm recursion."""
    push = math.exp(log_eta) * slope(angle)
    return angle - math.atan(push), log_eta - 2 * math.log1p(-intrinsic) - math.log1p(push * push)


def fixed_point_and_determinant(two_steps, guess):
    point = fsolve(lambda s: np.subtract(two_steps(s), s), guess, xtol=1e-12)
    jacobian = np.empty((2, 2))
    for i in range(2):
        bump = 1e-6 * np.eye(2)[i]
        jacobian[:, i] = np.subtract(two_steps(point + bump), two_steps(point - bump)) / 2e-6
    return point, np.linalg.det(jacobian)


@pytest.mark.parametrize("name", PROFILES)
def test_sphere_rate_and_offset_from_the_jacobian(name):
    """log det of the two-step Jacobian at the 2-cycle is the rate of the squared amplitude, up to O(lr*wd)."""
    slope, top, p2, p3 = PROFILES[name]
    intrinsic = 1e-4

    def two_steps(state):
        return sphere_step(*sphere_step(*state, intrinsic, slope), intrinsic, slope)

    point, determinant = fixed_point_and_determinant(two_steps, [math.sqrt(intrinsic / 2), math.log(2 / top)])
    rate = math.log(determinant) / (2 * intrinsic)
    assert rate == pytest.approx(float(sphere_energy_rate(p2, p3)), abs=3e-3)
    assert float(sphere_energy_rate(p2, p3)) == pytest.approx(RATES[name], abs=1e-12)
    shift = math.exp(point[1]) * top / 2 - 1
    assert shift == pytest.approx(float(stability_offset(intrinsic, quadratic=p2, cubic=p3)) - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "intrinsic", "measured"),
    [
        ("harmonic", 1e-3, 1.322),
        ("harmonic", 1e-4, 1.327),
        ("p3=-2", 1e-4, -2.635),
        ("normalised quadratic", 1e-4, 0.001),
    ],
)
def test_simulated_energy_rate(name, intrinsic, measured):
    """Finite oscillation over flow time 1: the energy, averaged over periods, follows the linear rate closely."""
    slope, top, p2, p3 = PROFILES[name]
    eta, angle, log_eta = math.sqrt(2 * intrinsic), 1.2 * math.sqrt(intrinsic / 2), math.log(2 / top)
    path = np.empty((int(1 / intrinsic), 2))
    for t in range(len(path)):
        path[t] = angle / eta, ((2 / (top * math.exp(log_eta))) ** 2 - 1) / eta
        angle, log_eta = sphere_step(angle, log_eta, intrinsic, slope)
    excess = energy(path[:, 0], path[:, 1]) - rest_point().energy
    cycle = round(float(period_steps(intrinsic)))
    count = len(excess) // cycle
    means = excess[: count * cycle].reshape(count, cycle).mean(1)
    rate = np.polyfit(np.arange(count) * cycle * intrinsic, np.log(means), 1)[0]
    assert rate == pytest.approx(measured, abs=0.03)
    assert rate == pytest.approx(float(sphere_energy_rate(p2, p3)), abs=0.06)


@pytest.mark.parametrize(
    ("c_b", "p2", "p3", "rate"),
    [
        (1, 0, 0, 1),
        (2, 0, 0, 2),
        (4, 0, 0, 4),
        (2, 0, -2, 0),
        (2, 0, -4, -2),
        (2, 0, -6, -4),
        (2, 1, 0, 0),
        (1, 0.5, 1, 1.5),
    ],
)
def test_full_space_rate_from_the_jacobian(c_b, p2, p3, rate):
    eta = 0.005
    decay, slope = 1 - c_b * eta**2, polynomial(p2, p3)

    def two_steps(state):
        x, log_moment = state
        moment = math.exp(log_moment)
        for _ in range(2):
            g = slope(x)
            x, moment = x - eta * g / math.sqrt(moment), decay * moment + (1 - decay) * g * g
        return x, math.log(moment)

    _, determinant = fixed_point_and_determinant(two_steps, [eta / 2, 2 * math.log(eta / 2)])
    assert math.log(determinant) / (2 * eta**2) == pytest.approx(rate, abs=2e-3)
    assert float(full_space_energy_rate(p2, p3, c_b=c_b)) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    ("cubic", "predicted", "simulated"),
    [(-19 / 6, 1.0225, 1.02272), (4 / 3 - 2.2, 1.0110, 1.01112)],  # q = -9 (3-D example) and q = -4.4
)
def test_offset_table(cubic, predicted, simulated):
    assert float(stability_offset(0.01, cubic=cubic)) == pytest.approx(predicted, abs=5e-5)
    assert float(sphere_anharmonicity(cubic=cubic)) == pytest.approx(4 * 100 * (1 - predicted), rel=1e-9)
    slope, top = (three_d_slope, 6.0) if cubic == -19 / 6 else (polynomial(0, cubic), 1.0)
    angle = float(two_cycle_angle(0.01))
    # At the 2-cycle eta*slope = tan(2 angle), which fixes R.
    ratio = math.tan(2 * angle) / slope(angle) * top / 2
    assert ratio == pytest.approx(simulated, abs=6e-6)


@pytest.mark.parametrize("intrinsic", [0.04, 0.01])
@pytest.mark.parametrize("name", ["3-D example", "p3=-2"])
def test_exact_two_cycle(name, intrinsic):
    slope, top, _, _ = PROFILES[name]
    angle, log_eta = 0.9 * math.sqrt(intrinsic / 2), math.log(2 / top)
    for _ in range(40_000):
        angle, log_eta = sphere_step(angle, log_eta, intrinsic, slope)
    assert math.sin(angle) ** 2 == pytest.approx(intrinsic / 2, rel=1e-10)
    assert abs(angle) == pytest.approx(float(two_cycle_angle(intrinsic)), rel=1e-10)


def test_papers_run_ends_in_the_two_cycle():
    """Appendix F: lr*wd = 0.04 ends in (0.8, 0.6, 0) <-> (0.6, 0.8, 0), loss 5.85e-2, 2/eta = 5.486."""
    angle = float(two_cycle_angle(0.04))
    assert math.cos(math.pi / 4 - angle) == pytest.approx(0.8, rel=1e-12)
    loss = 2 - math.sqrt(2) * math.cos(angle) / math.sqrt(1 - math.cos(2 * angle) / 2)
    assert loss == pytest.approx(5.85e-2, abs=5e-5)
    assert 2 * three_d_slope(angle) / math.tan(2 * angle) == pytest.approx(5.486, abs=5e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: two_cycle_angle(-0.1),
        lambda: stability_offset(2.0),
        lambda: sphere_anharmonicity(math.nan),
        lambda: full_space_energy_rate(c_b=0.0),
    ],
)
def test_bad_input_of_the_damping_laws(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
