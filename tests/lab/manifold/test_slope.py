"""The slope of log lambda1 along the manifold against closed forms and finite differences along it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.minimiser_worlds import (
    Regression,
    curved,
    curved_gradient_by_differences,
    on_three_d,
    onto_curved,
    three_d,
    world,
)

import equilibria as eq
from equilibria.lab.manifold import grad_log_sharpness
from equilibria.theory.flow_examples import regression_flow

# The third derivative is a difference of fourth order with steps of 7e-4: its error is 3e-13 times the ratio of the
# fifth to the first derivative of H v along v, some hundreds here, where the loss changes over 0.5.
ACCURACY = 1e-9


def test_three_d_has_slope_two_tan_angle():
    result = grad_log_sharpness(world(three_d, *on_three_d(0.6)), None)
    assert result.sharpness == pytest.approx(9.375, rel=1e-12)
    assert result.norm == pytest.approx(1.5, rel=ACCURACY)
    upwards = np.array([-0.6 / math.sqrt(2), -0.6 / math.sqrt(2), 0.8])
    assert result.gradient["w"].numpy() == pytest.approx(1.5 * upwards, abs=ACCURACY)
    assert abs(result.top_vector["w"].numpy()) == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), 0], abs=1e-12)
    assert result.dimension == 1 and result.gap == pytest.approx(1, abs=1e-12) and result.null_gap > 1e9


@pytest.mark.parametrize("seed", [0, 1])
def test_regression_has_the_closed_form_slope(seed):
    """Lemma O.1: g = 2 |v|/|w*|; the BatchNorm is torch's, whose own third derivative is wrong."""
    regression = Regression(seed)
    result = grad_log_sharpness(regression.objective, regression.batch)
    expected = regression_flow(regression.inputs, regression.targets, weight=regression.weight, time=0)
    assert result.sharpness == pytest.approx(expected.sharpness, rel=1e-10)
    assert result.norm == pytest.approx(expected.grad_norm, rel=1e-8)
    assert result.dimension == 8 - 1 - 2  # the Hessian has rank n - 2


@settings(max_examples=5)
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100))
def test_curved_surface_has_the_slope_of_finite_differences(seed, scale):
    """Central differences with steps of 1e-5 are right to 1e-10 of the third derivative and 1e-16/1e-5 of rounding."""
    point = onto_curved(np.random.default_rng(seed).standard_normal(4))
    result = grad_log_sharpness(world(curved, *(scale * point)), None)
    assert result.gradient["w"].numpy() == pytest.approx(curved_gradient_by_differences(point), abs=1e-7)
    assert result.dimension == 2


def test_full_space_counts_the_radius():
    """lambda1 = |w|^-2 of the invariant loss itself: unprojected, log lambda1 falls at rate 2 along the radius."""
    result = grad_log_sharpness(world(three_d, *on_three_d(0.6)), None, spherical=False)
    radial = result.gradient["w"].numpy() @ np.array(on_three_d(0.6))
    assert radial == pytest.approx(-2, rel=ACCURACY)
    assert result.dimension == 2


def test_points_without_a_slope_raise():
    with pytest.raises(eq.EquilibriaError, match=r"not on the manifold of minimisers.*use the point of project"):
        grad_log_sharpness(world(three_d, 0.5, 0.6, 0.3), None)
    with pytest.raises(eq.EquilibriaError, match="positive eigenvalue"):
        grad_log_sharpness(world(three_d, -0.5, -0.5, 0.3), None)
    with pytest.raises(eq.EquilibriaError, match=r"smallest eigenvalue is -0.5 lambda1; expected a minimum"):
        grad_log_sharpness(world(lambda w: (2 * w[0] ** 2 - w[1] ** 2) / w.square().sum(), 0.0, 0.0, 1.0), None)
    with pytest.raises(eq.EquilibriaError, match=r"not simple: \(lambda1 - lambda2\)/lambda1"):
        grad_log_sharpness(world(lambda w: (w[0] ** 2 + w[1] ** 2) / w.square().sum(), 0.0, 0.0, 1.0), None)


def test_the_network_does_not_change():
    regression = Regression()
    torch.manual_seed(5)
    before = torch.get_rng_state(), {name: tensor.clone() for name, tensor in regression.net.state_dict().items()}
    grad_log_sharpness(regression.objective, regression.batch)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in regression.net.state_dict().items())
    assert regression.net[0].weight.grad is None


@pytest.mark.parametrize("z", [0.6, 0.9, 0.99, 0.999, 0.9999])
def test_near_a_singularity_the_step_becomes_shorter_and_the_error_is_known(z):
    """At the pole the 3-D loss changes within sqrt(1 - z^2) of the weights; slope 2 z/sqrt(1 - z^2)."""

    def loss(params, _batch):
        x, y, _ = params["w"]
        return 2 - (x + y) / (x * x - x * y + y * y).sqrt()

    half = ((1 - z * z) / 2) ** 0.5
    result = grad_log_sharpness(eq.Objective(loss, {"w": torch.tensor([half, half, z], dtype=torch.float64)}), None)
    expected = 2 * z / (1 - z * z) ** 0.5
    assert abs(result.norm - expected) <= 10 * result.error
    assert abs(result.norm / expected - 1) < 1e-8
