"""What docstrings say of single tensors and rows, by brute force: scale them, and look whether the loss changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.nets import ConvNorm, PreActivationResNet, ShuffleNetV2

FACTOR, NOISE, SEEN = 2.7, 1e-9, 1e-6  # float64 behind a dozen layers; what is not invariant changes the loss by more
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)


class Net:
    """A network in float64 with hardly any eps and parameters of its own everywhere, and its loss on some images."""

    def __init__(self, make: Callable[[], nn.Module], images: Tensor) -> None:
        torch.manual_seed(0)
        self.model, self.images = make().double(), images
        for module in self.model.modules():
            if isinstance(module, NORMS):
                module.eps = 1e-30
        for name, param in self.params.items():
            if param.ndim == 1:  # BatchNorm starts with ones and zeros, of which nothing could be learnt
                nn.init.uniform_(param, 0.5, 1.5) if name.endswith("weight") else nn.init.normal_(param)
        self.before = self.loss()

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: param.data for name, param in self.model.named_parameters()}

    def loss(self) -> float:
        with torch.no_grad():
            found = self.model(self.images).flatten(1)
            return float(functional.cross_entropy(found, torch.arange(len(found)) % found.shape[1]))

    def changed(self, *names: str, rows: slice = slice(None), move: Callable[[Tensor], Tensor] | None = None) -> float:
        """How much the loss changes where some rows of some tensors are scaled, or moved otherwise."""
        kept = {name: self.params[name].clone() for name in names}
        for name in names:
            part = self.params[name][rows]
            part.copy_(FACTOR * part if move is None else move(part))
        result = abs(self.loss() - self.before)
        for name, param in kept.items():
            self.params[name].copy_(param)
        return result

    def invariant_rows(self) -> set[str]:
        """Tensors of which every row may be scaled alone."""
        return {
            name
            for name, param in self.params.items()
            if all(self.changed(name, rows=slice(row, row + 1)) < NOISE for row in range(len(param)))
        }


def random_images(side: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(12, channels, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_scale_invariant_preactivation_resnet():
    net = Net(lambda: PreActivationResNet(8, 3, scale_invariant=True, classes=4), random_images())
    shortcuts = ["blocks.1.shortcut", "blocks.2.shortcut"]
    firsts = {f"blocks.{block}.conv1.weight" for block in range(3)}
    shifts = {f"{shortcut}.1.bias" for shortcut in shortcuts}
    assert net.invariant_rows() == {*firsts, "head.weight", *(f"{each}.0.weight" for each in shortcuts), *shifts}
    for shift in shifts:
        assert net.changed(shift, move=torch.randn_like) < NOISE
    for block, enters in enumerate(["stem.weight", *(f"{shortcut}.1.weight" for shortcut in shortcuts)]):
        assert net.changed(f"blocks.{block}.conv2.weight", enters) < NOISE
        assert net.changed(f"blocks.{block}.conv2.weight") > SEEN and net.changed(enters) > SEEN
        assert net.changed(f"blocks.{block}.conv2.weight", f"blocks.{(block + 1) % 3}.conv2.weight") > SEEN
    assert net.changed(*net.params) < NOISE


def test_standard_preactivation_resnet_has_only_the_first_convolutions_alone():
    net = Net(lambda: PreActivationResNet(8, 3, classes=4), random_images())
    assert net.invariant_rows() == {f"blocks.{block}.conv1.weight" for block in range(3)}


def test_shufflenet():
    net = Net(lambda: ShuffleNetV2(4, (1, 2), classes=4), random_images())
    scales = {name for name in net.params if name.endswith("depthwise.norm.weight")}
    shifts = {name for name in net.params if name.endswith("depthwise.norm.bias")}
    convs = {name for name, param in net.params.items() if param.ndim == 4}
    assert net.invariant_rows() == convs | shifts
    assert all(net.changed(scale) < NOISE for scale in scales)
    for shift in shifts:
        assert net.changed(shift, move=torch.randn_like) < NOISE
    firsts = [name.removesuffix(".weight") for name in net.params if name.endswith("first.norm.weight")]
    for norm in ["stem.norm", *firsts]:
        assert net.changed(f"{norm}.weight", f"{norm}.bias") < NOISE
        assert net.changed(f"{norm}.weight") > SEEN and net.changed(f"{norm}.bias") > SEEN


@pytest.mark.parametrize(
    ("norm", "width", "together"),
    [
        ("batch", 6, 1),
        ("group", 8, 4),
        ("group", 12, 4),
        ("group", 6, 2),
        ("group", 10, 2),
        ("group", 3, 1),
        ("group", 5, 1),
        ("layer", 6, 6),
    ],
)
def test_rows_of_a_convolution_that_are_invariant_together(norm, width, together):
    net = Net(lambda: ConvNorm(3, width, norm=norm), random_images(4))
    for row in range(width):
        start = row // together * together
        assert net.changed("conv.weight", rows=slice(start, start + together)) < NOISE
        assert (net.changed("conv.weight", rows=slice(row, row + 1)) < NOISE) == (together == 1)


def test_weight_norm_names():
    net = Net(lambda: ConvNorm(3, 4, norm="weight"), random_images(4))
    assert net.invariant_rows() == {"conv.parametrizations.weight.original1"}
