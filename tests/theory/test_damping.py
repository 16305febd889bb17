"""Damping of the slow oscillation against Jacobians of brute-force two-step maps and simulated energies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import fsolve

from equilibria.errors import EquilibriaError
from equilibria.theory.damping import (
    full_space_energy_rate,
    sphere_anharmonicity,
    sphere_energy_rate,
    stability_offset,
    two_cycle_angle,
)
from equilibria.theory.hamiltonian import energy, period_steps, rest_point


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
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
