"""Bounds on norm and angle against simulated recursions, with gradients as bad as the bounds allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from equilibria.errors import EquilibriaError
from equilibria.theory.deviation import angle_deviation, chi_square_tail, momentum_contraction, norm_sq_floor
from equilibria.theory.rules import SGD, AdamW


@given(
    rate=st.floats(1e-4, 0.29),
    start=st.floats(1e-2, 1e2),
    shape=st.sampled_from(["least", "alternating", "random"]),
    seed=st.integers(0, 1000),
)
def test_no_norm_is_below_the_floor(rate, start, shape, seed):
    """The exact recursion x' = (1 - lr wd)^2 x + G lr^2/x with every G at or above l."""
    lr, least, steps = 0.5, 2.0, 60
    rng = np.random.default_rng(seed)
    squares = {
        "least": np.full(steps, least),
        "alternating": np.where(np.arange(steps) % 2, least, 50 * least),
        "random": least + rng.exponential(5.0, steps),
    }[shape]
    x, path = start, [start]
    for square in squares:
        x = (1 - rate) ** 2 * x + square * lr**2 / x
        path.append(x)
    floor = norm_sq_floor(np.arange(steps + 1), start, lr=lr, weight_decay=rate / lr, least_unit_grad_sq=least)
    assert np.all(np.array(path) >= floor * (1 - 1e-12) - 1e-12)


def test_the_floor_is_reached_by_the_least_gradients_from_below():
    lr, decay, least = 0.1, 0.1, 3.0
    level = float(norm_sq_floor(1e9, 1.0, lr=lr, weight_decay=decay, least_unit_grad_sq=least))
    settled = SGD(lr, decay).equilibrium(unit_grad_sq=least).norm ** 2
    assert level == pytest.approx(settled, rel=1e-12)


def test_too_much_decay_for_the_lemma_raises():
    with pytest.raises(EquilibriaError, match="lr \\* weight_decay"):
        norm_sq_floor(1, 1.0, lr=1.0, weight_decay=0.4, least_unit_grad_sq=1.0)


@given(
    momentum=st.floats(0.05, 0.95),
    share=st.floats(1e-4, 0.2),
    coupling=st.floats(0.0, 0.99),
    direction=st.lists(st.floats(-1, 1), min_size=3, max_size=3),
)
def test_the_contraction_is_no_larger_than_the_lemma_says_to_first_order(momentum, share, coupling, direction):
    """Applied to a vector, as the lemma states it; the share is of the largest decay that its condition allows."""
    decay = share * (1 - momentum**2) * (1 - momentum) / 8
    factors = momentum_contraction(momentum, decay, coupling=coupling)
    d = np.array(direction)
    slow = 2 * decay / (1 - momentum)
    matrix = np.diag([1 - slow, momentum, momentum**2 * (1 + slow)])
    matrix -= coupling * decay * np.outer([1, -2 * momentum, momentum**2], [1, 1, 1])
    assert np.sum((matrix @ d) ** 2) <= factors.exact * np.sum(d**2) * (1 + 1e-12) + 1e-300
    omitted = slow**2 + 18 * (coupling * decay) ** 2 + 12 * coupling * decay * slow  # all terms of order decay^2
    assert factors.exact <= factors.bound + omitted + 1e-14


def test_without_coupling_the_bound_is_missed_by_the_square():
    factors = momentum_contraction(0.9, 1e-4)
    assert factors.exact - factors.bound == pytest.approx(4e-8 / 0.01, rel=1e-9)


def test_a_decay_beyond_the_lemmas_condition_raises():
    with pytest.raises(EquilibriaError, match="expected less than"):
        momentum_contraction(0.9, 0.01)


def angles(rule: SGD, shape: float, *, steps: int, trials: int) -> np.ndarray:
    """Angles of the scalar recursion in equilibrium, with squared unit gradients of a Gamma law of mean 1."""
    rng = np.random.default_rng(0)
    eps = rule.lr * rule.weight_decay
    x = np.full(trials, float(rule.equilibrium(unit_grad_sq=1.0).norm) ** 2)
    kept = []
    for step in range(steps):
        square = rng.gamma(shape, 1 / shape, trials)
        if step >= steps // 2:
            kept.append(np.arctan(rule.lr * np.sqrt(square) / ((1 - eps) * x)))
        x = (1 - eps) ** 2 * x + square * rule.lr**2 / x
    return np.concatenate(kept)


@pytest.mark.parametrize("shape", [3.0, 30.0])
@pytest.mark.parametrize("failure", [0.3, 0.05, 0.01])
def test_angles_are_rarely_farther_off_than_the_bound(shape, failure):
    rule = SGD(0.1, 0.02)
    law = angle_deviation(rule, 1 / shape, failure=failure)
    off = np.abs(angles(rule, shape, steps=2000, trials=50) - law.angle)
    assert np.mean(off > law.bound) <= failure
    assert np.mean(off > law.printed_bound) <= law.printed_failure
    assert np.quantile(off, 1 - failure) > law.bound / 10  # it is a bound of the right size


def test_the_printed_bound_exceeds_the_angle_and_does_not_shrink_with_lr():
    large, small = (angle_deviation(SGD(lr, 1e-3), 0.01) for lr in (0.1, 1e-3))
    assert small.printed_bound == pytest.approx(large.printed_bound, rel=1e-3) and small.printed_bound > large.angle
    assert large.bound / small.bound == pytest.approx(10, rel=1e-3)


def test_momentum_has_the_constant_of_equation_171():
    a, law = 0.9, angle_deviation(SGD(0.1, 1e-3, momentum=0.9), 0.001)
    k = np.array([1, -2 * a, a * a]) / (1 - a) ** 2
    expected = (1 - a) ** 2 * np.sqrt(2 * (1 - a * a)) / (2 * a * a) * np.linalg.norm(k) * 0.1
    assert law.printed_bound == pytest.approx(expected) and law.printed_failure == pytest.approx(0.1)


def test_other_rules_raise():
    for rule in (AdamW(1e-3, 0.1), SGD(0.1, 1e-3, momentum=0.9, nesterov=True)):
        with pytest.raises(EquilibriaError, match="expected SGD"):
            angle_deviation(rule, 0.01)


@pytest.mark.parametrize("dim", [1, 2, 7, 100, 1000])
def test_the_tail_of_chi_square_is_below_the_lemmas_bound(dim):
    """Both tails from scipy. The bound is Chernoff's: its rate in the dimension is the true one."""
    low, high = np.linspace(0.1, 1, 46), np.linspace(1, 3, 41)
    below, above = chi2.logcdf(dim * low, dim), chi2.logsf(dim * high, dim)
    assert np.all(below <= np.log(chi_square_tail(low, dim)) + 1e-12)
    assert np.all(above <= np.log(chi_square_tail(high, dim)) + 1e-12)
    if dim > 1:
        assert chi2.cdf(2 * dim, dim) > chi_square_tail(2, dim)  # the lower tail, as printed for every share
    if dim == 1000:  # Laplace's factor (1-b) sqrt(pi k) between bound and tail, up to 1/k of itself
        at_half = chi2.logcdf(dim / 2, dim) + np.log(np.sqrt(np.pi * dim) / 2)
        assert at_half == pytest.approx(np.log(chi_square_tail(0.5, dim)), abs=0.02)
