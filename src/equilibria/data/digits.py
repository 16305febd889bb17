"""The 1,797 handwritten digits that come with scikit-learn: real images, no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn import datasets
from torch import Tensor

CLASSES = 10
_TEST_IMAGES = 360


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8x8 pixels, standardised with the mean and the deviation of the training images.

    Attributes:
        train_images: (1437, 1, 8, 8), float32.
        train_labels: 0 to 9, int64.
        test_images: (360, 1, 8, 8), float32.
        test_labels: 0 to 9, int64.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """The digits, always split in the same way.

    Example:
        >>> digits = load_digits()
        >>> digits.train_images.shape, digits.test_images.shape
        (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    source = datasets.load_digits()
    images = torch.from_numpy(source.images).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(source.target).to(torch.int64)
    # Shuffled: neighbours in the file are by the same writer.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    return Digits(images[train], labels[train], images[test], labels[test])
