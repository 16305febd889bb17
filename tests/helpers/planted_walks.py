"""Brute force: vectors walk at random under a real update rule, with an L that responds to the angle as planted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS

_PLAIN = [
    field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in SAMPLE_FIELDS
]
RATE = 0.05  # at which the planted L follows the angle


@dataclass(frozen=True)
class Run:
    """Samples and metadata, as a recorded run has them."""

    table: pa.Table
    metadata: dict[str, Any]

    def samples(self) -> pa.Table:
        return self.table


@dataclass(frozen=True)
class Walk:
    """``layers`` vectors of ``dim`` entries; L = exp(level) (angle^2 / reference)^power (step / 100)^drift.

    Gradients are independent, or correlated from step to step; under AdamW ``pull`` shrinks weights as more weight
    decay does, unknown to the record.
    """

    layers: int = 8
    dim: int = 200
    momentum: float = 0.9
    betas: tuple[float, float] | None = None  # AdamW with them, SGD without
    weight_decay: float = 5e-3
    level: float = 0.0
    power: float = 0.0
    drift: float = 0.0
    correlation: float = 0.0
    pull: float = 0.0
    reference: float = 0.02**2
    seed: int = 0

    def run(self, lrs: np.ndarray) -> Run:
        """Walk one step per learning rate, every step sampled."""
        rng = np.random.default_rng(self.seed)
        w = rng.standard_normal((self.layers, self.dim))
        w *= 2.5 / np.linalg.norm(w, axis=1, keepdims=True)
        first, second = np.zeros_like(w), np.zeros_like(w)
        warmth, noise = np.zeros(self.layers), rng.standard_normal(w.shape)
        columns_by_name: dict[str, list[np.ndarray]] = {name: [] for name in NUMBERS}
        for step, lr in enumerate(lrs.tolist()):
            big_l = np.exp(self.level + self.power * warmth + self.drift * math.log((step + 1) / 100))
            norm_sq = (w**2).sum(axis=1)
            noise = self.correlation * noise + math.sqrt(1 - self.correlation**2) * rng.standard_normal(w.shape)
            g = noise - ((noise * w).sum(axis=1) / norm_sq)[:, None] * w
            g *= np.sqrt(big_l / norm_sq / (self.dim - 1))[:, None]
            grad_sq, mixed = (g**2).sum(axis=1) * norm_sq, (first * g).sum(axis=1) * norm_sq
            after, first, second = self._step(w, g, first, second, lr, step)
            cosine = (after * w).sum(axis=1) / np.linalg.norm(after, axis=1) / np.sqrt(norm_sq)
            angle = np.arccos(np.clip(cosine, -1, 1))  # of 0.01 rad, in float64: good to 1e-10
            warmth += -math.expm1(-RATE) * (np.log(np.maximum(angle**2, 1e-12) / self.reference) - warmth)
            measured = {"norm": np.sqrt(norm_sq), "angle": angle, "update_norm": np.linalg.norm(after - w, axis=1)}
            measured |= {"unit_grad_sq": grad_sq, "cosine": np.full(self.layers, 1e-9)}
            if self.betas is None:
                measured["momentum_unit_grad_sq"] = grad_sq + 2 * self.momentum * mixed
            settings = {"lr": lr, "weight_decay": self.weight_decay, "momentum": self.momentum}
            for name in NUMBERS:
                columns_by_name[name].append(
                    np.broadcast_to(measured.get(name, settings.get(name, np.nan)), self.layers)
                )
            w = after
        return Run(
            _table(columns_by_name, self.layers, len(lrs)),
            {"params": [self._entry(layer) for layer in range(self.layers)]},
        )

    def _step(
        self, w: np.ndarray, g: np.ndarray, first: np.ndarray, second: np.ndarray, lr: float, step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.betas is None:
            first = self.momentum * first + g + self.weight_decay * w
            return w - lr * first, first, second
        b1, b2 = self.betas
        first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g**2
        update = first / (1 - b1 ** (step + 1)) / np.sqrt(second / (1 - b2 ** (step + 1)))
        return (1 - lr * (self.weight_decay + self.pull)) * w - lr * update, first, second

    def _entry(self, at: int) -> dict[str, Any]:
        rule: dict[str, Any] = {"kind": "SGD", "momentum": self.momentum}
        if self.betas is not None:
            rule = {"kind": "AdamW", "betas": list(self.betas)}
        entry = {"name": f"layer{at}", "entries": self.dim, "invariant": None, "optimizer": 0, "group": 0}
        return {**entry, "no_law": None, "rule": {**rule, "lr": 0.1, "weight_decay": self.weight_decay}}


def _table(columns_by_name: dict[str, list[np.ndarray]], layers: int, steps: int) -> pa.Table:
    columns: dict[str, Any] = {name: np.stack(rows).ravel() for name, rows in columns_by_name.items()}
    columns["step"] = np.repeat(np.arange(steps), layers)
    columns["param"] = [f"layer{at}" for at in range(layers)] * steps
    columns |= {name: [None] * (layers * steps) for name in ("state", "note", "law")}
    table = pa.table({field.name: pa.array(columns[field.name], field.type) for field in _PLAIN})
    return table.cast(SAMPLE_FIELDS)
