"""Fixed points against slow iterations, published numbers, and torch's own optimizers in the random-walk model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.helpers import random_walk
from tests.helpers.random_walk import expected_adam_step, expected_sgd_step, expected_sgdw_step, walk

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, settled
from equilibria.theory.approach import oscillation_threshold
from equilibria.theory.memory import ema_memory
from equilibria.theory.muon import orthogonal_update
from equilibria.theory.targets import targets


def angle_of(p, after, moved):
    """Angle from squared lengths, by the law of cosines; good to 1e-8 relative where the angle is above 1e-3."""
    return math.acos((p + after - moved) / (2 * math.sqrt(p * after)))


def iterate(step, start, steps):
    """Iterate an expected step to its fixed point; returns ||w||, the angle and the relative update."""
    state = start
    for _ in range(steps):
        *state, moved = step(state)
    before = state[0]
    *state, moved = step(state)
    assert state[0] == pytest.approx(before, rel=1e-13)
    return math.sqrt(before), angle_of(before, state[0], moved), math.sqrt(moved / before)


SGD_RULES = [
    SGD(0.5, 0.1),
    SGD(0.1, 0.03),
    SGD(0.4, 0.05, momentum=0.5),
    SGD(0.1, 0.1, momentum=0.9),
    SGD(2.0, 0.05, momentum=0.9, dampening=0.4),
    SGD(0.4, 0.05, momentum=0.5, nesterov=True),
    SGD(0.1, 0.1, momentum=0.9, nesterov=True),
    SGDW(0.4, 0.05, momentum=0.5),
    SGDW(0.1, 0.1, momentum=0.9),
]


@pytest.mark.parametrize("rule", SGD_RULES, ids=repr)
def test_sgd_settles_where_the_iterated_recursion_does(rule):
    unit_grad_sq = 3.0

    def step(x):
        settings = (rule.lr, rule.weight_decay, rule.momentum, unit_grad_sq)
        if isinstance(rule, SGDW):
            return expected_sgdw_step(*x, *settings)[:4]
        return expected_sgd_step(*x, *settings, dampening=rule.dampening, nesterov=rule.nesterov)[:4]

    norm, angle, relative = iterate(step, (2.0, 0.0, 0.0), 6000)
    ours = rule.equilibrium(unit_grad_sq=unit_grad_sq)
    assert ours.norm == pytest.approx(norm, rel=1e-12)
    assert ours.angle == pytest.approx(angle, rel=1e-9)
    assert ours.relative_update == pytest.approx(relative, rel=1e-11)


@pytest.mark.parametrize(("lr", "wd", "a", "rho"), [(0.1, 0.01, 0.9, 0.3), (0.2, 0.1, 0.5, -0.2), (0.1, 0.1, 0.9, 1.5)])
def test_correlated_nesterov_settles_where_the_iterated_recursion_does(lr, wd, a, rho):
    grad_sq = 2.0
    eps = lr * wd

    def step(x):
        return expected_sgd_step(*x, lr, wd, a, grad_sq, nesterov=True, cross=rho * grad_sq)[:4]

    norm, angle, _ = iterate(step, (2.0, 0.0, 0.0), 20_000)
    big = 1 + a + a * eps * (1 + 2 * a)
    unit_grad_sq = grad_sq * (1 + 2 * a**2 * (1 + a) / big * rho)
    ours = SGD(lr, wd, momentum=a, nesterov=True).equilibrium(unit_grad_sq=unit_grad_sq, correlation=rho)
    assert ours.norm == pytest.approx(norm, rel=1e-12)
    assert ours.angle == pytest.approx(angle, rel=1e-9)


@given(a=st.floats(0.01, 0.95), rho=st.floats(-0.3, 2), eps=st.floats(1e-9, 1e-6))
def test_correlated_nesterov_angle_to_first_order(a, rho, eps):
    law = 2 * eps * (1 + 2 * a - 2 * a**3 + 2 * a**2 * rho * (1 + a - a**2)) / ((1 + a) * (1 + 2 * a**2 * rho))
    ours = SGD(1.0, eps, momentum=a, nesterov=True).equilibrium(correlation=rho).angle
    assert ours == pytest.approx(math.sqrt(law), rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "unit_grad_sq", "norm_sq", "angle"),
    [
        (SGD(0.1, 0.001, momentum=0.9), 10.0, 70.711609, 0.010259829),
        (SGD(0.1, 0.001), 10.0, 22.361239, None),
        (SGD(0.4, 0.05, momentum=0.5), 1.0, None, 0.16348131),
        (SGD(0.5, 0.1), 1.0, None, 0.31756043),
        (SGD(0.1, 0.001, momentum=0.9, nesterov=True), 1.0, None, 0.0118868),
    ],
)
def test_numbers_as_published(rule, unit_grad_sq, norm_sq, angle):
    ours = rule.equilibrium(unit_grad_sq)
    if norm_sq is not None:
        assert ours.norm**2 == pytest.approx(norm_sq, abs=6e-7)
    if angle is not None:
        assert ours.angle == pytest.approx(angle, abs=0.6 * 10.0 ** -len(str(angle).split(".")[1]))


@given(
    a=st.floats(0, 0.98),
    tau=st.floats(0, 0.9),
    wd=st.floats(1e-8, 1e-5),
    lr=st.floats(0.01, 1),
    unit_grad_sq=st.floats(0.1, 10),
)
def test_first_order_forms(a, tau, wd, lr, unit_grad_sq):
    """All laws with their small-decay limits, at decays where the next order is below 1e-3."""
    wd *= (1 - a) ** 2
    eps = lr * wd
    ema = (1 - a) / (1 + a)
    expected = [
        (SGD(lr, wd), (unit_grad_sq * lr / (2 * wd)) ** 0.25, math.sqrt(2 * eps)),
        (SGD(lr, wd, momentum=a), (unit_grad_sq * lr / (2 * wd * (1 - a))) ** 0.25, math.sqrt(2 * eps / (1 + a))),
        (SGDW(lr, wd, momentum=a), (unit_grad_sq * lr / (2 * wd * (1 - a) ** 2)) ** 0.25, math.sqrt(2 * eps * ema)),
        (AdamW(lr, wd, betas=(a, 0.999)), math.sqrt(lr * 50 / (2 * wd)), math.sqrt(2 * eps * ema)),
    ]
    if a > 0:
        eta = lr * (1 - tau)
        damped = SGD(lr, wd, momentum=a, dampening=tau)
        expected += [
            (damped, (unit_grad_sq * eta / (2 * wd * (1 - a))) ** 0.25, math.sqrt(2 * eps * (1 - tau) / (1 + a))),
            (
                SGD(lr, wd, momentum=a, nesterov=True),
                (unit_grad_sq * lr / (2 * wd * (1 - a))) ** 0.25,
                math.sqrt(2 * eps * (1 + 2 * a - 2 * a**3) / (1 + a)),
            ),
        ]
    for rule, norm, angle in expected:
        ours = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=50)
        assert ours.norm == pytest.approx(norm, rel=1e-3)
        assert ours.angle == pytest.approx(angle, rel=1e-3)


@given(eps=st.floats(1e-6, 1.9), a=st.floats(0, 0.98))
def test_exact_angles_of_coupled_sgd(eps, a):
    assume(abs(eps - 1 - a) > 1e-6)
    ours = SGD(1.0, eps, momentum=a).equilibrium()
    assert ours.angle == pytest.approx(math.acos(1 - eps / (1 + a)), rel=1e-9)
    assert ours.relative_update == pytest.approx(math.sqrt(2 * eps / (1 + a)), rel=1e-13)


def test_nesterov_exact_form():
    a, eps = 0.9, 0.02
    big = 1 + a + a * eps * (1 + 2 * a)
    cosine = (1 + a) * (1 - eps + 2 * a**2 * eps - a * (1 + 2 * a) * eps**2) / big
    assert SGD(1.0, eps, momentum=a, nesterov=True).equilibrium().angle == pytest.approx(math.acos(cosine), rel=1e-12)
    heavy = SGD(0.1, 1e-3, momentum=a).equilibrium().angle
    assert SGD(0.1, 1e-3, momentum=a, nesterov=True).equilibrium().angle / heavy == pytest.approx(1.16, abs=0.005)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.95, 0.9)])
def test_adamw_settles_where_the_iterated_recursion_does(betas):
    lr, wd, dim = 0.02, 0.5, 300

    def step(x):
        return expected_adam_step(*x, lr, wd, betas, 1.7, dim, decoupled=True)

    norm, angle, _ = iterate(step, (9.0, 0.0, 0.0, 1.7 / 9 / dim), 60_000)
    ours = AdamW(lr, wd, betas=betas).equilibrium(dim=dim)
    assert ours.norm == pytest.approx(norm, rel=1e-11)
    assert ours.angle == pytest.approx(angle, rel=1e-8)
    # The same angle as SGD with decoupled decay and momentum beta1, and as an EMA of constant-size updates.
    assert ours.angle == pytest.approx(SGDW(lr, wd, momentum=betas[0]).equilibrium().angle, rel=1e-13)
    s_eps = ema_memory(betas[0]).total(lr * wd)
    cosine = (1 - lr * wd) + lr * wd * (2 - lr * wd) * (1 - 1 / s_eps) / (2 * (1 - lr * wd))
    assert ours.angle == pytest.approx(math.acos(cosine), rel=1e-10)


def test_adamw_norm_with_the_correction_of_the_first_moment():
    """19.82 instead of lr d / (2 wd) = 20 at eps = 1e-3, beta1 = 0.9."""
    ours = AdamW(0.01, 0.1).equilibrium(dim=400).norm ** 2
    assert ours == pytest.approx(19.82, abs=0.005)
    assert ours / 20 == pytest.approx(1 - 2 * 0.9 * 1e-3 / 0.19 + 1e-3 / 2, abs=1e-4)


@pytest.mark.parametrize(
    ("lr", "wd", "unit_grad_sq", "dim"), [(2e-3, 0.02, 1.0, 400), (0.01, 0.3, 5.0, 100), (0.05, 0.5, 2.0, 30)]
)
def test_adam_l2_settles_where_the_iterated_recursion_does(lr, wd, unit_grad_sq, dim):
    betas = (0.9, 0.99)

    def step(x):
        return expected_adam_step(*x, lr, wd, betas, unit_grad_sq, dim, decoupled=False)

    norm, angle, _ = iterate(step, (1.0, 0.0, 0.0, unit_grad_sq / dim), 30_000)
    ours = AdamL2(lr, wd, betas=betas).equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)
    assert ours.norm == pytest.approx(norm, rel=1e-11)
    assert ours.angle == pytest.approx(angle, rel=1e-8)


@given(lr=st.floats(1e-4, 1e-2), unit_grad_sq=st.floats(0.1, 100), dim=st.integers(2, 10**6), b1=st.floats(0, 0.95))
def test_adam_l2_to_first_order(lr, unit_grad_sq, dim, b1):
    # wd such that wd P / sqrt(L) = 0.01: then P^(3/2) = lr sqrt(d L) / (2 wd) gives P = (50 lr sqrt(d))^2.
    p = (50 * lr * math.sqrt(dim)) ** 2
    wd = 0.01 * math.sqrt(unit_grad_sq) / p
    angle = math.sqrt((1 - b1) / (1 + b1)) * (2 * wd * lr**2 * dim / math.sqrt(unit_grad_sq)) ** (1 / 3)
    ours = AdamL2(lr, wd, betas=(b1, 0.999)).equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)
    assert ours.norm == pytest.approx((lr * math.sqrt(dim * unit_grad_sq) / (2 * wd)) ** (1 / 3), rel=3e-3)
    assert ours.angle == pytest.approx(angle, rel=6e-3)


def test_lion_settles_at_the_sum_of_arcsines():
    """General law for a stationary update: P* = lr^2 d S_eps / (eps (2-eps)), with the correlations summed by hand."""
    lr, wd, dim, (b1, b2) = 0.01, 0.1, 400, (0.9, 0.99)
    eps = lr * wd
    nu = (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)
    k = np.arange(1, 4000)
    rho = (b1**2 * b2**k * (1 - b2) / (1 + b2) + (1 - b1) * b1 * (1 - b2) * b2 ** (k - 1)) / nu
    s_eps = 1 + 2 * float(2 / math.pi * np.arcsin(rho) @ (1 - eps) ** k)
    ours = Lion(lr, wd).equilibrium(dim=dim)
    assert ours.norm**2 == pytest.approx(lr**2 * dim * s_eps / (eps * (2 - eps)), rel=1e-8)
    cosine = (1 - eps) + eps * (2 - eps) * (1 - 1 / s_eps) / (2 * (1 - eps))
    assert ours.angle == pytest.approx(math.acos(cosine), rel=1e-8)
    assert ours.angle == pytest.approx(math.sqrt(2 * eps / 41.86), rel=2e-2)


@given(eps=st.floats(1e-5, 0.3), mu=st.floats(0, 0.99))
def test_muon_is_a_filter_with_an_adjusted_rate(eps, mu):
    """gain scales the norm and leaves the angle; the law follows from filter and orthogonalisation, summed by hand."""
    rule, update = Muon(0.1, eps / 0.1, momentum=mu), orthogonal_update(64, 16)
    k = np.arange(3000)
    psi = (1 - mu) * mu ** (k + 1)
    psi[0] = 1 - mu**2
    acf = np.array([psi[: psi.size - n] @ psi[n:] for n in range(1, 900)]) / (psi @ psi)
    acf = np.array([update.correlation(rho) for rho in acf])
    tail = acf[-1] * mu * (1 - eps) ** 900 / (1 - mu * (1 - eps))  # only the linear part is left
    s_eps = 1 + 2 * float(acf @ (1 - eps) ** np.arange(1, 900)) + 2 * tail
    ours = rule.equilibrium(shape=(64, 16))
    assert ours.norm**2 == pytest.approx(0.01 * 4 * update.size * s_eps / (eps * (2 - eps)), rel=1e-8)
    assert rule.equilibrium(shape=(16, 64)).norm == pytest.approx(ours.norm / 2, rel=1e-12)
    assert dataclasses.replace(rule, shape=(64, 16)).equilibrium() == ours
    assert rule.equilibrium().angle <= ours.angle * (1 + 1e-12)
    rms = Muon(0.1, eps / 0.1, momentum=mu, adjust_lr_fn="match_rms_adamw")
    assert rms.equilibrium(shape=(16, 64)).norm == pytest.approx(ours.norm / 2 * 0.2 * 8, rel=1e-12)


# --- torch itself -----------------------------------------------------------------------------------------------------
# Norms start 15 % off (Adam: at the prediction, because its second moment needs thousands of steps) and are measured
# after more than five time constants. Standard errors over 16 replicas of 400 entries: 0.05-0.1 % on ||w||^2 (0.2 % for
# Lion), below 0.05 % on the rms angle; the tolerances are four of them or more.

SGD_WALKS = [
    SGD(0.1, 0.05),
    SGD(0.1, 0.01, momentum=0.9),
    SGD(0.1, 0.002, momentum=0.9),
    SGD(0.1, 0.01, momentum=0.9, dampening=0.5),
    SGD(0.1, 0.01, momentum=0.9, nesterov=True),
    SGD(0.1, 0.1, momentum=0.5, nesterov=True),
    SGDW(0.1, 0.05, momentum=0.9),
]


def torch_optimizer(rule):
    if isinstance(rule, SGDW):
        return lambda p: random_walk.SGDW(p, lr=rule.lr, weight_decay=rule.weight_decay, momentum=rule.momentum)
    options = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
    return lambda p: torch.optim.SGD(p, lr=rule.lr, weight_decay=rule.weight_decay, **options)


@pytest.mark.parametrize("rule", SGD_WALKS, ids=repr)
def test_torch_sgd_settles_at_the_equilibrium(rule):
    ours = rule.equilibrium(unit_grad_sq=4.0)
    settle = int(6 * ours.time_constant) + 50
    steps = settle + max(400, int(6 * ours.time_constant))
    run = walk(torch_optimizer(rule), steps, norm=1.15 * ours.norm, unit_grad_sq=4.0)
    assert run.mean_norm_sq(settle) == pytest.approx(ours.norm**2, rel=4e-3)
    assert run.rms_angle(settle) == pytest.approx(ours.angle, rel=2e-3)


def test_torch_ignores_dampening_without_momentum():
    damped, plain = (
        walk(
            lambda p, t=tau: torch.optim.SGD(p, lr=0.1, weight_decay=0.05, dampening=t), 20, norm=1.0, replicas=2, dim=9
        )
        for tau in (0.5, 0.0)
    )
    np.testing.assert_array_equal(damped.norm_sq, plain.norm_sq)
    assert SGD(0.1, 0.05, dampening=0.5).equilibrium(1.0).angle == SGD(0.1, 0.05).equilibrium(1.0).angle
    assert SGD(0.1, 0.05, dampening=0.5).equilibrium(1.0).norm == SGD(0.1, 0.05).equilibrium(1.0).norm


@pytest.mark.parametrize("phi", [0.4, -0.3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_torch_sgd_with_correlated_gradients(nesterov, phi):
    """AR(1) gradients: L and the angle with the overlap C = E<v, g> ||w||^2 counted in."""
    a, lr, wd = 0.9, 0.1, 0.01
    rule = SGD(lr, wd, momentum=a, nesterov=nesterov)
    start = rule.equilibrium(unit_grad_sq=1.0).norm * ((1 + a * phi) / (1 - a * phi)) ** 0.25
    run = walk(torch_optimizer(rule), 900, norm=start, correlation=phi, replicas=24)
    n, c = run.grad_sq[200:].mean(), run.cross[200:].mean()
    weight = 2 * a**2 * (1 + a) / (1 + a + a * lr * wd * (1 + 2 * a)) if nesterov else 2 * a
    ours = rule.equilibrium(unit_grad_sq=n + weight * c, correlation=c / n)
    assert abs(weight * c / n) > 0.2  # without C the norm would be off by a tenth or more
    assert run.mean_norm_sq(200) == pytest.approx(ours.norm**2, rel=2e-3)
    assert run.rms_angle(200) == pytest.approx(ours.angle, rel=1e-3)


@pytest.mark.slow
def test_torch_adamw_settles_at_the_equilibrium():
    rule = AdamW(0.01, 0.1)
    ours = rule.equilibrium(dim=400)
    second = 1 / (400 * ours.norm**2)

    def make(params):
        return random_walk.settled_adam(torch.optim.AdamW(params, lr=0.01, weight_decay=0.1), second)

    run = walk(make, 4000, norm=ours.norm)
    assert run.mean_norm_sq(2000) == pytest.approx(ours.norm**2, rel=4e-3)
    assert run.rms_angle(2000) == pytest.approx(ours.angle, rel=2e-3)


@pytest.mark.slow
def test_torch_adam_with_l2_settles_at_the_equilibrium():
    rule = AdamL2(2e-3, 0.02)
    ours = rule.equilibrium(unit_grad_sq=1.0, dim=400)

    def make(params):
        optimizer = torch.optim.Adam(params, lr=2e-3, weight_decay=0.02)
        return random_walk.settled_adam(optimizer, 1 / (400 * ours.norm**2))

    run = walk(make, 3500, norm=ours.norm)
    assert run.mean_norm_sq(2000) == pytest.approx(ours.norm**2, rel=4e-3)
    assert run.rms_angle(2000) == pytest.approx(ours.angle, rel=2e-3)


@pytest.mark.slow
def test_torch_adam_with_l2_on_unequal_coordinates():
    """Gradient scales over a factor 100; the weights start as they settle, coordinate by coordinate.

    A coordinate of scale c settles at w_i^2 proportional to c, but takes a time proportional to c to get there.
    """
    dim = 300
    scales = np.geomspace(0.1, 10, dim)  # standard deviations
    share = scales.sum() ** 2 / (dim * (scales**2).sum())
    rule = AdamL2(2e-3, 0.02)
    ours = rule.equilibrium(unit_grad_sq=1.0, dim=dim, homogeneity=share)
    second = scales**2 / np.mean(scales**2) / (dim * ours.norm**2)

    def make(params):
        return random_walk.settled_adam(torch.optim.Adam(params, lr=2e-3, weight_decay=0.02), second)

    run = walk(make, 4000, norm=ours.norm, dim=dim, scales=scales, spread=np.sqrt(scales))
    equal = rule.equilibrium(unit_grad_sq=1.0, dim=dim)
    assert run.grad_sq[2000:].mean() == pytest.approx(1.0, rel=0.02)
    # Standard error 0.5 %; what is left of the spread costs a per cent.
    assert run.mean_norm_sq(2000) == pytest.approx(ours.norm**2, rel=0.03)
    assert run.rms_angle(2000) == pytest.approx(ours.angle, rel=0.02)
    assert run.mean_norm_sq(2000) / equal.norm**2 < 0.8  # the form for equal coordinates is far off


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
def test_lion_settles_at_the_equilibrium(betas):
    dim = 400
    rule = Lion(0.01, 0.2, betas=betas)
    ours = rule.equilibrium(dim=dim)
    run = walk(
        lambda p: random_walk.Lion(p, lr=0.01, weight_decay=0.2, betas=betas),
        2200,
        norm=ours.norm,
        replicas=48,
        dim=dim,
    )
    # With few entries ||w||^2 is 1.1/d higher and the angle 0.7/d lower than in the limit.
    assert run.mean_norm_sq(800) == pytest.approx(ours.norm**2 * (1 + 1.1 / dim), rel=6e-3)
    assert run.rms_angle(800) == pytest.approx(ours.angle * (1 - 0.7 / dim), rel=3e-3)


def test_lion_on_few_entries_is_flagged_with_its_size():
    rule = Lion(0.01, 0.2)
    few = {item.name: item for item in rule.equilibrium(dim=20).validity}["many entries"]
    assert few.met is False
    assert few.norm_error == pytest.approx(1.1 / 20 / 2, abs=0.001) and few.angle_error == pytest.approx(-0.7 / 20)
    assert {item.name: item for item in rule.equilibrium(dim=[400, 4000]).validity}["many entries"].met is True


@pytest.mark.parametrize("shape", [(16, 16), (32, 8)])
def test_torch_muon_settles_at_the_equilibrium_of_its_measured_update(shape):
    """Size and memory of the orthogonalised update are measured on the run; norm and angle follow within 2-3 %."""
    lr, wd, mu, count, steps, settle = 0.02, 0.25, 0.8, 4, 1000, 450
    rule = Muon(lr, wd, momentum=mu)
    gain, eps = rule.gain(shape), lr * wd
    guess = rule.equilibrium(shape=shape, update_sq=0.8 * min(shape)).norm
    generator = torch.Generator().manual_seed(11)
    entries = shape[0] * shape[1]
    matrices = [
        torch.nn.Parameter(w.view(shape))
        for w in random_walk.start_weights(count, entries, norm=guess, seed=3).detach()
    ]
    optimizer = torch.optim.Muon(matrices, lr=lr, weight_decay=wd, momentum=mu)
    norm_sq, turned, updates = [], [], []
    for step in range(steps):
        old = torch.stack([w.detach().flatten().clone() for w in matrices])
        noise = torch.randn(count, entries, dtype=torch.float64, generator=generator)
        size = (old * old).sum(1, keepdim=True)
        tangent = (noise - old * ((noise * old).sum(1, keepdim=True) / size)) / size.sqrt()
        for w, g in zip(matrices, tangent, strict=True):
            w.grad = g.view(shape)
        optimizer.step()
        new = torch.stack([w.detach().flatten() for w in matrices])
        if step >= settle:
            norm_sq.append(size[:, 0].mean().item())
            turned.append((random_walk.angles(old, new) ** 2).mean().item())
            updates.append((((1 - eps) * old - new) / (lr * gain)).numpy())
    u = np.array(updates)
    size = float(np.mean(np.sum(u * u, axis=-1)))
    lags = range(1, 40)  # 0.8^40 = 1e-4
    total = 1 + 2 * sum(float(np.mean(np.sum(u[k:] * u[:-k], axis=-1))) for k in lags) / size
    ours = rule.equilibrium(shape=shape, update_sq=size, memory_total=total)
    assert np.mean(norm_sq) == pytest.approx(ours.norm**2, rel=0.03)
    assert math.sqrt(np.mean(turned)) == pytest.approx(ours.angle, rel=0.02)
    assert 0.6 < size / min(shape) < 0.95
    assert total < rule.memory.total()  # orthogonalisation shortens the memory


# --- invariances ------------------------------------------------------------------------------------------------------

lrs, wds, grads = st.floats(1e-3, 1), st.floats(1e-4, 0.1), st.floats(1e-3, 1e3)
momenta = st.floats(0, 0.98)


@given(lr=lrs, wd=wds, a=momenta, unit_grad_sq=grads, k=st.floats(0.1, 10))
def test_scaling_the_weight_is_a_change_of_units(lr, wd, a, unit_grad_sq, k):
    """w -> k w, lr -> k^2 lr, wd -> wd / k^2 leaves SGD as it is; Adam and Lion want lr -> k lr."""
    pairs = [
        (SGD(lr, wd, momentum=a), SGD(lr * k**2, wd / k**2, momentum=a)),
        (SGDW(lr, wd, momentum=a), SGDW(lr * k**2, wd / k**2, momentum=a)),
        (AdamW(lr, wd, betas=(a, 0.99)), AdamW(lr * k, wd / k, betas=(a, 0.99))),
        (Lion(lr, wd, betas=(a, 0.9)), Lion(lr * k, wd / k, betas=(a, 0.9))),
    ]
    if a > 0:
        pairs.append((SGD(lr, wd, momentum=a, nesterov=True), SGD(lr * k**2, wd / k**2, momentum=a, nesterov=True)))
    for rule, scaled in pairs:
        before = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=30)
        after = scaled.equilibrium(unit_grad_sq=unit_grad_sq, dim=30)
        assert after.norm == pytest.approx(k * before.norm, rel=1e-10)
        assert after.angle == pytest.approx(before.angle, rel=1e-10)
        assert after.rate == pytest.approx(before.rate, rel=1e-7)


@given(lr=st.floats(1e-4, 1e-2), wd=st.floats(1e-4, 1e-2), unit_grad_sq=grads, k=st.floats(0.1, 10))
def test_scaling_the_weight_under_adam_with_l2(lr, wd, unit_grad_sq, k):
    before = AdamL2(lr, wd).equilibrium(unit_grad_sq=unit_grad_sq, dim=50)
    after = AdamL2(lr * k, wd / k**2).equilibrium(unit_grad_sq=unit_grad_sq, dim=50)
    assert after.norm == pytest.approx(k * before.norm, rel=1e-10)
    assert after.angle == pytest.approx(before.angle, rel=1e-10)


@given(lr=lrs, wd=wds, unit_grad_sq=grads)
def test_momentum_zero_is_plain_sgd(lr, wd, unit_grad_sq):
    plain = SGD(lr, wd).equilibrium(unit_grad_sq)
    for rule in (
        SGD(lr, wd, momentum=1e-12),
        SGD(lr, wd, momentum=1e-12, nesterov=True),
        SGDW(lr, wd),
        SGDW(lr, wd, momentum=1e-12),
    ):
        ours = rule.equilibrium(unit_grad_sq=unit_grad_sq)
        assert ours.norm == pytest.approx(plain.norm, rel=1e-10)
        assert ours.angle == pytest.approx(plain.angle, rel=1e-10)
        assert ours.rate == pytest.approx(plain.rate, rel=1e-9)


@given(lr=lrs, wd=wds, a=momenta, factor=st.floats(1.01, 100))
def test_gradient_and_dimension_scale_the_norm_only(lr, wd, a, factor):
    for rule in (SGD(lr, wd, momentum=a), SGDW(lr, wd, momentum=a)):
        norms = rule.equilibrium([1.0, factor])
        assert norms.norm[1] / norms.norm[0] == pytest.approx(factor**0.25, rel=1e-12)
        assert norms.angle == rule.equilibrium().angle
        assert rule.equilibrium().norm is None
    for rule in (AdamW(lr, wd, betas=(a, 0.99)), Lion(lr, wd, betas=(a, 0.9))):
        norms = rule.equilibrium(dim=[1.0, factor])
        assert norms.norm[1] / norms.norm[0] == pytest.approx(factor**0.5, rel=1e-12)
        assert norms.angle == rule.equilibrium().angle


@given(lr=st.floats(1e-3, 0.5), wd=st.floats(1e-4, 0.5), a=momenta, factor=st.floats(1.01, 1.9))
def test_angle_grows_with_lr_times_wd(lr, wd, a, factor):
    rules = [SGD(lr, wd, momentum=a), SGDW(lr, wd, momentum=a), AdamW(lr, wd, betas=(a, 0.99)), Lion(lr, wd)]
    more = [SGD(lr * factor, wd, momentum=a), SGDW(lr, wd * factor, momentum=a)]
    more += [AdamW(lr * factor, wd, betas=(a, 0.99)), Lion(lr, wd * factor)]
    for rule, other in zip(rules, more, strict=True):
        assert other.equilibrium().angle > rule.equilibrium().angle


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        (SGD(0.1), ["weight_decay=0", "weight_decay > 0"]),
        (SGD(0.0, 0.1), ["lr=0", "lr > 0"]),
        (SGD(10.0, 0.5, momentum=0.9), ["lr*weight_decay=5", "< 3.8"]),
        (SGD(1.0, 1.5, momentum=0.5), ["1.5", "1 + momentum"]),
        (SGD(10.0, 0.2, momentum=0.9, nesterov=True), ["lr*weight_decay=2", "< 1.35714"]),
        (SGDW(1.0, 1.0), ["lr*weight_decay=1", "< 1"]),
        (AdamW(10.0, 0.1), ["lr*weight_decay=1", "< 1"]),
        (AdamW(0.1, 0.0), ["weight_decay=0"]),
        (Lion(0.0, 0.1), ["lr=0"]),
        (Lion(2.0, 1.0), ["lr*weight_decay=2", "< 1"]),
        (Muon(0.1, 0.0), ["weight_decay=0"]),
    ],
    ids=repr,
)
def test_without_an_equilibrium_the_error_names_value_and_range(rule, texts):
    with pytest.raises(EquilibriaError) as caught:
        rule.equilibrium()
    for text in texts:
        assert text in str(caught.value)


def test_adam_l2_without_the_gradient_scale_raises_with_the_reason():
    with pytest.raises(EquilibriaError, match="unit_grad_sq=None, dim=10"):
        AdamL2(0.1, 0.1).equilibrium(dim=10)
    with pytest.raises(EquilibriaError, match="weight_decay=0"):
        AdamL2(0.1).equilibrium(unit_grad_sq=1.0, dim=10)


@pytest.mark.parametrize("kind", [SGD, SGDW, AdamW, AdamL2, Lion, Muon])
@pytest.mark.parametrize(("lr", "wd"), [(1e-320, 0.1), (0.1, 1e-320), (1e-160, 1.0), (1e-100, 1e-100)])
def test_settings_that_underflow_raise_with_the_range(kind, lr, wd):
    """Not by an infinite norm or time constant, nor by a singular matrix."""
    size = {} if kind is Muon else {"unit_grad_sq": 1.0, "dim": 10}
    for call in (
        lambda: kind(lr, wd).equilibrium(**size),
        lambda: settled(kind(lr, wd)),
        lambda: targets(kind(lr, wd), lr),
    ):
        with pytest.raises(EquilibriaError, match=r"got .*; expected .*1e-150"):
            call()


@pytest.mark.parametrize("kind", [SGD, SGDW, AdamW, Lion, Muon])
@pytest.mark.parametrize(("lr", "wd"), [(1e-149, 0.5), (0.5, 1e-149), (1e-70, 1e-70)])
def test_the_smallest_settings_have_an_equilibrium(kind, lr, wd):
    result = kind(lr, wd).equilibrium()
    assert 0 < result.angle < 1e-60 and 1e100 < result.time_constant < math.inf
    state = settled(kind(lr, wd))
    assert np.isfinite(state.norm_sq) and state.norm_sq > 0
    assert float(targets(kind(lr, wd), lr).norm_sq) == pytest.approx(float(state.norm_sq), rel=1e-9)


@pytest.mark.parametrize("bad", ["0.1", ["0.1"], np.array(["1", 2], dtype=object), b"1", 1j, None])
def test_text_is_not_a_number(bad):
    with pytest.raises(EquilibriaError, match="dim"):
        Lion(0.1, 0.1).equilibrium(dim=bad if bad is not None else [None])
    with pytest.raises(EquilibriaError, match="unit_grad_sq"):
        SGD(0.1, 0.1).equilibrium(bad if bad is not None else [None])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "ten", [1.0, -1.0]])
def test_bad_gradient_or_dimension(bad):
    with pytest.raises(EquilibriaError, match="unit_grad_sq"):
        SGD(0.1, 0.1).equilibrium(bad)
    with pytest.raises(EquilibriaError, match="dim"):
        AdamW(0.1, 0.1).equilibrium(dim=bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "x", -5.0])
def test_bad_correlation(bad):
    with pytest.raises(EquilibriaError, match="correlation"):
        SGD(0.1, 0.1, momentum=0.9, nesterov=True).equilibrium(correlation=bad)


# ---- assumptions


def the(equilibrium, name):
    (actual,) = [item for item in equilibrium.validity if item.name == name]
    return actual


@pytest.mark.parametrize(
    "equilibrium",
    [
        SGD(0.1, 5e-4).equilibrium(),
        SGD(0.1, 5e-4, momentum=0.9, nesterov=True).equilibrium(),
        SGDW(0.1, 5e-4, momentum=0.9).equilibrium(),
        AdamW(1e-3, 0.1).equilibrium(),
        AdamL2(1e-3, 1e-3).equilibrium(unit_grad_sq=1.0, dim=100),
        Lion(1e-4, 1.0).equilibrium(),
        Muon(0.02, 0.1).equilibrium(),
    ],
)
def test_every_law_lists_the_assumptions_that_need_a_measurement(equilibrium):
    assert the(equilibrium, "scale-invariant weight").met is None
    stationary = the(equilibrium, "stationary unit gradient")
    assert stationary.met is None and f"{3 * equilibrium.time_constant:,.0f} steps" in stationary.detail


@pytest.mark.parametrize(("share", "met"), [(0.99, True), (1.01, False)])
def test_oscillation_is_decided_at_the_threshold(share, met):
    rule = SGD(1.0, share * oscillation_threshold(0.9), momentum=0.9)
    assert the(rule.equilibrium(), "no oscillation near equilibrium").met is met
    assert rule.equilibrium().monotone is met


@pytest.mark.parametrize(("beta2", "met"), [(0.95, False), (0.989, False), (0.99, True), (0.999, True)])
def test_adamw_needs_a_long_average(beta2, met):
    averages = "second moment averages over many steps"
    assert the(AdamW(1e-3, 0.1, betas=(0.9, beta2)).equilibrium(), averages).met is met
    for beta1 in (0.0, 0.5, 0.9, 0.99, 0.999):
        error = the(AdamW(1e-3, 0.1, betas=(beta1, beta2)).equilibrium(), averages).norm_error
        assert abs(error) < 0.005 or not met


def adamw_norm_sq_shift(betas, *, entries=3000, eps=2e-3):
    """||w||^2 of AdamW over that with the second moment held at its mean, the same gradients; entries are independent.

    The common noise cancels: the standard error is some 0.3 % for 3000 entries over 8 time constants.
    """
    rng = np.random.default_rng(3)
    b1, b2 = betas
    m, own, fixed = np.zeros((3, entries))
    v, sums = np.ones(entries), np.zeros(2)
    steps = int(5 / eps)
    for t in range(steps):
        g = rng.standard_normal(entries)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        own = (1 - eps) * own - m / np.sqrt(v)
        fixed = (1 - eps) * fixed - m
        if t > 1 / eps:
            sums += own @ own, fixed @ fixed
    return sums[0] / sums[1] - 1


@pytest.mark.parametrize(
    ("betas", "measured"),
    [((0.9, 0.99), -0.0077), ((0.9, 0.95), -0.02), ((0.5, 0.95), -0.041), ((0.5, 0.9), -0.068), ((0.9, 0.5), 0.37)],
)
def test_adamw_with_a_short_average_is_off_by_the_stated_error(betas, measured):
    """Size and sign against a simulation, and against one with torch (measured); first order in 1 - b2, as it says."""
    simulated = adamw_norm_sq_shift(betas)
    assert simulated == pytest.approx(measured, abs=0.015 if measured < 0.1 else 0.03)
    actual = the(AdamW(1e-3, 0.1, betas=betas).equilibrium(), "second moment averages over many steps")
    norm_sq_error = (1 + actual.norm_error) ** 2 - 1
    assert norm_sq_error == pytest.approx(measured, rel=0.2)
    assert norm_sq_error == pytest.approx(simulated, rel=0.2, abs=0.01)
    more = "higher" if measured > 0 else "lower"
    assert f"the norm is {more} by some {100 * abs(actual.norm_error):.2g} %" in actual.detail


@pytest.mark.parametrize(("eps", "met"), [(4e-4, True), (6e-4, False)])
def test_lion_needs_a_memory_shorter_than_its_time_constant(eps, met):
    """2 eps / (1 - b2) < 0.1, at b2 = 0.99 that is eps < 5e-4."""
    actual = the(Lion(1.0, eps).equilibrium(), "memory shorter than the time constant")
    assert actual.met is met and f"= {2 * eps / 0.01:.2g} must be small" in actual.detail


@pytest.mark.parametrize(("wd", "met"), [(1e-2, True), (1.0, False)])
def test_adam_with_l2_needs_a_decay_small_relative_to_the_gradient(wd, met):
    result = AdamL2(1e-3, wd).equilibrium(unit_grad_sq=1.0, dim=1000)
    ratio = wd * float(result.norm) ** 2  # wd ||w||^2 / sqrt(L)
    actual = the(result, "decay small relative to the gradient")
    assert actual.met is met is (ratio < 0.05)
    assert actual.angle_error == actual.norm_error == pytest.approx(ratio**2)


def test_muon_needs_the_shape_of_its_matrix():
    without, square = Muon(0.02, 0.1).equilibrium(), Muon(0.02, 0.1).equilibrium(shape=(64, 64))
    unknown = the(without, "known shape of the matrix")
    assert unknown.met is False and the(square, "known shape of the matrix").met is True
    assert square.angle / without.angle - 1 == pytest.approx(unknown.angle_error, abs=0.05)
    measured = Muon(0.02, 0.1).equilibrium(shape=(64, 64), update_sq=48.0, memory_total=24.0)
    assert measured.angle / without.angle == pytest.approx(math.sqrt(Muon(0.02, 0.1).memory.total() / 24), rel=0.05)


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (128, 32), (48, 48)])
@pytest.mark.slow
def test_muon_settles_at_the_equilibrium_of_its_shape(shape):
    """Norm and angle of a walk with torch's own Newton-Schulz, nothing of it measured: within 3 %."""
    lr, wd, count, settle, steps = 0.02, 0.1, 2, 1500, 3000
    rule = Muon(lr, wd)
    law = rule.equilibrium(shape=shape)
    generator = torch.Generator().manual_seed(21)
    start = random_walk.start_weights(count, shape[0] * shape[1], norm=law.norm, seed=3).detach()
    matrices = [torch.nn.Parameter(w.view(shape)) for w in start]
    optimizer = torch.optim.Muon(matrices, lr=lr, weight_decay=wd)
    norm_sq, turned = [], []
    for step in range(settle + steps):
        old = torch.stack([w.detach().flatten() for w in matrices])
        size = (old**2).sum(1, keepdim=True)
        noise = torch.randn(old.shape, generator=generator, dtype=old.dtype)
        tangent = (noise - (noise * old).sum(1, keepdim=True) / size * old) / size.sqrt()
        for w, g in zip(matrices, tangent, strict=True):
            w.grad = g.view(shape)
        optimizer.step()
        if step >= settle:
            new = torch.stack([w.detach().flatten() for w in matrices])
            norm_sq.append(size.mean().item())
            turned.append((random_walk.angles(old, new) ** 2).mean().item())
    assert math.sqrt(np.mean(norm_sq)) == pytest.approx(law.norm, rel=0.03)
    assert math.sqrt(np.mean(turned)) == pytest.approx(law.angle, rel=0.03)
