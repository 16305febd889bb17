"""A run split into oscillation and drift, against closed forms and the laws of the edge of stability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers.edge_runs import at_the_edge, descend, three_d_gradient
from tests.helpers.minimiser_worlds import Regression, curved, on_three_d, three_d, weights_at, world

import equilibria as eq
from equilibria.lab.manifold import decompose
from equilibria.theory.eos_series import two_step_mean
from equilibria.theory.hamiltonian import mean_square_displacement
from equilibria.theory.stability import effective_lr

LR = 0.5


@pytest.fixture(scope="module")
def runs():
    """Intrinsic learning rate -> (weights, decomposition) of the 3-D example from R = 1, for a flow time of 2."""
    return {intrinsic: three_d_run(intrinsic) for intrinsic in (2.5e-3, 1e-3)}


def three_d_run(intrinsic):
    push = 1e-3 * math.sqrt(intrinsic)
    start = np.array(on_three_d(0.8)) + push * np.array([1, -1, 0])
    start = at_the_edge(start, 6 / 0.36, lr=LR, intrinsic=intrinsic)
    weights = descend(three_d_gradient, start, lr=LR, intrinsic=intrinsic, steps=round(2 / intrinsic))
    path = [weights_at(*weight) for weight in weights]
    return weights, decompose(world(three_d, 1, 1, 1), None, trajectory=path, lr=LR, weight_decay=intrinsic / LR)


def test_every_part_of_the_three_d_run(runs):
    """Here the projection is known: (x, y) turn to x = y, z stays. Errors of the projection are below 1e-7."""
    weights, result = runs[1e-3]
    norms = np.linalg.norm(weights, axis=1)
    x, y, z = (weights / norms[:, None]).T
    side = np.hypot(x, y) / math.sqrt(2)
    assert result.converged.all()
    assert result.points["w"].numpy() == pytest.approx(np.stack([side, side, z], axis=1), abs=1e-7)
    sign = math.copysign(1, result.displacement[0] * (x - y)[0])
    assert sign * result.displacement == pytest.approx((x - y) / math.sqrt(2), abs=1e-7)
    assert result.sharpness == pytest.approx(6 / (1 - z * z), rel=1e-6)
    assert result.grad_norm == pytest.approx(2 * z / np.sqrt(1 - z * z), rel=1e-6)
    assert result.effective_lr == pytest.approx(effective_lr(LR, 1e-3 / LR, norm_sq=norms**2), rel=1e-14)
    assert result.ratio == pytest.approx(result.effective_lr * 3 / (1 - z * z), rel=1e-6)
    assert result.offset == pytest.approx((result.ratio**-2 - 1) / math.sqrt(2e-3), rel=1e-12, abs=1e-12)
    assert result.loss == pytest.approx([float(three_d(w)) for w in torch.tensor(weights)], abs=1e-13)
    assert result.mean_square == pytest.approx(two_step_mean(result.displacement**2), rel=1e-15)
    assert result.mean_ratio == pytest.approx(two_step_mean(result.ratio), rel=1e-15)
    assert result.mean_loss == pytest.approx(two_step_mean(result.loss), rel=1e-15)


def test_consecutive_displacements_alternate(runs):
    _, result = runs[2.5e-3]
    visible = result.displacement[200:]
    assert (visible[1:] * visible[:-1] < 0).all()


def drift(result):
    """Regression of the two-step drift of phi on h^2 times the slope of log lambda1."""
    phi, slope = result.points["w"].numpy(), result.gradients["w"].numpy()
    driven = result.mean_square[:-1, None] * slope[:-2]
    return float((driven * (phi[2:] - phi[:-2])).sum() / (driven * driven).sum())


def test_drift_is_minus_two_h_squared(runs):
    """-2 in the limit (the paper's Section 4.2.3 prints -4), off by about 10 lr*wd: extrapolated linearly in it."""
    coarse, fine = drift(runs[2.5e-3][1]), drift(runs[1e-3][1])
    assert fine == pytest.approx(-2, abs=0.03)
    assert (2.5 * fine - coarse) / 1.5 == pytest.approx(-2, abs=2e-3)


def test_mean_square_displacement_is_that_of_the_law(runs):
    """<h^2> = 2 lr wd/(4 + g^2); .9985 of it at 2.5e-3, within half a per cent for where in an orbit the run ends."""
    _, result = runs[2.5e-3]
    law = mean_square_displacement(math.sqrt(2 * 2.5e-3), grad_norm=result.grad_norm, c_b=2.0)
    assert float((result.displacement**2 / law).mean()) == pytest.approx(0.9985, abs=5e-3)


def test_steps_in_turn_give_what_steps_together_give():
    """BatchNorm with running statistics cannot be stacked; a trajectory of it goes step by step."""
    regression = Regression()
    weight = regression.net[0].weight.detach()
    shifts = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    path = [{"0.weight": weight + 0.05 * shift} for shift in shifts]
    kept = decompose(regression.objective, regression.batch, trajectory=path, lr=0.1, weight_decay=1e-2, tol=1e-7)
    inputs, targets = regression.batch
    mean, spread = targets.mean(), targets.std(correction=0)

    def by_hand(params, _):
        out = (inputs - inputs.mean(dim=0)) @ params["0.weight"][0]
        return (spread * out / out.square().mean().sqrt() + mean - targets).square().mean()

    together = eq.Objective(by_hand, {"0.weight": weight})
    result = decompose(together, None, trajectory=path, lr=0.1, weight_decay=1e-2, tol=1e-7)
    assert kept.converged.all() and result.converged.all()
    assert kept.displacement == pytest.approx(result.displacement, abs=1e-5)
    assert kept.sharpness == pytest.approx(result.sharpness, rel=1e-5)
    assert kept.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)


def test_a_step_that_does_not_arrive_is_nan():
    path = [weights_at(-1.0, -1.0, 0.5), weights_at(1.0, 1.1, 0.5)]  # the first one is a maximum
    result = decompose(world(three_d, 1.0, 1.0, 1.0), None, trajectory=path, lr=LR, weight_decay=1e-2)
    assert result.converged.tolist() == [False, True]
    for series in (result.displacement, result.offset, result.sharpness, result.ratio, result.grad_norm):
        assert np.isnan(series).tolist() == [True, False]
    assert np.isfinite(result.loss).all() and np.isnan(result.mean_ratio).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trajectory": []}, "empty trajectory"),
        ({"trajectory": [torch.ones(4)]}, "got params of type Tensor; expected a dict"),
        ({"trajectory": [weights_at(1.0, 1.0)]}, r"got shape \(2,\) for parameter 'w'"),
        ({"lr": 0}, "got lr=0"),
        ({"weight_decay": 0}, "got weight_decay=0"),
        ({"lr": 10.0}, r"lr \* weight_decay"),
        ({"tol": 1.0}, "got tol=1"),
    ],
)
def test_bad_input(options, message):
    good = {"trajectory": [weights_at(1.0, 0.2, 0.3, 0.4)], "lr": 0.1, "weight_decay": 0.1}
    with pytest.raises(eq.EquilibriaError, match=message):
        decompose(world(curved, 1.0, 0.2, 0.3, 0.4), None, **(good | options))
