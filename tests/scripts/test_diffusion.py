"""A small diffusion U-Net with GroupNorm under AdamW; its averaged weights are swapped in to sample, and out again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, trained_twice

STEPS, SAMPLE_EVERY, DECAY = 80, 20, 0.99


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(2, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down, self.middle, self.up = conv(3, 8), conv(8, 16, 2), conv(24, 8)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        fine = self.down(noisy)
        coarse = self.middle(fine) + self.time(time[:, None])[:, :, None, None]
        return self.out(self.up(torch.cat([functional.interpolate(coarse, scale_factor=2.0), fine], dim=1)))


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (clean, _) = UNet(), images(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    averaged = {name: param.detach().clone() for name, param in model.named_parameters()}
    watch(model, optimizer)
    for step in range(STEPS):
        batch = clean[torch.randint(len(clean), (16,))]
        time, noise = torch.rand(16), torch.randn(16, 3, 8, 8)
        share = time[:, None, None, None]
        loss = functional.mse_loss(model((1 - share).sqrt() * batch + share.sqrt() * noise, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                averaged[name].lerp_(param, 1 - DECAY)
            if step % SAMPLE_EVERY == SAMPLE_EVERY - 1:
                swap(model, averaged)
                model(torch.randn(4, 3, 8, 8), torch.ones(4))
                swap(model, averaged)
    return model


def swap(model: nn.Module, averaged: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        kept = param.detach().clone()
        param.copy_(averaged[name])
        averaged[name] = kept


def test_swapped_averages_are_no_change_of_the_weights():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert run.findings() == ()
    assert set(run.samples()["note"].to_pylist()) == {None}


def test_a_prediction_that_depends_on_an_open_question_is_not_judged():
    run = trained_twice(train)
    assert "No layer has a prediction" in str(run.table()).replace("\n", " ")
    assert "% fast" not in str(run.table()) and "Furthest off" not in str(run.table())
