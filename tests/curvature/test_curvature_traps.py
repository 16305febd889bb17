"""What once gave a wrong number, or disturbed training, without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.curved_worlds import images, net_objective
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria.curvature import HessianProducts, eigenpairs, follow
from equilibria.curvature._lanczos import Basis
from equilibria.errors import EquilibriaError


def quartic(params, _batch):
    return (params["w"] ** 4).sum() / 12 + params["w"].prod()


@pytest.mark.parametrize(("method", "tolerance"), [("autograd", 1e-10), ("differences", 1e-6)])
def test_the_third_derivative_is_that_of_either_method(method, tolerance):
    """d/dw v'Hv of w^4/12 is 2 w v^2; of a product of three, 2 times the sum over pairs of the other one."""
    at, v = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.3, -0.5, 0.8]).double()
    products = HessianProducts(eq.Objective(quartic, {"w": at}), None, method=method)
    expected = 2 * at * v**2 + 2 * torch.stack([v[1] * v[2], v[0] * v[2], v[0] * v[1]])
    found = products.curvature_gradient(v)
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert products.count >= 6
    _, error = products.bend(v / v.norm())
    assert float((found - expected).norm()) <= 10 * error  # an estimate of its order, by two that agree


@pytest.mark.parametrize("times", [1.0, 2.0, 3.9])
def test_a_perturbation_near_rounding_is_within_the_bound(times):
    size = 500
    for seed in range(5):
        v = np.random.default_rng(seed).normal(size=size)
        v, strength = torch.tensor(v / np.linalg.norm(v)), times * np.finfo(float).eps * size**0.5
        found = eigenpairs(lambda x, v=v, s=strength: x + s * v * (v @ x), size, seed=seed)
        assert 1 + strength - found.values[0] <= found.bound[0] * (1 + 1e-9) + 1e-16


@pytest.mark.parametrize("kind", ["uniform", "clustered", "semicircle"])
def test_several_values_converge_together_or_say_why(kind):
    rng, size = np.random.default_rng(0), 300
    values = {
        "uniform": np.linspace(0, 1, size),
        "clustered": np.r_[1 - rng.uniform(0, 0.02, 10), rng.uniform(0, 0.4, size - 10)],
        "semicircle": np.cos(np.linspace(0.01, np.pi, size)),
    }[kind]
    entries, exact = torch.tensor(values), np.sort(values)[::-1]
    for seed in range(4):
        found = eigenpairs(lambda vector: entries * vector, size, k=3, seed=seed, budget=400)
        assert found.converged, found.reason
        assert max(found.bound) <= 1e-2
        assert np.all(np.abs(np.array(found.values) - exact[:3]) <= np.array(found.bound) * np.abs(found.values))


def test_rounding_of_the_dense_path_is_seen_in_its_asymmetry():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets = torch.randn(64, 4) + 1000, torch.randint(2, (64,))
    objective = eq.objective(net, functional.cross_entropy)
    found = eq.sharpness(objective, (inputs, targets), select=["0.weight"])
    exact = HessianProducts(objective.double(), (inputs.double(), targets), select=["0.weight"]).dense()
    truth = float(torch.linalg.eigvalsh(exact)[-1])
    products = HessianProducts(objective, (inputs, targets), select=["0.weight"])
    products.dense()
    assert abs(found.value - truth) / truth > 1e-5  # rounding matters here
    assert found.bound[0] >= products.asymmetry / found.value > 1e-4  # far beyond eps times the size


def test_the_coarsest_type_sets_the_rounding():
    weights = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3)}
    products = HessianProducts(eq.Objective(lambda p, _: (p["a"].float() * p["b"]).sum() ** 2, weights), None)
    assert products.relative_error == torch.finfo(torch.bfloat16).eps


def chunked(loss, targets):
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 3), torch.randn(16, 5)
    objective = eq.objective(net, loss)
    return HessianProducts(objective, [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]).covers


def test_only_what_was_tried_on_every_batch_is_called_the_full_batch():
    targets = torch.arange(16) % 3
    assert chunked(functional.cross_entropy, targets) == "full batch"
    padded = torch.where(torch.arange(16) < 11, targets, -100)
    assert chunked(functional.cross_entropy, padded) == "ghost batches"
    weights, sorted_targets = torch.tensor([1.0, 5.0, 1.0]), torch.tensor([0] * 8 + [1] * 8)
    weighted = lambda out, wanted: functional.cross_entropy(out, wanted, weight=weights)  # noqa: E731
    assert chunked(weighted, sorted_targets) == "ghost batches"  # within a batch all weights are equal


def test_reading_a_loader_does_not_move_its_generator():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
    loader, before = DataLoader(data, batch_size=4, shuffle=True, generator=generator), generator.get_state()
    HessianProducts(eq.objective(nn.Linear(5, 3), functional.cross_entropy), loader)
    assert torch.equal(generator.get_state(), before)


def test_following_is_within_its_bound_also_for_several_in_single_precision():
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
        pairs = eigenpairs(product, size, k=3, dtype=torch.float32) if index == 0 else follow(product, pairs)
        exact = values.sort(descending=True).values[:3].numpy()
        assert np.all(np.abs(np.array(pairs.values) / exact - 1) <= pairs.bound)
        assert pairs.converged


def test_no_numbers_no_gradients_no_gigabytes():
    with pytest.raises(EquilibriaError, match="not finite"):
        eigenpairs(lambda vector: vector * float("nan"), 10)
    objective, batch = net_objective(), images()
    with torch.inference_mode(), pytest.raises(EquilibriaError, match="inference_mode"):
        eq.sharpness(objective, batch)
    basis = Basis(10**8, dtype=torch.float32, device=torch.device("meta"))
    basis.append(torch.empty(10**8, device="meta"))
    assert basis._blocks[0].shape[0] == 1
