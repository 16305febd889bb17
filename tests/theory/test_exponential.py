"""Closed forms of a constant folded schedule against the recursion, polynomial roots and torch's own overflow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.exponential import (
    LARGEST,
    constant_schedule,
    decay_bounds,
    decay_limit,
    decay_roots,
    overflow_horizon,
    power_schedule,
)
from equilibria.theory.folding import fold

momenta = st.floats(0.0, 0.99)
fractions = st.floats(1e-6, 1.0)


@settings(deadline=None, max_examples=100)
@given(momenta, fractions)
def test_roots_solve_the_quadratic(g, fraction):
    product = fraction * decay_limit(g) * (1 - 1e-9)
    roots = decay_roots(1.0, product, momentum=g)
    assert roots.z1 + roots.z2 == pytest.approx(1 + g - product, rel=1e-12)
    assert roots.z1 * roots.z2 == pytest.approx(g, rel=1e-12, abs=1e-15)
    assert 0 < roots.z1 <= 1 and roots.z1 >= roots.z2 >= 0
    reference = np.roots([1, -(1 + g - product), g]).real
    # a nearly double root is only determined to the square root of the rounding error
    assert reference.max() == pytest.approx(roots.z1, abs=1e-7)


@settings(deadline=None, max_examples=100)
@given(momenta, fractions)
def test_decay_bounds_hold(g, fraction):
    product = fraction * decay_limit(g) * (1 - 1e-9)
    bounds = decay_bounds(1.0, product, momentum=g)
    decay = decay_roots(1.0, product, momentum=g).decay
    assert bounds.low * (1 - 1e-12) <= decay <= bounds.high * (1 + 1e-12)


@pytest.mark.parametrize(
    ("product", "low", "decay", "high"),
    [(5e-5, 0.00049975, 0.00050227, 0.00099950), (2e-3, 0.019608, 0.026485, 0.039216)],
)
def test_decay_bounds_printed(product, low, decay, high):
    bounds = decay_bounds(1.0, product, momentum=0.9)
    digits = 5e-9 if product < 1e-3 else 5e-7
    assert bounds.low == pytest.approx(low, abs=digits)
    assert decay_roots(1.0, product, momentum=0.9).decay == pytest.approx(decay, abs=digits)
    assert bounds.high == pytest.approx(high, abs=digits)
    # the paper's upper bound t/(1+t) is violated
    assert decay_roots(1.0, product, momentum=0.9).decay > bounds.low


def test_published_setting():
    roots = decay_roots(0.1, 5e-4, momentum=0.9)
    assert roots.z1 == pytest.approx(0.99949772836789, abs=5e-15)
    assert roots.growth == pytest.approx(1.0010053006, abs=5e-11)
    assert roots.growth**391 == pytest.approx(1.4812334, abs=5e-8)


@pytest.mark.parametrize(("product", "inverse"), [(5e-5, 0.9954545), (5e-4, 0.9498758), (2e-3, 0.6669442)])
def test_amplitude(product, inverse):
    roots = decay_roots(0.1, product / 0.1, momentum=0.9)
    assert 1 / roots.amplitude == pytest.approx(inverse, abs=5e-8)
    late = fold(0.1, product / 0.1, momentum=0.9, steps=1000)
    assert math.exp(late.log_scale[-1]) * roots.z1**1000 == pytest.approx(inverse, abs=5e-8)


def test_small_products_lose_no_digits():
    roots = decay_roots(1e-6, 1e-9, momentum=0.9)
    assert roots.decay == pytest.approx(1e-15 / 0.1, rel=1e-12)
    assert decay_roots(0.1, 0.0, momentum=0.9).z1 == 1


def test_without_momentum_and_without_decay():
    assert decay_roots(0.1, 0.5).z1 == pytest.approx(0.95, rel=1e-15)
    assert decay_roots(0.1, 0.5).z2 == 0
    still = decay_roots(0.1, 0.0, momentum=0.9)
    assert (still.z1, still.z2, still.growth) == (1, 0.9, 1)


def test_roots_broadcast_over_layers():
    lr, wd = np.array([0.1, 0.01, 0.001]), np.array([[5e-4], [1e-3]])
    roots = decay_roots(lr, wd, momentum=0.9)
    assert roots.z1.shape == (2, 3)
    assert roots.z1[1, 2] == decay_roots(0.001, 1e-3, momentum=0.9).z1


@pytest.mark.parametrize(
    ("lr", "wd", "momentum"),
    [(0.1, 5e-4, 0.9), (0.1, 5e-3, 0.9), (0.1, 0.02, 0.9), (0.3, 0.7, 0.0), (1.0, 0.25, 0.25), (1.0, 0.2499999, 0.25)],
)
def test_constant_schedule_is_the_recursion(lr, wd, momentum):
    folded = fold(lr, wd, momentum=momentum, steps=500)
    closed = constant_schedule(lr, wd, step=np.arange(500), momentum=momentum)
    np.testing.assert_allclose(closed.log_scale, folded.log_scale[:-1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(closed.lr, folded.lr, rtol=5e-11)


def test_a_double_root_grows_like_step_times_power():
    assert np.isinf(decay_roots(1.0, 0.25, momentum=0.25).amplitude)
    closed = constant_schedule(1.0, 0.25, step=[0, 1, 10], momentum=0.25)
    np.testing.assert_allclose(np.exp(-closed.log_scale), [1, 0.75, 0.5**10 * 6], rtol=1e-13)


def test_power_schedule_differs_by_the_amplitude():
    z = decay_roots(0.1, 5e-4, momentum=0.9)
    exact = constant_schedule(0.1, 5e-4, step=5000, momentum=0.9)
    power = power_schedule(0.1, 5e-4, step=5000, momentum=0.9)
    assert power.lr / exact.lr == pytest.approx(z.amplitude**2, rel=1e-10)
    assert power.start_buffer == pytest.approx((1 - 1 / z.z1) / 0.1, rel=1e-12)
    no_momentum = power_schedule(0.1, 0.5, step=7)
    assert no_momentum.lr == pytest.approx(0.1 * 0.95**-15, rel=1e-13)
    assert no_momentum.lr == pytest.approx(constant_schedule(0.1, 0.5, step=7).lr, rel=1e-13)


def test_complex_roots_are_rejected():
    with pytest.raises(EquilibriaError, match=r"lr\*weight_decay=0.003 .* = 0.0026334"):
        decay_roots(0.1, 0.03, momentum=0.9)
    with pytest.raises(EquilibriaError, match=r"lr\*weight_decay < "):
        decay_roots(1.0, 1.0)
    assert decay_limit(0.9) == pytest.approx(0.0026334, abs=5e-8)


def test_overflow_horizon_of_the_published_setting():
    horizon = overflow_horizon(0.1, 5e-4, momentum=0.9)
    assert (horizon.variance, horizon.lr) == (88_309, 90_600)
    assert horizon.variance / 391 == pytest.approx(225.9, abs=0.05)
    assert horizon.lr / 391 == pytest.approx(231.7, abs=0.05)
    assert horizon.weight == pytest.approx(176_600, abs=50)
    assert horizon.weight / 391 == pytest.approx(452, abs=0.5)
    half = overflow_horizon(0.1, 5e-4, momentum=0.9, dtype="float16")
    assert half.variance == pytest.approx(11_040, abs=10)
    assert half.variance / 391 == pytest.approx(28, abs=0.5)


def test_largest_values_are_those_of_torch():
    assert {name: torch.finfo(getattr(torch, name)).max for name in LARGEST} == LARGEST


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 0.95), st.floats(0.05, 0.99), st.sampled_from(sorted(LARGEST)[:3]))
def test_overflow_horizon_is_the_first_step(g, fraction, dtype):
    product = fraction * float(decay_limit(g))
    horizon = overflow_horizon(0.5, 2 * product, momentum=g, dtype=dtype)
    steps = horizon.lr + 1
    folded = fold(0.5, 2 * product, momentum=g, steps=steps)
    limit = math.log(LARGEST[dtype])
    assert folded.overflow[dtype] == min(horizon.variance, horizon.lr)
    assert folded.log_lr[horizon.lr] > limit - 1e-9 and folded.log_lr[horizon.lr - 1] <= limit + 1e-9


def test_no_decay_never_overflows():
    horizon = overflow_horizon(0.1, 0.0, momentum=0.9)
    assert horizon.variance is horizon.lr is horizon.weight is None


def test_torch_itself_stops_at_the_horizon():
    """torch converts lr to float32 inside step() and raises once it no longer fits."""
    horizon = overflow_horizon(0.1, 0.02, momentum=0.9)
    assert horizon.lr == 1711
    folded = fold(0.1, 0.02, momentum=0.9, steps=1712)
    assert math.exp(folded.log_scale[1711]) == pytest.approx(5.88e19, rel=0.005)
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    for t in (1709, 1710):
        optimizer.param_groups[0]["lr"] = float(folded.lr[t])
        weight.grad = torch.zeros(3)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = float(folded.lr[1711])
    weight.grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match="overflow"):
        optimizer.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda: decay_roots(-0.1, 0.1),
        lambda: decay_roots(0.1, math.nan),
        lambda: decay_roots("x", 0.1),
        lambda: decay_roots(0.1, 0.1, momentum=1.0),
        lambda: decay_bounds(0.1, 0.03, momentum=0.9),
        lambda: constant_schedule(0.0, 0.1, step=1),
        lambda: constant_schedule(0.1, 0.1, step=-1),
        lambda: constant_schedule(0.1, 0.1, step=0.5),
        lambda: constant_schedule(0.1, math.inf, step=1),
        lambda: power_schedule(0.1, 0.1, step=1, root="smaller"),
        lambda: power_schedule(0.1, 1e-4, step=1, momentum=0.9, root="third"),
        lambda: overflow_horizon(0.1, 0.1, dtype="int8"),
        lambda: overflow_horizon(0.0, 0.1),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(EquilibriaError, match="got "):
        call()
