"""A convolutional network with BatchNorm under SGD with Nesterov momentum and a cosine, as on CIFAR-10."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, trained_twice, words

EPOCHS, BATCH = 6, 32


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = network(), images(640)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    watch(model, optimizer)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
        scheduler.step()
    return model


def test_convolutions_look_invariant_and_the_loss_is_not_spoken_of():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    table = str(run.table())
    assert "3 of 4 layers are off their prediction" in table  # the fourth is the head, by its measured gain
    assert "stop" not in words(run.findings())
    # an easy task: what is said is what was measured, the gradient
    assert "the gradient of all 3 layers" in words(run.findings())
    assert "steps" in words(run.findings())
