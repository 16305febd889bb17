"""Validity as data: which assumption, whether these settings meet it, how large the error is."""

from __future__ import annotations

import math

import pytest

from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon
from equilibria.theory.approach import oscillation_threshold


def the(equilibrium, name):
    (found,) = [item for item in equilibrium.validity if item.name == name]
    return found


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
def test_every_law_says_what_only_a_measurement_can_tell(equilibrium):
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
    """||w||^2 falls by 1 - b2 at b1 = 0, and by 2 % at betas (.9, .95), as measured with torch."""
    assert the(AdamW(1e-3, 0.1, betas=(0.9, beta2)).equilibrium(), "second moment averages over many steps").met is met
    plain = AdamW(1e-3, 0.1, betas=(0.0, beta2)).equilibrium()
    assert the(plain, "second moment averages over many steps").error == pytest.approx(1 - beta2)
    short = AdamW(1e-3, 0.1, betas=(0.9, 0.95)).equilibrium()
    assert the(short, "second moment averages over many steps").error == pytest.approx(0.02)


@pytest.mark.parametrize(("eps", "met"), [(4e-4, True), (6e-4, False)])
def test_lion_needs_a_memory_shorter_than_its_time_constant(eps, met):
    """2 eps / (1 - b2) < 0.1, at b2 = 0.99 that is eps < 5e-4."""
    found = the(Lion(1.0, eps).equilibrium(), "memory shorter than the time constant")
    assert found.met is met and found.error == pytest.approx(eps / 0.01)


@pytest.mark.parametrize(("wd", "met"), [(1e-2, True), (1.0, False)])
def test_adam_with_l2_needs_a_decay_small_beside_the_gradient(wd, met):
    result = AdamL2(1e-3, wd).equilibrium(unit_grad_sq=1.0, dim=1000)
    ratio = wd * float(result.norm) ** 2  # wd ||w||^2 / sqrt(L)
    found = the(result, "decay small beside the gradient")
    assert found.met is met is (ratio < 0.05)
    assert found.error == pytest.approx(ratio**2)


def test_muon_says_what_was_not_measured():
    guessed = Muon(0.02, 0.1).equilibrium(shape=(64, 64))
    assert (the(guessed, "measured update size").met, the(guessed, "measured update size").error) == (False, 0.3)
    assert (the(guessed, "measured update memory").met, the(guessed, "measured update memory").error) == (False, 0.2)
    measured = Muon(0.02, 0.1).equilibrium(shape=(64, 64), update_sq=48.0, memory_total=24.0)
    assert the(measured, "measured update size").met and the(measured, "measured update memory").met
    assert measured.angle / guessed.angle == pytest.approx(math.sqrt(Muon(0.02, 0.1).memory.total() / 24), rel=0.05)
