"""Tapered-exponential schedules against the exact fold of the same step decay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.exponential import decay_roots
from equilibria.theory.folding import FoldState, fold, unfold
from equilibria.theory.texp import taper, texp, texp_ratio_error, texp_without_drop, unfold_step

PHASES = [(0, 0.1), (1000, 0.01), (2000, 0.001)]
RATES = np.repeat([0.1, 0.01, 0.001], 1000)


def step_by_step(weight_decay: float, *, drop: bool) -> list[float]:
    """The definition, one multiplication at a time, from numpy's polynomial roots."""
    z = [max(np.roots([1, -(1.9 - lr * weight_decay), 0.9]).real) for _, lr in PHASES]
    rates, phase = [0.1], 0
    for t in range(1, 3000):
        new = t // 1000
        if new != phase and drop:
            rates.append(rates[-1] * PHASES[new][1] / PHASES[phase][1] / (z[phase] * z[new]))
        else:
            rates.append(rates[-1] / z[new] ** 2)
        phase = new
    return rates


@pytest.mark.parametrize("wd", [5e-4, 1e-2])
def test_schedules_follow_their_definition(wd):
    np.testing.assert_allclose(texp(PHASES, wd, steps=3000, momentum=0.9).lr, step_by_step(wd, drop=True), rtol=1e-9)
    np.testing.assert_allclose(
        texp_without_drop(PHASES, wd, steps=3000, momentum=0.9).lr, step_by_step(wd, drop=False), rtol=1e-9
    )


@pytest.mark.parametrize(
    ("wd", "ratios", "digits"),
    [(5e-4, {50: 0.99147, 999: 0.991428, 2999: 0.991432}, 5e-6), (1e-2, {50: 0.7967, 999: 0.7939, 2999: 0.7956}, 5e-5)],
)
def test_texp_is_off_by_the_start_only(wd, ratios, digits):
    exact = fold(RATES, wd, momentum=0.9)
    ratio = exact.lr / texp(PHASES, wd, steps=3000, momentum=0.9).lr
    for t, printed in ratios.items():
        assert ratio[t] == pytest.approx(printed, abs=digits)
    roots = decay_roots(0.1, wd, momentum=0.9)
    assert ratio[999] == pytest.approx(1 / roots.z1 / roots.amplitude**2, rel=1e-6)


def test_the_drop_carries_a_second_order_transient_only():
    exact = fold(RATES, 5e-4, momentum=0.9)
    roots = texp(PHASES, 5e-4, steps=3000, momentum=0.9).root
    assert abs(exact.alpha[1000] - roots[1]) == pytest.approx(2.0e-7, rel=0.05)
    assert abs(exact.alpha[2000] - roots[2]) == pytest.approx(2.0e-9, rel=0.05)
    # the printed boundary factor z_I^-2 against the corrected one
    assert 1 - roots[0] * roots[1] / roots[1] ** 2 == pytest.approx(4.5e-4, rel=0.02)


@pytest.mark.parametrize(
    ("wd", "printed", "digits"),
    [(5e-4, (0.991428, 1.000012, 1.000868), 5e-7), (1e-2, (0.794, 0.977, 0.994), 5e-4)],
)
def test_without_drop_emulates_a_reduced_weight_decay(wd, printed, digits):
    exact = fold(0.1, wd * RATES / 0.1, momentum=0.9)
    ratio = exact.lr / texp_without_drop(PHASES, wd, steps=3000, momentum=0.9).lr
    np.testing.assert_allclose(ratio[[999, 1999, 2999]], printed, atol=digits)


def test_theorem_2_7_and_the_sharper_bound():
    exact = fold(RATES, 5e-4, momentum=0.9)
    gap = texp_ratio_error(PHASES, exact.alpha, weight_decay=5e-4, momentum=0.9)
    assert gap.step.size == 2997 and not set(gap.step) & {0, 1000, 2000}
    first = np.isin(gap.step, [1, 1001, 2001])
    np.testing.assert_allclose(gap.error[first], [8.6e-4, 3.9e-7, 3.9e-9], rtol=0.02)
    np.testing.assert_allclose(gap.bound[first], 1.35, rtol=2e-3)
    assert (gap.error < gap.bound + 1e-15).all()
    assert (gap.error <= gap.sharp_bound + 1e-15).all()
    clear = gap.sharp_bound > 1e-10
    assert (gap.error[clear] / gap.sharp_bound[clear]).max() == pytest.approx(0.950, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(
    st.floats(0.1, 0.95),
    st.floats(0.01, 0.6),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3),
    st.integers(5, 60),
)
def test_the_bounds_hold_for_any_step_decay(momentum, fraction, factors, length):
    wd = fraction * (1 - math.sqrt(momentum)) ** 2 / 0.1
    rates = 0.1 * np.cumprod([1.0, *factors])
    if decay_roots(0.1, wd, momentum=momentum).z1 < 0.5:
        return
    phases = [(i * length, float(lr)) for i, lr in enumerate(rates)]
    alpha = fold(np.repeat(rates, length), wd, momentum=momentum).alpha
    gap = texp_ratio_error(phases, alpha, weight_decay=wd, momentum=momentum)
    assert (gap.error <= gap.bound + 1e-14).all()
    assert (gap.error <= gap.sharp_bound + 1e-14).all()


def test_schedules_survive_beyond_float64():
    schedule = texp([(0, 0.1)], 0.02, steps=20_000, momentum=0.9)
    assert np.isinf(schedule.lr[-1]) and np.isfinite(schedule.log_lr).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: texp([], 0.1, steps=3),
        lambda: texp([(1, 0.1)], 0.1, steps=3),
        lambda: texp([(0, 0.1), (2, 0.01), (2, 0.001)], 0.1, steps=9),
        lambda: texp([(0, 0.1), (5, 0.01)], 0.1, steps=5),
        lambda: texp([(0, 0.0)], 0.1, steps=5),
        lambda: texp([(0, math.nan)], 0.1, steps=5),
        lambda: texp([0.1], 0.1, steps=5),
        lambda: texp([(0, 0.1, 3)], 0.1, steps=5),
        lambda: texp([(0, 0.1)], 0.1, steps=5, momentum=0.9),
        lambda: texp([(0, 0.1)], -0.1, steps=5),
        lambda: texp_without_drop([(0, 0.1)], 0.1, steps=0),
        lambda: texp_ratio_error([(0, 0.01), (2, 0.1)], [1.0] * 5, weight_decay=1e-3),
        lambda: texp_ratio_error([(0, 1.0)], [1.0] * 5, weight_decay=0.7),
        lambda: texp_ratio_error([(0, 0.1)], [1.0, -1.0], weight_decay=1e-3),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(EquilibriaError, match="got "):
        call()


SHORT_PHASES = [(0, 0.1), (40, 0.02), (70, 0.004)]


def short_rates():
    return [0.1] * 40 + [0.02] * 30 + [0.004] * 30


@pytest.mark.parametrize(("whole", "instant_drop"), [(texp, True), (texp_without_drop, False)])
def test_step_by_step_is_the_whole_schedule(whole, instant_drop):
    expected = whole(SHORT_PHASES, 5e-3, steps=100, momentum=0.9).log_lr
    now, actual = None, []
    for lr in short_rates():
        now = taper(now, lr, weight_decay=5e-3, momentum=0.9, instant_drop=instant_drop)
        actual.append(now.log_lr)
    assert actual == pytest.approx(expected.tolist(), abs=1e-13)
    assert now.first_lr == 0.1


@given(decay=st.floats(0, 0.02), momentum=st.sampled_from([0.0, 0.5, 0.9]), exponent=st.integers(-3, 40))
def test_unfolding_step_by_step_is_unfolding_the_schedule(decay, momentum, exponent):
    rng = np.random.default_rng(0)
    log_lr = np.log(rng.uniform(0.01, 0.2, 30)) + 0.3 * np.arange(30)
    expected = unfold(log_lr, decay, momentum=momentum, log=True)
    state = FoldState(exponent=exponent)
    for t, value in enumerate(log_lr):
        step = unfold_step(state, value, weight_decay=decay, momentum=momentum)
        assert step.lr == pytest.approx(math.exp(value - 2 * exponent * math.log(2)), rel=1e-12)
        assert math.log(step.alpha) == pytest.approx(expected.log_scale[t] - expected.log_scale[t + 1], abs=1e-12)
        state = step.state
        assert state.q == pytest.approx(expected.q[t + 1], rel=1e-10)
        assert state.log_scale == pytest.approx(expected.log_scale[t + 1], abs=1e-12)


def test_a_power_of_two_does_not_touch_the_mantissa():
    plain = unfold_step(FoldState(), 3.3, weight_decay=0.1)
    divided = unfold_step(FoldState(exponent=7), 3.3, weight_decay=0.1)
    assert divided.lr == plain.lr * 2.0**-14


def test_the_folded_schedule_explains_itself():
    folded = fold(short_rates(), 5e-3, momentum=0.9)
    state = FoldState()
    for t, log_lr in enumerate(folded.log_lr):
        state = unfold_step(state, float(log_lr), weight_decay=5e-3, momentum=0.9).state
        assert state.log_scale == pytest.approx(folded.log_scale[t + 1], abs=1e-12)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan])
def test_a_learning_rate_that_cannot_be_tapered_raises(lr):
    with pytest.raises(EquilibriaError, match="got lr="):
        taper(None, lr, weight_decay=1e-3)


def test_a_learning_rate_beyond_float64_raises():
    with pytest.raises(EquilibriaError, match="got log_lr=800"):
        unfold_step(FoldState(), 800.0, weight_decay=1e-3)
