"""The exact risk curve against a finite-volume solution for the polar angle, and its invariances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_banded

from equilibria.errors import EquilibriaError
from equilibria.theory.rayleigh import NoisyRayleigh, noisy_quadratic_loss, norm_sq_at
from equilibria.theory.rayleigh_curve import _Modes, exact_risk_curve, risk_curve
from equilibria.theory.rayleigh_risk import spectral_gap, stationary_risk
from equilibria.theory.watson import watson_risk

PARTS = 8


def by_cells(model, speeds, start):
    """The diffusion of the angle in 400 cells, extrapolated from 200: the error is of fourth order in their width."""
    coarse, fine = (_by_cells(model, speeds, start, cells=cells) for cells in (200, 400))
    return (4 * fine - coarse) / 3


def _by_cells(model, speeds, start, *, cells):
    """E sin^2(theta) after each unit of time at ``lr/M = speeds``: jumps between cells of the angle, reversible.

    The direction makes a Brownian motion of variance (x sigma)^2 per coordinate, drawn to exp(gap f/(x sigma^2)). An
    error of second order in the width of a cell and in the part of a step (Crank and Nicolson).
    """
    width = np.pi / 2 / cells
    theta = (np.arange(cells) + 0.5) * width
    mass, actual = start(theta) * width, []
    for x in speeds:
        log_weight = (model.dim - 2) * np.log(np.sin(theta)) + model.gap / (x * model.noise**2) * np.cos(theta) ** 2
        half = np.exp(np.diff(log_weight) / 2)  # rate up: half, rate down: 1/half
        rate = (x * model.noise) ** 2 / 2 / width**2
        jumps = np.zeros((3, cells))  # of the transposed generator, banded: what moves the mass
        jumps[2, :-1], jumps[0, 1:] = rate * half, rate / half
        jumps[1] = -jumps[0] - jumps[2]
        before, after = np.eye(3)[1][:, None] + jumps / (2 * PARTS), np.eye(3)[1][:, None] - jumps / (2 * PARTS)
        for _ in range(PARTS):
            moved = before[1] * mass
            moved[:-1] += before[0, 1:] * mass[1:]
            moved[1:] += before[2, :-1] * mass[:-1]
            mass = solve_banded((1, 1), after, moved)
        actual.append(mass @ np.sin(theta) ** 2 / mass.sum())
    return np.array(actual)


def uniform(dim):
    return lambda theta: np.sin(theta) ** (dim - 2)


@pytest.mark.parametrize("dim", [2, 3, 4, 10])
def test_descent_from_a_random_direction(dim):
    model = NoisyRayleigh.two_level(1.5, dim, noise=0.8, lr=0.1, weight_decay=0.02)
    curve = exact_risk_curve(model, 60, norm_sq=2.0)
    times = np.linspace(0, 60, 60 * 8 + 1)[1:] - 1 / 16
    middles = norm_sq_at(times, 2.0, lr=0.1, weight_decay=0.02, unit_grad_sq=model.unit_grad_sq)
    speeds = (0.1 / middles).reshape(60, 8).mean(1)
    assert curve.risk[0] == pytest.approx(1 - 1 / dim, abs=1e-12)
    np.testing.assert_allclose(curve.risk[1:], by_cells(model, speeds, uniform(dim)), rtol=1e-4)


def test_schedule_and_rescale_follow_their_norm():
    model = NoisyRayleigh.two_level(1.0, 6, noise=1.0, lr=0.1, weight_decay=0.05)
    lr = np.repeat([0.1, 0.02, 0.05], 20)
    for rescale in (False, True):
        curve = exact_risk_curve(model, 60, norm_sq=3.0, lr=lr, rescale=rescale)
        half_step = norm_sq_at(0.5, curve.norm_sq[:-1], lr=lr, weight_decay=0.05, unit_grad_sq=model.unit_grad_sq)
        np.testing.assert_allclose(curve.risk[1:], by_cells(model, lr / half_step, uniform(6)), rtol=1e-4)
        closed = risk_curve(model, 60, risk=0.5, norm_sq=3.0, lr=lr, rescale=rescale)
        np.testing.assert_allclose(curve.norm_sq, closed.norm_sq, rtol=1e-12)
        np.testing.assert_allclose(curve.angular_update, closed.angular_update, rtol=1e-12)


def test_a_common_initial_risk_is_the_start_and_is_forgotten():
    model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.04)
    for risk in (0.0, 0.3, 1.0):
        curve = exact_risk_curve(model, 800, risk=risk)
        assert curve.risk[0] == pytest.approx(risk, abs=1e-12)
        # The first step by Ito's formula, to first order: E f(1-f) is that of the one risk.
        x = model.lr / model.norm_sq
        slope = -2 * x * risk * (1 - risk) + x**2 * (9 - 10 * risk)
        assert curve.risk[1] - risk == pytest.approx(slope, rel=0.1, abs=1e-5)
        limit = watson_risk(model.gap * model.inverse_temperature, 10)
        assert curve.risk[-1] == pytest.approx(float(limit), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(k=st.floats(0.1, 10), dim=st.integers(2, 30), gap=st.floats(0.1, 2), noise=st.floats(0.3, 3))
def test_scale_of_the_weight_with_lr_and_decay_changes_nothing(k, dim, gap, noise):
    model = NoisyRayleigh.two_level(gap, dim, noise=noise, lr=0.05, weight_decay=0.02)
    here = exact_risk_curve(model, 20, norm_sq=2.0)
    there = exact_risk_curve(model.rescaled(k), 20, norm_sq=2.0 * k**2)
    np.testing.assert_allclose(there.risk, here.risk, rtol=1e-9)
    assert np.all((here.risk > 0) & (here.risk < 1))


def test_bad_input():
    model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.01)
    with pytest.raises(EquilibriaError, match="risk"):
        exact_risk_curve(model, 10, risk=1.5)
    with pytest.raises(EquilibriaError, match="eigenvalues from 2 to 3"):
        exact_risk_curve(NoisyRayleigh([1.0, 2.0, 3.0], noise=1.0, lr=0.1, weight_decay=0.01), 10)
    with pytest.raises(EquilibriaError, match="angular update of 6 and a relative gradient step of 2 at step 0"):
        exact_risk_curve(model, 10, norm_sq=0.05, lr=[0.1] * 10)
    with pytest.raises(EquilibriaError, match="polynomials"):
        exact_risk_curve(NoisyRayleigh.two_level(1.0, 10, noise=1e-5, lr=0.1, weight_decay=0.01), 10, norm_sq=100.0)


# ---- the rate at which the start is forgotten


def generator(model: NoisyRayleigh, count: int) -> np.ndarray:
    """The generator of f on polynomials of degree below ``count``, in the Jacobi basis: dense, not symmetric."""
    modes = _Modes(model.dim, count)
    speed = model.lr / model.norm_sq
    pull = 2 * model.gap * speed
    diagonal = np.diag(pull * modes.middle - (speed * model.noise) ** 2 * modes.decay)
    return diagonal + pull * (np.diag(modes.below, 1) + np.diag(modes.above, -1))


@pytest.mark.parametrize(("dim", "gap"), [(2, 0.05), (3, 0.1), (10, 0.3), (50, 0.2)])
def test_the_spectral_gap_is_the_slowest_mode_of_the_moments(dim, gap):
    """Concentrations of 1 to 20, where the eigenvalues of the matrix that is not symmetric keep their digits."""
    model = NoisyRayleigh.two_level(gap, dim, noise=1.0, lr=0.1, weight_decay=0.01)
    rates = np.sort(-np.linalg.eigvals(generator(model, 60)).real)
    assert abs(rates[0]) < 1e-9 * rates[1]
    assert spectral_gap(model) == pytest.approx(rates[1], rel=1e-3)


def test_random_directions_are_forgotten_at_the_spectral_gap_and_near_ones_twice_as_fast():
    model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.02, weight_decay=0.05)
    rate, limit = spectral_gap(model), stationary_risk(model).risk
    first, last = round(4 / rate), round(5 / rate)
    for risk, expected in ((None, rate), (0.0, 2 * rate)):
        excess = np.abs(exact_risk_curve(model, last, risk=risk).risk - limit)
        begin, end = (first, last) if risk is None else (round(1 / rate), round(1.5 / rate))
        assert np.log(excess[begin] / excess[end]) / (end - begin) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("gap", "leading"), [(1e-7, "turning"), (30.0, "leaving")])
def test_the_spectral_gap_of_small_and_large_gaps(gap, leading):
    model = NoisyRayleigh.two_level(gap, 6, noise=1.0, lr=0.01, weight_decay=0.01)
    turn = model.angular_update
    expected = {"turning": 6 / 5 * turn**2, "leaving": gap * turn / model.unit_grad_sq**0.5}[leading]
    assert spectral_gap(model) == pytest.approx(expected, rel=5e-3)


def test_a_spectrum_of_three_levels_has_no_spectral_gap_here():
    with pytest.raises(EquilibriaError, match="expected one"):
        spectral_gap(NoisyRayleigh([1.0, 2.0, 3.0], noise=1.0, lr=0.1, weight_decay=0.01))


# ---- the noisy quadratic model


def test_the_quadratic_law_is_the_mean_of_its_steps():
    spectrum, start, steps = np.array([0.5, 2.0]), np.array([3.0, -1.0]), 40
    settings = {"noise": 0.7, "lr": 0.2, "weight_decay": 0.3}
    rng = np.random.default_rng(0)
    x, means = np.tile(start, (20_000, 1)), []
    for _ in range(steps):
        means.append((0.5 * x**2 @ spectrum).mean())
        x = x - 0.2 * (x * spectrum + 0.7 * rng.standard_normal(x.shape) + 0.3 * x)
    law = noisy_quadratic_loss(np.arange(steps), spectrum, start=start, **settings)
    assert means == pytest.approx(law.tolist(), rel=0.03)  # the loss scatters by about its size: four standard errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"lr": 1.1}, "expected"), ({"start": [1.0]}, "one number per eigenvalue"), ({"noise": -1.0}, "noise")],
)
def test_a_quadratic_that_diverges_or_does_not_fit_raises(changes, words):
    with pytest.raises(EquilibriaError, match=words):
        noisy_quadratic_loss(5, [1.0, 2.0], **{"start": [1.0, 1.0], "noise": 1.0, "lr": 0.1, **changes})
