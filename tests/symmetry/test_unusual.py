"""Unusual networks against symmetries derived by hand, and unusual batches, types and losses."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.scaling import assert_same_space
from tests.helpers.unusual_nets import UNUSUAL
from torch import nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import objective
from equilibria.symmetry import symmetries


@pytest.mark.parametrize("name", UNUSUAL)
def test_all_symmetries_are_found_and_no_others(name):
    case = UNUSUAL[name]
    torch.manual_seed(0)
    net = case.make()
    data = torch.randn(24, *case.shape), torch.randint(5, (24,))
    sym = symmetries(objective(net, functional.cross_entropy), [data])
    assert_same_space(sym.basis, case.basis(), list(sym.elements))
    assert {tensor: sym.how[tensor] for tensor in case.how} == case.how
    assert sym.notes == ()
    assert sym.gap > 1e6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 4), torch.arange(16) % 3


def test_a_model_in_float16():
    inputs, targets = data()
    sym = symmetries(objective(net().half(), functional.cross_entropy), [(inputs.half(), targets)])
    assert sym.how["0.weight"] == "rows"


def test_a_loss_with_label_smoothing_and_batches_as_dicts():
    inputs, targets = data()
    loss = objective(
        net(), nn.CrossEntropyLoss(label_smoothing=0.1), unpack=lambda row: ({"input": row["x"]}, row["y"])
    )
    assert symmetries(loss, [{"x": inputs, "y": targets}]).alone == ("0.weight",)


def test_an_exhausted_generator_raises():
    batches = iter([data()])
    assert symmetries(objective(net(), functional.cross_entropy), batches).alone == ("0.weight",)
    with pytest.raises(EquilibriaError, match="an iterator that was used before is empty"):
        symmetries(objective(net(), functional.cross_entropy), batches)


def test_a_model_on_the_meta_device_raises():
    with pytest.raises(EquilibriaError, match=r"got parameters on the meta device, such as 0\.weight"):
        symmetries(objective(net().to("meta"), functional.cross_entropy), [data()])
