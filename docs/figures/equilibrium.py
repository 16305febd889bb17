"""Two weights that differ 28-fold in norm come to the same norm and the same angle per step."""

from __future__ import annotations

import _style as style
import numpy as np

from equilibria.lab.problems import RandomWalk, Simulation
from equilibria.theory import SGD

ENTRIES, STEPS = 400, 1500
rule = SGD(lr=0.1, weight_decay=0.005, momentum=0.9)
there = rule.equilibrium(unit_grad_sq=ENTRIES - 1)
start = np.random.default_rng(0).standard_normal((2, ENTRIES))
start *= np.array([[2.0], [56.0]]) / np.linalg.norm(start, axis=1, keepdims=True)
walk = RandomWalk(ENTRIES, unit_grad_sq=ENTRIES - 1)
run = Simulation(walk, start, rule=rule, steps=STEPS, record=["norm", "angle"]).run()

figure, (left, right) = style.panels(2)
for trial, (colour, name) in enumerate([(style.BLUE, "starts small"), (style.ORANGE, "starts large")]):
    left.plot(run.steps, run["norm"][:, trial], color=colour, label=name)
    right.plot(run.steps, run["angle"][:, trial], color=colour, linewidth=0.8)
left.axhline(there.norm, **style.THEORY, label="equilibrium, computed")
right.axhline(there.angle, **style.THEORY)
left.set(xlabel="step", ylabel="norm of the weight", ylim=(0, None))
right.set(xlabel="step", ylabel="angle per step (rad)", yscale="log", ylim=(2e-3, 0.5))
left.legend(loc="upper right")
style.save(figure, "equilibrium")
