from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.lab.nets import BasicBlockResNet
from equilibria.objectives._objective import unwrap_model
from equilibria.tensors.statistics import statistics_behind

INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Concatenated(nn.Module):
    """As in DenseNet: outputs of two layers side by side in front of two norms; the second sees one of them again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3, bias=False), nn.Linear(6, 2, bias=False)
        self.norm, self.again = nn.BatchNorm1d(5), nn.BatchNorm1d(3)

    def forward(self, inputs):
        left, right = self.first(inputs), self.second(inputs)
        return self.norm(torch.cat([left, right], 1)).sum(1) + self.again(left).sum(1)


class Stacked(nn.Module):
    """Two linear layers and a ReLU in front of one norm: it scales with both, and twice with a layer used twice."""

    def __init__(self, times=1):
        super().__init__()
        self.times = times
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs):
        for _ in range(self.times):
            inputs = functional.linear(inputs, self.first.weight)
        return self.norm(functional.relu(self.second(inputs)) + 0.0)


def found_in(net, inputs=INPUTS, names=None):
    weights = {name: p for name, p in net.named_parameters() if p.ndim > 1 and (names is None or name in names)}
    behind = statistics_behind(net, weights, args=[inputs])
    return {norm.name: {name: degree.tolist() for name, degree in norm.degrees.items()} for norm in behind}


def test_every_convolution_of_a_resnet_has_the_norm_behind_it():
    net = BasicBlockResNet(4, (1, 1))
    names = [f"{name}.conv.weight" for name, _ in net.normalised()]
    behind = found_in(net, torch.randn(4, 1, 8, 8), names)
    assert behind == {
        f"{name}.norm": {f"{name}.conv.weight": [1] * layer.norm.num_features} for name, layer in net.normalised()
    }


def test_a_norm_over_the_outputs_of_several_layers():
    assert found_in(Concatenated()) == {
        "norm": {"first.weight": [1, 1, 1, 0, 0], "second.weight": [0, 0, 0, 1, 1]},
        "again": {"first.weight": [1, 1, 1]},
    }


@pytest.mark.parametrize("times", [1, 2])
def test_a_norm_behind_several_layers(times):
    assert found_in(Stacked(times)) == {"norm": {"first.weight": [times] * 4, "second.weight": [1] * 4}}


@given(factors=st.lists(st.floats(0.1, 10), min_size=2, max_size=2), kind=st.sampled_from([Concatenated, Stacked]))
def test_the_statistics_of_rescaled_weights_are_as_predicted(factors, kind):
    torch.manual_seed(0)
    net = kind().double()
    inputs = INPUTS.double()
    behind = statistics_behind(net, {name: getattr(net, name[:-7]).weight for name in NAMES}, args=[inputs])
    net(inputs)
    rescaled = copy.deepcopy(net)
    for norm in rescaled.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.reset_running_stats()
            norm.running_mean.zero_()
            norm.running_var.zero_()
    plain = copy.deepcopy(rescaled)
    with torch.no_grad():
        for name, factor in zip(NAMES, factors, strict=True):
            getattr(rescaled, name[:-7]).weight.mul_(factor)
    plain(inputs), rescaled(inputs)
    for norm in behind:
        gain = torch.ones(())
        for name, factor in zip(NAMES, factors, strict=True):
            gain = gain * factor ** norm.degrees[name].double() if name in norm.degrees else gain
        before, after = plain.get_submodule(norm.name), rescaled.get_submodule(norm.name)
        assert torch.allclose(after.running_mean, gain * before.running_mean, rtol=1e-10, atol=1e-12)
        assert torch.allclose(after.running_var, gain**2 * before.running_var, rtol=1e-10, atol=1e-14)


NAMES = ["first.weight", "second.weight"]


def test_the_bias_in_front_is_found_and_another_one_of_that_length_is_not_taken_for_it():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    (behind,) = statistics_behind(net, {"0.weight": net[0].weight}, args=[INPUTS])
    assert behind.bias is net[0].bias


def test_an_offset_that_is_no_parameter_raises():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)

        def forward(self, inputs):
            return self.norm(self.inner(inputs) + 3.0)

    with pytest.raises(EquilibriaError, match=r"offset of up to 3 .* in front of 'norm'.*bias=False"):
        found_in(Shifted())


def test_a_weight_on_a_residual_stream_raises():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

        def forward(self, inputs):
            return self.norm(inputs + self.inner(inputs))

    with pytest.raises(EquilibriaError, match=r"'inner.weight' is doubled; expected 1 or 4"):
        found_in(Residual())


def test_one_norm_in_two_places_that_scale_differently_raises():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

        def forward(self, inputs):
            return self.norm(inputs) + self.norm(self.inner(inputs))

    with pytest.raises(EquilibriaError, match="'norm' that is called more than once"):
        found_in(Shared())


def test_a_network_that_does_not_run_raises_with_the_reason():
    with pytest.raises(EquilibriaError, match=r"RuntimeError from a forward pass .*shapes.*example="):
        found_in(Stacked(), torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_type_gives_the_same_answer(dtype):
    net = BasicBlockResNet(4, (1, 1)).to(dtype)
    names = [f"{name}.conv.weight" for name, _ in net.normalised()]
    assert len(found_in(net, torch.randn(4, 1, 8, 8, dtype=dtype), names)) == len(names)


def test_a_bias_is_found_in_float32_behind_a_deep_network():
    layers = []
    for _ in range(10):
        layers += [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()]
    net = nn.Sequential(*layers)
    weights = {f"{index}.weight": net[index].weight for index in range(0, 30, 3)}
    behind = statistics_behind(net, weights, args=[100 * INPUTS])
    assert [norm.bias is net[3 * index].bias for index, norm in enumerate(behind)] == [True] * 10


def test_constant_channels_get_the_degree_of_the_others():
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.BatchNorm1d(4))
    with torch.no_grad():
        net[0].weight[1] = 0.0
    assert found_in(net) == {"2": {"0.weight": [1] * 4}}


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_as_it_was(training):
    net = nn.Sequential(
        nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.LayerNorm(4)
    )
    net.train(training)
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(1)
    random = torch.get_rng_state()
    assert found_in(net, names=["0.weight"]) == {"1": {"0.weight": [1] * 4}}
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training is training for module in net.modules())
    assert [net[1].eps, net[4].eps] == [1e-5, 1e-5]
    assert all(param.grad is None for param in net.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not net[1]._forward_pre_hooks


def test_without_running_statistics_there_is_nothing_to_find():
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    assert found_in(net) == {}


def test_prefixes_of_wrappers_are_stripped():
    net = nn.Linear(2, 2)
    assert unwrap_model(nn.DataParallel(net)) is net
    assert unwrap_model(torch.compile(net, backend="eager")) is net
