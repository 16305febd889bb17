"""Small networks to watch, and a slow float64 account of what a step did to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn

from equilibria.monitor.monitor import Monitor


def make_net(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Linear layers before batch normalisation: their weights are scale-invariant, the last one's is not."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def batches(steps: int, *, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def backward(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], *, scale: float = 1.0) -> torch.Tensor:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(net(inputs.to(next(net.parameters()).dtype)).double(), targets)
    (loss * scale).backward()
    return loss


def train(
    net: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    seed: int = 1,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> None:
    for number, batch in enumerate(batches(steps, seed=seed)):
        optimizer.zero_grad()
        backward(net, batch)
        if before_step is not None:
            before_step(number)
        optimizer.step()
        if after_step is not None:
            after_step(number)


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@dataclass
class Account:
    """What every step did, in float64, from copies of weight and gradient around it; use as ``train``'s callbacks."""

    net: nn.Module
    scale: float = 1.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def before(self, number: int) -> None:
        self._before = {name: weight.detach().double().clone() for name, weight in self.net.named_parameters()}
        self._gradients = {
            name: (weight.grad.to_dense() if weight.grad.is_sparse else weight.grad).double().clone() / self.scale
            for name, weight in self.net.named_parameters()
            if weight.grad is not None
        }

    def after(self, number: int) -> None:
        for name, weight in self.net.named_parameters():
            if weight.ndim >= 2 and name in self._gradients:
                account = measure(self._before[name], self._gradients[name], weight.detach().double())
                self.rows.append({"step": number, "param": name, **account})


def measure(before: torch.Tensor, gradient: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """The measured columns of one step, by their definitions."""
    w, g, moved = (tensor.double().reshape(-1) for tensor in (before, gradient, after - before))
    norm, grad_norm = float(w.norm()), float(g.norm())
    u, v = w / w.norm(), after.reshape(-1) / after.norm()
    return {
        "norm": norm,
        "grad_norm": grad_norm,
        "cosine": float(w @ g) / (norm * grad_norm),
        "update_norm": float(moved.norm()),
        "angle": 2 * float(torch.atan2((u - v).norm(), (u + v).norm())),
        "relative_update": float(moved.norm()) / norm,
        "unit_grad_sq": grad_norm**2 * norm**2,
    }


def column(monitor: Monitor, name: str, param: str | None = None) -> list[Any]:
    table = monitor.samples()
    if param is not None:
        table = table.filter(pc.equal(table["param"].cast("string"), param))
    return table[name].to_pylist()


def assert_account(monitor: Monitor, account: Account, *, rtol: float = 1e-5, cosine_atol: float = 1e-6) -> None:
    """Every sample agrees with the slow account of its step; every accounted step that was due is there."""
    table = monitor.samples().to_pylist()
    slow = {(row["step"], row["param"]): row for row in account.rows}
    assert table, "no samples"
    for row in table:
        truth = slow[row["step"], row["param"]]
        for name in ("norm", "grad_norm", "update_norm", "angle", "relative_update", "unit_grad_sq"):
            np.testing.assert_allclose(row[name], truth[name], rtol=rtol, err_msg=f"{name} of {row}")
        np.testing.assert_allclose(row["cosine"], truth["cosine"], rtol=rtol, atol=cosine_atol)
        np.testing.assert_allclose(row["effective_lr"], row["lr"] / truth["norm"] ** 2, rtol=rtol)
