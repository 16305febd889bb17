"""Closed forms that the sharp experiments use, against direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from equilibria.lab.papers.sharp import cor_b14_rmsprop as rmsprop
from equilibria.lab.papers.sharp import fig4_regression as regression
from equilibria.lab.problems import Regression, Sphere3D, Valley
from equilibria.theory.flow_examples import regression_geometry


def _end_of_gradient_flow(gradient, start, *, time, project=False):
    def motion(_, point):
        slope = gradient(point[None])[0]
        return -(slope - point * (point @ slope) if project else slope)

    return solve_ivp(motion, (0, time), start, rtol=1e-11, atol=1e-13, method="LSODA").y[:, -1]


def test_the_minimiser_of_a_regression_weight_keeps_null_part_and_norm():
    problem = Regression.generate([3], samples=5, dim=8)
    rng = np.random.default_rng(0)
    start = problem.flattest[0] / np.linalg.norm(problem.flattest) + 0.2 * rng.standard_normal(8)
    start /= np.linalg.norm(start)
    end = _end_of_gradient_flow(problem.gradient, start, time=2000, project=True)
    assert problem.value(end[None])[0] < 1e-16
    null = float(np.linalg.norm(problem.null_part(start[None])))
    assert np.linalg.norm(problem.null_part(end[None])) == pytest.approx(null, rel=1e-8)
    flattest = regression_geometry(problem.inputs[0], problem.targets[0]).min_sharpness
    assert problem.sharpness(end[None])[0] == pytest.approx(flattest / (1 - null**2), rel=1e-6)


def test_the_top_eigenvector_of_a_regression_is_that_of_every_minimum_and_across_it():
    problem = Regression.generate([0, 1], samples=6, dim=10)
    tops = regression.top_eigenvectors(problem)
    other = problem.flattest + problem.null_part(np.random.default_rng(1).standard_normal((2, 10)))
    there = np.linalg.eigh(problem.hessian(other))[1][..., -1]
    assert np.abs(np.sum(tops * there, axis=1)) == pytest.approx(1, rel=1e-10)
    assert np.sum(tops * other, axis=1) == pytest.approx(0, abs=1e-9)


def test_the_minimiser_of_a_point_in_the_valley_ends_its_gradient_flow():
    start = np.array([0.4, 1.3])
    end = _end_of_gradient_flow(Valley().gradient, start, time=100)
    assert end[0] == pytest.approx(0, abs=1e-9)
    assert rmsprop._minimiser(start[:1], start[1:])[0] == pytest.approx(end[1], rel=1e-8)


def test_the_gradient_flow_of_the_3d_loss_keeps_z():
    problem = Sphere3D()
    start = np.array([0.5, 0.8, 0.4])
    assert problem.gradient(start[None])[0, 2] == 0


def test_the_effective_lr_of_scalar_rmsprop_is_that_of_the_steps():
    eta, c_b, moment = 0.05, 2.0, 0.01
    x, y, rate = rmsprop._trajectory((0.01, 1.5), eta=eta, c_b=c_b, moment=moment, steps=200)
    point, second = np.array([0.01, 1.5]), moment
    for step in range(200):
        assert (x[step], y[step]) == pytest.approx(tuple(point), rel=1e-9)
        assert rate[step] == pytest.approx(eta / math.sqrt(second), rel=1e-9)
        gradient = Valley().gradient(point[None])[0]
        point = point - eta / math.sqrt(second) * gradient
        second = (1 - c_b * eta**2) * second + c_b * eta**2 * float(gradient @ gradient)


@pytest.mark.slow
def test_a_data_set_that_jumps_over_the_edge_is_left_out_of_claims_about_the_crossing():
    """Set 106 is fitted with a stability ratio of 1.14."""
    config = regression.Config(data_sets=2, seed=106)
    claims = regression.collect(config, {"all": regression.run_task(config, None)}).claims
    assert not [claim.text for claim in claims if claim.fails]
    assert sum("of the 1 data sets below the edge then; 1 had jumped over it" in claim.text for claim in claims) == 2
