"""Adam's update gain kappa and the pull on its norm: found in walks with both planted, and followed by the paths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.helpers.planted_walks import Walk

from equilibria.forecasting import FORECAST, backtest
from equilibria.forecasting._fit import fit
from equilibria.forecasting._layers import read_layers
from equilibria.forecasting._paths import integrate
from equilibria.forecasting._scenario import GroupSchedule
from equilibria.theory import AdamL2, AdamW

B1, B2, WD = 0.9, 0.99, 0.5


def walk(**planted: float) -> Walk:
    return Walk(betas=(B1, B2), dim=400, weight_decay=WD, seed=6, **planted)


def stationary_gain(correlation: float) -> float:
    """mean(m^2) of AR(1) gradients over that of independent ones: (1 + b1 a) / (1 - b1 a)."""
    return (1 + B1 * correlation) / (1 - B1 * correlation)


@pytest.mark.parametrize("correlation", [0.0, 0.2, -0.2])
def test_the_gain_of_correlated_gradients_is_found(correlation):
    fitted = fit(read_layers(walk(correlation=correlation).run(np.full(400, 5e-3))).cohorts[0])
    off = np.log(fitted.gain / stationary_gain(correlation))
    assert np.abs(off / fitted.gain_error).max() < 3.5
    # The prior draws ln kappa by up to 7 % of its distance, 3 % here; the mean of 8 layers scatters by 0.7 %.
    assert abs(off.mean()) < 0.05


def test_a_weight_that_rounding_held_in_place_for_a_while_is_still_forecast():
    cohort = read_layers(walk().run(np.full(200, 5e-3))).cohorts[0]
    moved_sq = cohort.moved_sq.copy()
    moved_sq[120:140] = 0
    fitted = fit(dataclasses.replace(cohort, moved_sq=moved_sq))
    assert np.isfinite(fitted.gain_error).all()
    np.testing.assert_allclose(fitted.gain, np.exp(-0.06), rtol=0.05)  # the blocks disagree: the prior decides


@pytest.mark.parametrize("pull", [0.15, 0.0, -0.15])
def test_a_planted_pull_is_found_within_its_error(pull):
    fitted = fit(read_layers(walk(pull=pull).run(np.full(400, 5e-3))).cohorts[0])
    assert np.abs((fitted.pull - pull) / fitted.pull_error).max() < 3.5
    assert (fitted.pull_error < 0.1).all()


@pytest.mark.parametrize(
    ("planted", "lrs"),
    [({"correlation": -0.15}, np.full(900, 5e-3)), ({"pull": -0.15}, np.where(np.arange(900) < 500, 5e-3, 1e-3))],
    ids=["gain", "pull"],  # the correlation planted stays as it is when lr falls, and the forecast expects it to fade
)
def test_with_gain_or_pull_angle_and_norm_are_forecast(planted, lrs):
    score = backtest(walk(**planted).run(lrs), start=300).scores[FORECAST]
    assert score.angle < 0.04
    assert score.norm < 0.02


def test_a_rescaled_weight_has_the_pull_of_the_prior():
    cohort = read_layers(walk().run(np.full(200, 5e-3))).cohorts[0]
    changed = fit(dataclasses.replace(cohort, changed=np.full_like(cohort.changed, True)))
    assert not changed.pull.any()
    assert (changed.pull_error > fit(cohort).pull_error).all()


@pytest.mark.parametrize(
    "rule", [AdamW(5e-3, WD, betas=(B1, B2)), AdamL2(5e-3, 0.05, betas=(B1, B2))], ids=["adamw", "adam"]
)
def test_the_paths_are_those_of_a_slow_recursion_with_gain_and_pull(rule):
    cohort = dataclasses.replace(read_layers(walk().run(np.full(200, 5e-3))).cohorts[0], rule=rule)
    zero = np.zeros(len(cohort.names))
    fitted = dataclasses.replace(fit(cohort), power=zero, drift=zero, gain=zero + 0.8, pull=zero - 0.1)
    steps, lr = 60, np.full(60, 5e-3)
    course = GroupSchedule(200, lr, np.full(steps, rule.weight_decay), np.ones(steps), 1.0)
    paths = integrate(cohort, fitted, course, shown=np.arange(steps), central=True)
    coupled = isinstance(rule, AdamL2)
    at, level = fitted.replay, np.exp(fitted.level)
    p, q, r, v = at.norm_sq, at.radial, at.buffer_sq, at.second
    gain, speed_sq = 0.8, np.exp(fitted.reference)
    for step in range(steps):
        np.testing.assert_allclose(paths.norm_sq[step, :, 0], p, rtol=1e-12)
        if step and step % 4 == 0:  # L and gain are updated every fourth step
            gain = 1 - 0.2 * np.minimum(speed_sq / np.exp(fitted.reference), 1) ** 0.25
        decay, lost = (rule.weight_decay, 0.0) if coupled else (0.0, lr[step] * rule.weight_decay)
        noise, w_dot_m = level / p, B1 * q + (1 - B1) * decay * p
        r = B1**2 * r + (1 - B1) ** 2 * (gain * noise + decay**2 * p) + 2 * B1 * (1 - B1) * decay * q
        v = B2 * v + (1 - B2) * (noise + decay**2 * p) / cohort.entries
        count = at.steps_done + step + 1
        k = lr[step] / (1 - B1**count) / np.sqrt(v / (1 - B2**count))
        kept = 1 - lost - lr[step] * -0.1
        speed_sq = (lost**2 * p + 2 * lost * k * w_dot_m + k**2 * r) / p
        p, q = kept**2 * p - 2 * kept * k * w_dot_m + k**2 * r, kept * w_dot_m - k * r
