"""A schedule with weight decay, and the learning rate that trains the same network without."""

from __future__ import annotations

import _style as style
import numpy as np

import equilibria as eq

STEPS_PER_EPOCH = 391
epochs = np.arange(200 * STEPS_PER_EPOCH) / STEPS_PER_EPOCH
lr = np.select([epochs < 60, epochs < 120, epochs < 160], [0.1, 0.02, 0.004], default=0.0008)
folded = eq.fold(lr, 5e-4, momentum=0.9)

figure, (left, right) = style.panels(2)
left.plot(epochs, lr, color=style.BLUE, label="with weight decay 5e-4")
left.plot(epochs, folded.lr, color=style.ORANGE, label="without: folded")
left.set(xlabel="epoch", ylabel="learning rate", yscale="log")
left.legend()
right.plot(epochs, np.exp(folded.log_scale[:-1]), color=style.ORANGE, label="weights, folded / with decay")
right.plot(
    epochs,
    folded.lr / lr / np.exp(2 * folded.log_scale[:-1]),
    color=style.GREEN,
    label="effective lr, folded / with decay",
)
right.set(xlabel="epoch", yscale="log", ylabel="ratio")
right.legend()
style.save(figure, "folding")
