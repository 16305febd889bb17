"""The loss of one network as single tensors of it are scaled."""

from __future__ import annotations

import _style as style
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
inputs = torch.randn(256, 8).double()
targets = inputs[:, :3].argmax(1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for _ in range(200):
    optimizer.zero_grad()
    cross_entropy(net(inputs), targets).backward()
    optimizer.step()


@torch.no_grad()
def loss_at(name: str, factor: float, *, row: int | None = None) -> float:
    """The loss with a tensor, or one row of it, scaled."""
    scaled = {key: value.clone() for key, value in net.named_parameters()}
    scaled[name][slice(None) if row is None else row] *= factor
    return float(cross_entropy(torch.func.functional_call(net, scaled, (inputs,)), targets))


@torch.no_grad()
def cosines() -> dict[str, float]:
    """Cosine of each weight with its gradient at the start of a step."""
    return {
        n: abs(float(torch.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0))) for n, p in net.named_parameters()
    }


factors = np.geomspace(0.1, 10, 81)
figure, (left, right) = style.panels(2)
for label, name, row, colour, line in (
    ("0.weight (before BatchNorm)", "0.weight", None, style.BLUE, "-"),
    ("its first row alone", "0.weight", 0, style.GREEN, ":"),
    ("1.weight (BatchNorm's scale)", "1.weight", None, style.GREY, "-"),
    ("3.weight (last layer)", "3.weight", None, style.ORANGE, "-"),
):
    losses = [loss_at(name, factor, row=row) for factor in factors]
    left.plot(factors, losses, color=colour, linestyle=line, label=label, linewidth=2.5 if line == ":" else 1.5)
left.set(xlabel="factor", ylabel="loss", xscale="log")
left.legend(fontsize=8)
optimizer.zero_grad()
cross_entropy(net(inputs), targets).backward()
found = cosines()
right.barh(
    list(found), list(found.values()), color=[style.BLUE, style.GREY, style.GREY, style.ORANGE, style.ORANGE], left=1e-9
)
right.set(xscale="log", xlim=(1e-9, 1), xlabel="|cos(tensor, its gradient)|")
right.invert_yaxis()
style.save(figure, "symmetry")
