"""Projection on the manifold of minimisers against exact limits of the gradient flow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.optimize import brentq
from tests.helpers.minimiser_worlds import (
    Regression,
    curved,
    curved_residual,
    meridian,
    onto_curved,
    three_d,
    valley,
    weights_at,
    world,
)

import equilibria as eq
from equilibria.lab.manifold import project

# Local errors are 1e-11 of the norm and some hundred steps are taken; where it stops, at most 1e-10 lambda1/lambda is
# left to go, and lambda = lambda1 in all of these losses.
ACCURACY = 2e-9


def limit(loss, *start, **options):
    result = project(world(loss, *start), None, **options)
    assert result.converged, result.reason
    return result.point["w"].numpy()


def test_three_d_keeps_its_height_and_its_radius_in_the_plane():
    """The loss is also invariant in (x, y) alone, so that its gradient turns them without changing their norm."""
    x, y, z = 1.3, 0.2, -0.7
    side = math.hypot(x, y) / math.sqrt(2)
    assert limit(three_d, x, y, z) == pytest.approx([side, side, z], abs=ACCURACY)


def test_meridian_drifts_as_its_orbits_do():
    """With p = (y/z)^2 and q = (x/z)^2 the orbits are dp/dq = 8p / (1 + p + q + 8p), an equation without time."""
    x, y, z = 0.6, 0.5, 0.4
    orbit = solve_ivp(
        lambda q, p: 8 * p / (1 + 9 * p + q), ((x / z) ** 2, 0), [(y / z) ** 2], method="DOP853", rtol=1e-13, atol=1e-15
    )
    angle = math.atan(math.sqrt(orbit.y[0, -1]))
    expected = math.sqrt(x * x + y * y + z * z) * np.array([0, math.sin(angle), math.cos(angle)])
    assert limit(meridian, x, y, z) == pytest.approx(expected, abs=ACCURACY)
    assert abs(angle - math.atan2(y, z)) > 0.05  # the nearest point of the manifold is another one


def test_valley_in_the_full_space_keeps_its_invariant():
    """ln y + y^2/2 - x^2/2 is constant along the gradient flow."""
    x, y = 1.1, 1.4
    kept = math.log(y) + (y * y - x * x) / 2
    expected = brentq(lambda end: math.log(end) + end * end / 2 - kept, 1e-3, y, xtol=1e-15)
    assert limit(valley, x, y, spherical=False) == pytest.approx([0, expected], abs=ACCURACY)


def test_the_other_fields_of_a_projection():
    result = project(world(curved, 0.5, 0.4, -0.3, 0.6), None)
    direction = result.point["w"] / result.point["w"].norm()
    assert abs(float(curved_residual(direction))) < ACCURACY
    assert float(result.point["w"].norm()) == pytest.approx(math.sqrt(0.86), rel=1e-14)
    assert 0 <= result.loss < 1e-17 and result.grad_norm < 1e-9 and result.steps > 10
    start = torch.tensor([0.5, 0.4, -0.3, 0.6], dtype=torch.float64)
    assert result.distance == pytest.approx(float((direction - start / start.norm()).norm()), rel=1e-12)
    assert result.reason.startswith("arrived at a minimum")


@settings(max_examples=2)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 100))
def test_projection_depends_on_the_direction_only_and_is_idempotent(scale, seed):
    start = onto_curved(np.random.default_rng(seed).standard_normal(4)) + 0.2 * np.eye(4)[0]
    once = limit(curved, *start, tol=1e-7)
    assert limit(curved, *(scale * start), tol=1e-7) == pytest.approx(scale * once, abs=scale * 1e-5)
    again = project(world(curved, *once), None, tol=1e-7)
    assert again.steps == 0 and again.distance == 0


def test_a_network_keeps_tensors_that_are_not_selected():
    regression = Regression()
    moved = regression.net[0].weight.detach() + 0.3 * torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    state = {name: tensor.clone() for name, tensor in regression.net.state_dict().items()}
    result = project(regression.objective, regression.batch, params={"0.weight": moved}, select=["0.weight"])
    assert result.converged and result.loss < 1e-17 and list(result.point) == ["0.weight"]
    centred = regression.inputs - regression.inputs.mean(axis=0)
    away = np.eye(8) - np.linalg.pinv(centred) @ centred  # gradients lie in the row space of the data
    assert away @ result.point["0.weight"][0].numpy() == pytest.approx(away @ moved[0].numpy(), abs=1e-8)
    assert all(torch.equal(tensor, state[name]) for name, tensor in regression.net.state_dict().items())


def test_a_maximum_is_not_called_a_minimum():
    result = project(world(three_d, -1.0, -1.0, 0.5), None)
    assert not result.converged and "saddle or maximum" in result.reason and "start elsewhere" in result.reason


def test_giving_up_returns_a_result():
    result = project(world(meridian, 0.6, 0.5, 0.4), None, max_steps=5)
    assert not result.converged and result.steps == 5 and "raise max_steps" in result.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": 0}, "tol=0; expected 0 < tol < 0.01"),
        ({"max_steps": 0}, "expected 1 <= max_steps"),
        ({"params": {"v": torch.ones(3)}}, "got a parameter 'v'; expected names among: w"),
        ({"params": weights_at(1.0, 2.0)}, r"shape \(2,\) for parameter 'w'; expected a tensor of shape \(3,\)"),
        ({"params": weights_at(1.0, math.nan, 0.0)}, "not finite"),
        ({"params": weights_at(0.0, 0.0, 0.0)}, "loss"),
        ({"params": [1.0]}, "got params of type list"),
        ({"select": ["v"]}, "matches no parameter"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(eq.EquilibriaError, match=message):
        project(world(meridian, 0.6, 0.5, 0.4), None, **options)


def test_other_bad_losses():
    with pytest.raises(eq.EquilibriaError, match=r"changes from .* when the selected parameters are doubled"):
        project(world(valley, 0.1, 1.0), None)
    with pytest.raises(eq.EquilibriaError, match="got objective of type function"):
        project(three_d, None)
    with pytest.raises(eq.EquilibriaError, match="got 5000 selected numbers; expected at most 4096"):
        project(eq.Objective(lambda p, _: p["w"][0] / p["w"].norm(), {"w": torch.ones(5000)}), None)
    with pytest.raises(eq.EquilibriaError, match="finite"):
        project(world(lambda w: w.sum() / 0, 1.0, 1.0), None)
