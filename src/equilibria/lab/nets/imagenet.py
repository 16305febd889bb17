"""The papers' networks for ImageNet, from transformers with random first weights, on pixels as they are on disk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Of ImageNet's training pixels, by channel: the usual values."""
_MOBILENET_WIDTH = 32


class OnPixels(nn.Module):
    """A network behind the standardisation of pixels from 0 to 255; gives logits."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(MEAN).view(-1, 1, 1))
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (batch, 3, height, width) to logits (batch, classes)."""
        output: Any = self.net((pixels - self.mean) / self.deviation)
        logits: Tensor = getattr(output, "logits", output)
        return logits


def resnet50(width: int, blocks: tuple[int, ...], *, classes: int) -> nn.Module:
    """ResNet-50 if width is 64 and blocks are (3, 4, 6, 3), with the stride in the 3x3 convolutions."""
    transformers = _transformers()
    config = transformers.ResNetConfig(
        embedding_size=width,
        hidden_sizes=[4 * width * 2**stage for stage in range(len(blocks))],
        depths=list(blocks),
        num_labels=classes,
    )
    net: nn.Module = transformers.ResNetForImageClassification(config)
    return net


def mobilenet_v2(width: int, *, classes: int) -> nn.Module:
    """MobileNet-V2 if width is 32, the channels of its first convolution."""
    transformers = _transformers()
    config = transformers.MobileNetV2Config(depth_multiplier=width / _MOBILENET_WIDTH, num_labels=classes)
    net: nn.Module = transformers.MobileNetV2ForImageClassification(config)
    return net


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EquilibriaError("the papers' networks need transformers; install it: pip install transformers") from None
    return transformers
