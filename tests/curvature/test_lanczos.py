"""Eigenvalues with a bound that holds, from a random start and from a warm one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.curved_worlds import with_spectrum

from equilibria.curvature import Eigenpairs, eigenpairs, update_eigenpairs
from equilibria.curvature._lanczos import RISK, Basis, distance_to_top
from equilibria.errors import EquilibriaError


def diagonal(values: np.ndarray | torch.Tensor):
    """Products with a diagonal matrix; a random start makes it as good as any with this spectrum."""
    entries = torch.as_tensor(values, dtype=torch.float64)
    return lambda vector: entries.to(vector.dtype) * vector


def spectra(size: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bulk = rng.uniform(-0.05, 0.4, size - 2)
    return {
        "5 % gap": np.r_[1.0, 0.95, bulk],
        "1 % gap": np.r_[1.0, 0.99, bulk],
        "clustered top": np.r_[1 - rng.uniform(0, 0.02, 20), rng.uniform(-0.05, 0.4, size - 20)],
        "dominated by the bottom": np.r_[1.0, -30.0, rng.uniform(-5, 0.5, size - 2)],
        "near zero": np.r_[1e-2, -1.0, rng.uniform(-1, 0, size - 2)],
        "power law": (1 + np.arange(size)) ** -1.0,
        "low rank": np.r_[rng.uniform(0.5, 1, 5), np.zeros(size - 5)],
        "negative": -rng.uniform(0.5, 1, size),
    }


CASES = [(seed, name) for seed, name in itertools.product(range(25), spectra(30, 0))]


@pytest.mark.parametrize("cases", [CASES[:40], pytest.param(CASES, marks=pytest.mark.slow)], ids=["40", "200"])
def test_the_error_is_within_the_bound_in_200_of_200(cases):
    assert len(CASES) == 200
    beyond, missed, converged = [], [], 0
    for seed, name in cases:
        size = (60, 150, 400)[seed % 3]
        values = spectra(size, seed)[name]
        result = eigenpairs(diagonal(values), size, seed=seed, budget=120)
        error = abs(result.values[0] - values.max()) / abs(values.max())
        beyond += [(seed, name, error, result.bound[0])] if error > result.bound[0] * (1 + 1e-9) else []
        missed += [(seed, name, error)] if result.converged and error > 1e-2 else []
        converged += result.converged
        assert result.values[0] <= values.max() * (1 + 1e-13 * np.sign(values.max()))  # never overestimated
    assert beyond == []
    assert missed == []
    assert converged > 0.9 * len(cases)


@pytest.mark.parametrize("risk", [0.3, 0.05])
def test_the_bound_fails_no_more_often_than_its_risk(risk):
    """Right above the tolerance lies an eigenvalue that a start may miss: the worst that can be planted."""
    size, trials, failures = 40, 400, 0
    values = np.r_[1.02, 1.0, np.linspace(0, 0.5, size - 2)]
    for seed in range(trials):
        start = np.random.default_rng(seed).normal(size=size)
        alphas, betas = tridiagonal(values, start, steps=7)
        top = np.linalg.eigvalsh(np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1))[-1]
        failures += top + distance_to_top(alphas, betas, size=size, risk=risk) < values.max()
    assert failures <= trials * risk + 3 * (trials * risk * (1 - risk)) ** 0.5
    assert risk < 0.1 or failures > 0  # the bound is not so wide that it could never fail


def near_degenerate(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    bulk = rng.uniform(-0.05, 0.4, size - 21)
    top = {
        "gap of 1.2 %": np.r_[1.012, 1.0, rng.uniform(0, 0.5, 19)],
        "gap of 2 %": np.r_[1.02, 1.0, rng.uniform(0, 0.5, 19)],
        "one above a multiple": np.r_[1.03, np.ones(20)],
        "cluster": 1 - rng.uniform(0, 0.03, 21),
    }[kind]
    return np.r_[top, bulk]


@pytest.mark.parametrize("kind", ["gap of 1.2 %", "gap of 2 %", "one above a multiple", "cluster"])
@pytest.mark.parametrize("searches", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_the_bound_of_a_search_fails_no_more_often_than_its_risk(kind, searches):
    """The spectra that mislead a start most: a second eigenvalue just below the top one."""
    rng, failures = np.random.default_rng(1), 0
    for seed in range(searches):
        values = near_degenerate(kind, 80, rng)
        result = eigenpairs(diagonal(values), 80, seed=seed)
        failures += values.max() - result.values[0] > result.bound[0] * result.values[0] * (1 + 1e-9)
        assert result.converged
    assert failures <= searches * RISK + 3 * (searches * RISK * (1 - RISK)) ** 0.5


def tridiagonal(values: np.ndarray, start: np.ndarray, *, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Lanczos as in a textbook, with a loop for the orthogonality."""
    basis, alphas, betas = [start / np.linalg.norm(start)], [], []
    for _ in range(steps):
        image = values * basis[-1]
        alphas.append(image @ basis[-1])
        for _ in range(2):
            for vector in basis:
                image = image - (image @ vector) * vector
        betas.append(np.linalg.norm(image))
        basis.append(image / betas[-1])
    return np.array(alphas), np.array(betas)


def test_an_unlucky_start_is_not_mistaken_for_convergence():
    """The seed of a hundred whose start is almost orthogonal to the top eigenvector."""
    size = 300
    starts = [
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(300)
    ]
    seed = min(range(300), key=lambda index: abs(float(starts[index][0] / starts[index].norm())))
    assert abs(float(starts[seed][0] / starts[seed].norm())) < 0.01 / size**0.5
    values = np.r_[1.0, 0.9, np.linspace(0, 0.3, size - 2)]
    result = eigenpairs(diagonal(values), size, seed=seed)
    assert abs(result.values[0] - 1.0) < 1e-2


@given(st.integers(0, 10**6), st.floats(0.1, 1e4))
def test_scaling_the_matrix_scales_the_values_alone(seed, factor):
    values = np.r_[1.0, 0.8, np.linspace(-0.1, 0.5, 60)]
    one, other = (eigenpairs(diagonal(times * values), 62, seed=seed) for times in (1.0, factor))
    assert other.values[0] == pytest.approx(factor * one.values[0], rel=1e-10)
    assert other.hvps == one.hvps
    assert other.residuals[0] == pytest.approx(factor * one.residuals[0], rel=1e-3, abs=1e-12 * factor)


@pytest.mark.parametrize("end", ["top", "bottom"])
def test_several_pairs_even_if_equal(end):
    values = np.r_[3.0, 3.0, 2.0, 1.5, np.linspace(-1, 1, 96), -4.0, -4.0, -4.0]
    matrix = with_spectrum(torch.tensor(values), seed=3)
    result = eigenpairs(lambda vector: matrix @ vector, len(values), k=3, end=end, tol=1e-4)
    expected = sorted(values, reverse=end == "top")[:3]
    assert result.converged
    assert np.allclose(result.values, expected, rtol=1e-4)
    assert torch.allclose(result.vectors @ result.vectors.T, torch.eye(3).double(), atol=1e-10)
    for value, vector, residual in zip(result.values, result.vectors, result.residuals, strict=True):
        assert float((matrix @ vector - value * vector).norm()) == pytest.approx(residual, abs=1e-9)


def test_single_precision_stops_at_rounding_and_reports_it():
    values = np.r_[1.0, 0.9, np.linspace(-0.2, 0.5, 300)]
    noise = torch.Generator().manual_seed(0)

    def product(vector: torch.Tensor) -> torch.Tensor:
        assert vector.dtype == torch.float32
        return diagonal(values)(vector) * (1 + 1e-6 * torch.randn(302, generator=noise))

    result = eigenpairs(product, 302, dtype=torch.float32, noise=lambda: 1e-6)
    assert result.converged
    assert abs(result.values[0] - 1) < 1e-5
    fine = eigenpairs(product, 302, dtype=torch.float32, noise=lambda: 1e-6, tol=1e-9)
    assert not fine.converged
    assert "rounding" in fine.reason
    assert abs(fine.values[0] - 1) <= fine.bound[0]
    assert fine.hvps < 60


def test_why_it_stops():
    size = 100
    uniform = diagonal(np.linspace(-1, 1, size))
    short = eigenpairs(uniform, size, budget=4)
    assert (short.hvps, short.converged) == (4, False)
    assert "budget of 4 products" in short.reason
    assert abs(short.values[0] - 1) <= short.bound[0]
    nothing = eigenpairs(lambda vector: 0 * vector, size)
    assert (nothing.values, nothing.hvps, nothing.converged) == ((0.0,), 1, True)
    whole = eigenpairs(diagonal(np.linspace(-1, 1, 12)), 12, k=12, tol=1e-9, budget=10**4)
    assert np.allclose(whole.values, np.linspace(1, -1, 12), atol=1e-9)
    low_rank = eigenpairs(diagonal(np.r_[2.0, 1.0, np.zeros(98)]), size, tol=1e-8)
    assert (low_rank.hvps, low_rank.converged) == (3, True)
    assert low_rank.values[0] == pytest.approx(2.0, rel=1e-13)
    for wrong, match in [
        ({"k": 101}, "got k=101; expected at most 100"),
        ({"k": 0}, "k"),
        ({"tol": 0}, "tol"),
        ({"budget": 0}, "budget"),
        ({"end": "middle"}, "expected one of: top, bottom"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            eigenpairs(uniform, size, **wrong)


def turning(step: float, *, size: int = 120) -> torch.Tensor:
    """A matrix whose eigenvectors turn and whose eigenvalues drift with time."""
    rng = torch.Generator().manual_seed(0)
    skew = torch.randn(size, size, generator=rng, dtype=torch.float64) / size**0.5
    turn = torch.linalg.matrix_exp(0.05 * step * (skew - skew.T))
    values = torch.cat(
        [torch.tensor([1 + 0.1 * step, 0.95 - 0.05 * step]), torch.linspace(-0.1, 0.6, size - 2)]
    ).double()
    return (turn * values) @ turn.T


def test_a_warm_search_takes_two_products_and_stays_within_the_tolerance():
    now = turning(0.0)
    pairs = eigenpairs(lambda vector: now @ vector, 120)
    spent = []
    for index in range(1, 31):
        now = turning(0.1 * index)
        pairs = update_eigenpairs(lambda vector, now=now: now @ vector, pairs)
        top = float(torch.linalg.eigvalsh(now)[-1])
        assert abs(pairs.values[0] - top) <= 1e-2 * top
        assert pairs.converged
        assert pairs.bound[0] == 1e-2
        assert not pairs.certified
        assert pairs.followed == index
        spent.append(pairs.hvps)
    assert np.mean(spent) <= 2.5


def test_a_warm_search_for_several_at_the_bottom():
    now = -turning(0.0)
    pairs = eigenpairs(lambda vector: now @ vector, 120, k=2, end="bottom")
    for index in range(1, 11):
        now = -turning(0.1 * index)
        pairs = update_eigenpairs(lambda vector, now=now: now @ vector, pairs, end="bottom")
        assert np.allclose(pairs.values, torch.linalg.eigvalsh(now)[:2], rtol=1e-2)


@pytest.mark.parametrize("last", [0.6, 0.1])
def test_a_warm_search_for_several_takes_fewer_products_than_a_cold_one(last):
    """Also where the last eigenvalue wanted is far below the first, as in trained networks."""
    size, draw = 300, torch.Generator().manual_seed(2)
    skew = torch.randn(size, size, generator=draw, dtype=torch.float64) / size**0.5
    turn = torch.linalg.matrix_exp(0.02 * (skew - skew.T))
    top = torch.logspace(0, float(np.log10(last)), 5, dtype=torch.float64)
    values = torch.cat([top, torch.linspace(-0.05, 0.6 * last, size - 5, dtype=torch.float64)])
    basis, pairs = torch.eye(size).double(), None
    for index in range(8):
        basis = turn @ basis
        product = lambda vector, basis=basis: basis @ (values * (basis.T @ vector))  # noqa: E731
        cold = eigenpairs(product, size, k=5, seed=index, budget=300)
        pairs = cold if pairs is None else update_eigenpairs(product, pairs)
        assert pairs.converged and np.all(np.abs(np.array(pairs.values) / top.numpy() - 1) <= pairs.bound)
        assert pairs is cold or pairs.hvps <= cold.hvps


def test_the_next_eigenvalue_overtakes_and_is_noticed_at_once():
    """The eigenvectors stand still, so that nothing in the residual of the first gives the second away."""
    rest = np.linspace(0, 0.6, 198)
    pairs = eigenpairs(diagonal(np.r_[1.0, 0.9, rest]), 200)
    for rising in np.linspace(0.9, 1.4, 26):
        pairs = update_eigenpairs(diagonal(np.r_[1.0, rising, rest]), pairs)
        assert pairs.values[0] == pytest.approx(max(1.0, rising), rel=1e-2)


def test_an_eigenvalue_out_of_nowhere_is_found_by_the_random_part():
    """One that was in the bulk, far from the block, rises: it is found some time after it has overtaken."""
    rest = np.linspace(0, 0.6, 198)
    pairs, late = eigenpairs(diagonal(np.r_[1.0, 0.9, rest]), 200), 0
    for time in range(60):
        values = np.r_[1.0, 0.9, rest]
        values[50] = 0.15 + 0.05 * time
        pairs = update_eigenpairs(diagonal(values), pairs)
        late += abs(pairs.values[0] - values.max()) > 1e-2 * values.max()
    assert late < 30
    assert pairs.values[0] == pytest.approx(values.max(), rel=1e-2)


def test_a_warm_search_within_a_budget():
    pairs = eigenpairs(diagonal(np.linspace(-1, 1, 100)), 100)
    assert isinstance(pairs, Eigenpairs)
    short = update_eigenpairs(diagonal(np.linspace(1, -1, 100)), pairs, budget=3, tol=1e-6)
    assert (short.hvps, short.converged) == (3, False)
    assert "budget of 3 products" in short.reason


@pytest.mark.parametrize("times", [1.0, 2.0, 3.9])
def test_a_perturbation_near_rounding_is_within_the_bound(times):
    size = 500
    for seed in range(5):
        v = np.random.default_rng(seed).normal(size=size)
        v, strength = torch.tensor(v / np.linalg.norm(v)), times * np.finfo(float).eps * size**0.5
        result = eigenpairs(lambda x, v=v, s=strength: x + s * v * (v @ x), size, seed=seed)
        assert 1 + strength - result.values[0] <= result.bound[0] * (1 + 1e-9) + 1e-16


@pytest.mark.parametrize("kind", ["uniform", "clustered", "semicircle"])
def test_several_values_converge_together(kind):
    rng, size = np.random.default_rng(0), 300
    values = {
        "uniform": np.linspace(0, 1, size),
        "clustered": np.r_[1 - rng.uniform(0, 0.02, 10), rng.uniform(0, 0.4, size - 10)],
        "semicircle": np.cos(np.linspace(0.01, np.pi, size)),
    }[kind]
    entries, exact = torch.tensor(values), np.sort(values)[::-1]
    for seed in range(4):
        result = eigenpairs(lambda vector: entries * vector, size, k=3, seed=seed, budget=400)
        assert result.converged, result.reason
        assert max(result.bound) <= 1e-2
        assert np.all(np.abs(np.array(result.values) - exact[:3]) <= np.array(result.bound) * np.abs(result.values))


def test_a_warm_search_for_several_in_single_precision_is_within_its_bound():
    """Six turning eigenvectors, three of them asked for, in float32."""
    size, draw = 150, torch.Generator().manual_seed(0)
    skew = torch.randn(size, size, generator=draw, dtype=torch.float64) / size**0.5
    turn = torch.linalg.matrix_exp(0.01 * (skew - skew.T))
    values = torch.cat([torch.tensor([1.0, 0.9, 0.8, 0.75, 0.7, 0.65]), torch.linspace(-0.1, 0.5, size - 6)]).double()
    basis, pairs = torch.eye(size).double(), None
    for index in range(25):
        basis = turn @ basis
        values[1] += 0.01  # it overtakes
        matrix = ((basis * values) @ basis.T).float()
        product = lambda vector, matrix=matrix: matrix @ vector  # noqa: E731
        pairs = eigenpairs(product, size, k=3, dtype=torch.float32) if index == 0 else update_eigenpairs(product, pairs)
        exact = values.sort(descending=True).values[:3].numpy()
        assert np.all(np.abs(np.array(pairs.values) / exact - 1) <= pairs.bound)
        assert pairs.converged


def test_a_product_that_is_not_finite_raises():
    with pytest.raises(EquilibriaError, match="not finite"):
        eigenpairs(lambda vector: vector * float("nan"), 10)


def test_the_basis_of_long_vectors_is_allocated_one_by_one():
    basis = Basis(10**8, dtype=torch.float32, device=torch.device("meta"))
    basis.append(torch.empty(10**8, device="meta"))
    assert basis._blocks[0].shape[0] == 1
