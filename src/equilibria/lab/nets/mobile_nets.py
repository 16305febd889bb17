"""MobileNet-V2 and ShuffleNet-V2: depthwise convolutions, and channels that are split and shuffled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.nets.conv_norm import ConvNorm, stage_plan


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution (unless the expansion is 1), convolve each channel by itself, narrow again.

    All with BatchNorm. ReLU6 follows the first two; what is narrow stays linear and is added to the input where the
    shape is the same.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * in_channels
        self.expand = ConvNorm(in_channels, wide, kernel=1) if expansion > 1 else None
        self.depthwise = ConvNorm(wide, wide, stride=stride, groups=wide)
        self.project = ConvNorm(wide, out_channels, kernel=1)
        self.residual = in_channels == out_channels and stride == 1

    def forward(self, images: Tensor) -> Tensor:
        """The narrow result, on top of the input where it can be."""
        wide = images if self.expand is None else functional.relu6(self.expand(images))
        result: Tensor = self.project(functional.relu6(self.depthwise(wide)))
        return result + images if self.residual else result


class MobileNetV2(nn.Module):
    """Stem convolution, stages of inverted residuals, a 1x1 convolution, mean over the image, one linear layer.

    The blocks are those of MobileNet-V2; the stages are simpler: each is twice as wide as the one before and, from the
    second on, halves the image, which may have any size.

    Invariances: every convolution's weight, by rows, depthwise ones too. The normalisations that write into the stream
    (``project``) are read by a 1x1 convolution and a BatchNorm: their shifts have no effect, and from the second stage
    on the scales of a stage's are invariant jointly. Nothing else, for ReLU6 is not homogeneous.

    Args:
        width: channels of the stem and of the first stage.
        blocks: blocks in each stage.
        expansion: how many times wider a block is inside.
        in_channels: channels of the images.
        classes: outputs.

    Example:
        >>> import torch
        >>> MobileNetV2(8, (1, 2))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        width: int = 16,
        blocks: Sequence[int] = (1, 2, 2),
        *,
        expansion: int = 6,
        in_channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        plan = stage_plan(width, blocks)
        whole("expansion", expansion, low=1)
        whole("classes", classes, low=1)
        self.stem = ConvNorm(in_channels, width)
        self.blocks = nn.Sequential()
        channels = width
        for wider, stride in plan:
            self.blocks.append(InvertedResidual(channels, wider, stride=stride, expansion=expansion))
            channels = wider
        self.last = ConvNorm(channels, 4 * channels, kernel=1)
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        features = functional.relu6(self.last(self.blocks(functional.relu6(self.stem(images)))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def shuffle(images: Tensor) -> Tensor:
    """Channels of the first and of the second half in turn.

    Example:
        >>> shuffle(torch.arange(6).view(1, 6, 1, 1)).flatten().tolist()
        [0, 3, 1, 4, 2, 5]
    """
    return torch.stack(images.chunk(2, dim=1), dim=2).flatten(1, 2)


class _Branch(nn.Module):
    """1x1, depthwise and 1x1 convolution with BatchNorm each; ReLU behind the first and the last."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, out_channels, kernel=1)
        self.depthwise = ConvNorm(out_channels, out_channels, stride=stride, groups=out_channels)
        self.second = ConvNorm(out_channels, out_channels, kernel=1)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.second(self.depthwise(functional.relu(self.first(images)))))


class _Thin(nn.Module):
    """The other branch where the shape changes: depthwise and 1x1 convolution."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.depthwise = ConvNorm(in_channels, in_channels, stride=stride, groups=in_channels)
        self.second = ConvNorm(in_channels, out_channels, kernel=1)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.second(self.depthwise(images)))


class ShuffleUnit(nn.Module):
    """Half of the channels through a branch, the others past it; at the start of a stage all through two branches."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, first: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.past = _Thin(in_channels, half, stride=stride) if first else nn.Identity()
        self.branch = _Branch(in_channels if first else half, half, stride=stride)
        self.first = first

    def forward(self, images: Tensor) -> Tensor:
        """Both halves, shuffled."""
        left, right = (images, images) if self.first else images.chunk(2, dim=1)
        return shuffle(torch.cat([self.past(left), self.branch(right)], dim=1))


class ShuffleNetV2(nn.Module):
    """Stem convolution, stages of shuffle units, a 1x1 convolution, mean over the image, one linear layer.

    The units are those of ShuffleNet-V2; each stage is twice as wide as the one before and, from the second on, halves
    the image, which may have any size.

    Invariances: every convolution's weight, by rows, depthwise ones too. Scale and shift of the stem's normalisation
    jointly, and of the first one of a branch; of the depthwise one the scale alone, and its shift has no effect, for a
    1x1 convolution and a BatchNorm follow; of all that write into the channels of a stage jointly, for they are
    shuffled and read together; of the last one against the linear layer.

    Args:
        width: channels of the stem and of the first stage, even.
        blocks: units in each stage.
        in_channels: channels of the images.
        classes: outputs.

    Example:
        >>> ShuffleNetV2(8, (1, 2))(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, width: int = 16, blocks: Sequence[int] = (2, 2, 2), *, in_channels: int = 3, classes: int = 10
    ) -> None:
        super().__init__()
        plan = stage_plan(width, blocks)
        whole("classes", classes, low=1)
        if width % 2:
            raise EquilibriaError(f"got width={width}; expected an even number: channels are split into halves")
        self.stem = ConvNorm(in_channels, width)
        self.units = nn.Sequential()
        channels, at_stage = width, 0
        for wider, stride in plan:
            first = wider != at_stage
            self.units.append(ShuffleUnit(channels, wider, stride=stride, first=first))
            channels = at_stage = wider
        self.last = ConvNorm(channels, 2 * channels, kernel=1)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        features = functional.relu(self.last(self.units(functional.relu(self.stem(images)))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
