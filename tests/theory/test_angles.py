"""Angles over many steps against explicit vectors, and the log-cos balance on a real network with BatchNorm."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, settled
from equilibria.theory.angles import angular_diffusion, linear_scaling_ratio, log_cos_balance, n_step_angles

LR = 0.1


# Vectors -------------------------------------------------------------------------------------------------------------


def filter_power(rule):
    """Mean square of Muon's momentum of unit noise: sum of its squared filter coefficients."""
    mu = rule.momentum
    if not rule.nesterov:
        return (1 - mu) ** 2 * sum(mu ** (2 * k) for k in range(2000))
    return (1 - mu**2) ** 2 + sum(((1 - mu) * mu ** (k + 1)) ** 2 for k in range(1, 2000))


def vector_walk(rule, lags, *, replicas=16, dim=120, steps=6000, seed=0, unit_grad_sq=1.0):
    """Cosines between weights ``lags`` apart, (mean, standard error) over replicas, by driving explicit vectors.

    Gradients are white tangent noise of size sqrt(L) / ||w||. Muon is driven as the linear filter that the law treats.
    """
    rng = np.random.default_rng(seed)
    size = filter_power(rule) if isinstance(rule, Muon) else dim
    norm = math.sqrt(float(settled(rule, unit_grad_sq=unit_grad_sq, dim=size).norm_sq))
    w = rng.normal(size=(replicas, dim))
    w *= norm / np.linalg.norm(w, axis=1, keepdims=True)
    buffer, second = np.zeros_like(w), np.full_like(w, unit_grad_sq / norm**2 / dim)
    lr, wd = rule.lr, rule.weight_decay
    history, sums, counts = [], np.zeros((len(lags), replicas)), 0
    warmup = steps // 3
    for step in range(steps):
        g = rng.normal(size=w.shape)
        norm_sq = np.sum(w * w, axis=1, keepdims=True)
        g -= w * (np.sum(g * w, axis=1, keepdims=True) / norm_sq)
        g *= np.sqrt(unit_grad_sq / ((dim - 1) * norm_sq))
        if isinstance(rule, SGD):
            h = g + wd * w
            buffer = rule.momentum * buffer + (1 - rule.dampening) * h
            w = w - lr * (h + rule.momentum * buffer if rule.nesterov else buffer)
        elif isinstance(rule, SGDW):
            buffer = rule.momentum * buffer + g
            w = (1 - lr * wd) * w - lr * buffer
        elif isinstance(rule, AdamW | AdamL2):
            b1, b2 = rule.betas
            coupled = isinstance(rule, AdamL2)
            h = g + wd * w if coupled else g
            buffer = b1 * buffer + (1 - b1) * h
            second = b2 * second + (1 - b2) * h * h
            w = (1.0 if coupled else 1 - lr * wd) * w - lr * buffer / np.sqrt(second)
        elif isinstance(rule, Lion):
            b1, b2 = rule.betas
            w = (1 - lr * wd) * w - lr * np.sign(b1 * buffer + (1 - b1) * g)
            buffer = b2 * buffer + (1 - b2) * g
        else:
            mu = rule.momentum
            noise = g * np.sqrt(norm_sq)  # the filter sees noise of constant size
            buffer = mu * buffer + (1 - mu) * noise
            w = (1 - lr * wd) * w - lr * ((1 - mu) * noise + mu * buffer if rule.nesterov else buffer)
        history.append(w / np.linalg.norm(w, axis=1, keepdims=True))
        if len(history) > max(lags) + 1:
            history.pop(0)
        if step >= warmup and len(history) > max(lags):
            sums += [np.sum(history[-1] * history[-1 - lag], axis=1) for lag in lags]
            counts += 1
    cosines = sums / counts
    return cosines.mean(axis=1), cosines.std(axis=1, ddof=1) / math.sqrt(replicas)


VECTOR_RULES = [
    SGD(LR, 0.02),
    SGD(LR, 5e-3, momentum=0.9),
    SGD(LR, 0.05, momentum=0.5),
    SGD(LR, 0.05, momentum=0.9, dampening=0.9),
    SGD(LR, 5e-3, momentum=0.9, nesterov=True),
    SGDW(LR, 0.02, momentum=0.9),
    AdamW(LR, 0.02),
    AdamL2(2e-3, 0.5),
    Lion(LR, 0.02),
    Lion(LR, 0.02, betas=(0.95, 0.98)),
    Muon(LR, 0.02, momentum=0.9),
    Muon(LR, 0.02, momentum=0.9, nesterov=False),
]


@pytest.mark.parametrize("rule", VECTOR_RULES, ids=repr)
def test_cosines_of_explicit_vectors(rule):
    """1 - cos at each distance: within 5 standard errors plus the finite-dimension bias, 1/d for Adam and Lion."""
    lags, dim = [1, 4, 16, 64], 120
    extra = {"unit_grad_sq": 1.0, "dim": float(dim)} if isinstance(rule, AdamL2) else {}
    mean, error = vector_walk(rule, lags, dim=dim)
    law = 1 - np.cos(n_step_angles(rule, 64, **extra)[lags])
    bias = 2.0 / dim if isinstance(rule, AdamW | AdamL2 | Lion) else 0.3 / dim
    np.testing.assert_array_less(np.abs(1 - mean - law), 5 * error + bias * law)


@pytest.mark.parametrize(
    ("eps", "momentum", "lags", "law", "monte_carlo"),
    [
        (
            5e-4,
            0.9,
            [1, 5, 20, 100, 391],
            [0.99974, 0.99440, 0.94247, 0.62351, 0.1348],
            [0.99974, 0.99440, 0.94250, 0.62411, 0.1359],
        ),
        (5e-5, 0.9, [391], [0.8256], [0.8273]),
        (1e-3, 0.5, [391], [0.4576], [0.4556]),
    ],
)
def test_cosines_of_pure_noise_as_printed(eps, momentum, lags, law, monte_carlo):
    """The law to its printed digits, the Monte Carlo with 100 entries beside it, and the sum of two powers."""
    cosines = np.cos(n_step_angles(SGD(1.0, eps, momentum=momentum), 391))
    for lag, cosine, sampled in zip(lags, law, monte_carlo, strict=True):
        digits = 5.1e-5 if lag == 391 else 5.1e-6
        assert cosines[lag] == pytest.approx(cosine, abs=digits)
        assert cosines[lag] == pytest.approx(sampled, abs=2.1e-3)
    z1, z2 = sorted(np.roots([1, -(1 + momentum - eps), momentum]), key=lambda z: -abs(z))
    share = ((1 + momentum - eps) / (1 + momentum) - z2) / (z1 - z2)
    n = np.arange(392)
    closed = share * z1**n + (1 - share) * z2**n
    np.testing.assert_allclose(cosines, np.real(closed), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("rule", "printed"),
    [
        (SGD(1.0, 2e-3), [0.007976, 0.031524, 0.12026]),
        (SGD(1.0, 1e-4, momentum=0.9), [7.419e-4, 8.266e-3, 0.05345]),
        (SGD(1.0, 1e-4, momentum=0.9, nesterov=True), [8.038e-4, 8.409e-3, 0.05358]),
        (AdamW(1.0, 1e-3), [7.414e-4, 8.237e-3, 0.05306]),
    ],
)
def test_printed_one_minus_cosine(rule, printed):
    values = 1 - np.cos(n_step_angles(rule, 64)[[4, 16, 64]])
    np.testing.assert_allclose(values, printed, rtol=1.5e-4)


def test_per_epoch_angle_of_the_paper():
    angle = n_step_angles(SGD(0.1, 5e-4, momentum=0.9), 391)[-1]
    assert math.degrees(angle) == pytest.approx(34.35, abs=5e-3)


# Laws ----------------------------------------------------------------------------------------------------------------

ALL_RULES = [
    SGD(LR, 1e-3),
    SGD(LR, 1e-3, momentum=0.9),
    SGD(LR, 1e-3, momentum=0.9, dampening=0.5),
    SGD(LR, 1e-3, momentum=0.9, nesterov=True),
    SGDW(LR, 1e-3, momentum=0.9),
    AdamW(LR, 1e-3),
    AdamL2(0.01, 1e-3),
    Lion(LR, 1e-3),
    Muon(LR, 1e-3),
]


def scale_of(rule):
    return {"unit_grad_sq": 0.3, "dim": 50.0} if isinstance(rule, AdamL2) else {}


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_first_angle_is_the_equilibrium_angle_and_zero_steps_is_zero(rule):
    scale = scale_of(rule)
    angles = n_step_angles(rule, 3, **scale)
    assert angles[0] == 0.0 and angles.shape == (4,)
    assert angles[1] == pytest.approx(rule.equilibrium(**scale).angle, rel=1e-9)
    np.testing.assert_array_equal(n_step_angles(rule, 0, **scale), [0.0])
    np.testing.assert_allclose(n_step_angles(rule, 1, **scale), angles[:2])


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_diffusion_is_the_long_run_slope_of_the_squared_angle(rule):
    """-2 ln cos grows by the diffusion per step once the memory is over; the next order is relative eps/(1-a)^2."""
    scale = scale_of(rule)
    angles = n_step_angles(rule, 4000, **scale)
    log_cos = -2 * np.log(np.cos(angles))
    last = int(np.argmax(angles > 1.2)) or 4000
    slope = (log_cos[last] - log_cos[last // 2]) / (last - last // 2)
    assert slope == pytest.approx(angular_diffusion(rule, **scale), rel=0.015)


def test_first_order_formula_of_heavy_ball():
    eps, a, n = 1e-7, 0.9, np.arange(0, 400)
    squared = 2 * eps / (1 - a) * (n - 2 * a * (1 - a**n) / (1 - a * a))
    np.testing.assert_allclose(n_step_angles(SGD(1.0, eps, momentum=a), 399) ** 2, squared, rtol=5e-4, atol=1e-18)


@settings(max_examples=20)
@given(eps=st.floats(1e-12, 0.3), n=st.integers(1, 50))
def test_plain_sgd_is_a_power_even_at_tiny_angles(eps, n):
    one_minus = -math.expm1(n * math.log1p(-eps))
    assert n_step_angles(SGD(1.0, eps), n)[-1] == pytest.approx(2 * math.asin(math.sqrt(one_minus / 2)), rel=1e-9)


@settings(max_examples=20)
@given(
    rule=st.sampled_from(ALL_RULES),
    k=st.floats(1e-2, 1e2),
)
def test_only_the_product_of_lr_and_decay_counts(rule, k):
    if isinstance(rule, AdamL2):
        return
    slid = type(rule)(
        **{name: getattr(rule, name) for name in rule.__dataclass_fields__ if name not in ("lr", "weight_decay", "_")},
        lr=rule.lr * k,
        weight_decay=rule.weight_decay / k,
    )
    np.testing.assert_allclose(n_step_angles(slid, 30), n_step_angles(rule, 30), rtol=1e-9)


def test_linear_scaling_ratios_as_printed():
    plain, heavy = SGD(1.0, 1e-4), SGD(1.0, 1e-4, momentum=0.9)
    assert [round(linear_scaling_ratio(plain, n), 3) for n in (4, 16)] == [1.0, 1.0]
    assert [round(linear_scaling_ratio(heavy, n), 3) for n in (4, 16)] == [1.877, 3.135]
    assert linear_scaling_ratio(heavy, 1) == pytest.approx(1, rel=1e-9)
    assert linear_scaling_ratio(SGD(1.0, 1e-8, momentum=0.9), 20_000) == pytest.approx(math.sqrt(19), rel=2e-3)
    assert math.sqrt(19) == pytest.approx(4.36, abs=5e-3)


# The log-cos balance -------------------------------------------------------------------------------------------------


def measured_angle(before, after):
    """From the part of ``after`` orthogonal to ``before``: no digits are lost at small angles."""
    before, after = before.flatten(), after.flatten()
    along = (before @ after) / before.norm()
    across = (after - before * (before @ after) / (before @ before)).norm()
    return math.atan2(float(across), float(along))


def batchnorm_run(steps, lr, wd, *, peak_noise=0.0, momentum=0.0):
    """A BatchNorm network trained by torch.optim.SGD with a cosine lr: per tensor, angles and squared norms."""
    torch.manual_seed(0)
    widths = [10, 16, 16]
    layers = []
    for a, b in pairwise(widths):
        layers += [torch.nn.Linear(a, b, bias=False), torch.nn.BatchNorm1d(b, eps=1e-30), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 5)).double()
    invariant = [net[0].weight, net[3].weight]
    optimizer = torch.optim.SGD(invariant, lr=lr, weight_decay=wd, momentum=momentum)
    data = torch.randn(20, 32, 10, dtype=torch.float64)
    labels = torch.randint(0, 5, (20, 32))
    lrs = [lr * (1 + math.cos(math.pi * t / steps)) / 2 for t in range(steps)]
    angles, norms = [[], []], [[float((w.detach() ** 2).sum())] for w in invariant]
    for t, eta in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = eta
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(data[t % 20]), labels[t % 20]).backward()
        if peak_noise:
            for w in invariant:
                noise = torch.randn_like(w) * peak_noise * math.exp(3 * math.sin(t))
                w.grad = noise - w.detach() * ((noise * w.detach()).sum() / (w.detach() ** 2).sum())
        old = [w.detach().clone() for w in invariant]
        optimizer.step()
        for i, w in enumerate(invariant):
            angles[i].append(measured_angle(old[i], w.detach()))
            norms[i].append(float((w.detach() ** 2).sum()))
    return lrs, angles, norms


@pytest.mark.parametrize("noise", [0.0, 0.05], ids=["real gradients", "random tangent gradients of wild size"])
def test_log_cos_balance_is_exact_on_a_real_network(noise):
    lrs, angles, norms = batchnorm_run(400, 0.2, 0.02, peak_noise=noise)
    for angle, norm_sq in zip(angles, norms, strict=True):
        balance = log_cos_balance(angle, lrs, weight_decay=0.02, norm_sq=norm_sq)
        assert balance.turned > 0.1
        assert abs(balance.residual) < 1e-12 * max(1.0, balance.turned)
        assert balance.turned == pytest.approx(-math.fsum(math.log(math.cos(a)) for a in angle), rel=1e-12)
        assert balance.decayed == pytest.approx(-math.fsum(math.log1p(-0.02 * eta) for eta in lrs), rel=1e-12)
        assert balance.grown == pytest.approx(0.5 * math.log(norm_sq[-1] / norm_sq[0]), rel=1e-12)


def test_log_cos_balance_notices_momentum():
    """It is a self-check of plain SGD: with momentum it must not close."""
    lrs, angles, norms = batchnorm_run(200, 0.2, 0.02, momentum=0.9)
    balance = log_cos_balance(angles[0], lrs, weight_decay=0.02, norm_sq=norms[0])
    assert abs(balance.residual) > 1e-3


def test_expected_rms_angle_is_the_measured_one_when_all_steps_are_alike():
    """Equal angles: exactly that angle; and it corrects a drifting norm, where sqrt(2 eps) is off."""
    eps, angle, steps = 0.01, 0.2, 30
    growth = ((1 - eps) / math.cos(angle)) ** (2 * steps)
    balance = log_cos_balance(np.full(steps, angle), 0.1, weight_decay=0.1, norm_sq=[1.0, growth])
    assert balance.expected_rms_angle == pytest.approx(angle, rel=1e-12)
    assert abs(math.sqrt(2 * eps) / angle - 1) > 0.2
    assert abs(balance.residual) < 1e-13
    settled_down = log_cos_balance(np.full(steps, math.acos(1 - eps)), 0.1, weight_decay=0.1, norm_sq=[4.0, 4.0])
    assert abs(settled_down.residual) < 1e-13
    assert settled_down.expected_rms_angle == pytest.approx(math.acos(1 - eps))


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_log_cos_balance_closes_on_any_gradients_and_any_schedule(seed, steps):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=7)
    lrs, wds = rng.uniform(0, 1, steps), rng.uniform(0, 0.9, steps)
    angles, norms = [], [w @ w]
    for lr, wd in zip(lrs, wds, strict=True):
        g = rng.normal(size=7) * 10 ** rng.uniform(-3, 1)
        g -= w * (g @ w) / (w @ w)
        after = w - lr * (g + wd * w)
        across = after - w * (after @ w) / (w @ w)
        angles.append(math.atan2(np.linalg.norm(across), after @ w / np.linalg.norm(w)))
        w = after
        norms.append(w @ w)
    balance = log_cos_balance(angles, lrs, weight_decay=wds, norm_sq=norms)
    assert abs(balance.residual) < 1e-9 * max(1.0, balance.turned)


@pytest.mark.parametrize(
    "call",
    [
        lambda: n_step_angles(SGD(0.1, 0.0), 5),
        lambda: n_step_angles(SGDW(0.1, 0.0), 5),
        lambda: n_step_angles(SGD(0.1, 1e-3), -1),
        lambda: n_step_angles(SGD(0.1, 1e-3), 1.5),
        lambda: n_step_angles(AdamL2(0.1, 1e-3), 5),
        lambda: angular_diffusion(AdamL2(0.1, 1e-3)),
        lambda: linear_scaling_ratio(SGD(0.1, 1e-3), 0),
        lambda: linear_scaling_ratio(AdamL2(0.1, 1e-3), 4),
        lambda: linear_scaling_ratio(Lion(0.1, 1.0), 11),
        lambda: log_cos_balance([], 0.1, weight_decay=0.1, norm_sq=[1, 1]),
        lambda: log_cos_balance(0.1, 0.1, weight_decay=0.1, norm_sq=[1, 1]),
        lambda: log_cos_balance([math.nan], 0.1, weight_decay=0.1, norm_sq=[1, 1]),
        lambda: log_cos_balance([0.1], 1.0, weight_decay=1.0, norm_sq=[1, 1]),
        lambda: log_cos_balance([0.1], [0.1, 0.2], weight_decay=0.1, norm_sq=[1, 1]),
        lambda: log_cos_balance([0.1], 0.1, weight_decay=0.1, norm_sq=1.0),
        lambda: log_cos_balance([0.1], 0.1, weight_decay=0.1, norm_sq=[0.0, 1.0]),
        lambda: log_cos_balance(["a"], 0.1, weight_decay=0.1, norm_sq=[1.0, 1.0]),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    "call", [lambda: n_step_angles(None, 3), lambda: angular_diffusion("sgd"), lambda: linear_scaling_ratio(None, 2)]
)
def test_a_non_rule_raises(call):
    with pytest.raises(EquilibriaError, match=r"got rule=.*; expected one of: SGD"):
        call()


def test_log_cos_balance_of_several_windows_is_that_of_each():
    rng = np.random.default_rng(0)
    angles, lrs, norms = rng.uniform(0, 0.1, (30, 2)), rng.uniform(0, 0.1, (30, 2)), rng.uniform(1, 2, (2, 2))
    together = log_cos_balance(angles, lrs, weight_decay=0.02, norm_sq=norms)
    for window in range(2):
        alone = log_cos_balance(angles[:, window], lrs[:, window], weight_decay=0.02, norm_sq=norms[:, window])
        for name in ("turned", "decayed", "grown", "residual", "expected_rms_angle"):
            assert getattr(together, name)[window] == pytest.approx(getattr(alone, name), rel=1e-12, abs=1e-15)
    with pytest.raises(EquilibriaError, match="both ends"):
        log_cos_balance(angles, lrs, weight_decay=0.02, norm_sq=[1.0, 2.0])
