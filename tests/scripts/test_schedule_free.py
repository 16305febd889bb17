"""A schedule-free SGD, which keeps its average beside its weights and swaps the two in `eval()` and `train()`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.scripts import Watch, assert_nothing_alarming, images, trained_twice, words
from tests.scripts.test_bn_conv import network

EPOCHS, BATCH = 5, 32


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Steps at z, evaluates gradients at y between z and the average x; holds y while it trains and x otherwise."""

    def __init__(self, params, lr=0.5, momentum=0.9, weight_decay=5e-4):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "k": 0})
        self.training = True

    @torch.no_grad()
    def _move(self, *, to_average: bool) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "z" in (state := self.state[param]):
                    beta = group["momentum"]
                    param.lerp_(state["z"], 1 - 1 / beta if to_average else 1 - beta)

    def eval(self) -> None:
        if self.training:
            self._move(to_average=True)
        self.training = False

    def train(self) -> None:
        if not self.training:
            self._move(to_average=False)
        self.training = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta, lr, share = group["momentum"], group["lr"], 1 / (group["k"] + 1)
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                move = param.grad.add(param, alpha=group["weight_decay"])
                param.lerp_(z, share).add_(move, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(move, alpha=lr)
            group["k"] += 1


def train(watch: Watch) -> nn.Module:
    torch.manual_seed(0)
    model, (inputs, labels) = network(), images(640)
    optimizer = ScheduleFreeSGD(model.parameters())
    watch(model, optimizer)
    for _ in range(EPOCHS):
        model.train()
        optimizer.train()
        for chosen in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            model(inputs[:BATCH])
    return model


def test_swaps_of_evaluation_are_no_change_of_the_weights():
    run = trained_twice(train)
    assert_nothing_alarming(run)
    assert [finding.kind for finding in run.findings()] == ["without_law"]
    assert "its state 'z' is a copy of the weights" in words(run.findings())
