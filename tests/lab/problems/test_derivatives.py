"""Values, gradients and Hessians against torch's autograd, and what scale invariance says about them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.small_worlds import INVARIANT, PROBLEMS, TRIALS, point

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.lab.problems import Completion, LogisticToy, RayleighQuotient, Regression, Sphere3D, SphereValley


def tensors(problem, weights, trial):
    return {name: torch.tensor(part[trial]) for name, part in problem.split(weights).items()}


def single(problem, trial):
    return problem if problem.trials is None else problem.take(trial, trial + 1)


def flat(params):
    return np.concatenate([part.detach().numpy().ravel() for part in params.values()])


def by_autograd(problem, weights, direction, draws, trial):
    """Loss, gradient and Hessian-vector product of one trial."""
    loss_of = single(problem, trial).torch_loss
    sample = None if draws is None else torch.tensor(draws[trial])
    objective = eq.Objective(lambda params, batch: loss_of(params, batch), tensors(problem, weights, trial))
    leaves = {name: param.requires_grad_() for name, param in objective.params.items()}
    value, grads = objective.value_and_grad(sample, params=leaves, create_graph=True)
    toward = tensors(problem, direction, trial)
    slope = sum((grads[name] * toward[name]).sum() for name in grads)
    curved = dict.fromkeys(leaves, torch.zeros(()))
    if slope.requires_grad:
        found = torch.autograd.grad(slope, list(leaves.values()), allow_unused=True)
        curved = {
            name: torch.zeros_like(leaf) if part is None else part
            for (name, leaf), part in zip(leaves.items(), found, strict=True)
        }
    return value.item(), flat(grads), flat(curved)


@pytest.mark.parametrize("name", PROBLEMS)
def test_value_gradient_and_curvature_are_those_of_autograd(name):
    problem = PROBLEMS[name]()
    weights, direction, draws = point(problem)
    value, gradient = problem.value(weights, draws), problem.gradient(weights, draws)
    curved = problem.hvp(weights, direction, draws=draws)
    assert value.shape == (TRIALS,)
    assert gradient.shape == curved.shape == (TRIALS, problem.size)
    for trial in range(TRIALS):
        expected = by_autograd(problem, weights, direction, draws, trial)
        for mine, theirs in zip((value[trial], gradient[trial], curved[trial]), expected, strict=True):
            assert np.abs(mine - theirs).max() <= 1e-10 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_hessian_is_symmetric_and_holds_the_products(name):
    problem = PROBLEMS[name]()
    weights, direction, draws = point(problem, seed=1)
    hessian = problem.hessian(weights, draws=draws)
    scale = np.abs(hessian).max()
    assert np.abs(hessian - hessian.transpose(0, 2, 1)).max() <= 1e-13 * scale
    product = np.einsum("tij,tj->ti", hessian, direction)
    np.testing.assert_allclose(product, problem.hvp(weights, direction, draws=draws), atol=1e-12 * scale)


@pytest.mark.parametrize("name", INVARIANT)
@given(factor=st.floats(1e-3, 1e3), seed=st.integers(0, 50))
def test_scale_invariance(name, factor, seed):
    """L(kw) = L(w), grad(kw) = grad(w)/k, H(kw) = H(w)/k^2, <grad, w> = 0, H w = -grad."""
    problem = PROBLEMS[name]()
    weights, direction, draws = point(problem, seed=seed)
    scaled = factor * weights
    gradient, curved = problem.gradient(weights, draws), problem.hvp(weights, direction, draws=draws)
    small, bend = 1e-11 * (1 + np.abs(gradient).max()), 1e-11 * (1 + np.abs(curved).max())
    np.testing.assert_allclose(problem.value(scaled, draws), problem.value(weights, draws), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(factor * problem.gradient(scaled, draws), gradient, atol=small)
    np.testing.assert_allclose(factor**2 * problem.hvp(scaled, direction, draws=draws), curved, atol=bend)
    assert np.abs(np.einsum("ti,ti->t", gradient, weights)).max() <= small * np.abs(weights).sum()
    np.testing.assert_allclose(
        problem.hvp(weights, weights, draws=draws), -gradient, atol=1e-10 * (1 + np.abs(gradient).max())
    )


@pytest.mark.parametrize("part", ["U", "V"])
def test_completion_is_invariant_in_each_factor(part):
    problem = PROBLEMS["completion"]()
    weights, _, _ = point(problem)
    scaled = weights.copy()
    problem.split(scaled)[part][...] *= 7.0
    np.testing.assert_allclose(problem.value(scaled), problem.value(weights), rtol=1e-13)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if not name.startswith("logistic")])
def test_sharpness_is_the_top_eigenvalue_at_unit_norm(name):
    problem = PROBLEMS[name]()
    weights, _, _ = point(problem, seed=3, scale=2.5)
    at = weights / np.linalg.norm(weights, axis=1, keepdims=True) if problem.invariant else weights
    expected = np.linalg.eigvalsh(problem.hessian(at))[:, -1]
    np.testing.assert_allclose(problem.sharpness(weights), expected, rtol=1e-8, atol=1e-10)


def test_near_a_minimum_the_3d_loss_keeps_its_digits():
    problem = Sphere3D()
    weights = np.array([[1.0 + 1e-9, 1.0, 0.3]])
    small = 1e-9 + np.float64(1.0 + 1e-9 - 1.0 - 1e-9)  # what float64 holds of 1e-9 here
    np.testing.assert_allclose(problem.value(weights), 3 * small**2 / 4, rtol=1e-8)


def test_the_other_side_of_the_3d_loss():
    np.testing.assert_allclose(Sphere3D().value(np.array([[-1.0, -1.0, 0.0], [1.0, -1.0, 0.5]])), [4.0, 2.0])


BAD = {
    "one eigenvalue": (lambda: RayleighQuotient([1.0]), "spectrum"),
    "descending": (lambda: RayleighQuotient([2.0, 1.0]), "ascending"),
    "negative noise": (lambda: RayleighQuotient([1.0, 2.0], noise=-1), "noise=-1"),
    "rotation by half a seed": (lambda: Sphere3D(rotation_seed=0.5), "rotation_seed=0.5"),
    "flat valley": (lambda: SphereValley(0.0, 1.0), "got a=0; expected 0 < a"),
    "data of different lengths": (
        lambda: Regression(np.ones((1, 3, 2)), np.arange(4.0)[None], np.ones((1, 2)), [0.0], [1, 1], np.ones((1, 2))),
        r"targets \(1, 4\); expected inputs \(trials, n, d\) and targets \(1, 3\)",
    ),
    "equal targets": (
        lambda: Regression(np.ones((1, 3, 2)), np.ones((1, 3)), np.ones((1, 2)), [0.0], [1, 1], np.ones((1, 2))),
        "variance of targets=0",
    ),
    "one dimension": (lambda: LogisticToy(1), "dim=1"),
    "no seeds": (lambda: Regression.generate([]), "no seeds"),
    "seed with a fraction": (lambda: Regression.generate([0.5]), "seed=0.5"),
    "more entries than there are": (lambda: Completion.generate([0], dim=5, observed=26), "observed <= 25"),
    "matrix of another shape": (lambda: Completion(np.ones((1, 2, 3)), np.ones((1, 1), int), np.ones((1, 8))), "d, d"),
    "an entry twice": (
        lambda: Completion(np.ones((1, 2, 2)), np.array([[1, 1]]), np.ones((1, 8))),
        "different positions",
    ),
    "sample missing": (lambda: LogisticToy(2).value(np.ones((1, 2))), "no draws"),
    "many data sets in torch": (lambda: PROBLEMS["regression"]().torch_loss({"w": torch.ones(9)}), "3 data sets"),
    "no risk": (lambda: Sphere3D().risk(np.ones((1, 3))), "risk of Sphere3D"),
    "sharpness of a sample": (lambda: LogisticToy(2).sharpness(np.ones((1, 2))), "sharpness of LogisticToy"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(make, message):
    with pytest.raises(EquilibriaError, match=message):
        make()
