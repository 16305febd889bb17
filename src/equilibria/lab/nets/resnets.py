"""Residual networks: of basic blocks, and of pre-activation blocks in the scale-invariant form of the papers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.nets.conv_norm import ConvNorm, stage_plan
from equilibria.lab.nets.vgg import FINAL_SCALE, ScaledNorm


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
