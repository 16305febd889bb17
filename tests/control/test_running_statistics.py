"""Running statistics that follow rescaled weights: they must be those that the rescaled network itself would gather."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from equilibria.control._running_statistics import RunningStatistics

FACTOR = 0.37


class TwoBehindOneAnother(nn.Module):
    """Two matrices without a norm between them: scaling both scales what the norm sees by the square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, momentum=None, eps=1e-30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


class SideBySide(nn.Module):
    """Two branches, each of them some channels of one norm; a third matrix is in front of one of them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3, bias=False), nn.Linear(5, 2, bias=bias)
        self.third = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(5, momentum=None, eps=1e-30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.third(torch.relu(self.first(x))), self.second(x)], 1))


class BehindABias(nn.Module):
    """A bias that does not scale with the weight stays in the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None, eps=1e-30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def gathered(net: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance after one batch, of a norm that averages over all it has seen."""
    net.norm.reset_running_stats()
    net(inputs)
    return net.norm.running_mean.clone(), net.norm.running_var.clone()


@pytest.mark.parametrize(
    ("make", "scaled"),
    [
        (TwoBehindOneAnother, ["first.weight", "second.weight"]),
        (TwoBehindOneAnother, ["second.weight"]),
        (lambda: SideBySide(bias=False), ["first.weight"]),
        (lambda: SideBySide(bias=False), ["first.weight", "third.weight"]),
        (lambda: SideBySide(bias=False), ["first.weight", "second.weight"]),
        (BehindABias, ["first.weight"]),
    ],
    ids=["degree 2", "degree 1 of 2", "some channels", "degree 2 in some", "all channels", "bias"],
)
@pytest.mark.parametrize("located", ["by example", "at the first call"])
def test_they_are_what_the_rescaled_network_gathers(make, scaled, located):
    torch.manual_seed(0)
    net = make().double()
    inputs = torch.randn(40, 5, dtype=torch.float64)
    weights = {name: param for name, param in net.named_parameters() if param.ndim == 2}
    statistics = RunningStatistics(net, weights, example=inputs if located == "by example" else None)
    gathered(net, inputs)
    twin = copy.deepcopy(net)
    statistics.rescale(scaled, FACTOR)
    with torch.no_grad():
        for name in scaled:
            twin.get_parameter(name).mul_(FACTOR)
    mean, var = gathered(twin, inputs)
    assert torch.allclose(net.norm.running_mean, mean, rtol=1e-10, atol=1e-12)
    assert torch.allclose(net.norm.running_var, var, rtol=1e-10, atol=1e-12)


def test_a_factor_is_too_small_if_the_variance_of_a_norm_behind_it_would_come_close_to_eps():
    net = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, eps=1e-2), nn.Linear(4, 3, bias=False))
    net.append(nn.BatchNorm1d(3, eps=1e-3))
    weights = {"0.weight": net[0].weight, "2.weight": net[2].weight}
    statistics = RunningStatistics(net, weights, example=torch.randn(16, 5))
    with torch.no_grad():
        net[1].running_var.copy_(torch.tensor([1.0, 2.0, 2.0, 9.0]))  # torch's median: the lower of the middle two
        net[3].running_var.copy_(torch.tensor([1.0, 4.0, 5.0]))
    factors = {"0.weight": 0.5, "2.weight": 0.5}  # 200 and 4000 times eps before, 50 and 1000 after
    assert statistics.too_small(factors, limit=49.9) == []
    assert statistics.too_small(factors, limit=50.1) == ["0.weight"]
    assert statistics.too_small(factors, limit=1000.1) == ["0.weight", "2.weight"]
    assert statistics.too_small({"0.weight": 2.0}, limit=1e6) == []


def test_of_two_weights_before_one_norm_the_second_waits_where_both_factors_are_too_small():
    torch.manual_seed(0)
    net = TwoBehindOneAnother()
    net.norm.eps = 1e-2
    weights = {"first.weight": net.first.weight, "second.weight": net.second.weight}
    statistics = RunningStatistics(net, weights, example=torch.randn(16, 5))
    with torch.no_grad():
        net.norm.running_var.fill_(1.0)
    assert statistics.too_small(dict.fromkeys(weights, 0.5), limit=10.0) == ["second.weight"]  # 25, then 6.25
    assert statistics.too_small(dict.fromkeys(weights, 0.5), limit=6.0) == []
