"""Experiments on the noisy Rayleigh quotient: averages of hand-made runs, and claims that fail on wrong data."""

from __future__ import annotations

import numpy as np
import pytest

from equilibria.lab.harness import find
from equilibria.lab.papers.nrq import fig2_equilibrium as equilibrium
from equilibria.lab.papers.nrq import fig2_escape as escape
from equilibria.lab.papers.nrq import rayleigh
from equilibria.lab.problems import SimulationRun
from equilibria.theory.rayleigh import NoisyRayleigh


@pytest.fixture
def run():
    """Two trials of three records, ten steps apart."""
    values = {
        "risk": np.array([[0.5, 0.7], [0.2, 0.4], [0.1, 0.5]]),
        "angle": np.array([[1.0, 7.0], [3.0, 4.0], [0.0, 2.0]]),
        "norm": np.array([[1.0, 3.0], [2.0, 2.0], [1.0, 1.0]]),
    }
    return SimulationRun(np.array([0, 10, 20]), values, None)


def test_averages_over_trials(run):
    model = NoisyRayleigh.two_level(2.0, 3, noise=1.0, lr=0.1, weight_decay=0.1)
    means = rayleigh.averages(run, model)
    assert means["risk"].tolist() == pytest.approx([0.6, 0.3, 0.3])
    assert means["risk_error"].tolist() == pytest.approx([0.1, 0.1, 0.2])  # half the difference of two
    assert means["loss"].tolist() == pytest.approx([0.5 + 0.6, 0.5 + 0.3, 0.5 + 0.3])
    assert means["angle"].tolist() == pytest.approx([5.0, np.sqrt(12.5), np.sqrt(2.0)])
    assert means["norm_sq"].tolist() == pytest.approx([5.0, 4.0, 1.0])


def test_windows_have_the_error_of_independent_trials(run):
    means = rayleigh.window(run, 10)
    assert means["risk"].tolist() == pytest.approx([0.3, 0.15])  # trials 0.15 and 0.45
    assert means["angle"][0] == pytest.approx(np.sqrt((4.5 + 10) / 2))
    assert rayleigh.window(run, 0, 10)["risk"][0] == pytest.approx(0.6)
    assert rayleigh.interval([1.0, 0.1]) == pytest.approx((0.6, 1.4))


def test_first_step_below_a_level_lies_between_records():
    assert equilibrium._hit(np.array([0, 10, 20]), np.array([0.9, 0.5, 0.1]), 0.4) == pytest.approx(12.5)


def test_only_steps_after_the_drop_count_for_the_dip():
    config = escape.Config(drop_at=1000, steps=10_000, every=10)
    steps = np.arange(0, 10_000, 10)
    risk = np.where(steps < 1000, 0.01, 0.1)
    risk[(steps >= 3000) & (steps < 4000)] = 0.05
    where, lowest, final = escape._dip(config, steps, risk)
    assert (lowest, final) == pytest.approx((0.05, 0.1))
    assert 3000 < where < 4000


def test_claims_fail_when_the_risk_is_off_by_a_tenth():
    (experiment,) = find(["nrq-equilibrium"])
    config = equilibrium.Config(steps=1000, trials=200, weight_decays=(0.04,))
    good = dict(experiment.run_task(config, 0.04))
    bad = {**good, "late_risk": good["late_risk"] * [1.1, 1], "risk": good["risk"] + 0.1}
    right, wrong = (equilibrium._judge(config, 0.04, line) for line in (good, bad))
    assert "contradicted" not in [claim.verdict for claim in right]
    assert [claim.verdict != "shown" for claim in wrong] == [right[0].verdict != "shown", True, False, True]
