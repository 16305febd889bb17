"""Batches of images and of text, whose order depends on a seed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equilibria.errors import EquilibriaError, whole, within
from equilibria.lab.data.pictures import Pictures
from equilibria.lab.data.windows import NUMBERS, resized_windows

if TYPE_CHECKING:
    from equilibria.lab.data.image_set import ImageSet


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Mirror the marked images left to right.

    Args:
        images: (count, channels, height, width).
        flipped: (count,) of bool.

    Example:
        >>> flip(torch.tensor([[[[1, 2]]], [[[3, 4]]]]), torch.tensor([True, False])).tolist()
        [[[[2, 1]]], [[[3, 4]]]]
    """
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def crop(images: Tensor, corners: Tensor, *, padding: int) -> Tensor:
    """Put a frame of zeros around each image and cut out a window of the old size.

    Zeros are black in pixels, and the mean colour of the training images if the images are standardised. Usual recipes
    have a black frame: crop pixels and standardise afterwards (``transform=images.standardiser()`` of
    `equilibria.lab.data.Batches`).

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
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # all windows, without a copy
    return windows[torch.arange(len(images), device=images.device), :, corners[:, 0], corners[:, 1]]


class _Draw(NamedTuple):
    """The random numbers of one batch."""

    images: Tensor
    replaced: Tensor
    labels: Tensor
    flipped: Tensor
    corners: Tensor
    windows: Tensor


class Batches:
    """Shuffled batches, epoch after epoch, with optional label noise, flips and crops, drawn for every batch.

    The last, smaller batch of an epoch is left out. All random numbers come from private generators on the CPU: two
    objects with one seed give the same batches on any machine, whatever else draws random numbers, and torch's global
    generator is not used. Noise, flips and crops do not change the order of the images, and flips and crops do not
    change the noise.

    Args:
        images: one image per row, or `Pictures`; uint8 if ``transform`` makes floats of them.
        labels: one label per image, whole numbers from 0.
        batch_size: images per batch.
        label_noise: probability that a label is replaced by one drawn uniformly from all classes. It is drawn for every
            batch, so that the labels cannot be memorised and the gradient never vanishes.
        classes: number of classes; default: one more than the largest label.
        seed: of the order, of the noise, and of flips and crops.
        flip: whether to mirror images left to right with probability 1/2.
        crop: largest shift of the image in pixels, each way; the uncovered part is zero, which is black in pixels and
            the mean colour in standardised images; for a black frame, as in usual recipes, give uint8 pixels and
            ``transform=images.standardiser()``.
        resized: if not 0, cut a window of random size and shape (`random_window`) out of every image and resize it to
            this many pixels, as usual for ImageNet; in place of ``crop``.
        share: of the batches, for a training in several processes: the number of this process and that of all. Every
            process draws the numbers of whole batches and reads only its own images.
        transform: applied to every batch of images, after flip and crop, such as `ImageSet.standardiser`.

    Example:
        >>> batches = Batches(torch.zeros(10, 1, 8, 8), torch.arange(10), batch_size=4)
        >>> images, labels = next(iter(batches))
        >>> images.shape, labels.shape, batches.per_epoch
        (torch.Size([4, 1, 8, 8]), torch.Size([4]), 2)
    """

    def __init__(
        self,
        images: Tensor | Pictures,
        labels: Tensor,
        *,
        batch_size: int,
        label_noise: float = 0.0,
        classes: int | None = None,
        seed: int = 0,
        flip: bool = False,
        crop: int = 0,
        resized: int = 0,
        share: tuple[int, int] = (0, 1),
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if len(images) != len(labels):
            raise EquilibriaError(f"got {len(images)} images and {len(labels)} labels; expected one label per image")
        batch_size = whole("batch_size", batch_size, low=1)
        if batch_size > len(images):
            raise EquilibriaError(f"got batch_size={batch_size}; expected at most the {len(images)} images there are")
        if (flip or crop or resized) and images.ndim != 4:
            raise EquilibriaError(f"got images of {tuple(images.shape)}; expected (count, channels, height, width)")
        self.images, self.labels = images, labels
        self.batch_size = batch_size
        self.label_noise = within("label_noise", label_noise, low=0, high=1)
        self.classes = _classes(labels, classes)
        self.seed = whole("seed", seed)
        self.flip, self.crop, self.resized = flip, whole("crop", crop), whole("resized", resized)
        if crop and resized:
            raise EquilibriaError(f"got crop={crop} and resized={resized}; expected one of the two")
        self.share = _share(share, batch_size)
        self.transform = transform

    @classmethod
    def of_images(cls, images: ImageSet, *, batch_size: int, **options: Any) -> Batches:
        """Batches of the training images of a data set; options as above."""
        return cls(images.train_images, images.train_labels, batch_size=batch_size, classes=images.classes, **options)

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from a step on, for a training that is resumed; of those before, only random numbers are drawn.

        Args:
            step: number of batches to skip.
        """
        return map(self._batch, islice(self._draws(), whole("step", step), None))

    def _draws(self) -> Iterator[_Draw]:
        generator = torch.Generator().manual_seed(self.seed)
        augmenting = torch.Generator().manual_seed(int(np.random.SeedSequence([self.seed, 1]).generate_state(1)[0]))
        size = self.batch_size
        while True:
            order = torch.randperm(len(self.images), generator=generator)
            for images in order[: self.per_epoch * size].view(-1, size):
                yield _Draw(
                    images,
                    torch.rand(size, generator=generator) < self.label_noise,
                    torch.randint(self.classes, (size,), generator=generator),
                    torch.randint(2, (size,), generator=augmenting) == 1,
                    torch.randint(2 * self.crop + 1, (size, 2), generator=augmenting),
                    torch.rand(size, NUMBERS if self.resized else 0, generator=augmenting, dtype=torch.float64),
                )

    def _batch(self, draw: _Draw) -> tuple[Tensor, Tensor]:
        rank, ranks = self.share
        own = [part.chunk(ranks)[rank].to(self.images.device) for part in draw]
        images, replaced, drawn, flipped, corners, windows = own
        labels = self.labels[images]
        if self.resized and isinstance(self.images, Pictures):
            chosen = self.images.resized_windows(images, windows, size=self.resized)
        elif self.resized:
            chosen = resized_windows(self.images[images], windows, size=self.resized)
        else:
            chosen = self.images[images]
        if self.flip:
            chosen = flip(chosen, flipped)
        if self.crop:
            chosen = crop(chosen, corners, padding=self.crop)
        if self.transform is not None:
            chosen = self.transform(chosen)
        return chosen, torch.where(replaced, drawn, labels)


def _share(share: tuple[int, int], batch_size: int) -> tuple[int, int]:
    rank, ranks = share
    if not 0 <= rank < ranks or batch_size % ranks:
        raise EquilibriaError(
            f"got share={share} of batches of {batch_size}; expected the number of a process, from 0, and how "
            "many there are, a divisor of the batch size"
        )
    return rank, ranks


def _classes(labels: Tensor, classes: int | None) -> int:
    """The number of classes; raises EquilibriaError unless the labels are whole numbers below it."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise EquilibriaError(f"got labels of {labels.dtype} {tuple(labels.shape)}; expected whole numbers (count,)")
    lowest, highest = int(labels.min()), int(labels.max())
    count = highest + 1 if classes is None else whole("classes", classes, low=1)
    if lowest < 0 or highest >= count:
        allowed = "labels from 0" if classes is None else f"0 to {count - 1} with classes={count}"
        raise EquilibriaError(f"got labels of {lowest} to {highest}; expected {allowed}")
    return count


# ---- text: the documentation behind `help()`, which every Python has


_KNOWN = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CHARACTERS = len(_KNOWN) + 1
"""Newline, the printable characters of ASCII, and one for all others."""


def python_documentation() -> Tensor:
    """The topics of `pydoc_data.topics` in alphabetic order, one number per character, int64.

    This is the language reference in plain text (Python Software Foundation License), half a million characters. It
    differs slightly from one version of Python to the next.

    Example:
        >>> text = python_documentation()
        >>> len(text) > 100_000, int(text.max()) < CHARACTERS
        (True, True)
    """
    from pydoc_data.topics import topics

    number = np.full(128, CHARACTERS - 1)
    number[[ord(character) for character in _KNOWN]] = np.arange(len(_KNOWN))
    whole_text = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(whole_text.encode("utf-32-le"), np.uint32)
    return torch.from_numpy(number[np.minimum(codes, 127)])


class TextBatches:
    """Endless batches of random stretches of a text as inputs, and the same one character further on as targets.

    Args:
        text: one number per character.
        length: of a stretch.
        batch_size: stretches in a batch.
        seed: batches of one seed are the same everywhere.

    Example:
        >>> inputs, targets = next(iter(TextBatches(torch.arange(100), length=4, batch_size=2)))
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(self, text: Tensor, *, length: int, batch_size: int, seed: int = 0) -> None:
        if len(text) <= whole("length", length, low=1):
            raise EquilibriaError(f"got a text of {len(text)} characters; expected more than length={length}")
        self.text, self.length = text, length
        self.batch_size, self.seed = whole("batch_size", batch_size, low=1), whole("seed", seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from a step on; each batch has its own generator."""
        while True:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step."""
        drawn = np.random.default_rng([self.seed, step]).integers(len(self.text) - self.length, size=self.batch_size)
        places = torch.from_numpy(drawn).view(-1, 1) + torch.arange(self.length)
        return self.text[places], self.text[places + 1]
