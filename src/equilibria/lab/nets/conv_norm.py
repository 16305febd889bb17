"""A convolution and what normalises it: the part that all networks here are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

from torch import Tensor, nn
from torch.nn.utils import parametrizations

from equilibria.errors import EquilibriaError, one_of, whole

NORMS = ("batch", "group", "layer", "weight")
_GROUP = 4  # channels that a GroupNorm normalises together, where their number allows it


class ConvNorm(nn.Module):
    """A convolution and the normalisation that makes its weight scale-invariant.

    Behind "batch" (BatchNorm) every row of the weight is invariant by itself, behind "group" (GroupNorm, 4 channels
    together) every 4 rows, behind "layer" (LayerNorm over channels and image) the weight as a whole. Where 4 does not
    divide the number of channels, "group" has 2 together, and in odd numbers each by itself: then it is an
    InstanceNorm. With "weight" (WeightNorm) nothing is behind the convolution: its weight is ``g v/|v|`` for each row,
    and every row of ``v`` (``conv.parametrizations.weight.original1`` in ``named_parameters``) is invariant; it has a
    bias, the others need none.

    Args:
        in_channels: of its input.
        out_channels: of its output.
        kernel: height and width of its window, odd; the image keeps its size at stride 1.
        stride: of the window.
        groups: of channels that are convolved apart; as many as channels for a depthwise convolution.
        norm: "batch", "group", "layer" or "weight".
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if whole("kernel", kernel, low=1) % 2 == 0:
            raise EquilibriaError(f"got kernel={kernel}; expected an odd number: the image keeps its size at stride 1")
        by_weight = one_of("norm", norm, NORMS) == "weight"
        conv = nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=by_weight
        )
        self.conv = parametrizations.weight_norm(conv) if by_weight else conv
        self.norm = _normalisation(norm, out_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Convolve, then normalise."""
        result: Tensor = self.norm(self.conv(images))
        return result


def _normalisation(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(channels // math.gcd(channels, _GROUP), channels)
    return nn.GroupNorm(1, channels) if norm == "layer" else nn.Identity()


SMALL = 0.01
"""Deviation of the first weights of last layers, in many published codes."""


def he_fan_out(model: nn.Module, *, linear: bool = True) -> None:
    """Draw first weights as Kaiming He, by the outputs of convolutions: normal, of variance 2 / (kernel^2 outputs).

    Args:
        model: whose weights to draw.
        linear: whether to draw those of linear layers too, with deviation 0.01; their biases then become 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif linear and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=SMALL)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def are_counts(given: object) -> bool:
    """Whether it is a sequence of whole numbers from 1."""
    counts = given if isinstance(given, Sequence) else ()
    return len(counts) > 0 and all(isinstance(count, Integral) and int(count) >= 1 for count in counts)


def stage_plan(width: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Channels and stride of every block: each stage is twice as wide and, from the second on, halves the image.

    Example:
        >>> stage_plan(8, (1, 2))
        [(8, 1), (16, 2), (16, 1)]
    """
    whole("width", width, low=1)
    if not are_counts(blocks):
        raise EquilibriaError(f"got blocks={blocks!r}; expected at least one block in each stage, such as (1, 1)")
    return [
        (width * 2**stage, 2 if stage > 0 and block == 0 else 1)
        for stage, count in enumerate(blocks)
        for block in range(count)
    ]
