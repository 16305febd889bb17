"""Batches without end, in an order that depends on their seed alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, whole, within


class Batches:
    """Shuffled batches, epoch after epoch, with optional label noise that is drawn anew for every batch.

    The last, smaller batch of an epoch is left out. All random numbers come from a generator of its own: two objects
    with one seed give the same batches, whatever else draws random numbers, and torch's global generator is left
    alone.

    Args:
        images: one image per row.
        labels: one label per image.
        batch_size: images per batch.
        label_noise: probability that a label is replaced by one drawn uniformly from all classes. Because it is drawn
            anew each time, the labels can never be learnt by heart and the gradient never vanishes.
        classes: number of classes.
        seed: of the order and of the noise.

    Example:
        >>> batches = Batches(torch.zeros(10, 1, 8, 8), torch.arange(10), batch_size=4)
        >>> images, labels = next(iter(batches))
        >>> images.shape, labels.shape, batches.per_epoch
        (torch.Size([4, 1, 8, 8]), torch.Size([4]), 2)
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        label_noise: float = 0.0,
        classes: int = 10,
        seed: int = 0,
    ) -> None:
        if len(images) != len(labels):
            raise EquilibriaError(f"got {len(images)} images and {len(labels)} labels; expected one label per image")
        if whole("batch_size", batch_size, low=1) > len(images):
            raise EquilibriaError(f"got batch_size={batch_size}; expected at most the {len(images)} images there are")
        self.images, self.labels = images, labels
        self.batch_size = batch_size
        self.label_noise = within("label_noise", label_noise, low=0, high=1)
        self.classes = whole("classes", classes, low=1)
        self.seed = whole("seed", seed)

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(self.images), generator=generator)
            for batch in order[: self.per_epoch * self.batch_size].view(-1, self.batch_size):
                yield self.images[batch], self._with_noise(self.labels[batch], generator)

    def _with_noise(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        replaced = torch.rand(len(labels), generator=generator) < self.label_noise
        drawn = torch.randint(self.classes, labels.shape, generator=generator)
        return torch.where(replaced, drawn, labels)
