"""Optimizers for the benchmark of `eq.identify`, written after the published rules: Muon as it is used, and others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def orthogonalised(matrix: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Newton-Schulz with the usual quintic."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).to(matrix.dtype)


class OwnMuon(torch.optim.Optimizer):
    """Muon with the scalings that people use.

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: of a sum ("heavy") or an average.
        nesterov: whether the present gradient is added again.
        scale: "original", "rms" (0.2 sqrt of the longer side), "unit" (sqrt rows / columns) or "none".
        heavy: whether the buffer adds up gradients.
        by_rows: whether rows are normalised by their running mean square (NorMuon).
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "original",
        heavy: bool = True,
        by_rows: bool = False,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, settings | {"scale": scale, "heavy": heavy, "by_rows": by_rows})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._move(param, group)

    def _move(self, param: Tensor, group: dict[str, Any]) -> None:
        state, mu, gradient = self.state[param], group["momentum"], param.grad
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
        share = 1.0 if group["heavy"] else 1 - mu
        buffer.mul_(mu).add_(gradient, alpha=share)
        update = share * gradient + mu * buffer if group["nesterov"] else buffer
        rows, columns = param.shape
        update = orthogonalised(update)
        if group["by_rows"]:
            mean = state.setdefault("rows", torch.zeros(rows, 1, dtype=param.dtype))
            size = update.norm()
            mean.mul_(0.95).add_(update.square().mean(1, keepdim=True), alpha=0.05)
            update = update / (mean.sqrt() + 1e-10)
            update = update * (size / update.norm())
        factors = {
            "original": math.sqrt(max(1.0, rows / columns)),
            "rms": 0.2 * math.sqrt(max(rows, columns)),
            "unit": math.sqrt(rows / columns),
            "none": 1.0,
        }
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * factors[group["scale"]])


class Dion(torch.optim.Optimizer):
    """Orthonormal updates of low rank: one power iteration on the momentum, which keeps what they leave out.

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: decoupled.
        mu: share of the low-rank part that stays in the momentum.
        rank: over the shorter side.
    """

    def __init__(
        self, params: Any, lr: float, *, weight_decay: float = 0.0, mu: float = 0.95, rank: float = 0.5
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "mu": mu, "rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._move(param, group)

    def _move(self, param: Tensor, group: dict[str, Any]) -> None:
        state, (rows, columns) = self.state[param], param.shape
        if "right" not in state:
            rank = max(1, round(group["rank"] * min(rows, columns)))
            state["right"] = torch.linalg.qr(torch.randn(columns, rank, dtype=param.dtype)).Q
            state["momentum"] = torch.zeros_like(param)
        momentum = state["momentum"] + param.grad
        left = torch.linalg.qr(momentum @ state["right"]).Q
        right = momentum.T @ left
        state["momentum"] = momentum - (1 - group["mu"]) * left @ right.T
        state["right"] = right = right / (right.norm(dim=0) + 1e-12)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(left @ right.T, alpha=-group["lr"] * math.sqrt(rows / columns))


class Small(torch.optim.Optimizer):
    """Short rules by name: one line each in `_update`."""

    def __init__(self, params: Any, lr: float, *, rule: str, weight_decay: float = 0.0, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rule": rule})
        self.hidden = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self._move(param, group)

    def _move(self, param: Tensor, group: dict[str, Any]) -> None:
        state, mu, rule, lr, wd = (
            self.state[param],
            group["momentum"],
            group["rule"],
            group["lr"],
            group["weight_decay"],
        )
        gradient = param.grad
        assert gradient is not None
        state["n"] = count = state.get("n", 0) + 1
        if rule == "signum, L2":
            gradient = gradient + wd * param
        buffer = state.setdefault("buffer", torch.zeros_like(param)).mul_(mu).add_(gradient, alpha=1 - mu)
        norm = float(param.norm())
        if rule in ("signum", "signum, L2"):
            update = buffer.sign()
        elif rule == "normalised":
            update = buffer / buffer.norm() * 0.2 * math.sqrt(param.numel())
        elif rule == "clipped":
            update = buffer * min(1.0, 0.5 / float(buffer.norm()))
        elif rule == "cube root":
            update = buffer.sign() * buffer.abs() ** (1 / 3)
        elif rule == "LAMB-like":
            update = buffer / buffer.norm() * norm
        elif rule == "clock":
            update = buffer.sign() / math.sqrt(1 + count / 5000)
        elif rule == "lr^2 decay":
            update = buffer.sign()
        elif rule == "turncoat":  # by the count in its state
            update = buffer.sign() if count < 20_000 else buffer / buffer.norm()
        elif rule == "hidden turncoat":  # by a count that nothing shows
            self.hidden[0] += 1
            update = buffer.sign() if self.hidden[0] < 20_000 else buffer / buffer.norm()
        else:  # sphere, hyperball, fixed decay
            update = buffer / buffer.norm()
        if rule == "lr^2 decay":
            param.mul_(1 - lr * lr * wd)
        elif rule == "fixed decay":
            param.mul_(1 - wd)
        elif rule != "signum, L2":
            param.mul_(1 - lr * wd)
        param.add_(update, alpha=-lr)
        if rule == "hyperball":
            param.mul_(norm / param.norm())
        if rule == "sphere":
            param.div_(param.norm())


OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon, Keller Jordan": (OwnMuon, {"lr": 0.02, "weight_decay": 0.1}),
    "Muon, Moonshot": (OwnMuon, {"lr": 2e-3, "weight_decay": 1.0, "scale": "rms"}),
    "Muon, unit": (OwnMuon, {"lr": 0.02, "weight_decay": 0.1, "scale": "unit"}),
    "Muon, unscaled, plain": (OwnMuon, {"lr": 0.02, "weight_decay": 0.1, "scale": "none", "nesterov": False}),
    "Muon, average, mu 0.9": (OwnMuon, {"lr": 0.02, "weight_decay": 0.1, "heavy": False, "momentum": 0.9}),
    "NorMuon": (OwnMuon, {"lr": 2e-3, "weight_decay": 1.0, "scale": "rms", "by_rows": True}),
    "Signum": (Small, {"lr": 1e-3, "weight_decay": 2.0, "rule": "signum"}),
    "Signum, L2": (Small, {"lr": 1e-3, "weight_decay": 0.02, "rule": "signum, L2"}),
    "normalised": (Small, {"lr": 1e-3, "weight_decay": 2.0, "rule": "normalised"}),
    "clipped": (Small, {"lr": 0.05, "weight_decay": 0.02, "rule": "clipped"}),
    "cube root": (Small, {"lr": 0.01, "weight_decay": 0.2, "rule": "cube root"}),
    "LAMB-like": (Small, {"lr": 0.01, "weight_decay": 0.2, "rule": "LAMB-like"}),
    "clock": (Small, {"lr": 1e-3, "weight_decay": 2.0, "rule": "clock"}),
    "lr^2 decay": (Small, {"lr": 0.01, "weight_decay": 20.0, "rule": "lr^2 decay"}),
    "fixed decay": (Small, {"lr": 0.01, "weight_decay": 0.002, "rule": "fixed decay"}),
    "turncoat": (Small, {"lr": 1e-3, "weight_decay": 2.0, "rule": "turncoat"}),
    "hidden turncoat": (Small, {"lr": 1e-3, "weight_decay": 2.0, "rule": "hidden turncoat"}),
    "hyperball": (Small, {"lr": 0.01, "weight_decay": 0.1, "rule": "hyperball"}),
    "sphere": (Small, {"lr": 0.01, "weight_decay": 0.1, "rule": "sphere"}),
}
