"""The loss as a function of parameters: exact gradients, and a model that stays as it was."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import Objective, objective


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3), nn.Softplus())


def small_batch(*, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator, dtype=dtype), torch.randint(3, (16,), generator=generator)


def without_dropout(net: nn.Module) -> nn.Module:
    net = copy.deepcopy(net)
    net[3].p = 0.0
    return net


def test_value_and_gradient_are_those_of_backward():
    net, (inputs, targets) = small_net(), small_batch()
    value, grads = objective(net, functional.cross_entropy).value_and_grad((inputs, targets))
    plain = without_dropout(net)
    expected = functional.cross_entropy(plain(inputs), targets)
    expected.backward()
    assert value.item() == expected.item()
    assert all(torch.equal(grads[name], param.grad) for name, param in plain.named_parameters())


def state_of(net: nn.Module) -> list[torch.Tensor]:
    grads = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    return [*(tensor.clone() for tensor in net.state_dict().values()), *grads, torch.get_rng_state()]


class Fails(nn.Module):
    def forward(self, inputs):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_does_not_change_even_after_an_exception(training, fails):
    net = small_net()
    functional.cross_entropy(net(small_batch()[0]), small_batch()[1]).backward()
    net[3].train(False)  # a flag of its own
    net.training = training
    if fails:
        net.append(Fails())
    flags, before = [module.training for module in net.modules()], state_of(net)
    python, numpy = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002

    def loss(output, target):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return functional.cross_entropy(output, target)

    loss_of_net = objective(net, loss)
    for call in (lambda: loss_of_net.value_and_grad(small_batch()), lambda: loss_of_net.outputs({}, small_batch())):
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                call()
        else:
            call()
    assert [module.training for module in net.modules()] == flags
    assert net[3].p == 0.5
    assert all(torch.equal(old, new) for old, new in zip(before, state_of(net), strict=True))
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()  # noqa: NPY002


def test_the_objective_tracks_the_weights_of_the_model():
    net, batch = small_net(), small_batch()
    loss_of_net = objective(net, functional.cross_entropy)
    before = loss_of_net(loss_of_net.params, batch)
    with torch.no_grad():
        net[4].weight.mul_(2.0)
    assert loss_of_net({}, batch) != before
    assert torch.equal(loss_of_net.params["4.weight"], net[4].weight)


def test_train_mode_is_the_default_and_frozen_modules_stay_frozen():
    net, batch = small_net(), small_batch()
    trained = objective(net, functional.cross_entropy)({}, batch)
    assert objective(copy.deepcopy(net).eval(), functional.cross_entropy)({}, batch) == trained
    net[1].eval()
    frozen = objective(net, functional.cross_entropy)({}, batch)
    assert frozen != trained
    assert objective(net, functional.cross_entropy, mode="eval")({}, batch) == frozen


def test_select_and_partial_points():
    net, batch = small_net(), small_batch()
    loss_of_net = objective(net, functional.cross_entropy, select=["0.*"])
    assert list(loss_of_net.params) == ["0.weight", "0.bias"]
    assert list(loss_of_net.value_and_grad(batch, params={"0.weight": net[0].weight})[1]) == ["0.weight"]
    net[0].bias.requires_grad_(False)
    assert "0.bias" not in objective(net, functional.cross_entropy).params
    for bad in (["nothing.*"], lambda _name, _param: False):
        with pytest.raises(EquilibriaError, match="select"):
            objective(net, functional.cross_entropy, select=bad)
    with pytest.raises(EquilibriaError, match=r"got a parameter 'x'; expected names among: 0\.weight"):
        loss_of_net({"x": net[0].weight}, batch)


def test_double_is_a_copy_with_the_float64_gradient():
    net, batch = small_net(), small_batch()
    precise = objective(net, functional.cross_entropy).double()
    _, grads = precise.value_and_grad(batch)
    reference = without_dropout(net).double()
    functional.cross_entropy(reference(batch[0].double()), batch[1]).backward()
    for name, param in reference.named_parameters():
        assert torch.equal(grads[name], param.grad)
    precise.params["0.weight"].zero_()
    assert net[0].weight.dtype == torch.float32
    assert net[0].weight.abs().sum() > 0


def test_hessian_vector_product_against_finite_differences():
    net, batch = small_net(), small_batch()
    precise = objective(net, functional.cross_entropy, select=["4.weight"]).double()
    point = precise.params["4.weight"].clone().requires_grad_()
    direction = torch.randn_like(point)
    _, grads = precise.value_and_grad(batch, params={"4.weight": point}, create_graph=True)
    product = torch.autograd.grad((grads["4.weight"] * direction).sum(), point)[0]
    step = 1e-5  # central differences: error step² times a third derivative of order 1, rounding 1e-16 / step
    ends = [
        precise.value_and_grad(batch, params={"4.weight": point.detach() + sign * step * direction})[1]["4.weight"]
        for sign in (1, -1)
    ]
    assert torch.allclose(product, (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-8)


def test_it_can_be_differentiated_by_torch_func():
    loss_of_net, batch = objective(small_net(), functional.cross_entropy), small_batch()
    grads = torch.func.grad(loss_of_net)(loss_of_net.params, batch)
    expected = loss_of_net.value_and_grad(batch)[1]
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)


def test_tied_weights_are_one_parameter():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    _, grads = objective(net, functional.mse_loss).value_and_grad((torch.ones(2, 4), torch.zeros(2, 4)))
    functional.mse_loss(net(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    assert list(grads) == ["0.weight"]
    assert torch.allclose(grads["0.weight"], net[0].weight.grad)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda net: torch.compile(net, backend="eager"),
        nn.utils.parametrizations.weight_norm,
    ],
)
def test_names_are_those_of_watch(wrap):
    wrapped = objective(wrap(nn.Linear(4, 3)), functional.cross_entropy)
    parametrised = {"bias", "weight.original0", "weight.original1"}
    assert set(wrapped.params) in ({"weight", "bias"}, parametrised)
    wrapped.value_and_grad(small_batch())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old weight_norm says that it is old
def test_a_model_that_holds_tensors_with_history():
    net = nn.utils.weight_norm(nn.Linear(4, 3))
    net(torch.ones(1, 4))
    _, grads = objective(net, functional.cross_entropy).value_and_grad(small_batch())
    assert grads["weight_v"].abs().sum() > 0


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.attention_dropout = 0.5

    def forward(self, *, features):
        logits = functional.dropout(self.linear(features), self.attention_dropout, training=self.training)
        return {"logits": logits, "hidden": features}


def test_unpack_keywords_and_outputs():
    net, (inputs, targets) = KeywordNet(), small_batch()
    loss_of_net = objective(
        net,
        lambda output, target: functional.cross_entropy(output["logits"], target),
        unpack=lambda batch: ({"features": batch["x"]}, batch["y"]),
    )
    batch = {"x": inputs, "y": targets}
    assert torch.equal(loss_of_net.outputs({}, batch), net.linear(inputs))
    with pytest.raises(EquilibriaError, match=r"got a batch that is a dict of 2; expected \(input, target\)"):
        objective(net, functional.cross_entropy)({}, batch)


def test_a_function_as_objective():
    params = {"u": torch.tensor([1.0, 2.0]), "unused": torch.ones(1)}
    loss_of_net = Objective(lambda point, batch: (point["u"] ** 2 * batch).sum(), params)
    value, grads = loss_of_net.value_and_grad(torch.tensor([3.0, 4.0]))
    assert value.item() == 19.0
    assert grads["u"].tolist() == [6.0, 16.0]
    assert grads["unused"].tolist() == [0.0]
    assert loss_of_net.outputs({}, None) is None
    assert loss_of_net.double().value_and_grad(torch.ones(2))[1]["u"].dtype == torch.float64


class Scripted(nn.Module):
    """With a part that torch.jit has compiled; a module of that kind, without calling its deprecated compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.ScriptModule()
        self.last = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: objective("net", functional.cross_entropy), "got model of type str; expected a torch.nn.Module"),
        (
            lambda: objective(small_net(), 3),
            r"got loss of type int; expected a function loss\(output, target\), or None",
        ),
        (lambda: objective(small_net(), functional.mse_loss, unpack=3), "got unpack of type int"),
        (lambda: objective(small_net(), functional.mse_loss, mode="off"), "got mode='off'; expected one of"),
        (
            lambda: objective(nn.Sequential(nn.LazyLinear(3)), functional.mse_loss),
            "have no shape yet, such as 0.weight; expected an initialised one: call it with a batch first",
        ),
        (lambda: objective(Scripted(), functional.mse_loss), r"compiled by torch.jit \(inner\)"),
        (lambda: Objective(3, {"w": torch.ones(1)}), "got fn of type int"),
        (lambda: Objective(print, {}), "expected a dict of name -> tensor"),
        (lambda: Objective(print, {"w": torch.ones(1, dtype=torch.int64)}), "of torch.int64; expected floating"),
        (lambda: Objective(lambda point, _: point["w"], {"w": torch.ones(3)})({}, None), r"shape \(3,\) as loss"),
        (
            lambda: Objective(lambda point, _: point["w"].sum().item(), {"w": torch.ones(3)})({}, None),
            "got 3.0 as loss",
        ),
        (
            lambda: Objective(lambda point, _: point["w"].detach().sum(), {"w": torch.ones(3)}).value_and_grad(None),
            "not differentiable",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(EquilibriaError, match=message):
        make()


class LossWithState(nn.Module):
    """Class weights, a running mean and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mean", torch.zeros(()))
        self.sharpness = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        value = functional.cross_entropy(self.sharpness * output, target, weight=self.weights)
        self.mean.mul_(0.9).add_(0.1 * value.detach())
        return value


def test_a_loss_with_state_does_not_change_and_its_parameters_are_tracked():
    net, loss = small_net().eval(), LossWithState()
    loss_of_net = objective(net, loss, mode="eval")
    first = loss_of_net({}, small_batch())
    assert loss_of_net.double()({}, small_batch()).item() == pytest.approx(first.item(), rel=1e-5)  # float32
    assert (loss.calls, loss.mean.item()) == (0, 0.0)
    with torch.no_grad():
        loss.sharpness.fill_(2.0)
    inputs, target = small_batch()
    expected = functional.cross_entropy(2.0 * net(inputs), target, weight=loss.weights)
    assert loss_of_net({}, small_batch()).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_that_cannot_be_copied():
    net = small_net()
    net.generator = (step for step in range(3))
    with pytest.raises(EquilibriaError, match="cannot be copied"):
        objective(net, functional.cross_entropy)


class Shared:
    dropout = 0.3


@dataclasses.dataclass(frozen=True)
class Frozen:
    dropout: float = 0.3


class Instance:
    def __init__(self) -> None:
        self.dropout = 0.3


class WithConfig(nn.Module):
    """Functional dropout, its probability in a config; numbers that only sound like dropout."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config, self.drop_first, self.pressure_drop = config, 1, 3.0
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped = functional.dropout(inputs[:, self.drop_first :], self.config.dropout, self.training)
        return self.pressure_drop * self.linear(torch.dropout(dropped, self.config.dropout, self.training))


@pytest.mark.parametrize("config", [Shared, Shared(), Frozen(), Instance()])
def test_functional_dropout_is_off_and_no_config_is_written_to(config):
    net, (inputs, targets) = WithConfig(config), small_batch()
    values = {objective(net, functional.cross_entropy)({}, (inputs, targets)).item() for _ in range(3)}
    expected = functional.cross_entropy(3 * net.linear(inputs[:, 1:]), targets)
    assert values == {expected.item()}
    assert Shared.dropout == config.dropout == 0.3
    assert (net.drop_first, net.pressure_drop) == (1, 3.0)


class DropPath(nn.Module):
    def forward(self, inputs):
        return inputs * torch.rand(len(inputs), 1).round() if self.training else inputs


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
        lambda: nn.Sequential(nn.Linear(4, 4), DropPath()),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)),
        lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    ],
)
def test_dropout_of_every_kind_of_module_is_off(make):
    torch.manual_seed(0)
    net, inputs = make(), torch.randn(5, 6, 4)

    def loss(output, _target):
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    loss_of_net = objective(net, loss)
    values = []
    for seed in range(4):
        torch.manual_seed(seed)
        values.append(loss_of_net({}, (inputs, None)).item())
    assert values == [values[0]] * 4
    assert values[0] == pytest.approx(loss(net.eval()(inputs), None).item(), rel=1e-5)  # eval takes other kernels


def test_a_loss_class_in_place_of_a_loss():
    with pytest.raises(EquilibriaError, match=r"got loss=CrossEntropyLoss, a class; .* such as CrossEntropyLoss\(\)"):
        objective(nn.Linear(2, 2), nn.CrossEntropyLoss)
