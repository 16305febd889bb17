"""Every finding appears when it should and not otherwise, with numbers that an independent computation gives too."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from equilibria.planning import plan
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cite, cold_start, evolve, rescaled
from equilibria.theory.schedules import Cosine, MultiStep, Warmup, WarmupStableDecay, in_epochs

SPE = 391
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
}


def kinds(result):
    """Which findings there are; an unknown one fails the test."""
    found = []
    for finding in result.findings:
        matching = [kind for kind, words in WORDS.items() if words in finding.subject]
        assert len(matching) == 1, finding.subject
        found.append(matching[0])
    return found


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
    assert plan(rule, rule.lr, steps=2000, unit_grad_sq=1.0, dim=100.0).findings == ()


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
    assert "phase 4 has 40 epochs and would need 719 epochs" in finding.evidence
    r = heavy_ball_norm(0.004) / heavy_ball_norm(0.02)  # phase 2 had settled
    assert told_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


def told_factors(remedy):
    """Factors of the remedy by what they apply to."""
    found = re.findall(r"(momentum buffer|exp_avg_sq|exp_avg) by (\d+\.\d+)", remedy)
    factors = {name: float(factor) for name, factor in found}
    factors["weights"] = float(re.search(r"scale-invariant weights \(those only\) by (\d+\.\d+)", remedy).group(1))
    mean, variance = re.search(r"BatchNorm behind them by (\d+\.\d+) and (\d+\.\d+)", remedy).groups()
    return factors | {"mean": float(mean), "variance": float(variance)}


def test_a_larger_decay_settles_the_phase_as_told(example):
    """The factor named settles phase 3 within it, the next smaller one tried does not, and the angle is as told."""
    told = re.search(
        r"A (\d+)x larger weight decay in phase 3 .* turn (\S+)x as fast", the(example, "never settles").remedy
    )
    factor, faster = int(told.group(1)), float(told.group(2))
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


def test_undershoot(example):
    finding = the(example, "undershoot")
    assert "phase 2" in finding.subject
    assert "dividing lr by 5 divides the angle by 5 at once" in finding.evidence
    asked = math.acos(1 - 5e-5 / 1.9) / math.acos(1 - 1e-5 / 1.9)
    assert f"asks for {asked:.3g}:" in finding.evidence and f"{asked:.3g}" == "2.24"
    assert "starts at 45 %" in finding.evidence and "reaches 100 % over 23 epochs" in finding.evidence
    assert "test accuracy can dip" in finding.evidence
    r = heavy_ball_norm(0.02) / heavy_ball_norm(0.1)
    told = told_factors(finding.remedy)
    assert (told["weights"], told["momentum buffer"]) == (pytest.approx(r, abs=6e-4), pytest.approx(1 / r, abs=6e-4))
    assert (told["mean"], told["variance"]) == (pytest.approx(r, abs=6e-4), pytest.approx(r * r, abs=6e-4))


def test_the_factors_settle_a_phase_whose_predecessor_had_not():
    """From a norm far above equilibrium the ratio of equilibria would be wrong; the factors told are right at once."""
    lrs = np.array([0.1] * (5 * SPE) + [0.01] * (95 * SPE))
    result = plan(RULE, lrs, steps=len(lrs), unit_grad_sq=10.0, init_norm=30.0)
    told = told_factors(the(result, "undershoot").remedy)
    assert told["weights"] < 0.9 * heavy_ball_norm(0.01) / heavy_ball_norm(0.1)
    before = evolve(RULE, 5 * SPE, start=cold_start(RULE, 30.0), unit_grad_sq=10.0, lr=0.1).final
    after = SGD(0.01, 5e-4, momentum=0.9)
    path = evolve(after, 20, start=rescaled(before, told["weights"]), unit_grad_sq=10.0)
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
def test_rescaling_is_told_in_the_words_of_each_optimizer(rule, weight, state):
    """First-order powers of the drop; second moments get the squared factor."""
    result = plan(rule, [rule.lr] * 2000 + [rule.lr / 5] * 40_000, steps=42_000, unit_grad_sq=1.0, dim=100.0)
    remedy = the(result, "undershoot").remedy
    told = told_factors(remedy)
    assert set(told) == {"weights", "mean", "variance", *state}
    powers = {"weights": weight, "momentum buffer": 1 / weight, "exp_avg": 1 / weight, "exp_avg_sq": 1 / weight**2}
    powers |= {"mean": weight, "variance": weight**2}
    for name, factor in told.items():
        squared = name in ("exp_avg_sq", "variance")
        assert factor == pytest.approx(powers[name], rel=0.06 if squared else 0.03)  # Lion's memory adds 2 %


def test_undershoot_by_a_rise_of_weight_decay():
    """The lr did not fall, so nothing may be said about dividing it."""
    result = plan(RULE, 0.1, weight_decay=[5e-4] * 2000 + [5e-3] * 4000, steps=6000)
    finding = the(result, "undershoot")
    assert "dividing lr" not in finding.evidence and "accuracy" not in finding.evidence
    asked = math.acos(1 - 5e-4 / 1.9) / math.acos(1 - 5e-5 / 1.9)
    assert f"{asked:.3g} times the angle" in finding.evidence
    r = heavy_ball_norm(0.1, wd=5e-3) / heavy_ball_norm(0.1)
    assert told_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


def test_a_rise_of_lr_overshoots():
    result = plan(RULE, [0.02] * 20_000 + [0.1] * 20_000, steps=40_000)
    assert result.phases[0].settles and kinds(result) == ["overshoot"]  # it starts settled at its first lr
    finding = result.findings[0]
    assert "multiplies the angle by 5 at once" in finding.evidence and "accuracy" not in finding.evidence
    r = heavy_ball_norm(0.1) / heavy_ball_norm(0.02)
    assert told_factors(finding.remedy)["weights"] == pytest.approx(r, abs=6e-4)


@pytest.mark.parametrize("decay", [5e-4, [5e-4] * 500 + [0.0] * 500])
def test_phases_without_an_equilibrium_are_left_alone(decay):
    lr = [0.1] * 500 + [0.0] * 500 if decay == 5e-4 else 0.1
    assert plan(RULE, lr, weight_decay=decay, steps=1000).findings == ()


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
    ],
)
def test_lr_that_falls_faster_than_the_norm(schedule, steps, kind):
    result = plan(RULE, schedule, steps=steps)
    assert kinds(result) == ([] if kind is None else [kind])
    if kind is None:
        return
    finding = the(result, kind)
    last = [p for p in result.phases if p.middle.angle_ratio and p.middle.angle_ratio < 0.8][-1]
    told = f"to {100 * last.middle.angle_ratio:.0f} % in the middle of phase {last.number}"
    assert told in finding.evidence and finding.severity == "note"
    peak = max(result.phases, key=lambda p: p.start.lr)
    assert f"end at {last.end.norm / peak.end.norm:.2f} of their norm" in finding.evidence


def test_rising_ramp_says_nothing():
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
