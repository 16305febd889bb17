"""Pre-activation ResNets for small images: the standard form, and the one whose every weight is scale-invariant."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.nets.vgg import FINAL_SCALE, ScaledNorm


class PreActivationBlock(nn.Module):
    """Normalise, ReLU, convolve, twice; added to the input, which a 1x1 convolution fits where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, affine: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels, affine=affine)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels, affine=affine)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()
        if in_channels != out_channels or stride != 1:
            self.shortcut.append(nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False))
            if not affine:
                self.shortcut.append(nn.BatchNorm2d(out_channels))

    def forward(self, images: Tensor) -> Tensor:
        """The residual plus the shortcut."""
        residual = self.conv1(functional.relu(self.norm1(images)))
        residual = self.conv2(functional.relu(self.norm2(residual)))
        result: Tensor = residual + self.shortcut(images)
        return result


class PreActivationResNet(nn.Module):
    """A pre-activation ResNet of three stages; depth 20 is that of the sharpness-reduction paper (appendix Q.1).

    The standard form has BatchNorm with parameters before every convolution of a block, shortcuts without
    normalisation and a linear layer with bias: a part of it is scale-invariant. With ``scale_invariant`` these
    normalisations have no parameters, a shortcut that changes the shape has a BatchNorm with parameters, and a
    BatchNorm with a fixed scale follows the linear layer, which has no bias: all of it is scale-invariant.

    Invariances: the first convolution of every block alone, by rows. What writes into the stream of a stage jointly.
    In the standard form these are second convolutions, and stem or shortcut, against the shortcut that leaves the
    stage; scale and shift of a first normalisation are invariant jointly, those of a second one against the convolution
    behind it, those of the last against the linear layer. In the scale-invariant form these are second convolutions,
    and the stem or scale and shift of the shortcut's normalisation, whose shift has no effect; the shortcut's
    convolution and the linear layer are invariant alone, by rows; and all may be scaled by one factor.

    Args:
        depth: 2 more than a multiple of 6, such as 20 or 32 (`preresnet20`, `preresnet32`).
        width: channels of the first stage; the paper's is 16.
        scale_invariant: which form.
        in_channels: channels of the images.
        classes: outputs.
        scale: of the last BatchNorm of the scale-invariant form.

    Example:
        >>> import torch
        >>> net = PreActivationResNet(20, 4, scale_invariant=True)
        >>> net(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int = 20,
        width: int = 16,
        *,
        scale_invariant: bool = False,
        in_channels: int = 3,
        classes: int = 10,
        scale: float = FINAL_SCALE,
    ) -> None:
        super().__init__()
        whole("width", width, low=1)
        whole("classes", classes, low=1)
        if whole("depth", depth, low=8) % 6 != 2:
            raise EquilibriaError(f"got depth={depth}; expected 6 n + 2, such as 20 or 32")
        affine = not scale_invariant
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        channels = width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                wider = width * 2**stage
                self.blocks.append(PreActivationBlock(channels, wider, stride=stride, affine=affine))
                channels = wider
        self.norm = nn.BatchNorm2d(channels, affine=affine)
        self.head = nn.Linear(channels, classes, bias=affine)
        self.final = ScaledNorm(classes, scale=scale) if scale_invariant else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to logits (batch, classes)."""
        features = functional.relu(self.norm(self.blocks(self.stem(images))))
        logits: Tensor = self.final(self.head(features.mean(dim=(2, 3))))
        return logits


def preresnet20(
    width: int = 16, *, scale_invariant: bool = False, in_channels: int = 3, classes: int = 10
) -> PreActivationResNet:
    """Pre-activation ResNet-20, as in the sharpness-reduction paper. Arguments as for `PreActivationResNet`."""
    return PreActivationResNet(20, width, scale_invariant=scale_invariant, in_channels=in_channels, classes=classes)


def preresnet32(
    width: int = 16, *, scale_invariant: bool = False, in_channels: int = 3, classes: int = 10
) -> PreActivationResNet:
    """Pre-activation ResNet-32, as in the exponential-learning-rate paper. Arguments as for `PreActivationResNet`.

    That paper needs every weight that is trained to be invariant: its normalisations have fixed parameters and its
    linear layer is fixed, which the scale-invariant form needs not.

    Example:
        >>> sum(weight.numel() for weight in preresnet32(16).parameters())
        466714
    """
    return PreActivationResNet(32, width, scale_invariant=scale_invariant, in_channels=in_channels, classes=classes)
