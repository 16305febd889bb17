"""Correlated steps, against sums written out and against simulated trainings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.correlation import (
    RelaxationSpectrum,
    cosine_over_steps,
    fit_relaxation_spectrum,
    gradient_noise_scale,
    mean_gradient_share,
    mean_gradient_share_from_pull,
    mean_gradient_share_with_momentum,
    measured_scaling_ratio,
    turning_ratio,
)
from equilibria.theory.rules import SGD, momentum_unit_grad_sq

correlations = st.lists(st.floats(-0.3, 0.3), max_size=8)


@given(correlations, st.integers(0, 10), st.floats(1e-5, 0.3))
def test_cosines_are_the_double_sum(rho, steps, eps):
    kept, padded = 1 - eps, [0.0, *rho, *[0.0] * 10]
    expected = [
        kept**n
        - (2 * eps - eps**2) * sum(kept ** (n - 2 - i - j) * padded[j - i] for i in range(n) for j in range(i + 1, n))
        for n in range(steps + 1)
    ]
    if max(map(abs, expected)) > 1:
        with pytest.raises(EquilibriaError, match="the cosine over"):
            cosine_over_steps(rho, steps, decay_per_step=eps)
        return
    assert cosine_over_steps(rho, steps, decay_per_step=eps) == pytest.approx(expected, rel=1e-12, abs=1e-13)


@given(st.floats(1e-5, 0.3), st.integers(1, 50))
def test_independent_gradients_leave_the_decay(eps, steps):
    cosines = cosine_over_steps([], steps, decay_per_step=eps)
    assert cosines == pytest.approx((1 - eps) ** np.arange(steps + 1), rel=1e-12)


@given(correlations)
def test_turning_is_the_double_sum_over_moves(r):
    padded = [1.0, *r]
    sums = [sum(padded[abs(i - j)] for i in range(n) for j in range(n)) / n for n in range(1, len(r) + 2)]
    if min(sums) < 0:
        with pytest.raises(EquilibriaError, match="not negative"):
            turning_ratio(r)
        return
    assert turning_ratio(r) == pytest.approx(sums, abs=1e-12)


def walk(pull_back: float, *, eps: float, steps: int, dim: int, seed: int):
    """Plain SGD on noise plus a force towards a slow average of the weight's direction, tangent to the weight."""
    draw = np.random.default_rng(seed)
    lr = 0.1
    weight, centre = draw.normal(size=dim), np.zeros(dim)
    weights, gradients = [], []
    for _ in range(steps):
        norm = np.linalg.norm(weight)
        direction = weight / norm
        centre += 0.02 * (direction - centre)
        gradient = draw.normal(size=dim) / np.sqrt(dim) + pull_back * (direction - centre)
        gradient -= direction * (direction @ gradient)
        weights.append(weight)
        gradients.append(gradient)
        weight = (1 - eps) * weight - lr * gradient / norm
    return np.array(weights), np.array(gradients)


@pytest.mark.parametrize("pull_back", [0.0, 1.0, 3.0])
def test_simulated_trainings_turn_as_their_correlations_say(pull_back):
    weights, gradients = (rows[1500:] for rows in walk(pull_back, eps=0.01, steps=9500, dim=300, seed=1))
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    power = np.mean(np.sum(gradients**2, axis=1))
    lags = range(1, 32)
    rho = [np.mean(np.sum(gradients[:-k] * gradients[k:], axis=1)) / power for k in lags]
    measured = [1 - np.mean(np.sum(unit[:-n] * unit[n:], axis=1)) for n in (4, 16, 32)]
    predicted = 1 - cosine_over_steps(rho, 32, decay_per_step=0.01)
    assert predicted[[4, 16, 32]] == pytest.approx(measured, rel=0.04)
    moves = np.diff(weights, axis=0)
    together = np.mean(np.sum(moves**2, axis=1))
    r = [np.mean(np.sum(moves[:-k] * moves[k:], axis=1)) / together for k in lags]
    one = 1 - np.mean(np.sum(unit[:-1] * unit[1:], axis=1))
    assert turning_ratio(r)[[3, 15, 31]] * one * np.array([4, 16, 32]) == pytest.approx(measured, rel=0.04)
    if pull_back:  # steps really pull back here, or the test shows nothing
        assert measured[-1] < 0.9 * (1 - 0.99**32)


@given(st.floats(0.5, 200.0), st.floats(0.0, 2.0), st.floats(1e-6, 1e-2))
def test_a_spectrum_is_found_again(memory, power, one_step):
    n = 2.0 ** np.arange(9)
    true = RelaxationSpectrum(one_step, memory, power, 512.0)
    fitted = fit_relaxation_spectrum(n, true.turned(n))
    assert fitted.turned([3.0, 100.0, 512.0]) == pytest.approx(true.turned([3.0, 100.0, 512.0]), rel=0.02)
    assert fitted.one_step == pytest.approx(one_step, rel=1e-2)


def test_a_spectrum_does_not_speak_beyond_its_reach():
    fitted = fit_relaxation_spectrum([1, 2, 4, 8, 16], [1.0, 1.9, 3.4, 5.8, 9.0])
    assert fitted.reach == 32
    with pytest.raises(EquilibriaError, match="got steps=33; expected at most 32") as error:
        fitted.turned(33)
    assert error.value.argument == "steps"


def test_short_steps_turn_linearly_and_long_ones_by_a_power():
    spectrum = RelaxationSpectrum(1e-3, 100.0, 0.7, 1e9)
    assert spectrum.turned(2)[()] / spectrum.turned(1)[()] == pytest.approx(2, rel=0.01)
    assert spectrum.turned(2e8)[()] / spectrum.turned(1e8)[()] == pytest.approx(2**0.3, rel=0.01)


def test_scaling_ratio_is_one_without_correlations():
    assert measured_scaling_ratio(8e-3, 1e-3, 8) == pytest.approx(1.0)
    with pytest.raises(EquilibriaError, match="factor"):
        measured_scaling_ratio(8e-3, 1e-3, 0)


def quadratic_training(momentum: float, *, batch: int, seed: int):
    """SGD on a noisy quadratic at stationarity, one coordinate per mode: gradients, their means, buffers."""
    draw = np.random.default_rng(seed)
    rates = np.geomspace(0.02, 0.4, 40)  # lr times curvature
    x, v = np.zeros(40), np.zeros(40)
    gradients, means, buffers = [], [], []
    for step in range(30_000):
        mean = rates * x
        gradient = mean + draw.normal(size=40) / np.sqrt(batch)
        if step > 1000:
            gradients.append(gradient)
            means.append(mean)
            buffers.append(v)
        v = momentum * v + gradient
        x = x - v
    return np.array(gradients), np.array(means), np.array(buffers)


def test_gradient_noise_from_successive_gradients_of_plain_sgd():
    gradients, means, _ = quadratic_training(0.0, batch=16, seed=3)
    power = np.mean(np.sum(gradients**2, axis=1))
    rho = np.mean(np.sum(gradients[1:] * gradients[:-1], axis=1)) / power
    share = np.mean(np.sum(means**2, axis=1)) / power
    assert mean_gradient_share(rho) == pytest.approx(share, rel=0.05)
    # at a batch of 16 the noise is 40/16, so that the scale is 40 / |mean|^2
    assert gradient_noise_scale(16, share) == pytest.approx(40 / np.mean(np.sum(means**2, axis=1)), rel=0.05)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_gradient_noise_from_the_momentum(momentum):
    gradients, means, buffers = quadratic_training(momentum, batch=1, seed=4)
    power = np.mean(np.sum(gradients**2, axis=1))
    shared = np.mean(np.sum(buffers * gradients, axis=1))
    with_momentum = momentum_unit_grad_sq(SGD(0.1, 1e-3, momentum=momentum), power, buffer_dot_grad=shared)
    share = np.mean(np.sum(means**2, axis=1)) / power
    measured = mean_gradient_share_with_momentum(float(with_momentum) / power, momentum=momentum)
    assert measured == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lr", [0.1, 3.0])
def test_gradient_noise_from_the_pull_on_the_last_move(momentum, lr):
    """The last move is -lr times the buffer, or the last gradient: what lr is called cancels."""
    gradients, means, buffers = quadratic_training(momentum, batch=1, seed=5)
    power = np.mean(np.sum(gradients**2, axis=1))
    pull = -lr * np.mean(np.sum(gradients[1:] * (buffers[1:] if momentum else gradients[:-1]), axis=1))
    share = np.mean(np.sum(means**2, axis=1)) / power
    assert mean_gradient_share_from_pull(pull, lr * power, momentum=momentum) == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: cosine_over_steps([2.0], 3, decay_per_step=0.1),
        lambda: cosine_over_steps([[0.1]], 3, decay_per_step=0.1),
        lambda: cosine_over_steps([0.1], 3, decay_per_step=0.0),
        lambda: fit_relaxation_spectrum([1, 2, 4], [1, 2, 4]),
        lambda: fit_relaxation_spectrum([1, 2, 4, 8], [1, 2, 4, -1]),
        lambda: mean_gradient_share(0.2),
        lambda: mean_gradient_share_with_momentum(0.9, momentum=0.0),
        lambda: mean_gradient_share_from_pull(0.1, 0.0),
        lambda: mean_gradient_share_from_pull(0.1, 1.0, momentum=1.0),
        lambda: gradient_noise_scale(64, 0.0),
    ],
)
def test_misuse_is_refused(misuse):
    with pytest.raises(EquilibriaError, match=r"got .*; expected"):
        misuse()


# ---- input that no run has


def test_a_sum_broken_off_too_early_is_refused_instead_of_a_cosine_above_1():
    """Four correlations of a convolutional network: the identity needs those over longer distances."""
    with pytest.raises(EquilibriaError, match=r"got 4 correlations and steps=1024.*expected correlations over longer"):
        cosine_over_steps([-0.13, -0.061, -0.036, -0.023], 1024, decay_per_step=0.0025)


def test_independent_gradients_forget_over_any_distance():
    cosines = cosine_over_steps([], 100_000, decay_per_step=0.01)
    assert cosines[200] == pytest.approx(0.99**200, rel=1e-12) and cosines[-1] < 1e-300


def test_correlations_of_no_stationary_steps_are_refused():
    with pytest.raises(EquilibriaError, match=r"4 steps turn -0\.2 times as far"):
        turning_ratio([-0.4] * 3)


def test_a_spectrum_that_does_not_fit_is_refused():
    """With momentum steps add up first: D(n) grows as n^2 before it grows as n."""
    n = np.array([1, 2, 4, 8, 16, 32])
    with pytest.raises(EquilibriaError, match="with momentum give distances beyond its memory"):
        fit_relaxation_spectrum(n, 1e-4 * n**2.0)


def test_a_fit_tells_its_residual():
    n = np.array([1, 2, 4, 8, 16, 32])
    off = np.where(n == 8, 1.1, 1.0)
    fitted = fit_relaxation_spectrum(n, 1e-3 * n**0.6 * off)
    assert fitted.residual == pytest.approx(np.max(np.abs(fitted.turned(n) / (1e-3 * n**0.6 * off) - 1)))
    assert 0.03 < fitted.residual < 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "0.1"])
def test_a_pull_that_is_no_number_is_refused(bad):
    with pytest.raises(EquilibriaError, match="pull"):
        mean_gradient_share_from_pull(bad, 0.1)


@pytest.mark.parametrize(("ratio", "momentum"), [(3.0, 0.9), (0.0, 0.1)])
def test_ratios_that_give_no_share_are_refused(ratio, momentum):
    with pytest.raises(EquilibriaError, match="expected a share between -1 and 1"):
        mean_gradient_share_with_momentum(ratio, momentum=momentum)
