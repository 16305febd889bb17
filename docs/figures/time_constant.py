"""After lr / 10 the angle falls by 10 at once, its equilibrium by the root of 10; the way back takes its time."""

from __future__ import annotations

import _style as style
import numpy as np

from equilibria.theory import SGD, AdamW, evolve, settled

figure, (left, right) = style.panels(2)
BEFORE = SGD(lr=0.1, weight_decay=5e-4, momentum=0.9)
after = SGD(lr=0.01, weight_decay=5e-4, momentum=0.9)
path = evolve(after, 20_000, start=settled(BEFORE))
steps = np.arange(-4000, 20_000)
old = BEFORE.equilibrium().angle
left.plot(steps, np.concatenate([np.full(4000, old), path.angle]), color=style.BLUE, label="angle per step")
left.step([-4000, 0, 20_000], [old, after.equilibrium().angle, after.equilibrium().angle], where="post", **style.THEORY)
left.plot([], [], **style.THEORY, label="equilibrium of lr x wd")
left.set(xlabel="steps after lr / 10", ylabel="rad", ylim=(0, None))
left.legend()

for rule, before, name, colour in (
    (after, BEFORE, "SGD, lr 0.01, wd 5e-4, momentum 0.9", style.BLUE),
    (SGD(0.01, 5e-4), SGD(0.1, 5e-4), "SGD, lr 0.01, wd 5e-4", style.ORANGE),
    (AdamW(3e-4, 0.1), AdamW(3e-3, 0.1), "AdamW, lr 3e-4, wd 0.1", style.GREEN),
):
    ratio = evolve(rule, 300_000, start=settled(before, dim=1000), dim=1000).angle / rule.equilibrium(dim=1000).angle
    kept = np.unique(np.geomspace(1, len(ratio), 400).astype(int)) - 1
    right.plot(kept + 1, ratio[kept], color=colour, label=name)
right.axhline(1, **style.THEORY)
right.set(
    xlabel="steps after lr / 10",
    ylabel="angle / equilibrium",
    xscale="log",
    ylim=(0.2, 1.2),
    yticks=[0.316, 0.5, 0.75, 1.0],
)
right.legend(loc="upper left", fontsize=8)
style.save(figure, "time-constant")
