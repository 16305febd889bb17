"""A plan without weight decay: no equilibrium, a norm that grows and an angle that fades, by independent iteration."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from tests.helpers import random_walk
from tests.helpers.scales import plan_scale, recursion_scale

from equilibria.errors import EquilibriaError
from equilibria.planning import plan
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cite, cold_start, evolve
from equilibria.theory.schedules import MultiStep, Warmup

LR, MOMENTUM, BIG_L, NORM = 0.1, 0.9, 10.0, 3.0
RULE = SGD(LR, 0.0, momentum=MOMENTUM)
START = {"init_norm": NORM, "unit_grad_sq": BIG_L}
SCALE = {"unit_grad_sq": BIG_L, "dim": 100.0}
RULES = [
    RULE,
    SGD(LR, 0.0, momentum=MOMENTUM, nesterov=True),
    SGDW(LR, 0.0, momentum=MOMENTUM),
    AdamW(1e-2, 0.0),
    AdamL2(1e-2, 0.0),
    Lion(1e-2, 0.0),
    Muon(1e-2, 0.0),
]


def heavy_ball(lrs):
    """Norm before and angle of every step, in plain floats."""
    p, q, r = NORM**2, 0.0, 0.0
    norms, angles = [], []
    for lr in lrs:
        after, q, r, moved, _ = random_walk.expected_sgd_step(p, q, r, lr, 0.0, MOMENTUM, BIG_L)
        radial = (math.sqrt(after) - math.sqrt(p)) ** 2
        norms.append(math.sqrt(p))
        angles.append(2 * math.asin(math.sqrt(max(moved - radial, 0.0) / math.sqrt(p * after)) / 2))
        p = after
    return np.array(norms), np.array(angles)


@pytest.mark.parametrize(
    "schedule", [MultiStep(LR, milestones=[2000, 3000], factor=0.2), Warmup(LR, steps=500)], ids=["steps", "warm-up"]
)
def test_norm_and_angle_by_brute_force(schedule):
    result = plan(RULE, schedule, steps=4000, **START)
    norms, angles = heavy_ball(schedule.values(4000).tolist())
    np.testing.assert_allclose(result.curve.norm, norms[result.curve.step], rtol=1e-9)
    np.testing.assert_allclose(result.curve.angle, angles[result.curve.step], rtol=1e-8, atol=1e-12)
    for phase in result.phases:
        for moment in (phase.start, phase.middle, phase.end):
            assert moment.angle == pytest.approx(angles[moment.step], rel=1e-8, abs=1e-12)
            assert moment.norm == pytest.approx(norms[moment.step], rel=1e-9)


def test_the_fourth_power_of_the_norm_grows_linearly_and_the_angle_fades_as_one_over_the_root_of_time():
    """||w||^4 = ||w_0||^4 + 2 L lr^2 t / (1-a)^2, to first order in the angle squared, which is below 0.7 %."""
    result = plan(RULE, LR, steps=160_000, **START)
    expected = (NORM**4 + 2 * BIG_L * LR**2 * result.curve.step / (1 - MOMENTUM) ** 2) ** 0.25
    np.testing.assert_allclose(result.curve.norm[50:], expected[50:], rtol=2e-3)
    assert result.phases[0].end.angle / result.phases[0].middle.angle == pytest.approx(0.5**0.5, rel=2e-3)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_follows_its_recursion_and_has_no_equilibrium(rule):
    lrs = np.repeat([rule.lr, rule.lr / 3], 1000)
    result = plan(rule, lrs, steps=2000, init_norm=NORM, **plan_scale(rule, **SCALE))
    rule, scale = recursion_scale(rule, **SCALE)
    path = evolve(rule, 2000, start=cold_start(rule, NORM), lr=lrs, **scale)
    np.testing.assert_allclose(result.curve.angle, path.angle[result.curve.step], rtol=1e-12)
    assert result.settled_share == 0 and result.situation.start_norm is None
    assert [finding.severity for finding in result.findings] == ["warning"]
    for phase in result.phases:
        assert (phase.time_constant, phase.monotone, phase.settle_steps, phase.settles) == (None, None, None, False)
        for moment in (phase.start, phase.middle, phase.end):
            assert moment.angle_ratio is None and moment.norm_ratio is None


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_the_lr_alone_suggests_is_the_angle_at_the_initial_norm(rule):
    """At a norm so large that it does not change a constant lr turns by what it suggests; smaller norms scale that.

    The lr is low because Adam's second moment lags behind a norm that grows fast.
    """
    still = plan(rule, rule.lr / 10, steps=3000, init_norm=1e4, **plan_scale(rule, **SCALE))
    np.testing.assert_allclose(still.curve.angle[100:], still.curve.angle_by_lr[100:], rtol=1e-3)
    growing = plan(rule, rule.lr / 10, steps=3000, init_norm=NORM, **plan_scale(rule, **SCALE))
    power = 2 if isinstance(rule, SGD | SGDW) else 1
    expected = still.curve.angle_by_lr[0] * (1e4 / NORM) ** power
    assert growing.curve.angle_by_lr[0] == pytest.approx(expected, rel=0.02)


def test_the_finding_tells_how_much_the_angle_fades():
    (finding,) = plan(RULE, MultiStep(LR, milestones=[2000], factor=0.1), steps=4000, **START).findings
    norms, angles = heavy_ball([LR] * 2000 + [LR / 10] * 2000)
    assert "no equilibrium" in finding.subject
    assert f"from {norms[0]:.3g} to {norms[-1]:.3g}," in finding.evidence
    assert f"{(norms[-1] / norms[0]) ** 2:.3g} times less" in finding.evidence
    assert f"step 3,999 turns by {angles[-1]:.3g} rad" in finding.evidence
    assert cite(finding.law).law == finding.law


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_suggested_weight_decay_holds_the_angle(rule):
    """Its equilibrium has the angle that the run without it has in the middle of its first phase."""
    lrs = np.repeat([rule.lr, rule.lr / 3], 1000)
    result = plan(rule, lrs, steps=2000, init_norm=NORM, **plan_scale(rule, **SCALE))
    suggested = re.search(
        r"wd (\S+) holds the angle that phase 1 has in its middle, (\S+) rad", result.findings[0].remedy
    )
    decay, angle = float(suggested.group(1)), float(suggested.group(2))
    assert angle == pytest.approx(result.phases[0].middle.angle, rel=5e-3)
    with_decay = plan(dataclasses.replace(rule, weight_decay=decay), rule.lr, steps=100, **plan_scale(rule, **SCALE))
    assert with_decay.phases[0].end.angle == pytest.approx(result.phases[0].middle.angle, rel=5e-3)


@pytest.mark.parametrize(
    ("rule", "given", "named"),
    [
        (RULE, {}, "init_norm and unit_grad_sq"),
        (RULE, {"init_norm": 3.0}, "init_norm and unit_grad_sq"),
        (RULE, {"unit_grad_sq": 3.0}, "init_norm and unit_grad_sq"),
        (AdamW(1e-3, 0.0), {}, "init_norm and dim"),
        (Lion(1e-3, 0.0), {"dim": 10.0}, "init_norm and dim"),
    ],
)
def test_what_is_missing_is_named(rule, given, named):
    with pytest.raises(EquilibriaError, match=rf"got weight_decay=0.*expected both {named}, or a weight_decay > 0"):
        plan(rule, rule.lr, steps=10, **given)
