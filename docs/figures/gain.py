"""A small transformer: why the norm of one matrix changes, and the angles that measured gains predict."""

from __future__ import annotations

import _style as style
import numpy as np
import torch
from torch.nn import functional

import equilibria as eq
from equilibria.diagnosis.budget import budgets_over_time
from equilibria.diagnosis.run import sampled_run
from equilibria.lab.nets import GPT

STEPS, WARM_UP, CONTEXT = 600, 60, 32
SHOWN = {"blocks.1.down.weight": style.BLUE, "blocks.0.attention.key.weight": style.ORANGE, "head.weight": style.GREEN}

torch.manual_seed(0)
text = torch.tensor(list(b"".join(page.read_bytes() for page in sorted(style.CONCEPTS.glob("[!g]*.md")))))
model = GPT(256, 48, layers=2, context=CONTEXT)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.3)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARM_UP, eta_min=3e-4),
    ],
    milestones=[WARM_UP],
)
with eq.watch(model, optimizer, every=2) as monitor:
    for _ in range(STEPS):
        rows = text[torch.randint(len(text) - CONTEXT - 1, (8, 1)) + torch.arange(CONTEXT + 1)].long()
        functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
run = sampled_run(monitor.samples(), metadata=monitor.metadata)

figure, (left, right) = style.panels(2)
name = next(iter(SHOWN))
stretches = budgets_over_time(run)[run.series.names.index(name)][4:]  # the first tenth, warm-up, is far larger
middle = [(stretch.first_step + stretch.last_step) / 2 for stretch in stretches]
parts = {"random steps": "diffusion", "gradient": "pull", "decay": "decay"}
above, below = np.zeros((2, len(middle)))
for (label, field), colour in zip(parts.items(), (style.BLUE, style.ORANGE, style.GREY), strict=True):
    values = 100 * np.array([getattr(stretch, field) for stretch in stretches])
    for stack, part in ((above, np.maximum(values, 0)), (below, np.minimum(values, 0))):
        left.fill_between(middle, stack, stack + part, color=colour, alpha=0.55, linewidth=0)
        stack += part
    left.plot([], [], color=colour, linewidth=6, alpha=0.55, label=label)
left.plot(middle, [100 * stretch.growth for stretch in stretches], color="black", linewidth=1.5, label="change")
left.set(xlabel="steps", ylabel="change of ln ||w||² per 100 steps, in %", title=name.removesuffix(".weight"))
left.legend(fontsize=8)

for name, colour in SHOWN.items():
    rows = run.series.of(run.series.names.index(name))
    right.plot(rows["step"], rows["angle"], color=colour, alpha=0.35, linewidth=1)
    right.plot(rows["step"], rows["angle_predicted"], color=colour, label=name.removesuffix(".weight"))
right.plot([], [], color="black", alpha=0.35, label="measured (pale), predicted")
right.set(xlabel="steps", ylabel="rad per step", yscale="log")
right.legend(fontsize=8)
style.save(figure, "gain")
