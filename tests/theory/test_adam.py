"""Adam: its recursions against the written-out one, published numbers and torch; its time to settle by `evolve`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.random_walk import expected_adam_step, walk

from equilibria.errors import EquilibriaError
from equilibria.theory import AdamL2, AdamW, cold_start, evolve, settled
from equilibria.theory.adam import adam_settling_steps, adamw_mean_field
from equilibria.theory.moments import adam_step

positive = st.floats(0.1, 10)


@given(
    p=positive,
    q=st.floats(-0.5, 0.5),
    r=positive,
    v=positive,
    lr=st.floats(1e-4, 0.1),
    wd=st.floats(0, 0.5),
    b1=st.floats(0, 0.99),
    b2=st.floats(0, 0.999),
    unit_grad_sq=positive,
    dim=st.integers(1, 1000),
    step=st.one_of(st.none(), st.integers(1, 50)),
    decoupled=st.booleans(),
)
def test_step_is_the_recursion_written_out(p, q, r, v, lr, wd, b1, b2, unit_grad_sq, dim, step, decoupled):
    expected = expected_adam_step(p, q, r, v, lr, wd, (b1, b2), unit_grad_sq, dim, decoupled=decoupled, step=step)
    step_size = lr if step is None else lr * math.sqrt(1 - b2**step) / (1 - b1**step)
    lost, coupled = (lr * wd, 0.0) if decoupled else (0.0, wd)
    ours = adam_step(p, q, r, v, unit_grad_sq, (1 - b2) / dim, step_size, lost, coupled, b1, b2)
    scale = max(map(abs, expected))
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12 * scale)


def test_step_is_the_expected_step_of_torch_with_equal_second_moments():
    """Average over all tangent directions from one state; v is equal in all entries, and beta2 = 1 keeps it so."""
    dim, lr, wd, b1, b2 = 12, 0.03, 0.2, 0.9, 1 - 1e-9
    rng = np.random.default_rng(4)
    w, m = rng.normal(size=(2, dim))
    grad_sq, second, t = 2.0, 0.7, 5
    basis = np.linalg.svd(w[None, :])[2][1:] * math.sqrt(grad_sq)
    for build, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        rows = []
        for g in np.concatenate([basis, -basis]):
            x = torch.nn.Parameter(torch.tensor(w))
            optimizer = build([x], lr=lr, weight_decay=wd, betas=(b1, b2), eps=0.0)
            state = {"exp_avg": torch.tensor(m), "exp_avg_sq": torch.full((dim,), second, dtype=torch.float64)}
            optimizer.state[x] = {"step": torch.tensor(float(t - 1), dtype=torch.float64), **state}
            x.grad = torch.tensor(g)
            optimizer.step()
            after, m1 = x.detach().numpy(), optimizer.state[x]["exp_avg"].numpy()
            rows.append([after @ after, after @ m1, m1 @ m1, second, (after - w) @ (after - w)])
        lost, coupled = (lr * wd, 0.0) if decoupled else (0.0, wd)
        step_size = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        start = (w @ w, w @ m, m @ m, second)
        ours = adam_step(*start, grad_sq * (w @ w), (1 - b2) / dim, step_size, lost, coupled, b1, b2)
        # beta2 is 1 up to 1e-9, and so is the agreement.
        np.testing.assert_allclose(ours, np.mean(rows, axis=0), rtol=1e-6)


def test_mean_field_as_published():
    """||w||^2 / P* from twice P* at steps 500, 1000, 1500, 3000 (within one step); eps = 5e-4, beta2 = 0.999."""
    star = 0.01 * 400 / (2 * 0.05)
    path = adamw_mean_field(0.01, 0.05, steps=3000, dim=400, norm_sq=2 * star)
    np.testing.assert_allclose(path[[500, 1000, 1500, 3000]] / star, [1.627, 1.424, 1.306, 1.142], atol=1e-3)
    # Without the lag it would relax as 1 + exp(-2 eps t): 1.606, 1.368, 1.223, 1.050.
    naive = 1 + np.exp(-2 * 5e-4 * np.array([500, 1000, 1500, 3000]))
    np.testing.assert_allclose(naive, [1.606, 1.368, 1.223, 1.050], atol=6e-4)


def test_mean_field_is_the_four_variable_recursion_without_first_moment():
    lrs = 0.01 * (1 + np.cos(np.arange(500) / 80) ** 2)
    rule = AdamW(0.01, 0.2, betas=(0.0, 0.99))
    path = evolve(rule, 500, start=cold_start(rule, 3.0), dim=50, lr=lrs)
    ours = adamw_mean_field(lrs, 0.2, steps=500, dim=50, norm_sq=9.0, beta2=0.99)
    np.testing.assert_allclose(ours, path.norm_sq, rtol=1e-11)


def test_angle_off_equilibrium():
    """angle* sqrt(P*/P_t) sqrt(1 / (P_t v_t)), v in units of L / d: the second factor is worth 5 % here."""
    rule, dim, steps = AdamW(0.01, 0.05), 400, 1500
    star = rule.equilibrium(dim=dim)
    start = 2 * star.norm**2
    run = walk(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05), steps, norm=math.sqrt(start), dim=dim)
    path = evolve(rule, steps, start=cold_start(rule, math.sqrt(start)), dim=dim)
    p, v, second = adamw_mean_field(0.01, 0.05, steps=steps, dim=dim, norm_sq=start), 0.0, []
    for t in range(steps):
        v = 0.999 * v + 0.001 / p[t]
        second.append(v / (1 - 0.999 ** (t + 1)))
    law = star.angle * np.sqrt(star.norm**2 / p[:-1]) / np.sqrt(p[:-1] * second)
    rms = np.sqrt(np.mean(run.angle**2, axis=1))
    for low in (200, 700, 1300):
        window = slice(low, low + 200)
        measured = math.sqrt(np.mean(rms[window] ** 2))
        assert math.sqrt(np.mean(law[window] ** 2)) == pytest.approx(measured, rel=0.02)
        assert math.sqrt(np.mean(path.angle[window] ** 2)) == pytest.approx(measured, rel=0.01)
    plain = star.angle * np.sqrt(star.norm**2 / p[:-1])
    assert max(abs(plain[300:] / law[300:] - 1)) > 0.05


def test_it_settles_at_the_law():
    for eps in (1e-3, 0.01):
        end = adamw_mean_field(0.01, eps / 0.01, steps=20_000, dim=400, norm_sq=20.0, beta2=0.99)[-1]
        # (1-eps)^2 P + lr^2 d = P
        assert end == pytest.approx(1e-4 * 400 / (1 - (1 - eps) ** 2), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dim", 0),
        ("dim", 2.5),
        ("norm_sq", 0.0),
        ("norm_sq", math.nan),
        ("beta2", 1.0),
        ("beta2", -0.1),
        ("steps", -1),
        ("steps", "many"),
        ("weight_decay", -1.0),
        ("weight_decay", "0.1"),
        ("lr", -0.1),
        ("lr", math.inf),
    ],
)
def test_bad_input_raises(name, bad):
    good = {"lr": 0.01, "weight_decay": 0.1, "steps": 3, "dim": 10, "norm_sq": 1.0, "beta2": 0.9}
    with pytest.raises(EquilibriaError, match="expected"):
        adamw_mean_field(**{**good, name: bad})


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


SETTLING_RULES = [
    AdamW(1e-2, 0.1, betas=(0.9, 0.99)),
    AdamW(1e-2, 0.1),  # the second moment remembers for longer than the norm needs
    AdamW(1e-3, 0.1),  # about as long
    AdamW(3e-3, 0.5),
    AdamW(3e-3, 0.05, betas=(0.9, 0.95)),
    AdamL2(1e-3, 0.1),
    AdamL2(3e-3, 0.5),
    AdamL2(1e-3, 0.01),
]


@pytest.mark.parametrize("rule", SETTLING_RULES, ids=str)
@pytest.mark.parametrize("factor", [10, 3, 1.3, 0.3, 0.1])
def test_settling_after_a_change_of_lr_matches_the_recursion(rule, factor):
    start = settled(dataclasses.replace(rule, lr=rule.lr * factor), unit_grad_sq=L, dim=DIM)
    norm, second, norm_sq = ratios(rule, start)
    steps = adam_settling_steps(rule, norm, second_ratio=second, norm_sq=norm_sq, unit_grad_sq=L, dim=DIM)
    truth = by_recursion(rule, start, longest=60_000 if isinstance(rule, AdamL2) else 90_000)
    assert abs(float(steps) - truth) <= STRIDES * truth + FEW_MEMORIES


@pytest.mark.parametrize("rule", [SETTLING_RULES[1], SETTLING_RULES[2], SETTLING_RULES[7]], ids=str)
@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_after_a_rescaling_of_the_weights_alone_it_is_the_recursions(rule, factor):
    goal = settled(rule, unit_grad_sq=L, dim=DIM)
    start = dataclasses.replace(goal, norm_sq=goal.norm_sq * factor**2)
    norm, second, norm_sq = ratios(rule, start)
    steps = adam_settling_steps(rule, norm, second_ratio=second, norm_sq=norm_sq, unit_grad_sq=L, dim=DIM)
    truth = by_recursion(rule, start, longest=60_000)
    assert abs(float(steps) - truth) <= STRIDES * truth + FEW_MEMORIES


@given(st.floats(1e-8, 1e8), st.floats(0.2, 5), st.floats(0.1, 10))
def test_units_make_no_difference(scale, norm, second):
    """With weights ``scale`` times as large, L goes with nothing, lr with the scale and the decay with its inverse."""
    rule, goal = AdamL2(1e-3, 0.1), settled(AdamL2(1e-3, 0.1), unit_grad_sq=L, dim=DIM).norm_sq
    other = AdamL2(1e-3 * scale, 0.1 / scale**2)
    steps = [
        float(adam_settling_steps(variant, norm, second_ratio=second, norm_sq=size, unit_grad_sq=L, dim=DIM))
        for variant, size in ((rule, goal), (other, goal * scale**2))
    ]
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)


def test_many_weights_are_those_one_by_one_and_nonsense_is_nan():
    rule, norm = AdamW(1e-2, 0.1), np.array([0.2, 1.0, 4.0, math.nan, 0.0, math.inf])
    together = adam_settling_steps(rule, norm, second_ratio=1.0, norm_sq=1.0)
    alone = [float(adam_settling_steps(rule, ratio, second_ratio=1.0, norm_sq=1.0)) for ratio in norm]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert np.isnan(together[3:]).all() and together[1] == 0


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_however_far_away_it_is_a_number_of_steps_or_none(norm, second):
    rule = AdamW(1e-2, 0.1)
    steps = float(adam_settling_steps(rule, 10**norm, second_ratio=10**second, norm_sq=1.0))
    assert math.isnan(steps) or 0 <= steps < 1e6
    if abs(norm) < 1 and abs(second) < 1.5:
        assert math.isfinite(steps)
