"""Speed claims, each a ratio measured side by side in one run: `make bench` (keep the machine idle).

Every round measures the baseline and the candidate back to back; the ratio of a claim is the median over rounds.
Writes benchmarks/results.md.
"""

from __future__ import annotations

import compileall
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: two cores shared with others make thread pools noisy

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import equilibria
from equilibria.theory import SGD, AdamW, Lion, Rule, cold_start, evolve
from equilibria.theory.schedules import Cosine
from publishing import publish

STEPS, LAYERS, ROUNDS = 100_000, 100, 9
PLAN = [sys.executable, "-m", "equilibria.cli", "plan"]
SGD_OPTIONS = "--optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9"
ADAMW_OPTIONS = "--optimizer adamw --lr 1e-3 --wd 0.1"
STAIRS = f"--schedule step --milestones 30000,60000,90000 --factor 0.2 --steps {STEPS}"
COSINE = f"--schedule cosine --warmup 2000 --steps {STEPS}"


@dataclass(frozen=True)
class Claim:
    """A ratio that must stay below a limit."""

    name: str
    baseline_name: str
    limit: float
    baseline: Callable[[], object]
    candidate: Callable[[], object]


def command(line: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(line, stdout=subprocess.DEVNULL, check=True)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def recursion(rule: Rule, schedule: Cosine | None) -> Callable[[], object]:
    start = cold_start(rule, np.linspace(1.0, 2.0, LAYERS))
    grads = np.linspace(1.0, 10.0, LAYERS)
    return lambda: evolve(rule, STEPS, start=start, unit_grad_sq=grads, lr=schedule)


def write_two_arrays() -> object:
    return np.full((STEPS + 1, LAYERS), 1.0), np.full((STEPS, LAYERS), 1.0)


IMPORTS = command([sys.executable, "-c", "import numpy, scipy"])
CLAIMS = [
    *(
        Claim(
            f"equilibria plan, {what}, {STEPS:,} steps", 'python -c "import numpy, scipy"', 3.0, IMPORTS, command(line)
        )
        for what, line in {
            "SGD with step decay": [*PLAN, *SGD_OPTIONS.split(), *STAIRS.split()],
            "SGD with cosine": [*PLAN, *SGD_OPTIONS.split(), *COSINE.split()],
            "AdamW with cosine": [*PLAN, *ADAMW_OPTIONS.split(), *COSINE.split()],
        }.items()
    ),
    *(
        Claim(
            f"moment recursion, {what}, {LAYERS} layers x {STEPS:,} steps",
            "numpy writes two arrays of that size",
            20.0,
            write_two_arrays,
            recursion(rule, schedule),
        )
        for what, rule, schedule in (
            ("SGD constant lr", SGD(0.1, 5e-4, momentum=0.9), None),
            ("SGD cosine", SGD(0.1, 5e-4, momentum=0.9), Cosine(0.1, steps=STEPS)),
            ("Nesterov cosine", SGD(0.1, 5e-4, momentum=0.9, nesterov=True), Cosine(0.1, steps=STEPS)),
            ("Lion cosine", Lion(1e-4, 1.0), Cosine(1e-4, steps=STEPS)),
            ("AdamW cosine", AdamW(1e-3, 0.1), Cosine(1e-3, steps=STEPS)),
        )
    ),
]


def measure(claim: Claim) -> tuple[float, float, float]:
    """Median baseline seconds, candidate seconds and ratio; the first round only warms caches up."""
    rounds = []
    for _ in range(ROUNDS + 1):
        base, work = seconds(claim.baseline), seconds(claim.candidate)
        rounds.append((base, work, work / base))
    return tuple(statistics.median(column) for column in zip(*rounds[1:], strict=True))  # type: ignore[return-value]


def main() -> int:
    compileall.compile_dir(Path(equilibria.__file__).parent, quiet=1)  # as after any first start
    lines = [
        "# Speed",
        "",
        f"`make bench`: median of {ROUNDS} rounds, one thread.",
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        "",
        "| what | against | seconds | baseline | ratio | limit | |",
        "|---|---|---|---|---|---|---|",
    ]
    missed = 0
    for claim in CLAIMS:
        base, work, ratio = measure(claim)
        verdict = "ok" if ratio <= claim.limit else "**missed**"
        missed += ratio > claim.limit
        numbers = f"{work:.3f} | {base:.3f} | {ratio:.2f} | {claim.limit:g}"
        lines.append(f"| {claim.name} | {claim.baseline_name} | {numbers} | {verdict} |")
        print(lines[-1], flush=True)
    publish(Path(__file__).with_name("results.md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
