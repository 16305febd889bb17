"""One step of a weight without scale, and the angles of three layers whose effective learning rates differ."""

from __future__ import annotations

from itertools import pairwise

import _style as style
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import equilibria as eq
from equilibria.lab.data import Batches, load_digits

STEPS, LR = 800, 0.1


def train() -> dict[str, dict[str, np.ndarray]]:
    """Samples of the three layers before a BatchNorm."""
    torch.manual_seed(0)
    widths = [64, 256, 64, 16]
    hidden = [[nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()] for a, b in pairwise(widths)]
    net = nn.Sequential(nn.Flatten(), *[layer for block in hidden for layer in block], nn.Linear(16, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=0.005)
    digits = load_digits()
    batches = Batches(digits.train_images, digits.train_labels, batch_size=32, label_noise=0.5)
    with eq.watch(net, optimizer, every=5) as monitor:
        for _, (images, labels) in zip(range(STEPS), batches, strict=False):
            optimizer.zero_grad()
            cross_entropy(net(images), labels).backward()
            optimizer.step()
        table = monitor.samples()
    params = np.asarray(table["param"])
    columns = ("step", "angle", "effective_lr", "angle_equilibrium")
    return {
        name: {c: table[c].to_numpy()[params == name] for c in columns} for name in ("1.weight", "4.weight", "7.weight")
    }


def draw_step(axes: object) -> None:
    """The triangle of a step: decay along the weight, the gradient across it."""
    after, decayed = np.array([0.93, 0.36]), np.array([0.93, 0.0])
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.6}
    for end, begin, colour in (((1, 0), (0, 0), "black"), (after, (0, 0), style.BLUE), (after, decayed, style.ORANGE)):
        axes.annotate("", xy=end, xytext=begin, arrowprops={**arrow, "color": colour})
    axes.plot([decayed[0], 1], [-0.03, -0.03], color=style.GREEN, linewidth=3)
    turned = np.linspace(0, np.arctan2(after[1], after[0]), 30)
    axes.plot(0.45 * np.cos(turned), 0.45 * np.sin(turned), color=style.GREY)
    axes.text(0.47, 0.07, "angle", color=style.GREY)
    axes.text(0.42, -0.07, "weight before")
    axes.text(0.36, 0.23, "weight after", color=style.BLUE, rotation=22)
    axes.text(0.955, 0.16, "gradient step:\nalways across", color=style.ORANGE)
    axes.text(0.955, -0.1, "decay:\nalways along", color=style.GREEN, va="top")
    axes.set(xlim=(-0.02, 1.3), ylim=(-0.28, 0.5), aspect="equal")
    axes.axis("off")


figure, (left, middle, right) = style.plt.subplots(
    1, 3, figsize=(8.6, 3.0), layout="constrained", gridspec_kw={"width_ratios": [1.25, 1, 1]}
)
draw_step(left)
for (name, layer), colour in zip(train().items(), (style.BLUE, style.ORANGE, style.GREEN), strict=True):
    middle.plot(layer["step"], layer["effective_lr"], color=colour, label=f"layer {name.split('.')[0]}")
    smooth = np.sqrt(np.convolve(layer["angle"] ** 2, np.ones(8) / 8, mode="valid"))
    right.plot(layer["step"][7:], smooth, color=colour)
right.axhline(layer["angle_equilibrium"][-1], **style.THEORY, label="equilibrium of lr x wd")
middle.set(xlabel="step", ylabel="effective lr = lr / norm²", yscale="log")
right.set(xlabel="step", ylabel="angle per step (rad)", ylim=(0, 0.06))
middle.legend()
right.legend()
style.save(figure, "angle")
