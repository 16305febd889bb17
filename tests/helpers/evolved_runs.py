"""Runs made by the moment recursion of an optimizer, as `explain` reads them: no training, known inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records.tables import METRIC_FIELDS, SAMPLE_FIELDS
from equilibria.theory import cold_start, evolve

LAYERS = ("0.weight", "3.weight", "6.weight")
ENTRIES = 4096


@dataclass
class EvolvedRun:
    """A run: samples, metadata and metrics."""

    table: pa.Table
    metadata: dict[str, Any]
    loss: float = 1.0
    metric_names: tuple[str, ...] = field(default=("loss",))

    def samples(self) -> pa.Table:
        return self.table

    def metrics(self) -> pa.Table:
        steps = sorted(set(self.table["step"].to_pylist()))
        rows = {"step": steps, "name": ["loss"] * len(steps), "value": [self.loss] * len(steps)}
        return pa.table(rows).cast(METRIC_FIELDS)


def evolved_run(
    rule, *, steps=600, start=2.0, unit_grad_sq=1.0, lr=None, layers=LAYERS, scatter=0.1, seed=0, every=2, **entry
) -> EvolvedRun:
    """A run of some layers under ``rule``; single angles and gradients scatter by a factor of about 1 + ``scatter``."""
    draw = np.random.default_rng(seed)
    lrs = np.full(steps, rule.lr) if lr is None else np.array([lr(step) for step in range(steps)])
    parts = []
    for name in layers:
        path = evolve(rule, steps, start=cold_start(rule, start), unit_grad_sq=unit_grad_sq, dim=ENTRIES, lr=lrs)
        chosen = np.arange(0, steps, every)
        noise = np.exp(scatter * draw.standard_normal(len(chosen)))
        norm = path.norm[:-1][chosen]
        columns = {
            "step": chosen,
            "param": [name] * len(chosen),
            "lr": lrs[chosen],
            "weight_decay": np.full(len(chosen), rule.weight_decay),
            "momentum": np.full(len(chosen), rule.betas[0] if hasattr(rule, "betas") else rule.momentum),
            "norm": norm,
            "grad_norm": np.sqrt(unit_grad_sq) / norm * noise,
            "cosine": np.zeros(len(chosen)),
            "angle": path.angle[chosen] * noise,
        }
        columns |= {name: [None] * len(chosen) for name in SAMPLE_FIELDS.names if name not in columns}
        parts.append(pa.table({name: columns[name] for name in SAMPLE_FIELDS.names}, schema=SAMPLE_FIELDS))
    kind = type(rule).__name__
    recorded = {"kind": kind, **dataclasses.asdict(rule)}
    described = {"entries": ENTRIES, "shape": [64, 64], "dtype": "float32", "optimizer": 0, "group": 0} | entry
    params = [{"name": name, "invariant": True, "rule": recorded, "law": kind, **described} for name in layers]
    metadata = {"params": params, "optimizers": [{"class": kind, "settings": kind}], "frozen": [], "controllers": []}
    return EvolvedRun(pa.concat_tables(parts), metadata)
