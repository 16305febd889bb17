"""Sharpness: the numbers of the theory and of networks, with and without a preconditioner."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers.curved_worlds import batch_normalised_net, images, net_objective, quadratic, with_spectrum
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.curvature import HessianProducts, Sharpness, adam_preconditioner, sharpness_by_group
from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.errors import EquilibriaError

CONVOLUTIONS = ["0.weight", "3.weight"]


def valley(params, _batch):
    """The 3-D example of the sharpness paper (Appendix F)."""
    x, y, z = params["w"]
    return 2 - (x + y) / (x * x - x * y + y * y).sqrt() + 0 * z


@pytest.mark.parametrize("z", [0.0, 0.6, -0.8])
def test_the_valley_in_three_dimensions(z):
    side = math.sqrt((1 - z * z) / 2)
    for scale in (1.0, 2.5):
        point = scale * torch.tensor([side, side, z], dtype=torch.float64)
        result = eq.sharpness(eq.Objective(valley, {"w": point}), None, spherical=True)
        assert result.value == pytest.approx(6 / (1 - z * z), rel=1e-12)
        assert result.norm_sq == pytest.approx(scale**2, rel=1e-12)


def test_linear_regression_with_batch_normalisation_has_the_hessian_of_lemma_o1():
    rng = torch.Generator().manual_seed(0)
    samples, inputs = 20, 40
    data = torch.randn(samples, inputs, generator=rng, dtype=torch.float64)
    targets = data @ torch.randn(inputs, generator=rng, dtype=torch.float64) / inputs**0.5
    spread, centred = targets.std(unbiased=False), data - data.mean(dim=0)
    wanted = (targets - targets.mean()) / spread

    def loss(params, _batch):
        raw = centred @ params["w"]
        return (spread * (raw / raw.square().mean().sqrt() - wanted)).square().mean()

    minimiser = torch.linalg.pinv(centred) @ wanted
    outside = torch.randn(inputs, generator=rng, dtype=torch.float64)
    minimiser = 2.5 * (minimiser + outside - torch.linalg.pinv(centred) @ (centred @ outside))
    covariance = centred.T @ centred / samples
    scaled = spread * minimiser / (minimiser @ covariance @ minimiser).sqrt()
    along = centred.T @ wanted / samples
    expected = 2 * (scaled @ scaled) * (covariance - torch.outer(along, along)) / (minimiser @ minimiser)
    objective = eq.Objective(loss, {"w": minimiser})
    assert torch.allclose(HessianProducts(objective, None).dense(), expected, atol=1e-13 * float(expected.abs().max()))
    result = eq.sharpness(objective, None, spherical=True)
    top = torch.linalg.eigvalsh(expected)[-1] * (minimiser @ minimiser)
    assert result.value == pytest.approx(float(top), rel=1e-12)


def test_both_forms_of_spherical_sharpness_agree_to_all_digits():
    """|w|^2 lambda1(H(w)) against lambda1(H(w/|w|)), on a network with BatchNorm and negligible eps."""
    net, batch = batch_normalised_net(eps=1e-30).double(), images(dtype=torch.float64)
    objective = eq.objective(net, functional.cross_entropy)
    there = eq.sharpness(objective, batch, select=CONVOLUTIONS, spherical=True, tol=1e-10)
    with torch.no_grad():
        for name in CONVOLUTIONS:
            net.get_parameter(name).div_(there.norm_sq**0.5)
    here = eq.sharpness(objective, batch, select=CONVOLUTIONS, tol=1e-10)
    assert here.norm_sq == pytest.approx(1.0, rel=1e-12)
    assert there.value == pytest.approx(here.value, rel=1e-10)
    exact = torch.linalg.eigvalsh(HessianProducts(objective, batch, select=CONVOLUTIONS).dense())
    assert here.value == pytest.approx(float(exact[-1]), rel=1e-10)


def test_the_largest_uniform_part_is_accepted_and_the_whole_network_raises():
    objective, batch = net_objective(), images()
    part = eq.symmetries(objective, [batch]).largest_uniform()
    assert eq.sharpness(objective, batch, select=part, spherical=True).converged
    with pytest.raises(EquilibriaError, match=r"not scale-invariant.*largest_uniform\(\)"):
        eq.sharpness(objective, batch, spherical=True)
    with pytest.raises(EquilibriaError, match=r"7\.weight.* not scale-invariant"):
        eq.sharpness(objective, batch, select=["7.weight"], spherical=True)


def test_sharpness_by_group():
    objective, batch = net_objective().double(), images()
    groups = sharpness_by_group(objective, batch, groups=eq.symmetries(objective, [batch]).alone, tol=1e-6)
    assert list(groups) == CONVOLUTIONS
    for name, result in groups.items():
        block = HessianProducts(objective, batch, select=[name])
        exact = torch.linalg.eigvalsh(block.dense())[-1] * block.point.square().sum()
        assert result.value == pytest.approx(float(exact), rel=1e-6)
    again = sharpness_by_group(objective, batch, groups=CONVOLUTIONS, warm=groups)
    assert again["3.weight"].hvps < groups["3.weight"].hvps
    joint = sharpness_by_group(objective, batch, groups={"both": CONVOLUTIONS})["both"]
    assert joint.names == tuple(CONVOLUTIONS)
    for wrong, match in [
        ([], "no groups"),
        ({"a": ["7.weight"]}, "not scale-invariant"),
        ("0.weight", "groups='0.weight'"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            sharpness_by_group(objective, batch, groups=wrong)


def test_the_stability_ratio_is_that_of_the_effective_learning_rate():
    objective, batch = net_objective(), images()
    result = eq.sharpness(objective, batch, select=CONVOLUTIONS, spherical=True)
    theory = eq.theory.stability
    eta = theory.effective_lr(0.1, 0.3, norm_sq=result.norm_sq)
    assert result.stability_ratio(0.1, weight_decay=0.3) == pytest.approx(theory.stability_ratio(eta, result.value))
    raw = eq.sharpness(objective, batch)
    assert raw.stability_ratio(0.1, momentum=0.9) == pytest.approx(raw.value * 0.1 / 3.8)
    assert raw.stability_ratio(0.1, momentum=0.9, nesterov=True) == pytest.approx(raw.value * 0.1 * 2.8 / 3.8)
    with pytest.raises(EquilibriaError, match="end='bottom'"):
        eq.sharpness(objective, batch, end="bottom").stability_ratio(0.1)


@pytest.mark.parametrize("end", ["top", "bottom"])
def test_against_the_dense_hessian(end):
    objective, batch = net_objective(), images()
    result = eq.sharpness(objective, batch, k=3, end=end, tol=1e-3)
    exact = torch.linalg.eigvalsh(HessianProducts(objective.double(), batch).dense()).flip(0)
    expected = exact[:3] if end == "top" else exact.flip(0)[:3]
    assert result.converged
    assert np.allclose(result.values, expected, rtol=1e-3)
    product = HessianProducts(objective, batch)
    for value, vector in zip(result.values, result.vectors, strict=True):
        flat = product.layout.flat(vector)
        assert float(flat @ product(flat)) == pytest.approx(value, rel=1e-3)
    assert result.hvps == result.pairs.hvps


def test_several_batches_and_differences():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3))
    objective = eq.objective(net, functional.cross_entropy)
    inputs, targets = torch.randn(30, 8), torch.randint(3, (30,))
    whole = eq.sharpness(objective, (inputs, targets), tol=1e-3)
    chunked = eq.sharpness(objective, [(inputs[:20], targets[:20]), (inputs[20:], targets[20:])], tol=1e-3)
    assert (whole.covers, chunked.covers) == ("one batch", "full batch")
    assert chunked.value == pytest.approx(whole.value, rel=1e-5)
    differences = eq.sharpness(objective, (inputs, targets), method="differences")
    assert abs(differences.value / whole.value - 1) <= differences.bound[0] <= 0.1


def test_sharpness_with_adams_preconditioner():
    torch.manual_seed(0)
    net, batch = batch_normalised_net(), images()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(5):
        optimizer.zero_grad()
        functional.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
    objective = eq.objective(net, functional.cross_entropy)
    by_name = adam_preconditioner(objective, optimizer)
    state = optimizer.state[net[0].weight]
    assert torch.allclose(by_name["0.weight"], (state["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-4)
    result = eq.sharpness(objective, batch, preconditioner=by_name, tol=1e-3)
    product = HessianProducts(objective.double(), batch)
    root = product.layout.flat(by_name).rsqrt()
    exact = torch.linalg.eigvalsh(root[:, None] * product.dense() * root)[-1]
    assert result.value == pytest.approx(float(exact), rel=1e-3)
    small = eq.sharpness(objective, batch, preconditioner=by_name, select=["1.bias"])
    block = HessianProducts(objective.double(), batch, select=["1.bias"])
    other = block.layout.flat({"1.bias": by_name["1.bias"]}).rsqrt()
    assert small.value == pytest.approx(
        float(torch.linalg.eigvalsh(other[:, None] * block.dense() * other)[-1]), rel=1e-4
    )
    for wrong, match in [({}, "without parameter '0.weight'"), ({**by_name, "1.bias": -by_name["1.bias"]}, "positive")]:
        with pytest.raises(EquilibriaError, match=match):
            eq.sharpness(objective, batch, preconditioner=wrong)
    for other_optimizer, match in [
        (torch.optim.SGD(net.parameters(), lr=0.1), "type SGD without second moments"),
        (torch.optim.Adam(net.parameters()), "after its first step"),
        (torch.optim.Adam([torch.ones(1, requires_grad=True)]), "trains none of the 7 parameters"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            adam_preconditioner(objective, other_optimizer)


def test_warm_starts_along_training_and_a_cold_recheck():
    net, batch = batch_normalised_net(), images()
    optimizer, objective = torch.optim.SGD(net.parameters(), lr=0.05), eq.objective(net, functional.cross_entropy)
    result: Sharpness | None = None
    certified, spent = [], []
    for _ in range(12):
        for _ in range(2):
            optimizer.zero_grad()
            functional.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()
        result = eq.sharpness(objective, batch, warm=result, recheck=5)
        assert result.value == pytest.approx(eq.sharpness(objective, batch, tol=1e-4, seed=9).value, rel=1e-2)
        certified.append(result.certified)
        spent.append(result.hvps)
    assert [index for index, cold in enumerate(certified) if cold] == [0, 6]
    cold, warm = (
        np.mean([hvps for hvps, it in zip(spent, certified, strict=True) if it is kind]) for kind in (True, False)
    )
    assert warm < cold / 2


@pytest.mark.parametrize("decay", [0.0, pytest.param(0.02, marks=pytest.mark.slow)])
def test_five_eigenvalues_cost_no_more_products_warm_than_cold(decay):
    """Short version of benchmarks/sharpness.py: from the initial weights on, where eigenvectors turn fastest."""
    net, batch = batch_normalised_net(), images()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, weight_decay=decay, momentum=0.0 if decay else 0.9)
    objective, warm = eq.objective(net, functional.cross_entropy), None
    for query in range(4):
        cold = eq.sharpness(objective, batch, k=5, seed=query, budget=300)
        warm = cold if warm is None else eq.sharpness(objective, batch, k=5, warm=warm, budget=300)
        assert warm.converged and warm.hvps <= cold.hvps
        assert warm.values == pytest.approx(cold.values, rel=1e-2)
        for _ in range(15):
            optimizer.zero_grad()
            functional.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()


def test_a_crossing_is_noticed_at_the_latest_by_the_cold_check():
    """Eigenvectors that stand still: an eigenvalue rises out of the bulk, invisible from those that are followed."""
    values = torch.cat([torch.tensor([1.0, 0.9]), torch.linspace(0, 0.5, 98)]).double()
    result, wrong = None, 0
    for time in range(24):
        values[50] = 0.1 * time
        result = eq.sharpness(quadratic(torch.diag(values)), None, warm=result, recheck=4)
        wrong += abs(result.value / float(values.max()) - 1) > 1e-2
    assert wrong <= 4
    assert result is not None
    assert result.value == pytest.approx(2.3, rel=1e-2)


def test_the_printed_text():
    result = eq.sharpness(quadratic(with_spectrum(torch.linspace(-1, 3, 100))), None)
    assert str(result).startswith("sharpness ")
    assert "with 99.9 % probability" in str(result)
    short = eq.sharpness(quadratic(with_spectrum(torch.linspace(-1, 3, 100))), None, budget=3)
    assert not short.converged
    assert str(short).endswith("after 3 Hessian-vector products; not converged: the budget of 3 products is used up")


def test_bad_input_raises():
    objective, batch = net_objective(), images()
    result = eq.sharpness(objective, batch, select=CONVOLUTIONS)
    small = eq.Objective(valley, {"w": torch.tensor([1.0, 1.0, 0.0])})
    for call, match in [
        (lambda: eq.sharpness(small, None, k=4), "got k=4; expected at most 3"),
        (
            lambda: eq.sharpness(objective, batch, warm=result),
            "2 parameters.*expected one with the settings of this call",
        ),
        (lambda: eq.sharpness(objective, batch, warm=result, select=CONVOLUTIONS, k=2), "k=1.*k=2"),
        (lambda: eq.sharpness(objective, batch, warm=3.0), "warm of type float"),
        (lambda: eq.sharpness(objective, batch, end="left"), "expected one of: top, bottom"),
        (lambda: eq.sharpness(objective, batch, tol=-1), "tol"),
        (lambda: eq.sharpness(objective, batch, spherical=True, preconditioner={}), "expected one of them"),
        (lambda: eq.sharpness(batch_normalised_net(), batch), "got objective of type Sequential"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            call()


def test_the_bound_of_the_dense_path_includes_the_measured_asymmetry():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets = torch.randn(64, 4) + 1000, torch.randint(2, (64,))
    objective = eq.objective(net, functional.cross_entropy)
    result = eq.sharpness(objective, (inputs, targets), select=["0.weight"])
    exact = HessianProducts(objective.double(), (inputs.double(), targets), select=["0.weight"]).dense()
    truth = float(torch.linalg.eigvalsh(exact)[-1])
    products = HessianProducts(objective, (inputs, targets), select=["0.weight"])
    products.dense()
    assert abs(result.value - truth) / truth > 1e-5  # rounding matters here
    assert result.bound[0] >= products.asymmetry / result.value > 1e-4  # far beyond eps times the size


def test_the_bound_of_small_networks_holds_in_single_precision():
    """On the dense path, group by group, compared with float64."""
    objective, batch = net_objective(), images()
    for name in ("0.weight", "1.weight", "1.bias"):
        result = eq.sharpness(objective, batch, select=[name])
        exact = eq.sharpness(objective.double(), batch, select=[name]).value
        assert abs(result.value - exact) <= result.bound[0] * abs(result.value)


def test_a_result_with_a_preconditioner_is_not_taken_for_one_without():
    objective = quadratic(torch.diag(torch.linspace(1, 300, 100, dtype=torch.float64)))
    scaled = eq.sharpness(objective, None, preconditioner={"w": torch.linspace(1, 2, 100).double() ** 2})
    assert str(scaled).startswith("preconditioned sharpness")
    with pytest.raises(EquilibriaError, match=r"preconditioned=True; expected .* preconditioned=False"):
        eq.sharpness(objective, None, warm=scaled)
    with pytest.raises(
        EquilibriaError,
        match=r"got a preconditioned result, but SGD is not preconditioned; .*recompute without preconditioner=",
    ):
        scaled.stability_ratio(0.1)
    warm = eq.sharpness(objective, None, warm=eq.sharpness(objective, None))
    assert "an estimate" in str(warm)


def test_flat_along_the_weights_is_not_scale_invariant():
    flat = quadratic(torch.diag(torch.tensor([1e4, 1.0]).double()), torch.tensor([0.0, 1.0]).double())
    with pytest.raises(EquilibriaError, match="doubling the weights at a point nearby"):
        eq.sharpness(flat, None, spherical=True)
    torch.manual_seed(0)
    inputs, weights = torch.randn(50, 80).double() + 30, torch.randn(80).double()
    weights -= weights.mean()
    wanted, near = inputs @ weights, nn.Parameter(weights + 1e-3 * torch.randn(80).double())
    objective = eq.Objective(lambda params, _: (inputs @ params["w"] - wanted).square().mean(), {"w": near})
    assert not SharpnessMonitor(objective, torch.optim.SGD([near], lr=1e-4), None).spherical


def test_inference_mode_raises():
    objective, batch = net_objective(), images()
    with torch.inference_mode(), pytest.raises(EquilibriaError, match="inference_mode"):
        eq.sharpness(objective, batch)
