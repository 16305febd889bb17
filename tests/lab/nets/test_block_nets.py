"""Sizes and parts of the networks for the experiments: known parameter counts, depthwise and shuffled channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equilibria.errors import EquilibriaError
from equilibria.lab.nets import (
    ConvNorm,
    MobileNetV2,
    ScaleInvariantVGG,
    ScaleInvariantVGG11,
    ShuffleNetV2,
    preresnet20,
    preresnet32,
    resnet8,
    resnet18,
)
from equilibria.lab.nets.mobile_nets import InvertedResidual, ShuffleUnit


def count(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def test_known_sizes():
    assert count(resnet18()) == 11_173_962  # the CIFAR form of ResNet-18, as everybody counts it
    assert count(resnet8(32, classes=4)) == 307_876
    assert count(ScaleInvariantVGG(8, (1, 1, 2, 2), classes=4)) == 70_744
    assert count(ScaleInvariantVGG(4, (1, 1, 2, 2, 2))) == count(ScaleInvariantVGG11(4))
    convs = 27 * 16 + 10 * 9 * 16**2 + 9 * 16 * 32 + 9 * 9 * 32**2 + 9 * 32 * 64 + 9 * 9 * 64**2 + 16 * 32 + 32 * 64
    norms = 2 * (16 * 10 + 16 + 32 * 9 + 32 + 64 * 9 + 64)
    assert count(preresnet32()) == convs + norms + 650
    assert count(preresnet20()) < count(preresnet32())


@pytest.mark.parametrize("norm", ["batch", "group", "layer", "weight"])
def test_normalisations_do_what_they_say(norm):
    torch.manual_seed(0)
    layer = ConvNorm(3, 8, norm=norm)
    found = layer(torch.randn(16, 3, 6, 6))
    over = {"batch": (0, 2, 3), "group": (2, 3, 4), "layer": (1, 2, 3)}
    parts = found.unflatten(1, (2, 4)) if norm == "group" else found
    if norm == "weight":
        rows = layer.conv.weight.flatten(1).norm(dim=1)
        assert torch.allclose(rows, layer.conv.parametrizations.weight.original0.flatten())
    else:
        assert torch.allclose(parts.std(over[norm], correction=0), torch.ones(()), atol=1e-2)
    assert (layer.conv.bias is not None) == (norm == "weight")


def test_weight_norm_starts_as_the_plain_convolution():
    torch.manual_seed(5)
    layer = ConvNorm(3, 4, norm="weight")
    torch.manual_seed(5)
    assert torch.allclose(layer.conv.weight, nn.Conv2d(3, 4, 3).weight)


@pytest.mark.parametrize("side", [32, 8, 6])
def test_any_size_of_images(side):
    for net in (resnet8(4, norm="group"), MobileNetV2(4), ShuffleNetV2(4), ScaleInvariantVGG(2, (1, 1))):
        assert net(torch.randn(4, 3, side, side)).shape == (4, 10)


def test_an_inverted_residual_is_depthwise_inside():
    block = InvertedResidual(4, 4, stride=1, expansion=6)
    assert block.depthwise.conv.weight.shape == (24, 1, 3, 3)
    nn.init.zeros_(block.project.norm.weight)
    images = torch.randn(5, 4, 6, 6)
    assert torch.equal(block(images), images)  # nothing added, and no ReLU behind
    assert InvertedResidual(4, 8, stride=2, expansion=2)(images).shape == (5, 8, 3, 3)


def test_half_of_the_channels_passes_a_shuffle_unit():
    unit = ShuffleUnit(8, 8, stride=1, first=False)
    images = torch.randn(5, 8, 6, 6)
    assert torch.equal(unit(images)[:, 0::2], images[:, :4])
    assert (unit(images)[:, 1::2] >= 0).all()  # the branch ends in a ReLU
    assert ShuffleUnit(8, 16, stride=2, first=True)(images).shape == (5, 16, 3, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShuffleNetV2(5), "got width=5; expected an even number"),
        (lambda: ConvNorm(3, 4, kernel=2), "got kernel=2; expected an odd number"),
        (lambda: MobileNetV2(4, 3), "got blocks=3; expected at least one block in each stage"),
        (lambda: MobileNetV2(4, (1, 1.5)), r"got blocks=\(1, 1.5\); expected"),
        (lambda: ShuffleNetV2(4, "12"), "got blocks='12'; expected"),
        (lambda: ScaleInvariantVGG(4, 3), "got stages=3; expected"),
        (lambda: resnet8(4, classes=0), "got classes=0"),
        (lambda: MobileNetV2(4, classes=0), "got classes=0"),
        (lambda: ShuffleNetV2(4, classes=0), "got classes=0"),
        (lambda: ScaleInvariantVGG(4, classes=0), "got classes=0"),
        (lambda: preresnet20(4, classes=0), "got classes=0"),
        (lambda: MobileNetV2(4, ()), r"got blocks=\(\)"),
        (lambda: MobileNetV2(4, expansion=0), "got expansion=0"),
        (lambda: resnet8(4, stages=0), "got stages=0"),
        (lambda: resnet8(4, norm="instance"), "got norm='instance'; expected one of: batch, group"),
        (lambda: ScaleInvariantVGG(4, (1, 0)), r"got stages=\(1, 0\)"),
        (lambda: ScaleInvariantVGG(4, scale=0), "got scale=0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(EquilibriaError, match=message):
        make()
