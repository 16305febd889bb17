"""The effective learning rate as a scheduler against the weights themselves and exact arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from tests.helpers.edge_runs import rotation, three_d_gradient

from equilibria.errors import EquilibriaError
from equilibria.theory.effective_schedulers import (
    ScalarRmsprop,
    SchedulerParameters,
    gwsi_moment_step,
    gwsi_parameters,
    gwsi_step,
    quasi_rmsprop_parameters,
    rmsprop_scheduler_step,
    scalar_rmsprop_step,
)
from equilibria.theory.stability import effective_lr


def test_gwsi_lock_step():
    """Weights, perfect square and Definition B.6, all fed the gradients of one run through the edge of stability."""
    lr, intrinsic = 0.5, 2e-3
    turn, c = rotation(3), 1 - intrinsic
    w = turn.T @ np.array([0.3, 1.3, 1.2])
    eta = float(effective_lr(lr, intrinsic / lr, norm_sq=w @ w))
    parameters = gwsi_parameters(intrinsic)
    moment = c**2 * (w @ w) ** 2 / lr**2
    worst = 0.0
    for _ in range(2000):
        gradient = turn.T @ three_d_gradient(turn @ w)
        unit_grad_sq = float(gradient @ gradient * (w @ w))
        w = c * w - lr * gradient
        eta = float(gwsi_step(eta, unit_grad_sq, intrinsic_lr=intrinsic))
        moment = float(gwsi_moment_step(moment, unit_grad_sq, parameters=parameters))
        exact = lr / (c * float(w @ w))
        worst = max(worst, abs(eta / exact - 1), abs(moment**-0.5 / exact - 1))
    assert worst < 1e-13


def test_gwsi_parameter_expansions():
    """base_lr = sqrt(2e)(1 + 5/4 e + 55/32 e^2 + ...): 1.2517e-3 above sqrt(2e) at e = 1e-3; in exact arithmetic."""
    with localcontext() as context:
        context.prec = 40
        decay = (1 - Decimal("0.001")) ** 4
        excess = ((1 / decay - 1) / 2).sqrt() / Decimal("0.002").sqrt() - 1
    parameters = gwsi_parameters(1e-3)
    assert parameters.base_lr / math.sqrt(2e-3) - 1 == pytest.approx(float(excess), abs=1e-15)
    assert parameters.base_lr / math.sqrt(2e-3) - 1 == pytest.approx(1.2517e-3, abs=5e-8)
    assert parameters.decay == pytest.approx(float(decay), rel=1e-15)
    assert parameters.decay == pytest.approx(1 - 4e-3 + 6e-6, abs=5e-9)


@pytest.mark.parametrize("normalised", [0.2, 1.0, 3.0])
def test_quasi_rmsprop_residual(normalised):
    """Exact minus imitated moment over (1-decay)^2 tends to (6v - 16G + 4G^2/v)/16."""
    moment, intrinsic = 1.7, 1e-5
    parameters = quasi_rmsprop_parameters(intrinsic)
    grad_sq = normalised * parameters.base_lr**2
    exact = gwsi_step(moment**-0.5, grad_sq, intrinsic_lr=intrinsic) ** -2
    gap = (exact - rmsprop_scheduler_step(moment, grad_sq, parameters=parameters)) / (1 - parameters.decay) ** 2
    expected = (6 * moment - 16 * normalised + 4 * normalised**2 / moment) / 16
    assert float(gap) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("intrinsic", [1e-2, 1e-3, 1e-4])
def test_quasi_rmsprop_imitates_the_exact_scheduler(intrinsic):
    """A common gradient stream over flow time 3: the moments differ by a relative O(lr*wd)."""
    parameters = quasi_rmsprop_parameters(intrinsic)
    eta, moment, worst = 1.0, 1.0, 0.0
    for t in range(int(3 / intrinsic)):
        grad_sq = parameters.base_lr**2 * (1 + math.cos(t * math.sqrt(8 * intrinsic)))
        eta = float(gwsi_step(eta, grad_sq, intrinsic_lr=intrinsic))
        moment = float(rmsprop_scheduler_step(moment, grad_sq, parameters=parameters))
        worst = max(worst, abs(moment * eta**2 - 1))
    assert 0.9 * intrinsic < worst < 1.3 * intrinsic


def test_scalar_rmsprop_is_descent_with_the_scheduler():
    parameters = SchedulerParameters(base_lr=0.05, decay=1 - 2 * 0.05**2)
    state = ScalarRmsprop(np.array([0.1, 1.5]), np.array(0.02))
    point, moment = state.point.copy(), 0.02 / 0.05**2
    for _ in range(500):
        x, y = state.point
        state = scalar_rmsprop_step(state, [(1 + y * y) * x, y * x * x], parameters=parameters)
        gradient = np.array([(1 + point[1] ** 2) * point[0], point[1] * point[0] ** 2])
        point = point - gradient / math.sqrt(moment)
        moment = float(rmsprop_scheduler_step(moment, gradient @ gradient, parameters=parameters))
    assert state.point == pytest.approx(point, rel=1e-9)
    assert float(state.second_moment) == pytest.approx(moment * 0.05**2, rel=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gwsi_step(1.0, 1.0, intrinsic_lr=1.0),
        lambda: gwsi_parameters(0.0),
        lambda: quasi_rmsprop_parameters(0.25),
        lambda: gwsi_moment_step(0.0, 1.0, parameters=gwsi_parameters(0.1)),
        lambda: rmsprop_scheduler_step(1.0, math.nan, parameters=gwsi_parameters(0.1)),
        lambda: scalar_rmsprop_step(ScalarRmsprop(np.ones(2), np.array(0.0)), [1, 1], parameters=gwsi_parameters(0.1)),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()
