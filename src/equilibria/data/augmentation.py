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

    Zeros are black in pixels, and the mean colour of the training images where these were standardised before. Usual
    recipes have a black frame: crop pixels, and standardise behind it (``transform=images.standardiser()`` of
    `equilibria.data.Batches`).

    Args:
        images: (count, channels, height, width).
        corners: (count, 2), top and left of each window in the framed image: 0 to twice the padding.
        padding: width of the frame, pixels.

    Example:
        >>> crop(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[2, 1]]), padding=1).tolist()
        [[[[3, 4], [0, 0]]]]
    """
    height, width = images.shape[2:]
    framed = functional.pad(images, [padding] * 4)
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # all of them, without a copy
    return windows[torch.arange(len(images), device=images.device), :, corners[:, 0], corners[:, 1]]
