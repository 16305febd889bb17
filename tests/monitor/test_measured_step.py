"""Norms and angles from inner products against long double arithmetic on the vectors themselves."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.odd_tensors import slow_angle

from equilibria.errors import EquilibriaError
from equilibria.monitor.monitor import Monitor
from equilibria.monitor.reading import MeasuredStep, angle_between


def step_of(w: np.ndarray, g: np.ndarray, e: np.ndarray, shrink: float) -> MeasuredStep:
    """One step of one weight."""
    pairs = {"ww": w @ w, "wg": w @ g, "gg": g @ g, "we": w @ e, "ee": e @ e, "vg": math.nan, "shrink": shrink}
    return MeasuredStep(**{name: np.array([value]) for name, value in pairs.items()})


def vectors(seed: int, size: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=size), draw.normal(size=size), draw.normal(size=size)


@pytest.mark.parametrize("size", [2, 27, 1000])
@pytest.mark.parametrize("turn", [1e-9, 1e-7, 1e-5, 1e-3, 0.1, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("shrink", [0.0, 1e-3, 0.5])
def test_a_step_is_what_it_does_to_the_vectors(size, turn, shrink):
    w, g, e = vectors(1, size)
    e *= turn * np.linalg.norm(w) / np.linalg.norm(e)
    step, after = step_of(w, g, e, shrink), w + e - shrink * w
    assert step.norm == pytest.approx(np.linalg.norm(w), rel=1e-14)
    assert np.sqrt(step.norm_sq_after) == pytest.approx(np.linalg.norm(after), rel=1e-12)
    assert step.moved == pytest.approx(np.linalg.norm(e - shrink * w), rel=1e-12)
    assert step.cosine == pytest.approx(w @ g / np.linalg.norm(w) / np.linalg.norm(g), rel=1e-12)
    # The reference forms w' in float64, which leaves 1e-16 of the weight: at a turn of 1e-9 that is 1e-7 of it.
    assert step.angle == pytest.approx(slow_angle(w, after), rel=1e-13 / min(turn, 1) + 1e-12)


def test_an_obtuse_turn():
    w, e = np.array([1.0, 0.0]), np.array([-2.0, 1e-3])
    assert step_of(w, w, e, 0.0).angle == pytest.approx(math.pi - math.atan(1e-3), rel=1e-12)


@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e6), shrink=st.floats(0, 0.9))
def test_scaling_the_weight_with_its_move_changes_no_angle(seed, scale, shrink):
    w, g, e = vectors(seed)
    plain, scaled = step_of(w, g, 0.01 * e, shrink), step_of(scale * w, g / scale, 0.01 * scale * e, shrink)
    assert scaled.angle == pytest.approx(plain.angle, rel=1e-12)
    assert scaled.cosine == pytest.approx(plain.cosine, rel=1e-10)
    assert scaled.moved == pytest.approx(scale * plain.moved, rel=1e-12)
    assert scaled.gg * scaled.ww == pytest.approx(plain.gg * plain.ww, rel=1e-12)


@given(seed=st.integers(0, 1000), size=st.floats(1e-5, 1.0))
def test_the_way_back_turns_by_the_same_angle(seed, size):
    w, g, e = vectors(seed)
    there, back = step_of(w, g, size * e, 0.0), step_of(w + size * e, g, -size * e, 0.0)
    assert there.angle == pytest.approx(back.angle, rel=1e-9)


@given(seed=st.integers(0, 1000), shrink=st.floats(0, 0.1))
def test_how_a_move_is_split_into_decay_and_rest_does_not_matter(seed, shrink):
    """Taking part of the decay for part of the move gives the same angle, length and norm."""
    w, g, e = vectors(seed)
    known, unknown = step_of(w, g, 0.01 * e, shrink), step_of(w, g, 0.01 * e - shrink * w, 0.0)
    for name in ("angle", "moved", "norm_sq_after"):
        assert getattr(known, name) == pytest.approx(getattr(unknown, name), rel=1e-9), name


def test_what_is_zero_or_not_finite_becomes_nan_in_silence():
    odd = np.array([0.0, np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300, 1.0])
    grid = np.array(np.meshgrid(odd, odd, odd, odd)).reshape(4, -1)
    ww, gg, ee, we = np.abs(grid[0]), np.abs(grid[1]), np.abs(grid[2]), grid[3]
    for shrink in (0.0, 1e-3):
        step = MeasuredStep(ww=ww, wg=we, gg=gg, we=we, ee=ee, vg=we, shrink=np.full_like(ww, shrink))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in ("norm", "norm_sq_after", "moved", "angle", "cosine"):
                values = getattr(step, name)
                assert values.shape == ww.shape
            assert np.isnan(step.angle[ww == 0]).all()
            assert np.isnan(step.cosine[(gg == 0) & (we == 0)]).all()


# ---- the angle between two tensors


# ---- the angle between two tensors


@pytest.mark.parametrize("angle", [1e-6, 1e-5, 1e-4, 1e-2, 0.7, 1.5, 3.0, math.pi - 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angle_between(angle, dtype):
    first = torch.tensor([3.0, 0.0], dtype=torch.float64)
    second = 0.2 * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    measured = angle_between(first.to(dtype), second.to(dtype))
    # In float32 the entries themselves are rounded: by 6e-8 of the larger one.
    assert measured == pytest.approx(angle, rel=1e-7 if dtype == torch.float32 else 1e-9, abs=1e-7 * (angle > 3))
    assert measured == angle_between(second.to(dtype), first.to(dtype))


@given(seed=st.integers(0, 1000), scale=st.floats(1e-10, 1e10), apart=st.floats(1e-6, 10.0))
def test_angle_between_is_symmetric_and_knows_no_scale(seed, scale, apart):
    w, _, e = (torch.from_numpy(vector) for vector in vectors(seed))
    other = w + apart * e
    right = slow_angle(w.numpy(), other.numpy())
    assert angle_between(w, other) == pytest.approx(right, rel=1e-9)
    assert angle_between(other, scale * w) == pytest.approx(right, rel=1e-8)


def test_angle_between_complex_tensors_counts_both_parts():
    first = torch.tensor([1 + 0j, 0j])
    second = torch.tensor([1 + 0.1j, 0j])
    assert angle_between(first, second) == pytest.approx(math.atan(0.1), rel=1e-6)
    assert angle_between(second.conj(), second) == pytest.approx(2 * math.atan(0.1), rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.ones(3), torch.ones(4), "3 and 4 entries"),
        (torch.zeros(3), torch.ones(3), "norm 0 and"),
        (torch.ones(3), torch.tensor([1.0, math.nan, 1.0]), "nan; expected finite"),
        (torch.tensor([math.inf, 0.0]), torch.ones(2), "norm inf"),
    ],
)
def test_angle_between_refuses_what_has_no_direction(first, second, message):
    with pytest.raises(EquilibriaError, match=message):
        angle_between(first, second)


def test_an_update_that_float32_rounds_away_is_measured_on_the_weights():
    """The angle was computed from the gradient: 4 times too large at lr 1e-8, where most entries do not move."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1e-8)
    truth, exact = [], []
    with Monitor(model, optimizer, every=1) as monitor:
        for _ in range(6):
            weight.grad = torch.randn_like(weight)
            before = weight.detach().double().clone()
            exact.append(angle_between(before, before - 1e-8 * weight.grad.double()))
            optimizer.step()
            truth.append(angle_between(before, weight.detach().double()))
        measured = monitor.samples()["angle"].to_pylist()
        assert monitor._hooks[0].copied_too == {0}
        optimizer.param_groups[0]["lr"] = 1e-4
        for _ in range(2):
            optimizer.step()
        assert monitor._hooks[0].copied_too == frozenset()  # products do again, and cost less
    assert max(truth) < 0.8 * min(exact)  # rounding matters
    assert measured[0] == pytest.approx(exact[0], rel=1e-4)  # one sample shows that the update is that small
    assert measured[1:] == pytest.approx(truth[1:], rel=1e-4)


def test_an_update_well_above_rounding_is_not_copied():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    with Monitor(torch.nn.ParameterList([weight]), optimizer, every=1) as monitor:
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        assert monitor._hooks[0].copied_too == frozenset()
