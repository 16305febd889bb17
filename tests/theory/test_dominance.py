"""The Polyak-Lojasiewicz condition on a scale-invariant quotient, whose gradient flow is integrated."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from equilibria.errors import EquilibriaError
from equilibria.theory.dominance import flow_length, grad_sq_bound, local_pl_constant, pl_constant, root_gap_drop

CURVES = np.array([3.0, 1.0, 0.5, 0.0, 0.0])
"""L = w'Aw/|w|^2 with this diagonal: the minimisers of the sphere are a circle, with Hessian 2A."""


def quotient(w):
    return np.sum(CURVES * w * w, axis=-1) / np.sum(w * w, axis=-1)


def gradient(w):
    return 2 * (CURVES - quotient(w)[..., np.newaxis]) * w / np.sum(w * w, axis=-1, keepdims=True)


def near_minimisers(radius, *, count=4000, seed=0):
    """Random points of the unit sphere close to the circle of minimisers; the first goes along the flattest axis."""
    rng = np.random.default_rng(seed)
    across = rng.standard_normal((count, 3))
    across[0] = [0, 0, 1]
    along = rng.standard_normal((count, 2))
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (across, along)]
    return np.hstack([radius * unit[0], np.sqrt(1 - radius**2) * unit[1]])


@pytest.mark.parametrize("radius", [0.02, 0.1, 0.3])
def test_the_constant_near_the_minimisers_is_the_smallest_curvature(radius):
    """With a = 1/2 the flattest direction has |grad L|^2/(2 L) = 2a (1 - radius^2) exactly, and no other has less."""
    points = near_minimisers(radius)
    measured = pl_constant(quotient(points), np.sum(gradient(points) ** 2, axis=1))
    limit = local_pl_constant(2 * CURVES, rank=3)
    assert measured == pytest.approx(limit.limit * (1 - radius**2), rel=1e-12)
    assert limit.printed == pytest.approx(1 / 12) and limit.printed < measured


def test_half_the_constant_holds_up_to_a_norm_of_root_two():
    """The step from the sphere to the full space in the proof of theorem D.6; beyond it fails."""
    points = near_minimisers(0.1)
    constant = pl_constant(quotient(points), np.sum(gradient(points) ** 2, axis=1))
    for norm_sq, holds in ((0.5, True), (2.0, True), (2.01, False)):
        scaled = points * np.sqrt(norm_sq)
        allowed = pl_constant(quotient(scaled), np.sum(gradient(scaled) ** 2, axis=1))
        assert (allowed >= constant / 2 * (1 - 1e-12)) is holds


def test_the_gradient_flow_goes_no_farther_than_the_bound():
    """Its length by integration; along the flattest axis the bound is reached up to the change of the constant."""
    for point in near_minimisers(0.1, count=5):
        solution = solve_ivp(
            lambda _, y: [*-gradient(y[:5]), np.linalg.norm(gradient(y[:5]))], (0, 60), [*point, 0.0], rtol=1e-10
        )
        length, distance = solution.y[5, -1], np.linalg.norm(solution.y[:5, -1] - point)
        bound = flow_length(quotient(point), 0.99)  # 1 - radius^2, at its least at the start
        assert distance <= length <= bound
        if not point[:2].any():
            assert length == pytest.approx(bound, rel=0.01)


def test_a_step_lowers_the_root_of_the_gap_as_much_as_the_lemma_says():
    """The constant and the largest curvature hold for all points that a step visits."""
    points = near_minimisers(0.1)
    constant, sharpest = 0.99, 6.0
    grad = gradient(points)
    for lr in (0.3, 0.1, 0.01):
        after = points - lr * grad
        drop = np.sqrt(quotient(points)) - np.sqrt(quotient(after / np.linalg.norm(after, axis=1, keepdims=True)))
        grad_norm = np.linalg.norm(grad, axis=1)
        least = root_gap_drop(grad_norm, effective_lr=lr, max_sharpness=sharpest, constant=constant)
        assert np.all(least > 0) and np.all(drop >= least)
    # To first order in lr the flattest direction loses the bound without its slack 1 - 0.03: reached up to that.
    assert np.min(drop / least) == pytest.approx(1 / 0.97, rel=0.01)


def test_no_gradient_is_larger_than_the_gap_allows():
    points = near_minimisers(0.1)
    squares, bound = np.sum(gradient(points) ** 2, axis=1), grad_sq_bound(quotient(points), 6.0)
    assert np.all(squares <= bound) and np.max(squares / bound) > 0.95  # reached along the sharpest axis


def test_a_rank_beyond_the_positive_eigenvalues_raises():
    with pytest.raises(EquilibriaError, match="rank=4 with an eigenvalue of 0"):
        local_pl_constant(CURVES, rank=4)
