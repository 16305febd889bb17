"""Trajectories against slow recursions, exact double sums and torch's own optimizers under wild schedules."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import random_walk
from tests.helpers.random_walk import expected_adam_step, expected_sgd_step, expected_sgdw_step, walk

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, cold_start, evolve, rescaled, settled, transient
from equilibria.theory.approach import oscillation_threshold

RULES = [
    SGD(0.1, 0.01),
    SGD(0.1, 0.01, momentum=0.9),
    SGD(0.1, 0.02, momentum=0.8, dampening=0.5),
    SGD(0.1, 0.01, momentum=0.9, nesterov=True),
    SGDW(0.1, 0.05, momentum=0.9),
    AdamW(0.01, 0.3),
    AdamL2(0.01, 0.05, betas=(0.9, 0.99)),
    Lion(0.01, 0.3),
    Muon(0.01, 0.3),
]


def wild(steps, peak):
    """A cosine with a step in the middle: every step has its own value, and one of them jumps."""
    t = np.arange(steps)
    return peak * (0.05 + 0.95 * (1 + np.cos(np.pi * t / steps)) / 2) * np.where(t >= steps // 2, 0.3, 1.0)


def angles_of(norm_sq, moved):
    """Angles by the law of cosines; relative error 1e-10 where they exceed 1e-3."""
    p, after = norm_sq[:-1], norm_sq[1:]
    return np.arccos((p + after - moved) / (2 * np.sqrt(p * after)))


def reference(rule, p, steps, *, lrs, wds, moms, unit_grad_sq, dim=1.0):
    """One layer from a cold start, by recursions written out separately."""
    norm_sq, moved_sq, q, r, v = [p], [], 0.0, 0.0, 0.0
    for t in range(steps):
        common = (lrs[t], wds[t])
        if isinstance(rule, SGD):
            damp = rule.dampening if r > 0 and moms[t] > 0 else 0.0  # torch's first buffer is the gradient itself
            options = {"dampening": damp, "nesterov": rule.nesterov}
            p, q, r, moved, _ = expected_sgd_step(p, q, r, *common, moms[t], unit_grad_sq[t], **options)
        elif isinstance(rule, SGDW):
            p, q, r, moved, _ = expected_sgdw_step(p, q, r, *common, moms[t], unit_grad_sq[t])
        else:
            options = {"decoupled": isinstance(rule, AdamW), "step": t + 1}
            p, q, r, v, moved = expected_adam_step(p, q, r, v, *common, rule.betas, unit_grad_sq[t], dim, **options)
        if isinstance(rule, SGD | SGDW) and moms[t] == 0:
            q = r = 0.0  # torch has no buffer then
        norm_sq.append(p)
        moved_sq.append(moved)
    return np.array(norm_sq), np.array(moved_sq)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Lion | Muon)], ids=repr)
def test_any_schedule_follows_the_recursion_written_out(rule):
    steps, dim = 300, 50.0
    rng = np.random.default_rng(2)
    lrs, wds = wild(steps, rule.lr), rule.weight_decay * (1 + np.sin(np.arange(steps) / 20) / 2)
    unit_grad_sq = rng.uniform(0.5, 1.5, steps)
    moms = np.full(steps, getattr(rule, "momentum", 0.0))
    schedules = {"lr": lrs, "weight_decay": wds}
    if isinstance(rule, SGD | SGDW) and rule.momentum > 0:
        moms = np.linspace(0.5, 0.95, steps)
        schedules["momentum"] = moms
    norm_sq, moved = reference(rule, 2.0, steps, lrs=lrs, wds=wds, moms=moms, unit_grad_sq=unit_grad_sq, dim=dim)
    one = evolve(
        rule,
        steps,
        start=cold_start(rule, np.array([math.sqrt(2)])),
        unit_grad_sq=unit_grad_sq[:, None],
        dim=dim,
        **schedules,
    )
    np.testing.assert_allclose(one.norm_sq[:, 0], norm_sq, rtol=1e-11)
    np.testing.assert_allclose(one.moved_sq[:, 0], moved, rtol=1e-9)
    np.testing.assert_allclose(one.angle[:, 0], angles_of(norm_sq, moved), rtol=1e-7)
    np.testing.assert_allclose(one.relative_update[:, 0], np.sqrt(moved / norm_sq[:-1]), rtol=1e-9)
    np.testing.assert_array_equal(one.lr, lrs)
    np.testing.assert_array_equal(one.weight_decay, wds)


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, SGD | SGDW)], ids=repr)
def test_steps_without_momentum_leave_no_buffer(rule):
    """Momentum that comes and goes, for one layer and for two, in one piece and cut where there is no buffer."""
    moms = np.array([0.0] * 5 + [0.9] * 6 + [0.0] + [0.7, 0.8] * 4 + [0.0, 0.5, 0.0])
    steps = len(moms)
    constant = {"lrs": np.full(steps, rule.lr), "wds": np.full(steps, rule.weight_decay), "moms": moms}
    norm_sq, moved = reference(rule, 0.5, steps, unit_grad_sq=np.full(steps, 3.0), **constant)
    for norm in (math.sqrt(0.5), [math.sqrt(0.5), 2.0]):
        path = evolve(rule, steps, start=cold_start(rule, norm), unit_grad_sq=3.0, momentum=moms)
        np.testing.assert_allclose(path.norm_sq.reshape(steps + 1, -1)[:, 0], norm_sq, rtol=1e-12)
        np.testing.assert_allclose(path.moved_sq.reshape(steps, -1)[:, 0], moved, rtol=1e-12)
        assert not path.final.radial.any() and not path.final.buffer_sq.any()
        for cut in (5, 12):
            first = evolve(rule, cut, start=cold_start(rule, norm), unit_grad_sq=3.0, momentum=moms)
            second = evolve(rule, steps - cut, start=first.final, unit_grad_sq=3.0, momentum=moms, first_step=cut)
            np.testing.assert_array_equal(second.norm_sq, path.norm_sq[cut:])


@pytest.mark.parametrize("rho", [0.4, -0.2])
def test_nesterov_with_correlated_gradients_follows_the_recursion_written_out(rho):
    """L is Nesterov's own, N + 2 a^2 (1+a)/D C: it fixes N = ||g||^2 ||w||^2 and C = rho N."""
    rule, steps = SGD(0.1, 0.05, momentum=0.9, nesterov=True), 200
    a, lrs = 0.9, wild(steps, 0.1)
    p, q, r, norm_sq, moved_sq = 2.0, 0.0, 0.0, [2.0], []
    for lr in lrs:
        n = 3.0 / (1 + 2 * a**2 * (1 + a) / (1 + a + a * lr * 0.05 * (1 + 2 * a)) * rho)
        p, q, r, moved, _ = expected_sgd_step(p, q, r, lr, 0.05, a, n, nesterov=True, cross=rho * n)
        norm_sq.append(p)
        moved_sq.append(moved)
    path = evolve(rule, steps, start=cold_start(rule, math.sqrt(2)), unit_grad_sq=3.0, lr=lrs, correlation=rho)
    np.testing.assert_allclose(path.norm_sq, norm_sq, rtol=1e-11)
    np.testing.assert_allclose(path.moved_sq, moved_sq, rtol=1e-10)
    many = evolve(rule, steps, start=cold_start(rule, [math.sqrt(2)]), unit_grad_sq=3.0, lr=lrs, correlation=rho)
    np.testing.assert_allclose(many.norm_sq[:, 0], norm_sq, rtol=1e-11)


@pytest.mark.parametrize("rule", [Muon(0.02, 0.5), Muon(0.02, 0.5, nesterov=False)])
def test_muon_against_the_exact_double_sum(rule):
    """w_t is a weighted sum of the first weight and all past updates: E||w_t||^2 is a double sum of correlations."""
    steps, size, first = 150, 7.0, 3.0
    lrs, wds = wild(steps, rule.lr), np.linspace(0.2, 1.0, steps)
    correlation = np.array([rule.memory.correlation(k) for k in range(steps + 1)])
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    norm_sq, moved = [first], []
    own, weights = 1.0, np.zeros(steps)  # w_t = own w_0 - sum_j weights_j u_j
    for t in range(steps):
        eps = lrs[t] * wds[t]
        overlap = -size * float(weights[:t] @ correlation[t - np.arange(t)]) if t else 0.0  # E<w_t, u_t>
        moved.append(eps**2 * norm_sq[-1] + lrs[t] ** 2 * size + 2 * eps * lrs[t] * overlap)
        own *= 1 - eps
        weights *= 1 - eps
        weights[t] = lrs[t]
        norm_sq.append(own**2 * first + size * float(weights @ correlation[lag] @ weights))
    path = evolve(rule, steps, start=cold_start(rule, math.sqrt(first)), dim=size, lr=lrs, weight_decay=wds)
    np.testing.assert_allclose(path.norm_sq, norm_sq, rtol=1e-11)
    np.testing.assert_allclose(path.moved_sq, moved, rtol=1e-10)


@pytest.mark.parametrize(
    "rule", [Lion(0.02, 0.5), Lion(0.02, 0.5, betas=(0.5, 0.8)), Lion(0.02, 0.5, betas=(0.0, 0.0))]
)
def test_lion_against_the_recursion_written_out(rule):
    """Norms and steps of the slow recursion in random_walk, with more terms of the series than the library keeps."""
    steps, size, first = 150, 7.0, 3.0
    lrs, wds = wild(steps, rule.lr), np.linspace(0.2, 1.0, steps)
    norm_sq = random_walk.expected_lion_path(first, size, rule.betas, lrs, wds, terms=60)
    eps = lrs * wds
    overlap = ((1 - eps) ** 2 * norm_sq[:-1] + lrs**2 * size - norm_sq[1:]) / (2 * (1 - eps) * lrs)
    moved = eps**2 * norm_sq[:-1] + 2 * eps * lrs * overlap + lrs**2 * size
    path = evolve(rule, steps, start=cold_start(rule, math.sqrt(first)), dim=size, lr=lrs, weight_decay=wds)
    np.testing.assert_allclose(path.norm_sq, norm_sq, rtol=1e-5)
    np.testing.assert_allclose(path.moved_sq, moved, rtol=1e-5)
    many = evolve(rule, steps, start=cold_start(rule, [math.sqrt(first), 1.0]), dim=size, lr=lrs, weight_decay=wds)
    np.testing.assert_allclose(many.norm_sq[:, 0], path.norm_sq, rtol=1e-13)


@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.9, 0.9), (0.95, 0.95), (0.5, 0.99)])
@pytest.mark.parametrize("lr", [1e-4, 1.0, 1e4])
def test_lion_stays_finite_at_every_scale_and_number_of_terms(betas, lr):
    """Powers of a correlation up to the hundredth must neither overflow nor vanish into NaN."""
    rule = Lion(lr, 1e-3 / lr, betas=betas)
    star = float(settled(rule).norm_sq)
    still = evolve(rule, 200, start=settled(rule))
    np.testing.assert_allclose(still.norm_sq, star, rtol=1e-9)
    for factor in (0.01, 3.0):
        path = evolve(rule, 6000, start=cold_start(rule, factor * math.sqrt(star)))
        assert path.norm_sq[-1] == pytest.approx(star, rel=1e-3)


def test_adam_with_l2_settles_layer_by_layer():
    rule, grads, dims = AdamL2(1e-3, 1e-2), [1.0, 4.0, 9.0], [100.0, 300.0, 50.0]
    start = settled(rule, unit_grad_sq=grads, dim=dims)
    path = evolve(rule, 50, start=start, unit_grad_sq=grads, dim=dims)
    np.testing.assert_allclose(path.norm_sq, np.broadcast_to(start.norm_sq, path.norm_sq.shape), rtol=1e-10)
    for layer, (unit_grad_sq, dim) in enumerate(zip(grads, dims, strict=True)):
        assert start.norm_sq[layer] == pytest.approx(
            rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).norm ** 2, rel=1e-12
        )


def test_muon_before_orthogonalisation_by_simulation():
    """The linear filter itself, fed with Gaussian matrices: 4000 replicas of 30 entries, standard error 0.1-0.4 %."""
    rule = Muon(0.05, 0.2, momentum=0.9)
    rng = np.random.default_rng(7)
    steps, shape = 120, (4000, 30)
    lrs = wild(steps, 0.05)
    buffer = np.zeros(shape)
    for _ in range(100):
        buffer = 0.9 * buffer + 0.1 * rng.normal(size=shape)
    w = rng.normal(size=shape)
    w *= 0.5 / np.linalg.norm(w, axis=1, keepdims=True)
    power = 30 * ((1 - 0.81) ** 2 + 0.81**2 * 0.1 / 1.9)  # (1 - mu^2)^2 + mu^4 (1-mu)/(1+mu) per entry
    norm_sq = [0.25]
    for lr in lrs:
        g = rng.normal(size=shape)
        buffer = 0.9 * buffer + 0.1 * g
        w = (1 - lr * 0.2) * w - lr * (0.1 * g + 0.9 * buffer)
        norm_sq.append(np.mean(np.sum(w * w, axis=1)))
    path = evolve(rule, steps, start=cold_start(rule, 0.5), dim=power, lr=lrs)
    np.testing.assert_allclose(path.norm_sq, norm_sq, rtol=0.015)


# --- torch itself -----------------------------------------------------------------------------------------------------
# 32 replicas of 400 entries: standard error 0.05-0.3 % on the mean ||w||^2, 0.6 % on the rms angle of one step.


def assert_follows(path, run, *, norm_tol=0.01, first=0):
    mean = run.norm_sq[first:].mean(axis=1)
    np.testing.assert_allclose(path.norm_sq, mean, rtol=norm_tol)
    rms = np.sqrt(np.mean(run.angle[first:] ** 2, axis=1))
    np.testing.assert_allclose(path.angle, rms, rtol=0.04)  # every step, five standard errors and Var(P)
    windows = len(rms) // 25 * 25
    smooth = [np.sqrt(np.mean(x[:windows].reshape(-1, 25) ** 2, axis=1)) for x in (path.angle, rms)]
    np.testing.assert_allclose(*smooth, rtol=0.015)


TORCH = {
    "plain": (SGD(0.2, 0.02), torch.optim.SGD, {}),
    "heavy ball": (SGD(0.2, 0.01, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (
        SGD(0.2, 0.01, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "dampened": (
        SGD(0.4, 0.02, momentum=0.8, dampening=0.6),
        torch.optim.SGD,
        {"momentum": 0.8, "dampening": 0.6},
    ),
    "decoupled": (SGDW(0.2, 0.02, momentum=0.9), random_walk.SGDW, {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_sgd_from_a_cold_start(name):
    rule, build, options = TORCH[name]
    steps = 400
    lrs, wds = wild(steps, rule.lr), rule.weight_decay * (1.5 - np.arange(steps) / steps)
    schedules = {"lr": lrs, "weight_decay": wds}
    if rule.momentum > 0:
        schedules["momentum"] = np.linspace(0.6, 0.95, steps)
    run = walk(
        lambda p: build(p, lr=rule.lr, weight_decay=rule.weight_decay, **options),
        steps,
        norm=1.5,
        replicas=32,
        schedules=schedules,
    )
    path = evolve(rule, steps, start=cold_start(rule, 1.5), unit_grad_sq=1.0, **schedules)
    assert_follows(path, run)


@pytest.mark.parametrize("name", TORCH)
def test_torch_sgd_from_equilibrium(name):
    rule, build, options = TORCH[name]
    steps, before = 200, int(6 * rule.equilibrium().time_constant) + 50
    lrs = rule.lr * np.where(np.arange(steps) < 100, 0.2, 0.6)
    run = walk(
        lambda p: build(p, lr=rule.lr, weight_decay=rule.weight_decay, **options),
        before + steps,
        norm=rule.equilibrium(1.0).norm,
        replicas=32,
        schedules={"lr": [*[rule.lr] * before, *lrs]},
    )
    path = evolve(rule, steps, start=settled(rule), lr=lrs)
    assert_follows(path, run, first=before)
    assert path.angle[0] == pytest.approx(rule.equilibrium().angle * 0.2, rel=0.1)  # falls with lr at once


def test_dampened_first_step_is_undamped():
    rule = SGD(0.5, 0.01, momentum=0.9, dampening=0.9)
    run = walk(
        lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.01, momentum=0.9, dampening=0.9), 3, norm=2.0, replicas=64
    )
    path = evolve(rule, 3, start=cold_start(rule, 2.0))
    np.testing.assert_allclose(path.angle, np.sqrt(np.mean(run.angle**2, axis=1)), rtol=0.02)
    # A buffer damped from the start would turn by a tenth of this.
    assert path.angle[0] == pytest.approx(math.atan(0.5 / 4 / (1 - 0.005)), rel=1e-12)
    # In equilibrium there is no first step any more.
    still = evolve(rule, 3, start=settled(rule))
    np.testing.assert_allclose(still.norm_sq, still.norm_sq[0], rtol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"dampening": 0.7}], ids=["heavy ball", "nesterov", "dampened"]
)
def test_torch_makes_no_buffer_before_momentum_sets_in(options):
    rule = SGD(0.3, 0.02, momentum=0.9, **options)
    momentum = [0.0] * 100 + [0.9] * 25
    run = walk(
        lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.02, momentum=0.9, **options),
        125,
        norm=1.5,
        replicas=32,
        unit_grad_sq=3.0,
        schedules={"momentum": momentum},
    )
    path = evolve(rule, 125, start=cold_start(rule, 1.5), unit_grad_sq=3.0, momentum=momentum)
    assert_follows(path, run)


def test_torch_without_momentum_ignores_dampening():
    damped, plain = SGD(0.2, 0.02, dampening=0.5), SGD(0.2, 0.02)
    for start in (cold_start(plain, 1.0), settled(plain)):
        np.testing.assert_array_equal(evolve(damped, 20, start=start).norm_sq, evolve(plain, 20, start=start).norm_sq)


def test_torch_adamw_relaxes_with_the_lag_of_its_second_moment():
    """Published: ||w||^2 / P* at steps 500, 1000, 1500, 3000 is 1.630, 1.424, 1.305, 1.137 at eps = 5e-4."""
    rule, dim, steps = AdamW(0.01, 0.05), 400, 3000
    star = 0.01 * dim / (2 * 0.05)
    run = walk(
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05),
        steps,
        norm=math.sqrt(2 * star),
        replicas=16,
        dim=dim,
    )
    path = evolve(rule, steps, start=cold_start(rule, math.sqrt(2 * star)), dim=dim)
    at = [500, 1000, 1500, 3000]
    np.testing.assert_allclose(path.norm_sq[at] / star, [1.630, 1.424, 1.305, 1.137], rtol=0.01)
    mean = run.norm_sq.mean(axis=1)
    np.testing.assert_allclose(path.norm_sq[::50], mean[::50], rtol=0.01)
    rms = np.sqrt(np.mean(run.angle**2, axis=1))
    # Over the first steps the second moment is an average of few gradients, which the mean field does not know.
    np.testing.assert_allclose(path.angle[100:], rms[100:], rtol=0.05)
    smooth = [np.sqrt(np.mean(x[100:].reshape(-1, 100) ** 2, axis=1)) for x in (path.angle, rms)]
    np.testing.assert_allclose(*smooth, rtol=0.01)


def test_torch_adam_with_l2_relaxes_with_the_lag_of_its_second_moment():
    """Published: 1.545, 1.165, 1.052, 1.014 (simulated), 1.539, 1.167, 1.055, 1.012 (mean field), eps_e = 5.85e-4."""
    dim, grad = 400, 1.0
    lr = 5.85e-4 / (0.03 * math.sqrt(dim))  # eps_e = lr wd sqrt(d P / L), were P = 1
    share = AdamL2(lr, 0.03).decay_share(unit_grad_sq=grad, dim=dim)
    rule = AdamL2(lr * (5.85e-4 / share) ** 0.75, 0.03)  # eps_e grows as lr^(4/3)
    assert rule.decay_share(unit_grad_sq=grad, dim=dim) == pytest.approx(5.85e-4, rel=5e-3)
    star = rule.equilibrium(unit_grad_sq=grad, dim=dim).norm ** 2
    path = evolve(rule, 4000, start=cold_start(rule, math.sqrt(2 * star)), dim=dim, unit_grad_sq=grad)
    at = [300, 1000, 2000, 4000]
    np.testing.assert_allclose(path.norm_sq[at] / star, [1.539, 1.167, 1.055, 1.012], rtol=0.01)
    run = walk(
        lambda p: torch.optim.Adam(p, lr=rule.lr, weight_decay=rule.weight_decay),
        1500,
        norm=math.sqrt(2 * star),
        dim=dim,
    )
    np.testing.assert_allclose(path.norm_sq[:1501:50], run.norm_sq.mean(axis=1)[::50], rtol=0.01)
    rms = np.sqrt(np.mean(run.angle[100:] ** 2, axis=1))
    smooth = [np.sqrt(np.mean(x.reshape(-1, 100) ** 2, axis=1)) for x in (path.angle[100:1500], rms)]
    np.testing.assert_allclose(*smooth, rtol=0.012)


def lion_walk(rule, lrs, norm, dim=400):
    return walk(
        lambda p: random_walk.Lion(p, lr=rule.lr, weight_decay=rule.weight_decay, betas=rule.betas),
        len(lrs),
        norm=norm,
        replicas=32,
        dim=dim,
        schedules={"lr": lrs},
    )


def test_lion_with_slow_decay():
    """2 eps / (1-b2) = 0.02: the correlations of the sign settle long before the norm moves."""
    rule, steps, dim = Lion(0.01, 0.01), 600, 400
    norm = 0.7 * rule.equilibrium(dim=dim).norm
    lrs = wild(steps, rule.lr)
    run = lion_walk(rule, lrs, norm)
    path = evolve(rule, steps, start=cold_start(rule, norm), dim=dim, lr=lrs)
    np.testing.assert_allclose(path.norm_sq, run.norm_sq.mean(axis=1), rtol=0.02)
    squares = path.angle**2, np.mean(run.angle**2, axis=1)
    smooth = [np.sqrt(x.reshape(-1, 50).mean(axis=1)) for x in squares]
    np.testing.assert_allclose(*smooth, rtol=0.015)


def test_lion_with_fast_decay():
    rule, steps, dim = Lion(0.02, 0.3), 300, 400
    norm = rule.equilibrium(dim=dim).norm
    lrs = np.full(steps, rule.lr)
    run = lion_walk(rule, lrs, norm)
    path = evolve(rule, steps, start=cold_start(rule, norm), dim=dim)
    np.testing.assert_allclose(path.norm_sq, run.norm_sq.mean(axis=1), rtol=0.03)


def test_lion_reference_follows_the_optimizer_under_any_schedule():
    """The slow recursion that keeps the correlations up to date is right to 1.5 %."""
    rule, steps, dim = Lion(0.02, 0.3), 400, 400
    lrs = wild(steps, rule.lr)
    for share in (0.7, 1.3):
        norm = share * rule.equilibrium(dim=dim).norm
        path = random_walk.expected_lion_path(norm**2, dim, rule.betas, lrs, np.full(steps, 0.3))
        np.testing.assert_allclose(path, lion_walk(rule, lrs, norm).norm_sq.mean(axis=1), rtol=0.02)
    # Its fixed point is the law's.
    late = random_walk.expected_lion_path(norm**2, dim, rule.betas, np.full(6000, 0.02), np.full(6000, 0.3))
    assert late[-1] == pytest.approx(rule.equilibrium(dim=dim).norm ** 2, rel=1e-9)


# --- published paths --------------------------------------------------------------------------------------------------


def test_heavy_ball_overshoots_far_from_equilibrium():
    """Monotone is local: 7 % overshoot at 0.91 of the threshold, from a tenth of the squared norm."""
    eps = 0.91 * oscillation_threshold(0.9)
    rule = SGD(0.1, eps / 0.1, momentum=0.9)
    assert rule.equilibrium().monotone
    star = rule.equilibrium(1.0).norm ** 2
    path = evolve(rule, 1000, start=cold_start(rule, math.sqrt(0.1 * star)))
    assert path.norm_sq.max() / star == pytest.approx(1.07, abs=0.005)


def test_published_heavy_ball_path_with_constant_gradient():
    rule = SGD(0.1, 0.001, momentum=0.9)
    path = evolve(rule, 10_000, start=cold_start(rule, math.sqrt(10)), unit_grad_sq=10.0)
    assert path.norm_sq[1000] == pytest.approx(70.208204, abs=1e-6)
    assert path.norm_sq[10_000] == pytest.approx(70.711609, abs=1e-6)
    assert int(np.argmax(np.abs(path.norm_sq / 70.711609 - 1) < 0.01)) == 919
    assert path.angle[-1] == pytest.approx(0.0102598, abs=1e-7)


def test_published_heavy_ball_path_with_drifting_gradient():
    """L_t = 10 + sin(t / 1e5): the norm lags by half the relative drift per time constant."""
    rule = SGD(0.1, 0.001, momentum=0.9)
    steps = 100_000
    unit_grad_sq = 10 + np.sin(np.arange(steps) / 1e5)
    path = evolve(rule, steps, start=cold_start(rule, [math.sqrt(10)]), unit_grad_sq=unit_grad_sq[:, None])
    x = path.norm_sq[:, 0]
    for t, value in ((1000, 70.234906), (10_000, 71.054781), (100_000, 73.621922)):
        assert x[t] == pytest.approx(value, abs=1e-6)
    target = rule.equilibrium(unit_grad_sq).norm ** 2
    assert int(np.argmax(np.abs(x[1:] / target - 1) < 0.01)) + 1 == 922
    deviation = x[6001:] / target[6000:] - 1
    assert np.abs(deviation).max() == pytest.approx(0.000125, rel=0.05)


def test_plain_sgd_path_with_the_exact_square():
    """The papers' map has 1 - 2 eps (x* = 22.360680); the exact one (1 - eps)^2 (x* = 22.361239)."""
    rule = SGD(0.1, 0.001)
    path = evolve(rule, 20_000, start=cold_start(rule, math.sqrt(10)), unit_grad_sq=10.0)
    x, slow = 10.0, [10.0]
    for _ in range(20_000):
        x = (1 - 1e-4) ** 2 * x + 0.1 / x
        slow.append(x)
    np.testing.assert_allclose(path.norm_sq, slow, rtol=1e-12)
    # Published for 1 - 2 eps: 15.228789 and 22.196414; the exact map differs by eps / 4.
    np.testing.assert_allclose(path.norm_sq[[1000, 10_000]], [15.228789, 22.196414], rtol=3e-5)
    late = evolve(rule, 100_000, start=path.final, unit_grad_sq=10.0)
    assert late.norm_sq[-1] == pytest.approx(22.361239, abs=1e-6)


@pytest.mark.parametrize(("momentum", "rms", "highest"), [(0.0, 0.00122, 0.0046), (0.9, 0.00387, 0.016)])
def test_published_paths_with_noise(momentum, rms, highest):
    """L_t = 10 + uniform(-3, 3), many layers at once: rms deviation within 15 %, none beyond 5.5 sigma."""
    rule = SGD(0.1, 0.001, momentum=momentum)
    layers, steps = 100, 4000
    unit_grad_sq = 10 + np.random.default_rng(1).uniform(-3, 3, size=(steps, layers))
    path = evolve(rule, steps, start=settled(rule, unit_grad_sq=np.full(layers, 10.0)), unit_grad_sq=unit_grad_sq)
    star = rule.equilibrium(10.0).norm ** 2
    deviation = path.norm_sq[2000:] / star - 1
    # A cold norm takes 2500 steps to fluctuate fully without momentum: 1 - exp(-4) of the variance by then.
    grown = 1 - math.exp(-8 * 1e-4 / (1 - momentum) * 3000)
    assert math.sqrt(np.mean(deviation**2)) == pytest.approx(rms * math.sqrt(grown), rel=0.15)
    assert np.abs(deviation).max() < 5.5 * rms
    if momentum:
        assert math.sqrt(np.mean(path.angle**2)) == pytest.approx(0.0102598, rel=2e-4)
    assert highest < 5.5 * rms


# --- structure --------------------------------------------------------------------------------------------------------


def sizes(rule):
    """Arguments that this rule needs, for one layer."""
    return {"unit_grad_sq": 1.3, "dim": 40.0}


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_settled_stays_where_it_is(rule):
    path = evolve(rule, 200, start=settled(rule, **sizes(rule)), **sizes(rule))
    np.testing.assert_allclose(path.norm_sq, path.norm_sq[0], rtol=1e-11)
    expected = rule.equilibrium() if isinstance(rule, Muon) else rule.equilibrium(**sizes(rule))
    np.testing.assert_allclose(path.angle, expected.angle, rtol=1e-7)
    np.testing.assert_allclose(path.relative_update, expected.relative_update, rtol=1e-9)
    if not isinstance(rule, Muon):
        assert path.norm[0] == pytest.approx(expected.norm, rel=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_cold_start_ends_settled(rule):
    steps = int(40 * max(rule.equilibrium(**({} if isinstance(rule, Muon) else sizes(rule))).time_constant, 100))
    start = cold_start(rule, 1.1 * math.sqrt(float(settled(rule, **sizes(rule)).norm_sq)))
    final = evolve(rule, min(steps, 60_000), start=start, **sizes(rule)).final
    expected = settled(rule, **sizes(rule))
    for field in ("norm_sq", "radial", "buffer_sq", "second", "memory"):
        np.testing.assert_allclose(getattr(final, field), getattr(expected, field), rtol=1e-8, err_msg=field)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_going_on_from_the_final_state_is_one_long_run(rule, layers):
    """Bit for bit, wherever the run is cut, and also through a dampened first step and Adam's bias correction."""
    lrs = wild(60, rule.lr)
    norm = 1.2 if layers == 1 else np.array([0.5, 1.2, 4.0])
    whole = evolve(rule, 60, start=cold_start(rule, norm), lr=lrs, **sizes(rule))
    for cut in (1, 23, 60):
        first = evolve(rule, cut, start=cold_start(rule, norm), lr=lrs, **sizes(rule))
        second = evolve(rule, 60 - cut, start=first.final, lr=lrs, first_step=cut, **sizes(rule))
        assert first.final.steps_done == cut
        joined = np.concatenate([first.norm_sq, second.norm_sq[1:]])
        turned = np.concatenate([first.moved_sq, second.moved_sq])
        if isinstance(rule, Lion | Muon | AdamW | AdamL2):
            # Products over the whole run, and powers of the betas, are taken in one piece: the last digits differ.
            np.testing.assert_allclose(joined, whole.norm_sq, rtol=1e-13)
            np.testing.assert_allclose(turned, whole.moved_sq, rtol=1e-12)
        else:
            np.testing.assert_array_equal(joined, whole.norm_sq)
            np.testing.assert_array_equal(turned, whole.moved_sq)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_many_layers_are_many_single_ones(rule):
    norms, grads, dims = np.array([0.3, 1.0, 5.0]), np.array([0.1, 1.0, 7.0]), np.array([10.0, 20.0, 400.0])
    lrs = wild(80, rule.lr)
    many = evolve(rule, 80, start=cold_start(rule, norms), unit_grad_sq=grads, dim=dims, lr=lrs)
    assert many.norm_sq.shape == (81, 3)
    assert many.angle.shape == many.moved_sq.shape == (80, 3)
    for i in range(3):
        one = evolve(rule, 80, start=cold_start(rule, norms[i]), unit_grad_sq=grads[i], dim=dims[i], lr=lrs)
        assert one.norm_sq.shape == (81,)
        assert one.final.norm_sq.shape == ()
        np.testing.assert_allclose(many.norm_sq[:, i], one.norm_sq, rtol=1e-13)
        np.testing.assert_allclose(many.moved_sq[:, i], one.moved_sq, rtol=1e-12)
        np.testing.assert_allclose(many.angle[:, i], one.angle, rtol=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_layers_may_come_from_any_argument(rule):
    if not isinstance(rule, Lion | Muon):
        path = evolve(rule, 5, start=cold_start(rule, 1.0), unit_grad_sq=[1.0, 2.0], dim=9.0)
        assert path.norm_sq.shape == (6, 2)
        series = evolve(rule, 5, start=cold_start(rule, 1.0), unit_grad_sq=np.ones((5, 2)) * [1.0, 2.0], dim=9.0)
        np.testing.assert_array_equal(series.norm_sq, path.norm_sq)
    if not isinstance(rule, SGD | SGDW):
        assert evolve(rule, 5, start=cold_start(rule, 1.0), dim=[1.0, 2.0]).norm_sq.shape == (6, 2)
    assert evolve(rule, 5, start=cold_start(rule, [1.0, 2.0]), **sizes(rule)).norm_sq.shape == (6, 2)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("norm", [1.0, [1.0, 2.0]])
def test_no_steps_at_all(rule, norm):
    path = evolve(rule, 0, start=cold_start(rule, norm), **sizes(rule))
    assert path.norm_sq.shape == (1, *np.shape(norm))
    assert path.angle.shape == path.relative_update.shape == (0, *np.shape(norm))
    np.testing.assert_array_equal(path.final.norm_sq, np.square(norm))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=8)
@given(k=st.floats(0.05, 20), p=st.floats(0.1, 5))
def test_scaling_the_weight_scales_the_whole_path(rule, k, p):
    """w -> k w with lr -> k^2 lr, wd -> wd / k^2 (SGD); lr -> k lr, wd -> wd / k (AdamW, Lion), wd / k^2 (Adam+L2)."""
    lr_power, wd_power = (2, 2) if isinstance(rule, SGD | SGDW) else (1, 2) if isinstance(rule, AdamL2) else (1, 1)
    scaled = dataclasses.replace(rule, lr=rule.lr * k**lr_power, weight_decay=rule.weight_decay / k**wd_power)
    lrs = wild(60, rule.lr)
    before = evolve(rule, 60, start=cold_start(rule, p), lr=lrs, **sizes(rule))
    after = evolve(scaled, 60, start=cold_start(scaled, k * p), lr=lrs * k**lr_power, **sizes(rule))
    np.testing.assert_allclose(after.norm_sq, k**2 * before.norm_sq, rtol=1e-9)
    np.testing.assert_allclose(after.angle, before.angle, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rescaled_per_layer_is_rescaled_one_by_one(rule):
    factors, dims = np.array([0.5, 1.0, 3.0]), np.array([10.0, 20.0, 30.0])
    start = evolve(rule, 30, start=cold_start(rule, [1.0, 1.5, 2.0]), dim=dims).final
    many = evolve(rule, 40, start=rescaled(start, factors), dim=dims)
    for i in range(3):
        single = evolve(rule, 30, start=cold_start(rule, [1.0, 1.5, 2.0][i]), dim=dims[i]).final
        one = evolve(rule, 40, start=rescaled(single, factors[i]), dim=dims[i])
        np.testing.assert_allclose(many.norm_sq[:, i], one.norm_sq, rtol=1e-12)
        np.testing.assert_allclose(many.angle[:, i], one.angle, rtol=1e-8)


# --- bad input --------------------------------------------------------------------------------------------------------

RULE = SGD(0.1, 0.01, momentum=0.9)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "one", [1.0, -1.0]])
def test_bad_numbers_raise(bad):
    start = cold_start(RULE, 1.0)
    with pytest.raises(EquilibriaError, match="norm"):
        cold_start(RULE, bad)
    with pytest.raises(EquilibriaError, match="unit_grad_sq"):
        evolve(RULE, 3, start=start, unit_grad_sq=bad)
    with pytest.raises(EquilibriaError, match="dim"):
        evolve(AdamW(0.1, 0.1), 3, start=cold_start(AdamW(0.1), 1.0), dim=bad)
    with pytest.raises(EquilibriaError, match="factor"):
        rescaled(start, bad)
    for name in ("lr", "weight_decay", "momentum"):
        with pytest.raises(EquilibriaError, match="expected"):
            evolve(RULE, 3, start=start, **{name: bad})


def test_bad_schedules_and_counts_raise():
    start = cold_start(RULE, 1.0)
    with pytest.raises(EquilibriaError, match="momentum"):
        evolve(RULE, 3, start=start, momentum=[0.9, 1.0, 0.9])
    with pytest.raises(EquilibriaError, match="momentum"):
        evolve(AdamW(0.1, 0.1), 3, start=cold_start(AdamW(0.1), 1.0), momentum=0.9)
    for steps in (-1, 2.5, math.nan, "many"):
        with pytest.raises(EquilibriaError, match="steps"):
            evolve(RULE, steps, start=start)
    for rows in (2, 4):
        with pytest.raises(EquilibriaError, match="3 rows"):
            evolve(RULE, 3, start=start, unit_grad_sq=np.ones((rows, 2)))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_nothing_settles_without_lr_or_decay(rule, name):
    with pytest.raises(EquilibriaError, match=f"{name}=0"):
        settled(dataclasses.replace(rule, **{name: 0.0}), **sizes(rule))


@pytest.mark.parametrize("bad", [None, "sgd", SGD, 0.1])
def test_a_non_rule_raises(bad):
    start = cold_start(RULE, 1.0)
    for call in (lambda: evolve(bad, 3, start=start), lambda: settled(bad), lambda: cold_start(bad, 1.0)):
        with pytest.raises(EquilibriaError, match=r"got rule=.*; expected one of: SGD"):
            call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "x", -3.0])
def test_bad_correlation_raises(bad):
    rule = SGD(0.1, 0.01, momentum=0.9, nesterov=True)
    with pytest.raises(EquilibriaError, match=r"got correlation=.*; expected"):
        evolve(rule, 3, start=cold_start(rule, 1.0), correlation=bad)


@pytest.mark.parametrize("norm", [1e-200, 1e200, [1.0, 1e-90]])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_norms_beyond_float64_are_refused_with_the_range(rule, norm):
    with pytest.raises(EquilibriaError, match=r"got norm=.*; expected 1e-70 <= norm <= 1e\+70"):
        cold_start(rule, norm)
    for factor in (1e-69, 1e69):
        path = evolve(rule, 200, start=cold_start(rule, factor), **sizes(rule))
        assert np.isfinite(path.norm_sq).all() and (path.norm_sq > 0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: evolve(SGD(1.0, 1.0), 3, start=cold_start(RULE, 1.0), unit_grad_sq=0.0),
        lambda: evolve(SGD(1.0, 1.0), 3, start=cold_start(RULE, [1.0, 2.0]), unit_grad_sq=0.0),
        lambda: evolve(AdamW(0.1, 0.1), 3, start=cold_start(AdamW(0.1), 1.0), unit_grad_sq=0.0),
        lambda: evolve(AdamW(0.1, 0.1), 3, start=cold_start(AdamW(0.1), [1.0, 2.0]), unit_grad_sq=0.0),
        lambda: evolve(SGD(1e200, 1e-3), 3, start=cold_start(RULE, 1.0)),
    ],
)
def test_a_path_that_leaves_float64_raises(call):
    with pytest.raises(EquilibriaError, match=r"got lr up to .*; expected numbers under which \|\|w\|\|\^2 stays"):
        call()


ADAMS = [AdamW(0.01, 0.3), AdamL2(0.01, 0.05)]


@pytest.mark.parametrize("adam", ADAMS, ids=repr)
@pytest.mark.parametrize("other", [rule for rule in RULES if not isinstance(rule, AdamW | AdamL2)], ids=repr)
def test_a_state_with_or_without_second_moments_tells_adam_from_the_others(adam, other):
    for start in (settled(other), evolve(other, 3, start=cold_start(other, 1.0)).final):
        with pytest.raises(EquilibriaError, match=f"expected one made for {type(adam).__name__}"):
            evolve(adam, 3, start=start)
    for start in (settled(adam), evolve(adam, 3, start=cold_start(adam, 1.0)).final):
        with pytest.raises(EquilibriaError, match=f"expected one made for {type(other).__name__}"):
            evolve(other, 3, start=start)


def test_a_state_of_another_kind_of_rule_raises():
    with pytest.raises(EquilibriaError, match="Lion"):
        evolve(Lion(0.1, 0.1), 3, start=cold_start(RULE, 1.0))
    with pytest.raises(EquilibriaError, match="Muon"):
        evolve(Muon(0.1, 0.1), 3, start=settled(Lion(0.1, 0.1)))


@pytest.mark.parametrize(
    "rule", [AdamW(3e-3, 0.1), AdamL2(3e-3, 1e-2), Lion(1e-3, 0.5), Lion(1e-3, 0.5, betas=(0.95, 0.98))], ids=repr
)
@pytest.mark.parametrize("begin", ["cold", "later"])
def test_compiled_loops_follow_the_same_path(rule, begin, monkeypatch):
    steps, unit_grads = 400, np.exp(np.random.default_rng(0).normal(size=(400, 6)))
    lr = wild(steps, rule.lr)
    start = cold_start(rule, np.linspace(0.5, 4.0, 6))
    scale = {"unit_grad_sq": unit_grads, "dim": np.linspace(50.0, 500.0, 6)}
    if begin == "later":
        start = evolve(rule, 30, start=start, **{**scale, "unit_grad_sq": unit_grads[0]}).final

    def path(worth_compiling):
        monkeypatch.setattr(transient, "_WORTH_COMPILING", worth_compiling)
        return evolve(rule, steps, start=start, lr=lr, **scale)

    plain, loop = path(10**9), path(1)
    assert loop.norm_sq == pytest.approx(plain.norm_sq, rel=1e-11)
    assert loop.moved_sq == pytest.approx(plain.moved_sq, rel=1e-10)
    for name in ("radial", "buffer_sq", "second", "memory"):
        assert getattr(loop.final, name) == pytest.approx(getattr(plain.final, name), rel=1e-9, abs=1e-300)


def test_compiled_loops_refuse_a_series_of_the_wrong_length():
    rule = AdamW(1e-3, 0.1)
    with pytest.raises(EquilibriaError, match="expected 60000 rows"):
        evolve(rule, 60_000, start=cold_start(rule, [1.0, 2.0]), unit_grad_sq=np.ones((3, 2)))


# ---- a measured size of Adam's update


@pytest.mark.parametrize(
    "rule", [AdamW(0.01, 0.5, betas=(0.9, 0.95)), AdamL2(0.02, 0.05, betas=(0.9, 0.95))], ids=["AdamW", "AdamL2"]
)
def test_a_measured_update_settles_where_the_equilibrium_is(rule):
    scale = {"unit_grad_sq": 2.0, "dim": 100.0}
    path = evolve(rule, 12_000, start=settled(rule, **scale), update_gain=2.5, **scale)
    there = rule.equilibrium(update_gain=2.5, **scale)
    assert path.norm[-1] == pytest.approx(there.norm, rel=1e-6)
    assert path.angle[-1] == pytest.approx(there.angle, rel=1e-4)


def test_a_measured_update_is_a_number_of_entries_to_adamw():
    """||m||^2 grows by kappa at the same v, as it would with kappa times the entries and the gradient."""
    rule, kappa = AdamW(0.01, 0.5), np.array([0.6, 1.0, 3.0])
    start = cold_start(rule, np.ones(3))
    ours = evolve(rule, 300, start=start, unit_grad_sq=2.0, dim=100.0, update_gain=kappa)
    other = evolve(rule, 300, start=start, unit_grad_sq=2.0 * kappa, dim=100.0 * kappa)
    np.testing.assert_allclose(ours.norm_sq, other.norm_sq, rtol=1e-12)
    np.testing.assert_allclose(ours.moved_sq, other.moved_sq, rtol=1e-10)


def test_an_update_gain_per_step_is_the_same_compiled_or_not(monkeypatch):
    pytest.importorskip("numba")
    rule, draw = AdamL2(0.02, 0.05), np.random.default_rng(0)
    start, gains = cold_start(rule, np.array([1.0, 2.0])), draw.uniform(0.5, 3, (400, 2))
    plain = evolve(rule, 400, start=start, dim=50.0, update_gain=gains)
    monkeypatch.setattr(transient, "_WORTH_COMPILING", 0)
    compiled = evolve(rule, 400, start=start, dim=50.0, update_gain=gains)
    np.testing.assert_allclose(plain.norm_sq, compiled.norm_sq, rtol=1e-11)
    for way in (0, 10**9):
        monkeypatch.setattr(transient, "_WORTH_COMPILING", way)
        with pytest.raises(EquilibriaError, match=r"update_gain of shape \(3, 2\); expected 400 rows"):
            evolve(rule, 400, start=start, dim=50.0, update_gain=gains[:3])


def test_only_adam_has_an_update_gain():
    for rule in (SGD(0.1, 0.01), Lion(0.1, 0.01), Muon(0.1, 0.01)):
        with pytest.raises(EquilibriaError, match="expected one only for AdamW and Adam with L2"):
            evolve(rule, 3, start=cold_start(rule, 1.0), update_gain=2.0)
