"""A residual network of basic blocks with BatchNorm behind every convolution, small enough for a minute on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole


class ConvNorm(nn.Module):
    """A convolution without bias and the BatchNorm behind it, which makes the convolution's weight scale-invariant."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve, then normalise."""
        result: Tensor = self.norm(self.conv(images))
        return result


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, out_channels, stride=stride)
        self.second = ConvNorm(out_channels, out_channels)
        same_shape = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same_shape else ConvNorm(in_channels, out_channels, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        """The residual plus the shortcut, through a ReLU."""
        residual = self.second(functional.relu(self.first(images)))
        return functional.relu(residual + self.shortcut(images))


class BasicBlockResNet(nn.Module):
    """Stem convolution, stages of basic blocks, mean over the image, one linear layer.

    Each stage is twice as wide as the one before and, from the second on, halves the image. Every convolution is
    followed by a BatchNorm with scale and shift, so every convolution's weight is scale-invariant. The weights start
    as torch starts them.

    Args:
        width: channels of the stem and of the first stage.
        blocks: blocks in each stage, such as (1, 1) for two stages of one block.
        in_channels: channels of the images.
        classes: outputs.

    Example:
        >>> import torch
        >>> net = BasicBlockResNet(8, (1, 1))
        >>> net(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> [name for name, _ in net.normalised()]
        ['stem', 'blocks.0.first', 'blocks.0.second', 'blocks.1.first', 'blocks.1.second', 'blocks.1.shortcut']
    """

    def __init__(
        self, width: int = 8, blocks: Sequence[int] = (1, 1), *, in_channels: int = 1, classes: int = 10
    ) -> None:
        super().__init__()
        whole("width", width, low=1)
        if not blocks or any(count < 1 for count in blocks):
            raise EquilibriaError(f"got blocks={blocks!r}; expected at least one block in each stage, such as (1, 1)")
        self.stem = ConvNorm(in_channels, width)
        self.blocks = nn.Sequential()
        channels = width
        for stage, count in enumerate(blocks):
            wider = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(BasicBlock(channels, wider, stride=stride))
                channels = wider
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        features = self.blocks(functional.relu(self.stem(images)))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits

    def normalised(self) -> Iterator[tuple[str, ConvNorm]]:
        """Every convolution with the BatchNorm behind it, by name."""
        for name, module in self.named_modules():
            if isinstance(module, ConvNorm):
                yield name, module
