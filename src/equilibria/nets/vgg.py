"""The scale-invariant VGG-11 of the sharpness-reduction paper."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import whole

# The scale of the last normalisation (appendix R): a network of 10 classes that is sure has a loss of about 1e-2.
FINAL_SCALE = 0.3 * math.log(91)

# Channels in units of the width; "pool" halves the image.
_PLAN: tuple[int | str, ...] = (1, "pool", 2, "pool", 4, 4, "pool", 8, 8, "pool", 8, 8, "pool")


class ScaledNorm(nn.Module):
    """BatchNorm without parameters, times a constant: the fixed affine part of a last normalisation."""

    def __init__(self, features: int, *, scale: float = FINAL_SCALE) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, affine=False)
        self.scale = scale

    def forward(self, logits: Tensor) -> Tensor:
        """Normalise, then scale."""
        result: Tensor = self.scale * self.norm(logits)
        return result


class ScaleInvariantVGG11(nn.Module):
    """VGG-11 whose every weight is scale-invariant, and whose loss is smooth.

    Configuration A of VGG with BatchNorm without parameters behind every convolution, Swish for ReLU, mean for max
    pooling, one linear layer without bias, and a last BatchNorm with a fixed scale (appendix Q.1).

    Args:
        width: channels of the first convolution; the paper's is 64.
        in_channels: channels of the images.
        classes: outputs.

    Example:
        >>> import torch
        >>> net = ScaleInvariantVGG11(4)
        >>> net(torch.randn(2, 3, 32, 32)).shape, len(list(net.parameters()))
        (torch.Size([2, 10]), 9)
    """

    def __init__(self, width: int = 64, *, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        whole("width", width, low=1)
        self.features = nn.Sequential()
        channels = in_channels
        for item in _PLAN:
            if isinstance(item, str):
                self.features.append(_MeanPool())
                continue
            conv = nn.Conv2d(channels, item * width, 3, padding=1, bias=False)
            self.features.extend([conv, nn.BatchNorm2d(item * width, affine=False), nn.SiLU()])
            channels = item * width
        self.head = nn.Linear(channels, classes, bias=False)
        self.norm = ScaledNorm(classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        logits: Tensor = self.norm(self.head(self.features(images).mean(dim=(2, 3))))
        return logits


class _MeanPool(nn.Module):
    """Halves the image, as long as there is something to halve: smaller images than the paper's may be given."""

    def forward(self, images: Tensor) -> Tensor:
        return functional.avg_pool2d(images, 2) if min(images.shape[2:]) > 1 else images
