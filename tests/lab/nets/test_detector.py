"""The detector, its scenes and its average precision, against slow and known answers."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import equilibria as eq
from equilibria.lab.data.scenes import CELLS, SIDE, STRIDES, Scenes
from equilibria.lab.nets.detector import (
    CLASSES,
    PyramidDetector,
    average_precision,
    boxes_of,
    cell_middles,
    detection_loss,
    overlap,
)


@pytest.fixture(scope="module")
def scenes():
    """Digits that are full squares, so that a box is seen in the image; every label its number."""
    return Scenes(torch.ones(10, 1, 8, 8), torch.arange(10), batch_size=8, seed=3)


def test_scenes_of_one_seed_are_the_same_and_can_be_resumed(scenes):
    first = list(islice(iter(scenes), 4))
    again = next(scenes.starting_at(3))
    for one, other in zip(first[3], again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0][0], first[1][0])


def test_digits_are_drawn_inside_their_boxes(scenes):
    images, targets = next(iter(scenes))
    for image, target in zip(images, targets, strict=True):
        inside = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        for left, top, right, bottom in target[target[:, 0] > 0][:, 1:].round().int().tolist():
            inside[top:bottom, left:right] = True
        assert image[0][inside].mean() > 0.4
        grown = torch.nn.functional.max_pool2d(inside[None].float(), 3, 1, 1)[0].bool()
        assert abs(float(image[0][~grown].mean())) < 0.05  # noise of 0.1 over 300 pixels or more


def test_every_digit_belongs_to_the_cell_that_holds_its_middle(scenes):
    _, targets = next(iter(scenes))
    scene, cell = (targets[..., 0] > 0).nonzero(as_tuple=True)
    box, middle = targets[scene, cell, 1:], cell_middles()[cell]
    stride = torch.tensor(STRIDES)[(cell >= CELLS[0]).long()]
    assert ((middle - (box[:, :2] + box[:, 2:]) / 2).abs().amax(1) <= stride / 2).all()
    assert len(scene) > 8  # 22 are expected


def slow_overlap(one, other, steps=400):
    """By counting points."""
    x = (torch.arange(steps) + 0.5) / steps * 10
    inside = [
        ((x[None] >= b[0]) & (x[None] < b[2])) & ((x[:, None] >= b[1]) & (x[:, None] < b[3])) for b in (one, other)
    ]
    return float((inside[0] & inside[1]).sum() / (inside[0] | inside[1]).sum())


def test_overlap():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        corners = 6 * torch.rand(2, 2, generator=generator)
        one, other = torch.cat([corners, corners + 1 + 3 * torch.rand(2, 2, generator=generator)], 1)
        assert float(overlap(one, other)) == pytest.approx(slow_overlap(one, other), abs=0.01)  # 1 / 400 of an edge


def perfect(targets):
    """Outputs that name every digit and its box."""
    outputs = torch.zeros(*targets.shape[:2], CLASSES + 5)
    scene, cell = (targets[..., 0] > 0).nonzero(as_tuple=True)
    outputs[..., 0] = 10
    outputs[scene, cell, 0] = 0
    outputs[scene, cell, targets[scene, cell, 0].long()] = 20
    middle, box = cell_middles()[cell], targets[scene, cell, 1:]
    outputs[scene, cell, CLASSES + 1 :] = torch.cat([middle - box[:, :2], box[:, 2:] - middle], 1)
    return outputs


def test_perfect_outputs_have_a_precision_of_one_and_no_loss(scenes):
    _, targets = next(iter(scenes))
    outputs = perfect(targets)
    inside = targets[..., 0] > 0
    assert torch.allclose(boxes_of(outputs)[inside], targets[..., 1:][inside], atol=1e-5)
    assert average_precision(outputs, targets) == 1.0
    assert float(detection_loss(outputs, targets)) < 1e-3


def test_precision_by_hand():
    """Two digits of one class; three detections: right, wrong, right. Recall 1/2 at precision 1, then 1 at 2/3."""
    targets = torch.zeros(1, sum(CELLS), 5)
    outputs = torch.zeros(1, sum(CELLS), CLASSES + 5)
    outputs[..., 0] = 20
    for cell, sureness, right in ((0, 20.0, True), (20, 19.0, False), (50, 18.0, True)):
        middle = cell_middles()[cell]
        outputs[0, cell, 0], outputs[0, cell, 4], outputs[0, cell, CLASSES + 1 :] = 18, sureness, 4
        if right:
            targets[0, cell] = torch.cat([torch.tensor([4.0]), middle - 4, middle + 4])
    assert average_precision(outputs, targets) == pytest.approx((1 + 2 / 3) / 2)


def test_nothing_found_and_nothing_there():
    targets = torch.zeros(2, sum(CELLS), 5)
    outputs = torch.zeros(2, sum(CELLS), CLASSES + 5)
    outputs[..., 0] = 20
    assert average_precision(outputs, targets) != average_precision(outputs, targets)  # NaN: no class has a digit
    targets[0, 0] = torch.tensor([1.0, 0, 0, 4, 4])
    assert average_precision(outputs, targets) == 0.0


def test_all_convolutions_are_scale_invariant_and_the_linear_layers_are_not(scenes):
    torch.manual_seed(0)
    model = PyramidDetector(width=2)
    batch = next(iter(scenes))
    sym = eq.symmetries(eq.objective(model, detection_loss), [batch])
    convolutions = {name for name, param in model.named_parameters() if param.ndim == 4}
    assert convolutions <= set(sym.alone) | {name for name in convolutions if "rows" in sym.how[name]}
    assert not {"classes.weight", "boxes.weight"} & set(sym.alone)
