"""Data sets as tensors, and batches whose order depends on a seed alone."""

from __future__ import annotations

from equilibria.lab.data.batches import Batches
from equilibria.lab.data.cifar import cifar10, cifar10_2k
from equilibria.lab.data.digits import Digits, load_digits
from equilibria.lab.data.idx import fashion_mnist, mnist
from equilibria.lab.data.image_set import ImageSet, Standardise
from equilibria.lab.data.imagenet import imagenet

__all__ = [
    "Batches",
    "Digits",
    "ImageSet",
    "Standardise",
    "cifar10",
    "cifar10_2k",
    "fashion_mnist",
    "imagenet",
    "load_digits",
    "mnist",
]
