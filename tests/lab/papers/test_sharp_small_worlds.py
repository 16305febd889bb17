"""Parts of the exact experiments on sharpness with logic of their own, against autograd, sampling, hand-made runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.lab.papers.sharp import sec5_gradient_flow as gradient_flow
from equilibria.lab.papers.sharp import thm4_6_random_starts as random_starts
from equilibria.lab.papers.sharp import thm_c2_coverage as coverage

SCALE = 1.7


def loss_of(signed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    score = signed @ weight / weight.norm()
    return torch.nn.functional.softplus(-SCALE * score).mean()


@given(seed=st.integers(0, 1000))
def test_the_third_derivative_is_autograds(seed):
    """Along a direction that is not tangent, too."""
    rng = np.random.default_rng(seed)
    x, w, v = (vector / np.linalg.norm(vector) for vector in rng.standard_normal((3, 3)))
    sample, along = torch.tensor(x[None]), torch.tensor(v)
    value = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivative = loss_of(sample, torch.tensor(w) + value * along)
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative, value, create_graph=True)
    mine = coverage.third_derivative(*(np.asarray(number) for number in (x @ w, x @ v, w @ v)), SCALE)
    assert float(mine) == pytest.approx(derivative.item(), rel=1e-9, abs=1e-9)
    assert abs(float(mine)) <= 1.01 * coverage.largest_third_derivative(SCALE, points=61)


def test_the_hessian_is_autograds_and_training_ends_where_the_gradient_vanishes():
    config = coverage.Config(samples=400, scale=SCALE)
    signed = coverage.draw_samples(config, np.random.default_rng(0))
    unit = coverage.train(signed, config)
    data, weight = torch.tensor(signed), torch.tensor(unit, requires_grad=True)
    (slope,) = torch.autograd.grad(loss_of(data, weight), weight)
    assert slope.norm().item() < 1e-10
    for point in (unit, np.array([0.6, 0.0, -0.8])):
        expected = torch.autograd.functional.hessian(lambda w: loss_of(data, w), torch.tensor(point))
        np.testing.assert_allclose(coverage.sample_hessian(signed, point, SCALE), expected.numpy(), atol=1e-12)


def test_the_population_loss_is_that_of_very_many_samples():
    config = coverage.Config(samples=400_000, scale=SCALE)
    signed = coverage.draw_samples(config, np.random.default_rng(1))
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 0.3, -2.0], [-1.0, 0.2, 0.0]])
    units = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    sampled = np.logaddexp(0.0, -SCALE * signed @ units.T)
    errors = 4 * sampled.std(axis=0) / math.sqrt(config.samples)
    assert np.all(np.abs(coverage.PopulationLoss(config)(weights) - sampled.mean(axis=0)) <= errors)


def test_a_gap_above_the_bound_is_not_covered():
    config = coverage.Config(data_sets=20, perturbed_sets=3, draws=50, samples=1000)
    results = {name: dict(coverage.run_task(config, task)) for name, task in coverage.tasks(config).items()}
    right = coverage.collect(config, results).claims
    results["data-sets"]["gap"] = results["data-sets"]["gap"] + config.max_loss
    wrong = coverage.collect(config, results).claims
    assert [claim.verdict for claim in right[:2]] == 2 * ["shown"]
    assert [claim.verdict for claim in wrong[:2]] == 2 * ["contradicted"]


# ---- gradient flow


def test_the_flow_ends_at_a_minimum_with_the_norm_and_null_part_of_the_start():
    problem = gradient_flow.Config(data_sets=3).problem
    ends = gradient_flow.flow_end(problem)
    assert problem.value(ends).max() < 1e-25
    null, norm = problem.null_part(problem.initial), np.linalg.norm(problem.initial, axis=1, keepdims=True)
    scaled = ends / np.linalg.norm(ends, axis=1, keepdims=True) * norm
    np.testing.assert_allclose(problem.null_part(scaled), null, atol=1e-10)


def test_a_descent_that_is_no_better_than_the_flow_is_not_shown():
    config = replace(gradient_flow.EXPERIMENT.config("smoke"), lrs=(0.25,))
    results = {name: dict(gradient_flow.run_task(config, task)) for name, task in gradient_flow.tasks(config).items()}
    worse = {
        **results["lr-0.25"],
        "risk": results["lr-0.25"]["risk"] + 1.0,
        "distance": 2 * results["lr-0.25"]["distance"],
    }
    right, wrong = (
        [claim.verdict for claim in gradient_flow.collect(config, run).claims[2:]]
        for run in (results, {**results, "lr-0.25": worse})
    )
    assert right == ["shown", "shown"] and wrong == ["contradicted", "contradicted"]


# ---- random starts


def test_the_flow_for_c_b_2_is_that_of_weight_decay_at_twice_the_time():
    """tan(angle) on a valley of the sphere has no closed form here; the speed at the start has."""
    config = random_starts.Config()
    times = np.array([0.0, 1e-6])
    point = random_starts.flow_points(config, None, times)[-1]
    slope = config.b * math.sin(2 * config.angle) / (config.a + config.b * math.sin(config.angle) ** 2)
    moved = config.angle - math.atan2(point[1], point[2])
    assert moved / 1e-6 == pytest.approx(slope / (4 + slope**2), rel=1e-3)


def test_starts_that_leave_the_flow_are_counted():
    config = random_starts.Config(etas=(0.16, 0.04), c_bs=(), spreads=(1.0,), trials=20)
    near, far = np.full(20, 0.1), np.concatenate([np.full(10, 0.1), np.full(9, 0.9), [np.nan]])
    assert random_starts.failures(config, {"worst": near}, 0.04) == 0
    assert random_starts.failures(config, {"worst": far}, 0.04) == 0.5
    results = {random_starts.key(None, eta, 1.0): {"worst": far, "end": far} for eta in config.etas}
    assert random_starts.collect(config, results).claims[0].verdict == "contradicted"
