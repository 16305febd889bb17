"""Measured laws: with the powers of a closed rule they are that rule, in and out of equilibrium."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGDW, AdamL2, AdamW, Identified, Lion, Muon, cold_start, evolve, rescaled, settled
from equilibria.theory.identified import PowerLaw, identified_from, identified_point
from equilibria.theory.memory import Memory, ema_memory
from equilibria.theory.rules import closed_rule
from equilibria.theory.settling import relaxation, settling_steps
from equilibria.theory.targets import rescale_sq_factors, targets, unscaled_settings

DECOUPLED = PowerLaw(1.0, lr=1.0, weight_decay=1.0)
NO_MEMORY = Memory((), ())


def like_muon(rule: Muon) -> Identified:
    step = PowerLaw(1.0, lr=1.0, entries=0.5)
    return Identified(rule.lr, rule.weight_decay, name="Muon", step=step, decay=DECOUPLED, memory=rule.memory)


def like_sgdw(rule: SGDW) -> Identified:
    step = PowerLaw(1.0, lr=1.0, grad=1.0)
    return Identified(rule.lr, rule.weight_decay, name="SGDW", step=step, decay=DECOUPLED, memory=NO_MEMORY)


def like_adam_l2(rule: AdamL2) -> Identified:
    """Adam with L2 without memories and with a decay far below its gradient."""
    step = PowerLaw(1.0, lr=1.0, entries=0.5)
    decay = PowerLaw(1.0, lr=1.0, weight_decay=1.0, grad=-1.0, entries=0.5)
    return Identified(rule.lr, rule.weight_decay, name="Adam", step=step, decay=decay, memory=NO_MEMORY)


@given(st.floats(1e-4, 0.1), st.floats(1e-3, 0.5), st.floats(0.0, 0.98), st.floats(1.0, 1e6))
def test_a_step_of_fixed_length_has_muons_law(lr, weight_decay, momentum, entries):
    rule = Muon(lr, weight_decay, momentum=momentum)
    law = like_muon(rule)
    expected = targets(rule, rule.lr, dim=entries)
    result = law.equilibrium(dim=entries)
    assert result.angle == pytest.approx(float(expected.angle), rel=1e-9)
    assert result.norm**2 == pytest.approx(float(expected.norm_sq), rel=1e-9)
    start = cold_start(rule, 3.0)
    path, same = evolve(rule, 50, start=start, dim=entries), evolve(law, 50, start=start, dim=entries)
    np.testing.assert_allclose(same.norm_sq, path.norm_sq, rtol=1e-9)
    np.testing.assert_allclose(same.angle, path.angle, rtol=1e-7)


def test_a_step_as_long_as_the_gradient_has_the_law_of_sgdw():
    rule = SGDW(0.1, 1e-2)
    law = like_sgdw(rule)
    grads = np.array([2.0, 30.0])
    np.testing.assert_allclose(
        law.equilibrium(unit_grad_sq=grads).norm, rule.equilibrium(unit_grad_sq=grads).norm, rtol=1e-12
    )
    assert law.equilibrium().angle == pytest.approx(rule.equilibrium().angle, rel=1e-12)
    assert law.equilibrium().norm is None and law.slope == -4
    assert law.equilibrium().time_constant == pytest.approx(rule.equilibrium().time_constant, rel=0.01)
    start = cold_start(rule, [1.0, 4.0])
    options = {"unit_grad_sq": grads, "lr": lambda step: 0.1 / (1 + step), "weight_decay": lambda step: 0.01 * step}
    path, same = evolve(rule, 40, start=start, **options), evolve(law, 40, start=start, **options)
    np.testing.assert_allclose(same.norm_sq, path.norm_sq, rtol=1e-12)
    assert settling_steps(law, cold_start(law, 5.0)) == settling_steps(rule, cold_start(rule, 5.0))
    assert relaxation(law).power == 4


def test_a_decay_divided_by_the_gradient_has_the_law_of_adam_with_l2():
    rule = AdamL2(1e-4, 1e-3, betas=(0.0, 0.9))
    law, scale = like_adam_l2(rule), {"unit_grad_sq": 100.0, "dim": 400.0}
    assert law.equilibrium(**scale).norm == pytest.approx(rule.equilibrium(**scale).norm, rel=1e-4)
    assert law.equilibrium(**scale).angle == pytest.approx(rule.equilibrium(**scale).angle, rel=1e-4)
    assert law.slope == -3 and law.is_coupled
    with pytest.raises(EquilibriaError, match="expected both: the decay of Adam depends on the gradient"):
        law.equilibrium(dim=400.0)


@pytest.mark.parametrize("make", [lambda: like_muon(Muon(0.02, 0.1)), lambda: like_sgdw(SGDW(0.1, 0.01))])
def test_the_settled_state_stays_and_the_fixed_point_solves_the_recursion(make):
    law = make()
    path = evolve(law, 30, start=settled(law, unit_grad_sq=7.0, dim=300.0), unit_grad_sq=7.0, dim=300.0)
    np.testing.assert_allclose(path.norm_sq, path.norm_sq[0], rtol=1e-11)
    point = identified_point(law, law.lr, law.weight_decay, unit_grad_sq=7.0, dim=300.0)
    assert path.norm_sq[0] == pytest.approx(float(point.norm_sq), rel=1e-12)
    assert path.angle[0] == pytest.approx(2 * math.asin(math.sqrt(float(point.one_minus_cos) / 2)), rel=1e-9)


@given(st.floats(0.2, 5.0))
def test_unscaled_settings_undo_a_rescaling(scale):
    """What `plan(rescale=True)` relies on: w / scale under the other settings turns as w does."""
    step = PowerLaw(1.3, lr=1.0, grad=0.5, entries=0.25)
    decay = PowerLaw(0.7, lr=1.0, weight_decay=1.0, grad=-0.5)
    law = Identified(0.01, 0.05, name="odd", step=step, decay=decay, memory=ema_memory(0.8))
    lr, weight_decay = (np.array([value]) for value in (law.lr, law.weight_decay))
    other = unscaled_settings(law, lr, weight_decay, np.array([scale]))
    state = settled(law, unit_grad_sq=2.0, dim=50.0)
    scaled = rescaled(state, 1 / scale)
    path = evolve(law, 20, start=state, unit_grad_sq=2.0, dim=50.0)
    same = evolve(
        law, 20, start=scaled, unit_grad_sq=2.0, dim=50.0, lr=float(other[0][0]), weight_decay=float(other[1][0])
    )
    np.testing.assert_allclose(same.angle, path.angle, rtol=1e-9)
    np.testing.assert_allclose(same.norm * scale, path.norm, rtol=1e-9)


def test_rescale_factors_are_ratios_of_equilibria():
    law = like_sgdw(SGDW(0.1, 0.01))
    factors = rescale_sq_factors(law, np.array([0.1, 0.1, 0.025]), np.full(3, 0.01))
    np.testing.assert_allclose(factors, [1.0, 1.0, 0.5], rtol=0.01)


def test_a_law_survives_json():
    law = like_muon(Muon(0.02, 0.1))
    assert identified_from(json.loads(json.dumps(dataclasses.asdict(law)))) == law


def test_laws_in_closed_form_refuse_a_measured_one():
    with pytest.raises(EquilibriaError, match="got the measured law of Muon; expected a rule with closed forms: SGD"):
        closed_rule(like_muon(Muon(0.02, 0.1)))
    assert closed_rule(Lion(0.1)) == Lion(0.1)


def test_without_decay_there_is_no_equilibrium_but_a_path():
    law = dataclasses.replace(like_muon(Muon(0.02, 0.1)), weight_decay=0.0)
    assert law.decay_per_step == 0
    with pytest.raises(EquilibriaError, match="without decay there is no equilibrium"):
        law.equilibrium()
    path = evolve(law, 10, start=cold_start(law, 1.0), dim=4.0)
    assert np.all(np.diff(path.norm_sq) > 0)


def test_a_decay_of_everything_is_refused():
    law = dataclasses.replace(like_muon(Muon(0.02, 0.1)), weight_decay=60.0)
    with pytest.raises(EquilibriaError, match=r"removes 1.2 of the weight per step; expected less than 1"):
        law.equilibrium()


def test_steps_that_grow_faster_than_decay_have_no_equilibrium():
    rule = Identified(
        1e-3,
        0.1,
        name="Growing",
        step=PowerLaw(1.0, lr=1.0, norm=3.0),
        decay=PowerLaw(1.0, lr=1.0, weight_decay=1.0),
        memory=Memory((), ()),
    )
    with pytest.raises(EquilibriaError, match="there is no stable equilibrium"):
        rule.equilibrium(dim=10, unit_grad_sq=1.0)


def test_lengths_are_not_negative():
    with pytest.raises(EquilibriaError, match="factor"):
        PowerLaw(-1.0)


def test_the_time_constant_says_what_an_average_of_squared_gradients_does_to_it():
    """A step that does not grow with the gradient may be Adam's, whose norm settles more slowly."""
    said, slow = {}, AdamW(1e-3, 0.1).equilibrium().time_constant
    for grad in (0.0, 1.0):
        step = PowerLaw(1.0, lr=1.0, grad=grad)
        law = Identified(1e-3, 0.1, name="A", step=step, decay=DECOUPLED, memory=NO_MEMORY).equilibrium()
        said[grad] = [one for one in law.validity if "squared gradients" in one.name]
        if grad == 0:
            more = slow / law.time_constant - 1
    assert said[1.0] == [] and "time_constant" in said[0.0][0].affects
    assert said[0.0][0].detail.endswith(f"by {100 * more:.0f} %")
