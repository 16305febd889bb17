"""Verdicts over seeds: the interval covers as often as it says, and doubt is told as doubt."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import claim_text
from equilibria.lab.harness.claim import (
    CONTRADICTED,
    NOT_SHOWN,
    SHOWN,
    Claim,
    Source,
    mean_interval,
    not_demanded,
    ratio_interval,
)

SOURCE = Source("smd", "fig. 2")


def test_the_interval_covers_the_mean_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    draws = rng.normal(1.0, 2.0, size=(4000, 3))
    covered = np.mean([low <= 1.0 <= high for _, (low, high) in map(mean_interval, draws)])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=9), st.floats(-10, 10), st.floats(0.1, 10))
def test_the_interval_moves_and_stretches_with_the_values(values, shift, factor):
    mean, (low, high) = mean_interval(values)
    moved, (left, right) = mean_interval(factor * np.array(values) + shift)
    room = 1e-9 * (1 + factor * max(map(abs, values)) + abs(shift))
    assert moved == pytest.approx(factor * mean + shift, abs=room)
    assert (left, right) == pytest.approx((factor * low + shift, factor * high + shift), abs=room)


@pytest.mark.parametrize(
    ("values", "verdict"), [([0.9, 1.0, 1.1], SHOWN), ([-0.5, 1.0, 1.5], NOT_SHOWN), ([-1.1, -1.0, -0.9], CONTRADICTED)]
)
def test_verdicts(values, verdict):
    claim = SOURCE.says("").at_least(0, values)
    assert (claim.verdict, claim.seeds) == (verdict, 3)
    assert SOURCE.says("").at_most(0, [-value for value in values]).verdict == verdict


def test_near_needs_the_whole_interval():
    assert SOURCE.says("").near(1, [0.99, 1.0, 1.01], relative=0.1).verdict == SHOWN
    assert SOURCE.says("").near(1, [0.9, 1.0, 1.1], absolute=0.1).verdict == NOT_SHOWN


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=9), st.floats(0.1, 10))
def test_ratios_are_averaged_in_logarithms(values, factor):
    mean, (low, high) = ratio_interval(values)
    assert math.log(mean) == pytest.approx(np.mean(np.log(values)), abs=1e-9)
    other, (left, right) = ratio_interval([factor / value for value in values])  # of the reciprocal, and in other units
    assert (other, left, right) == pytest.approx((factor / mean, factor / high, factor / low), rel=1e-9)


def test_which_comparisons_take_logarithms():
    values, statement = [1.0, 2.0, 4.0], SOURCE.says("")
    assert statement.near(2, values, relative=0.1).measured == pytest.approx(2)
    assert statement.near(2, values, absolute=0.1).measured == pytest.approx(7 / 3)
    assert statement.at_least(1, values).measured == pytest.approx(7 / 3)
    assert statement.at_least(1, values, ratio=True).measured == pytest.approx(2)
    assert statement.equals(2, values, ratio=True).interval == ratio_interval(values)[1]
    assert statement.at_least(1, values).values == tuple(values)


def test_a_ratio_without_a_logarithm_contradicts():
    claim = SOURCE.says("").near(1, [1.0, -0.1, 1.2], relative=9)
    assert claim.verdict == CONTRADICTED and claim.interval is None


def test_doubt_is_no_failure_and_contradiction_is():
    doubtful = SOURCE.says("").at_least(0, [-0.5, 1.0, 1.5])
    assert not doubtful.fails and claim_text.verdict_text(doubtful) == "not shown at this scale"
    assert SOURCE.says("").at_least(0, [-1.1, -1.0, -0.9]).fails
    exact = SOURCE.says("").at_least(0, 0.5, interval=(-0.1, 1.1))
    assert exact.fails and claim_text.verdict_text(exact) == "not shown"  # there the scatter is ours to reduce
    assert claim_text.verdict_text(not_demanded(doubtful)) == "not shown (not demanded at this scale)"


def test_the_number_of_seeds_is_shown_and_survives_json():
    claim = SOURCE.says("").at_most(0, [-3.0, -2.0, -1.0], unit="points", printed=-1.5)
    assert (
        claim_text.measured_text(claim) == "-2 points [-4.484, 0.4841], 3 seeds"
        and claim_text.printed_text(claim) == "-1.5 points"
    )
    assert Claim.from_dict(json.loads(json.dumps(claim.as_dict()))) == claim


def test_a_training_that_diverged_contradicts():
    claim = SOURCE.says("").at_least(0, [1.0, math.nan, 2.0])
    assert claim.verdict == CONTRADICTED and claim.fails


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [[1.0, 2.0, 3.0]]])
def test_fewer_than_three_seeds_raise(values):
    with pytest.raises(EquilibriaError, match="of at least 3 seeds"):
        mean_interval(values)
