"""Turning over many steps, over many images with three batch sizes, and the mean gradient's share; of eq-diffusion."""

from __future__ import annotations

import json
from pathlib import Path

import _style as style
import numpy as np

RESULT = Path(__file__).parents[2] / "results" / "eq-diffusion" / "desk" / "result.json"
NETS = {"conv-bn": "BN conv net", "mlp-bn": "BN MLP", "conv-gn": "GN conv net"}
COLOURS = (style.BLUE, style.ORANGE, style.GREEN)
MIDDLE = 1  # of three layers
BATCHES = (16, 128, 512)

numbers = json.loads(RESULT.read_text(encoding="utf-8"))["numbers"]
figure, (left, middle, right) = style.panels(3)

for (net, label), colour in zip(NETS.items(), COLOURS, strict=True):
    run = numbers[f"{net}-sgd"]
    left.plot(run["distances"], run["D(n)/(n D(1))"][MIDDLE], "o-", ms=3, color=colour, label=label)
left.axhline(1, **style.THEORY, label="independent steps")
left.set(xlabel="steps n", ylabel="turned / n times one step", xscale="log", yscale="log", ylim=(0.04, 1.5))
left.legend(fontsize=8)

run = numbers["conv-bn-sgd"]
unit = run["D(n) at batch 16"][MIDDLE][0] / 16
for batch, colour in zip(BATCHES, COLOURS, strict=True):
    turned = np.array(run[f"D(n) at batch {batch}"][MIDDLE])
    images = batch * 2.0 ** np.arange(len(turned))
    middle.plot(images, turned / images / unit, "o-", ms=3, color=colour, label=f"batch {batch}")
middle.set(xlabel="images", ylabel="turned per image, BN conv net", xscale="log", yscale="log", ylim=(0.04, 1.5))
middle.legend(fontsize=8)

for (net, label), colour in zip(NETS.items(), COLOURS, strict=True):
    name = "share of the mean gradient at batch {}, successive and independent"
    shares = np.array([numbers[f"{net}-sgd"][name.format(batch)] for batch in BATCHES])[:, :, MIDDLE]
    right.plot(BATCHES, shares[:, 0], "o-", ms=3, color=colour, label=label)
    right.plot(BATCHES, shares[:, 1], "x", color=colour)
right.plot([], [], "o-", ms=3, color=style.GREY, label="successive gradients")
right.plot([], [], "x", color=style.GREY, label="independent batches")
right.set(xlabel="batch", ylabel="share of the mean gradient", xscale="log", yscale="log", ylim=(0.006, 5))
right.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
right.set_xticks([], minor=True)
right.legend(fontsize=7, loc="upper left")
style.save(figure, "pull-back")
