"""The network: shapes, sizes, and that its convolutions really are scale-invariant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equilibria.errors import EquilibriaError
from equilibria.lab.nets import BasicBlockResNet


def loss_of(net: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(images), torch.arange(len(images)) % 10)


@pytest.mark.parametrize(
    ("width", "blocks", "convolutions", "parameters"),
    [
        # By hand, 8 wide: 9*8 stem; 2*9*64; 9*128 + 9*256 + 128; BatchNorm 2*(8*3 + 16*3); head 16*10 + 10.
        (8, (1, 1), 6, 72 + 1152 + 1152 + 2304 + 128 + 144 + 170),
        (4, (2,), 5, 36 + 4 * 144 + 40 + 50),
        (2, (1, 1, 1), 9, 18 + 72 + 72 + 144 + 8 + 288 + 576 + 32 + 2 * (6 + 12 + 24) + 90),
    ],
)
def test_sizes(width, blocks, convolutions, parameters):
    net = BasicBlockResNet(width, blocks)
    assert len(list(net.normalised())) == convolutions == sum(isinstance(m, nn.Conv2d) for m in net.modules())
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_in_channels_and_classes():
    assert BasicBlockResNet(4, (1, 1), in_channels=3, classes=5)(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_each_convolution_may_be_scaled_alone_in_training():
    """In float64 with a tiny eps the loss does not change, and the gradient is orthogonal to the weight."""
    torch.manual_seed(0)
    net = BasicBlockResNet(4, (1, 1)).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-30
    images = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    before = loss_of(net, images)
    before.backward()
    for _, layer in net.normalised():
        weight = layer.conv.weight
        cosine = (weight * weight.grad).sum() / weight.norm() / weight.grad.norm()
        assert abs(cosine.item()) < 1e-12
        with torch.no_grad():
            weight.mul_(3.7)
        assert loss_of(net, images).item() == pytest.approx(before.item(), rel=1e-12)


def test_the_head_is_not_scale_invariant():
    torch.manual_seed(0)
    net = BasicBlockResNet(4, (1,))
    images = torch.randn(20, 1, 8, 8)
    before = loss_of(net, images).item()
    with torch.no_grad():
        net.head.weight.mul_(3.0)
    assert loss_of(net, images).item() != pytest.approx(before, rel=1e-3)


def test_the_start_is_torchs_own():
    torch.manual_seed(5)
    net = BasicBlockResNet(8, (1, 1))
    torch.manual_seed(5)
    assert torch.equal(net.stem.conv.weight, nn.Conv2d(1, 8, 3, bias=False).weight)


@pytest.mark.parametrize(("width", "blocks"), [(0, (1,)), (8, ()), (8, (1, 0))])
def test_bad_sizes_raise(width, blocks):
    with pytest.raises(EquilibriaError, match=r"got (width=0|blocks=)"):
        BasicBlockResNet(width, blocks)
