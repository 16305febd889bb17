"""The scale-invariant VGG-11 of the sharpness-reduction paper, and smaller ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab.nets.conv_norm import are_counts
from equilibria.theory.generalization import final_bn_scale

# The paper's scale of the last normalisation (appendix R), 0.3 ln 91: with 10 classes a label smoothing of 0.1.
FINAL_SCALE = float(final_bn_scale(0.1, 10))

_WIDEST = 8  # in units of the width: the last stages are as wide as the fourth


class ScaledNorm(nn.Module):
    """BatchNorm without parameters, times a constant: the fixed affine part of a last normalisation."""

    def __init__(self, features: int, *, scale: float = FINAL_SCALE) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, affine=False)
        self.scale = positive("scale", scale)

    def forward(self, logits: Tensor) -> Tensor:
        """Normalise, then scale."""
        result: Tensor = self.scale * self.norm(logits)
        return result


class ScaleInvariantVGG(nn.Module):
    """A VGG whose every weight is scale-invariant, and whose loss is smooth.

    Stages of 3x3 convolutions, each with BatchNorm without parameters and Swish behind it; a mean over 2x2 pixels after
    each stage, the next one twice as wide (at most 8 times the first); mean over the image; one linear layer without
    bias; and a last BatchNorm with a fixed scale (appendix Q.1). Images may have any size.

    Invariances: every weight, by rows.

    Args:
        width: channels of the first stage.
        stages: convolutions in each stage; (1, 1, 2, 2, 2) is VGG-11.
        in_channels: channels of the images.
        classes: outputs.
        scale: of the last BatchNorm; `equilibria.theory.generalization.final_bn_scale` says what it means.

    Example:
        >>> small = ScaleInvariantVGG(8, (1, 1, 2, 2), classes=4)  # shows sharpness reduction in minutes on a CPU
        >>> sum(weight.numel() for weight in small.parameters())
        70744
    """

    def __init__(
        self,
        width: int = 64,
        stages: Sequence[int] = (1, 1, 2, 2, 2),
        *,
        in_channels: int = 3,
        classes: int = 10,
        scale: float = FINAL_SCALE,
    ) -> None:
        super().__init__()
        whole("width", width, low=1)
        whole("classes", classes, low=1)
        if not are_counts(stages):
            raise EquilibriaError(f"got stages={stages!r}; expected a convolution or more in each, such as (1, 1, 2)")
        self.features = nn.Sequential()
        channels = in_channels
        for stage, count in enumerate(stages):
            wider = width * min(2**stage, _WIDEST)
            for _ in range(count):
                conv = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
                self.features.extend([conv, nn.BatchNorm2d(wider, affine=False), nn.SiLU()])
                channels = wider
            self.features.append(_MeanPool())
        self.head = nn.Linear(channels, classes, bias=False)
        self.norm = ScaledNorm(classes, scale=scale)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        logits: Tensor = self.norm(self.head(self.features(images).mean(dim=(2, 3))))
        return logits


class ScaleInvariantVGG11(ScaleInvariantVGG):
    """The paper's: configuration A of VGG, made scale-invariant and smooth.

    Args:
        width: channels of the first convolution; the paper's is 64.
        in_channels: channels of the images.
        classes: outputs.
        scale: of the last BatchNorm; the paper's is 0.3 ln 91.

    Example:
        >>> import torch
        >>> net = ScaleInvariantVGG11(4)
        >>> net(torch.randn(2, 3, 32, 32)).shape, len(list(net.parameters()))
        (torch.Size([2, 10]), 9)
    """

    def __init__(self, width: int = 64, *, in_channels: int = 3, classes: int = 10, scale: float = FINAL_SCALE) -> None:
        super().__init__(width, in_channels=in_channels, classes=classes, scale=scale)


class _MeanPool(nn.Module):
    """Halves the image, as long as there is something to halve: smaller images than the paper's may be given."""

    def forward(self, images: Tensor) -> Tensor:
        return functional.avg_pool2d(images, 2) if min(images.shape[2:]) > 1 else images
