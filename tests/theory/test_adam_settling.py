"""Adam's time to settle against the moment recursion, iterated step by step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.theory import AdamL2, AdamW, evolve, settled
from equilibria.theory.adam_settling import adam_settling_steps

DIM, L = 256.0, 4.0
# The first moment is taken to follow at once, which costs a few times 1/(1-b1) = 10 steps; the strides cost 3 %.
FEW_MEMORIES, STRIDES = 50, 0.03


def ratios(rule, start):
    goal = settled(rule, unit_grad_sq=L, dim=DIM)
    return math.sqrt(float(start.norm_sq / goal.norm_sq)), float(start.second / goal.second), float(goal.norm_sq)


def by_recursion(rule, start, *, longest=400_000, tolerance=0.05):
    path = evolve(rule, longest, start=start, unit_grad_sq=L, dim=DIM)
    off = np.abs(path.angle / rule.equilibrium(unit_grad_sq=L, dim=DIM).angle - 1) > tolerance
    assert not off[-1]
    return int(np.flatnonzero(off)[-1]) + 1 if off.any() else 0


RULES = [
    AdamW(1e-2, 0.1, betas=(0.9, 0.99)),
    AdamW(1e-2, 0.1),  # the second moment remembers for longer than the norm needs
    AdamW(1e-3, 0.1),  # about as long
    AdamW(3e-3, 0.5),
    AdamW(3e-3, 0.05, betas=(0.9, 0.95)),
    AdamL2(1e-3, 0.1),
    AdamL2(3e-3, 0.5),
    AdamL2(1e-3, 0.01),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("factor", [10, 3, 1.3, 0.3, 0.1])
def test_after_a_change_of_lr_it_is_the_recursions(rule, factor):
    start = settled(dataclasses.replace(rule, lr=rule.lr * factor), unit_grad_sq=L, dim=DIM)
    norm, second, norm_sq = ratios(rule, start)
    found = adam_settling_steps(rule, norm, second_ratio=second, norm_sq=norm_sq, unit_grad_sq=L, dim=DIM)
    truth = by_recursion(rule, start, longest=60_000 if isinstance(rule, AdamL2) else 90_000)
    assert abs(float(found) - truth) <= STRIDES * truth + FEW_MEMORIES


@pytest.mark.parametrize("rule", [RULES[1], RULES[2], RULES[7]], ids=str)
@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_after_a_rescaling_of_the_weights_alone_it_is_the_recursions(rule, factor):
    goal = settled(rule, unit_grad_sq=L, dim=DIM)
    start = dataclasses.replace(goal, norm_sq=goal.norm_sq * factor**2)
    norm, second, norm_sq = ratios(rule, start)
    found = adam_settling_steps(rule, norm, second_ratio=second, norm_sq=norm_sq, unit_grad_sq=L, dim=DIM)
    truth = by_recursion(rule, start, longest=60_000)
    assert abs(float(found) - truth) <= STRIDES * truth + FEW_MEMORIES


@given(st.floats(1e-8, 1e8), st.floats(0.2, 5), st.floats(0.1, 10))
def test_units_make_no_difference(scale, norm, second):
    """With weights ``scale`` times as large, L goes with nothing, lr with the scale and the decay with its inverse."""
    rule, goal = AdamL2(1e-3, 0.1), settled(AdamL2(1e-3, 0.1), unit_grad_sq=L, dim=DIM).norm_sq
    other = AdamL2(1e-3 * scale, 0.1 / scale**2)
    steps = [
        float(adam_settling_steps(each, norm, second_ratio=second, norm_sq=size, unit_grad_sq=L, dim=DIM))
        for each, size in ((rule, goal), (other, goal * scale**2))
    ]
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)


def test_many_weights_are_those_one_by_one_and_nonsense_is_nan():
    rule, norm = AdamW(1e-2, 0.1), np.array([0.2, 1.0, 4.0, math.nan, 0.0, math.inf])
    together = adam_settling_steps(rule, norm, second_ratio=1.0, norm_sq=1.0)
    alone = [float(adam_settling_steps(rule, each, second_ratio=1.0, norm_sq=1.0)) for each in norm]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert np.isnan(together[3:]).all() and together[1] == 0


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_however_far_away_it_is_a_number_of_steps_or_none(norm, second):
    rule = AdamW(1e-2, 0.1)
    found = float(adam_settling_steps(rule, 10**norm, second_ratio=10**second, norm_sq=1.0))
    assert math.isnan(found) or 0 <= found < 1e6
    if abs(norm) < 1 and abs(second) < 1.5:
        assert math.isfinite(found)
