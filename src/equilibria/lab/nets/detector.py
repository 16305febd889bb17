"""A small detector: a feature pyramid with BatchNorm behind every convolution, its loss and its average precision."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.data.scenes import SIDE, STRIDES
from equilibria.lab.nets.conv_norm import ConvNorm

CLASSES = 10
_POSITIVES = 10.0  # weight of a cell with a digit in the loss of the classes: about one cell in thirty has one
_IOU, _LEAST_SCORE = 0.5, 0.05


class PyramidDetector(nn.Module):
    """A backbone of four convolutions, a top-down pyramid of two levels, and one head for both (Lin et al. 2017).

    A BatchNorm follows every convolution, so that their weights are scale-invariant; two linear layers give classes and
    boxes. One output row per cell, as in `equilibria.lab.data.scenes`: 11 class scores (background first), then the
    distances from the middle of the cell to the left, top, right and bottom of the box, in pixels.

    Args:
        width: channels of the first convolution; the pyramid has four times as many.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        wide = 4 * width
        self.stem, self.stage1 = ConvNorm(1, width), ConvNorm(width, 2 * width, stride=2)
        self.stage2, self.stage3 = ConvNorm(2 * width, wide, stride=2), ConvNorm(wide, wide, stride=2)
        self.lateral1, self.lateral2 = ConvNorm(wide, wide, kernel=1), ConvNorm(wide, wide, kernel=1)
        self.output1, self.output2 = ConvNorm(wide, wide), ConvNorm(wide, wide)
        self.head = ConvNorm(wide, wide)
        self.classes, self.boxes = nn.Linear(wide, CLASSES + 1), nn.Linear(wide, 4)

    def forward(self, scenes: Tensor) -> Tensor:
        """(scenes, cells, 15)."""
        fine = functional.relu(self.stage2(functional.relu(self.stage1(functional.relu(self.stem(scenes))))))
        coarse = functional.relu(self.stage3(fine))
        top = self.lateral2(coarse)
        bottom = self.lateral1(fine) + functional.interpolate(top, scale_factor=2, mode="nearest")
        return torch.cat([self._read(self.output1(bottom)), self._read(self.output2(top))], dim=1)

    def _read(self, level: Tensor) -> Tensor:
        cells = functional.relu(self.head(functional.relu(level))).flatten(2).transpose(1, 2)
        return torch.cat([self.classes(cells), functional.softplus(self.boxes(cells))], dim=2)


def detection_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the classes over all cells, and 1 - IoU of the boxes over the cells with a digit."""
    wanted = targets[..., 0].long()
    weight = torch.full((CLASSES + 1,), _POSITIVES, device=outputs.device)
    weight[0] = 1.0
    loss = functional.cross_entropy(outputs[..., : CLASSES + 1].flatten(0, 1), wanted.flatten(), weight=weight)
    inside = wanted > 0
    if inside.any():
        loss = loss + (1 - overlap(boxes_of(outputs)[inside], targets[..., 1:][inside])).mean()
    return loss


def boxes_of(outputs: Tensor) -> Tensor:
    """Left, top, right and bottom of the box of every cell, in pixels."""
    distance, middle = outputs[..., CLASSES + 1 :], cell_middles().to(outputs.device)
    return torch.cat([middle - distance[..., :2], middle + distance[..., 2:]], dim=-1)


def cell_middles() -> Tensor:
    """x and y of the middle of every cell, in pixels."""
    levels = []
    for stride in STRIDES:
        along = torch.arange(SIDE // stride) * stride + stride / 2
        y, x = torch.meshgrid(along, along, indexing="ij")
        levels.append(torch.stack([x.flatten(), y.flatten()], dim=1))
    return torch.cat(levels)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of boxes, pair by pair.

    Example:
        >>> overlap(torch.tensor([0.0, 0.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, 3.0, 2.0])).item()
        0.3333333432674408
    """
    corner, end = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    common = (end - corner).clamp_min(0).prod(-1)
    areas = ((box[..., 2:] - box[..., :2]).clamp_min(0).prod(-1) for box in (one, other))
    return common / (sum(areas) - common).clamp_min(1e-9)


# ---- average precision


def detections(outputs: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Class, score and box of what is detected in every scene, the surest first; one for each place and class."""
    scores, classes = outputs[..., : CLASSES + 1].softmax(-1)[..., 1:].max(-1)
    found = []
    for score, kind, box in zip(scores, classes, boxes_of(outputs), strict=True):
        order = score.argsort(descending=True)
        order = order[score[order] > _LEAST_SCORE]
        kept: list[int] = []
        for place in order.tolist():
            rivals = [other for other in kept if kind[other] == kind[place]]
            if not rivals or float(overlap(box[place], box[rivals]).max()) < _IOU:
                kept.append(place)
        found.append((kind[kept] + 1, score[kept], box[kept]))
    return found


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes of the area under precision against recall, at an overlap of half (AP50).

    A digit is found once: by the surest detection of its class that overlaps with it by half or more. Precision at a
    recall is the highest at this or a larger one.
    """
    by_class: dict[int, list[tuple[float, bool]]] = {kind: [] for kind in range(1, CLASSES + 1)}
    for (kinds, scores, boxes), target in zip(detections(outputs), targets, strict=True):
        there = target[target[:, 0] > 0]
        free = torch.ones(len(there), dtype=torch.bool)
        for kind, score, box in zip(kinds.tolist(), scores.tolist(), boxes, strict=True):
            fits = overlap(box, there[:, 1:]) * (free & (there[:, 0] == kind)) if len(there) else torch.zeros(0)
            hit = bool(len(fits)) and float(fits.max()) >= _IOU
            if hit:
                free[int(fits.argmax())] = False
            by_class[kind].append((score, hit))
    counts = torch.bincount(targets[..., 0].long().flatten(), minlength=CLASSES + 1)[1:].tolist()
    areas = [_area(by_class[kind], count) for kind, count in enumerate(counts, start=1) if count]
    return float(np.mean(areas)) if areas else float("nan")


def _area(found: list[tuple[float, bool]], count: int) -> float:
    hits: NDArray[np.bool_] = np.array([hit for _, hit in sorted(found, key=lambda each: -each[0])], dtype=bool)
    if not hits.any():
        return 0.0
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    return float(highest[hits].sum() / count)
