from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon
from equilibria.theory.holding import HOLDS, holding_weight_decay

RULES = [
    SGD(0.1, 5e-4, momentum=0.9),
    SGD(0.1, 5e-4, momentum=0.9, nesterov=True),
    SGDW(0.1, 5e-4, momentum=0.9),
    AdamW(1e-3, 0.1),
    Lion(1e-4, 1.0),
    Muon(0.02, 0.1),
]


def held(rule, hold):
    return getattr(rule.equilibrium(), hold)


@given(rule=st.sampled_from(RULES), hold=st.sampled_from(HOLDS), factor=st.floats(0.01, 5))
def test_the_equilibrium_is_the_same_at_another_learning_rate(rule, hold, factor):
    now = replace(rule, lr=rule.lr * factor)
    decay = holding_weight_decay(rule, now, hold=hold)
    assert held(replace(now, weight_decay=decay), hold) == pytest.approx(held(rule, hold), rel=1e-9)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_adam_with_l2_to_first_order(hold, factor):
    rule, scale = AdamL2(1e-3, 1e-3), {"unit_grad_sq": 1.0, "dim": 100.0}
    now = replace(rule, lr=rule.lr * factor)
    now = replace(now, weight_decay=holding_weight_decay(rule, now, hold=hold))
    found, wanted = (getattr(each.equilibrium(**scale), hold) for each in (now, rule))
    share = rule.decay_share(**scale)
    assert found == pytest.approx(wanted, rel=20 * share + 0.02)  # the second moment's lag adds to the time constant


@given(
    rule=st.sampled_from([SGD(0.1, 5e-4, momentum=0.9), SGDW(0.1, 5e-4, momentum=0.9)]),
    hold=st.sampled_from(HOLDS),
    momentum=st.floats(0.5, 0.95),
    factor=st.floats(0.1, 2),
)
def test_momentum_may_move_too(rule, hold, momentum, factor):
    now = replace(rule, momentum=momentum, lr=rule.lr * factor)
    decay = holding_weight_decay(rule, now, hold=hold)
    assert held(replace(now, weight_decay=decay), hold) == pytest.approx(held(rule, hold), rel=1e-9)


MOMENTA = st.one_of(st.just(0.0), st.floats(-4, 0).map(lambda power: 1 - 10**power))


@st.composite
def far_apart(draw):
    """A rule with an equilibrium, and the same rule far away in lr and momentum."""
    lr, eps, factor = (10 ** draw(st.floats(*bounds)) for bounds in ((-5, 0), (-7, -1), (-3, 3)))
    kind = draw(st.sampled_from([SGD, SGDW, AdamW]))
    before, after = draw(MOMENTA), draw(MOMENTA)
    names = [{"betas": (a, 0.999)} if kind is AdamW else {"momentum": a} for a in (before, after)]
    return kind(lr, eps / lr, **names[0]), kind(lr * factor, 0.0, **names[1])


@settings(max_examples=60)
@given(pair=far_apart(), hold=st.sampled_from(HOLDS))
def test_what_can_be_held_is_and_what_is_refused_cannot_be(pair, hold):
    """Against a scan of every weight decay; 1e-5, because the rate of AdamW comes from eigenvalues close to 1."""
    reference, current = pair
    wanted = held(reference, hold)
    try:
        decay = holding_weight_decay(reference, current, hold=hold)
    except EquilibriaError:
        reached = [value for eps in np.geomspace(1e-12, 2, 150) if (value := reached_at(current, eps, hold))]
        assert min(reached) > wanted * (1 - 1e-5) or max(reached) < wanted * (1 + 1e-5)
    else:
        assert held(replace(current, weight_decay=decay), hold) == pytest.approx(wanted, rel=1e-5)


def reached_at(rule, eps, hold):
    try:
        return held(replace(rule, weight_decay=eps / rule.lr), hold)
    except EquilibriaError:
        return None


def test_when_momentum_moves_angle_and_time_constant_part():
    before, now = SGD(0.1, 5e-5, momentum=0.9), SGD(0.1, 5e-5, momentum=0.8)
    first_order = {"angle": 1.8 / 1.9, "time_constant": 0.2 / 0.1}
    for hold, factor in first_order.items():
        assert holding_weight_decay(before, now, hold=hold) == pytest.approx(5e-5 * factor, rel=5e-3)


@pytest.mark.parametrize(
    ("before", "now", "hold", "message"),
    [
        (SGD(0.1, 0.0), SGD(0.1), "angle", "expected all above 0"),
        (SGD(0.1, 1e-3), SGD(0.0), "angle", "at lr=0"),
        (SGD(0.1, 1e-3), AdamW(0.1), "angle", "two rules of one kind"),
        (SGD(0.1, 1e-3), SGD(0.1), "norm", "expected one of: angle, time_constant"),
        (Lion(1e-4, 1.0), Lion(1e-4, 1.0, betas=(0.5, 0.9)), "angle", "expected the same momentum"),
        (SGD(0.1, 5e-2), SGD(0.1, momentum=0.99), "time_constant", "no weight decay does it"),
    ],
)
def test_what_cannot_be_held_is_refused(before, now, hold, message):
    with pytest.raises(EquilibriaError, match=message):
        holding_weight_decay(before, now, hold=hold)
