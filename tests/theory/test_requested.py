"""Requested angles: settings that undo the laws they come from."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria import theory
from equilibria.errors import EquilibriaError
from equilibria.theory.angles import n_step_angles
from equilibria.theory.requested import decay_for_angle, norm_power, step_angle, steps_to_fall

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
    found = n_step_angles(rule, steps)
    assert step_angle(rule, float(found[-1]), steps=steps) == pytest.approx(found[1], rel=0.01)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
def test_no_weight_decay_lowers_the_angle_in_as_many_steps_as_predicted(rule):
    """Against the moment recursion without decay, over 8000 steps in which 1/angle^2 doubles.

    The law leaves out the memory of momentum, 10 steps (Lion 100): twice that share of the steps. Adam's second moment
    remembers 1000 steps, and its lag makes the fall up to twice as fast.
    """
    steps, memory = 8000, 100 if isinstance(rule, theory.Lion) else 10
    angle = math.sqrt(steps_to_fall(rule, 0.01, 0.005) / steps * 0.01**2 / 3)
    start = theory.settled(dataclasses.replace(rule, weight_decay=decay_for_angle(rule, angle)), dim=100.0)
    angles = theory.evolve(dataclasses.replace(rule, weight_decay=0.0), steps + 1, start=start, dim=100.0).angle
    assert angles[-1] == pytest.approx(angle / math.sqrt(2), rel=0.05)
    predicted = steps_to_fall(rule, angle, float(angles[-1]))
    if isinstance(rule, theory.AdamW):
        assert steps < predicted < 2 * steps
    else:
        assert predicted == pytest.approx(steps, rel=2 * memory / steps)


@given(start=st.floats(1e-4, 1.5), end=st.floats(1e-4, 1.5), between=st.floats(1e-4, 1.5))
def test_steps_of_falls_add_up_and_a_rise_takes_none(start, end, between):
    rule = theory.SGD(0.1, momentum=0.9)
    low, middle, high = sorted((start, end, between))
    assert steps_to_fall(rule, low, high) == 0
    parts = steps_to_fall(rule, high, middle) + steps_to_fall(rule, middle, low)
    assert parts == pytest.approx(steps_to_fall(rule, high, low), rel=1e-9, abs=1e-9)


def test_the_angle_falls_with_the_square_of_the_norm_for_sgd_alone():
    powers = {type(rule).__name__: norm_power(rule) for rule in [*RULES, theory.AdamL2(0.1), theory.Muon(0.1)]}
    assert powers == {"SGD": 2, "SGDW": 2, "AdamW": 1, "Lion": 1, "AdamL2": 1, "Muon": 1}


def test_adam_with_l2_counts_as_adamw_for_the_angle_of_a_step():
    assert step_angle(theory.AdamL2(1e-3), 0.5, steps=30) == step_angle(theory.AdamW(1e-3), 0.5, steps=30)


@given(angle=st.floats(1e-6, 1.5), steps=st.integers(1, 10_000))
def test_without_momentum_cosines_multiply(angle, steps):
    found = step_angle(theory.SGD(0.1), angle, steps=steps)
    assert steps * math.log1p(-2 * math.sin(found / 2) ** 2) == pytest.approx(
        math.log1p(-2 * math.sin(angle / 2) ** 2), rel=1e-9
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_angle(theory.SGD(0.1), 1.6, steps=3), "got angle=1.6"),
        (lambda: step_angle(theory.SGD(0.1), 1.0, steps=0), "got steps=0"),
        (lambda: step_angle("sgd", 1.0, steps=3), "sgd"),
        (lambda: decay_for_angle(theory.SGD(0.1), 0.0), "got angle=0"),
        (lambda: steps_to_fall(theory.SGD(0.1), 0.0, 0.1), "got start=0"),
        (lambda: steps_to_fall(theory.SGD(0.1), 0.1, 2.0), "got end=2"),
        (lambda: decay_for_angle(theory.SGD(0.0), 0.1), "got lr=0"),
        (lambda: decay_for_angle(theory.AdamL2(0.1), 0.1), "got unit_grad_sq=None, dim=None"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(EquilibriaError, match=message):
        call()
