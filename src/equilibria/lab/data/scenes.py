"""Scenes with several handwritten digits, for detectors: images, and the class and box of every cell."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equilibria.errors import whole
from equilibria.lab.data.image_set import ImageSet

SIDE = 32  # pixels of a scene
STRIDES = (4, 8)  # pixels of a cell, at each level
CELLS = tuple((SIDE // stride) ** 2 for stride in STRIDES)
"""Cells of each level, which follow each other in targets and outputs."""

_SIZES = (7.0, 16.0)  # pixels of a digit
_LARGE = 11.0  # digits of at least this size belong to the second level
_PRESENT = 0.7  # probability of a digit in a quarter of the scene
_NOISE = 0.1  # standard deviation, of pixels from 0 to 1


class Scenes:
    """Batches of scenes without end: each quarter holds a digit of random size, place and contrast, or none.

    All random numbers come from a private generator: two objects with one seed give the same batches.

    Args:
        digits: (count, 1, height, width), from 0 to 1.
        labels: one per digit, 0 to 9.
        batch_size: scenes per batch.
        seed: of everything that is drawn.

    Example:
        >>> scenes, targets = next(iter(Scenes(torch.ones(3, 1, 8, 8), torch.tensor([0, 1, 2]), batch_size=4)))
        >>> scenes.shape, targets.shape
        (torch.Size([4, 1, 32, 32]), torch.Size([4, 80, 5]))
    """

    def __init__(self, digits: Tensor, labels: Tensor, *, batch_size: int, seed: int = 0) -> None:
        self._digits, self._labels = digits, labels
        self.batch_size, self.seed = whole("batch_size", batch_size, low=1), whole("seed", seed)

    @classmethod
    def of_images(cls, images: ImageSet, *, batch_size: int, seed: int = 0, test: bool = False) -> Scenes:
        """Scenes of the training or test images of the digits, which are stretched to 0 to 1."""
        chosen, labels = (
            (images.test_images, images.test_labels) if test else (images.train_images, images.train_labels)
        )
        low, high = images.train_images.min(), images.train_images.max()
        return cls((chosen - low) / (high - low), labels, batch_size=batch_size, seed=seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from a step on; every batch has a generator of its own, so that none before it is drawn."""
        seeds = (int(np.random.SeedSequence([self.seed, n]).generate_state(1)[0]) for n in range(2**62))
        return (self._batch(torch.Generator().manual_seed(seed)) for seed in islice(seeds, whole("step", step), None))

    def _batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scenes, and per cell its class (0: background, else digit + 1) and box (left, top, right, bottom, pixels)."""
        count, quarter = self.batch_size, SIDE / 2
        shape = (count, 4)
        which = torch.randint(len(self._digits), shape, generator=generator)
        size = _SIZES[0] + (_SIZES[1] - _SIZES[0]) * torch.rand(shape, generator=generator)
        corner = (quarter - size)[..., None] * torch.rand(*shape, 2, generator=generator)
        corner = corner + quarter * torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]])
        present = torch.rand(shape, generator=generator) < _PRESENT
        contrast = (0.5 + 0.5 * torch.rand(shape, generator=generator)) * present
        scenes = _NOISE * torch.randn(count, 1, SIDE, SIDE, generator=generator)
        boxes = torch.cat([corner, corner + size[..., None]], dim=-1)
        for place in range(4):
            drawn = _placed(self._digits[which[:, place]], boxes[:, place])
            scenes += contrast[:, place].view(-1, 1, 1, 1) * drawn
        return scenes, _targets(self._labels[which] + 1, boxes, size, present)


def _placed(digits: Tensor, boxes: Tensor) -> Tensor:
    """Every digit stretched into its box, zeros around it."""
    size, middle = (boxes[:, 2] - boxes[:, 0]) / SIDE, (boxes[:, :2] + boxes[:, 2:]) / SIDE - 1
    theta = torch.zeros(len(boxes), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / size
    theta[:, :, 2] = -middle / size[:, None]
    grid = functional.affine_grid(theta, [len(boxes), 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(digits, grid, align_corners=False)


def _targets(classes: Tensor, boxes: Tensor, size: Tensor, present: Tensor) -> Tensor:
    """The cell that holds the middle of a box has its class and its box."""
    targets = torch.zeros(len(classes), sum(CELLS), 5)
    level = (size >= _LARGE).long()
    stride = torch.tensor(STRIDES)[level]
    middle = ((boxes[..., :2] + boxes[..., 2:]) / 2 / stride[..., None]).long()
    first = torch.tensor([0, CELLS[0]])[level]
    cell = first + middle[..., 1] * (SIDE // stride) + middle[..., 0]
    scene, place = present.nonzero(as_tuple=True)
    targets[scene, cell[scene, place], 0] = classes[scene, place].float()
    targets[scene, cell[scene, place], 1:] = boxes[scene, place]
    return targets
