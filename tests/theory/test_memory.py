"""Autocorrelations against brute-force filters, the arcsine sum and simulated signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import Lion, Muon, memory

# 0.9^3000 and 0.9999^(3e5) are far below rounding.
LONG = 4000


def filtered(impulse, lag):
    """Correlation of white noise passed through a finite filter, from the filter itself."""
    return float(impulse[: len(impulse) - lag] @ impulse[lag:] / (impulse @ impulse))


def impulse_of(update, steps=LONG):
    """Response of an update rule u(state, g) to a single unit gradient."""
    state, out = 0.0, []
    for t in range(steps):
        u, state = update(state, 1.0 if t == 0 else 0.0)
        out.append(u)
    return np.array(out)


def lion_impulse(betas):
    """Response of Lion's c = b1 m + (1-b1) g, m the average of earlier gradients, before the sign."""
    b1, b2 = betas
    return impulse_of(lambda m, g: (b1 * m + (1 - b1) * g, b2 * m + (1 - b2) * g))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_ema(beta):
    impulse = impulse_of(lambda m, g: (beta * m + (1 - beta) * g,) * 2)
    ours = memory.ema_memory(beta)
    for lag in (0, 1, 2, 7):
        assert ours.correlation(lag) == pytest.approx(filtered(impulse, lag), abs=1e-14)
    assert ours.total() == pytest.approx(impulse.sum() ** 2 / (impulse @ impulse), rel=1e-11)
    assert ours.total() == pytest.approx((1 + beta) / (1 - beta), rel=1e-13)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.95])
def test_muon(mu, nesterov):
    def update(buffer, g):
        buffer = mu * buffer + (1 - mu) * g
        return (1 - mu) * g + mu * buffer if nesterov else buffer, buffer

    impulse = impulse_of(update)
    ours = memory.muon_memory(mu, nesterov=nesterov)
    for lag in (1, 2, 5, 30):
        assert ours.correlation(lag) == pytest.approx(filtered(impulse, lag), abs=1e-14)
    assert ours.total() == pytest.approx(impulse.sum() ** 2 / (impulse @ impulse), rel=1e-12)


def test_muon_total_as_published():
    mu = 0.95
    closed = 1 / ((1 - mu**2) ** 2 + mu**4 * (1 - mu) / (1 + mu))
    assert memory.muon_memory(mu).total() == pytest.approx(closed, rel=1e-13)
    assert closed == pytest.approx(32.9, abs=0.05)


@pytest.mark.parametrize(
    "betas", [(0.9, 0.99), (0.95, 0.98), (0.9, 0.9), (0.5, 0.9), (0.0, 0.0), (0.0, 0.99), (0.99, 0.99)]
)
def test_lion_is_the_arcsine_of_the_linear_correlation(betas):
    ours = memory.lion_memory(betas)
    impulse = lion_impulse(betas)
    correlations = np.array([2 / math.pi * math.asin(filtered(impulse, lag)) for lag in range(1, 1800)])
    for lag in (1, 2, 10, 100):
        assert ours.correlation(lag) == pytest.approx(correlations[lag - 1], abs=1e-10)
    for eps in (0.0, 1e-3, 0.05):
        slow = 1 + 2 * float(correlations @ (1 - eps) ** np.arange(1, 1800))
        assert ours.total(eps) == pytest.approx(slow, rel=1e-7)


@pytest.mark.parametrize("betas", [(0.999, 0.999), (0.9999, 0.9999), (0.95, 0.9999)])
def test_lion_with_long_memories(betas):
    """The arcsine of the correlation itself, summed over all lags until nothing is left; few terms do."""
    b1, b2 = betas
    variance = (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)
    lags = np.arange(1, int(40 / (1 - b2)))
    rho = (b1**2 * b2**lags * (1 - b2) / (1 + b2) + (1 - b1) * b1 * (1 - b2) * b2 ** (lags - 1)) / variance
    correlations = 2 / math.pi * np.arcsin(rho)
    ours = memory.lion_memory(betas)
    assert len(ours.first) < 150
    for lag in (1, 2, 10, 1000):
        assert ours.correlation(lag) == pytest.approx(correlations[lag - 1], abs=1e-9)
    for eps in (0.0, 1e-5, 1e-3):
        slow = 1 + 2 * float(correlations @ (1 - eps) ** lags)
        assert ours.total(eps) == pytest.approx(slow, rel=1e-9)


@given(largest=st.floats(0, 1 - 1e-9), share=st.floats(0, 1))
def test_arcsine_series(largest, share):
    powers, coefficients = memory.arcsine_coefficients(largest)
    x = largest * share
    assert float(coefficients @ x**powers) == pytest.approx(2 / math.pi * math.asin(x), abs=1e-8)
    assert len(powers) < 300


def test_lion_totals_as_published():
    ours = memory.lion_memory((0.9, 0.99))
    assert ours.total() == pytest.approx(45.93, abs=0.005)
    assert ours.total(1e-3) == pytest.approx(41.86, abs=0.005)


@pytest.mark.parametrize(
    ("betas", "ratio"), [((0.9, 0.99), 1.028), ((0.95, 0.98), 0.980), ((0.9, 0.9), 0.954), ((0.0, 0.0), 0.80)]
)
def test_lion_angle_against_its_linearisation(betas, ratio):
    """Simulated angle over the linearised law sqrt(pi eps nu), eps = 1e-3: the arcsine sum is right to 0.3 %."""
    b1, b2 = betas
    nu = (1 - b1) ** 2 + b1**2 * (1 - b2) / (1 + b2)
    angle = Lion(0.01, 0.1, betas=betas).equilibrium().angle
    assert angle / math.sqrt(math.pi * 1e-3 * nu) == pytest.approx(ratio, rel=3e-3)


def test_lion_correlation_of_simulated_signs():
    betas = (0.9, 0.99)
    rng = np.random.default_rng(5)
    m, signs = np.zeros(20_000), []
    for _ in range(900):
        g = rng.normal(size=m.size)
        signs.append(np.sign(betas[0] * m + (1 - betas[0]) * g))
        m = betas[1] * m + (1 - betas[1]) * g
    # 20 000 independent coordinates, 8 times some 15 steps apart: standard error below 7e-3 / sqrt(2).
    for lag in (1, 20, 60):
        starts = range(700, 820, 15)
        measured = np.mean([np.mean(signs[t] * signs[t + lag]) for t in starts])
        assert memory.lion_memory(betas).correlation(lag) == pytest.approx(measured, abs=0.012)


@given(total=st.floats(0.3, 200), mu=st.floats(0.01, 0.99))
def test_scaled_to_a_measured_total(total, mu):
    ours = memory.muon_memory(mu)
    scaled = ours.scaled_to(total)
    assert scaled.total() == pytest.approx(total, rel=1e-9)
    assert scaled.decay == ours.decay


def test_a_memory_that_is_empty_cannot_be_scaled_but_one_is_one():
    rule = Muon(0.01, 0.1, momentum=0.0, nesterov=False)
    assert rule.equilibrium(memory_total=1.0).angle == pytest.approx(rule.equilibrium().angle, rel=1e-12)
    with pytest.raises(EquilibriaError, match="total"):
        rule.memory.scaled_to(3.0)


@pytest.mark.parametrize("bad", [-0.1, 1.0, float("nan"), "0.9", None])
def test_bad_coefficients_raise(bad):
    for build in (memory.ema_memory, memory.muon_memory):
        with pytest.raises(EquilibriaError, match="expected"):
            build(bad)
    for betas in ((bad, 0.9), (0.9, bad)):
        with pytest.raises(EquilibriaError, match="beta"):
            memory.lion_memory(betas)
