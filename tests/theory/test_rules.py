"""The rules: accepted settings, error messages, and agreement with torch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import RULES, SGD, SGDW, AdamL2, AdamW, Equilibrium, Lion, Muon, cold_start, evolve
from equilibria.theory.rules import momentum_unit_grad_sq, nesterov_angle_factor

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "0.1", "fast", None, [0.1], (0.1,), {}]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("bad", [*NOT_NUMBERS, -0.1], ids=repr)
def test_bad_lr_and_weight_decay(rule, name, bad):
    with pytest.raises(EquilibriaError, match=f"got {name}=.*expected"):
        rule(**{"lr": 0.1, "weight_decay": 0.1, name: bad})


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, -0.1, 1.0, 1.5], ids=repr)
def test_bad_momentum_and_dampening(bad):
    for rule in (SGD, SGDW, Muon):
        with pytest.raises(EquilibriaError, match=r"got momentum=.*expected"):
            rule(0.1, 0.1, momentum=bad)
    with pytest.raises(EquilibriaError, match=r"got dampening=.*expected"):
        SGD(0.1, 0.1, momentum=0.9, dampening=bad)


@pytest.mark.parametrize("bad", [*NOT_NUMBERS, -0.1, 1.0, 1.5], ids=repr)
def test_bad_betas(bad):
    for rule in (AdamW, AdamL2, Lion):
        for betas in ((bad, 0.9), (0.9, bad)):
            with pytest.raises(EquilibriaError, match=r"beta[12]=.*expected"):
                rule(0.1, 0.1, betas=betas)


@pytest.mark.parametrize("bad", [None, 0.9, "0.9,0.99", (0.9,), (0.9, 0.99, 0.999), ()], ids=repr)
def test_betas_of_the_wrong_kind(bad):
    for rule in (AdamW, AdamL2, Lion):
        with pytest.raises(EquilibriaError, match=r"betas=.*two numbers"):
            rule(0.1, 0.1, betas=bad)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_raises_where_torch_raises(options):
    with pytest.raises(ValueError, match="Nesterov"):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, nesterov=True, **options)
    with pytest.raises(EquilibriaError, match=r"nesterov=True.*momentum > 0 and dampening = 0"):
        SGD(0.1, 0.1, nesterov=True, **options)


def test_everything_after_the_second_argument_is_by_keyword():
    for rule in RULES.values():
        with pytest.raises(TypeError):
            rule(0.1, 0.1, 0.9)


def test_rules_are_frozen_and_comparable():
    rule = SGD(0.1, 5e-4, momentum=0.9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.lr = 0.2
    assert rule == SGD(0.1, 5e-4, momentum=0.9)
    assert hash(rule) == hash(SGD(0.1, 5e-4, momentum=0.9))
    assert dataclasses.replace(rule, lr=0.2) == SGD(0.2, 5e-4, momentum=0.9)


def test_names_of_the_rules():
    assert {"sgd": SGD, "sgdw": SGDW, "adamw": AdamW, "adam": AdamL2, "lion": Lion, "muon": Muon} == RULES


@pytest.mark.parametrize(
    ("rule", "build"),
    [
        (SGD(0.1), torch.optim.SGD),
        (AdamW(0.1), torch.optim.AdamW),
        (AdamL2(0.1), torch.optim.Adam),
        (Muon(0.1), torch.optim.Muon),
    ],
    ids=repr,
)
def test_defaults_are_those_of_torch(rule, build):
    group = build([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1).param_groups[0]
    for field in dataclasses.fields(rule):
        if field.name == "adjust_lr_fn":
            assert group[field.name] in (None, rule.adjust_lr_fn)
        elif field.name not in ("_", "shape"):
            assert getattr(rule, field.name) == group[field.name], field.name


def test_decay_per_step():
    assert SGD(0.1, 0.01).decay_per_step == pytest.approx(1e-3)
    assert SGD(0.1, 0.01, momentum=0.9, dampening=0.4).decay_per_step == pytest.approx(6e-4)
    assert SGD(0.1, 0.01, dampening=0.4).decay_per_step == pytest.approx(1e-3)  # torch ignores it without momentum
    for rule in (SGDW, AdamW, AdamL2, Lion, Muon):
        assert rule(0.1, 0.01).decay_per_step == pytest.approx(1e-3)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 8), (32, 4), (4, 32)])
def test_muon_gain_is_the_factor_torch_applies(adjust, shape):
    """The same gradient with and without adjustment: the ratio of the steps is the gain; the decay is not adjusted."""

    def step(fn, wd):
        w = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
        optimizer = torch.optim.Muon([w], lr=0.1, weight_decay=wd, adjust_lr_fn=fn)
        w.grad = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        return w.detach()

    rule = Muon(0.1, 0.3, adjust_lr_fn=adjust or "original")
    reference = (1 - step("original", 0.0)) / Muon(0.1, 0.3).gain(shape)
    with_decay = (1 - 0.1 * 0.3) - step(adjust, 0.3)
    np.testing.assert_allclose(with_decay / reference, rule.gain(shape), rtol=1e-9)


def test_muon_raises_for_unknown_adjustments_and_shapes():
    with pytest.raises(EquilibriaError, match="original, match_rms_adamw"):
        Muon(0.1, adjust_lr_fn="sqrt")
    for shape in ((3,), (3, 0), (3, 4, 5), (2.5, 2), "ab", (math.nan, 2), 7):
        with pytest.raises(EquilibriaError, match="shape"):
            Muon(0.1).equilibrium(shape=shape)
    for bad in (0.0, -1.0, math.nan, "big"):
        with pytest.raises(EquilibriaError, match="update_sq"):
            Muon(0.1).equilibrium(shape=(4, 4), update_sq=bad)
        with pytest.raises(EquilibriaError, match="total"):
            Muon(0.1).equilibrium(shape=(4, 4), memory_total=bad)


@pytest.mark.parametrize(
    "rule",
    [SGD(0.1, 0.01, momentum=0.9), SGDW(0.1, 0.01), AdamW(0.1), AdamL2(0.1, 0.01), Lion(0.1, 0.01), Muon(0.1)],
    ids=repr,
)
def test_every_equilibrium_states_its_assumptions(rule):
    result = rule.equilibrium(unit_grad_sq=1.0, dim=100)
    assert isinstance(result, Equilibrium)
    names = [item.name for item in result.validity]
    assert {"scale-invariant weight", "stationary unit gradient"} <= set(names)
    assert len(names) == len(set(names))
    assert all(item.detail and item.affects for item in result.validity)
    assert 0 < result.rate < 1
    assert result.time_constant == pytest.approx(-1 / math.log(result.rate), rel=1e-9)
    assert result.relative_update == pytest.approx(2 * math.sin(result.angle / 2), rel=1e-12)


def met(rule, name, **sizes):
    return {item.name: item.met for item in rule.equilibrium(**sizes).validity}[name]


def test_assumptions_are_decided_where_the_inputs_decide_them():
    oscillation = "no oscillation near equilibrium"
    assert met(SGD(0.1, 6e-3, momentum=0.9), oscillation) is True
    assert met(SGD(0.1, 7e-3, momentum=0.9), oscillation) is False
    assert met(AdamW(0.1, betas=(0.9, 0.95)), "second moment averages over many steps") is False
    assert met(AdamW(0.1), "second moment averages over many steps") is True
    assert met(AdamL2(2e-3, 0.02), "decay small relative to the gradient", unit_grad_sq=1.0, dim=400) is True
    assert met(AdamL2(2e-3, 0.5), "decay small relative to the gradient", unit_grad_sq=1.0, dim=4e6) is False
    assert met(Lion(0.001, 0.1), "memory shorter than the time constant") is True
    assert met(Lion(0.01, 0.1), "memory shorter than the time constant") is False
    assert met(Muon(0.1), "known shape of the matrix") is False
    assert met(Muon(0.1), "known shape of the matrix", shape=(4, 4)) is True
    assert met(SGD(1.0, 0.5), "many entries") is None
    assert met(SGD(1.0, 0.5), "many entries", dim=8) is False
    assert met(SGD(1.0, 0.5), "many entries", dim=1000) is True
    assert met(SGD(0.1, 5e-4), "many entries") is True
    digits = "weights of enough digits"
    assert met(SGD(0.1, 5e-4), digits) is True and met(SGD(1e-4, 5e-4), digits) is None
    assert met(AdamW(1e-3, 0.1), digits) is None and met(AdamW(0.1, 0.1), digits) is True
    assert met(AdamW(1e-6, 1e-3), digits) is False


# ---- the unit gradient of each optimizer


unit = st.floats(0.05, 0.95)


def settle_by_hand(lr, wd, a, damp, nesterov, n_unit, c_unit, steps=60_000):
    """Iterate ||w||^2, <w,v>, ||v||^2 with <v,g> = C/P, written out from the definition of the step."""
    p, q, r = 5.0, 0.0, 0.0
    keep = 1 - damp
    for _ in range(steps):
        n, c = n_unit / p, c_unit / p
        h_sq = n + wd * wd * p  # h = g + wd w, <g,w> = 0
        v_h = c + wd * q
        buffer_sq = a * a * r + 2 * a * keep * v_h + keep * keep * h_sq
        w_buffer = a * q + keep * wd * p
        if nesterov:
            h_buffer = a * v_h + h_sq
            step_sq, w_step = h_sq + 2 * a * h_buffer + a * a * buffer_sq, wd * p + a * w_buffer
            buffer_step = h_buffer + a * buffer_sq
        else:
            step_sq, w_step, buffer_step = buffer_sq, w_buffer, buffer_sq
        p, q, r = p - 2 * lr * w_step + lr * lr * step_sq, w_buffer - lr * buffer_step, buffer_sq
    return p


@pytest.mark.parametrize("correlation", [-0.3, 0.4])
@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, 0.02, momentum=0.8),
        SGD(0.1, 0.02, momentum=0.8, dampening=0.4),
        SGD(0.1, 0.02, momentum=0.8, nesterov=True),
    ],
    ids=["heavy ball", "dampening", "nesterov"],
)
def test_the_norm_follows_from_l_alone(rule, correlation):
    unit_grad_sq = momentum_unit_grad_sq(rule, 3.0, buffer_dot_grad=3.0 * correlation)
    want = settle_by_hand(
        rule.lr, rule.weight_decay, rule.momentum, rule.dampening, rule.nesterov, 3.0, 3 * correlation
    )
    assert rule.equilibrium(unit_grad_sq=unit_grad_sq).norm ** 2 == pytest.approx(want, rel=1e-9)


@given(a=unit, rho=st.floats(-0.2, 1.0))
def test_the_transient_of_nesterov_settles_at_the_correlated_equilibrium(a, rho):
    rule = SGD(0.3, 0.1, momentum=a, nesterov=True)
    there = rule.equilibrium(unit_grad_sq=2.0, correlation=rho)
    path = evolve(rule, 4000, start=cold_start(rule, 1.0), unit_grad_sq=2.0, correlation=rho)
    assert path.norm[-1] == pytest.approx(there.norm, rel=1e-6)
    assert path.angle[-1] == pytest.approx(there.angle, rel=1e-6)


def test_rules_without_a_buffer_in_l_use_the_gradient_alone():
    assert momentum_unit_grad_sq(AdamW(1e-3, 0.1), [2.0, 3.0], buffer_dot_grad=1.0).tolist() == [2.0, 3.0]
    assert np.allclose(momentum_unit_grad_sq(SGDW(0.1, 0.1, momentum=0.5), 2.0, buffer_dot_grad=1.0), 3.0)


@given(a=unit, rho=st.floats(-0.3, 2.0))
def test_nesterov_angle_factor_is_that_of_the_exact_equilibrium(a, rho):
    """To first order in lr * wd, which is 1e-9 here; of order lr * wd / (1-a)^2 beside it."""
    rule = SGD(1.0, 1e-9, momentum=a, nesterov=True)
    exact = rule.equilibrium(correlation=rho).angle / rule.equilibrium().angle
    assert float(nesterov_angle_factor(a, correlation=rho)) == pytest.approx(exact, rel=1e-5)
    assert float(nesterov_angle_factor(a, correlation=0.0)) == 1.0


def test_nesterov_angle_factor_is_nan_where_there_is_no_equilibrium():
    """L = N (1 + 2 a^2 rho) must be positive."""
    factors = nesterov_angle_factor(0.9, correlation=[0.1, -0.7, 0.0])
    assert np.isnan(factors).tolist() == [False, True, False]
    with pytest.raises(EquilibriaError, match="correlation"):
        SGD(0.1, 1e-4, momentum=0.9, nesterov=True).equilibrium(correlation=-0.7)


def test_bad_input_is_named():
    with pytest.raises(EquilibriaError, match="grad_sq=-1"):
        momentum_unit_grad_sq(SGD(0.1, 0.1), -1.0, buffer_dot_grad=0.0)
    with pytest.raises(EquilibriaError, match="rule=None"):
        momentum_unit_grad_sq(None, 1.0, buffer_dot_grad=0.0)
