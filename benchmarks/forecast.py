"""The cost of a forecast: 100 layers x 100,000 steps with bands, against one plain recursion of the theory.

The plain recursion is `theory.evolve` for the same layers and steps: no bands, L constant. Both take turns; medians of
the process's own time are compared. Writes benchmarks/forecast.md. Run it with `python benchmarks/forecast.py`, on an
idle machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.forecasting import forecast
from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS
from equilibria.theory import SGD, AdamW, cold_start, evolve
from equilibria.theory.schedules import Cosine
from publishing import publish

LAYERS, RECORDED, STEPS, ROUNDS = 100, 300, 100_000, 3
LIMIT = 5.0  # seconds on one core
RULES = {"SGD, momentum": SGD(0.1, 5e-4, momentum=0.9), "AdamW": AdamW(1e-3, 0.1)}


class BenchmarkRun:
    """A record of layers near their equilibrium, with noise on their gradients."""

    def __init__(self, rule: Any) -> None:
        rng = np.random.default_rng(0)
        entry = {"rule": {"kind": type(rule).__name__}, "entries": 1000, "group": 0, "optimizer": 0, "invariant": True}
        if isinstance(rule, AdamW):
            entry["rule"]["betas"] = list(rule.betas)  # type: ignore[index]
        self.metadata = {"params": [{"name": f"layer{layer}", **entry} for layer in range(LAYERS)]}
        point = rule.equilibrium(unit_grad_sq=1.0, dim=1000.0)
        scatter = np.exp(0.1 * rng.standard_normal(LAYERS * RECORDED))
        columns: dict[str, Any] = {name: np.full(LAYERS * RECORDED, np.nan) for name in NUMBERS}
        columns |= {"lr": rule.lr + 0 * scatter, "weight_decay": rule.weight_decay + 0 * scatter}
        columns |= {"momentum": 0.9 + 0 * scatter, "norm": float(point.norm) + 0 * scatter, "cosine": 0 * scatter}
        columns |= {"angle": float(point.angle) * scatter, "update_norm": float(point.angle * point.norm) * scatter}
        columns |= {"unit_grad_sq": scatter**2, "momentum_unit_grad_sq": scatter**2}
        columns["step"] = np.repeat(np.arange(RECORDED), LAYERS)
        columns["param"] = [f"layer{layer}" for layer in range(LAYERS)] * RECORDED
        columns |= {name: pa.nulls(LAYERS * RECORDED, pa.string()) for name in ("state", "note", "law")}
        self._table = pa.table({name: columns[name] for name in SAMPLE_FIELDS.names}).cast(SAMPLE_FIELDS)

    def samples(self) -> pa.Table:
        """The sample table."""
        return self._table


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(rule: Any) -> tuple[float, float]:
    """Median seconds of the forecast and of the plain recursion."""
    run, schedule = BenchmarkRun(rule), Cosine(rule.lr, steps=RECORDED + STEPS)
    start = cold_start(rule, np.full(LAYERS, 10.0))

    def plain() -> object:
        return evolve(rule, STEPS, start=start, lr=schedule, dim=np.full(LAYERS, 1000.0))

    def full() -> object:
        return forecast(run, schedule=schedule, steps=RECORDED + STEPS)

    times = [(seconds(full), seconds(plain)) for _ in range(ROUNDS)]
    return statistics.median(took for took, _ in times), statistics.median(took for _, took in times)


def main() -> int:
    """Measure, write the table, and return 1 if a forecast takes longer than the limit."""
    busy = os.getloadavg()[0] > 0.3
    rows, missed = [], 0
    for name, rule in RULES.items():
        took, plain = measure(rule)
        missed += took > LIMIT
        rows.append(
            f"| {name} | {took:.2f} s | {plain:.2f} s | {took / plain:.2f} | {'yes' if took <= LIMIT else 'NO'} |"
        )
    text = "\n".join(
        [
            "# Forecast\n",
            f"{LAYERS} layers x {STEPS:,} steps with bands (seven paths per layer), one core; `evolve` has one path "
            "per layer with a constant L.",
            f"Process time, medians of {ROUNDS}, taking turns. {platform.python_implementation()} "
            f"{platform.python_version()}, {platform.machine()}"
            f"{'; the machine was busy' if busy else ''}.\n",
            f"| optimizer | forecast | one plain recursion | ratio | below {LIMIT:g} s |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    publish(Path(__file__).with_suffix(".md"), text)
    sys.stdout.write(text)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
