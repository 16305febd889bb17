"""Random flips and crops, another one for every image, without a loop over images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Left and right exchanged, in the images that are marked.

    Args:
        images: (count, channels, height, width).
        flipped: (count,) of bool.

    Example:
        >>> flip(torch.tensor([[[[1, 2]]], [[[3, 4]]]]), torch.tensor([True, False])).tolist()
        [[[[2, 1]]], [[[3, 4]]]]
    """
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def crop(images: Tensor, corners: Tensor, *, padding: int) -> Tensor:
    """A window of the old size out of each image, after a frame of zeros was put around it.

    Args:
        images: (count, channels, height, width).
        corners: (count, 2), top and left of each window in the framed image: 0 to twice the padding.
        padding: width of the frame, pixels.

    Example:
        >>> crop(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[2, 1]]), padding=1).tolist()
        [[[[3, 4], [0, 0]]]]
    """
    count, channels, height, width = images.shape
    framed = functional.pad(images, [padding] * 4)
    rows = corners[:, 0].view(-1, 1) + torch.arange(height, device=images.device)
    columns = corners[:, 1].view(-1, 1) + torch.arange(width, device=images.device)
    image = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    return framed[image, channel, rows.view(count, 1, -1, 1), columns.view(count, 1, 1, -1)]
