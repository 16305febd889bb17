"""LBFGS with a closure, as in the time-sequence example of PyTorch: an LSTM on sine waves, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, trained_twice, words

STEPS = 4


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, waves: Tensor) -> Tensor:
        return self.linear(self.lstm(waves[:, :, None])[0])[:, :, 0]


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model = Sequence().double()
    waves = torch.sin(torch.linspace(0, 6 * math.pi, 40).double() + torch.rand(8, 1).double() * 6)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=10)
    watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return model


def test_an_optimizer_without_a_law_is_measured_and_says_so_once():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert [finding.kind for finding in run.findings()] == ["without_law"]
    assert "no law for lbfgs" in words(run.findings()) and "equilibria_rule" not in words(run.findings())
    assert run.step == STEPS
