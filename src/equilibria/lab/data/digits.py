"""The 1,797 handwritten digits that come with scikit-learn: real images, no download."""

from __future__ import annotations

import torch

from equilibria.lab import import_extra
from equilibria.lab.data.image_set import ImageSet

CLASSES = 10
_TEST_IMAGES = 360


def load_digits() -> ImageSet:
    """Handwritten digits of 8x8 pixels with a fixed split, float32.

    They are standardised with the mean and the deviation of the training images.

    Example:
        >>> digits = load_digits()
        >>> digits.train_images.shape, digits.test_images.shape
        (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    source = import_extra("sklearn.datasets").load_digits()
    images = torch.from_numpy(source.images).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(source.target).to(torch.int64)
    # Shuffled, because neighbours in the file are by the same writer.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    names = tuple(str(digit) for digit in range(CLASSES))
    return ImageSet(images[train], labels[train], images[test], labels[test], names, "scikit-learn")
