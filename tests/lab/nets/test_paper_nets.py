"""The networks of the sharpness-reduction paper, as appendix Q.1 describes them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from equilibria.errors import EquilibriaError
from equilibria.lab.nets import FINAL_SCALE, PreActivationResNet, ScaleInvariantVGG11


def count(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def test_vgg_11_has_the_parameters_of_configuration_a():
    net = ScaleInvariantVGG11()
    convs = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    expected = sum(9 * a * b for a, b in itertools.pairwise(convs)) + 512 * 10
    assert count(net) == expected
    assert len(list(net.parameters())) == 9
    assert pytest.approx(1.353, abs=5e-4) == FINAL_SCALE


def test_resnet_20_has_its_known_size():
    # 20 layers of weights: 19 3x3 convolutions and a linear layer; shortcuts are 1x1 convolutions
    convs = 27 * 16 + 6 * 9 * 16 * 16 + 9 * 16 * 32 + 5 * 9 * 32 * 32 + 9 * 32 * 64 + 5 * 9 * 64 * 64
    shortcuts, head = 16 * 32 + 32 * 64, 64 * 10 + 10
    norms = 2 * (16 * 6 + 16 + 32 + 32 * 4 + 32 + 64 + 64 * 4 + 64)
    assert count(PreActivationResNet()) == convs + shortcuts + head + norms
    invariant = PreActivationResNet(scale_invariant=True)
    assert count(invariant) == convs + shortcuts + 640 + 2 * (32 + 64)


@pytest.mark.parametrize("side", [32, 16, 8])
def test_smaller_images(side):
    for net in (ScaleInvariantVGG11(2), PreActivationResNet(8, 2, scale_invariant=True)):
        assert net(torch.randn(4, 3, side, side)).shape == (4, 10)


def test_last_normalisation_has_the_papers_scale():
    logits = ScaleInvariantVGG11(2)(torch.randn(64, 3, 8, 8))
    assert torch.allclose(logits.std(0, correction=0), torch.full((10,), FINAL_SCALE), rtol=1e-2)


@pytest.mark.parametrize("depth", [19, 21, 7])
def test_bad_depth(depth):
    with pytest.raises(EquilibriaError, match="depth"):
        PreActivationResNet(depth)
