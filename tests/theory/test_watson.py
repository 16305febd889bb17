"""The stationary laws against high-precision series, independent quadrature and each other."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import dblquad, quad
from scipy.special import betainc, dawsn, gammaln, hyp1f1, ive

from equilibria.errors import EquilibriaError
from equilibria.theory.watson import (
    bingham_log_density,
    bingham_moments,
    watson_cdf,
    watson_concentration,
    watson_log_density,
    watson_moments,
    watson_risk,
)

dims = st.integers(2, 100_000)
exponents = st.floats(-3, 8)
signs = st.sampled_from([-1.0, 1.0])


def kummer(b: float, p: int) -> dict[str, mp.mpf]:
    """Moments from Kummer's function in high precision; the variance from the second derivative of log 1F1."""
    mp.mp.dps = 60 + (int(abs(b)) if abs(b) < 1000 else 0)
    half, c, x = mp.mpf(1) / 2, mp.mpf(p) / 2, mp.mpf(b)
    base = mp.hyp1f1(half, c, x)
    mean = half / c * mp.hyp1f1(half + 1, c + 1, x) / base
    square = half * (half + 1) / (c * (c + 1)) * mp.hyp1f1(half + 2, c + 2, x) / base
    return {
        "risk": 1 - mean,
        "mean": mean,
        "variance": square - mean**2,
        "mixing": mean - square,
        "log_normaliser": mp.log(mp.beta(half, c - half)) + mp.log(base),
    }


def by_angle(b: float, p: int) -> dict[str, mp.mpf]:
    """Risk and mean by adaptive quadrature over the polar angle around the peak of exp(-b sin^2) sin^(p-2)."""
    mp.mp.dps = 30
    top = mp.asin(mp.sqrt(min(mp.mpf(1), mp.mpf(p - 2) / (2 * mp.mpf(b)))))
    shift = -b * mp.sin(top) ** 2 + (p - 2) * mp.log(mp.sin(top))

    def weight(t: mp.mpf) -> mp.mpf:
        return mp.exp(-b * mp.sin(t) ** 2 + (p - 2) * mp.log(mp.sin(t)) - shift)

    step = mp.mpf(1)
    while step > mp.mpf("1e-9") and weight(max(top - step, mp.mpf("1e-30"))) < mp.mpf("1e-40"):
        step /= 2
    edges = [max(mp.mpf("1e-30"), top + 2 * step * k / 16) for k in range(-16, 17)]
    edges = sorted({min(e, mp.pi / 2) for e in edges})
    mass = mp.quad(weight, edges)
    return {
        "risk": mp.quad(lambda t: weight(t) * mp.sin(t) ** 2, edges) / mass,
        "mean": mp.quad(lambda t: weight(t) * mp.cos(t) ** 2, edges) / mass,
    }


def error(ours: object, reference: mp.mpf) -> float:
    return float(abs(mp.mpf(float(ours)) / reference - 1))


@pytest.mark.parametrize("p", [2, 3, 4, 10, 51, 1000])
@pytest.mark.parametrize("b", [1e-3, 0.5, 5.0, 67.08, 600.0, -3.0, -200.0, 1e5, -1e5, 1e8, -1e8])
def test_moments_match_kummers_function_in_high_precision(p, b):
    reference, ours = kummer(b, p), watson_moments(b, p)
    for name in ("risk", "mean", "variance", "mixing"):
        assert error(getattr(ours, name), reference[name]) < 1e-11, name
    scale = max(1.0, abs(float(reference["log_normaliser"])))
    assert abs(float(ours.log_normaliser) - float(reference["log_normaliser"])) < 1e-12 * scale


@pytest.mark.parametrize(
    ("p", "b"),
    [(1000, 500.0), (1000, 2e3), (100_000, 1e3), (100_000, 4.9e4), (100_000, 5.1e4), (100_000, 1e6), (100_000, 1e8)],
)
def test_many_dimensions_match_quadrature_over_the_angle(p, b):
    reference, ours = by_angle(b, p), watson_moments(b, p)
    assert error(ours.risk, reference["risk"]) < 1e-11
    assert error(ours.mean, reference["mean"]) < 1e-11


def test_double_precision_kummer_agrees_where_it_works():
    b, p = np.linspace(0.1, 60, 40), 10
    direct = (p - 1) / p * hyp1f1((p + 1) / 2, p / 2 + 1, -b) / hyp1f1((p - 1) / 2, p / 2, -b)
    assert watson_risk(b, p) == pytest.approx(direct, rel=1e-10)


def test_two_and_three_dimensions_in_closed_form():
    b = np.array([0.01, 0.7, 4.0, 30.0, 500.0])
    assert watson_moments(b, 2).mean == pytest.approx((1 + ive(1, b / 2) / ive(0, b / 2)) / 2, rel=1e-13)
    b = b[1:]  # the closed form cancels for small b
    closed = 1 / (2 * np.sqrt(b) * dawsn(np.sqrt(b))) - 1 / (2 * b)
    assert watson_moments(b, 3).mean == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 10, 1000])
def test_large_concentration_expansion(p):
    b = 1e4 * p
    assert float(watson_risk(b, p)) == pytest.approx((p - 1) / (2 * b) * (1 + 1 / (2 * b)), rel=10 * p / b**2)
    # 1 - f is then close to Gamma((p-1)/2, rate b), so its variance is risk / b.
    assert float(watson_moments(b, p).variance) == pytest.approx((p - 1) / (2 * b * b), rel=3 / b)


@settings(deadline=None, max_examples=60)
@given(p=dims, exponent=exponents, sign=signs)
def test_exact_moment_identities(p, exponent, sign):
    b = sign * 10**exponent
    m = watson_moments(b, p)
    assert float(m.risk + m.mean) == pytest.approx(1, abs=1e-13)
    # 2 b E f(1-f) = (p-1) - p r = p E f - 1; the side without cancellation depends on where r is.
    side = (p - 1) - p * float(m.risk) if m.risk < 0.5 else p * float(m.mean) - 1
    assert 2 * b * float(m.mixing) == pytest.approx(side, rel=1e-10, abs=1e-11)
    assert float(m.variance + m.mixing) == pytest.approx(float(m.risk * m.mean), rel=1e-11)


@settings(deadline=None, max_examples=60)
@given(p=dims, exponent=exponents, sign=signs, factor=st.floats(1.001, 3))
def test_risk_falls_with_concentration(p, exponent, sign, factor):
    b = sign * 10**exponent
    low, high = sorted((b, factor * b))
    first, second = watson_moments(low, p), watson_moments(high, p)
    assert (first.risk > second.risk) or (first.mean < second.mean)
    assert 0 < second.risk <= first.risk <= 1


@settings(deadline=None, max_examples=40)
@given(p=dims, risk=st.floats(-12, 0).map(lambda e: 10**e * (1 - 1e-9)))
def test_inverse_returns_the_risk(p, risk):
    assert float(watson_risk(watson_concentration(risk, p), p)) == pytest.approx(risk, rel=4e-15)


def test_inverse_is_vectorised_and_zero_for_a_uniform_direction():
    risks = np.array([[0.1, 0.5], [0.75, 0.99]])
    b = watson_concentration(risks, 4)
    assert b.shape == risks.shape
    assert b[1, 0] == 0
    assert b[1, 1] < 0 < b[0, 1] < b[0, 0]
    assert watson_risk(b, 4) == pytest.approx(risks, rel=1e-14)


@settings(deadline=None, max_examples=30)
@given(b=st.floats(-300, 300))
def test_two_dimensions_are_symmetric(b):
    here, there = watson_moments(b, 2), watson_moments(-b, 2)
    assert float(here.risk) == pytest.approx(float(there.mean), rel=1e-13)
    assert float(here.variance) == pytest.approx(float(there.variance), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(p=st.integers(2, 2000), exponent=st.floats(-2, 5), sign=signs)
def test_density_integrates_to_one(p, exponent, sign):
    b = sign * 10**exponent
    m = watson_moments(b, p)

    centre, width = np.arccos(np.sqrt(float(m.mean))), np.sqrt(float(m.variance) / float(m.risk * m.mean)) / 2
    edges = np.unique(np.clip([0, *(centre + width * np.linspace(-12, 12, 9)), np.pi / 2], 0, np.pi / 2))
    nodes, weights = np.polynomial.legendre.leggauss(100)
    t = (
        edges[:-1, None] + np.diff(edges)[:, None] * (nodes + 1) / 2
    )  # f = cos^2 t removes the singularities at the ends
    density = np.exp(watson_log_density(np.cos(t) ** 2, b, dim=p)) * np.sin(2 * t)
    total = (density @ weights * np.diff(edges)).sum() / 2
    # The log-density rounds at 1e-16 of its terms; t = arccos sqrt(f) is sharper than f near f = 1.
    assert total == pytest.approx(1, abs=1e-11 + 1e-15 * (abs(b) + p))


def test_density_at_the_ends():
    for p, expected in ((2, np.inf), (4, -np.inf)):
        assert watson_log_density([0.0, 1.0], 3.0, dim=p).tolist() == [np.inf, expected]
    assert np.isfinite(watson_log_density(1.0, 3.0, dim=3))
    assert float(watson_log_density(1.0, 1e8, dim=3)) == pytest.approx(np.log(1e8), rel=1e-8)


def test_normaliser_of_the_reference_model():
    # p = 10, sigma = 1, lr wd = 1e-3, gap = 1: Z = 9.8752180e21 by series and by quadrature.
    b = 3 / np.sqrt(2e-3)
    assert float(np.exp(watson_moments(b, 10).log_normaliser)) == pytest.approx(9.8752180e21, rel=1e-8)
    integral = quad(lambda t: 2 * np.exp(b * np.cos(t) ** 2) * np.sin(t) ** 8, 0, np.pi / 2, epsrel=1e-12)[0]
    assert integral == pytest.approx(9.8752180e21, rel=1e-8)


@pytest.mark.parametrize(("p", "b"), [(2, 3.0), (3, -40.0), (10, 67.08), (1000, 800.0), (100_000, 1e6)])
def test_cdf_is_the_integral_of_the_density(p, b):
    m = watson_moments(b, p)
    points = np.clip(float(m.mean) + np.sqrt(float(m.variance)) * np.linspace(-3, 3, 7), 0.001, 0.999)
    values = watson_cdf(points, b, dim=p)

    angles = np.arcsin(np.sqrt(points))
    nodes, weights = np.polynomial.legendre.leggauss(60)
    t = angles[:-1, None] + np.diff(angles)[:, None] * (nodes + 1) / 2
    pieces = np.exp(watson_log_density(np.sin(t) ** 2, b, dim=p)) * np.sin(2 * t) @ weights * np.diff(angles) / 2
    # The log-density rounds at 1e-16 of its terms, |b| + p; the probabilities themselves do not.
    assert np.diff(values) == pytest.approx(pieces, abs=1e-12 + 4e-16 * (abs(b) + p))


@pytest.mark.parametrize("p", [2, 3, 10, 1000])
def test_cdf_without_concentration_is_the_beta_law(p):
    f = np.linspace(0, 1, 41)
    assert watson_cdf(f, 0.0, dim=p) == pytest.approx(betainc(0.5, (p - 1) / 2, f), abs=1e-13)


def test_cdf_matches_high_precision_in_the_tail():
    mp.mp.dps = 30
    b, p = mp.mpf("67.08"), 10

    def density(f: mp.mpf) -> mp.mpf:
        return mp.exp(b * (f - 1)) * f ** mp.mpf("-0.5") * (1 - f) ** mp.mpf("3.5")

    for xi in ("0.5", "0.8", "0.95"):
        x = mp.mpf(xi)
        reference = mp.quad(density, [0, x / 2, x]) / (mp.quad(density, [0, 0.5, 0.9, 1]))
        assert float(watson_cdf(float(xi), 67.08, dim=p)) == pytest.approx(float(reference), abs=1e-12, rel=1e-8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: watson_moments(np.nan, 3), "concentration"),
        (lambda: watson_moments([1.0, np.inf], 3), "concentration"),
        (lambda: watson_moments("three", 3), "concentration"),
        (lambda: watson_moments(1.0, 1), "dim"),
        (lambda: watson_moments(1.0, 2.5), "dim"),
        (lambda: watson_log_density(1.5, 1.0, dim=3), "f=1.5"),
        (lambda: watson_cdf(-0.1, 1.0, dim=3), "f=-0.1"),
        (lambda: watson_concentration(0.0, 3), "risk"),
        (lambda: watson_concentration([0.5, 1.0], 3), "risk"),
        (lambda: bingham_moments([1.0], 1.0), "at least 2"),
        (lambda: bingham_moments([1.0, np.nan], 1.0), "spectrum"),
        (lambda: bingham_moments([1.0, 2.0], -1.0), "inverse_temperature"),
        (lambda: bingham_log_density([0.0, 0.0], [1.0, 2.0], inverse_temperature=1.0), "squared length"),
        (lambda: bingham_log_density([1.0, 0.0, 0.0], [1.0, 2.0], inverse_temperature=1.0), "2 entries"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(EquilibriaError, match=words):
        call()


# ---- any spectrum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 10, 100, 1000, 10_000, 100_000])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.7, 0.99, 1.0, 1.03, 1.5, 3.1622776601683795, 40.0, 1e4])
def test_contour_integral_and_line_quadrature_agree_on_two_levels(p, ratio):
    b = ratio * p / 2  # ratio 1 is where the direction condenses
    spectrum = np.ones(p)
    spectrum[0] = 0
    contour, line = bingham_moments(spectrum, b), watson_moments(b, p)
    assert contour.second_moments[1:].sum() == pytest.approx(float(line.risk), rel=1e-11)
    assert contour.second_moments[0] == pytest.approx(float(line.mean), rel=1e-11)
    ring = np.log(2) + (p - 1) / 2 * np.log(np.pi) - gammaln((p - 1) / 2)  # area of the unit sphere of p-1 dimensions
    expected = float(line.log_normaliser) - b + ring
    scale = b + p * np.log(p)
    assert contour.log_normaliser == pytest.approx(expected, abs=1e-14 * scale + 1e-12)


@pytest.mark.parametrize("spectrum", [(0.0, 1.0, 3.0), (2.0, 2.5, 2.6), (1.0, 1.0, 4.0)])
def test_three_dimensions_by_brute_force(spectrum):
    c = 2.3

    def weight(phi: float, z: float) -> float:
        x = np.array([np.sqrt(1 - z * z) * np.cos(phi), np.sqrt(1 - z * z) * np.sin(phi), z])
        return float(np.exp(-c * (x**2) @ np.array(spectrum)))

    area = dblquad(weight, -1, 1, 0, 2 * np.pi, epsrel=1e-10)[0]
    third = dblquad(lambda phi, z: z * z * weight(phi, z), -1, 1, 0, 2 * np.pi, epsrel=1e-10)[0] / area
    moments = bingham_moments(spectrum, c)
    assert moments.log_normaliser == pytest.approx(np.log(area), abs=1e-9)
    assert moments.second_moments[2] == pytest.approx(third, rel=1e-8)
    density = bingham_log_density([[0.0, 0.0, 2.0], [3.0, 0.0, 0.0]], spectrum, inverse_temperature=c)
    assert density == pytest.approx(-c * np.array([spectrum[2], spectrum[0]]) - np.log(area), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    spectrum=st.lists(st.floats(-10, 10), min_size=2, max_size=40),
    temperature=st.floats(-3, 5).map(lambda e: 10**e),
    shift=st.floats(-5, 5),
    seed=st.integers(0, 1000),
)
def test_second_moments_add_to_one_and_follow_the_spectrum(spectrum, temperature, shift, seed):
    a = np.array(spectrum)
    moments = bingham_moments(a, temperature).second_moments
    assert moments.sum() == pytest.approx(1, abs=1e-11)
    assert (moments > 0).all()
    order = np.argsort(a)
    assert (np.diff(moments[order]) <= 1e-14).all()
    shuffle = np.random.default_rng(seed).permutation(a.size)
    shifted = bingham_moments(a[shuffle] + shift, temperature).second_moments
    rounding = 1e-14 * (1 + temperature * 15)  # a + shift rounds, and the exponent magnifies it
    assert shifted == pytest.approx(moments[shuffle], rel=1e-11 + rounding)


def test_second_moments_are_the_slope_of_the_normaliser():
    spectrum, c, h = np.array([0.0, 0.4, 1.0, 3.0, 7.0]), 4.0, 1e-4
    moments = bingham_moments(spectrum, c).second_moments
    for i in range(5):
        bump = np.zeros(5)
        bump[i] = h / c
        up, down = (bingham_moments(spectrum + s * bump, c).log_normaliser for s in (1, -1))
        assert -(up - down) / (2 * h) == pytest.approx(moments[i], rel=1e-7)
