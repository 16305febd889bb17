"""The papers' networks for ImageNet as published: ResNet-50, MobileNet-V2, ShuffleNet-V2+; on raw pixels.

All have BatchNorm. Every weight of four dimensions is scale-invariant, by rows; the other matrices are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, one_of, whole
from equilibria.lab.nets.conv_norm import SMALL, ConvNorm, he_fan_out, stage_plan
from equilibria.lab.nets.mobile_nets import InvertedResidual

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Of ImageNet's training pixels, by channel: the usual values."""


class OnPixels(nn.Module):
    """A network behind the standardisation of pixels from 0 to 255."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(MEAN).view(-1, 1, 1))
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (batch, 3, height, width) to logits (batch, classes)."""
        logits: Tensor = self.net((pixels - self.mean) / self.deviation)
        return logits


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, four times wider in the end; a 1x1 shortcut where the shape changes."""

    def __init__(self, in_channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, width, kernel=1)
        self.second = ConvNorm(width, width, stride=stride)
        self.third = ConvNorm(width, 4 * width, kernel=1)
        same_shape = in_channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same_shape else ConvNorm(in_channels, 4 * width, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        """The residual plus the shortcut, through a ReLU."""
        residual = self.third(functional.relu(self.second(functional.relu(self.first(images)))))
        return functional.relu(residual + self.shortcut(images))


class BottleneckResNet(nn.Module):
    """ResNet-50 if width is 64 and blocks are (3, 4, 6, 3), with strides in the 3x3 convolutions.

    First weights are those of He; with ``zero_gamma`` the scale of the last normalisation of every block begins at 0,
    so that the block begins as its shortcut.

    Invariances: every convolution's weight, by rows, and jointly as in `BasicBlockResNet`.

    Args:
        width: channels of the stem.
        blocks: blocks in each stage.
        classes: outputs.
        zero_gamma: whether blocks begin as their shortcuts.

    Example:
        >>> sum(weight.numel() for weight in BottleneckResNet().parameters())
        25557032
    """

    def __init__(
        self, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), *, classes: int = 1000, zero_gamma: bool = False
    ) -> None:
        super().__init__()
        plan = stage_plan(width, blocks)
        self.stem = ConvNorm(3, width, kernel=7, stride=2)
        self.blocks = nn.Sequential()
        channels = width
        for wide, stride in plan:
            self.blocks.append(Bottleneck(channels, wide, stride=stride))
            channels = 4 * wide
        self.head = nn.Linear(channels, whole("classes", classes, low=1))
        he_fan_out(self)
        if zero_gamma:
            for block in self.blocks:
                nn.init.zeros_(block.get_parameter("third.norm.weight"))

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, height, width) to logits (batch, classes)."""
        features = functional.max_pool2d(functional.relu(self.stem(images)), 3, stride=2, padding=1)
        logits: Tensor = self.head(self.blocks(features).mean(dim=(2, 3)))
        return logits


_MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of Sandler et al.: expansion, channels, blocks, and stride of the first block."""
_DROPOUT = 0.2


class PublishedMobileNetV2(nn.Module):
    """MobileNet-V2 of table 2 of Sandler et al., at width 1 of theirs if ``width`` is 32.

    Invariances: every convolution's weight, by rows, depthwise ones too.

    Args:
        width: channels of the stem; all others are in proportion.
        classes: outputs.

    Example:
        >>> sum(weight.numel() for weight in PublishedMobileNetV2().parameters())
        3504872
    """

    def __init__(self, width: int = 32, *, classes: int = 1000) -> None:
        super().__init__()
        if whole("width", width, low=1) % 4:
            raise EquilibriaError(f"got width={width}; expected a multiple of 4: all channels are in proportion to it")
        self.stem = ConvNorm(3, width, stride=2)
        self.blocks = nn.Sequential()
        channels = width
        for expansion, wide, count, first in _MOBILE_STAGES:
            for block in range(count):
                stride, wider = first if block == 0 else 1, wide * width // 32
                self.blocks.append(InvertedResidual(channels, wider, stride=stride, expansion=expansion))
                channels = wider
        self.last = ConvNorm(channels, 40 * width, kernel=1)
        self.dropout = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(40 * width, whole("classes", classes, low=1))
        he_fan_out(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, height, width) to logits (batch, classes)."""
        features = functional.relu6(self.last(self.blocks(functional.relu6(self.stem(images)))))
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))
        return logits


class SqueezeExcite(nn.Module):
    """Multiply every channel by a gate between 0 and 1, computed from the means of all channels.

    The weight that squeezes is invariant by rows, for a BatchNorm follows; the one behind it is not.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = ConvNorm(channels, channels // 4, kernel=1)
        self.excite = nn.Linear(channels // 4, channels, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """The gated images."""
        squeezed = functional.relu(self.squeeze(images.mean(dim=(2, 3), keepdim=True)))
        return images * functional.hardsigmoid(self.excite(squeezed.flatten(1)))[:, :, None, None]


def _named(*layers: nn.Module) -> nn.Sequential:
    """The layers one after the other, depthwise convolutions under names that say so."""
    depthwise = [isinstance(layer, ConvNorm) and layer.conv.groups > 1 for layer in layers]
    names = [f"{'depthwise' if is_depthwise else 'layer'}{place}" for place, is_depthwise in enumerate(depthwise)]
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


class PlusUnit(nn.Module):
    """A unit of ShuffleNet-V2+: odd channels through its convolutions, even ones past them.

    At the start of a stage all channels go through both branches and the image is halved. An Xception unit has three
    depthwise convolutions in place of one.

    Args:
        in_channels: of its input.
        out_channels: of its output.
        kernel: of the depthwise convolution; 0 for an Xception unit, which starts no stage.
        first: whether it starts a stage.
        hard_swish: whether hard swish follows the 1x1 convolutions, not ReLU.
        gated: whether a `SqueezeExcite` ends the branch.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel: int, first: bool, hard_swish: bool, gated: bool
    ) -> None:
        super().__init__()
        active = nn.Hardswish if hard_swish else nn.ReLU
        stride, inner = (2, in_channels) if first else (1, in_channels // 2)
        middle, outputs = out_channels // 2, out_channels - inner

        def depthwise(channels: int, size: int) -> ConvNorm:
            return ConvNorm(channels, channels, kernel=size, stride=stride, groups=channels)

        def pointwise(inputs: int, channels: int) -> list[nn.Module]:
            return [ConvNorm(inputs, channels, kernel=1), active()]

        if kernel:
            layers = [*pointwise(inner, middle), depthwise(middle, kernel), *pointwise(middle, outputs)]
        else:
            layers = [depthwise(inner, 3), *pointwise(inner, middle), depthwise(middle, 3), *pointwise(middle, middle)]
            layers += [depthwise(middle, 3), *pointwise(middle, outputs)]
        self.branch = _named(*layers, *([SqueezeExcite(outputs)] if gated else []))
        self.past = _named(depthwise(inner, kernel), *pointwise(inner, inner)) if first else nn.Identity()
        self.first = first

    def forward(self, images: Tensor) -> Tensor:
        """Both branches, one behind the other."""
        even, odd = (images, images) if self.first else (images[:, ::2], images[:, 1::2])
        return torch.cat([self.past(even), self.branch(odd)], dim=1)


_PLUS_CHANNELS = {"small": (36, 104, 208, 416), "medium": (48, 128, 256, 512), "large": (68, 168, 336, 672)}
_PLUS_KERNELS = ((3, 3, 0, 5), (5, 5, 3, 3), (7, 3, 7, 5, 5, 3, 7, 3), (7, 5, 0, 7))
"""Of the units of every stage; 0 for an Xception unit."""
_PLUS_FEATURES, _PLUS_STEM = 1280, 16


class ShuffleNetV2Plus(nn.Module):
    """ShuffleNet-V2+ of Megvii's ShuffleNet-Series, with its first weights.

    Stem, four stages of `PlusUnit`, a 1x1 convolution, mean, a last gate, two linear layers with dropout between.

    Invariances: every convolution's weight, by rows, depthwise ones and those that squeeze too; not the linear layers.

    Args:
        size: "small", "medium" or "large".
        classes: outputs.
        divisor: of all numbers of channels but the stem's and the image's, for tests.

    Example:
        >>> sum(weight.numel() for weight in ShuffleNetV2Plus("large").parameters())
        6768220
    """

    def __init__(self, size: str = "large", *, classes: int = 1000, divisor: int = 1) -> None:
        super().__init__()
        one_of("size", size, list(_PLUS_CHANNELS))
        self.stem = ConvNorm(3, _PLUS_STEM, stride=2)
        self.units = nn.Sequential()
        channels = _PLUS_STEM
        for stage, kernels in enumerate(_PLUS_KERNELS):
            wide = _PLUS_CHANNELS[size][stage] // whole("divisor", divisor, low=1)
            for place, kernel in enumerate(kernels):
                options = {"first": place == 0, "hard_swish": stage > 0, "gated": stage > 1}
                self.units.append(PlusUnit(channels, wide, kernel=kernel, **options))
                channels = wide
        features = _PLUS_FEATURES // divisor
        self.last = ConvNorm(channels, features, kernel=1)
        self.gate = SqueezeExcite(features)
        self.middle = nn.Linear(features, features, bias=False)
        self.dropout = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(features, whole("classes", classes, low=1), bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Deviation 0.01 for the stem, gates and linear layers, elsewhere 1 over the inputs of a group."""
        small = {id(self.stem.conv), *(id(m.squeeze.conv) for m in self.modules() if isinstance(m, SqueezeExcite))}
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=SMALL if id(module) in small else 1 / module.weight.shape[1])
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=SMALL)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.bias, 1e-4)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, height, width) to logits (batch, classes)."""
        features = functional.hardswish(self.last(self.units(functional.hardswish(self.stem(images)))))
        pooled = self.gate(features.mean(dim=(2, 3), keepdim=True)).flatten(1)
        logits: Tensor = self.head(self.dropout(functional.hardswish(self.middle(pooled))))
        return logits
