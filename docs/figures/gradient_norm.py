"""A cosine with constant weight decay and with a held norm: the gradient of the first layer, and its weight."""

from __future__ import annotations

import _style as style
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from equilibria.control import WeightDecayScheduler

STEPS, WINDOW = 1200, 25


def train(hold: str | None) -> tuple[list[float], list[float]]:
    """Norms of gradient and weight at every step; the run of the page `how-do-i/gradient-norm`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    rest = [*net[1].parameters(), *net[3].parameters()]
    groups = [{"params": [net[0].weight], "weight_decay": 1.0}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    if hold is not None:
        scheduler = WeightDecayScheduler(scheduler, hold=hold)
    gradients, norms = [], []
    for _ in range(STEPS):
        inputs = torch.randn(32, 32)
        labels = (inputs[:, :8] + torch.randn(32, 8)).argmax(1)
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        gradients.append(net[0].weight.grad.norm().item())
        norms.append(net[0].weight.norm().item())
        optimizer.step()
        scheduler.step()
    return gradients, norms


figure, (left, right) = style.panels(2)
for hold, label, colour in ((None, "constant weight decay", style.ORANGE), ("norm", 'hold="norm"', style.BLUE)):
    gradients, norms = train(hold)
    means = [sum(gradients[i : i + WINDOW]) / WINDOW for i in range(0, STEPS, WINDOW)]
    left.plot(range(WINDOW // 2, STEPS, WINDOW), means, color=colour, label=label)
    right.plot(norms, color=colour, label=label)
left.set(xlabel="steps", ylabel="gradient norm, mean of 25 steps", ylim=(0, None))
right.set(xlabel="steps", ylabel="weight norm", ylim=(0, None))
right.legend(fontsize=8)
style.save(figure, "gradient-norm", folder=style.CONCEPTS.with_name("how-do-i"))
