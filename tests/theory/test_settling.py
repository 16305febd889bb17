"""Time to settle against brute force: recursions written out here or in `random_walk`, iterated until they stay put."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from tests.helpers import random_walk

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cold_start, evolve, rescaled, settled, settling
from equilibria.theory.approach import oscillation_threshold
from equilibria.theory.settling import (
    Relaxation,
    after_lr_drop,
    decay_timescale,
    minimum_settling_steps,
    relaxation,
    settling_steps,
    steps_to_tolerance,
    tracking_lag,
)

QUANTITIES = ("angle", "norm", "norm_sq")


def buffer_walk(rule, pqr, steps, unit_grad_sq=1.0):
    """||w||^2 before every step and the angle of every step, from the expected step of torch's SGD or of SGDW."""
    norm_sq, angle = [], []
    p, q, r = pqr
    for _ in range(steps):
        norm_sq.append(p)
        if isinstance(rule, SGDW):
            after, q, r, _, inner = random_walk.expected_sgdw_step(
                p, q, r, rule.lr, rule.weight_decay, rule.momentum, unit_grad_sq
            )
        else:
            after, q, r, _, inner = random_walk.expected_sgd_step(
                p,
                q,
                r,
                rule.lr,
                rule.weight_decay,
                rule.momentum,
                unit_grad_sq,
                nesterov=rule.nesterov,
                dampening=rule.dampening,
            )
        angle.append(math.acos(min(1.0, inner / math.sqrt(p * after))))
        p = after
    return np.array(norm_sq), np.array(angle), (p, q, r)


def adam_walk(rule, state, steps, unit_grad_sq=1.0, dim=1.0):
    norm_sq, angle = [], []
    p, q, r, v = state
    for _ in range(steps):
        norm_sq.append(p)
        after, q, r, v, moved = random_walk.expected_adam_step(
            p,
            q,
            r,
            v,
            rule.lr,
            rule.weight_decay,
            rule.betas,
            unit_grad_sq,
            dim,
            decoupled=isinstance(rule, AdamW),
        )
        angle.append(math.acos(min(1.0, (p + after - moved) / (2 * math.sqrt(p * after)))))
        p = after
    return np.array(norm_sq), np.array(angle), (p, q, r, v)


LAGS = 1200


@cache
def correlations(rule):
    """E<u_t, u_{t+k}> / E||u||^2, k = 1..: the sign of a filtered Gaussian (Lion), or the filter itself (Muon)."""
    k = np.arange(1, 4000)
    if isinstance(rule, Muon):
        psi = np.concatenate([[1 - rule.momentum**2], (1 - rule.momentum) * rule.momentum ** (k + 1)])
    else:
        b1, b2 = rule.betas
        psi = np.concatenate([[1 - b1], b1 * (1 - b2) * b2 ** (k - 1)])
    rho = np.array([psi[:-lag] @ psi[lag:] for lag in range(1, LAGS)]) / (psi @ psi)
    return rho if isinstance(rule, Muon) else 2 / np.pi * np.arcsin(rho)


def memory_walk(rule, norm_sq, steps, past_lr):
    """Constant-size updates: w_t is the decayed sum of all past updates, whose correlations are summed one by one.

    The past before step 0 was taken at ``past_lr`` with the same lr * wd.
    """
    kept = 1 - rule.lr * rule.weight_decay
    pull = correlations(rule) * kept ** np.arange(LAGS - 1)
    recent, past = np.cumsum(pull), np.cumsum(pull[::-1])[::-1]
    p, sizes, angle = norm_sq, [], []
    for t in range(steps):
        sizes.append(p)
        inside = recent[min(t, LAGS - 1) - 1] if t else 0.0
        z = rule.lr * inside + (past_lr * past[t] if t < LAGS - 1 else 0.0)  # -<w, u>
        after = kept**2 * p + 2 * kept * rule.lr * z + rule.lr**2
        inner = kept * p + rule.lr * z
        angle.append(math.acos(min(1.0, inner / math.sqrt(p * after))))
        p = after
    return np.array(sizes), np.array(angle)


def last_outside(norm_sq, angle, target, end_angle, quantity, tolerance=0.05):
    """Steps until the quantity is inside its band for good; the walk must be long enough for that to be clear."""
    ratio = angle / end_angle if quantity == "angle" else norm_sq / target
    ratio = np.sqrt(ratio) if quantity == "norm" else ratio
    outside = np.flatnonzero(np.abs(ratio - 1) > tolerance)
    assert not len(outside) or outside[-1] < 0.7 * len(ratio)
    return int(outside[-1]) + 1 if len(outside) else 0


def fixed_point(walk, start):
    """Where a walk ends after very long."""
    norm_sq, angle, _ = walk(start)
    assert norm_sq[-1] == pytest.approx(norm_sq[-2], rel=1e-9)
    return float(norm_sq[-1]), float(angle[-1])


# Printed numbers -----------------------------------------------------------------------------------------------------


def test_five_per_cent_times_after_a_drop_by_ten_with_momentum():
    rule = SGD(0.1, 1e-4, momentum=0.9)  # the new lr * wd is 1e-5
    assert minimum_settling_steps(rule, 10) == 5757
    assert [round(steps_to_tolerance(rule, 10**0.25, quantity=q)) for q in ("norm", "angle")] == [9330, 11056]
    old = SGD(1.0, 1e-4, momentum=0.9)
    start = buffer_walk(old, (100.0, 0.0, 0.0), 6000)[2]
    norm_sq, angle, _ = buffer_walk(rule, start, 20_000)
    target, end = math.sqrt(0.1 / (1e-4 * 0.1 * (2 - 1e-5 / 1.9))), math.acos(1 - 1e-5 / 1.9)
    norm_time, angle_time = (last_outside(norm_sq, angle, target, end, q) for q in ("norm", "angle"))
    assert abs(norm_time - 9319) <= 2 and abs(angle_time - 11040) <= 2
    for quantity, expected in (("norm", norm_time), ("angle", angle_time)):
        assert abs(settling_steps(rule, settled(old), quantity=quantity) - expected) <= 1
    at_bound = math.sqrt(norm_sq[5757] / target), angle[5757] / end
    assert at_bound == (pytest.approx(1.1739, abs=1e-4), pytest.approx(0.725, abs=1e-3))


def test_five_per_cent_times_after_a_drop_by_ten_without_momentum():
    rule = SGD(0.01, 5e-3)
    assert minimum_settling_steps(rule, 10) == 11513
    closed = [steps_to_tolerance(rule, 10**0.25, quantity=q) for q in ("norm", "angle")]
    assert closed == pytest.approx([18661, 22114], abs=1.5)
    p, eps = math.sqrt(0.1 / (5e-3 * (2 - 5e-4))), 5e-5
    target, series, turn = math.sqrt(0.01 / (5e-3 * (2 - eps))), [], []
    for _ in range(34_000):
        series.append(p)
        turn.append(math.atan(0.01 / ((1 - eps) * p)))
        p = (1 - eps) ** 2 * p + 1e-4 / p
    series, turn = np.array(series), np.array(turn)
    for quantity, printed in (("norm", 18661), ("angle", 22114)):
        steps = last_outside(series, turn, target, math.acos(1 - eps), quantity)
        assert abs(steps - printed) <= 1
        assert abs(settling_steps(rule, settled(SGD(0.1, 5e-3)), quantity=quantity) - steps) <= 1
    assert math.sqrt(series[11513] / target) == pytest.approx(1.1741, abs=1e-4)


def test_the_lower_bound_is_necessary_but_leaves_the_norm_a_known_factor_above_its_target():
    for k in (2.0, 10.0, 50.0):
        steps = minimum_settling_steps(SGD(0.1, 1e-4, momentum=0.9), k)
        ratio = after_lr_drop(SGD(0.1, 1e-4, momentum=0.9), k, steps=steps).norm_ratio
        assert float(ratio) == pytest.approx((2 - 1 / k) ** 0.25, rel=2e-4)


@pytest.mark.parametrize(
    ("momentum", "eps", "ratio", "worst"),
    [
        (0.0, 1e-4, 0.1, 1.8 / 4185),
        (0.0, 1e-4, 0.5, 1.8 / 3492),
        (0.0, 1e-4, 2.0, 1.8 / 6583),
        (0.0, 1e-4, 10.0, 1.8 / 15324),
        (0.0, 1e-3, 0.1, 0.0045),
        (0.0, 1e-3, 0.5, 0.0045),
        (0.0, 1e-3, 10.0, 0.0045),
        (0.0, 1e-2, 0.1, 0.0475),
        (0.0, 1e-2, 0.5, 0.0045),
        (0.0, 1e-2, 10.0, 0.0045),
        (0.9, 2e-5, 0.1, 0.0175),
        (0.9, 2e-5, 0.5, 0.0055),
        (0.9, 2e-5, 10.0, 0.0055),
        (0.9, 1e-4, 0.1, 0.105),
        (0.9, 1e-4, 0.5, 0.0255),
        (0.9, 1e-4, 10.0, 0.0255),
    ],
)
def test_closed_form_is_as_accurate_as_stated(momentum, eps, ratio, worst):
    """The printed errors are for the norm, from a fresh optimizer."""
    rule = SGD(1.0, eps, momentum=momentum)
    target = math.sqrt(1 / (eps * (1 - momentum) * (2 - eps / (1 + momentum))))
    steps = int(12 * (1 - momentum) / (4 * eps)) + 600
    norm_sq, angle, _ = buffer_walk(rule, (ratio * target, 0.0, 0.0), steps)
    true = last_outside(norm_sq, angle, target, 1.0, "norm")
    assert steps_to_tolerance(rule, math.sqrt(ratio), quantity="norm") == pytest.approx(true, rel=worst)


def test_recursion_is_right_where_the_closed_form_is_documented_to_fail():
    rule = SGD(1.0, 5e-4, momentum=0.9)
    target = math.sqrt(1 / (5e-4 * 0.1 * (2 - 5e-4 / 1.9)))
    norm_sq, angle, _ = buffer_walk(rule, (0.1 * target, 0.0, 0.0), 2000)
    for quantity, low, high in (("norm", 1.4, 1.5), ("angle", 1.95, 2.1)):
        true = last_outside(norm_sq, angle, target, math.acos(1 - 5e-4 / 1.9), quantity)
        assert low < steps_to_tolerance(rule, math.sqrt(0.1), quantity=quantity) / true - 1 < high
        assert settling_steps(rule, cold_start(rule, math.sqrt(0.1 * target)), quantity=quantity) == true


# settling_steps against brute force ----------------------------------------------------------------------------------

BUFFER_RULES = [
    SGD(0.1, 0.01),
    SGD(0.1, 5e-3, momentum=0.9),
    SGD(0.1, 0.1, momentum=0.9),  # oscillates: the threshold is 6.6e-4
    SGD(0.2, 0.01, momentum=0.9, dampening=0.5),
    SGD(0.1, 4e-3, momentum=0.9, nesterov=True),
    SGD(0.1, 0.05, momentum=0.95, nesterov=True),  # oscillates
    SGDW(0.1, 0.01, momentum=0.9),
]


@pytest.mark.parametrize("rule", BUFFER_RULES, ids=repr)
@pytest.mark.parametrize("excess", [0.3, 0.9, 3.0])
def test_settling_of_buffer_rules_equals_brute_force(rule, excess):
    """Also with oscillation: the last step outside counts, not the first one inside."""
    _, _, state = buffer_walk(rule, (1.0, 0.0, 0.0), 30_000)
    target, end = fixed_point(lambda s: buffer_walk(rule, s, 10), state)
    start = (state[0] * excess**2, state[1], state[2] / excess**2)
    norm_sq, angle, _ = buffer_walk(rule, start, 6000)
    for quantity in QUANTITIES:
        steps = settling_steps(rule, rescaled(settled(rule), excess), quantity=quantity)
        assert abs(steps - last_outside(norm_sq, angle, target, end, quantity)) <= 1


def test_a_start_inside_the_band_can_still_leave_it():
    """A fresh optimizer at the equilibrium norm: without momentum in the buffer the norm falls 14 % first."""
    rule = SGD(1.0, 1e-6, momentum=0.999)
    target = float(settled(rule).norm_sq)
    norm_sq, angle, _ = buffer_walk(rule, (target, 0.0, 0.0), 20_000)
    true = last_outside(norm_sq, angle, target, 1.0, "norm")
    assert true == 2996
    assert settling_steps(rule, cold_start(rule, math.sqrt(target)), quantity="norm") == true


@pytest.mark.parametrize(
    "rule",
    [
        AdamW(0.01, 0.1),  # lr * wd = 1 - beta2
        AdamW(0.01, 0.1, betas=(0.9, 0.95)),
        AdamW(0.02, 0.5, betas=(0.0, 0.99)),
        AdamL2(5e-3, 0.05),
        AdamL2(1e-2, 0.02, betas=(0.8, 0.99)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("excess", [0.5, 2.0])
def test_settling_of_adam_equals_brute_force(rule, excess):
    """With the second moment in equilibrium, and left behind by a jump of the norm (a changed lr, say)."""
    unit_grad_sq, dim = 2.0, 50.0
    _, _, state = adam_walk(rule, (1.0, 0.0, 0.0, 2.0 / dim), 40_000, unit_grad_sq, dim)
    target, end = fixed_point(lambda s: adam_walk(rule, s, 10, unit_grad_sq, dim), state)
    p, q, r, v = state
    norm_sq, angle, _ = adam_walk(rule, (p * excess**2, q, r / excess**2, v / excess**2), 20_000, unit_grad_sq, dim)
    start = rescaled(settled(rule, unit_grad_sq=unit_grad_sq, dim=dim), excess)
    for quantity in QUANTITIES:
        steps = settling_steps(rule, start, quantity=quantity, unit_grad_sq=unit_grad_sq, dim=dim)
        assert abs(steps - last_outside(norm_sq, angle, target, end, quantity)) <= 1


@pytest.mark.parametrize(
    "rule", [Lion(0.01, 0.5), Lion(0.01, 0.3, betas=(0.95, 0.98)), Muon(0.02, 0.2), Muon(0.02, 0.2, momentum=0.9)]
)
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_settling_of_constant_size_updates_equals_brute_force(rule, factor):
    """From a norm ``factor`` times its equilibrium: Lion from a cold start, Muon with its memory scaled along."""
    eps = rule.lr * rule.weight_decay
    kept = 1 - eps
    total = 1 + 2 * float(correlations(rule) @ kept ** np.arange(1, LAGS))
    target = rule.lr**2 * total / (eps * (2 - eps))
    if isinstance(rule, Lion):
        start = cold_start(rule, factor * math.sqrt(target))
        norm_sq, angle = lion_walk(rule, target * factor**2, 6000)
    else:
        start = rescaled(settled(rule, dim=1.0), factor)
        norm_sq, angle = memory_walk(rule, target * factor**2, 6000, rule.lr * factor)
    assert float(start.norm_sq) == pytest.approx(target * factor**2, rel=1e-7)
    for quantity in QUANTITIES:
        true = last_outside(norm_sq, angle, target, float(angle[-1]), quantity)
        assert abs(settling_steps(rule, start, quantity=quantity) - true) <= 1


def lion_walk(rule, norm_sq, steps):
    """Norm and angle from a cold start by the slow recursion of random_walk, one entry per weight."""
    lr, eps = rule.lr, rule.lr * rule.weight_decay
    settings_ = (np.full(steps, lr), np.full(steps, rule.weight_decay))
    path = random_walk.expected_lion_path(norm_sq, 1.0, rule.betas, *settings_)
    before, after = path[:-1], path[1:]
    overlap = ((1 - eps) ** 2 * before + lr**2 - after) / (2 * (1 - eps) * lr)
    cosine = ((1 - eps) * before - lr * overlap) / np.sqrt(before * after)
    return before, np.arccos(cosine)


@settings(max_examples=15)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    eps=st.floats(1e-4, 5e-2),
    excess=st.floats(0.2, 4),
    tolerance=st.floats(0.01, 0.3),
    scale=st.floats(0.1, 10),
)
def test_settling_does_not_depend_on_the_scale(momentum, eps, excess, tolerance, scale):
    """L, and the split of lr * wd, only set the unit of the norm; and the answer is minimal and sufficient."""
    small = SGD(1.0, eps, momentum=momentum)
    large = SGD(scale, eps / scale, momentum=momentum)
    base = settling_steps(small, rescaled(settled(small), excess), tolerance=tolerance)
    start = rescaled(settled(large, unit_grad_sq=7.0), excess)
    assert abs(settling_steps(large, start, tolerance=tolerance, unit_grad_sq=7.0) - base) <= 1
    state = rescaled(settled(small), excess)
    walk = buffer_walk(small, (float(state.norm_sq), float(state.radial), float(state.buffer_sq)), base + 50)
    off = np.abs(walk[1] / math.acos(1 - eps / (1 + momentum)) - 1) > tolerance
    assert not off[base + 1 :].any() and (base <= 1 or off[base - 2 : base + 1].any())


# Long ways -----------------------------------------------------------------------------------------------------------


def by_recursion(rule, start, monkeypatch, **how):
    for limit in ("_LONGEST_RECURSION", "_LAST_RESORT"):
        monkeypatch.setattr(settling, limit, 10**9)
    steps = settling_steps(rule, start, **how)
    monkeypatch.undo()
    return steps


LONG_WAYS = [
    SGD(1.0, 1e-5),
    SGD(0.1, 6e-5, momentum=0.9),
    SGD(0.1, 6e-5, momentum=0.9, nesterov=True),
    SGD(0.1, 1.2e-4, momentum=0.9, dampening=0.5),
    SGDW(0.1, 3e-4, momentum=0.9),
    SGD(1.0, 5e-7, momentum=0.99),
    SGD(1.0, 1e-8, momentum=0.999),
    AdamW(1.0, 3e-5),
    AdamW(1.0, 4e-5, betas=(0.9, 0.95)),
    AdamW(1.0, 2e-5, betas=(0.9, 0.9997)),
    AdamL2(1.0, 3e-7),
    Lion(1.0, 3e-4),
    Muon(1.0, 4e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", LONG_WAYS, ids=repr)
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_strides_agree_with_the_recursion(rule, factor, monkeypatch):
    """To 0.1 %, from far above and from so far below that the first steps kick the norm up."""
    star = math.sqrt(float(settled(rule).norm_sq))
    for start in (cold_start(rule, factor * star), rescaled(settled(rule), factor)):
        for quantity in ("angle", "norm"):
            true = by_recursion(rule, start, monkeypatch, quantity=quantity)
            assert settling_steps(rule, start, quantity=quantity) == pytest.approx(true, rel=1e-3, abs=1)


@pytest.mark.parametrize(("factor", "true"), [(1e-3, 341_010), (1.5e-3, 257_834), (2e-3, 194_205), (3e-3, 39_522)])
def test_a_kick_of_the_first_steps_counts(factor, true):
    """True values: the recursion of `random_walk`, iterated (checked here for the shortest)."""
    rule = SGD(0.001, 5e-4, momentum=0.9)
    norm = factor * math.sqrt(float(settled(rule).norm_sq))
    if true < 50_000:
        norm_sq, angle, _ = buffer_walk(rule, (norm**2, 0.0, 0.0), 60_000)
        assert last_outside(norm_sq, angle, 1.0, math.acos(1 - 5e-7 / 1.9), "angle") == true
    assert settling_steps(rule, cold_start(rule, norm)) == pytest.approx(true, rel=1e-4)


def test_adam_with_l2_beyond_the_recursion():
    """Its norm obeys dP/dt = -2 lr wd sqrt(d/L) P^(3/2) + lr^2 d: no power of it relaxes linearly. By brute force."""
    old, rule, dim = AdamL2(1e-3, 1e-3), AdamL2(1e-4, 1e-3), 1000.0
    start = settled(old, dim=dim)
    state = tuple(float(x) for x in (start.norm_sq, start.radial, start.buffer_sq, start.second))
    norm_sq, angle, _ = adam_walk(rule, state, 400_000, dim=dim)
    target = rule.equilibrium(unit_grad_sq=1.0, dim=dim)
    true = last_outside(norm_sq, angle, target.norm**2, target.angle, "angle")
    assert settling_steps(rule, start, dim=dim) == pytest.approx(true, rel=1e-3)
    assert steps_to_tolerance(rule, math.sqrt(state[0]) / target.norm, unit_grad_sq=1.0, dim=dim) > 1.15 * true


@pytest.mark.parametrize("scale", [1e-4, 1e-6])
@pytest.mark.parametrize("excess", [0.3, 3.0])
def test_very_long_ways_are_those_of_the_differential_equations(scale, excess):
    """In the limit of small lr * wd: ||w||^4 relaxes linearly (SGD), ||w||^2 (AdamW), P^(3/2) drives (Adam with L2)."""
    for rule, memory in ((SGD(1.0, 1e-3 * scale, momentum=0.9), 10), (AdamW(1.0, scale, betas=(0.9, 0.99)), 100)):
        closed = steps_to_tolerance(rule, excess)
        accuracy = 1e-3 + 2 * memory / rule.equilibrium().time_constant  # as promised, and what the equation leaves out
        assert settling_steps(rule, rescaled(settled(rule), excess)) == pytest.approx(closed, rel=accuracy)
    rule = AdamL2(1.0, 1e-3 * scale, betas=(0.9, 0.99))
    share = rule.decay_share(unit_grad_sq=1.0, dim=1.0)
    edge = (1 + 0.05) ** -2 if excess < 1 else (1 - 0.05) ** -2  # the angle is proportional to P^(-1/2)
    time, _ = quad(lambda x: 1 / (2 * share * (1 - x**1.5)), excess**2, edge)
    steps = settling_steps(rule, rescaled(settled(rule), excess))
    assert steps == pytest.approx(time, rel=1e-3 + 2 * 100 * 3 * share)


def test_the_norm_may_leave_the_band_late():
    """A fresh optimizer at the equilibrium norm dips only when its time constant is over: too short to wait."""
    rule = SGD(1.0, 1.1 * oscillation_threshold(0.999), momentum=0.999)
    target = float(settled(rule).norm_sq)
    norm_sq, angle, _ = buffer_walk(rule, (target, 0.0, 0.0), 20_000)
    deviation = np.abs(np.sqrt(norm_sq / target) - 1)
    tolerance = 0.99 * deviation.max()
    assert int(np.argmax(deviation > tolerance)) > rule.equilibrium().time_constant + 200
    true = last_outside(norm_sq, angle, target, 1.0, "norm", tolerance)
    steps = settling_steps(rule, cold_start(rule, math.sqrt(target)), quantity="norm", tolerance=tolerance)
    assert abs(steps - true) <= 1


@pytest.mark.parametrize("rule", [AdamW(1.0, 8e-5), AdamW(1.0, 8e-5, betas=(0.9, 0.9999)), AdamL2(1.0, 4.8e-7)])
def test_the_closed_form_of_adam_is_off_and_not_used(rule, monkeypatch):
    """The second moment lags (AdamW), no power of the norm relaxes linearly (Adam with L2): 14 to 45 % off."""
    start = rescaled(settled(rule), math.sqrt(10))
    closed = steps_to_tolerance(rule, math.sqrt(10), unit_grad_sq=1.0, dim=1.0)
    assert closed > 30_000
    true = by_recursion(rule, start, monkeypatch)
    assert closed / true > 1.1
    assert settling_steps(rule, start) == pytest.approx(true, rel=1e-3)


def test_closed_form_of_adamw_with_a_short_second_moment(monkeypatch):
    rule = AdamW(1.0, 6.9e-5, betas=(0.9, 0.95))
    start = rescaled(settled(rule), math.sqrt(10))
    true = by_recursion(rule, start, monkeypatch)
    assert true > 30_000
    assert steps_to_tolerance(rule, math.sqrt(10)) == pytest.approx(true, rel=0.002)


@pytest.mark.parametrize("ratio", [1e-300, 1e-100, 1e100, 1e300])
def test_closed_form_of_ratios_whose_powers_leave_float64(ratio):
    """ln(r^4 - 1) is 4 ln r from far above and 0 from far below."""
    rule = SGD(0.1, 5e-4)
    edge = math.log(0.95**-2 - 1) if ratio > 1 else math.log(1 - 1.05**-2)
    expected = (4 * max(math.log(ratio), 0) - edge) / 2e-4
    assert steps_to_tolerance(rule, ratio) == pytest.approx(expected, rel=1e-9)
    there = float(relaxation(rule).ratio(ratio, expected))
    assert there == pytest.approx((1 + math.copysign(math.exp(edge), ratio - 1)) ** 0.25, rel=1e-6)


def test_settings_that_never_settle_raise(monkeypatch):
    monkeypatch.setattr(settling, "_LAST_RESORT", 50_000)  # instead of 3 million steps: to be fast
    rule = SGD(1.0, 2 - 1e-9)
    with pytest.raises(EquilibriaError, match=r"not settled after .*; expected an lr\*weight_decay further"):
        settling_steps(rule, rescaled(settled(rule), 1.2), quantity="norm")


# Closed-form laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.1, 2.0, 10.0])
@pytest.mark.parametrize(
    ("make", "power", "worst"),
    [
        (lambda lr: SGD(lr, 5e-4, momentum=0.9), 4, 1e-3),
        (lambda lr: SGD(lr, 5e-4, momentum=0.9, nesterov=True), 4, 1e-3),
        (lambda lr: SGDW(lr, 5e-4, momentum=0.9), 4, 1e-3),
        (lambda lr: AdamW(lr, 5e-4, betas=(0.9, 0.95)), 2, 2e-3),
        (lambda lr: Lion(lr, 5e-4), 2, 7e-3),  # its memory, hence its norm, depends a little on lr * wd
        (lambda lr: Muon(lr, 5e-4), 2, 2e-3),
    ],
    ids=["heavy ball", "nesterov", "sgdw", "adamw", "lion", "muon"],
)
def test_after_lr_drop_follows_the_recursion(make, power, worst, k):
    new = make(0.02)
    path = evolve(new, 120_000, start=settled(make(0.02 * k)))
    at = np.array([2000, 20_000, 60_000, 119_999])
    result = after_lr_drop(new, k, steps=at)
    norm_end, angle_end = math.sqrt(settled(new, unit_grad_sq=1.0, dim=1.0).norm_sq), new.equilibrium().angle
    np.testing.assert_allclose(result.norm_ratio, path.norm[at] / norm_end, rtol=worst)
    np.testing.assert_allclose(result.angle_ratio, path.angle[at] / angle_end, rtol=2 * worst)
    start = after_lr_drop(new, k, steps=0)
    assert float(start.angle_ratio) == pytest.approx(k**-0.5)
    assert float(start.norm_ratio) == pytest.approx(k ** (1 / power))


def test_relaxation_is_the_fourth_power_law_of_the_diffusion():
    """gamma' = (1 - 4 eps/(1-a)) gamma + 2 L lr^2/(1-a)^2, iterated."""
    lr, wd, a, unit_grad_sq = 0.05, 1e-3, 0.9, 3.0
    gamma, rate = 1e4, 4 * lr * wd / (1 - a)
    end = unit_grad_sq * lr / (2 * wd * (1 - a))
    for _ in range(500):
        gamma = (1 - rate) * gamma + 2 * unit_grad_sq * lr**2 / (1 - a) ** 2
    how = relaxation(SGD(lr, wd, momentum=a))
    assert how.power == 4 and how.rate == pytest.approx(rate)
    assert float(how.ratio((1e4 / end) ** 0.25, 500)) == pytest.approx((gamma / end) ** 0.25, rel=5e-4)
    assert relaxation(SGDW(lr, wd, momentum=a)).rate == pytest.approx(4 * lr * wd)


@given(start=st.floats(0.1, 10), steps=st.floats(0, 1e5), more=st.floats(0, 1e5), power=st.sampled_from([2, 4]))
def test_relaxation_composes_and_the_angle_is_its_power(start, steps, more, power):
    how = Relaxation(power, 1e-4)
    there = how.ratio(start, steps)
    assert float(how.ratio(there, more)) == pytest.approx(float(how.ratio(start, steps + more)), rel=1e-9)
    assert float(how.angle_ratio(start, steps)) == pytest.approx(float(there) ** (-power / 2))


@given(start=st.floats(0.05, 20), tolerance=st.floats(1e-3, 0.5), quantity=st.sampled_from(QUANTITIES))
def test_closed_form_time_is_where_the_closed_form_enters_the_band(start, tolerance, quantity):
    for rule in (SGD(0.1, 1e-3, momentum=0.9), Lion(0.01, 0.1)):
        how = relaxation(rule)
        t = steps_to_tolerance(rule, start, tolerance=tolerance, quantity=quantity)
        value = float(how.angle_ratio(start, t) if quantity == "angle" else how.ratio(start, t))
        value = value**2 if quantity == "norm_sq" else value
        if t == 0:
            assert abs(value - 1) <= tolerance * (1 + 1e-9)
        else:
            assert abs(value - 1) == pytest.approx(tolerance, rel=1e-6)


@pytest.mark.parametrize(
    ("momentum", "printed"), [(0.0, 0.00126), (0.9, 0.00013)], ids=["sgd (law .00125)", "heavy ball (law .000125)"]
)
def test_tracking_lag_follows_a_drifting_gradient(momentum, printed):
    """L = 10 + sin(t / 1e5), lr .1, wd .001: the largest deviation, and the law at every step of the second half."""
    rule = SGD(0.1, 1e-3, momentum=momentum)
    p, q, r = float(settled(rule, unit_grad_sq=10.0).norm_sq), 0.0, 0.0
    if momentum:
        p, q, r = buffer_walk(rule, (p, q, r), 5000, unit_grad_sq=10.0)[2]
    deviation, law = [], []
    for t in range(320_000):
        unit_grad_sq = 10 + math.sin(t / 1e5)
        p, q, r, _, _ = random_walk.expected_sgd_step(p, q, r, 0.1, 1e-3, momentum, unit_grad_sq)
        if t >= 60_000 and t % 2000 == 0:
            target = math.sqrt(unit_grad_sq * 0.1 / (1e-3 * (1 - momentum) * (2 - 1e-4 / (1 + momentum))))
            deviation.append(p / target - 1)
            law.append(tracking_lag(rule, math.cos(t / 1e5) * 1e-5 / unit_grad_sq))
    largest = np.max(np.abs(deviation))
    assert largest == pytest.approx(printed, rel=0.05)
    np.testing.assert_allclose(deviation, law, atol=0.05 * largest)
    # At its steepest the sine moves 1e-6 of L per step.
    assert tracking_lag(rule, 1e-6) == pytest.approx(-0.00125 * (1 - momentum))


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: steps_to_tolerance(SGD(0.1, 0.0), 2.0),
        lambda: steps_to_tolerance(SGDW(0.1, 0.0), 2.0),
        lambda: steps_to_tolerance(SGD(0.0, 0.1), 2.0),
        lambda: steps_to_tolerance(SGD(0.1, 1e-3), -1.0),
        lambda: steps_to_tolerance(SGD(0.1, 1e-3), math.nan),
        lambda: steps_to_tolerance(SGD(0.1, 1e-3), 2.0, tolerance=0.0),
        lambda: steps_to_tolerance(SGD(0.1, 1e-3), 2.0, tolerance=1.0),
        lambda: steps_to_tolerance(SGD(0.1, 1e-3), 2.0, quantity="size"),
        lambda: steps_to_tolerance(AdamL2(0.1, 1e-3), 2.0),
        lambda: settling_steps(SGD(0.1, 1e-3), settled(SGD(0.1, 1e-3)), quantity="size"),
        lambda: settling_steps(SGD(0.1, 0.0), cold_start(SGD(0.1, 1e-3), 1.0)),
        lambda: settling_steps(None, cold_start(SGD(0.1, 1e-3), 1.0)),
        lambda: relaxation(None),
        lambda: minimum_settling_steps(AdamW(0.1, 1e-3), 10),
        lambda: minimum_settling_steps(SGD(0.1, 1e-3), 0.5),
        lambda: minimum_settling_steps(SGD(0.1, 0.0), 2.0),
        lambda: after_lr_drop(AdamL2(0.1, 1e-3), 10, steps=1),
        lambda: after_lr_drop(SGD(0.1, 1e-3), -1, steps=1),
        lambda: tracking_lag(SGD(0.1, 1e-3), math.nan),
        lambda: tracking_lag(AdamW(0.1, 1e-3), 1e-6),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, 2e-4, momentum=0.9),
        SGD(0.1, 2e-4, momentum=0.8, dampening=0.5),
        SGDW(0.1, 2e-4, momentum=0.9),
        AdamW(1e-3, 0.2),
        Lion(1e-4, 2.0),
        Muon(0.02, 0.01, shape=(4, 3)),
    ],
    ids=repr,
)
def test_the_mean_age_of_updates_in_the_weights_is_that_of_the_optimizer(rule):
    """The optimizer without gradients multiplies a weight by q per step: an update n steps ago counts q^n."""
    torch = pytest.importorskip("torch")
    from equilibria import control

    given = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.name != "shape"}
    kind = getattr(control if isinstance(rule, SGDW | Lion) else torch.optim, type(rule).__name__)
    weight = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer, norms = kind([weight], **given), []
    for _ in range(400):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        norms.append(weight.norm().item())
    age = 1 / (1 - norms[-1] / norms[-2])
    found = decay_timescale(rule, batch_size=32, data_size=1000)
    assert found.steps == pytest.approx(age, rel=3e-3)  # of heavy ball: a lr wd / (1-a)^2, 0.18 %
    assert (found.samples, found.epochs) == pytest.approx((32 * found.steps, 0.032 * found.steps))
