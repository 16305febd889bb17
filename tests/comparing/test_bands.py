"""Bands from earlier runs: false alarms as often as promised, planted departures found, limits by slow formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equilibria.comparing._bands import CHANCE, FLOOR, _inverse_trigamma, _prior, departures, unusual_count


def nights(generator, count, *, shape=(3, 4, 12), shared=0.02, alone=0.03):
    """Logarithms of numbers whose runs share an offset for all layers, with a scatter of each layer's own."""
    scatter = alone * np.sqrt(4 / generator.chisquare(4, shape))  # layers scatter unequally
    common = shared * generator.standard_normal((count, *shape[:-1], 1))
    return common + scatter * generator.standard_normal((count, *shape))


@pytest.mark.parametrize("earlier", [3, 5, 10, 20])
def test_runs_like_the_others_are_rarely_out_of_their_band(earlier):
    generator, trials = np.random.default_rng(earlier), 500
    out = 0
    for _ in range(trials):
        runs = nights(generator, earlier + 1)
        result = departures(runs[-1], runs[:-1])
        out += (np.abs(result.common) > result.common_limit).any() or (
            np.abs(result.single) > result.single_limit
        ).any()
    # 500 runs at a chance of 0.001: more than 5 alarms have a probability of 1.4e-5.
    assert out <= 5


def test_a_planted_shift_of_all_layers_and_of_one_are_told_apart():
    generator = np.random.default_rng(7)
    runs = nights(generator, 13)
    runs[-1, 0, 2] += math.log(1.5)
    runs[-1, 2, 1, 5] += math.log(4)
    result = departures(runs[-1], runs[:-1])
    together = np.argwhere(np.abs(result.common) > result.common_limit).tolist()
    single = np.argwhere(np.abs(result.single) > result.single_limit).tolist()
    assert (together, single) == ([[0, 2]], [[2, 1, 5]])


def test_limits_of_equal_scatters_are_those_of_students_t_with_all_degrees_of_freedom():
    """With a prior of many degrees of freedom the limit is the normal quantile times the pooled scatter."""
    generator = np.random.default_rng(3)
    runs = 0.2 * generator.standard_normal((21, 1, 1, 4000))
    result = departures(runs[-1], runs[:-1])
    expected = 0.2 * math.sqrt(1 + 1 / 20) * stats.norm.isf(CHANCE / 4 / 4000)
    assert np.median(result.single_limit) == pytest.approx(expected, rel=0.03)


def test_no_limit_is_tighter_than_the_floor():
    runs = np.zeros((6, 3, 4, 5))
    runs += 1e-6 * np.random.default_rng(0).standard_normal(runs.shape)
    result = departures(runs[-1], runs[:-1])
    assert (result.common_limit == np.log1p(FLOOR)).all()
    assert (result.single_limit == np.log1p(FLOOR)).all()


@settings(max_examples=30, deadline=None)
@given(st.floats(-5, 5), st.integers(3, 8), st.integers(0, 2**32 - 1))
def test_a_common_factor_of_all_runs_changes_nothing(factor, earlier, seed):
    runs = nights(np.random.default_rng(seed), earlier + 1, shape=(2, 2, 6))
    one, other = departures(runs[-1], runs[:-1]), departures(runs[-1] + factor, runs[:-1] + factor)
    for name in ("common", "common_limit", "single", "single_limit"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-6, atol=1e-9)


def test_the_prior_of_the_variances_is_found_again():
    """True variances from a scaled inverse chi squared with 6 degrees of freedom and scale 0.04."""
    generator = np.random.default_rng(11)
    true = 0.04 * 6 / generator.chisquare(6, 20_000)
    variance = true * generator.chisquare(9, 20_000) / 9
    freedom, scale = _prior(variance, 9)
    assert freedom == pytest.approx(6, rel=0.1)  # its standard error here is 0.2
    assert scale == pytest.approx(0.04, rel=0.03)


@given(st.floats(1e-3, 50))
def test_the_inverse_of_trigamma(value):
    from scipy.special import polygamma

    assert float(polygamma(1, _inverse_trigamma(value))) == pytest.approx(value, rel=1e-9)


def test_spikes_are_compared_with_the_predictive_distribution_of_a_poisson_rate():
    """Slow: the Gamma posterior of the rate integrated numerically."""
    earlier = np.array([0.0, 1.0, 0.0, 0.0, 2.0])
    rate = np.linspace(1e-6, 20, 400_001)
    posterior = stats.gamma(earlier.sum() + 0.5, scale=1 / len(earlier)).pdf(rate)
    for count in range(9):
        at_least = np.trapezoid(posterior * stats.poisson.sf(count - 1, rate), rate)
        assert unusual_count(count, earlier) == (at_least < CHANCE)
