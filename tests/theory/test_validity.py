"""Assumptions as data: whether the settings meet them, and how large the stated error is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon
from equilibria.theory.approach import oscillation_threshold


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
    assert stationary.met is None and f"{3 * equilibrium.time_constant:.3g} steps" in stationary.detail


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
        error = the(AdamW(1e-3, 0.1, betas=(beta1, beta2)).equilibrium(), averages).error
        assert error < 0.01 or not met


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
    assert actual.error == pytest.approx(abs(measured), rel=0.2)
    assert actual.error == pytest.approx(abs(simulated), rel=0.2, abs=0.01)
    assert f"||w||^2 is {'higher' if measured > 0 else 'lower'} by some {100 * actual.error:.2g} %" in actual.detail


@pytest.mark.parametrize(("eps", "met"), [(4e-4, True), (6e-4, False)])
def test_lion_needs_a_memory_shorter_than_its_time_constant(eps, met):
    """2 eps / (1 - b2) < 0.1, at b2 = 0.99 that is eps < 5e-4."""
    actual = the(Lion(1.0, eps).equilibrium(), "memory shorter than the time constant")
    assert actual.met is met and actual.error == pytest.approx(eps / 0.01)


@pytest.mark.parametrize(("wd", "met"), [(1e-2, True), (1.0, False)])
def test_adam_with_l2_needs_a_decay_small_relative_to_the_gradient(wd, met):
    result = AdamL2(1e-3, wd).equilibrium(unit_grad_sq=1.0, dim=1000)
    ratio = wd * float(result.norm) ** 2  # wd ||w||^2 / sqrt(L)
    actual = the(result, "decay small relative to the gradient")
    assert actual.met is met is (ratio < 0.05)
    assert actual.error == pytest.approx(ratio**2)


def test_muon_lists_unmeasured_quantities():
    guessed = Muon(0.02, 0.1).equilibrium(shape=(64, 64))
    assert (the(guessed, "measured update size").met, the(guessed, "measured update size").error) == (False, 0.3)
    assert (the(guessed, "measured update memory").met, the(guessed, "measured update memory").error) == (False, 0.2)
    measured = Muon(0.02, 0.1).equilibrium(shape=(64, 64), update_sq=48.0, memory_total=24.0)
    assert the(measured, "measured update size").met and the(measured, "measured update memory").met
    assert measured.angle / guessed.angle == pytest.approx(math.sqrt(Muon(0.02, 0.1).memory.total() / 24), rel=0.05)
