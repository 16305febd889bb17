"""PAC-Bayes terms and the final-BN laws against Monte Carlo, optimisation and hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax, rel_entr, softmax
from scipy.stats import binom, chi2

from equilibria.errors import EquilibriaError
from equilibria.theory.generalization import (
    final_bn_minimum,
    final_bn_scale,
    gaussian_divergence,
    label_smoothing,
    max_noise,
    noise_radius,
    pac_bayes_bound,
    pac_bayes_gap,
)


def test_worked_bound():
    bound = pac_bayes_bound(10.0, 5.0, dim=100, samples=50_000, sigma=0.35, delta=0.05)
    assert bound.final.total == pytest.approx(1.926446, abs=5e-7)
    assert bound.tight.total == pytest.approx(1.352780, abs=5e-7)
    # The printed "+1" instead of 1/sqrt(n) would put the tight line above the final one.
    assert bound.tight.total - 50_000**-0.5 + 1 == pytest.approx(2.348, abs=5e-4)
    assert bound.vacuous


def test_terms_of_a_small_case_by_hand():
    """n = 2 and D = 1 leave ln 2 as the only awkward number; each term is written out."""
    s, d, n, delta = 0.2, 1, 2, 0.5
    bound = pac_bayes_bound(3.0, 7.0, dim=d, samples=n, sigma=s, delta=delta, max_loss=2.0)
    ln2 = math.log(2)
    assert bound.final.curvature == pytest.approx(0.06)
    assert bound.final.remainder == pytest.approx(16 * 0.008 * 7 / 3 * (1 + ln2**1.5))
    assert bound.final.complexity == pytest.approx(2 * math.sqrt(25 + 4 * ln2))
    assert bound.tight.remainder == pytest.approx(4 / 3 * 7 * (0.2 * (1 + math.sqrt(ln2))) ** 3)
    assert bound.tight.complexity == pytest.approx(2 * (math.sqrt((12.5 + 2 * ln2) / 2) + 1 / math.sqrt(2)))


def test_divergence_of_normal_distributions_by_quadrature():
    """In each of D directions the integral of q ln(q/p); the means differ along the first."""
    x, dx = np.linspace(-40, 40, 400_001, retstep=True)
    distance, sigma, prior, dim = 1.3, 0.7, 1.9, 5
    log_q = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))

    def divergence(mean):
        log_p = -((x - mean) ** 2) / (2 * prior**2) - math.log(prior * math.sqrt(2 * math.pi))
        return float(np.sum(np.exp(log_q) * (log_q - log_p)) * dx)

    expected = divergence(distance) + (dim - 1) * divergence(0.0)
    assert gaussian_divergence(distance, sigma=sigma, prior_sigma=prior, dim=dim) == pytest.approx(expected, rel=1e-9)


def test_the_pac_bayes_theorem_holds_for_all_distributions_at_once():
    """Two classifiers with independent errors, 30 samples: every outcome counted, with every mixture of the two."""
    n, delta, rates = 30, 0.2, (0.1, 0.4)
    weights = np.linspace(0, 1, 201)
    divergences = rel_entr(weights, 0.5) + rel_entr(1 - weights, 0.5)
    bounds = np.array([pac_bayes_gap(divergence, samples=n, delta=delta) for divergence in divergences])
    errors = np.arange(n + 1)
    excess = [rate - errors / n for rate in rates]
    gaps = weights * excess[0][:, None, None] + (1 - weights) * excess[1][None, :, None]
    chances = np.outer(binom.pmf(errors, n, rates[0]), binom.pmf(errors, n, rates[1]))

    def failure(share):
        return float(chances[np.any(gaps > share * bounds, axis=-1)].sum())

    assert failure(1.0) <= delta and failure(0.3) > delta


@pytest.mark.parametrize(("dim", "samples"), [(1, 10), (10, 1000), (1000, 50_000)])
def test_noise_stays_within_its_radius(dim, samples):
    radius = noise_radius(0.3, dim, samples)
    outside = chi2.sf(dim * (radius / 0.3) ** 2, dim)
    assert 0 < outside <= samples**-0.5


def test_curvature_and_remainder_bound_the_perturbed_loss():
    """Rayleigh quotient, Monte Carlo: E L(theta + noise) - L(theta) stays below curvature + remainder."""
    rng = np.random.default_rng(1)
    eigenvalues = np.linspace(0.0, 0.9, 10)
    theta = np.eye(10)[0]
    sigma = max_noise(10, 1000)
    noisy = theta + rng.standard_normal((50_000, 10)) * sigma / math.sqrt(10)
    losses = (noisy**2 @ eigenvalues) / (noisy**2).sum(1)
    hessian = 2 * np.diag(eigenvalues)  # at the minimising eigenvector
    rise = losses.mean()
    trace_bound = pac_bayes_bound(
        float(hessian.max()), 0.0, dim=10, samples=1000, sigma=sigma, trace=float(np.trace(hessian))
    )
    top_bound = pac_bayes_bound(float(hessian.max()), 0.0, dim=10, samples=1000, sigma=sigma)
    assert trace_bound.tight.curvature == pytest.approx(sigma**2 / 2 * 0.9)
    assert trace_bound.tight.curvature < top_bound.tight.curvature
    # The second-order term alone explains the rise up to the third order in sigma.
    assert abs(rise - trace_bound.tight.curvature) < sigma**3
    assert rise < top_bound.tight.curvature


@settings(deadline=None, max_examples=200)
@given(
    dim=st.integers(1, 10**7),
    samples=st.integers(2, 10**8),
    delta=st.floats(1e-6, 0.999),
    part=st.floats(0.001, 1.0),
    sharpness=st.floats(0, 1e6),
    third=st.floats(0, 1e6),
)
def test_tight_never_exceeds_final(dim, samples, delta, part, sharpness, third):
    bound = pac_bayes_bound(
        sharpness, third, dim=dim, samples=samples, sigma=part * max_noise(dim, samples), delta=delta
    )
    assert bound.tight.remainder <= bound.final.remainder * (1 + 1e-12)
    assert bound.tight.complexity <= 0.8 * bound.final.complexity
    assert bound.tight.total <= bound.final.total * (1 + 1e-12)


def test_tail_ratio_over_random_settings():
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(2000):
        dim, samples = int(10 ** rng.uniform(0, 7)), int(10 ** rng.uniform(1, 7))
        sigma = rng.uniform(0.01, 1) * max_noise(dim, samples)
        bound = pac_bayes_bound(0.0, 0.0, dim=dim, samples=samples, sigma=sigma, delta=10 ** rng.uniform(-6, -0.01))
        worst = max(worst, bound.tight.total / bound.final.total)
    assert 0.5 < worst <= 0.66


@pytest.mark.parametrize(
    "change",
    [
        {"sigma": 0.38},
        {"sigma": 0.0},
        {"sigma": math.nan},
        {"delta": 1.0},
        {"samples": 1},
        {"dim": 0.5},
        {"max_loss": -1},
        {"trace": math.inf},
        {"dim": "many"},
    ],
)
def test_bad_bound_arguments(change):
    arguments = {"dim": 100, "samples": 50_000, "sigma": 0.3} | change
    with pytest.raises(EquilibriaError, match=r"got .*; expected"):
        pac_bayes_bound(1.0, 1.0, **arguments)


@pytest.mark.parametrize("pair", [(-1.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf)])
def test_bad_bound_derivatives(pair):
    with pytest.raises(EquilibriaError):
        pac_bayes_bound(*pair, dim=100, samples=50_000, sigma=0.3)


@pytest.mark.parametrize(
    ("classes", "scale", "loss"),
    [(10, 1.3532579, 0.0943107), (100, 0.676940, 0.104250), (1000, 0.287784, 0.105249), (2, 1.472219, 0.051293)],
)
def test_smoothing_table(classes, scale, loss):
    gamma = float(final_bn_scale(0.1, classes))
    best = final_bn_minimum(gamma, classes)
    assert gamma == pytest.approx(scale, abs=5.1e-7)
    assert float(best.loss) == pytest.approx(loss, abs=5.1e-7)
    assert float(best.loss) == pytest.approx(-math.log(1 - (1 - 1 / classes) * 0.1), rel=1e-13)


def test_paper_value():
    assert float(final_bn_scale(0.1, 10)) == pytest.approx(0.3 * math.log(91), rel=1e-14)
    best = final_bn_minimum(0.3 * math.log(91), 10)
    assert float(best.correct_probability) == pytest.approx(0.91, rel=1e-13)
    assert float(best.wrong_probability) == pytest.approx(0.01, rel=1e-13)
    assert float(best.loss) == pytest.approx(math.log(100 / 91), rel=1e-13)


@pytest.mark.parametrize(
    ("classes", "scale"), [(2, 0.1), (2, 3.0), (3, 0.7), (3, 5.0), (5, 1.0), (5, 2.0), (10, 1.3532579)]
)
def test_minimum_is_optimal(classes, scale):
    """Minimise over free logits, each column normalised to mean 0 and deviation ``scale``; two samples per class."""
    labels = np.repeat(np.arange(classes), 2)
    rng = np.random.default_rng(classes)

    def normalised(free):
        raw = free.reshape(len(labels), classes)
        return scale * (raw - raw.mean(0)) / raw.std(0)

    def loss_and_gradient(free):
        logits = normalised(free)
        rows = np.arange(len(labels))
        loss = -log_softmax(logits, axis=1)[rows, labels].mean()
        slope = softmax(logits, axis=1)
        slope[rows, labels] -= 1
        slope /= len(labels)
        raw = free.reshape(logits.shape)
        unit = logits / scale
        inner = slope - slope.mean(0) - unit * (slope * unit).mean(0)
        return loss, (inner * scale / raw.std(0)).ravel()

    runs = [
        minimize(
            loss_and_gradient, rng.standard_normal(len(labels) * classes), jac=True, method="L-BFGS-B",
            options={"maxiter": 2000, "ftol": 1e-16, "gtol": 1e-10},
        )
        for _ in range(3)
    ]  # fmt: skip
    best = min(runs, key=lambda run: run.fun)
    expected = final_bn_minimum(scale, classes)
    assert best.fun == pytest.approx(float(expected.loss), abs=1e-10)
    assert all(run.fun > float(expected.loss) - 1e-12 for run in runs)
    logits = normalised(best.x)
    hit = logits[np.arange(len(labels)), labels]
    assert hit == pytest.approx(np.full(len(labels), float(expected.correct_logit)), abs=1e-3)


@settings(deadline=None, max_examples=200)
@given(scale=st.floats(1e-6, 30), classes=st.integers(2, 50_000))
def test_probabilities_constraints_and_softmax(scale, classes):
    best = final_bn_minimum(scale, classes)
    assert best.correct_probability + (classes - 1) * best.wrong_probability == pytest.approx(1, rel=1e-12)
    # One column over balanced classes: one correct entry for every C-1 wrong ones.
    assert best.correct_logit + (classes - 1) * best.wrong_logit == pytest.approx(0, abs=1e-9 * scale * classes)
    variance = (best.correct_logit**2 + (classes - 1) * best.wrong_logit**2) / classes
    assert variance == pytest.approx(scale**2, rel=1e-12)
    assert -np.log(best.correct_probability) == pytest.approx(best.loss, rel=1e-9, abs=1e-15)


@settings(deadline=None, max_examples=200)
@given(smoothing=st.floats(1e-9, 1 - 1e-9), classes=st.integers(2, 100_000))
def test_smoothing_round_trip(smoothing, classes):
    back = label_smoothing(final_bn_scale(smoothing, classes), classes)
    assert back == pytest.approx(smoothing, rel=1e-10)


def test_broadcasting():
    scales = final_bn_scale(np.array([[0.1], [0.2]]), np.array([2, 10, 100]))
    assert scales.shape == (2, 3)
    assert float(scales[0, 1]) == pytest.approx(float(final_bn_scale(0.1, 10)), rel=1e-15)


@pytest.mark.parametrize(
    ("smoothing", "classes"), [(0.0, 10), (1.0, 10), (0.1, 1), (0.1, 2.5), (math.nan, 3), ("x", 3)]
)
def test_bad_smoothing(smoothing, classes):
    with pytest.raises(EquilibriaError, match="got"):
        final_bn_scale(smoothing, classes)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, None, 1j])
def test_bad_scale(scale):
    with pytest.raises(EquilibriaError, match="got"):
        final_bn_minimum(scale, 10)
