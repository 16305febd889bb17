"""The angle from three norms, and the error that rounding leaves, against vectors and against high precision."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.importing._angles import angles_from_norms, rounding


def _pair(seed: int, turn: float, growth: float) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and the one after a step that turns it by about ``turn`` and makes it ``growth`` longer."""
    generator = np.random.default_rng(seed)
    weight, other = generator.standard_normal((2, 30))
    other -= weight * (other @ weight) / (weight @ weight)
    other *= np.linalg.norm(weight) / np.linalg.norm(other)
    return weight, (1 + growth) * (np.cos(turn) * weight + np.sin(turn) * other)


def _exact(weight: np.ndarray, after: np.ndarray) -> float:
    """The angle between two vectors with 60 digits."""
    with mpmath.workdps(60):
        one, other = ([mpmath.mpf(float(value)) for value in vector] for vector in (weight, after))
        dot, first, second = (mpmath.fdot(*pair) for pair in ((one, other), (one, one), (other, other)))
        return float(mpmath.acos(dot / mpmath.sqrt(first * second)))


_TURNS = st.floats(-5, 0.4).map(lambda power: 10.0**power)
_GROWTHS = st.floats(-0.5, 0.5)


@given(seed=st.integers(0, 10_000), turn=_TURNS, growth=_GROWTHS, scale=st.floats(-8, 8).map(lambda p: 10.0**p))
@settings(max_examples=150, deadline=None)
def test_the_angle_is_that_of_the_vectors_at_any_scale(seed, turn, growth, scale):
    weight, after = _pair(seed, turn, growth)
    weight, after = weight * scale, after * scale
    sides = [np.array([np.linalg.norm(vector)]) for vector in (weight, after, after - weight)]
    errors = tuple(1e-15 * side for side in (sides[0], sides[0] + sides[1], sides[2]))
    turned = angles_from_norms(*sides, errors=errors)
    exact = _exact(weight, after)
    # the difference of two float64 vectors is off by an eps of each entry, which the norm of the update inherits
    of_vectors = 4e-16 * (sides[0][0] + sides[1][0]) / sides[0][0]
    assert abs(turned.angle[0] - exact) <= turned.error[0] + of_vectors * 10


_FORMATS = {
    "float32": lambda value: float(np.float32(value)),
    "bfloat16": lambda value: math.ldexp(round(math.frexp(value)[0] * 256) / 256, math.frexp(value)[1]),
    "%.4f": lambda value: float(f"{value:.4f}"),
    "%.6g": lambda value: float(f"{value:.6g}"),
    "%.3e": lambda value: float(f"{value:.3e}"),
}


@pytest.mark.parametrize("form", _FORMATS)
@given(seed=st.integers(0, 10_000), turn=_TURNS, growth=st.floats(-1e-3, 1e-3))
@settings(max_examples=60, deadline=None)
def test_the_stated_error_holds_for_rounded_numbers(form, seed, turn, growth):
    pairs = [_pair(seed + number, turn, growth) for number in range(40)]
    exact = np.array([np.arctan2(np.sin(turn), np.cos(turn)) for _ in pairs])
    sides = [
        np.array([_FORMATS[form](np.linalg.norm(vector)) for vector in column])
        for column in zip(*((weight, after, after - weight) for weight, after in pairs), strict=True)
    ]
    of_before, of_after, of_moved = map(rounding, sides)
    turned = angles_from_norms(*sides, errors=(of_before, of_before + of_after, of_moved))
    known = np.isfinite(turned.angle)
    assert np.all(np.abs(turned.angle - exact)[known] <= turned.error[known] + 1e-12)


def test_the_error_is_not_larger_than_what_rounding_can_do():
    """With one number at the end of its interval the angle is where the error says."""
    sides = np.array([10.0]), np.array([10.0]), np.array([0.1])
    error = np.array([0.0]), np.array([0.0]), np.array([1e-3])
    turned = angles_from_norms(*sides, errors=error)
    furthest = angles_from_norms(sides[0], sides[1], sides[2] + 1e-3, errors=error).angle
    assert turned.error[0] == pytest.approx(float(furthest[0] - turned.angle[0]), rel=1e-6)


def test_an_angle_that_rounding_hides_has_an_error_as_large_as_itself():
    sides = np.array([10.0]), np.array([10.01]), np.array([0.0100001])  # the whole update lies along the weight
    turned = angles_from_norms(*sides, errors=(np.array([5e-3]), np.array([1e-2]), np.array([5e-8])))
    assert turned.error[0] >= turned.angle[0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_norm_gives_no_angle(missing):
    sides = [np.array([value]) for value in (1.0, 1.0, 0.1)]
    sides[missing] = np.array([np.nan])
    turned = angles_from_norms(*sides, errors=(np.zeros(1),) * 3)
    assert np.isnan(turned.angle[0])
    assert np.isnan(turned.error[0])


@pytest.mark.parametrize("form", ["{:.3f}", "{:.5g}", "{:.2e}", "{!r}"])
def test_rounding_is_half_a_unit_of_the_written_digits(form):
    exact = np.random.default_rng(3).uniform(1e-3, 50, 500)
    written = np.array([float(form.format(value)) for value in exact.tolist()])
    error = rounding(written)
    assert np.all(np.abs(written - exact) <= error)
    if form != "{!r}":
        assert np.abs(written - exact).max() > error.max() / 4  # and not far larger


def test_rounding_of_one_value_or_none():
    assert rounding(np.array([np.nan])).shape == (1,)
    assert rounding(np.zeros(3)).tolist() == [0, 0, 0]
