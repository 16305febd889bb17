"""A network of MobileNet-V2's blocks: depthwise convolutions between thin streams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import whole
from equilibria.lab.nets.conv_norm import ConvNorm, stage_plan


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, convolve each channel by itself, narrow again, all with BatchNorm.

    ReLU6 follows the first two; what is narrow stays linear and is added to the input where the shape is the same.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * in_channels
        self.expand = ConvNorm(in_channels, wide, kernel=1)
        self.depthwise = ConvNorm(wide, wide, stride=stride, groups=wide)
        self.project = ConvNorm(wide, out_channels, kernel=1)
        self.residual = in_channels == out_channels and stride == 1

    def forward(self, images: Tensor) -> Tensor:
        """The narrow result, on top of the input where it can be."""
        wide = functional.relu6(self.depthwise(functional.relu6(self.expand(images))))
        result: Tensor = self.project(wide)
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
