"""Every finding appears when it should and not otherwise, with numbers that an independent computation gives too."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from tests.helpers import random_walk
from tests.helpers.scales import plan_scale

from equilibria.planning import plan
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cite, cold_start, evolve, rescaled, settled
from equilibria.theory.schedules import Cosine, MultiStep, Warmup, WarmupStableDecay, in_epochs

SPE = 391
SCALE = {"unit_grad_sq": 1.0, "dim": 100.0}
RULE = SGD(0.1, 5e-4, momentum=0.9)
EXAMPLE = in_epochs(MultiStep(0.1, milestones=[60, 120, 160], factor=0.2), steps_per_epoch=SPE)

WORDS = {
    "far start": "training starts far from equilibrium",
    "never settles": "never reach",
    "undershoot": "the angle undershoots",
    "overshoot": "the angle overshoots",
    "oscillation": "oscillates around its equilibrium",
    "to zero": "falls to zero while wd stays fixed",
    "lag": "falls faster than the norm can follow",
    "rounding": "away in phase",
    "decay ends": "without weight decay phase",
    "decay to zero": "the weight decay falls to zero",
}


def kinds(result):
    """Which findings there are; an unknown one fails the test."""
    names = []
    for finding in result.findings:
        matching = [kind for kind, words in WORDS.items() if words in finding.subject]
        assert len(matching) == 1, finding.subject
        names.append(matching[0])
    return names


def the(result, kind):
    matching = [f for f, k in zip(result.findings, kinds(result), strict=True) if k == kind]
    assert len(matching) == 1
    return matching[0]


def numbers(text):
    return [float(x.replace(",", "")) for x in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)]


def heavy_ball_norm(lr, wd=5e-4, a=0.9, big_l=1.0):
    return (big_l * lr / (wd * (1 - a) * (2 - lr * wd / (1 + a)))) ** 0.25


@pytest.fixture(scope="module")
def example():
    return plan(RULE, EXAMPLE, steps=200 * SPE, steps_per_epoch=SPE)


# Nothing to say ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [RULE, SGDW(0.1, 5e-4, momentum=0.9), AdamW(1e-3, 0.1), AdamL2(1e-3, 1e-3), Lion(1e-4, 1.0), Muon(0.02, 0.1)],
    ids=repr,
)
def test_a_constant_schedule_in_equilibrium_has_no_findings(rule):
    assert plan(rule, rule.lr, steps=2000, **plan_scale(rule, **SCALE)).findings == ()


def test_a_slow_decay_that_the_norm_follows_has_no_findings():
    assert plan(RULE, np.linspace(0.1, 0.05, 50_000), steps=50_000).findings == ()


def test_a_long_phase_after_a_small_drop_has_no_findings():
    assert plan(RULE, [0.1] * 5000 + [0.08] * 5000, steps=10_000).findings == ()


# Never settles, undershoot -------------------------------------------------------------------------------------------


def test_the_example_has_exactly_its_two_findings(example):
    assert kinds(example) == ["never settles", "undershoot"]
    assert all(f.severity == "warning" for f in example.findings)


def test_never_settles(example):
    finding = the(example, "never settles")
    assert finding.subject == "phases 3 and 4 never reach equilibrium"
    assert "for 80 epochs" in finding.evidence and "31-68 %" in finding.evidence
    assert "phase 4 lasts 40 epochs and would need 719 epochs" in finding.evidence
    r = heavy_ball_norm(0.004) / heavy_ball_norm(0.02)  # phase 2 had settled
    assert stated_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


def stated_factors(remedy):
    """Factors of the remedy by what they apply to."""
    pairs = re.findall(r"(momentum buffer|exp_avg_sq|exp_avg) by (\d+\.\d+)", remedy)
    factors = {name: float(factor) for name, factor in pairs}
    factors["weights"] = float(re.search(r"scale-invariant weights \(those only\) by (\d+\.\d+)", remedy).group(1))
    mean, variance = re.search(r"BatchNorm behind them by (\d+\.\d+) and (\d+\.\d+)", remedy).groups()
    return factors | {"mean": float(mean), "variance": float(variance)}


def test_the_suggested_decay_settles_the_phase(example):
    """The factor named settles phase 3 within it, the next smaller one tried does not, and the angle is as stated."""
    stated = re.search(
        r"A (\d+)x larger weight decay in phase 3 .* turn (\S+)x as fast", the(example, "never settles").remedy
    )
    factor, faster = int(stated.group(1)), float(stated.group(2))
    assert faster == pytest.approx(math.sqrt(factor), rel=0.03)
    for wd_factor, settles in ((factor, True), (3, False)):
        decays = np.full(200 * SPE, 5e-4)
        decays[120 * SPE : 160 * SPE] *= wd_factor
        helped = plan(RULE, EXAMPLE, weight_decay=decays, steps=200 * SPE, steps_per_epoch=SPE)
        assert helped.phases[2].settles == settles
    assert factor == 5


def test_a_phase_too_short_for_any_decay():
    result = plan(RULE, [0.1] * 5000 + [1e-4] * 300, steps=5300)
    assert "No weight decay up to 100x settles phase 2" in the(result, "never settles").remedy


FACTORS = [1, 2, 3, 5, 10, 20, 30, 50, 100]
STUCK = [
    (RULE, [(0.1, 2000), (0.02, 4000)]),
    (RULE, [(0.1, 2000), (0.02, 2000), (0.004, 2000)]),
    (RULE, [(0.004, 2000), (0.1, 400)]),
    (SGD(0.1, 5e-4, momentum=0.9, nesterov=True), [(0.1, 2000), (0.01, 6000)]),
    (SGDW(0.1, 5e-3, momentum=0.9), [(0.1, 2000), (0.02, 3000)]),
    (Lion(5e-3, 0.1), [(5e-3, 2000), (1e-3, 4000)]),
    (Lion(5e-3, 0.1), [(5e-3, 2000), (1e-3, 8000)]),
    (Muon(1e-2, 0.1), [(1e-2, 2000), (2e-3, 4000)]),
    (AdamW(1.5e-2, 0.036), [(1.5e-2, 2000), (3e-3, 12_000)]),
    (AdamL2(8e-3, 8e-3), [(8e-3, 2000), (8e-4, 11_500)]),
]


def with_more_decay(rule, levels, number, factor):
    """The plan of these levels of lr with a larger weight decay in one phase."""
    lrs = np.concatenate([np.full(n, lr) for lr, n in levels])
    decays = np.concatenate(
        [np.full(n, rule.weight_decay * (factor if i == number else 1)) for i, (_, n) in enumerate(levels, start=1)]
    )
    return plan(rule, lrs, steps=len(lrs), weight_decay=decays, **plan_scale(rule, **SCALE))


@pytest.mark.parametrize(("rule", "levels"), STUCK, ids=repr)
def test_the_weight_decay_that_would_settle_the_phase(rule, levels):
    """Planned again with that decay the phase settles, with the next smaller one it does not."""
    before = with_more_decay(rule, levels, 0, 1)
    remedy = the(before, "never settles").remedy
    factor, number, turn = re.search(
        r"A (\d+)x larger weight decay in phase (\d+) .* ([\d.]+)x as fast", remedy
    ).groups()
    number = int(number)
    assert number == next(p.number for p in before.phases if not p.settles)
    helped = with_more_decay(rule, levels, number, int(factor)).phases[number - 1]
    smaller = FACTORS[FACTORS.index(int(factor)) - 1]
    assert helped.settles
    assert not with_more_decay(rule, levels, number, smaller).phases[number - 1].settles
    faster = helped.end.angle_equilibrium / before.phases[number - 1].end.angle_equilibrium
    assert turn == f"{faster:.2g}"


def test_a_phase_that_no_weight_decay_settles():
    levels = [(0.1, 2000), (0.001, 100)]
    assert "No weight decay up to 100x" in the(with_more_decay(RULE, levels, 0, 1), "never settles").remedy
    for factor in FACTORS:
        assert not with_more_decay(RULE, levels, 2, factor).phases[1].settles


def test_undershoot(example):
    finding = the(example, "undershoot")
    assert "phase 2" in finding.subject
    assert "dividing lr by 5 divides the angle by 5 at once" in finding.evidence
    asked = math.acos(1 - 5e-5 / 1.9) / math.acos(1 - 1e-5 / 1.9)
    assert f"but its equilibrium by {asked:.3g}:" in finding.evidence and f"{asked:.3g}" == "2.24"
    assert "starts at 45 %" in finding.evidence and "reaches 100 % over 23 epochs" in finding.evidence
    assert "test accuracy can dip" in finding.evidence
    r = heavy_ball_norm(0.02) / heavy_ball_norm(0.1)
    stated = stated_factors(finding.remedy)
    assert (stated["weights"], stated["momentum buffer"]) == (
        pytest.approx(r, abs=6e-4),
        pytest.approx(1 / r, abs=6e-4),
    )
    assert (stated["mean"], stated["variance"]) == (pytest.approx(r, abs=6e-4), pytest.approx(r * r, abs=6e-4))


def test_the_factors_settle_a_phase_whose_predecessor_had_not():
    """From a norm far above equilibrium the ratio of equilibria would be wrong; the stated factors are right."""
    lrs = np.array([0.1] * (5 * SPE) + [0.01] * (95 * SPE))
    result = plan(RULE, lrs, steps=len(lrs), unit_grad_sq=10.0, init_norm=30.0)
    stated = stated_factors(the(result, "undershoot").remedy)
    assert stated["weights"] < 0.9 * heavy_ball_norm(0.01) / heavy_ball_norm(0.1)
    before = evolve(RULE, 5 * SPE, start=cold_start(RULE, 30.0), unit_grad_sq=10.0, lr=0.1).final
    after = SGD(0.01, 5e-4, momentum=0.9)
    path = evolve(after, 20, start=rescaled(before, stated["weights"]), unit_grad_sq=10.0)
    np.testing.assert_allclose(path.angle / after.equilibrium().angle, 1.0, atol=0.02)


@pytest.mark.parametrize(
    ("rule", "weight", "state"),
    [
        (SGDW(0.1, 0.01, momentum=0.9), 5**-0.25, ["momentum buffer"]),
        (AdamW(1e-2, 0.1, betas=(0.9, 0.95)), 5**-0.5, ["exp_avg", "exp_avg_sq"]),
        (AdamL2(1e-2, 1e-2, betas=(0.9, 0.95)), 5 ** (-1 / 3), ["exp_avg", "exp_avg_sq"]),
        (Lion(5e-3, 0.1), 5**-0.5, ["exp_avg"]),
        (Muon(1e-2, 0.1), 5**-0.5, ["momentum buffer"]),
    ],
    ids=repr,
)
def test_rescaling_names_the_state_of_every_optimizer(rule, weight, state):
    """First-order powers of the drop; second moments get the squared factor."""
    result = plan(rule, [rule.lr] * 2000 + [rule.lr / 5] * 40_000, steps=42_000, **plan_scale(rule, **SCALE))
    remedy = the(result, "undershoot").remedy
    stated = stated_factors(remedy)
    assert set(stated) == {"weights", "mean", "variance", *state}
    powers = {"weights": weight, "momentum buffer": 1 / weight, "exp_avg": 1 / weight, "exp_avg_sq": 1 / weight**2}
    powers |= {"mean": weight, "variance": weight**2}
    for name, factor in stated.items():
        squared = name in ("exp_avg_sq", "variance")
        assert factor == pytest.approx(powers[name], rel=0.06 if squared else 0.03)  # Lion's memory adds 2 %


def rescaled_by_hand(state, stated):
    """Each part of the state times the factor that the remedy names for it."""
    w = stated["weights"]
    first = stated.get("exp_avg", stated.get("momentum buffer"))
    return dataclasses.replace(
        state,
        norm_sq=state.norm_sq * w**2,
        radial=state.radial * w * first,
        buffer_sq=state.buffer_sq * first**2,
        second=state.second * stated.get("exp_avg_sq", 1.0),
        memory=state.memory * w,
    )


RULES = [
    (RULE, ["momentum buffer"]),
    (SGD(0.1, 1e-3, momentum=0.9, nesterov=True), ["momentum buffer"]),
    (SGDW(0.1, 0.01, momentum=0.9), ["momentum buffer"]),
    (AdamW(1e-2, 0.1, betas=(0.9, 0.95)), ["exp_avg", "exp_avg_sq"]),
    (AdamL2(1e-2, 1e-2, betas=(0.9, 0.95)), ["exp_avg", "exp_avg_sq"]),
    (Lion(5e-3, 0.1), ["exp_avg"]),
    (Muon(1e-2, 0.1), ["momentum buffer"]),
]
LEVELS = {
    "settled, down": ([1.0, 0.2], [2000, 40_000], "undershoot"),
    "not settled, down": ([1.0, 0.2, 0.04], [2000, 700, 120_000], "undershoot"),
    "settled, up": ([0.2, 1.0], [2000, 20_000], "overshoot"),
}


@pytest.mark.parametrize(("rule", "state"), RULES, ids=repr)
@pytest.mark.parametrize("name", ["settled, down", "not settled, down", "settled, up"])
def test_the_rescaling_settles_the_angle_at_once(rule, state, name):
    """The moment recursion from the state times the factors stated, wherever the phase before had got to."""
    shape, lengths, kind = LEVELS[name]
    lrs = np.repeat(rule.lr * np.array(shape), lengths)
    result = plan(rule, lrs, steps=len(lrs), **plan_scale(rule, **SCALE))
    remedy = the(result, kind).remedy
    stated = stated_factors(remedy)
    phase = result.phases[-1]
    r = phase.start.norm_equilibrium / phase.start.norm
    powers = {
        "weights": r,
        "momentum buffer": 1 / r,
        "exp_avg": 1 / r,
        "exp_avg_sq": r**-2,
        "mean": r,
        "variance": r**2,
    }
    assert stated == {key: pytest.approx(powers[key], abs=5.1e-4) for key in ["weights", *state, "mean", "variance"]}
    first = dataclasses.replace(rule, lr=float(lrs[0]))
    before = evolve(rule, phase.first_step, start=settled(first, **SCALE), lr=lrs[: phase.first_step], **SCALE).final
    here = dataclasses.replace(rule, lr=float(lrs[-1]))
    goal = here.equilibrium(**SCALE).angle
    assert abs(evolve(here, 1, start=before, **SCALE).angle[0] / goal - 1) > 0.2
    after = evolve(here, 20, start=rescaled_by_hand(before, stated), **SCALE).angle
    np.testing.assert_allclose(after, goal, rtol=0.02)


@pytest.mark.parametrize("settles", [True, False])
def test_the_rescaling_by_brute_force(settles):
    """Heavy ball in plain floats, without the library: weights, buffer and their product times the factors stated."""
    short = 30_000 if settles else 1500
    result = plan(RULE, [0.1] * 2000 + [0.02] * short + [0.004] * 90_000, steps=92_000 + short)
    finding = next(f for f in result.findings if "phase 3 begins and comes back" in f.subject)
    stated = stated_factors(finding.remedy)
    p = heavy_ball_norm(0.1) ** 2
    q, r = -5e-4 * p / 1.9, 2 * 5e-4 * p / (0.1 * 1.9)
    for lr, steps in ((0.1, 2000), (0.02, short)):
        for _ in range(steps):
            p, q, r, *_ = random_walk.expected_sgd_step(p, q, r, lr, 5e-4, 0.9, 1.0)
    w, b = stated["weights"], stated["momentum buffer"]
    p, q, r = p * w**2, q * w * b, r * b**2
    for _ in range(200):
        after, q, r, moved, _ = random_walk.expected_sgd_step(p, q, r, 0.004, 5e-4, 0.9, 1.0)
        chord = (moved - (math.sqrt(after) - math.sqrt(p)) ** 2) / math.sqrt(p * after)
        assert 2 * math.asin(math.sqrt(chord) / 2) == pytest.approx(math.acos(1 - 2e-6 / 1.9), rel=0.02)
        p = after


@pytest.mark.parametrize(
    ("rule", "lrs"),
    [(AdamW(1e-2, 0.1), [1e-6] * 2000 + [1e-2] * 20_000), (RULE, [0.1] * 2000 + [1e-8] * 2000)],
    ids=["second moment", "running variance"],
)
def test_small_factors_keep_their_digits(rule, lrs):
    result = plan(rule, lrs, steps=len(lrs))
    remedy = result.findings[0].remedy
    r = result.phases[1].start.norm_equilibrium / result.phases[1].start.norm
    expected = {r"\(those only\)": r, "them": r, r"them by \S+ and": r * r}
    if "exp_avg_sq" in remedy:
        expected["exp_avg_sq"] = r**-2
    for words, factor in expected.items():
        stated = re.search(rf"{words}(?: by)? (\d[\d.e+-]*)", remedy).group(1)
        assert float(stated) == pytest.approx(factor, rel=0.006), words


def test_undershoot_by_a_rise_of_weight_decay():
    """The lr did not fall, so nothing may be said about dividing it."""
    result = plan(RULE, 0.1, weight_decay=[5e-4] * 2000 + [5e-3] * 4000, steps=6000)
    finding = the(result, "undershoot")
    assert "dividing lr" not in finding.evidence and "accuracy" not in finding.evidence
    asked = math.acos(1 - 5e-4 / 1.9) / math.acos(1 - 5e-5 / 1.9)
    assert f"the new equilibrium is {asked:.3g} times the angle" in finding.evidence
    r = heavy_ball_norm(0.1, wd=5e-3) / heavy_ball_norm(0.1)
    assert stated_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


def test_a_rise_of_lr_overshoots():
    result = plan(RULE, [0.02] * 20_000 + [0.1] * 20_000, steps=40_000)
    assert result.phases[0].settles and kinds(result) == ["overshoot"]  # it starts settled at its first lr
    finding = result.findings[0]
    assert "multiplies the angle by 5 at once" in finding.evidence and "accuracy" not in finding.evidence
    r = heavy_ball_norm(0.1) / heavy_ball_norm(0.02)
    assert stated_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


def test_overshoot_by_a_fall_of_weight_decay():
    result = plan(RULE, 0.1, weight_decay=[5e-3] * 2000 + [5e-4] * 40_000, steps=42_000)
    assert kinds(result) == ["overshoot"]
    finding = result.findings[0]
    assert "316 %" in finding.evidence and "accuracy" not in finding.evidence
    r = heavy_ball_norm(0.1) / heavy_ball_norm(0.1, wd=5e-3)
    assert stated_factors(finding.remedy)["weights"] == pytest.approx(r, abs=5.1e-4)


@pytest.mark.parametrize(("change", "kind"), [(0.66, None), (0.62, "undershoot"), (1.54, None), (1.6, "overshoot")])
def test_a_jump_counts_outside_80_to_125_per_cent(change, kind):
    """The angle starts at sqrt(change) of its new equilibrium: 0.81, 0.79, 1.24 and 1.26."""
    result = plan(RULE, [0.1] * 2000 + [0.1 * change] * 20_000, steps=22_000)
    assert result.phases[1].start.angle_ratio == pytest.approx(math.sqrt(change), rel=1e-3)
    assert kinds(result) == ([] if kind is None else [kind])


@pytest.mark.parametrize(("second", "steps"), [(0.01, 300), (1.0, 30)])
def test_a_jump_that_does_not_come_back_is_one_finding(second, steps):
    assert kinds(plan(RULE, [0.1] * 1000 + [second] * steps, steps=1000 + steps)) == ["never settles"]


def test_a_phase_without_lr_is_left_alone():
    assert plan(RULE, [0.1] * 500 + [0.0] * 500, steps=1000).findings == ()


# Weight decay that falls to zero -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, np.linspace(0.1, 0.05, 1000)], ids=["constant lr", "falling lr"])
def test_a_phase_without_weight_decay(lr):
    """The norm of the last 500 steps grows as the expected step says, and the angle fades with its square."""
    result = plan(RULE, lr, weight_decay=[5e-4] * 500 + [0.0] * 500, steps=1000)
    finding = the(result, "decay ends")
    assert finding.severity == "warning"
    p, q, r = float(settled(RULE).norm_sq), float(settled(RULE).radial), float(settled(RULE).buffer_sq)
    norms = []
    for step, rate in enumerate(np.broadcast_to(lr, 1000).tolist()):
        norms.append(math.sqrt(p))
        p, q, r, *_ = random_walk.expected_sgd_step(p, q, r, rate, 5e-4 if step < 500 else 0.0, 0.9, 1.0)
    before, after, times = numbers(finding.evidence)[:3]
    assert (before, after) == (pytest.approx(norms[500], rel=5e-3), pytest.approx(norms[-1], rel=5e-3))
    assert times == pytest.approx((norms[-1] / norms[500]) ** 2, rel=5e-3)


def test_weight_decay_that_begins_late_has_not_ended():
    assert "decay ends" not in kinds(plan(RULE, 0.1, weight_decay=[0.0] * 500 + [5e-4] * 500, steps=1000))


@pytest.mark.parametrize(
    ("lr", "decay", "there"),
    [
        (0.1, np.linspace(5e-4, 0.0, 40_000), True),
        (0.1, np.linspace(5e-4, 5e-5, 40_000), False),
        (np.linspace(0.1, 1e-6, 40_000), np.linspace(5e-4, 5e-9, 40_000), False),
    ],
    ids=["to zero", "to a tenth", "with lr"],
)
def test_weight_decay_that_falls_to_zero(lr, decay, there):
    """Together with lr it may: the equilibrium norm depends on their ratio only."""
    result = plan(RULE, lr, weight_decay=decay, steps=40_000)
    assert kinds(result) == (["decay to zero"] if there else [])
    if there:
        finding, last = the(result, "decay to zero"), result.phases[-1]
        assert last.middle.angle_ratio > 1.25 and finding.severity == "note"
        assert f"phase {last.number} the weights turn at {100 * last.middle.angle_ratio:.0f} % of" in finding.evidence


# Never settles from a far start --------------------------------------------------------------------------------------


def test_a_far_start_that_never_settles_is_cured_by_one_remedy():
    """At the first step there is no optimizer state to rescale, and the factor on the weights is stated once."""
    far = plan(RULE, 0.1, steps=500, init_norm=50.0, unit_grad_sq=1.0)
    assert kinds(far) == ["far start", "never settles"]
    remedy = the(far, "never settles").remedy
    assert "as for the far start" in remedy and "buffer" not in remedy and "plan again" not in remedy
    stated = float(re.search(r"weights by (\S+)$", the(far, "far start").remedy).group(1))
    assert "never settles" not in kinds(plan(RULE, 0.1, steps=500, init_norm=50 * stated, unit_grad_sq=1.0))


def test_later_phases_are_planned_again_after_a_far_start():
    result = plan(RULE, [0.1] * 500 + [0.01] * 500, steps=1000, init_norm=50.0, unit_grad_sq=1.0)
    assert the(result, "never settles").subject.startswith("phases 1 and 2")
    assert "plan again" in the(result, "never settles").remedy


def test_a_near_start_that_never_settles_names_its_factor():
    star = heavy_ball_norm(0.1)
    result = plan(RULE, 0.1, steps=60, init_norm=1.08 * star, unit_grad_sq=1.0)
    assert kinds(result) == ["never settles"]
    factor = float(
        re.search(r"initial scale-invariant weights by (\S+)\. ", the(result, "never settles").remedy).group(1)
    )
    assert factor == pytest.approx(1 / 1.08, abs=6e-4)


def test_a_start_thrown_far_away_tells_the_whole_range_of_angles():
    """A tenth of a thousandth of the norm: the first step turns by a right angle, the others hardly."""
    result = plan(AdamW(1e-3, 0.1), 1e-3, steps=100, init_norm=1e-4, dim=100.0)
    (phase,) = result.phases
    ratios = [moment.angle_ratio for moment in (phase.start, phase.middle, phase.end)]
    stated = f"{min(ratios):.2g} to {max(ratios):.3g} times their equilibrium angle"
    assert max(ratios) > 10 and stated in the(result, "never settles").evidence


# Coming back ---------------------------------------------------------------------------------------------------------


def test_coming_back_from_lr_zero():
    """A frozen stretch, then a lower lr: no equilibrium before, so nothing to compare or to rescale from."""
    result = plan(RULE, [0.1] * 500 + [0.0] * 500 + [0.01] * 60_000, steps=61_000)
    assert "never settles" not in kinds(result) and "undershoot" not in kinds(result)


# Ramps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "steps", "kind"),
    [
        (Cosine(0.1, steps=40_000), 40_000, "to zero"),
        (Warmup(Cosine(0.1, steps=39_000), steps=1000), 40_000, "to zero"),
        (WarmupStableDecay(0.1, warmup=500, stable=20_000, decay=5000), 25_500, "to zero"),
        (Cosine(0.1, steps=40_000, end=0.01), 40_000, None),
        (Cosine(0.1, steps=6000, end=0.01), 6000, "lag"),
        (np.linspace(0.1, 0.0009, 6000), 6000, "to zero"),
        (np.linspace(0.1, 0.0011, 6000), 6000, "lag"),
    ],
)
def test_lr_that_falls_faster_than_the_norm(schedule, steps, kind):
    result = plan(RULE, schedule, steps=steps)
    assert kinds(result) == ([] if kind is None else [kind])
    if kind is None:
        return
    finding = the(result, kind)
    last = [p for p in result.phases if p.middle.angle_ratio and p.middle.angle_ratio < 0.8][-1]
    stated = f"to {100 * last.middle.angle_ratio:.0f} % in the middle of phase {last.number}"
    assert stated in finding.evidence and finding.severity == "note"
    peak = max(result.phases, key=lambda p: p.start.lr)
    assert f"end at {last.end.norm / peak.end.norm:.2f} of their norm" in finding.evidence


@pytest.mark.parametrize(
    ("lrs", "scale"),
    [
        (np.concatenate([np.full(3000, 0.1), np.linspace(0.01, 0.005, 6000)]), {}),
        (np.linspace(0.1, 0.05, 2000), {"init_norm": 20.0, "unit_grad_sq": 1.0}),
    ],
    ids=["after a jump", "after a far start"],
)
def test_a_lag_that_is_there_from_the_start_is_not_a_fall_behind(lrs, scale):
    result = plan(RULE, lrs, steps=len(lrs), **scale)
    assert any(not p.flat and p.middle.angle_ratio < 0.8 for p in result.phases)
    assert not {"lag", "to zero"} & set(kinds(result))


def test_a_rising_ramp_has_no_finding():
    assert kinds(plan(RULE, np.linspace(0.01, 0.1, 3000), steps=3000)) == []


# Oscillation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("product", "there"), [(6.4e-4, False), (6.8e-4, True)])
def test_oscillation_above_the_threshold(product, there):
    """(1 - sqrt(.9))^2 / 4 = 6.58e-4, to first order."""
    assert (1 - math.sqrt(0.9)) ** 2 / 4 == pytest.approx(6.58e-4, rel=1e-3)
    result = plan(SGD(0.1, 10 * product, momentum=0.9), 0.1, steps=1000)
    assert kinds(result) == (["oscillation"] if there else [])
    if there:
        finding = result.findings[0]
        assert finding.severity == "note" and f"lr x wd = {product:.3g} " in finding.evidence


def test_warnings_come_before_notes():
    result = plan(SGD(0.1, 0.02, momentum=0.9), 0.1, steps=1000, init_norm=30.0, unit_grad_sq=1.0)
    assert kinds(result) == ["far start", "oscillation"]


# Far start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "there"), [(0.1, True), (0.85, True), (0.95, False), (1.05, False), (5.0, True)])
def test_far_start(factor, there):
    star = heavy_ball_norm(0.1, big_l=10.0)
    result = plan(RULE, 0.1, steps=20_000, init_norm=factor * star, unit_grad_sq=10.0)
    assert kinds(result) == (["far start"] if there else [])
    if not there:
        return
    finding = result.findings[0]
    # The first step from an empty buffer is plain SGD: tan = lr sqrt(L) / ((1 - lr wd) ||w||^2).
    first = math.atan(0.1 * math.sqrt(10) / ((1 - 5e-5) * (factor * star) ** 2))
    share = f"{factor:.2g} times" if factor > 1 else f"{100 * factor:.0f} %"
    assert f"the norm is {share}" in finding.subject
    assert f"||w|| = {factor * star:.3g} against {star:.3g} at lr 0.1" in finding.evidence
    assert f"turns by {first:.3g} rad" in finding.evidence
    assert f"weights by {1 / factor:.3g}" in finding.remedy
    cured = plan(RULE, 0.1, steps=20_000, init_norm=star, unit_grad_sq=10.0)
    assert cured.findings == ()


def test_a_tiny_start_is_thrown_past_equilibrium():
    star = heavy_ball_norm(0.1, big_l=10.0)
    result = plan(RULE, 0.1, steps=2000, init_norm=1e-3 * star, unit_grad_sq=10.0)
    assert "overshoots" in the(result, "far start").evidence


def test_far_start_behind_a_warm_up_is_cured_by_its_remedy():
    """The goal is the equilibrium of the lr that the warm-up reaches."""
    star = heavy_ball_norm(0.1, big_l=1.0)
    schedule = Warmup(0.1, steps=100)
    result = plan(RULE, schedule, steps=5000, init_norm=6 * star, unit_grad_sq=1.0)
    assert result.situation.start_norm == pytest.approx(star, rel=1e-9)
    factor = float(re.search(r"weights by (\S+)$", the(result, "far start").remedy).group(1))
    cured = plan(RULE, schedule, steps=5000, init_norm=6 * star * factor, unit_grad_sq=1.0)
    assert "far start" not in kinds(cured)


@pytest.mark.parametrize(
    ("factor", "effect"),
    [(1e-3, "overshoots"), (0.85, "too much"), (5.0, "too little")],
    ids=["tiny", "small", "large"],
)
def test_a_far_start_names_the_effect_of_the_first_steps(factor, effect):
    """From a thousandth of the equilibrium norm the first steps throw the norm past it."""
    star = heavy_ball_norm(0.1, big_l=10.0)
    result = plan(RULE, 0.1, steps=4000, init_norm=factor * star, unit_grad_sq=10.0)
    assert effect in the(result, "far start").evidence
    p, q, r = (factor * star) ** 2, 0.0, 0.0
    for _ in range(2000):
        p, q, r, *_ = random_walk.expected_sgd_step(p, q, r, 0.1, 5e-4, 0.9, 10.0)
    assert (math.sqrt(p) > 1.2 * star) == (effect in ("overshoots", "too little"))


STARTS = {
    "constant": (0.1, 0.1),
    "warm-up": (Warmup(0.1, steps=100), 0.1),
    "warm-up and cosine": (Warmup(Cosine(0.1, steps=4900), steps=100), 0.1),
    "steps down": (MultiStep(0.1, milestones=[2000, 3500], factor=0.1), 0.1),
    "steps up": ([0.004] * 2500 + [0.1] * 2500, 0.004),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("factor", [0.3, 6.0])
def test_far_start_compares_with_where_training_heads_first(name, factor):
    """The lr that training begins with, or that its warm-up reaches; following the remedy ends the finding."""
    schedule, lr = STARTS[name]
    star = heavy_ball_norm(lr)
    result = plan(RULE, schedule, steps=5000, init_norm=factor * star, unit_grad_sq=1.0)
    finding = the(result, "far start")
    norm, goal, told_lr, step = numbers(finding.evidence)[:4]
    assert (norm, goal) == (pytest.approx(factor * star, rel=5e-3), pytest.approx(star, rel=5e-3))
    assert told_lr == pytest.approx(lr)
    assert step == next(p for p in result.phases if p.start.lr > 0).first_step
    (stated,) = numbers(finding.remedy)
    assert stated == pytest.approx(1 / factor, rel=5e-3)
    followed = plan(RULE, schedule, steps=5000, init_norm=stated * factor * star, unit_grad_sq=1.0)
    assert "far start" not in kinds(followed)


@pytest.mark.parametrize(("rule", "_state"), RULES, ids=repr)
def test_following_the_remedy_of_a_far_start_with_any_rule(rule, _state):
    star = math.sqrt(float(settled(rule, **SCALE).norm_sq))
    far = plan(rule, rule.lr, steps=2000, init_norm=4 * star, **plan_scale(rule, **SCALE))
    (stated,) = numbers(the(far, "far start").remedy)
    assert "far start" not in kinds(
        plan(rule, rule.lr, steps=2000, init_norm=4 * star * stated, **plan_scale(rule, **SCALE))
    )


def test_a_very_small_start_is_not_called_zero():
    result = plan(RULE, 0.1, steps=5000, init_norm=1e-3 * heavy_ball_norm(0.1), unit_grad_sq=1.0)
    assert "is 0.1 % of its equilibrium" in the(result, "far start").subject


# Rounding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12), ("float32", 2.0**-25)])
def test_below_the_limit_rounding_swallows_any_decay(dtype, limit):
    """All mantissas of the type (a sample for float32): below the limit every weight survives, above some do not."""
    kind = getattr(torch, dtype)
    one_to_two = torch.linspace(1, 2, 4097, dtype=torch.float64)[:-1].to(kind).to(torch.float64)
    below = (one_to_two * (1 - 0.999 * limit)).to(kind).to(torch.float64)
    above = (one_to_two * (1 - 1.1 * limit)).to(kind).to(torch.float64)
    powers = one_to_two == 1  # just below a power of two the grid is twice as fine
    assert torch.equal(below[~powers], one_to_two[~powers])
    assert not torch.equal(above[~powers], one_to_two[~powers])


@pytest.mark.parametrize("make", [lambda wd: AdamW(1e-2, wd), lambda wd: Lion(1e-2, wd), lambda wd: Muon(1e-2, wd)])
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12), ("float32", 2.0**-25)])
def test_decay_that_is_rounded_away(make, dtype, limit):
    lost = plan(make(90 * limit), 1e-2, steps=100, dtype=dtype)
    assert kinds(lost) == ["rounding"]
    finding = lost.findings[0]
    assert finding.subject == f"{dtype} weights round the weight decay away in phase 1"
    assert f"lr x wd = {0.9 * limit:.3g} " in finding.evidence and f"{limit:.3g}" in finding.evidence
    assert plan(make(110 * limit), 1e-2, steps=100, dtype=dtype).findings == ()


def test_only_a_phase_that_stays_below_the_limit_counts():
    """A ramp is lost if its larger end is; the stated number is the largest."""
    limit = 2.0**-9
    wd = 0.1
    falls = np.linspace(2 * limit / wd, 0.1 * limit / wd, 800)
    result = plan(AdamW(1e-2, wd), falls, steps=800, dtype="bfloat16")
    lost = [p for p in result.phases if p.start.lr * wd < limit]
    assert 0 < len(lost) < len(result.phases)
    finding = the(result, "rounding")
    assert [int(n) for n in numbers(finding.subject)] == [p.number for p in lost]
    assert f"lr x wd = {lost[0].start.lr * wd:.3g} " in finding.evidence
    rises = np.linspace(0.0, 2 * limit / wd, 50)  # one phase, whose end is well above
    assert "rounding" not in kinds(plan(AdamW(1e-2, wd), [*rises, *[rises[-1]] * 950], steps=1000, dtype="bfloat16"))


def test_float32_has_no_master_copy_to_keep():
    assert "master copy" in plan(AdamW(1e-3, 0.1), 1e-3, steps=10, dtype="bfloat16").findings[0].remedy
    remedy = plan(AdamW(1e-6, 1e-3), 1e-6, steps=10).findings[0].remedy
    assert "raise lr x wd" in remedy and "float32" not in remedy


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (SGD(0.1, 1e-6, momentum=0.9), "heavy_ball"),
        (SGDW(0.1, 1e-6, momentum=0.9), "sgdw"),
        (AdamW(1e-3, 1e-3), "adamw"),
        (AdamL2(1e-4, 1e-9), "adam_l2"),
        (Lion(1e-3, 1e-3), "constant_update"),
        (Muon(1e-3, 1e-3), "constant_update"),
    ],
    ids=repr,
)
def test_rounding_rests_on_the_law_of_the_optimizer(rule, law):
    finding = the(plan(rule, rule.lr, steps=10, dtype="bfloat16", **plan_scale(rule, **SCALE)), "rounding")
    assert finding.law == f"equilibrium.{law}" == cite(finding.law).law


def test_coupled_decay_is_part_of_the_update():
    """For SGD the step as a whole counts: sqrt(2 lr wd) of the weight."""
    assert kinds(plan(SGD(0.1, 5e-4), 0.1, steps=100, dtype="bfloat16")) == []
    lost = plan(SGD(0.1, 1e-5), 0.1, steps=100, dtype="bfloat16")
    assert kinds(lost) == ["rounding"]
    assert f"by {math.acos(1 - 1e-6):.3g} of itself" in lost.findings[0].evidence


def test_torch_confirms_that_the_decay_is_lost():
    """AdamW in bfloat16 with lr wd = 1e-3 and no gradient: the weights do not shrink; in float32 they do."""
    for dtype, shrinks in ((torch.bfloat16, False), (torch.float32, True)):
        w = torch.nn.Parameter(torch.linspace(1.01, 1.99, 64).to(dtype))
        before = w.detach().clone()
        optimizer = torch.optim.AdamW([w], lr=1e-2, weight_decay=0.1)
        w.grad = torch.zeros_like(w)
        for _ in range(50):
            optimizer.step()
        assert torch.equal(w.detach(), before) != shrinks


# Every finding -------------------------------------------------------------------------------------------------------


def test_every_finding_names_a_law_that_exists(example):
    others = [
        plan(SGD(0.1, 0.02, momentum=0.9), 0.1, steps=1000, init_norm=30.0, unit_grad_sq=1.0),
        plan(RULE, Cosine(0.1, steps=40_000), steps=40_000),
        plan(AdamW(1e-3, 0.1), 1e-3, steps=10, dtype="bfloat16"),
    ]
    for result in (example, *others):
        assert result.findings
        for finding in result.findings:
            assert cite(finding.law).law == finding.law
            assert finding.severity in ("warning", "note")
            assert finding.subject and finding.evidence and finding.remedy
