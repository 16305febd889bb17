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
from equilibria.theory.requested import decay_for_angle, step_angle

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
        (lambda: decay_for_angle(theory.SGD(0.0), 0.1), "got lr=0"),
        (lambda: decay_for_angle(theory.AdamL2(0.1), 0.1), "got unit_grad_sq=None, dim=None"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(EquilibriaError, match=message):
        call()
