"""Updates under correlated gradients, against sums written out and against the laws that they must contain.

Simulated walks are in test_violations.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.theory.correlated_gradients import adamw_correlated, lion_total_correlated
from equilibria.theory.equilibrium import second_moment_shift
from equilibria.theory.memory import lion_memory

BETAS = st.tuples(st.floats(0.0, 0.97), st.floats(0.5, 0.995))


@given(BETAS, st.floats(1e-4, 0.05))
def test_uncorrelated_gradients_leave_lion_its_memory(betas, eps):
    total = lion_total_correlated(betas, [(1.0, 0.0)], decay_per_step=eps)
    assert total == pytest.approx(lion_memory(betas).total(eps), rel=1e-5)


@pytest.mark.parametrize(("betas", "parts"), [((0.9, 0.8), [(0.7, 0.0), (0.3, 0.9)]), ((0.6, 0.9), [(1.0, -0.4)])])
def test_lion_against_sums_over_all_pairs_of_gradients(betas, parts):
    """Every average written out over its gradients."""
    (b1, b2), eps, n = betas, 0.01, 160
    age = np.arange(n)
    in_c = np.where(age == 0, 1 - b1, b1 * (1 - b2) * b2 ** np.maximum(age - 1.0, 0))  # c, by the age of the gradient
    in_m = (1 - b2) * b2**age  # the momentum after the step

    def product(one, other, lag):
        apart = np.abs(age[:, None] - age[None, :] + lag)
        gamma = sum(share * (np.float64(rho) ** apart if rho else apart == 0) for share, rho in parts)
        return one @ gamma @ other

    size = product(in_c, in_c, 0)
    total, kept = 1.0, b1 * product(in_c, in_m, 0) / size
    for k in range(1, 150):
        rho = product(in_c, in_c, k) / size
        total += 4 / math.pi * (kept * b2 ** (k - 1) + math.asin(rho) - rho) * (1 - eps) ** k
    assert lion_total_correlated(betas, parts, decay_per_step=eps) == pytest.approx(total, rel=1e-4)


def test_a_signal_that_lasts_as_long_as_the_momentum_is_no_exception():
    """At rho = beta2 the closed form of the covariance is a quotient of zeros."""
    near, at = (
        lion_total_correlated((0.9, 0.98), [(0.5, 0.0), (0.5, rho)], decay_per_step=1e-3) for rho in (0.97999, 0.98)
    )
    assert at == pytest.approx(near, rel=1e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.8, 0.98)])
def test_uncorrelated_gradients_scatter_the_second_moment_of_adamw(betas):
    """The first order in 1 - beta2 is that law; the difference is of second order."""
    norm_sq, update_sq = second_moment_shift(*betas)
    update = adamw_correlated(betas, [(1.0, 0.0)], decay_per_step=1e-9)
    second_order = 10 * (1 - betas[1]) ** 2
    assert update.norm_sq - 1 == pytest.approx(norm_sq, abs=second_order)
    assert update.update_sq - 1 == pytest.approx(update_sq, abs=second_order)


@pytest.mark.parametrize(("b1", "rho"), [(0.0, 0.5), (0.9, -0.3), (0.9, 0.9), (0.6, 0.8)])
def test_a_second_moment_without_scatter_leaves_the_angle_and_raises_the_update(b1, rho):
    """kappa = (1 + b1 rho)/(1 - b1 rho); v scatters by (1 - beta2)(1 + rho^2)/(1 - rho^2), here up to 0.5 %."""
    kappa = (1 + b1 * rho) / (1 - b1 * rho)
    update = adamw_correlated((b1, 0.9995), [(1.0, rho)], decay_per_step=1e-6)
    assert update.norm_sq == pytest.approx(kappa, rel=0.02)
    assert update.update_sq == pytest.approx(kappa, rel=0.02)


def test_the_law_of_adamw_ends_where_its_second_moment_scatters_too_much():
    assert adamw_correlated((0.9, 0.9), [(1.0, 0.5)], decay_per_step=1e-3) is None
