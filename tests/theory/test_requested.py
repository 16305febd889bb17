"""Settings for requested angles and for equilibria to keep, checked with the laws that they invert."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria import theory
from equilibria.errors import EquilibriaError
from equilibria.theory.angles import n_step_angles
from equilibria.theory.requested import (
    HOLDS,
    angle_per_step,
    decay_for_angle,
    holding_weight_decay,
    norm_power,
    steps_to_fall,
)

RULES = [
    theory.SGD(0.1, 1e-3),
    theory.SGD(0.1, 1e-3, momentum=0.9),
    theory.SGD(0.1, 1e-3, momentum=0.9, nesterov=True),
    theory.SGDW(0.1, 1e-3, momentum=0.9),
    theory.AdamW(1e-3, 0.1),
    theory.Lion(1e-3, 0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
@given(decay=st.floats(1e-5, 1e-2))
def test_the_decay_for_an_angle_undoes_the_equilibrium(rule, decay):
    angle = dataclasses.replace(rule, weight_decay=decay).equilibrium().angle
    assert decay_for_angle(rule, angle) == pytest.approx(decay, rel=1e-10)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
@pytest.mark.parametrize("steps", [1, 10, 200])
def test_the_angle_of_a_step_undoes_the_angle_of_many(rule, steps):
    """Exact for SGD; with momentum up to about lr wd times the steps of its memory, 1e-4 x 100 for Lion."""
    actual = n_step_angles(rule, steps)
    assert angle_per_step(rule, float(actual[-1]), steps=steps) == pytest.approx(actual[1], rel=0.01)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
def test_no_weight_decay_lowers_the_angle_in_as_many_steps_as_predicted(rule):
    """Against the moment recursion without decay, over 8000 steps in which 1/angle^2 doubles.

    The law leaves out the memory of momentum, 10 steps (Lion 100): twice that share of the steps. Adam's second moment
    remembers 1000 steps, and its lag makes the fall up to twice as fast.
    """
    steps, memory = 8000, 100 if isinstance(rule, theory.Lion) else 10
    angle = math.sqrt(steps_to_fall(rule, 0.01, end=0.005) / steps * 0.01**2 / 3)
    start = theory.settled(dataclasses.replace(rule, weight_decay=decay_for_angle(rule, angle)), dim=100.0)
    angles = theory.evolve(dataclasses.replace(rule, weight_decay=0.0), steps + 1, start=start, dim=100.0).angle
    assert angles[-1] == pytest.approx(angle / math.sqrt(2), rel=0.05)
    predicted = steps_to_fall(rule, angle, end=float(angles[-1]))
    if isinstance(rule, theory.AdamW):
        assert steps < predicted < 2 * steps
    else:
        assert predicted == pytest.approx(steps, rel=2 * memory / steps)


@given(start=st.floats(1e-4, 1.5), end=st.floats(1e-4, 1.5), between=st.floats(1e-4, 1.5))
def test_steps_of_falls_add_up_and_a_rise_takes_none(start, end, between):
    rule = theory.SGD(0.1, momentum=0.9)
    low, middle, high = sorted((start, end, between))
    assert steps_to_fall(rule, low, end=high) == 0
    parts = steps_to_fall(rule, high, end=middle) + steps_to_fall(rule, middle, end=low)
    assert parts == pytest.approx(steps_to_fall(rule, high, end=low), rel=1e-9, abs=1e-9)


def test_the_angle_falls_with_the_square_of_the_norm_for_sgd_alone():
    powers = {type(rule).__name__: norm_power(rule) for rule in [*RULES, theory.AdamL2(0.1), theory.Muon(0.1)]}
    assert powers == {"SGD": 2, "SGDW": 2, "AdamW": 1, "Lion": 1, "AdamL2": 1, "Muon": 1}


def test_adam_with_l2_counts_as_adamw_for_the_angle_of_a_step():
    assert angle_per_step(theory.AdamL2(1e-3), 0.5, steps=30) == angle_per_step(theory.AdamW(1e-3), 0.5, steps=30)


@given(angle=st.floats(1e-6, 1.5), steps=st.integers(1, 10_000))
def test_without_momentum_cosines_multiply(angle, steps):
    actual = angle_per_step(theory.SGD(0.1), angle, steps=steps)
    assert steps * math.log1p(-2 * math.sin(actual / 2) ** 2) == pytest.approx(
        math.log1p(-2 * math.sin(angle / 2) ** 2), rel=1e-9
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: angle_per_step(theory.SGD(0.1), 1.6, steps=3), "got angle=1.6"),
        (lambda: angle_per_step(theory.SGD(0.1), 1.0, steps=0), "got steps=0"),
        (lambda: angle_per_step("sgd", 1.0, steps=3), "sgd"),
        (lambda: decay_for_angle(theory.SGD(0.1), 0.0), "got angle=0"),
        (lambda: steps_to_fall(theory.SGD(0.1), 0.0, end=0.1), "got start=0"),
        (lambda: steps_to_fall(theory.SGD(0.1), 0.1, end=2.0), "got end=2"),
        (lambda: decay_for_angle(theory.SGD(0.0), 0.1), "got lr=0"),
        (lambda: decay_for_angle(theory.AdamL2(0.1), 0.1), "got unit_grad_sq=None, dim=None"),
    ],
)
def test_bad_input_raises(call, message):
    with pytest.raises(EquilibriaError, match=message):
        call()


HOLDING_RULES = [
    theory.SGD(0.1, 5e-4, momentum=0.9),
    theory.SGD(0.1, 5e-4, momentum=0.9, nesterov=True),
    theory.SGDW(0.1, 5e-4, momentum=0.9),
    theory.AdamW(1e-3, 0.1),
    theory.Lion(1e-4, 1.0),
    theory.Muon(0.02, 0.1),
]


def quantity(rule, hold):
    if hold == "norm":
        return float(theory.settled(rule).norm_sq) ** 0.5
    return getattr(rule.equilibrium(), hold)


@given(rule=st.sampled_from(HOLDING_RULES), hold=st.sampled_from(HOLDS), factor=st.floats(0.01, 5))
def test_the_equilibrium_is_the_same_at_another_learning_rate(rule, hold, factor):
    now = dataclasses.replace(rule, lr=rule.lr * factor)
    decay = holding_weight_decay(rule, now, hold=hold)
    assert quantity(dataclasses.replace(now, weight_decay=decay), hold) == pytest.approx(quantity(rule, hold), rel=1e-9)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_adam_with_l2_to_first_order(hold, factor):
    rule, scale = theory.AdamL2(1e-3, 1e-3), {"unit_grad_sq": 1.0, "dim": 100.0}
    now = dataclasses.replace(rule, lr=rule.lr * factor)
    now = dataclasses.replace(now, weight_decay=holding_weight_decay(rule, now, hold=hold))
    reached, wanted = (getattr(variant.equilibrium(**scale), hold) for variant in (now, rule))
    share = rule.decay_share(**scale)
    assert reached == pytest.approx(wanted, rel=20 * share + 0.02)  # the second moment's lag adds to the time constant


@given(
    rule=st.sampled_from([theory.SGD(0.1, 5e-4, momentum=0.9), theory.SGDW(0.1, 5e-4, momentum=0.9)]),
    hold=st.sampled_from(HOLDS),
    momentum=st.floats(0.5, 0.95),
    factor=st.floats(0.1, 2),
)
def test_momentum_may_move_too(rule, hold, momentum, factor):
    now = dataclasses.replace(rule, momentum=momentum, lr=rule.lr * factor)
    decay = holding_weight_decay(rule, now, hold=hold)
    assert quantity(dataclasses.replace(now, weight_decay=decay), hold) == pytest.approx(quantity(rule, hold), rel=1e-9)


MOMENTA = st.one_of(st.just(0.0), st.floats(-4, 0).map(lambda power: 1 - 10**power))


@st.composite
def far_apart(draw):
    """A rule with an equilibrium, and the same rule far away in lr and momentum."""
    lr, eps, factor = (10 ** draw(st.floats(*bounds)) for bounds in ((-5, 0), (-7, -1), (-3, 3)))
    kind = draw(st.sampled_from([theory.SGD, theory.SGDW, theory.AdamW]))
    before, after = draw(MOMENTA), draw(MOMENTA)
    names = [{"betas": (a, 0.999)} if kind is theory.AdamW else {"momentum": a} for a in (before, after)]
    return kind(lr, eps / lr, **names[0]), kind(lr * factor, 0.0, **names[1])


@settings(max_examples=60)
@given(pair=far_apart(), hold=st.sampled_from(HOLDS))
def test_weight_decay_holds_the_equilibrium_or_none_exists(pair, hold):
    """Against a scan of every weight decay; 1e-5, because the rate of AdamW comes from eigenvalues close to 1."""
    reference, current = pair
    wanted = quantity(reference, hold)
    try:
        decay = holding_weight_decay(reference, current, hold=hold)
    except EquilibriaError:
        reached = [value for eps in np.geomspace(1e-12, 2, 150) if (value := reached_at(current, eps, hold))]
        assert min(reached) > wanted * (1 - 1e-5) or max(reached) < wanted * (1 + 1e-5)
    else:
        assert quantity(dataclasses.replace(current, weight_decay=decay), hold) == pytest.approx(wanted, rel=1e-5)


def reached_at(rule, eps, hold):
    try:
        return quantity(dataclasses.replace(rule, weight_decay=eps / rule.lr), hold)
    except EquilibriaError:
        return None


def test_when_momentum_moves_angle_and_time_constant_part():
    before, now = theory.SGD(0.1, 5e-5, momentum=0.9), theory.SGD(0.1, 5e-5, momentum=0.8)
    first_order = {"angle": 1.8 / 1.9, "time_constant": 0.2 / 0.1}
    for hold, factor in first_order.items():
        assert holding_weight_decay(before, now, hold=hold) == pytest.approx(5e-5 * factor, rel=5e-3)


@pytest.mark.parametrize(
    ("before", "now", "hold", "message"),
    [
        (theory.SGD(0.1, 0.0), theory.SGD(0.1), "angle", "expected all above 0"),
        (theory.SGD(0.1, 1e-3), theory.SGD(0.0), "angle", "at lr=0"),
        (theory.SGD(0.1, 1e-3), theory.AdamW(0.1), "angle", "two rules of one kind"),
        (theory.SGD(0.1, 1e-3), theory.SGD(0.1), "speed", "expected one of: angle, time_constant, norm"),
        (theory.Lion(1e-4, 1.0), theory.Lion(1e-4, 1.0, betas=(0.5, 0.9)), "angle", "expected the same momentum"),
        (theory.SGD(0.1, 5e-2), theory.SGD(0.1, momentum=0.99), "time_constant", "no weight decay does it"),
    ],
)
def test_holding_without_an_equilibrium_raises(before, now, hold, message):
    with pytest.raises(EquilibriaError, match=message):
        holding_weight_decay(before, now, hold=hold)
