"""The equilibrium along a schedule, point by point against the rule's own equilibrium."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, evolve, settled
from equilibria.theory.targets import targets

RULES = [
    SGD(0.1, 1e-3),
    SGD(0.1, 1e-3, momentum=0.9),
    SGD(0.1, 1e-3, momentum=0.9, dampening=0.3),
    SGD(0.1, 1e-3, momentum=0.9, nesterov=True),
    SGDW(0.1, 1e-3, momentum=0.9),
    AdamW(0.1, 1e-3),
    AdamW(0.1, 1e-3, betas=(0.0, 0.95)),
    AdamL2(0.1, 1e-3),
    Lion(0.1, 1e-3),
    Muon(0.1, 1e-3, shape=(4, 4)),
    Muon(0.1, 1e-3, momentum=0.9, nesterov=False, shape=(6, 6)),
]
LRS = np.array([0.3, 0.1, 1e-2, 1e-4, 1e-9])
DECAYS = np.array([0.05, 1e-3, 1e-3, 0.3, 1e-4])
L, D = 2.5, 30.0


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_point_is_the_equilibrium_of_the_rule(rule):
    result = targets(rule, LRS, weight_decay=DECAYS, unit_grad_sq=L, dim=D)
    for i, (lr, wd) in enumerate(zip(LRS, DECAYS, strict=True)):
        here = dataclasses.replace(rule, lr=float(lr), weight_decay=float(wd))
        one = here.equilibrium(unit_grad_sq=L, dim=D)
        assert result.angle[i] == pytest.approx(one.angle, rel=1e-12)
        # For a square matrix Muon's gain is 1, and ``dim`` stands for the update's mean square.
        norm = here.equilibrium(update_sq=D).norm if isinstance(rule, Muon) else one.norm
        assert result.norm_sq[i] == pytest.approx(norm**2, rel=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_recursion_stays_at_the_target(rule):
    """The recursion of the rule stays where the target says: an equilibrium of the map, not of a formula alone."""
    moderate = dataclasses.replace(rule, lr=0.02, weight_decay=0.02)
    goal = targets(moderate, 0.02, unit_grad_sq=L, dim=D)
    path = evolve(moderate, 400, start=settled(moderate, unit_grad_sq=L, dim=D), unit_grad_sq=L, dim=D)
    np.testing.assert_allclose(path.norm_sq, float(goal.norm_sq), rtol=1e-8)
    np.testing.assert_allclose(path.angle, float(goal.angle), rtol=1e-8)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_where_lr_or_decay_is_zero_the_angle_is_zero_and_there_is_no_norm(rule):
    """Numpy must not warn either; warnings are errors in this suite."""
    lr, wd = np.array([0.0, 0.1, 0.1, 0.0]), np.array([1e-3, 0.0, 1e-3, 0.0])
    result = targets(rule, lr, weight_decay=wd, unit_grad_sq=L, dim=D)
    np.testing.assert_array_equal(np.isnan(result.norm_sq), [True, True, False, True])
    np.testing.assert_array_equal(result.angle == 0, [True, True, False, True])
    assert np.isfinite(result.angle).all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_weight_decay_defaults_to_that_of_the_rule(rule):
    own = targets(rule, LRS, unit_grad_sq=L, dim=D)
    given_one = targets(rule, LRS, weight_decay=rule.weight_decay, unit_grad_sq=L, dim=D)
    np.testing.assert_array_equal(own.angle, given_one.angle)
    np.testing.assert_array_equal(own.norm_sq, given_one.norm_sq)


@pytest.mark.parametrize("make", [lambda a: SGD(0.1, 1e-3, momentum=a), lambda a: SGDW(0.1, 1e-3, momentum=a)])
def test_momentum_schedule(make):
    momenta = np.array([0.0, 0.5, 0.95])
    result = targets(make(0.9), 0.1, momentum=momenta, unit_grad_sq=L)
    for i, a in enumerate(momenta):
        one = make(float(a)).equilibrium(L)
        assert (result.angle[i], result.norm_sq[i]) == (pytest.approx(one.angle), pytest.approx(one.norm**2))


def test_shapes_broadcast():
    result = targets(SGD(0.1, 1e-3), np.full((3, 1), 0.1), weight_decay=np.full(4, 1e-3))
    assert result.angle.shape == result.norm_sq.shape == (3, 4)
    assert targets(SGD(0.1, 1e-3), 0.1).angle.shape == ()


@settings(max_examples=25)
@given(rule=st.sampled_from(RULES), k=st.floats(0.01, 100))
def test_sliding_along_the_product_keeps_the_angle(rule, k):
    """lr * wd fixes the angle (Adam with L2: lr^2 wd), lr / wd the norm: ||w||^2 grows as k^2 or as k."""
    coupled_adam = isinstance(rule, AdamL2)
    base = targets(rule, 0.1, weight_decay=1e-3, unit_grad_sq=L, dim=D)
    slid = targets(rule, 0.1 * k, weight_decay=1e-3 / k ** (2 if coupled_adam else 1), unit_grad_sq=L, dim=D)
    assert float(slid.angle) == pytest.approx(float(base.angle), rel=1e-9)
    power = 1 if isinstance(rule, SGD | SGDW) else 2
    assert float(slid.norm_sq / base.norm_sq) == pytest.approx(k**power, rel=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: targets(SGD(0.1, 1e-3), -0.1),
        lambda: targets(SGD(0.1, 1e-3), math.nan),
        lambda: targets(SGD(0.1, 1e-3), ["a"]),
        lambda: targets(SGD(0.1, 1e-3), 0.1, weight_decay=-1.0),
        lambda: targets(SGD(0.1, 1e-3), 0.1, momentum=1.0),
        lambda: targets(SGD(0.1, 1e-3), 0.1, momentum=math.nan),
        lambda: targets(SGD(0.1, 1e-3), 0.1, unit_grad_sq=-1.0),
        lambda: targets(AdamW(0.1, 1e-3), 0.1, dim=0.0),
        lambda: targets(SGD(0.1, 1.0), [0.1, 3.0]),
        lambda: targets(SGD(0.1, 1.0, momentum=0.9, nesterov=True), 5.0),
        lambda: targets(SGDW(0.1, 1.0), 1.0),
        lambda: targets(AdamW(0.1, 1.0), 1.5),
        lambda: targets(Lion(0.1, 1.0), 1.0),
        lambda: targets(Muon(0.1, 1.0), 100.0),
        lambda: targets(AdamL2(0.1, 1.0), 1e3),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()
