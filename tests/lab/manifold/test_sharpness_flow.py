"""The sharpness-reduction flow of general losses against closed forms, an independent solver, and training itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from tests.helpers.edge_runs import at_the_edge
from tests.helpers.minimiser_worlds import (
    Regression,
    curved,
    curved_gradient_by_differences,
    curved_log_sharpness,
    meridian,
    on_three_d,
    onto_curved,
    three_d,
    train,
    valley,
    world,
)

import equilibria as eq
from equilibria.lab.manifold import decompose, sharpness_flow
from equilibria.theory.flow_examples import regression_flow, rmsprop_valley_position, sphere3d_angle

# The integrator's rtol is 1e-8 per step, and it takes some tens of them.
ACCURACY = 1e-7


def test_three_d_closed_form_until_it_rests():
    """tan(angle) = tan(angle_0) exp(-time); slope 2 tan(angle) is 0.1 after ln(20 tan(angle_0))."""
    result = sharpness_flow(world(three_d, *on_three_d(0.8)), None, times=[0, 1, 2, 50], grad_tol=0.1)
    rest = math.log(20 * (0.8 / 0.6))
    assert result.time == pytest.approx([0, 1, 2, rest], rel=1e-5)
    angles = np.arcsin(result.points["w"][:, 2].numpy())
    assert angles == pytest.approx(sphere3d_angle(math.asin(0.8), time=result.time), abs=ACCURACY)
    assert result.sharpness == pytest.approx(6 / np.cos(angles) ** 2, rel=1e-9)
    assert result.grad_norm == pytest.approx(2 * np.tan(angles), rel=1e-6)
    assert result.converged and result.reason.startswith("came to rest at time 3.283")


@pytest.mark.slow
def test_meridian_after_time_two():
    result = sharpness_flow(world(meridian, 0.0, math.sin(1.2), math.cos(1.2)), None, times=[2.0])
    assert math.asin(float(result.points["w"][0, 1])) == pytest.approx(0.302800, abs=5e-7)
    assert not result.converged and result.reason == "reached the last time, 2"


@pytest.mark.parametrize("c_b", [0.25, 1.0, 2.0, 4.0])
def test_valley_of_scalar_rmsprop(c_b):
    result = sharpness_flow(world(valley, 0.0, 2.0), None, times=[3.0], spherical=False, c_b=c_b)
    expected = rmsprop_valley_position(2.0, time=3.0, c_b=c_b)
    assert result.points["w"][0].numpy() == pytest.approx([0, expected], abs=ACCURACY)
    assert result.sharpness == pytest.approx([1 + expected**2], rel=1e-6)


@pytest.mark.slow
def test_regression_closed_form():
    """Coefficients w* + v exp(-time), through torch's own BatchNorm."""
    regression = Regression()
    times = [0.0, 0.7, 1.5]
    result = sharpness_flow(regression.objective, regression.batch, times=times, rtol=1e-6)
    weights = regression.effective(result.points["0.weight"][:, 0].numpy())
    for time, weight, sharpness, slope in zip(times, weights, result.sharpness, result.grad_norm, strict=True):
        expected = regression_flow(regression.inputs, regression.targets, weight=regression.weight, time=time)
        assert weight == pytest.approx(expected.weight, abs=1e-5)
        assert sharpness == pytest.approx(expected.sharpness, rel=1e-5)
        assert slope == pytest.approx(expected.grad_norm, rel=1e-5)


def curved_start():
    return onto_curved(np.array([0.1, 0.5, -0.4, 0.9]))


@pytest.mark.slow
def test_curved_surface_against_differences_along_it():
    """An independent solver: closed-form lambda1, its differences along the surface, points put back by hand."""

    def velocity(_, state):
        slope = curved_gradient_by_differences(onto_curved(state))
        return -2 * slope / (4 + slope @ slope)

    slow = solve_ivp(velocity, (0, 2), curved_start(), method="LSODA", rtol=1e-9, atol=1e-11, t_eval=[1.0, 2.0])
    result = sharpness_flow(world(curved, *(2.5 * curved_start())), None, times=[1.0, 2.0])
    points = result.points["w"].numpy()
    assert points == pytest.approx(slow.y.T, abs=1e-6)  # differences with steps of 1e-5 are right to 1e-10 or so
    assert result.sharpness == pytest.approx([math.exp(curved_log_sharpness(point)) for point in points], rel=1e-9)
    assert np.linalg.norm(points[1] - curved_start()) > 0.3


@pytest.mark.slow
def test_both_clocks_are_one_flow():
    """c_b = 2 with time = steps * 2 lr wd is gradient descent with weight decay at half that time."""
    start = world(curved, *curved_start())
    decay, scheduler = (
        sharpness_flow(start, None, times=[time], c_b=c_b, rtol=1e-6) for time, c_b in ((0.5, None), (1.0, 2.0))
    )
    assert decay.points["w"].numpy() == pytest.approx(scheduler.points["w"].numpy(), abs=1e-5)


@pytest.mark.slow
def test_training_follows_the_flow():
    """The distance goes as sqrt(lr wd): 0.06 of it from 4e-3 to 2.5e-4; the drift is 200 times that."""
    lr, intrinsic = 0.5, 1e-3
    start = curved_start()
    slope = np.array([1.0, 0.6 * start[2], 0.6 * start[1], -0.6 * start[3]])
    slope -= start * (slope @ start)
    pushed = start + 0.5 * math.sqrt(intrinsic) * slope / np.linalg.norm(slope)
    edge = at_the_edge(pushed, math.exp(curved_log_sharpness(start)), lr=lr, intrinsic=intrinsic)
    path = train(curved, edge, lr=lr, intrinsic=intrinsic, steps=1001)
    run = decompose(world(curved, *edge), None, trajectory=path[::100], lr=lr, weight_decay=intrinsic / lr)
    flow = sharpness_flow(world(curved, *start), None, times=np.arange(11) / 10, rtol=1e-6)
    apart = (run.points["w"] - flow.points["w"]).norm(dim=1)
    moved = (flow.points["w"][-1] - flow.points["w"][0]).norm()
    assert float(apart.max()) < 0.1 * math.sqrt(intrinsic)
    assert float(moved) > 0.3


@pytest.mark.slow
def test_stops_where_eigenvalues_meet():
    """lambda1 = 2 + 4z and lambda2 = 2 - z meet within 1e-3 where 5z = 1e-3 (2 + 4z), after a time in closed form."""

    def crossing(w):
        x, y, z = w
        return ((2 + 4 * z) * x * x + (2 - z) * y * y) / 2

    result = sharpness_flow(
        world(crossing, 0.0, 0.0, 0.2), None, times=[0.01, 9.0], spherical=False, c_b=1.0, rtol=1e-4
    )
    assert not result.converged and "lambda1 and lambda2 meet" in result.reason
    end = 2e-3 / (5 - 4e-3)
    assert float(result.points["w"][-1, 2]) == pytest.approx(end, rel=1e-2)  # rtol is 1e-4 of 0.2

    def clock(z):  # integral of 4/g + 2g, g = 2/(1 + 2z)
        return 2 * z + 2 * z * z + 2 * math.log1p(2 * z)

    assert result.time[-1] == pytest.approx(clock(0.2) - clock(end), rel=1e-4)


def test_at_rest_from_the_start():
    result = sharpness_flow(world(three_d, *on_three_d(0.0)), None, times=[0, 1])
    assert result.converged and result.time.tolist() == [0]


@pytest.mark.parametrize("times", [[], [1.0, 0.5], [-1.0], [0.0, math.nan], 3.0, "soon", [[1.0]]])
def test_bad_times(times):
    with pytest.raises(eq.EquilibriaError, match="expected an increasing series of flow times"):
        sharpness_flow(world(three_d, *on_three_d(0.8)), None, times=times)


def test_other_bad_input():
    start = world(three_d, *on_three_d(0.8))
    with pytest.raises(eq.EquilibriaError, match="c_b"):
        sharpness_flow(start, None, times=[1], c_b=0)
    with pytest.raises(eq.EquilibriaError, match="grad_tol"):
        sharpness_flow(start, None, times=[1], grad_tol=0)
    with pytest.raises(eq.EquilibriaError, match="not on the manifold"):
        sharpness_flow(world(three_d, 0.5, 0.6, 0.3), None, times=[1])
