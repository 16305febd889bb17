"""Saying which tensors are scale-invariant: by name, by tensor, by a result of symmetries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.control import Rotational
from equilibria.errors import EquilibriaError
from equilibria.symmetry import symmetries
from equilibria.tensors.invariance import invariant_tensors


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def net() -> nn.Module:
    return network()


@pytest.fixture
def optimizer(net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "given", [["0.weight"], ("0.weight",), {"0.weight"}, SimpleNamespace(alone=frozenset({"0.weight"}))]
)
def test_names_are_looked_up_in_the_model(net, optimizer, given):
    found = invariant_tensors(given, optimizer=optimizer, model=net)
    assert list(found) == ["0.weight"]
    assert found["0.weight"] is net[0].weight


def test_of_a_result_of_symmetries_those_count_that_the_optimizer_trains(net):
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    result = SimpleNamespace(alone=frozenset({"0.weight", "2.weight"}))
    assert list(invariant_tensors(result, optimizer=optimizer, model=net)) == ["0.weight"]
    with pytest.raises(EquilibriaError, match=r"by which 2\.weight are .* none of which .*: it trains 0\.weight"):
        invariant_tensors(SimpleNamespace(alone={"2.weight"}), optimizer=optimizer, model=net)
    with pytest.raises(EquilibriaError, match=r"got invariant name '2\.weight'"):
        invariant_tensors(["2.weight"], optimizer=optimizer, model=net)


def test_names_under_wrappers_are_plain_names(net):
    wrapped = nn.Sequential()
    wrapped.module = net  # what DataParallel and torch.compile do to names
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    assert invariant_tensors(["0.weight"], optimizer=optimizer, model=wrapped)["0.weight"] is net[0].weight


def test_an_optimizer_that_knows_names_needs_no_model(net):
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    assert invariant_tensors(["0.weight"], optimizer=optimizer)["0.weight"] is net[0].weight


def test_tensors_need_no_model_and_keep_their_order(net, optimizer):
    found = invariant_tensors([net[2].weight, net[0].weight], optimizer=optimizer)
    assert list(found) == ["group0.3", "group0.0"]
    assert list(invariant_tensors([net[0].weight], optimizer=optimizer, model=net)) == ["0.weight"]


def test_pairs_of_named_parameters_are_their_tensors(net, optimizer):
    pairs = [(name, param) for name, param in net.named_parameters() if name == "0.weight"]
    found = invariant_tensors(pairs, optimizer=optimizer, model=net)
    assert list(found) == ["0.weight"]
    assert found["0.weight"] is net[0].weight


def test_what_cannot_be_meant_is_refused_with_what_to_do(net, optimizer):
    refused = [
        ([], "names nothing.*eq.symmetries"),
        (None, "got invariant=NoneType; .*eq.symmetries"),
        ("0.weight", "got invariant=str; expected a list"),
        (net[0].weight, "got invariant=Parameter; expected a list"),
        ([3], r"got invariant=list of int; expected names, tensors"),
        ([net], r"got invariant=list of Sequential; expected names, tensors"),
        (net, r"got invariant=Sequential, a network; expected .* as model=: .*invariant=sym"),
        (SimpleNamespace(alone=()), "no weight of this model is scale-invariant alone"),
        (["0.weight", *[3] * 9], r"got invariant=list of 0.weight, int, int and 7 more; expected"),
        (["0.weigth"], r"'0.weigth', which is none of the optimizer's parameters; expected their names, such as 0.w"),
        ([nn.Parameter(torch.ones(2, 2))], r"shape \(2, 2\) that is none of the optimizer's 5"),
    ]
    for given, message in refused:
        with pytest.raises(EquilibriaError, match=message):
            invariant_tensors(given, optimizer=optimizer, model=net)
    with pytest.raises(EquilibriaError, match=r"got a result of symmetries, .*expected model= beside it"):
        invariant_tensors(SimpleNamespace(alone=["0.weight"]), optimizer=optimizer)
    with pytest.raises(EquilibriaError, match="the optimizer knows no names; expected model="):
        invariant_tensors(["0.weight"], optimizer=optimizer)


def test_a_real_result_of_symmetries_says_which_weights_turn(net):
    net.double()
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 3, generator=generator).double(), torch.randint(2, (8,), generator=generator)) for _ in range(8)
    ]
    found = symmetries(eq.objective(net, nn.functional.cross_entropy), batches)
    plain = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)
    assert repr(found) == "<Symmetries: 1 of 5 tensors alone: 0.weight>"
    optimizer = Rotational(plain, invariant=found, model=net)
    assert list(optimizer.axes) == [net[0].weight]
