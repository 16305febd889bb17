"""Fine-tuning of a pretrained network: a frozen first layer, lr of the rest below that of the new head, linear to 0."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, trained_twice, words

STEPS = 200


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = network(), images(320)
    model[0].weight.requires_grad_(False)
    body = [param for place in (1, 3, 4) for param in model[place].parameters()]
    groups = [{"params": body, "lr": 1e-5}, {"params": model[8].parameters(), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    watch(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def test_a_layer_that_turns_faster_than_independent_gradients_turn_it_has_the_reason():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    (off,) = (finding for finding in run.findings() if finding.kind == "angle_off")
    assert "3.weight turns faster than predicted" in off.subject
    assert "times as long as those of independent gradients: successive gradients point the same way" in off.evidence
    assert "none of the assumptions" not in words(run.findings())
