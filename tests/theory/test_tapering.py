from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.folding import FoldState, fold, unfold
from equilibria.theory.tapering import explain, taper
from equilibria.theory.texp import texp, texp_without_drop

PHASES = [(0, 0.1), (40, 0.02), (70, 0.004)]


def rates():
    return [0.1] * 40 + [0.02] * 30 + [0.004] * 30


@pytest.mark.parametrize(("whole", "instant_drop"), [(texp, True), (texp_without_drop, False)])
def test_step_by_step_is_the_whole_schedule(whole, instant_drop):
    expected = whole(PHASES, 5e-3, steps=100, momentum=0.9).log_lr
    now, found = None, []
    for lr in rates():
        now = taper(now, lr, weight_decay=5e-3, momentum=0.9, instant_drop=instant_drop)
        found.append(now.log_lr)
    assert found == pytest.approx(expected.tolist(), abs=1e-13)
    assert now.first_lr == 0.1


@given(decay=st.floats(0, 0.02), momentum=st.sampled_from([0.0, 0.5, 0.9]), exponent=st.integers(-3, 40))
def test_explaining_a_schedule_is_unfolding_it(decay, momentum, exponent):
    rng = np.random.default_rng(0)
    log_lr = np.log(rng.uniform(0.01, 0.2, 30)) + 0.3 * np.arange(30)
    expected = unfold(log_lr, decay, momentum=momentum, log=True)
    state = FoldState(exponent=exponent)
    for t, each in enumerate(log_lr):
        step = explain(state, each, weight_decay=decay, momentum=momentum)
        assert step.lr == pytest.approx(math.exp(each - 2 * exponent * math.log(2)), rel=1e-12)
        assert math.log(step.alpha) == pytest.approx(expected.log_scale[t] - expected.log_scale[t + 1], abs=1e-12)
        state = step.state
        assert state.q == pytest.approx(expected.q[t + 1], rel=1e-10)
        assert state.log_scale == pytest.approx(expected.log_scale[t + 1], abs=1e-12)


def test_a_power_of_two_does_not_touch_the_mantissa():
    plain = explain(FoldState(), 3.3, weight_decay=0.1)
    divided = explain(FoldState(exponent=7), 3.3, weight_decay=0.1)
    assert divided.lr == plain.lr * 2.0**-14


def test_the_folded_schedule_explains_itself():
    folded = fold(rates(), 5e-3, momentum=0.9)
    state = FoldState()
    for t, log_lr in enumerate(folded.log_lr):
        state = explain(state, float(log_lr), weight_decay=5e-3, momentum=0.9).state
        assert state.log_scale == pytest.approx(folded.log_scale[t + 1], abs=1e-12)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan])
def test_a_learning_rate_that_cannot_be_tapered_is_refused(lr):
    with pytest.raises(EquilibriaError, match="got lr="):
        taper(None, lr, weight_decay=1e-3)


def test_a_learning_rate_beyond_float64_is_refused():
    with pytest.raises(EquilibriaError, match="got log_lr=800"):
        explain(FoldState(), 800.0, weight_decay=1e-3)
