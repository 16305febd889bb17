"""Hessian-vector products: right on every path, and a model that does not change."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.curved_worlds import (
    batch_normalised_net,
    dense_by_differences,
    images,
    net_objective,
    quadratic,
    with_spectrum,
)
from torch import nn
from torch.nn import functional

from equilibria.curvature import HessianProducts
from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import Objective, objective


def random_vector(size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_hessian_of_a_quadratic_is_its_matrix(seed, size):
    matrix = with_spectrum(torch.linspace(-1, 2, size), seed=seed)
    product, vector = HessianProducts(quadratic(matrix), None), random_vector(size, seed=seed)
    assert torch.allclose(product(vector), matrix @ vector, rtol=0, atol=1e-13)
    assert torch.allclose(product.dense(), matrix, rtol=0, atol=1e-13)


@pytest.mark.parametrize("names", [["0.weight", "1.weight", "1.bias"], ["7.weight"]])
def test_a_network_against_differences_entry_by_entry(names):
    net_loss, batch = net_objective().double(), images()
    product = HessianProducts(net_loss, batch, select=names)
    slow = dense_by_differences(net_loss, batch, names)
    # Central differences at step 1e-5: truncation 1e-10 times a third derivative, rounding 1e-16/1e-5 times a gradient.
    assert torch.allclose(product.dense(), slow, rtol=0, atol=1e-7 * float(slow.abs().max() + 1))
    vector = random_vector(product.size)
    assert torch.allclose(product(vector), product.dense() @ vector, rtol=0, atol=1e-12)
    value, grads = net_loss.value_and_grad(batch)
    assert product.loss == pytest.approx(value.item(), rel=1e-14)
    assert torch.allclose(product.gradient, torch.cat([grads[name].reshape(-1) for name in names]), rtol=0, atol=1e-14)
    assert product.covers == "one batch"


def test_single_precision_agrees_with_double():
    net_loss, batch = net_objective(), images()
    single, precise = HessianProducts(net_loss, batch), HessianProducts(net_loss.double(), batch)
    vector = random_vector(single.size)
    assert single.layout.dtype == torch.float32
    difference = (single(vector.float()).double() - precise(vector)).norm() / precise(vector).norm()
    assert difference < 1e-4  # a few hundred roundings of 6e-8


def test_differences_agree_with_autograd_within_their_own_estimate():
    for net_loss in (net_objective(), net_objective().double()):
        batch = images()
        exact, approximate = HessianProducts(net_loss, batch), HessianProducts(net_loss, batch, method="differences")
        vectors = [random_vector(exact.size, seed=seed, dtype=exact.layout.dtype) for seed in range(5)]
        errors = [float((approximate(vector) - exact(vector)).norm() / exact(vector).norm()) for vector in vectors]
        assert approximate.method == "differences"
        assert approximate.relative_error < (1e-2 if net_loss.params["0.weight"].dtype == torch.float32 else 1e-6)
        assert max(errors) < 3 * approximate.relative_error  # estimated along the first vector only


class Cubed(torch.autograd.Function):
    """A cube that can be differentiated once."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


@pytest.mark.parametrize("batch", [None, [(torch.ones(1),), (torch.ones(2),)]], ids=["one batch", "batches"])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda params, _batch: Cubed.apply(params["w"]).sum(), 6 * torch.eye(4)),
        (lambda params, _batch: Cubed.apply(params["w"]).sum() ** 2, 48 * torch.eye(4) + 18 * torch.ones(4, 4)),
        (lambda params, _batch: (Cubed.apply(params["w"]) * params["w"]).sum(), 12 * torch.eye(4)),
        (lambda params, _batch: Cubed.apply(params["w"]).sum() + params["w"].square().sum(), 8 * torch.eye(4)),
    ],
)
def test_a_loss_that_cannot_be_differentiated_twice_is_differenced(loss, expected, batch):
    # torch.autograd.grad returns zeros here, or half of the truth, without a word
    net_loss = Objective(loss, {"w": torch.ones(4).double()})
    product = HessianProducts(net_loss, batch)
    vector = torch.tensor([1.0, 2.0, -1.0, 0.5]).double()
    assert torch.allclose(product(vector), expected.double() @ vector, rtol=1e-7)
    assert product.method == "differences"
    assert torch.allclose(product.dense(), expected.double(), atol=1e-5)
    with pytest.raises(EquilibriaError, match=r"cannot be differentiated twice .*method=\"differences\""):
        HessianProducts(net_loss, batch, method="autograd")(vector)


def test_a_loss_that_in_part_cannot_be_differentiated_twice_is_noticed():
    def loss(params, _batch):
        return Cubed.apply(params["a"]).sum() + params["b"].square().sum()

    product = HessianProducts(Objective(loss, {"a": torch.ones(1).double(), "b": torch.ones(1).double()}), None)
    assert torch.allclose(product.dense(), torch.diag(torch.tensor([6.0, 2.0]).double()), atol=1e-5)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, inputs):
        query, key, value = (part[:, None] for part in self.inner(inputs).chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).mean(dim=(1, 2))


def test_attention_is_differentiated_twice():
    torch.manual_seed(0)
    net_loss = objective(Attends(), functional.mse_loss).double()
    batch = torch.randn(4, 5, 8), torch.randn(4, 8)
    product = HessianProducts(net_loss, batch, method="autograd")
    flags = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
    slow = dense_by_differences(net_loss, batch, ["inner.bias"])
    result = HessianProducts(net_loss, batch, select=["inner.bias"], method="autograd").dense()
    assert torch.allclose(result, slow, rtol=0, atol=1e-8)
    assert product(random_vector(product.size)).norm() > 0
    assert [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()] == flags


def test_batches_of_independent_samples_are_the_full_batch():
    torch.manual_seed(0)
    net_loss = objective(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), functional.cross_entropy).double()
    inputs, targets = torch.randn(20, 4), torch.randint(3, (20,))
    pieces = [(inputs[part], targets[part]) for part in (slice(0, 9), slice(9, 17), slice(17, 20))]
    whole, chunked = HessianProducts(net_loss, (inputs, targets)), HessianProducts(net_loss, pieces)
    vector = random_vector(whole.size)
    assert torch.allclose(chunked(vector), whole(vector), rtol=0, atol=1e-14)
    assert torch.allclose(chunked.gradient, whole.gradient, rtol=0, atol=1e-14)
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-13)
    assert chunked.covers == "full batch"
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
    assert torch.allclose(HessianProducts(net_loss, loader)(vector), whole(vector), rtol=0, atol=1e-14)


def test_coupled_samples_make_ghost_batches():
    inputs, targets = images()
    pieces = [(inputs[:12], targets[:12]), (inputs[12:], targets[12:])]
    net_loss = net_objective().double()
    chunked = HessianProducts(net_loss, pieces)
    halves = [HessianProducts(net_loss, piece) for piece in pieces]
    vector = random_vector(chunked.size)
    assert chunked.covers == "ghost batches"
    assert torch.allclose(chunked(vector), (halves[0](vector) + halves[1](vector)) / 2, rtol=0, atol=1e-13)
    assert not torch.allclose(chunked(vector), HessianProducts(net_loss, (inputs, targets))(vector), rtol=1e-2)
    frozen = objective(batch_normalised_net(), functional.cross_entropy, mode="eval")
    assert HessianProducts(frozen, pieces).covers == "full batch"
    summed = objective(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
    )
    assert HessianProducts(summed, pieces).covers == "ghost batches"


def test_the_gradient_of_curvature_against_differences():
    net_loss, batch = net_objective().double(), images()
    product = HessianProducts(net_loss, batch, select=["0.weight"])
    vector = random_vector(product.size)
    vector /= vector.norm()
    (result, _), step = product.unit_curvature_gradient(vector), 1e-5

    def curvature(point: torch.Tensor) -> float:
        moved = HessianProducts(net_loss, batch, select=["0.weight"], params=product.named(point))
        return float(vector @ moved(vector))

    for index in (0, 7, 20):
        unit = torch.zeros(product.size).double()
        unit[index] = step
        slow = (curvature(product.point + unit) - curvature(product.point - unit)) / (2 * step)
        assert float(result[index]) == pytest.approx(slow, rel=1e-6, abs=1e-6 * float(result.abs().max()))
    flat = HessianProducts(quadratic(torch.eye(3).double()), None)
    assert torch.equal(flat.unit_curvature_gradient(torch.ones(3).double() / 3**0.5)[0], torch.zeros(3).double())


def test_a_linear_loss_has_no_curvature():
    net_loss = Objective(lambda params, batch: (params["w"] * batch).sum(), {"w": torch.ones(3)})
    product = HessianProducts(net_loss, torch.ones(3))
    assert torch.equal(product(torch.ones(3)), torch.zeros(3))
    assert torch.equal(product.dense(), torch.zeros(3, 3))


def state_of(net: nn.Module) -> list[torch.Tensor]:
    grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    return [*(tensor.clone() for tensor in net.state_dict().values()), *grads, torch.get_rng_state()]


@pytest.mark.parametrize("raised", [None, KeyboardInterrupt, RuntimeError])
def test_the_model_does_not_change_even_after_an_interrupt(raised):
    net, batch = batch_normalised_net(), images()
    functional.cross_entropy(net(batch[0]), batch[1]).backward()
    net[1].eval()
    calls = []

    def loss(output, target):
        calls.append(torch.rand(1))
        if raised is not None and len(calls) > 2:
            raise raised("on purpose")
        return functional.cross_entropy(output, target)

    flags, before = [module.training for module in net.modules()], state_of(net)
    pieces = [(batch[0][:12], batch[1][:12]), (batch[0][12:], batch[1][12:])]

    def use() -> None:
        product = HessianProducts(objective(net, loss), pieces)
        product(torch.ones(product.size))

    if raised is None:
        use()
    else:
        with pytest.raises(EquilibriaError if raised is RuntimeError else raised, match="on purpose"):
            use()
    assert [module.training for module in net.modules()] == flags
    assert all(torch.equal(old, new) for old, new in zip(before, state_of(net), strict=True))


def test_bad_input_raises():
    net_loss, (inputs, targets) = net_objective(), images()
    net = batch_normalised_net()
    unused = Objective(lambda params, _batch: params["w"].sum() ** 2, {"w": torch.ones(2), "b": torch.ones(1)})
    detached = Objective(lambda params, _batch: params["w"].detach().sum(), {"w": torch.ones(2)})
    infinite = Objective(lambda params, _batch: params["w"].log().sum(), {"w": torch.zeros(2)})
    pointed = Objective(lambda params, _batch: params["w"].sqrt().sum(), {"w": torch.zeros(2)})
    net[0].weight.requires_grad_(False)
    frozen = objective(net, functional.cross_entropy, select=["0.weight", "3.weight"])
    for data, match in [
        ((inputs[:, :, :2], targets), r"batch on which the loss cannot be computed \(RuntimeError: .*\(24, 1, 2, 6\)"),
        ((inputs, targets[:5]), r"loss cannot be computed .*\(5,\)"),
        ([], "empty list of batches"),
        (None, "got a batch that is a NoneType"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            HessianProducts(net_loss, data)
    for bad, match in [
        (unused, "does not depend on parameter 'b'"),
        (detached, "does not depend on the selected parameters"),
        (infinite, "got a loss of -inf"),
        (frozen, "'0.weight', which is not trained"),
        (copy.copy(net), "got objective of type Sequential"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            HessianProducts(bad, (inputs, targets))
    with pytest.raises(EquilibriaError, match="not finite"):
        HessianProducts(pointed, None)(torch.ones(2))
    with pytest.raises(EquilibriaError, match="matches no parameter"):
        HessianProducts(net_loss, (inputs, targets), select=["nothing"])
    with pytest.raises(EquilibriaError, match="leaves none of 7 parameters"):
        HessianProducts(net_loss, (inputs, targets), select=lambda _name, _param: False)
    with pytest.raises(EquilibriaError, match=r"vector of shape \(3,\); expected a tensor of shape"):
        HessianProducts(net_loss, (inputs, targets))(torch.ones(3))
    with pytest.raises(EquilibriaError, match="same names and shapes"):
        HessianProducts(net_loss, (inputs, targets), params={"0.weight": torch.ones(2)})


def quartic(params, _batch):
    return (params["w"] ** 4).sum() / 12 + params["w"].prod()


@pytest.mark.parametrize(("method", "tolerance"), [("autograd", 1e-10), ("differences", 1e-6)])
def test_the_third_derivative_is_that_of_either_method(method, tolerance):
    """d/dw v'Hv of w^4/12 is 2 w v^2; of a product of three, 2 times the sum over pairs of the other one."""
    point, v = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.3, -0.5, 0.8]).double()
    v /= v.norm()
    products = HessianProducts(Objective(quartic, {"w": point}), None, method=method)
    expected = 2 * point * v**2 + 2 * torch.stack([v[1] * v[2], v[0] * v[2], v[0] * v[1]])
    gradient, error = products.unit_curvature_gradient(v)
    assert float((gradient - expected).norm() / expected.norm()) < tolerance
    assert products.count >= 6
    assert float((gradient - expected).norm()) <= 10 * error  # an estimate of its order, by two that agree


def test_the_coarsest_type_determines_the_rounding():
    weights = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3)}
    products = HessianProducts(Objective(lambda p, _: (p["a"].float() * p["b"]).sum() ** 2, weights), None)
    assert products.relative_error == torch.finfo(torch.bfloat16).eps
