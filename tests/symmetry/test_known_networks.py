"""Every network's symmetries against those derived by hand, and by scaling."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.helpers.scaling import assert_same_space, change_when_scaled
from tests.helpers.small_nets import CASES
from torch.nn import functional

from equilibria.objectives._objective import objective
from equilibria.symmetry import Symmetries, symmetries
from equilibria.tensors.parameters import plain_name

CHANGED = 1e-4  # of the spread: 10 orders of magnitude above rounding
UNCHANGED = 1e-9


def batch_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(24, *CASES[name].shape), torch.randint(5, (24,))


@functools.cache
def net_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return CASES[name].make()


@functools.cache
def found_in(name: str) -> Symmetries:
    return symmetries(objective(net_of(name), functional.cross_entropy), [batch_of(name)])


@pytest.mark.parametrize("name", CASES)
def test_all_symmetries_are_found_and_no_others(name):
    sym = found_in(name)
    assert_same_space(sym.basis, CASES[name].basis(), list(sym.elements))
    assert sym.notes == ()
    assert sym.gap > 1e6
    assert max(sym.confirmed, default=0.0) < UNCHANGED


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.how])
def test_how_each_tensor_is_invariant_in_words(name):
    how = found_in(name).how
    assert {tensor: how[tensor] for tensor in CASES[name].how} == CASES[name].how


@pytest.mark.parametrize("name", CASES)
def test_alone_agrees_with_scaling_by_hand(name):
    net, sym, inputs = net_of(name), found_in(name), batch_of(name)[0]
    if name == "own norm with an eps in the code":
        pytest.skip("its eps is in its code, where a copy made by hand cannot reach it")
    raw = {plain_name(param): param for param, _ in net.named_parameters()}
    for tensor in sym.elements:
        change = change_when_scaled(net, lambda network: network(inputs.double()), {raw[tensor]: 1})
        free = tensor in sym.alone or tensor in sym.no_effect
        assert change < UNCHANGED if free else change > CHANGED, (tensor, change)


@pytest.mark.parametrize("name", [name for name in CASES if "ResNet" in name or "VGG" in name])
def test_the_largest_uniform_set_may_be_scaled_and_not_extended(name):
    net, sym, inputs = net_of(name), found_in(name), batch_of(name)[0]
    uniform = sym.largest_uniform()
    assert change_when_scaled(net, lambda network: network(inputs.double()), dict.fromkeys(uniform, 1)) < UNCHANGED
    for further in set(sym.elements) - uniform:
        wider = dict.fromkeys({*uniform, further}, 1)
        assert change_when_scaled(net, lambda network: network(inputs.double()), wider) > CHANGED


@pytest.mark.parametrize("name", CASES)
def test_every_uniform_set_may_be_scaled_by_a_factor_of_its_own(name):
    net, sym, inputs = net_of(name), found_in(name), batch_of(name)[0]
    if name == "own norm with an eps in the code":
        pytest.skip("its eps is in its code, where a copy made by hand cannot reach it")
    raw = {plain_name(param): param for param, _ in net.named_parameters()}
    sets = sym.uniform_sets()
    together = [tensor for names in sets for tensor in names]
    assert len(together) == len(set(together))
    assert set(together) == sym.largest_uniform() - set(sym.no_effect)
    assert {names[0] for names in sets if len(names) == 1} == set(sym.alone)
    exponents = {raw[tensor]: place % 3 - 1 for place, names in enumerate(sets) for tensor in names}
    assert change_when_scaled(net, lambda network: network(inputs.double()), exponents) < UNCHANGED


def test_the_sets_of_a_scale_invariant_resnet_are_its_streams():
    joint = [names for names in found_in("scale-invariant ResNet-20").uniform_sets() if len(names) > 1]
    assert [names[0] for names in joint] == ["stem.weight", "blocks.3.conv2.weight", "blocks.6.conv2.weight"]
    assert [len(names) for names in joint] == [4, 4, 4]


def test_the_whole_of_a_scale_invariant_network_is_uniform():
    for name in ("scale-invariant ResNet-20", "scale-invariant VGG-11"):
        assert found_in(name).largest_uniform() == frozenset(found_in(name).elements)


def test_the_papers_resnet_keeps_every_convolution_of_its_blocks():
    left_out = (
        set(found_in("pre-activation ResNet-20").elements) - found_in("pre-activation ResNet-20").largest_uniform()
    )
    assert {"head.weight", "head.bias", "norm.weight", "norm.bias"} <= left_out
    assert not any("conv1" in name or "conv2" in name or "norm1" in name for name in left_out)


def test_rows_of_a_fused_projection():
    rows = found_in("QK-norm, fused").rows["fused.weight"]
    assert (rows.block, rows.rows) == (4, 24)
    assert rows.invariant == (True,) * 4 + (False,) * 2  # two heads of queries, two of keys, two of values


def test_a_network_without_symmetry_prints_so():
    sym = found_in("no symmetry")
    assert sym.basis == ()
    assert sym.largest_uniform() == frozenset()
    assert "no scaling symmetry" in str(sym)
    assert set(sym.how.values()) == {"no"}
