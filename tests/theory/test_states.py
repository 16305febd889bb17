"""Rescaling at a change of settings: the published table, torch itself, and the factors of every rule."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import random_walk
from tests.helpers.random_walk import walk

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, evolve, rescaled, settled
from equilibria.theory.states import rescale_factors

OLD = SGD(0.1, 5e-4, momentum=0.9)  # lr wd = 5e-5 before the change
KS = (2, 10, 100, 0.1)


def states(k):
    """What a person may do at lr -> lr / k, with the first-order factor k^(-1/4): name -> state after it."""
    before = settled(OLD)
    p, q, r = before.norm_sq, before.radial, before.buffer_sq
    f = k**-0.25
    # <w, v> has a tangent part of zero mean: scaling w by f and v by s scales <w, v> by f s.
    across = r - q**2 / p
    return {
        "nothing": before,
        "v untouched": dataclasses.replace(before, norm_sq=p * f**2, radial=q * f),
        "v the wrong way": dataclasses.replace(before, norm_sq=p * f**2, radial=q * f**2, buffer_sq=r * f**2),
        "v = 0": dataclasses.replace(before, norm_sq=p * f**2, radial=0 * q, buffer_sq=0 * r),
        "whole buffer": rescaled(before, f),
        "split": dataclasses.replace(
            before, norm_sq=p * f**2, radial=q * f**2, buffer_sq=across / f**2 + q**2 / p * f**2
        ),
    }


@pytest.mark.parametrize(
    ("choice", "largest"),
    [
        ("nothing", (0.293, 0.684, 0.900, 2.16)),
        ("v untouched", (0.127, 0.332, 0.479, 0.659)),
        ("v the wrong way", (0.229, 0.479, 0.555, 1.88)),
        ("v = 0", (0.564, 0.564, 0.564, 0.564)),
        ("whole buffer", (9.8e-5, 1.1e-4, 4.9e-5, 2.5e-3)),
        ("split", (3.3e-6, 5.9e-6, 6.5e-6, 5.9e-5)),
    ],
)
def test_largest_error_of_the_angle_after_the_change(choice, largest):
    """Momentum 0.9, lr wd = 5e-5 before; k = 2, 10, 100, 0.1. The exact factor leaves a little less."""
    for k, printed in zip(KS, largest, strict=True):
        new = dataclasses.replace(OLD, lr=OLD.lr / k)
        path = evolve(new, 400, start=states(k)[choice])
        error = float(np.max(np.abs(path.angle / new.equilibrium().angle - 1)))
        assert error == pytest.approx(printed, rel=0.03 if printed < 0.01 else 3e-3, abs=0)
        if choice == "whole buffer":
            exact = evolve(new, 400, start=rescaled(settled(OLD), rescale_factors(OLD, new).weight))
            assert np.max(np.abs(exact.angle / new.equilibrium().angle - 1)) < error


@pytest.mark.parametrize(
    ("choice", "steps"),
    [("nothing", 30_439), ("v untouched", 16), ("v the wrong way", 17), ("v = 0", 18), ("whole buffer", 0)],
)
def test_steps_until_the_angle_is_within_one_per_cent(choice, steps):
    new = dataclasses.replace(OLD, lr=OLD.lr / 10)
    path = evolve(new, max(100, 2 * steps), start=states(10)[choice])
    outside = np.flatnonzero(np.abs(path.angle / new.equilibrium().angle - 1) > 0.01)
    assert (outside[-1] + 1 if outside.size else 0) == pytest.approx(steps, rel=2e-3, abs=1)


def test_first_angle_when_only_the_weights_are_rescaled():
    """sqrt(a^2 s^2 k^(-1/2) + 1 - a^2) with the buffer scaled by s: 0.668 at s = 1, k = 10 (torch: 0.677)."""
    new = dataclasses.replace(OLD, lr=OLD.lr / 10)
    first = float(evolve(new, 1, start=states(10)["v untouched"]).angle[0] / new.equilibrium().angle)
    assert first == pytest.approx(math.sqrt(0.81 / math.sqrt(10) + 0.19), rel=2e-3)
    assert first == pytest.approx(0.668, abs=1e-3)


@given(
    k=st.floats(0.05, 50),
    lr=st.floats(1e-3, 0.1),
    wd=st.floats(1e-7, 1e-5),
    a=st.floats(0, 0.9),
)
def test_factors_to_first_order(k, lr, wd, a):
    powers = [
        (SGD(lr, wd, momentum=a), -1 / 4),
        (SGDW(lr, wd, momentum=a), -1 / 4),
        (AdamW(lr, wd, betas=(a, 0.999)), -1 / 2),
        (Lion(lr, wd), -1 / 2),
        (Muon(lr, wd), -1 / 2),
    ]
    if a > 0:
        powers.append((SGD(lr, wd, momentum=a, nesterov=True), -1 / 4))
    for rule, power in powers:
        f = rescale_factors(rule, dataclasses.replace(rule, lr=lr / k))
        assert f.weight == pytest.approx(k**power, rel=5e-3)
        assert f.first_moment == pytest.approx(1 / f.weight, rel=1e-14)
        assert f.second_moment == pytest.approx(1 / f.weight**2, rel=1e-14)
        assert f.running_mean == f.weight
        assert f.running_var == pytest.approx(f.weight**2, rel=1e-14)
    rule = AdamL2(lr, 1e-3 * wd)
    f = rescale_factors(rule, dataclasses.replace(rule, lr=lr / k), unit_grad_sq=1.0, dim=1e4)
    assert f.weight == pytest.approx(k ** (-1 / 3), rel=5e-2)


@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, 0.02, momentum=0.9),
        SGDW(0.1, 0.05),
        AdamW(0.01, 0.5),
        AdamL2(0.01, 0.05),
        Lion(0.01, 0.5),
        Muon(0.01, 0.5, shape=(8, 8)),
    ],
    ids=repr,
)
def test_factor_is_the_ratio_of_the_exact_norms(rule):
    """Any change: lr, decay, or both; back again is the inverse."""
    sizes = {"unit_grad_sq": 2.0, "dim": 60.0}
    for change in (
        {"lr": rule.lr / 5},
        {"weight_decay": rule.weight_decay * 0.3},
        {"lr": rule.lr * 1.5, "weight_decay": 0.1},
    ):
        new = dataclasses.replace(rule, **change)
        f = rescale_factors(rule, new, **sizes)
        if isinstance(rule, Muon):
            norms = [one.equilibrium().norm for one in (rule, new)]
        else:
            norms = [one.equilibrium(**sizes).norm for one in (rule, new)]
        assert f.weight == pytest.approx(norms[1] / norms[0], rel=1e-12)
        assert rescale_factors(new, rule, **sizes).weight == pytest.approx(1 / f.weight, rel=1e-12)
    same = rescale_factors(rule, rule, **sizes)
    assert dataclasses.astuple(same) == (1.0,) * 5


@pytest.mark.parametrize("k", [0.3, 4.0, 10.0])
@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, 0.001),
        SGD(0.1, 5e-4, momentum=0.9),
        SGD(0.1, 5e-4, momentum=0.9, nesterov=True),
        SGDW(0.1, 0.001, momentum=0.9),
        AdamW(0.01, 0.01),
        AdamL2(1e-3, 1e-3),
        Lion(0.001, 0.1),
        Muon(0.001, 0.1),
    ],
    ids=repr,
)
def test_rescaled_start_is_on_target_from_the_first_step(rule, k):
    sizes = {"unit_grad_sq": 2.0, "dim": 60.0}
    new = dataclasses.replace(rule, lr=rule.lr / k)
    r = rescale_factors(rule, new, **sizes).weight
    path = evolve(new, 500, start=rescaled(settled(rule, **sizes), r), **sizes)
    target = settled(new, **sizes)
    assert path.norm_sq[0] == pytest.approx(float(target.norm_sq), rel=1e-12)
    angle = evolve(new, 1, start=target, **sizes).angle[0]
    # What is left is the radial part of the buffer, of relative order lr wd / (1 - memory).
    memory = rule.betas[isinstance(rule, Lion)] if hasattr(rule, "betas") else rule.momentum
    share = rule.decay_share(**sizes) if isinstance(rule, AdamL2) else rule.decay_per_step
    left = share * max(1, 1 / k) / (1 - memory)
    np.testing.assert_allclose(path.angle, angle, rtol=left)
    np.testing.assert_allclose(path.norm_sq, path.norm_sq[0], rtol=2 * left)


@given(k=st.floats(0.1, 10), r=st.floats(0.2, 5))
def test_rescaling_twice_is_rescaling_once(k, r):
    before = settled(AdamW(0.01, 0.3), dim=30.0)
    twice, once = rescaled(rescaled(before, k), r), rescaled(before, k * r)
    for field in dataclasses.fields(before):
        np.testing.assert_allclose(getattr(twice, field.name), getattr(once, field.name), rtol=1e-12)


CHOICES = {
    "none": (False, False, False),
    "weights only": (True, False, False),
    "all three": (True, True, True),
}


@pytest.mark.parametrize(
    ("choice", "printed"),
    [
        ("none", (0.32, 0.32, 0.32, 0.32, 0.32)),
        ("weights only", (1.65, 2.59, 2.87, 2.25, 1.43)),
        ("all three", (1.01, 1.02, 1.01, 1.00, 1.01)),
    ],
)
def test_torch_adamw_when_lr_falls_by_ten(choice, printed):
    """Angle over its new equilibrium at steps 1, 5, 20, 100, 500 after the change."""
    dim, before, steps = 400, 150, 500
    old, new = AdamW(0.01, 0.01), AdamW(0.001, 0.01)
    f = rescale_factors(old, new)
    norm = old.equilibrium(dim=dim).norm
    weight, first, second = CHOICES[choice]

    def make(params):
        optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.01)
        return random_walk.settled_adam(optimizer, 1 / (dim * norm**2))

    def change(step, w, optimizer):
        if step != before:
            return
        optimizer.param_groups[0]["lr"] = 0.001
        with torch.no_grad():
            w.mul_(f.weight if weight else 1.0)
            optimizer.state[w]["exp_avg"].mul_(f.first_moment if first else 1.0)
            optimizer.state[w]["exp_avg_sq"].mul_(f.second_moment if second else 1.0)

    run = walk(make, before + steps, norm=norm, dim=dim, replicas=24, before_step=change)
    star = new.equilibrium().angle
    measured = np.sqrt(np.mean(run.angle[before:] ** 2, axis=1)) / star
    at = np.array([1, 5, 20, 100, 500]) - 1
    # One step of 24 replicas: 0.7 % standard error here and there; the published run had another lr wd.
    np.testing.assert_allclose(measured[at], printed, rtol=0.05)
    start = settled(old, dim=dim)
    r1, r2, r3 = (f.weight if weight else 1, f.first_moment if first else 1, f.second_moment if second else 1)
    state = dataclasses.replace(
        start,
        norm_sq=start.norm_sq * r1**2,
        radial=start.radial * r1 * r2,
        buffer_sq=start.buffer_sq * r2**2,
        second=start.second * r3,
    )
    path = evolve(new, steps, start=state, dim=dim)
    np.testing.assert_allclose(path.angle[at] / star, measured[at], rtol=0.03)


def test_torch_heavy_ball_when_lr_falls_by_ten():
    old, new = SGD(0.1, 0.01, momentum=0.9), SGD(0.01, 0.01, momentum=0.9)
    f = rescale_factors(old, new)
    before = 150
    results = {}
    for with_buffer in (True, False):

        def change(step, w, optimizer, both=with_buffer):
            if step == before:
                optimizer.param_groups[0]["lr"] = 0.01
                with torch.no_grad():
                    w.mul_(f.weight)
                    optimizer.state[w]["momentum_buffer"].mul_(f.first_moment if both else 1.0)

        run = walk(
            lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, momentum=0.9),
            before + 60,
            norm=old.equilibrium(1.0).norm,
            replicas=32,
            before_step=change,
        )
        results[with_buffer] = np.sqrt(np.mean(run.angle[before:] ** 2, axis=1)) / new.equilibrium().angle
    # 0.6 % standard error per step.
    np.testing.assert_allclose(results[True], 1.0, atol=0.03)
    assert results[False][0] == pytest.approx(0.668, abs=0.025)


def test_rescaling_without_an_equilibrium_raises():
    with pytest.raises(EquilibriaError, match="weight_decay=0"):
        rescale_factors(SGD(0.1, 0.1), SGD(0.1))
    with pytest.raises(EquilibriaError, match="lr=0"):
        rescale_factors(Lion(0.1, 0.1), Lion(0.0, 0.1))
    with pytest.raises(EquilibriaError, match="unit_grad_sq"):
        rescale_factors(SGD(0.1, 0.1), SGD(0.2, 0.1), unit_grad_sq=-1.0)
