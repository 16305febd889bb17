"""Linear regression with BatchNorm: weight decay raises the effective lr until 2 / lr_eff meets the sharpness."""

from __future__ import annotations

import _style as style
import numpy as np

from equilibria.lab.problems import Regression, Simulation
from equilibria.theory import SGD

STEPS, EVERY = 24_000, 21  # an odd stride: at the edge every other step lies on the other side of the valley
problem = Regression.generate([3])
rule = SGD(lr=0.5, weight_decay=2e-4)
run = Simulation(
    problem, problem.initial, rule=rule, steps=STEPS, record=["loss", "sharpness", "effective_lr"], every=EVERY
).run()
sharp, edge = run["sharpness"][:, 0], 2 / run["effective_lr"][:, 0]
sharp = (sharp[1:] + sharp[:-1]) / 2  # of both sides

figure, (left, middle, right) = style.plt.subplots(1, 3, figsize=(8.6, 3.0), layout="constrained")
position = np.linspace(-1.6, 1.6, 200)
left.plot(position, position**2 / 2, color="black", linewidth=1)
for factor, colour, name in ((1.5, style.BLUE, "R = 0.75"), (2.08, style.ORANGE, "R = 1.04")):
    path = 0.55 * (1 - factor) ** np.arange(12)
    left.plot(path, path**2 / 2, "o-", color=colour, markersize=3, linewidth=0.8, label=name)
left.set(xlabel="across the valley", ylabel="loss", xticks=[], yticks=[])
left.legend(loc="upper center", fontsize=8)
middle.plot(run.steps[1:], sharp, color=style.BLUE, label="sharpness")
middle.plot(run.steps, edge, color=style.ORANGE, label="2 / effective lr")
middle.set(xlabel="step", ylim=(0, None))
middle.legend(fontsize=8)
right.plot(run.steps, run["loss"][:, 0], color=style.GREY)
right.set(xlabel="step", ylabel="training loss", yscale="log", ylim=(1e-8, None))
style.save(figure, "sharpness")
