"""The published networks for ImageNet: sizes, first weights, and which weights are scale-invariant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.lab.nets.imagenet import (
    BottleneckResNet,
    OnPixels,
    PlusUnit,
    PublishedMobileNetV2,
    ShuffleNetV2Plus,
    SqueezeExcite,
)

NETWORKS = {
    "ResNet-50": lambda: BottleneckResNet(4, (1, 1, 1, 1), classes=5),
    "MobileNet-V2": lambda: PublishedMobileNetV2(4, classes=5),
    "ShuffleNet-V2+": lambda: ShuffleNetV2Plus("small", classes=5, divisor=2),
}


def multiply_adds(model: nn.Module, size: int) -> int:
    """Multiplications with weights of convolutions and linear layers for one image."""
    found = []

    def count(module, _inputs, output):
        found.append(output.numel() * math.prod(module.weight.shape[1:]))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, size, size))
    return sum(found)


@pytest.mark.parametrize(
    ("make", "parameters", "millions"),
    [
        (BottleneckResNet, 25_557_032, 4089),  # torchvision: 25,557,032; 4.09 G
        (PublishedMobileNetV2, 3_504_872, 301),  # torchvision: 3,504,872; 0.30 G; the paper's table 4: 300 M
        (ShuffleNetV2Plus, 6_768_220, 360),  # its README: 6.7 M; 360 M
        (lambda: ShuffleNetV2Plus("medium"), 5_679_840, 222),  # 5.6 M; 222 M
        (lambda: ShuffleNetV2Plus("small"), 5_137_116, 156),  # 5.1 M; 156 M
    ],
)
def test_parameters_and_multiply_adds_are_the_published_ones(make, parameters, millions):
    net = make()
    assert sum(param.numel() for param in net.parameters()) == parameters
    assert round(multiply_adds(net, 224) / 1e6) == millions


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_of_four_dimensions_is_invariant_by_rows_and_no_linear_layer_is(name):
    torch.manual_seed(0)
    net = NETWORKS[name]().double().train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-30
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images = torch.randn(6, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = net(images)
        for tensor in net.parameters():
            if tensor.ndim == 4:
                tensor.mul_(torch.rand(len(tensor), 1, 1, 1, dtype=torch.float64) + 0.5)
        torch.testing.assert_close(net(images), before, rtol=1e-6, atol=1e-8)
        for param_name, tensor in list(net.named_parameters()):
            if tensor.ndim == 2:
                tensor.mul_(2)
                assert not torch.allclose(net(images), before, rtol=1e-6, atol=1e-8), param_name
                tensor.div_(2)


def test_blocks_with_a_gamma_of_0_begin_as_their_shortcuts():
    torch.manual_seed(0)
    net = BottleneckResNet(4, (2, 1), zero_gamma=True)
    images = torch.randn(2, 16, 8, 8).abs()
    torch.testing.assert_close(net.blocks[1](images), images)  # the first of a stage has another shape
    assert [bool(block.third.norm.weight.any()) for block in BottleneckResNet(4, (2, 1)).blocks] == 3 * [True]


@pytest.mark.parametrize("name", ["ResNet-50", "MobileNet-V2"])
def test_first_weights_are_those_of_he_by_outputs(name):
    torch.manual_seed(0)
    net = {"ResNet-50": BottleneckResNet, "MobileNet-V2": PublishedMobileNetV2}[name]()
    for conv in (module for module in net.modules() if isinstance(module, nn.Conv2d)):
        outputs, entries = conv.out_channels * conv.kernel_size[0] ** 2, conv.weight.numel()
        assert float(conv.weight.detach().std()) == pytest.approx((2 / outputs) ** 0.5, rel=5 / (2 * entries) ** 0.5)
    assert float(net.head.weight.detach().std()) == pytest.approx(0.01, rel=0.01) and not net.head.bias.any()


def test_a_unit_passes_even_channels_by_and_a_first_unit_halves_the_image():
    torch.manual_seed(0)
    images = torch.randn(3, 8, 6, 6)
    unit = PlusUnit(8, 8, kernel=5, first=False, hard_swish=True, gated=True)
    out = unit(images)
    assert torch.equal(out[:, :4], images[:, ::2]) and out.shape == images.shape
    assert PlusUnit(8, 12, kernel=3, first=True, hard_swish=False, gated=False)(images).shape == (3, 12, 3, 3)
    xception = PlusUnit(8, 8, kernel=0, first=False, hard_swish=False, gated=False)
    assert sum("depthwise" in name for name, _ in xception.named_parameters() if name.endswith("conv.weight")) == 3


def test_a_gate_multiplies_channels_by_a_hard_sigmoid():
    torch.manual_seed(0)
    gate, images = SqueezeExcite(8).eval(), torch.randn(3, 8, 5, 5)
    means = images.mean(dim=(2, 3))
    weights = gate.squeeze.conv.weight.flatten(1), gate.excite.weight
    hidden = functional.relu(means @ weights[0].T / (1 + 1e-5) ** 0.5)
    expected = images * ((hidden @ weights[1].T + 3).clamp(0, 6) / 6)[:, :, None, None]
    torch.testing.assert_close(gate(images), expected)


def test_pixels_are_standardised_by_channel():
    pixels = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    found = OnPixels(nn.Flatten())(pixels).view(3, 4)[:, 0]
    torch.testing.assert_close(found, -torch.tensor([123.675 / 58.395, 116.28 / 57.12, 103.53 / 57.375]))
