"""Plans with rescaling and with a constant lr x wd, against the recursion and the fixed points themselves."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from equilibria.planning import alternatives, plan
from equilibria.planning._alternatives import BOTH, CONSTANT_PRODUCT, RESCALED
from equilibria.theory import SGD, AdamW, Lion, evolve
from equilibria.theory.rules import AdamL2
from equilibria.theory.schedules import Cosine, FromValues, MultiStep
from equilibria.theory.states import rescale_factors, rescaled, settled
from equilibria.views.plan.page import plan_page

DROP = MultiStep(0.1, milestones=[300, 700], factor=0.1)
RULE = SGD(0.1, 5e-3, momentum=0.9)


def test_a_rescaled_plan_is_the_recursion_rescaled_by_hand():
    result = plan(RULE, DROP, steps=1000, rescale=True)
    state, angle = settled(RULE), []
    for first, after, lr in ((0, 300, 0.1), (300, 700, 0.01), (700, 1000, 0.001)):
        rule = dataclasses.replace(RULE, lr=lr)
        if first:
            state = rescaled(state, rescale_factors(dataclasses.replace(RULE, lr=10 * lr), rule).weight)
        path = evolve(rule, after - first, start=state)
        state = path.final
        angle.append(path.angle)
    every = np.concatenate(angle)
    np.testing.assert_allclose(result.curve.angle, every[result.curve.step], rtol=1e-9)
    assert result.travelled == pytest.approx(every.sum(), rel=1e-9)


@pytest.mark.parametrize(
    "rule", [RULE, SGD(0.1, 5e-3, momentum=0.9, nesterov=True), AdamW(1e-2, 0.1), AdamL2(1e-3, 1e-3), Lion(1e-3, 1.0)]
)
def test_under_a_cosine_weights_are_rescaled_at_every_step(rule):
    schedule = Cosine(rule.lr, steps=40, end=rule.lr / 50)
    given = {"unit_grad_sq": 2.0, "dim": 100.0} if isinstance(rule, AdamL2) else {}
    result = plan(rule, schedule, steps=40, rescale=True, **given)
    scale = given or {"unit_grad_sq": 1.0, "dim": 1.0}
    lrs = schedule.values(40)
    rules = [dataclasses.replace(rule, lr=float(lr)) for lr in lrs]
    state, angle, norm = settled(rules[0], **scale), [], []
    for old, new in zip([rules[0], *rules], rules, strict=False):
        state = rescaled(state, rescale_factors(old, new, **scale).weight)
        path = evolve(new, 1, start=state, **scale)
        state = path.final
        angle.append(path.angle[0])
        norm.append(path.norm[0])
    np.testing.assert_allclose(result.curve.angle, angle, rtol=1e-9)
    np.testing.assert_allclose(result.curve.norm, norm, rtol=1e-9)
    np.testing.assert_allclose(result.curve.angle, result.curve.angle_equilibrium, rtol=0.05)


@pytest.mark.parametrize("rule", [RULE, AdamW(1e-2, 0.1), Lion(1e-3, 1.0)], ids=lambda rule: type(rule).__name__)
def test_what_each_alternative_is_for(rule):
    schedule = MultiStep(rule.lr, milestones=[600], factor=0.1)
    plans = alternatives(rule, schedule, steps=1000)
    typed = plan(rule, schedule, steps=1000)
    assert list(plans) == [RESCALED, CONSTANT_PRODUCT, BOTH]
    assert typed.phases[1].start.angle_ratio < 0.5
    assert plans[RESCALED].phases[1].start.angle_ratio == pytest.approx(1, abs=0.01)
    goals = plans[CONSTANT_PRODUCT].curve.angle_equilibrium
    np.testing.assert_allclose(goals, goals[0], rtol=0.01)  # to first order in lr x wd
    np.testing.assert_allclose(plans[BOTH].curve.angle, goals[0], rtol=0.01)
    assert plans[CONSTANT_PRODUCT].phases[1].time_constant == pytest.approx(typed.phases[0].time_constant, rel=0.01)


def test_adam_with_l2_holds_another_product():
    rule = AdamL2(1e-3, 1e-3)
    plans = alternatives(rule, MultiStep(1e-3, milestones=[50], factor=0.5), steps=100, unit_grad_sq=1.0, dim=100.0)
    goals = plans[CONSTANT_PRODUCT].curve.angle_equilibrium
    np.testing.assert_allclose(goals, goals[0], rtol=1e-3)


def test_only_what_differs_is_offered():
    assert alternatives(RULE, 0.1, steps=500) == {}
    assert list(alternatives(RULE, Cosine(0.1, steps=500, end=0.01), steps=500)) == [RESCALED, CONSTANT_PRODUCT, BOTH]
    given = FromValues(np.linspace(5e-3, 1e-2, 1000))
    assert list(alternatives(RULE, DROP, steps=1000, weight_decay=given)) == [RESCALED]
    assert alternatives(SGD(0.1, 0.0), DROP, steps=1000, init_norm=1.0, unit_grad_sq=1.0) == {}


def test_the_page_holds_every_alternative():
    typed, others = plan(RULE, DROP, steps=1000), alternatives(RULE, DROP, steps=1000)
    page = plan_page(typed, alternatives=others).document()
    assert len(re.findall(r'<input type="radio" name="choice"', page)) == 4
    assert page.count('<div class="choice choice-3">') == 3  # its sentence, its phases, its findings
    assert len(page) - len(plan_page(typed).document()) < 300_000
