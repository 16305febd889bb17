"""Every network's invariances: derived by hand, and all that `symmetries` finds, no more and no less.

Those of ResNet, VGG-11 and pre-activation ResNet-20 with BatchNorm are in tests/symmetry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.helpers.scaling import assert_same_space
from tests.helpers.small_nets import Vector, against, basic_block_basis, one, pair, preactivation_basis
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.nets import GPT, MobileNetV2, ScaleInvariantVGG, ShuffleNetV2, preresnet32, resnet8, resnet18
from equilibria.objectives._objective import objective
from equilibria.symmetry import Symmetries, symmetries


@dataclass
class Case:
    """A network, a basis of its symmetries, and how its weights are invariant."""

    make: Callable[[], nn.Module]
    basis: Callable[[], list[Vector]]
    how: dict[str, str]


def convs_of(net: nn.Module) -> list[Vector]:
    return [one(name) for name, param in net.named_parameters() if param.ndim == 4]


def small_resnet(norm: str) -> nn.Module:
    return resnet8(4, stages=2, classes=5, norm=norm)


def weight_norm_basis() -> list[Vector]:
    """Gain and bias of a layer set the size of its output; what reads it takes the size back by its own gain."""
    layers = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "blocks.1.shortcut"]
    gain, bias = ({layer: f"{layer}.conv.{end}" for layer in layers} for end in ("weight.original0", "bias"))

    def sized(*written: str, read: list[str]) -> Vector:
        vector = dict.fromkeys([bias[layer] for layer in written], 1)
        for layer in written:
            vector[gain[layer]] = vector.get(gain[layer], 0) + 1
        return {**vector, **dict.fromkeys(read, -1)}

    first, second, shortcut = "blocks.1.first", "blocks.1.second", "blocks.1.shortcut"
    return [
        *(one(f"{layer}.conv.weight.original1") for layer in layers),
        sized("stem", "blocks.0.second", read=[gain["blocks.0.first"], gain[first], gain[shortcut]]),
        sized("blocks.0.first", read=[gain["blocks.0.second"]]),
        sized(first, read=[gain[second]]),
        sized(second, shortcut, read=["head.weight"]),
    ]


def resnet18_basis() -> list[Vector]:
    """As for every ResNet of basic blocks: stage by stage, what is written into the stream."""
    basis = convs_of(resnet18(2))
    written: Vector = pair("stem.norm")
    for block in range(8):
        name = f"blocks.{block}"
        basis.append(pair(f"{name}.first.norm"))
        if block in (2, 4, 6):
            basis.append(written)
            written = pair(f"{name}.shortcut.norm")
        written = {**written, **pair(f"{name}.second.norm")}
    return [*basis, against(written, "head.weight")]


def mobilenet() -> nn.Module:
    return MobileNetV2(3, (1, 2), expansion=2, classes=5)


def mobilenet_basis() -> list[Vector]:
    """The first block adds to the stem behind a ReLU6: a sum that nothing may scale. The second stage is linear.

    All that is read by a 1x1 convolution, which has no padding, and then by a BatchNorm may be shifted.
    """
    scales = one(*(f"blocks.{block}.project.norm.weight" for block in (1, 2)))
    return [*convs_of(mobilenet()), scales, *(one(f"blocks.{block}.project.norm.bias") for block in range(3))]


def shufflenet() -> nn.Module:
    return ShuffleNetV2(4, (1, 2), classes=5)


def shufflenet_basis() -> list[Vector]:
    """A depthwise normalisation is read, without ReLU, by a 1x1 convolution and a BatchNorm: its shift is forgotten."""
    names = [name for name, _ in shufflenet().named_parameters() if ".norm." in name]
    firsts = [name.removesuffix(".weight") for name in names if name.endswith("first.norm.weight")]
    entry, later = ({**pair(f"units.{n}.past.second.norm"), **pair(f"units.{n}.branch.second.norm")} for n in (0, 1))
    return [
        *convs_of(shufflenet()),
        *(pair(name) for name in firsts),
        *(one(name) for name in names if "depthwise" in name),
        pair("stem.norm"),
        entry,
        {**later, **pair("units.2.branch.second.norm")},
        against(pair("last.norm"), "head.weight"),
    ]


def gpt(**settings) -> nn.Module:
    return GPT(7, 8, layers=2, heads=2, context=6, **settings)


def gpt_basis(*, qk_norm: bool, learnt: bool) -> list[Vector]:
    blocks = ["blocks.0", "blocks.1"]
    writers = [f"{block}.{part}.weight" for block in blocks for part in ("attention.out", "down")]
    basis = [one("embedding.weight", *(["positions.weight"] if learnt else []), *writers)]
    for block in blocks:
        query, key, value, out = (f"{block}.attention.{part}.weight" for part in ("query", "key", "value", "out"))
        basis += [against(one(value), out), against(pair(f"{block}.norm2"), f"{block}.up.weight")]
        if qk_norm:
            norms = (f"{block}.attention.{part}_norm.weight" for part in ("query", "key"))
            basis += [one(query), one(key), against(pair(f"{block}.norm1"), value), against(one(next(norms)), *norms)]
        else:
            basis += [against(one(query), key), against(pair(f"{block}.norm1"), query, key, value)]
    return [*basis, against(pair("norm"), "head.weight")]


CASES = {
    "ResNet-8, GroupNorm": Case(
        lambda: small_resnet("group"),
        basic_block_basis,
        {"stem.conv.weight": "alone", "blocks.1.shortcut.conv.weight": "groups of 4 rows"},
    ),
    "ResNet-8, LayerNorm": Case(
        lambda: small_resnet("layer"), basic_block_basis, {"blocks.1.first.conv.weight": "alone"}
    ),
    "ResNet-8, WeightNorm": Case(
        lambda: small_resnet("weight"), weight_norm_basis, {"blocks.1.first.conv.weight.original1": "rows"}
    ),
    "ResNet-18": Case(lambda: resnet18(2, classes=5), resnet18_basis, {"blocks.6.shortcut.conv.weight": "rows"}),
    "small VGG": Case(
        lambda: ScaleInvariantVGG(2, (1, 1, 2, 2), classes=5),
        lambda: [*convs_of(ScaleInvariantVGG(2, (1, 1, 2, 2))), one("head.weight")],
        {"head.weight": "rows"},
    ),
    "MobileNet-V2": Case(mobilenet, mobilenet_basis, {"blocks.1.depthwise.conv.weight": "rows", "head.weight": "no"}),
    "ShuffleNet-V2": Case(shufflenet, shufflenet_basis, {"units.2.branch.depthwise.conv.weight": "rows"}),
    "GPT": Case(gpt, lambda: gpt_basis(qk_norm=False, learnt=False), {}),
    "GPT, QK-norm and learnt positions": Case(
        lambda: gpt(qk_norm=True, positions="learnt"),
        lambda: gpt_basis(qk_norm=True, learnt=True),
        {"blocks.0.attention.query.weight": "groups of 4 rows"},
    ),
}
SLOW = {
    "PreResNet-32": Case(lambda: preresnet32(2), lambda: preactivation_basis(blocks=5, scale_invariant=False), {}),
    "scale-invariant PreResNet-32": Case(
        lambda: preresnet32(2, scale_invariant=True), lambda: preactivation_basis(blocks=5, scale_invariant=True), {}
    ),
}


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@functools.cache
def found_in(name: str) -> Symmetries:
    torch.manual_seed(0)
    net = {**CASES, **SLOW}[name].make()
    torch.manual_seed(1)
    if name.startswith("GPT"):
        batch = torch.randint(7, (12, 6)), torch.randint(7, (12, 6))
        return symmetries(objective(net, next_token), [batch])
    return symmetries(objective(net, functional.cross_entropy), [(torch.randn(24, 3, 8, 8), torch.randint(5, (24,)))])


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_all_invariances_are_those_derived_by_hand(name):
    case, found = {**CASES, **SLOW}[name], found_in(name)
    assert_same_space(found.basis, case.basis(), list(found.elements))
    assert found.notes == () and found.undecided == ()
    assert found.gap > 1e6
    assert max(found.confirmed) < 1e-9
    assert {tensor: found.how[tensor] for tensor in case.how} == case.how


def test_the_whole_small_vgg_is_uniform():
    assert found_in("small VGG").largest_uniform() == frozenset(found_in("small VGG").elements)
