"""Windows of random size, shape and place in images: the crops of ImageNet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
NUMBERS = 2 * _TRIES + 2
"""Random numbers from 0 to 1 that make one window."""

Window = tuple[int, int, int, int]
"""Top, left, height and width."""


def random_window(numbers: Sequence[float], *, height: int, width: int) -> Window:
    """A window as for Inception, from uniform random numbers.

    Its share of the image is uniform from 8 % to all of it, the logarithm of its width over its height from that of 3/4
    to that of 4/3. What does not fit is drawn again, up to ten times; then it is the largest in the middle.

    Args:
        numbers: `NUMBERS` of them, from 0 to 1.
        height: of the image.
        width: of the image.

    Example:
        >>> random_window([0.5] * NUMBERS, height=100, width=100)  # 54 % of the image, square
        (14, 14, 73, 73)
    """
    for share, shape in zip(numbers[:_TRIES], numbers[_TRIES : 2 * _TRIES], strict=True):
        area = height * width * (_AREA[0] + share * (_AREA[1] - _AREA[0]))
        ratio = math.exp(math.log(_RATIO[0]) + shape * math.log(_RATIO[1] / _RATIO[0]))
        high, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < high <= height and 0 < wide <= width:
            down, right = numbers[2 * _TRIES :]
            return int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide
    high, wide = min(height, round(width / _RATIO[0])), min(width, round(height * _RATIO[1]))
    return (height - high) // 2, (width - wide) // 2, high, wide


def resized_windows(images: Tensor, numbers: Tensor, *, size: int) -> Tensor:
    """A `random_window` of each image, resized to ``size`` x ``size``: bilinear and antialiased.

    Args:
        images: (count, channels, height, width).
        numbers: (count, `NUMBERS`).
        size: of the results.
    """
    height, width = images.shape[2:]
    results = []
    for image, drawn in zip(images, numbers.tolist(), strict=True):
        top, left, high, wide = random_window(drawn, height=height, width=width)
        cut = image[None, :, top : top + high, left : left + wide]
        results.append(functional.interpolate(cut, (size, size), mode="bilinear", antialias=True))
    return torch.cat(results)
