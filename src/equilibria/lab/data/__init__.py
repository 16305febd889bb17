"""Data sets as tensors, and batches whose order depends on a seed alone."""

from __future__ import annotations

from typing import Literal

from equilibria.errors import one_of
from equilibria.lab.data.batches import Batches, TextBatches, python_documentation
from equilibria.lab.data.cifar import cifar10, cifar10_2k
from equilibria.lab.data.idx import fashion_mnist, mnist
from equilibria.lab.data.image_set import ImageSet, Standardise, load_digits
from equilibria.lab.data.imagenet import imagenet

__all__ = [
    "Batches",
    "ImageSet",
    "Standardise",
    "TextBatches",
    "cifar10",
    "cifar10_2k",
    "fashion_mnist",
    "imagenet",
    "load_digits",
    "load_images",
    "mnist",
    "python_documentation",
]


def load_images(
    name: Literal["digits", "cifar10", "imagenet"] | str, *, size: int = 32, classes: tuple[int, ...] = ()
) -> ImageSet:
    """The data set of an experiment, ready for training.

    Args:
        name: digits and CIFAR-10 are standardised; the pixels of ImageNet are not, because they stay on disk.
        size: of CIFAR-10's images in pixels.
        classes: of CIFAR-10; default: all.

    Raises:
        EquilibriaError: an unknown name, or the data set is not on this machine.
    """
    one_of("data", name, ["cifar10", "digits", "imagenet"])
    if name == "digits":
        return load_digits()
    return imagenet() if name == "imagenet" else cifar10(size=size, classes=classes or None).standardised()
