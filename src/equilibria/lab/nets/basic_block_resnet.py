"""Residual networks of basic blocks with every convolution normalised: ResNet-8 for a minute on a CPU, ResNet-18."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import whole
from equilibria.lab.nets.conv_norm import ConvNorm, stage_plan


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str = "batch") -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, out_channels, stride=stride, norm=norm)
        self.second = ConvNorm(out_channels, out_channels, norm=norm)
        same_shape = in_channels == out_channels and stride == 1
        self.shortcut = (
            nn.Identity() if same_shape else ConvNorm(in_channels, out_channels, kernel=1, stride=stride, norm=norm)
        )

    def forward(self, images: Tensor) -> Tensor:
        """The residual plus the shortcut, through a ReLU."""
        residual = self.second(functional.relu(self.first(images)))
        return functional.relu(residual + self.shortcut(images))


class BasicBlockResNet(nn.Module):
    """Stem convolution, stages of basic blocks, mean over the image, one linear layer.

    Each stage is twice as wide as the one before and, from the second on, halves the image. Images may have any size.
    The weights start as torch starts them. `resnet8` and `resnet18` are those with a name.

    Invariances: every convolution's weight, by rows behind a BatchNorm (see `ConvNorm` for the other normalisations).
    Scale and shift of a block's first normalisation are invariant jointly; so are those of all that write into the
    stream of a stage, in the last one against the linear layer. WeightNorm has no scale and shift to forget: there gain
    and bias of each layer are scaled against what reads them.

    Args:
        width: channels of the stem and of the first stage.
        blocks: blocks in each stage, such as (1, 1) for two stages of one block.
        in_channels: channels of the images.
        classes: outputs.
        norm: what normalises the convolutions: "batch", "group", "layer" or "weight".

    Example:
        >>> import torch
        >>> net = BasicBlockResNet(8, (1, 1))
        >>> net(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> [name for name, _ in net.normalised()]
        ['stem', 'blocks.0.first', 'blocks.0.second', 'blocks.1.first', 'blocks.1.second', 'blocks.1.shortcut']
    """

    def __init__(
        self,
        width: int = 8,
        blocks: Sequence[int] = (1, 1),
        *,
        in_channels: int = 1,
        classes: int = 10,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        plan = stage_plan(width, blocks)
        whole("classes", classes, low=1)
        self.stem = ConvNorm(in_channels, width, norm=norm)
        self.blocks = nn.Sequential()
        channels = width
        for wider, stride in plan:
            self.blocks.append(BasicBlock(channels, wider, stride=stride, norm=norm))
            channels = wider
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        features = self.blocks(functional.relu(self.stem(images)))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits

    def normalised(self) -> Iterator[tuple[str, ConvNorm]]:
        """Every convolution with its normalisation, by name."""
        for name, module in self.named_modules():
            if isinstance(module, ConvNorm):
                yield name, module


def resnet8(
    width: int = 8, *, stages: int = 3, in_channels: int = 3, classes: int = 10, norm: str = "batch"
) -> BasicBlockResNet:
    """The smallest of its family, one block in each stage: 9 convolutions in three stages, 20 thousand weights 8 wide.

    Args:
        width: channels of the first stage.
        stages: number of stages.
        in_channels: channels of the images.
        classes: outputs.
        norm: what normalises the convolutions: "batch", "group", "layer" or "weight".

    Example:
        >>> sum(weight.numel() for weight in resnet8(32, classes=4).parameters())
        307876
    """
    return BasicBlockResNet(
        width, (1,) * whole("stages", stages, low=1), in_channels=in_channels, classes=classes, norm=norm
    )


def resnet18(width: int = 64, *, in_channels: int = 3, classes: int = 10, norm: str = "batch") -> BasicBlockResNet:
    """ResNet-18 in its form for small images: a 3x3 stem without stride or pooling. Arguments as for `resnet8`.

    Example:
        >>> sum(weight.numel() for weight in resnet18(16).parameters())
        701466
    """
    return BasicBlockResNet(width, (2, 2, 2, 2), in_channels=in_channels, classes=classes, norm=norm)
