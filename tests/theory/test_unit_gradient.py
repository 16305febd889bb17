"""L of each optimizer: the norm it fixes must not depend on how N and C share it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamW, cold_start, evolve
from equilibria.theory.unit_gradient import momentum_unit_grad_sq, nesterov_angle_factor

unit = st.floats(0.05, 0.95)


def settle_by_hand(lr, wd, a, damp, nesterov, n_unit, c_unit, steps=60_000):
    """Iterate ||w||^2, <w,v>, ||v||^2 with <v,g> = C/P, written out from the definition of the step."""
    p, q, r = 5.0, 0.0, 0.0
    keep = 1 - damp
    for _ in range(steps):
        n, c = n_unit / p, c_unit / p
        h_sq = n + wd * wd * p  # h = g + wd w, <g,w> = 0
        v_h = c + wd * q
        buffer_sq = a * a * r + 2 * a * keep * v_h + keep * keep * h_sq
        w_buffer = a * q + keep * wd * p
        if nesterov:
            h_buffer = a * v_h + h_sq
            step_sq, w_step = h_sq + 2 * a * h_buffer + a * a * buffer_sq, wd * p + a * w_buffer
            buffer_step = h_buffer + a * buffer_sq
        else:
            step_sq, w_step, buffer_step = buffer_sq, w_buffer, buffer_sq
        p, q, r = p - 2 * lr * w_step + lr * lr * step_sq, w_buffer - lr * buffer_step, buffer_sq
    return p


@pytest.mark.parametrize("correlation", [-0.3, 0.4])
@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, 0.02, momentum=0.8),
        SGD(0.1, 0.02, momentum=0.8, dampening=0.4),
        SGD(0.1, 0.02, momentum=0.8, nesterov=True),
    ],
    ids=["heavy ball", "dampening", "nesterov"],
)
def test_the_norm_follows_from_l_alone(rule, correlation):
    unit_grad_sq = momentum_unit_grad_sq(rule, 3.0, buffer_dot_grad=3.0 * correlation)
    want = settle_by_hand(
        rule.lr, rule.weight_decay, rule.momentum, rule.dampening, rule.nesterov, 3.0, 3 * correlation
    )
    assert rule.equilibrium(unit_grad_sq=unit_grad_sq).norm ** 2 == pytest.approx(want, rel=1e-9)


@given(a=unit, rho=st.floats(-0.2, 1.0))
def test_the_transient_of_nesterov_settles_at_the_correlated_equilibrium(a, rho):
    rule = SGD(0.3, 0.1, momentum=a, nesterov=True)
    there = rule.equilibrium(unit_grad_sq=2.0, correlation=rho)
    path = evolve(rule, 4000, start=cold_start(rule, 1.0), unit_grad_sq=2.0, correlation=rho)
    assert path.norm[-1] == pytest.approx(there.norm, rel=1e-6)
    assert path.angle[-1] == pytest.approx(there.angle, rel=1e-6)


def test_rules_without_a_buffer_in_l_use_the_gradient_alone():
    assert momentum_unit_grad_sq(AdamW(1e-3, 0.1), [2.0, 3.0], buffer_dot_grad=1.0).tolist() == [2.0, 3.0]
    assert np.allclose(momentum_unit_grad_sq(SGDW(0.1, 0.1, momentum=0.5), 2.0, buffer_dot_grad=1.0), 3.0)


@given(a=unit, rho=st.floats(-0.3, 2.0))
def test_nesterov_angle_factor_is_that_of_the_exact_equilibrium(a, rho):
    """To first order in lr * wd, which is 1e-9 here; of order lr * wd / (1-a)^2 beside it."""
    rule = SGD(1.0, 1e-9, momentum=a, nesterov=True)
    exact = rule.equilibrium(correlation=rho).angle / rule.equilibrium().angle
    assert float(nesterov_angle_factor(a, correlation=rho)) == pytest.approx(exact, rel=1e-5)
    assert float(nesterov_angle_factor(a, correlation=0.0)) == 1.0


def test_nesterov_angle_factor_is_nan_where_there_is_no_equilibrium():
    """L = N (1 + 2 a^2 rho) must be positive."""
    factors = nesterov_angle_factor(0.9, correlation=[0.1, -0.7, 0.0])
    assert np.isnan(factors).tolist() == [False, True, False]
    with pytest.raises(EquilibriaError, match="correlation"):
        SGD(0.1, 1e-4, momentum=0.9, nesterov=True).equilibrium(correlation=-0.7)


def test_bad_input_is_named():
    with pytest.raises(EquilibriaError, match="grad_sq=-1"):
        momentum_unit_grad_sq(SGD(0.1, 0.1), -1.0, buffer_dot_grad=0.0)
    with pytest.raises(EquilibriaError, match="rule=None"):
        momentum_unit_grad_sq(None, 1.0, buffer_dot_grad=0.0)
