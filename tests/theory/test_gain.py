"""The growth gain and the budgets of norms, against exact steps, fixed points and simulated walks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, equilibrium_from_gain, growth_gain, norm_budget
from equilibria.theory.gain import effective_decay, growth_budget, measured_gain

EPS = 1e-9


@pytest.mark.parametrize(
    ("rule", "in_force"),
    [
        (SGD(1.0, EPS), EPS),
        (SGD(1.0, EPS, momentum=0.9), EPS / 0.1),
        (SGD(1.0, EPS, momentum=0.9, dampening=0.5), EPS / 0.2),
        (SGD(1.0, EPS, momentum=0.9, nesterov=True), EPS / 0.1),
        (SGDW(1.0, EPS, momentum=0.8), EPS),
        (AdamW(1.0, EPS, betas=(0.9, 0.95)), EPS),
        (Lion(1.0, EPS), EPS),
        (Muon(1.0, EPS), EPS),
        (Muon(1.0, EPS, shape=(24, 24)), EPS),
    ],
    ids=str,
)
def test_the_gain_is_twice_the_decay_over_the_squared_angle(rule, in_force):
    assert growth_gain(rule) == pytest.approx(2 * in_force / rule.equilibrium().angle ** 2, rel=1e-5)
    there = equilibrium_from_gain(growth_gain(rule), decay_in_force=in_force)
    assert float(there.angle) == pytest.approx(rule.equilibrium().angle, rel=1e-5)


def test_adam_with_l2_gains_as_adamw_does():
    rule, scale = AdamL2(1e-6, 1e-3), {"unit_grad_sq": 1.0, "dim": 100.0}
    angle = rule.equilibrium(**scale).angle
    assert growth_gain(rule) == growth_gain(AdamW(1e-3)) == pytest.approx(19.0)
    assert growth_gain(rule) == pytest.approx(2 * rule.decay_share(**scale) / angle**2, rel=1e-3)


def test_known_gains():
    assert growth_gain(SGD(0.1)) == 1
    assert growth_gain(SGD(0.1, momentum=0.9, nesterov=True)) == pytest.approx(14.16, abs=0.005)
    assert growth_gain(Lion(0.1)) == pytest.approx(45.93, abs=0.01)


@given(seed=st.integers(0, 10_000), shrink=st.floats(-0.5, 1.5), size=st.floats(1e-3, 1e3))
def test_the_budget_of_a_step_sums_to_the_change_of_the_norm(seed, shrink, size):
    draw = np.random.default_rng(seed)
    w, e = draw.normal(size=8), size * draw.normal(size=8)
    after = (1 - shrink) * w + e
    budget = norm_budget(w @ w, shrink=shrink, w_dot_update=w @ e, update_sq=e @ e)
    assert float(budget.total) == pytest.approx(float(after @ after / (w @ w)) - 1, rel=1e-9, abs=1e-9)
    assert float(budget.turning) == pytest.approx(float(e @ e / (w @ w)))


@given(factor=st.floats(0.1, 10))
def test_a_budget_does_not_depend_on_the_scale_of_the_weight(factor):
    one = norm_budget(2.0, shrink=0.1, w_dot_update=0.3, update_sq=0.2)
    scaled = norm_budget(2.0 * factor**2, shrink=0.1, w_dot_update=0.3 * factor**2, update_sq=0.2 * factor**2)
    assert float(one.total) == pytest.approx(float(scaled.total))


def adamw_with_a_pull(cosine, *, lr=0.1, wd=0.02, dim=400, replicas=8, settle=2000, steps=4000, b1=0.9):
    """Sums over a window of AdamW on gradients with a mean cosine: ln ||w||^2, angle^2, pull of the gradient, decay."""
    draw = np.random.default_rng(5)
    w = draw.normal(size=(replicas, dim)) * math.sqrt(lr / (2 * wd))
    m, v = np.zeros_like(w), np.ones_like(w)
    start = angle_sq = pull = np.zeros(replicas)
    for step in range(settle + steps):
        norm_sq = np.sum(w * w, axis=1, keepdims=True)
        g = draw.normal(size=w.shape)
        g += w * (cosine * np.sqrt(dim / norm_sq) - np.sum(w * g, axis=1, keepdims=True) / norm_sq)
        m, v = b1 * m + (1 - b1) * g, 0.999 * v + 0.001 * g * g
        after = (1 - lr * wd) * w - lr * m / np.sqrt(v)
        if step == settle:
            start = np.log(norm_sq[:, 0])
        if step >= settle:
            cosines = np.sum(w * after, axis=1) / np.sqrt(norm_sq[:, 0] * np.sum(after * after, axis=1))
            angle_sq = angle_sq + np.arccos(cosines) ** 2
            pull = pull - 2 * lr * np.sum(w * g / np.sqrt(v), axis=1) / norm_sq[:, 0]
        w = after
    return np.log(np.sum(w * w, axis=1)) - start, angle_sq, pull, lr * wd * steps


@pytest.mark.parametrize("cosine", [0.0, 5e-3, -5e-3])
def test_the_pull_of_the_gradient_follows_from_norms_and_angles(cosine):
    growth, angle_sq, pull, decay = adamw_with_a_pull(cosine)
    rule = AdamW(0.1, 0.02)
    budget = growth_budget(growth_gain(rule), log_growth=growth, decay=decay, angle_sq=angle_sq)
    # F is good to lr wd / (1-b1) = 2 %, the pull to that share of the diffusion.
    assert budget.pull.mean() == pytest.approx(pull.mean(), abs=0.03 * budget.diffusion.mean())
    gain = measured_gain(growth, decay=decay, angle_sq=angle_sq)
    assert (gain.mean() - growth_gain(rule)) * angle_sq.mean() == pytest.approx(budget.pull.mean(), rel=0.05, abs=0.02)
    if cosine:  # and the equilibrium of the measured gain is where the weight is
        there = equilibrium_from_gain(gain.mean(), decay_in_force=0.1 * 0.02)
        assert float(there.angle) == pytest.approx(math.sqrt(angle_sq.mean() / 4000), rel=0.01)


def test_effective_decay_gives_the_angle_of_a_weight_that_is_not_invariant():
    growth, angle_sq, pull, decay = adamw_with_a_pull(5e-3)
    mean = -pull.mean() / 2 / 4000 / 0.1  # <w, g/sqrt(v)> / ||w||^2
    decay = effective_decay(0.02, w_dot_grad=mean, norm_sq=1.0)
    angle = math.sqrt(2 * 0.1 * float(decay) / growth_gain(AdamW(0.1)))
    assert angle == pytest.approx(math.sqrt(angle_sq.mean() / 4000), rel=0.02)
    assert abs(growth.mean()) < 0.2


def test_the_norm_follows_from_the_present_one():
    """Steps of constant length turn as 1/||w||, those of SGD as 1/||w||^2."""
    for rule, power in ((AdamW(1e-3, 0.1), 1), (SGD(0.1, 5e-4), 2)):
        star = rule.equilibrium(unit_grad_sq=1.0, dim=100.0)
        there = equilibrium_from_gain(
            growth_gain(rule),
            decay_in_force=rule.decay_per_step,
            norm=2 * star.norm,
            angle=star.angle / 2**power,
            norm_power=power,
        )
        assert float(there.norm) == pytest.approx(star.norm, rel=1e-3)


def test_where_nothing_turns_or_balances_there_is_no_gain():
    assert np.isnan(measured_gain(0.1, decay=0.01, angle_sq=0.0))
    assert np.isnan(equilibrium_from_gain(-3.0, decay_in_force=1e-4).angle)
    with pytest.raises(EquilibriaError, match="expected both or neither"):
        equilibrium_from_gain(1.0, decay_in_force=1e-4, norm=1.0)
    with pytest.raises(EquilibriaError, match="norm_power"):
        equilibrium_from_gain(1.0, decay_in_force=1e-4, norm_power=3)


def test_an_inner_product_of_no_vectors_is_refused():
    with pytest.raises(EquilibriaError, match="expected an inner product of these vectors"):
        norm_budget(1.0, shrink=0.0, w_dot_update=-10.0, update_sq=0.01)
