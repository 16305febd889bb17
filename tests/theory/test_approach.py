"""Rates of approach against numerical Jacobians and slow iterations of recursions written out separately."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from tests.helpers.random_walk import expected_adam_step, expected_sgd_step, expected_sgdw_step

from equilibria.errors import EquilibriaError
from equilibria.theory import approach, moments

# Three families of SGD: name -> one expected step (P, Q, R) -> (P', Q', R') with lr = 1, wd = eps.
STEPS = {
    "heavy_ball": lambda x, eps, a, unit_grad_sq: expected_sgd_step(*x, 1, eps, a, unit_grad_sq)[:3],
    "nesterov": lambda x, eps, a, unit_grad_sq: expected_sgd_step(*x, 1, eps, a, unit_grad_sq, nesterov=True)[:3],
    "sgdw": lambda x, eps, a, unit_grad_sq: expected_sgdw_step(*x, 1, eps, a, unit_grad_sq)[:3],
}
RATES = {
    "heavy_ball": approach.heavy_ball_approach,
    "nesterov": approach.nesterov_approach,
    "sgdw": approach.sgdw_approach,
}
OURS = {
    "heavy_ball": moments.heavy_ball_step,
    "nesterov": moments.nesterov_step,
    "sgdw": moments.sgdw_step,
}


def fixed_point(kind, eps, a, digits=50):
    """(P, Q, R) = (1, Q, R) and L, from Newton's method on the recursion itself."""
    mp.dps = digits
    eps, a = mpf(eps), mpf(a)

    def residual(q, r, unit_grad_sq):
        after = STEPS[kind]((mpf(1), q, r), eps, a, unit_grad_sq)
        return [after[0] - 1, after[1] - q, after[2] - r]

    q, r, unit_grad_sq = mp.findroot(
        residual, (-eps / (1 + a), 2 * eps / (1 + a), 2 * eps * (1 - a)), tol=mpf(10) ** (10 - digits)
    )
    return (mpf(1), q, r), unit_grad_sq


def jacobian(kind, eps, a):
    """Central differences with 50 digits: exact to 1e-20."""
    state, unit_grad_sq = fixed_point(kind, eps, a)
    h = mpf(10) ** -20
    columns = []
    for i in range(3):
        up, down = ([x + sign * h * (i == j) for j, x in enumerate(state)] for sign in (1, -1))
        after = zip(
            STEPS[kind](up, mpf(eps), mpf(a), unit_grad_sq),
            STEPS[kind](down, mpf(eps), mpf(a), unit_grad_sq),
            strict=True,
        )
        columns.append([float((x - y) / (2 * h)) for x, y in after])
    return np.array(columns).T


GRID = [(0.0, 0.05), (0.0, 0.7), (0.5, 0.02), (0.5, 0.6), (0.9, 1e-4), (0.9, 2.5e-4), (0.9, 0.01), (0.95, 1e-3)]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("a", "eps"), GRID)
def test_rate_is_the_largest_eigenvalue_of_the_numerical_jacobian(kind, a, eps):
    numerical = jacobian(kind, eps, a)
    ours = approach.map_linearisation(OURS[kind], 1.0, eps, a).jacobian
    np.testing.assert_allclose(ours, numerical, rtol=1e-11, atol=1e-12)
    eigenvalues = np.linalg.eigvals(numerical)
    dominant = eigenvalues[np.argmax(np.abs(eigenvalues))]
    result = RATES[kind](eps, momentum=a)
    assert result.rate == pytest.approx(abs(dominant), rel=1e-9)
    assert result.monotone == (abs(dominant.imag) < 1e-9 and dominant.real > 0)
    assert result.time_constant == pytest.approx(-1 / math.log(result.rate), rel=1e-6)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("a", "eps"), [*GRID, (0.9, 1e-9), (0.9, 1e-20), (0.999, 1e-60)])
def test_fixed_point_to_rounding_however_small_the_decay(kind, a, eps):
    (_, q, r), unit_grad_sq = fixed_point(kind, eps, a, digits=200)
    state, predicted = approach.fixed_point(OURS[kind], 1.0, eps, a)
    np.testing.assert_allclose([*state, predicted], [1.0, float(q), float(r), float(unit_grad_sq)], rtol=1e-14)


@pytest.mark.parametrize(("a", "eps"), GRID)
def test_remaining_eigenvalues_are_those_of_the_closed_forms(a, eps):
    """Heavy ball: momentum^2 beside the pair of kappa; decoupled decay: momentum^2 (1-eps)^2."""
    s = 1 - eps
    kappas = {
        "heavy_ball": (1 + a - 4 * eps + 2 * eps**2 / (1 + a), a, a**2),
        "sgdw": ((a**2 * (2 - s**2) + 2 * a * s + 2 * s**2 - 1) / (1 + a * s), a * s, (a * s) ** 2),
    }
    for kind, (kappa, product, third) in kappas.items():
        expected = np.poly([*np.roots([1, -kappa, product]), third])
        np.testing.assert_allclose(np.poly(jacobian(kind, eps, a)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("a", "eps"), [(0.0, 0.05), (0.9, 1e-4), (0.9, 2.5e-4), (0.5, 0.02)])
def test_rate_matches_the_iterated_recursion(kind, a, eps):
    """Deviations of 1e-25 with 90 digits: no nonlinearity, no rounding, until only the slowest mode is left."""
    state, unit_grad_sq = fixed_point(kind, eps, a, digits=90)
    x = [state[0] * (1 + mpf(10) ** -25), state[1], state[2]]
    deviations = []
    # The other modes are down by a factor 1e-9 or more after this many steps.
    steps = 60 if a == 0 else 3000 if a == 0.9 else 250
    for _ in range(steps):
        x = STEPS[kind](x, mpf(eps), mpf(a), unit_grad_sq)
        deviations.append(x[0] - 1)
    measured = float((deviations[-1] / deviations[-11]) ** (mpf(1) / 10))
    assert RATES[kind](eps, momentum=a).rate == pytest.approx(measured, abs=1e-8)


@pytest.mark.parametrize(
    ("a", "eps", "printed"),
    [
        (0.9, 1e-4, "0.9958440"),
        (0.9, 2.5e-4, "0.98887404"),
        (0.5, 0.02, "0.777190"),
        (0.0, 0.05, "0.805"),
        (0.0, 1e-4, "0.99960002"),
    ],
)
def test_heavy_ball_rates_as_published(a, eps, printed):
    last_digit = 10.0 ** -len(printed.split(".")[1])
    assert approach.heavy_ball_approach(eps, momentum=a).rate == pytest.approx(float(printed), abs=last_digit)


@given(a=st.floats(0.0, 0.98), eps=st.floats(1e-7, 1e-3))
def test_heavy_ball_rate_to_second_order(a, eps):
    eps *= (1 - a) ** 2
    series = 4 * eps / (1 - a) + 2 * (7 * a**2 + 10 * a - 1) * eps**2 / ((1 - a) ** 3 * (1 + a))
    size = eps / (1 - a) ** 2  # the series runs in this
    gap = -math.expm1(-1 / approach.heavy_ball_approach(eps, momentum=a).time_constant)
    assert gap == pytest.approx(series, rel=100 * size**2 + 1e-12, abs=0)


@given(a=st.floats(0.0, 0.98), eps=st.floats(1e-8, 1e-5))
def test_first_order_rates_agree_between_coupled_rules(a, eps):
    eps *= (1 - a) ** 2
    for rate in (approach.heavy_ball_approach, approach.nesterov_approach):
        assert 1 / rate(eps, momentum=a).time_constant == pytest.approx(4 * eps / (1 - a), rel=1e-3, abs=0)
    assert 1 / approach.sgdw_approach(eps, momentum=a).time_constant == pytest.approx(4 * eps, rel=1e-3, abs=0)


@functools.cache
def exact_threshold(kind, a):
    """Smallest lr wd with a double root of the characteristic polynomial: its discriminant in rational arithmetic."""
    eps, z, p, q, r, unit_grad_sq = sympy.symbols("eps z P Q R L")
    after = sympy.Matrix(STEPS[kind]((p, q, r), eps, a, unit_grad_sq))
    fixed = sympy.solve([(after[i] - x).subs(p, 1) for i, x in enumerate((p, q, r))], [q, r, unit_grad_sq], dict=True)[
        0
    ]
    matrix = after.jacobian([p, q, r]).subs(p, 1).subs(fixed)
    polynomial = sympy.numer(sympy.together((z * sympy.eye(3) - matrix).det()))
    discriminant = sympy.numer(sympy.together(sympy.discriminant(polynomial, z)))
    roots = sympy.Poly(discriminant, eps).nroots(n=25, maxsteps=300)
    return min(float(sympy.re(x)) for x in roots if abs(sympy.im(x)) < 1e-15 and sympy.re(x) > 1e-12)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("a", ["9/10", "19/20", "1/2"])
def test_oscillation_threshold_is_a_root_of_the_discriminant(kind, a):
    exact = exact_threshold(kind, sympy.Rational(a))
    ours = approach.oscillation_threshold(float(sympy.Rational(a)), kind=kind)
    assert ours == pytest.approx(exact, rel=1e-8, abs=0)
    assert RATES[kind](0.999 * exact, momentum=float(sympy.Rational(a))).monotone
    assert not RATES[kind](1.001 * exact, momentum=float(sympy.Rational(a))).monotone


@pytest.mark.parametrize(
    ("a", "kind", "value"),
    [
        (0.9, "heavy_ball", 6.58e-4),
        (0.95, "heavy_ball", 1.603e-4),
        (0.99, "heavy_ball", 6.28e-6),
        (0.9, "nesterov", 6.909e-4),
        (0.95, "nesterov", 1.641e-4),
        (0.5, "nesterov", 2.861e-2),
        (0.9, "sgdw", 7.54e-3),
    ],
)
def test_oscillation_threshold_values(a, kind, value):
    assert approach.oscillation_threshold(a, kind=kind) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("a", [0.0, 0.3, 0.99, 0.9999, 0.99999])
def test_oscillation_threshold_is_the_first_crossing(kind, a):
    """Decoupled decay is monotone again far above its threshold; the search must not land there."""
    threshold = approach.oscillation_threshold(a, kind=kind)
    below = threshold * np.linspace(0.01, 0.999, 30)
    assert all(RATES[kind](float(eps), momentum=a).monotone for eps in below)
    assert not RATES[kind](threshold * 1.01, momentum=a).monotone


def test_heavy_ball_threshold_keeps_its_digits_near_momentum_one():
    mp.dps = 50
    a = mpf(0.99999)
    exact = (1 + a) * (1 - mp.sqrt(1 - (1 - mp.sqrt(a)) ** 2 / (2 * (1 + a))))
    assert approach.oscillation_threshold(0.99999) == pytest.approx(float(exact), rel=1e-9, abs=0)


@pytest.mark.parametrize("a", [0.5, 0.9, 0.95])
def test_heavy_ball_saturates_and_the_others_do_not(a):
    threshold = approach.oscillation_threshold(a)
    for times in (1.001, 2, 5, 15):
        result = approach.heavy_ball_approach(times * threshold, momentum=a)
        assert result.rate == pytest.approx(math.sqrt(a), rel=1e-14)
        assert not result.monotone
    nag = approach.oscillation_threshold(a, kind="nesterov")
    speeds = [approach.nesterov_approach(times * nag, momentum=a).rate for times in (1.01, 2, 5, 15)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] < math.sqrt(a)
    for times in (1.001, 2, 5):
        eps = times * approach.oscillation_threshold(a, kind="sgdw")
        assert approach.sgdw_approach(eps, momentum=a).rate == pytest.approx(math.sqrt(a * (1 - eps)), rel=1e-12)


@given(a=st.floats(0, 0.99), share=st.floats(0.001, 0.999))
def test_heavy_ball_is_stable_up_to_twice_one_plus_momentum(a, share):
    eps = share * 2 * (1 + a)
    if abs(eps / (1 + a) - 1) > 1e-3:
        assert approach.heavy_ball_approach(eps, momentum=a).rate < 1


def adam_jacobian(eps, betas, *, decoupled):
    """Central differences of the four-variable recursion at the fixed point that iteration finds; lr = 1, v = 1."""
    mp.dps = 50
    eps = mpf(eps)
    betas = tuple(mpf(b) for b in betas)

    def step(x, unit_grad_sq, dim):
        return expected_adam_step(*x, mpf(1), eps, betas, unit_grad_sq, dim, decoupled=decoupled)[:4]

    def residual(q, r, unit_grad_sq, dim):
        after = step((mpf(1), q, r, mpf(1)), unit_grad_sq, dim)
        return [after[0] - 1, after[1] - q, after[2] - r, after[3] - 1]

    q, r, unit_grad_sq, dim = mp.findroot(residual, (-eps, eps, 2 * eps, 2 * eps), tol=1e-40)
    h = mpf(10) ** -20
    columns = []
    for i in range(4):
        up, down = ([x + s * h * (i == j) for j, x in enumerate((mpf(1), q, r, mpf(1)))] for s in (1, -1))
        columns.append(
            [
                float((x - y) / (2 * h))
                for x, y in zip(step(up, unit_grad_sq, dim), step(down, unit_grad_sq, dim), strict=True)
            ]
        )
    return np.array(columns).T


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("eps", "betas"), [(5e-4, (0.9, 0.999)), (1e-5, (0.9, 0.99)), (0.01, (0.9, 0.95)), (2e-3, (0.0, 0.999))]
)
def test_adam_rate_is_the_largest_eigenvalue_of_the_numerical_jacobian(eps, betas, decoupled):
    numerical = adam_jacobian(eps, betas, decoupled=decoupled)
    ours = approach.adam_linearisation(eps, betas=betas, decoupled=decoupled).jacobian
    np.testing.assert_allclose(np.poly(ours), np.poly(numerical), rtol=1e-8, atol=1e-10)
    result = approach.adam_approach(eps, betas=betas, decoupled=decoupled)
    assert result.rate == pytest.approx(np.abs(np.linalg.eigvals(numerical)).max(), rel=1e-9)
    assert result.monotone


@pytest.mark.parametrize(
    ("eps", "beta2", "decoupled", "gap"),
    [(5e-4, 0.999, True, 3.82e-4), (5.85e-4, 0.999, False, 6.5e-4), (1e-6, 0.9, True, 2e-6), (1e-6, 0.9, False, 3e-6)],
)
def test_adam_rate_with_the_lag_of_the_second_moment(eps, beta2, decoupled, gap):
    """Rates of the pair (P, v): r^2 - (4 eps + s) r + (2 or 3) eps s = 0; the first moment adds O(eps)."""
    s, factor = 1 - beta2, 2 if decoupled else 3
    slow = ((4 * eps + s) - math.sqrt((4 * eps + s) ** 2 - 4 * factor * eps * s)) / 2
    assert slow == pytest.approx(gap, rel=8e-3, abs=0)
    ours = 1 - approach.adam_approach(eps, betas=(0.9, beta2), decoupled=decoupled).rate
    assert ours == pytest.approx(slow, rel=1e-2, abs=0)


@given(eps=st.floats(1e-6, 0.3), memory=st.floats(0, 0.999))
def test_constant_update_is_as_slow_as_the_slower_of_decay_and_memory(eps, memory):
    """P' = (1-eps)^2 P + ... + pull, pull' = (1-eps) memory pull: a triangular map, so its diagonal."""
    expected = max((1 - eps) ** 2, (1 - eps) * memory)
    result = approach.constant_update_approach(eps, slowest_memory=memory)
    assert result.rate == pytest.approx(expected, rel=1e-12)
    assert result.monotone


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, "0.1", None])
def test_bad_products_and_momenta_raise(bad):
    for law in RATES.values():
        with pytest.raises(EquilibriaError):
            law(bad, momentum=0.9)
        with pytest.raises(EquilibriaError):
            law(1e-3, momentum=bad)
    with pytest.raises(EquilibriaError):
        approach.constant_update_approach(bad)
    with pytest.raises(EquilibriaError):
        approach.adam_approach(bad, betas=(0.9, 0.999), decoupled=True)
    with pytest.raises(EquilibriaError):
        approach.oscillation_threshold(bad)


def test_unknown_kind_raises():
    with pytest.raises(EquilibriaError, match="heavy_ball"):
        approach.oscillation_threshold(0.9, kind="adam")
