"""The plan against a brute-force iteration of the expected step, written out independently of the library."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import random_walk
from tests.helpers.scales import plan_scale, recursion_scale

from equilibria.errors import EquilibriaError
from equilibria.planning import plan
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cold_start, evolve, settled
from equilibria.theory.muon import orthogonal_update
from equilibria.theory.schedules import Cosine, MultiStep, Warmup, WarmupStableDecay, in_epochs

SPE = 391
RULE = SGD(0.1, 5e-4, momentum=0.9)
EXAMPLE = in_epochs(MultiStep(0.1, milestones=[60, 120, 160], factor=0.2), steps_per_epoch=SPE)


@pytest.fixture(scope="module")
def example():
    return plan(RULE, EXAMPLE, steps=200 * SPE, steps_per_epoch=SPE)


class HeavyBall:
    """The expected step of torch's heavy ball, iterated in plain Python floats."""

    def __init__(self, lr, wd, a, big_l=1.0, norm=None):
        self.wd, self.a, self.big_l = wd, a, big_l
        if norm is None:  # start in equilibrium
            p = math.sqrt(big_l * lr / (wd * (1 - a) * (2 - lr * wd / (1 + a))))
            self.state = p, -wd * p / (1 + a), 2 * wd * p / (lr * (1 + a))
        else:
            self.state = norm**2, 0.0, 0.0

    def step(self, lr, wd=None):
        """The angle of one step."""
        p, q, r = self.state
        wd = self.wd if wd is None else wd
        after, q, r, moved, _ = random_walk.expected_sgd_step(p, q, r, lr, wd, self.a, self.big_l)
        self.state = after, q, r
        radial = (math.sqrt(after) - math.sqrt(p)) ** 2
        return 2 * math.asin(math.sqrt((moved - radial) / math.sqrt(p * after)) / 2)

    @property
    def norm(self):
        return math.sqrt(self.state[0])


def equilibrium_angle(lr, wd=5e-4, a=0.9):
    return math.acos(1 - lr * wd / (1 + a))


# The printed example -------------------------------------------------------------------------------------------------


def test_the_table_of_the_example_schedule(example):
    rows = [[round(m.angle_ratio, 2) for m in (phase.start, phase.middle, phase.end)] for phase in example.phases]
    assert rows == [[1.0, 1.0, 1.0], [0.45, 0.98, 1.0], [0.45, 0.56, 0.68], [0.31, 0.32, 0.34]]
    assert [f"{phase.end.angle_equilibrium:.5f}" for phase in example.phases] == [
        "0.00725",
        "0.00324",
        "0.00145",
        "0.00065",
    ]
    assert [phase.end.lr for phase in example.phases] == pytest.approx([0.1, 0.02, 0.004, 0.0008])
    assert [phase.steps / SPE for phase in example.phases] == [60, 60, 40, 40]
    assert [phase.settles for phase in example.phases] == [True, True, False, False]
    needs = [math.floor(phase.settle_steps / SPE) for phase in example.phases]
    assert needs == [0, 23, 115, 719]


def test_the_example_by_brute_force(example):
    """Every start, middle and end, and the time that phases 2 to 4 need if they are simply made longer."""
    model = HeavyBall(0.1, 5e-4, 0.9)
    lrs = [phase.start.lr for phase in example.phases]
    for phase, lr in zip(example.phases, lrs, strict=True):
        marks = {m.step: m for m in (phase.start, phase.middle, phase.end)}
        needs, goal, outside = phase.settle_steps, equilibrium_angle(lr), -1
        for step in range(max(phase.steps, needs + 100)):
            norm = model.norm
            angle = model.step(lr)
            if abs(angle / goal - 1) > 0.05:
                outside = step
            moment = marks.get(phase.first_step + step)
            if moment is not None and step < phase.steps:
                assert moment.angle == pytest.approx(angle, rel=1e-9)
                assert moment.norm == pytest.approx(norm, rel=1e-9)
                assert moment.angle_equilibrium == pytest.approx(goal, rel=1e-9)
            if step == phase.steps - 1:
                at_end = model.state
        assert outside + 1 == pytest.approx(needs, rel=2e-3, abs=1)
        model.state = at_end


def test_from_the_equilibrium_of_the_phase_before_the_last_would_need_577_epochs():
    """The other way to count, which is not the plan's: phase 3 never gets to its equilibrium."""
    result = plan(RULE, [0.004] * 1000 + [0.0008] * 1000, steps=2000)
    assert result.phases[1].settle_steps / SPE == pytest.approx(577, abs=0.6)


def test_settled_share(example):
    """Phase 1 all of it, phase 2 but for its first 9015 steps, nothing of the rest."""
    inside = 60 * SPE + 60 * SPE - example.phases[1].settle_steps
    assert example.settled_share == pytest.approx(inside / (200 * SPE), abs=1e-9)


def test_curve(example):
    curve = example.curve
    assert len(curve.step) < 520
    assert curve.step[0] == 0 and curve.step[-1] == 200 * SPE - 1
    assert (np.diff(curve.step) > 0).all()
    for phase in example.phases[1:]:  # both sides of every jump
        assert {phase.first_step - 1, phase.first_step} <= set(curve.step.tolist())
    at = int(np.flatnonzero(curve.step == example.phases[2].first_step)[0])
    assert curve.angle[at] == example.phases[2].start.angle
    assert curve.norm[at] == example.phases[2].start.norm
    np.testing.assert_allclose(curve.angle_by_lr, equilibrium_angle(0.1) * curve.lr / 0.1, rtol=1e-12)
    np.testing.assert_allclose(
        curve.norm_equilibrium**4, curve.lr / (5e-4 * 0.1 * (2 - curve.lr * 5e-4 / 1.9)), rtol=1e-9
    )


# Any rule, any schedule ----------------------------------------------------------------------------------------------

RULES = [
    SGD(0.1, 1e-3),
    SGD(0.1, 1e-3, momentum=0.9, nesterov=True),
    SGDW(0.1, 1e-3, momentum=0.9),
    AdamW(1e-3, 0.1),
    AdamL2(1e-3, 1e-3),
    Lion(1e-3, 0.1),
    Muon(1e-2, 0.1),
]
SCALE = {"unit_grad_sq": 2.0, "dim": 50.0}
SHAPES = {
    "warm-up and cosine": Warmup(Cosine(1.0, steps=2800), steps=200),
    "stable and decay": WarmupStableDecay(1.0, warmup=0, stable=2000, decay=999),
    "restarts": Cosine(1.0, steps=1000, cycles=None),
    "steps": MultiStep(1.0, milestones=[1000, 2000], factor=0.3),
}


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("init_norm", [None, 0.7])
def test_moments_are_those_of_the_recursion(rule, shape, init_norm):
    lrs = rule.lr * SHAPES[shape].values(3000)
    result = plan(rule, lrs, steps=3000, init_norm=init_norm, **plan_scale(rule, **SCALE))
    rule, scale = recursion_scale(rule, **SCALE)
    begin = settled(rule, **scale) if init_norm is None else cold_start(rule, init_norm)
    path = evolve(rule, 3000, start=begin, lr=lrs, **scale)
    for phase in result.phases:
        assert phase.start.step == phase.first_step
        assert phase.middle.step == phase.first_step + phase.steps // 2
        assert phase.end.step == phase.first_step + phase.steps - 1
        for moment in (phase.start, phase.middle, phase.end):
            assert moment.lr == lrs[moment.step]
            # The plan goes phase by phase, the path in one go: equal to rounding.
            assert moment.angle == pytest.approx(path.angle[moment.step], rel=1e-12, abs=1e-15)
            assert moment.norm == pytest.approx(path.norm[moment.step], rel=1e-12)
            if moment.lr > 0:
                here = dataclasses.replace(rule, lr=moment.lr).equilibrium(**SCALE)
                assert moment.angle_ratio == pytest.approx(moment.angle / here.angle, rel=1e-9)
                if not isinstance(rule, Muon):
                    assert moment.norm_ratio == pytest.approx(moment.norm / here.norm, rel=1e-9)
            else:
                assert moment.angle_ratio is None and moment.norm_ratio is None and moment.angle_equilibrium == 0
        assert phase.settles == (phase.end.angle_ratio is not None and abs(phase.end.angle_ratio - 1) <= 0.05)
        if phase.end.lr > 0:
            here = dataclasses.replace(rule, lr=phase.end.lr).equilibrium(**SCALE)
            assert (phase.time_constant, phase.monotone) == (here.time_constant, here.monotone)
    np.testing.assert_allclose(result.curve.angle, path.angle[result.curve.step], rtol=1e-12, atol=1e-15)


@settings(max_examples=12)
@given(
    levels=st.lists(
        st.tuples(st.integers(30, 400), st.floats(1e-3, 0.3), st.floats(1e-4, 1e-2)), min_size=1, max_size=5
    ),
    momentum=st.sampled_from([0.0, 0.9]),
    norm=st.floats(0.5, 20),
)
def test_random_piecewise_schedules_against_brute_force(levels, momentum, norm):
    lrs = np.concatenate([np.full(n, lr) for n, lr, _ in levels])
    decays = np.concatenate([np.full(n, wd) for n, _, wd in levels])
    result = plan(
        SGD(0.1, 1e-3, momentum=momentum),
        lrs,
        steps=len(lrs),
        weight_decay=decays,
        init_norm=norm,
        unit_grad_sq=3.0,
        tolerance=0.1,
    )
    model = HeavyBall(0.1, 1e-3, momentum, 3.0, norm)
    angles = np.array([model.step(lr, wd) for lr, wd in zip(lrs.tolist(), decays.tolist(), strict=True)])
    np.testing.assert_allclose(result.curve.angle, angles[result.curve.step], rtol=1e-8)
    goals = np.arccos(1 - lrs * decays / (1 + momentum))
    inside = np.abs(angles / goals - 1) <= 0.1
    assert result.settled_share == pytest.approx(inside.mean(), abs=2.5 / len(lrs))
    assert sum(phase.steps for phase in result.phases) == len(lrs)
    for phase in result.phases:
        here = inside[phase.first_step : phase.first_step + phase.steps]
        assert phase.settles == here[-1]
        if phase.flat and phase.settles:
            last = np.flatnonzero(~here)
            assert phase.settle_steps == (last[-1] + 1 if len(last) else 0)
        elif phase.flat:
            assert phase.settle_steps >= phase.steps
        else:
            assert phase.settle_steps is None


STARTS = {
    "steps up": ([0.02] * 1000 + [0.1] * 1000, 0.02),
    "steps down": ([0.1] * 1000 + [0.02] * 1000, 0.1),
    "warm-up": (Warmup(0.05, steps=100), 0.05),
    "warm-up before a larger lr": ([*np.linspace(0, 0.05, 101)[:-1], *[0.05] * 900, *[0.2] * 1000], 0.05),
    "warm-up from a positive lr": (Warmup(Cosine(0.1, steps=1900), steps=100, start=0.01), 0.1),
    "cycle": ([*np.linspace(0.01, 0.1, 1000), *np.linspace(0.1, 0.0, 1000)], 0.1),
    "rise to the end": (np.linspace(0.01, 0.1, 2000), 0.1),
    "falls from the start": (Cosine(0.1, steps=1000, cycles=None), 0.1),
    "frozen at first": ([0.0] * 100 + [0.05] * 900 + [0.2] * 1000, 0.05),
    "frozen before a warm-up": ([*[0.0] * 100, *np.linspace(0, 0.05, 101)[:-1], *[0.05] * 800, *[0.2] * 1000], 0.05),
    "frozen before a fall": ([0.0] * 100 + [0.05] * 100 + [0.02] * 800 + [0.1] * 1000, 0.05),
    "warm-up in stairs": ([lr for lr in (0.0, 0.02, 0.04, 0.06, 0.08) for _ in range(100)] + [0.1] * 1500, 0.1),
    "stairs to the end": ([lr for lr in (0.0, 0.025, 0.05, 0.1) for _ in range(500)], 0.1),
    "plateau after a warm-up": ([*np.linspace(0, 0.05, 1001)[:-1], *[0.05] * 200, *[0.2] * 800], 0.05),
}


@pytest.mark.parametrize("name", STARTS)
def test_without_a_norm_training_starts_in_the_equilibrium_of_its_first_goal(name):
    """Heavy ball by brute force from the equilibrium of the first lr, or of the top of a warm-up."""
    schedule, lr = STARTS[name]
    result = plan(RULE, schedule, steps=2000)
    model = HeavyBall(lr, 5e-4, 0.9)
    assert result.situation.start_rule.lr == pytest.approx(lr, rel=1e-12)
    assert result.situation.start_norm == pytest.approx(model.norm, rel=1e-9)
    assert result.phases[0].start.norm == pytest.approx(model.norm, rel=1e-9)
    lrs = np.asarray(schedule if isinstance(schedule, list | np.ndarray) else schedule.values(2000))
    angles = np.array([model.step(x) for x in lrs.tolist()])
    np.testing.assert_allclose(result.curve.angle, angles[result.curve.step], rtol=1e-8, atol=1e-12)


def test_a_weight_decay_that_begins_late_sets_the_start():
    """The first lr x wd above 0 is where training heads, not the largest."""
    result = plan(RULE, 0.1, weight_decay=[0.0] * 100 + [5e-4] * 900 + [5e-3] * 1000, steps=2000)
    assert result.situation.start_rule.weight_decay == 5e-4
    assert result.phases[0].start.norm == pytest.approx(HeavyBall(0.1, 5e-4, 0.9).norm, rel=1e-9)


def test_a_rising_step_schedule_starts_settled():
    result = plan(RULE, [0.02] * 1000 + [0.1] * 9000, steps=10_000)
    assert result.phases[0].settles and result.phases[0].settle_steps == 0
    assert result.phases[1].start.angle_ratio == pytest.approx(5**0.5, rel=1e-3)


def test_repr_is_short(example):
    assert len(repr(example)) < 120
    assert "SGD" in repr(example) and "78,200 steps" in repr(example) and "4 phases" in repr(example)


def test_scale_only_sets_the_unit_of_the_norm():
    """Without L the norm is in units of L^(1/4), without the entries in units of sqrt(d); angles are the same."""
    for rule, name, factor in ((RULE, "unit_grad_sq", 16.0**0.25), (AdamW(1e-3, 0.1), "dim", 4.0)):
        one = plan(rule, [rule.lr] * 500 + [rule.lr / 10] * 500, steps=1000)
        other = plan(rule, [rule.lr] * 500 + [rule.lr / 10] * 500, steps=1000, **{name: 16.0})
        np.testing.assert_allclose(other.curve.angle, one.curve.angle, rtol=1e-9)
        np.testing.assert_allclose(other.curve.norm, one.curve.norm * factor, rtol=1e-9)


@pytest.mark.parametrize("schedule", [[0.1] * 50 + [0.0] * 50, WarmupStableDecay(0.1, warmup=5, stable=50, decay=20)])
def test_stretches_at_lr_zero(schedule):
    result = plan(RULE, schedule, steps=100)
    last = result.phases[-1]
    assert last.end.lr == 0 and last.flat
    assert last.settle_steps is None and last.time_constant is None and last.monotone is None and not last.settles
    assert math.isnan(last.end.norm_equilibrium)


@pytest.mark.parametrize("shape", [(1024, 1024), (64, 256), (256, 64)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_the_shape_of_a_matrix_sets_the_norm_of_muon(shape, adjust):
    """Size and memory of the orthogonalised update are those of the shape, times torch's factor on it."""
    rule = Muon(0.02, 0.1, adjust_lr_fn=adjust)
    rows, columns = shape
    gain = math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(shape))
    given = plan(rule, 0.02, steps=10, shape=shape)
    law = rule.equilibrium(shape=shape)
    unit = rule.equilibrium(shape=shape, update_sq=1.0).norm / rule.gain(shape)
    assert law.norm == pytest.approx(unit * gain * math.sqrt(orthogonal_update(*shape).size), rel=1e-12)
    assert given.situation.start_norm == pytest.approx(law.norm, rel=1e-9)
    assert given.phases[0].start.angle == pytest.approx(law.angle, rel=1e-9)


def test_stretch_without_weight_decay():
    result = plan(RULE, 0.1, weight_decay=[5e-4] * 50 + [0.0] * 50, steps=100)
    assert result.phases[1].end.angle > 0 and result.phases[1].end.angle_ratio is None
    assert result.phases[1].end.norm > result.phases[1].start.norm


def test_frozen_in_between():
    result = plan(RULE, [0.1] * 500 + [0.0] * 500 + [0.01] * 5000, steps=6000)
    assert [phase.settles for phase in result.phases] == [True, False, False]
    assert result.phases[2].start.angle_ratio == pytest.approx(10**-0.5, rel=0.1)


def test_one_step():
    result = plan(RULE, 0.1, steps=1)
    assert len(result.phases) == 1 and result.phases[0].settles
    assert result.curve.step.tolist() == [0] and result.settled_share == 1.0


def test_time_in_words(example):
    steps = plan(RULE, 0.1, steps=10).situation
    assert [steps.time(n) for n in (1, 12_345)] == ["1 steps", "12,345 steps"]
    assert [example.situation.time(n * SPE) for n in (0.5, 23.06, 719)] == ["0.5 epochs", "23 epochs", "719 epochs"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan("sgd", 0.1, steps=10),
        lambda: plan(SGD, 0.1, steps=10),
        lambda: plan(None, 0.1, steps=10),
        lambda: plan(0.1, RULE, steps=10),
        lambda: plan(RULE, 0.1, steps=0),
        lambda: plan(RULE, 0.1, steps=2.5),
        lambda: plan(RULE, 0.0, steps=10),
        lambda: plan(RULE, -0.1, steps=10),
        lambda: plan(RULE, math.nan, steps=10),
        lambda: plan(RULE, [0.1, math.nan], steps=10),
        lambda: plan(RULE, "fast", steps=10),
        lambda: plan(RULE, 0.1, steps=10, steps_per_epoch=0),
        lambda: plan(RULE, 0.1, steps=10, tolerance=0.0),
        lambda: plan(RULE, 0.1, steps=10, tolerance=1.5),
        lambda: plan(RULE, 0.1, steps=10, dtype="float8"),
        lambda: plan(RULE, 0.1, steps=10, weight_decay=-1.0),
        lambda: plan(RULE, 0.1, steps=10, weight_decay=0.0),
        lambda: plan(SGD(0.1, 0.0), 0.1, steps=10),
        lambda: plan(RULE, 0.1, steps=10, init_norm=1.0),
        lambda: plan(RULE, 0.1, steps=10, init_norm=-1.0, unit_grad_sq=1.0),
        lambda: plan(RULE, 0.1, steps=10, init_norm=1.0, unit_grad_sq=0.0),
        lambda: plan(AdamW(1e-3), 1e-3, steps=10, init_norm=1.0),
        lambda: plan(Lion(1e-3, 0.1), 1e-3, steps=10, init_norm=1e-60, dim=1e300),
        lambda: plan(RULE, 0.1, steps=10, init_norm=1.0, unit_grad_sq=1e-300),
        lambda: plan(RULE, 0.1, steps=10, init_norm=1e69, unit_grad_sq=1e-90),
        lambda: plan(AdamL2(1e-3, 1e-3), 1e-3, steps=10),
        lambda: plan(AdamL2(1e-3, 1e-3), 1e-3, steps=10, dim=10.0),
        lambda: plan(AdamW(1e-3, 0.1), 20.0, steps=10),
        lambda: plan(AdamW(1e-3, 0.1), 1e-3, steps=10, shape=(3, 4)),
        lambda: plan(Muon(1e-3, 0.1), 1e-3, steps=10, dim=12.0),
        lambda: plan(Muon(1e-3, 0.1), 1e-3, steps=10, shape=(3, 4, 5)),
        lambda: plan(Muon(1e-3, 0.1), 1e-3, steps=10, shape=(3, 1.5)),
        lambda: plan(Muon(1e-3, 0.1), 1e-3, steps=10, init_norm=1.0),
        lambda: plan(SGD(0.1, 1.0), [0.1, 3.0], steps=10),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()
