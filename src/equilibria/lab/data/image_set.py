"""Images and labels as tensors: the set, its standardisation, and the digits of scikit-learn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole
from equilibria.lab import import_extra
from equilibria.lab.data.pictures import Pictures

_CHUNK = 4096  # images converted to floats at once: a whole set would cost eight times its memory
_LISTED = 20  # class names in a message, at most
_HASHED = 2**26  # numbers of each part that a digest reads at most: half a second


@dataclass(frozen=True, slots=True, eq=False)
class Standardise:
    """Pixels to float32 of mean 0 and deviation 1 in each channel, by given statistics.

    Attributes:
        mean: of each channel, in the units of the pixels.
        deviation: of each channel, in the units of the pixels.
    """

    mean: Tensor
    deviation: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Images (count, channels, height, width) of any type, standardised."""
        mean, deviation = (statistic.to(images.device).view(-1, 1, 1) for statistic in (self.mean, self.deviation))
        return (images - mean).div_(deviation)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set of labelled images. Methods return new sets and leave this one unchanged.

    Attributes:
        train_images: (count, channels, height, width): pixels 0 to 255 as uint8, or float32 after `pooled` or
            `standardised`.
        train_labels: 0 to the number of classes less 1, int64.
        test_images: like the training images.
        test_labels: like the training labels.
        class_names: in the order of the labels.
        source: the files it was read from, without their folder.

    Example:
        >>> images, labels = torch.arange(128).to(torch.uint8).view(8, 1, 4, 4), torch.arange(8) % 4
        >>> small = ImageSet(images, labels, images, labels, ("a", "b", "c", "d"), "arange")
        >>> small.select_classes((3, 1)).pooled(2).standardised()
        ImageSet(4 training and 4 test images of 1x2x2, float32, 2 classes: d, b; from arange)
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    source: str

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def counts(self) -> str:
        """The number of images, such as "50,000 training and 10,000 test images"."""
        return f"{len(self.train_images):,} training and {len(self.test_images):,} test images"

    @cached_property
    def digest(self) -> str:
        """The first 16 hex digits of a SHA-256 over images and labels, which identifies the data.

        It covers the training images, then the test images: shape, numbers as float32 and labels as int64, both
        little-endian, so that it is the same on any machine, and for the same numbers as uint8 or float32. Pooling and
        standardising change it. If a part has more than 2**26 numbers (CIFAR-10 has at 32x32, not at 16x16), only every
        k-th image is read, with the smallest k that keeps to that limit; shape and labels are always complete. Of
        `Pictures` it covers the names.
        """
        hashed = hashlib.sha256()
        for images, labels in ((self.train_images, self.train_labels), (self.test_images, self.test_labels)):
            if isinstance(images, Pictures):
                hashed.update(images.digest.encode())
                continue
            every = max(1, -(-images.numel() // _HASHED))
            hashed.update(repr((*images.shape, every)).encode())
            for chunk in torch.split(images[::every], _CHUNK):
                hashed.update(chunk.to("cpu", torch.float32).numpy().astype("<f4", copy=False).tobytes())
            hashed.update(labels.to("cpu", torch.int64).numpy().astype("<i8", copy=False).tobytes())
        return hashed.hexdigest()[:16]

    def __repr__(self) -> str:
        images, kind = self.train_images, str(self.train_images.dtype).removeprefix("torch.")
        return (
            f"ImageSet({self.counts} of {'x'.join(map(str, images.shape[1:]))}, {kind}, {self.classes} "
            f"{'class' if self.classes == 1 else 'classes'}: {', '.join(self.class_names)}; from {self.source})"
        )

    def select_classes(self, classes: Sequence[int | str]) -> ImageSet:
        """Only the images of some classes, in their order; labels are renumbered in the order in which they are given.

        Args:
            classes: their present labels, or their names, each once.
        """
        wanted = self._labels(classes)
        number = torch.full((self.classes,), -1)
        number[wanted] = torch.arange(len(wanted))
        train, test = number[self.train_labels], number[self.test_labels]
        return ImageSet(
            self.train_images[train >= 0],
            train[train >= 0],
            self.test_images[test >= 0],
            test[test >= 0],
            tuple(self.class_names[label] for label in wanted),
            self.source,
        )

    def _labels(self, classes: Sequence[int | str]) -> list[int]:
        names = f"{', '.join(self.class_names[:_LISTED])}{', ...' if self.classes > _LISTED else ''}"
        allowed = f"labels of 0 to {self.classes - 1}, or names, each once, of: {names}"
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            raise EquilibriaError(f"got classes={classes!r}; expected a list such as [{classes!r}]: {allowed}")
        given = list(classes)
        labels = [self._label(name) for name in given]
        unknown = [repr(name) for name, label in zip(given, labels, strict=True) if label is None]
        if unknown:
            raise EquilibriaError(f"got classes={given}, but there is no {', no '.join(unknown)}; expected {allowed}")
        known = [label for label in labels if label is not None]
        if not known or len(set(known)) < len(known):
            raise EquilibriaError(f"got classes={given}; expected {allowed}")
        return known

    def _label(self, name: int | str) -> int | None:
        if isinstance(name, str):
            return self.class_names.index(name) if name in self.class_names else None
        try:
            label = whole("classes", name)
        except EquilibriaError:
            return None
        return label if label < self.classes else None

    def per_class(self, count: int, *, block: int = 0) -> ImageSet:
        """The first ``count`` training images of every class, in their order; all test images stay.

        Args:
            count: images of each class.
            block: how many times ``count`` images of each class to leave out before: blocks have no image in common.
        """
        count, block = whole("count", count, low=1), whole("block", block)
        first = count * block
        fewest = int(torch.bincount(self.train_labels, minlength=self.classes).min())
        if first + count > fewest:
            raise EquilibriaError(
                f"got count={count}, block={block}; expected count * (block + 1) of at most {fewest}, the number of "
                "training images of the smallest class"
            )
        of_class = functional.one_hot(self.train_labels, self.classes)
        place = (of_class.cumsum(0) * of_class).sum(1) - 1  # how many of its own class are before an image
        taken = (first <= place) & (place < first + count)
        return replace(self, train_images=self.train_images[taken], train_labels=self.train_labels[taken])

    def pooled(self, size: int) -> ImageSet:
        """Images of ``size`` x ``size``, each pixel the mean of a square of pixels, as float32.

        Of uint8 pixels the mean is exact where the side of the square is a power of two, as it always is for CIFAR-10,
        and the nearest float32 elsewhere (such as 28 to 4 pixels: squares of 7).

        Args:
            size: a divisor of the present height and width.
        """
        sides = self.train_images.shape[2:]
        size = _divisor(size, gcd(*sides))
        if all(side == size for side in sides):
            return self
        return replace(self, train_images=_pool(self.train_images, size), test_images=_pool(self.test_images, size))

    def standardiser(self) -> Standardise:
        """What standardises images by the statistics of the training images, batch by batch.

        Pixels of uint8, and those that `pooled` gives exactly, are summed without rounding errors, in whatever order:
        every machine has the same statistics. Sums of other numbers are rounded in float64, before the statistics are
        rounded to float32.
        """
        count = self.train_images[:, 0].numel()
        sums = torch.zeros(2, self.train_images.shape[1], dtype=torch.float64)
        for chunk in torch.split(self.train_images, _CHUNK):
            pixels = chunk.to("cpu", torch.float64)
            sums += torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])
        mean, mean_square = sums / max(count, 1)
        variance = mean_square - mean.square()
        if not (variance > 0).all():
            raise EquilibriaError("got training images with a channel of equal pixels; expected pixels that differ")
        return Standardise(mean.to(torch.float32), variance.sqrt().to(torch.float32))

    def standardised(self) -> ImageSet:
        """float32 images of mean 0 and deviation 1 in each channel, over all training images."""
        standardise = self.standardiser()
        return replace(self, train_images=standardise(self.train_images), test_images=standardise(self.test_images))


def _divisor(size: object, side: int) -> int:
    try:
        wanted = whole("size", size, low=1)
    except EquilibriaError:
        wanted = 0
    if not wanted or side % wanted:
        allowed = ", ".join(str(divisor) for divisor in range(1, side + 1) if side % divisor == 0)
        raise EquilibriaError(f"got size={size!r}; expected a divisor of {side}: {allowed}")
    return wanted


def _pool(images: Tensor, size: int) -> Tensor:
    result = torch.empty(*images.shape[:2], size, size)
    for pooled, chunk in zip(torch.split(result, _CHUNK), torch.split(images, _CHUNK), strict=True):
        pooled.copy_(functional.avg_pool2d(chunk.to(torch.float32), images.shape[2] // size))
    return result


# ---- the 1,797 handwritten digits that come with scikit-learn: real images, no download


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
