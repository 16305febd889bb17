"""A GAN in the manner of dcgan: two networks, two Adams without weight decay, two steps in turn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, trained_twice, words

STEPS = 60


def generator() -> nn.Module:
    return nn.Sequential(
        *(nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh()),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 1, 4, bias=False), nn.Flatten(0)),
    )


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"G": generator(), "D": discriminator()})
    for param in model.parameters():
        if param.ndim == 4:
            nn.init.normal_(param, 0.0, 0.02)
    real, _ = images(16 * STEPS)
    adams = {
        name: torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, network in model.items()
    }
    watch(model, list(adams.values()))
    for step in range(STEPS):
        adams["D"].zero_grad()
        fake = model["G"](torch.randn(16, 8, 1, 1))
        for batch, label in ((real[16 * step : 16 * step + 16], 1.0), (fake.detach(), 0.0)):
            scores = model["D"](batch)
            functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label)).backward()
        adams["D"].step()
        adams["G"].zero_grad()
        scores = model["D"](fake)
        functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)).backward()
        adams["G"].step()
    return model


def test_two_optimizers_count_as_one_step_and_missing_decay_is_no_fault():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.step == STEPS
    assert "weight decay" not in words(run.findings())  # norms have hardly grown
    assert {"G.0.weight", "D.2.weight"} <= {entry["name"] for entry in run.metadata["params"]}
