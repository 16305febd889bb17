"""The worlds behave as the verified formula sheets say: minima, sharpness, equilibria, the edge of stability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.lab.problems import (
    Completion,
    LogisticToy,
    RandomWalk,
    RayleighQuotient,
    Regression,
    ScalarRMSpropRule,
    Simulation,
    Sphere3D,
    SphereValley,
    Valley,
)
from equilibria.theory import SGD
from equilibria.theory.flow_examples import regression_geometry, rmsprop_valley_position
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_risk import stationary_risk

REGRESSION = SGD(0.5, 2e-4)
# seed -> step at which the training loss is below 1e-6, test loss at the end, that of the flattest minimum
REGRESSION_TABLE = {
    0: (125, 0.2625, 0.2613),
    1: (174, 0.2665, 0.2674),
    2: (110, 0.1423, 0.1417),
    3: (90, 0.1504, 0.1518),
    5: (155, 0.2524, 0.2543),
    8: (49, 0.2129, 0.2121),
}
COMPLETION = SGD(0.1, 0.01)


@given(z=st.floats(-0.95, 0.95), seed=st.integers(0, 20))
def test_sharpness_along_the_3d_minima(z, seed):
    problem = Sphere3D(rotation_seed=seed)
    minimum = problem.minimiser(z)
    assert np.abs(problem.gradient(minimum)).max() <= 1e-14 / (1 - z * z)
    np.testing.assert_allclose(problem.sharpness(minimum), 6 / (1 - z * z), rtol=1e-12)


def test_the_3d_hessian_on_its_minima_is_the_papers():
    problem = Sphere3D()
    expected = 3 / (1 - 0.6**2) * np.array([[1, -1, 0], [-1, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(problem.hessian(problem.minimiser(0.6))[0], expected, atol=1e-13)


@given(angle=st.floats(-3, 3), a=st.floats(0.1, 5), b=st.floats(0.1, 10))
def test_sharpness_along_the_sphere_valley(angle, a, b):
    problem = SphereValley(a, b, rotation_seed=1)
    minimum = problem.minimiser(angle)
    assert np.abs(problem.gradient(minimum)).max() <= 1e-14 * (a + b)
    np.testing.assert_allclose(problem.sharpness(minimum), a + b * np.sin(angle) ** 2, rtol=1e-12)


def test_the_papers_3d_run_ends_in_its_two_cycle():
    problem = Sphere3D(rotation_seed=0)
    start = problem.at([0.3, 1.3, 1.2])
    run = Simulation(problem, start, rule=SGD(0.5, 0.08), steps=2000, record=["weights", "loss", "effective_lr"]).run()
    ends = problem.coordinates(run["weights"][-2:, 0])
    ends = ends[np.argsort(ends[:, 0])] / np.linalg.norm(ends, axis=1, keepdims=True)
    np.testing.assert_allclose(ends, [[0.6, 0.8, 0.0], [0.8, 0.6, 0.0]], atol=1e-12)
    assert run["loss"][-1, 0] == pytest.approx(5.85e-2, rel=1e-3)
    assert 2 / run["effective_lr"][-1, 0] == pytest.approx(5.486, rel=1e-4)


def interpolant(problem, size, seed=0):
    """Raw weights of norm ``size`` at some minimum, one per trial."""
    push = np.random.default_rng(seed).standard_normal((problem.trials, problem.size))
    weights = problem.flattest + problem.null_part(push)
    return size * weights / np.linalg.norm(weights, axis=1, keepdims=True)


@pytest.mark.parametrize("size", [1.0, 2.5])
def test_lemma_o1_the_hessian_on_the_minima_of_regression(size):
    problem = Regression.generate(range(3))
    weights = interpolant(problem, size)
    assert problem.value(weights).max() < 1e-27
    hessian, coefficients = problem.hessian(weights), problem.coefficients(weights)
    for trial in range(3):
        x, y = problem.inputs[trial], problem.targets[trial]
        x, y, n = x - x.mean(axis=0), y - y.mean(), len(y)
        z = x.T @ y / (n * y.std())
        inside = x.T @ x / n - np.outer(z, z)
        expected = 2 * coefficients[trial] @ coefficients[trial] * inside / size**2
        np.testing.assert_allclose(hessian[trial], expected, atol=1e-12 * np.abs(expected).max())
        assert np.linalg.matrix_rank(hessian[trial], tol=1e-10) == n - 2


@pytest.fixture(scope="module")
def regression_at_30_000():
    problem = Regression.generate(REGRESSION_TABLE)
    return problem, Simulation(problem, problem.initial, rule=REGRESSION, steps=30_000, record=()).run().state


def test_regression_seed_by_seed(regression_at_30_000):
    problem, state = regression_at_30_000
    early = Simulation(problem, problem.initial, rule=REGRESSION, steps=200, record=["loss"]).run()["loss"]
    expected = np.array(list(REGRESSION_TABLE.values()))
    assert (early < 1e-6).argmax(axis=0).tolist() == expected[:, 0].tolist()
    late = Simulation(problem, problem.initial, rule=REGRESSION, steps=40_000, record=["loss", "risk"], every=5)
    run = late.run(state=state)
    np.testing.assert_allclose(run["risk"][-1], expected[:, 1], atol=1e-3)
    np.testing.assert_allclose(problem.risk(problem.flattest), expected[:, 2], atol=5.1e-5)
    sharpness = [regression_geometry(x, y).min_sharpness for x, y in zip(problem.inputs, problem.targets, strict=True)]
    np.testing.assert_allclose(run["loss"].mean(axis=0), 1e-4 * np.array(sharpness) / 4, rtol=0.01)


def test_what_no_sample_sees_decays_by_weight_decay_alone(regression_at_30_000):
    """c^t exactly: 30,000 steps of one rounding each, of random sign, are 2e-14."""
    problem, state = regression_at_30_000
    expected = (1 - 0.5 * 2e-4) ** 30_000 * problem.null_part(problem.initial)
    assert np.abs(problem.null_part(state.weights) - expected).max() < 1e-12 * np.abs(expected).max()


def test_the_test_loss_of_regression_is_that_of_new_samples():
    problem = Regression.generate([4], samples=6, dim=9)
    weights = np.random.default_rng(0).standard_normal((1, 9))
    rng, count = np.random.default_rng(1), 200_000
    x = rng.standard_normal((count, 9)) * np.sqrt(np.arange(1, 10) / 9)
    before = problem.inputs[0] @ weights[0]
    outputs = (x @ weights[0] - before.mean()) / before.std() * problem.targets[0].std() + problem.targets[0].mean()
    errors = (outputs - x @ problem.truth[0] - problem.bias[0]) ** 2
    assert abs(errors.mean() - problem.risk(weights)[0]) < 4 * errors.std() / np.sqrt(count)


def test_regression_data_follow_the_papers_law():
    problem = Regression.generate(range(400))
    np.testing.assert_allclose(np.linalg.norm(problem.truth, axis=1), 1.0, rtol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(problem.initial, axis=1), 1.0, rtol=1e-14)
    assert abs(problem.bias.std() - 0.1) < 4 * 0.1 / np.sqrt(2 * 400)
    variances = problem.inputs.reshape(-1, 40).var(axis=0)
    assert np.abs(variances * 40 / np.arange(1, 41) - 1).max() < 5 * np.sqrt(2 / 8000)


@pytest.fixture(scope="module")
def completion():
    problem = Completion.generate([0, 1])
    return problem, Simulation(problem, problem.initial, rule=COMPLETION, steps=1000, record=["loss"]).run()


def test_completion_before_the_edge_of_stability(completion):
    """The plateaus of seeds 0 and 1: when the loss is gone, test loss, sharpness, singular values."""
    problem, run = completion
    assert (run["loss"] < 1e-6).argmax(axis=0).tolist() == [415, 426]
    weights = run.state.weights
    np.testing.assert_allclose(problem.risk(weights), [1.133, 1.087], atol=1e-3)
    np.testing.assert_allclose(problem.sharpness(weights), [57.9, 50.0], atol=0.1)
    expected = [[23.7, 18.2, 14.1], [20.5, 18.4, 13.1]]
    np.testing.assert_allclose(problem.singular_values(weights)[:, :3], expected, atol=0.06)


def test_completion_past_the_edge_of_stability(completion):
    problem, run = completion
    longer = Simulation(problem, problem.initial, rule=COMPLETION, steps=4000, record=()).run(state=run.state).state
    u, v = (np.linalg.norm(part, axis=(1, 2)) for part in problem.split(longer.weights).values())
    assert u[0] / v[0] == pytest.approx(1.009, abs=1e-3)
    state = Simulation(problem, problem.initial, rule=COMPLETION, steps=5000, record=()).run(state=longer).state
    np.testing.assert_allclose(problem.risk(state.weights), [0.122, 0.225], rtol=0.02)


def test_norms_of_each_factor_obey_the_exact_recursion(completion):
    """||U'||^2 = c^2 ||U||^2 + lr^2 ||grad_U||^2, since the gradient is orthogonal to U."""
    problem, run = completion
    before = problem.split(run.state.weights)
    gradient = problem.split(problem.gradient(run.state.weights))
    one_more = Simulation(problem, problem.initial, rule=COMPLETION, steps=1001, record=()).run(state=run.state)
    for name, after in problem.split(one_more.state.weights).items():
        grown = 0.1**2 * (gradient[name] ** 2).sum(axis=(1, 2))
        expected = (1 - 1e-3) ** 2 * (before[name] ** 2).sum(axis=(1, 2)) + grown
        np.testing.assert_allclose((after**2).sum(axis=(1, 2)), expected, rtol=1e-13)


def test_completion_data_follow_the_papers_law():
    problem = Completion.generate(range(20), dim=12, rank=2, observed=50)
    np.testing.assert_allclose((problem.matrix**2).mean(axis=(1, 2)), 1.0, rtol=1e-13)
    assert all(np.linalg.matrix_rank(matrix) == 2 for matrix in problem.matrix)
    assert all(len(set(row)) == 50 for row in problem.observed.tolist())
    assert abs(problem.initial.std() * np.sqrt(12) - 1) < 4 / np.sqrt(2 * problem.initial.size)


def test_the_risk_of_completion_counts_every_entry():
    problem = Completion.generate([3], dim=4, rank=1, observed=7)
    weights = np.random.default_rng(0).standard_normal((1, 32))
    product = weights[0, :16].reshape(4, 4) @ weights[0, 16:].reshape(4, 4).T
    seen = [(int(place) // 4, int(place) % 4) for place in problem.observed[0]]
    scale = np.sqrt(sum(problem.matrix[0][at] ** 2 for at in seen) / sum(product[at] ** 2 for at in seen))
    errors = [(scale * product[i, j] - problem.matrix[0, i, j]) ** 2 for i in range(4) for j in range(4)]
    assert problem.risk(weights)[0] == pytest.approx(np.mean(errors), rel=1e-12)


def test_the_noisy_quotient_settles_at_its_law():
    """Risk within 4 % and rms angle within 1 % of the laws, the sheet's own tolerances for 100 trials."""
    model = NoisyRayleigh.two_level(1.0, 10, noise=1.0, lr=0.1, weight_decay=0.04)
    problem = RayleighQuotient.two_level(1.0, 10, noise=1.0)
    start = problem.start(100, norm_sq=model.norm_sq, risk=0.9, seed=1)
    np.testing.assert_allclose(problem.risk(start), 0.9, rtol=1e-12)
    np.testing.assert_allclose((start**2).sum(axis=1), model.norm_sq, rtol=1e-12)
    run = Simulation(
        problem, start, rule=SGD(0.1, 0.04), steps=10_000, record=["risk", "angle", "norm"], every=20, seed=1
    ).run()
    late = run.steps >= 5000
    assert run["risk"][late].mean() == pytest.approx(stationary_risk(model).risk, rel=0.04)
    rms = np.sqrt((run["angle"][late] ** 2).mean())
    assert rms == pytest.approx(SGD(0.1, 0.04).equilibrium().angle, rel=0.01)


@pytest.mark.parametrize("k", [2.0, 0.25])
def test_a_larger_start_with_its_settings_is_the_same_run_larger(k):
    """Corollary 3: k X_0, k^2 lr, wd/k^2; bit for bit for a power of two."""
    problem = RayleighQuotient.two_level(1.0, 10, noise=1.0)
    start = problem.start(5, norm_sq=10.0)
    runs = [
        Simulation(problem, scale * start, rule=SGD(0.1 * scale**2, 0.01 / scale**2), steps=2000, record=()).run()
        for scale in (1.0, k)
    ]
    assert np.array_equal(runs[1].state.weights, k * runs[0].state.weights)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_random_walk_settles_where_the_theory_says(momentum):
    """Standard errors from the spread between the 50 independent trials."""
    rule = SGD(0.1, 0.02 * (1 - momentum), momentum=momentum)
    settled = rule.equilibrium(unit_grad_sq=3.0)
    problem = RandomWalk(60, unit_grad_sq=3.0)
    start = problem.start(50, norm_sq=settled.norm**2)
    run = Simulation(problem, start, rule=rule, steps=6000, record=["norm", "angle"], every=4, seed=2).run()
    late = run.steps >= 1500
    for name, expected in (("norm", settled.norm), ("angle", settled.angle)):
        squares = (run[name][late] ** 2).mean(axis=0) / expected**2
        error = squares.std() / np.sqrt(len(squares))
        assert error < 2e-3
        assert abs(squares.mean() - 1) < 4 * error + 1e-3  # the mean field's own error is O(lr wd)


def test_the_logistic_toys_risk_is_its_error():
    problem, weights = LogisticToy(3), np.array([[0.8, -0.3, 0.4]])
    samples = np.random.default_rng(0).standard_normal((400_000, 3))
    wrong = (samples @ weights[0] > 0) != (samples[:, 0] > 0)
    assert abs(wrong.mean() - problem.risk(weights)[0]) < 4 * wrong.std() / np.sqrt(len(wrong))


def test_with_normalisation_and_decay_the_logistic_toy_never_settles():
    """Outside the cone of 0.1 rad 82 % of the time at lr .5, wd .1; hardly ever without normalisation at a small lr."""
    start = np.ones((16, 2))
    both = Simulation(LogisticToy(2), start, rule=SGD(0.5, 0.1), steps=20_000, record=["risk"], every=5).run()
    assert (both["risk"] * np.pi > 0.1).mean() == pytest.approx(0.82, abs=0.01)
    plain = LogisticToy(2, normalised=False)
    decay = Simulation(plain, start, rule=SGD(0.02, 1e-3), steps=20_000, record=["risk"], every=5).run()
    assert (decay["risk"][2000:] * np.pi > 0.1).mean() == 0


def valley_deviation(eta):
    """Largest distance from the flow over time 3 at C_b = 1, from the edge of stability on."""
    y = 2.0
    rule = ScalarRMSpropRule(eta, decay=1 - eta**2, second_moment=(eta * (1 + y * y) / 2) ** 2)
    steps = round(3 / eta**2)
    run = Simulation(Valley(), [0.03 * eta, y], rule=rule, steps=steps, record=["weights"], every=100).run()
    flow = [rmsprop_valley_position(y, time=step * eta**2, c_b=1.0) for step in run.steps.tolist()]
    return np.abs(run["weights"][:, 0, 1] - flow).max()


def test_scalar_rmsprop_follows_the_valleys_flow_to_first_order():
    coarse, fine = valley_deviation(0.025), valley_deviation(0.0125)
    assert coarse < 0.037  # the sheet's table
    assert fine < 0.0166
    assert coarse / fine == pytest.approx(2, rel=0.1)
