"""What the engine costs: the noisy Rayleigh quotient, matrix completion, linear regression.

Each round times the engine and what it is compared with back to back, in CPU seconds of one thread, which other work on
the machine changes little; a ratio is the median over the rounds. Writes benchmarks/problems.md; exits 1 if a limit is
missed.
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

import numpy as np
import torch

from equilibria.lab.problems import Completion, RayleighQuotient, Regression, Simulation
from equilibria.theory import SGD
from publishing import publish

ROUNDS = 5
TRIALS, STEPS, DIM = 100, 40_000, 10
COMPLETION_STEPS, REGRESSION_STEPS, SEEDS = 30_000, 40_000, 10
QUOTIENT = RayleighQuotient.two_level(1.0, DIM, noise=1.0)
LOOK = ("norm", "risk", "angle")


class NumpyRegression(Regression):
    """Without its compiled gradient: the engine then steps all seeds at once by numpy's batched products."""

    kind = None


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def alternating(*works: Callable[[], object], rounds: int = ROUNDS) -> list[list[float]]:
    """CPU seconds of every work in every round, (works, rounds)."""
    return [list(row) for row in zip(*([seconds(work) for work in works] for _ in range(rounds)), strict=True)]


def ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def quotient(trials: int, steps: int, *, record: tuple[str, ...] = (), every: int = 20) -> Callable[[], object]:
    start = QUOTIENT.start(trials, norm_sq=6.7)
    return Simulation(QUOTIENT, start, rule=SGD(0.1, 0.01), steps=steps, record=record, every=every).run


def draw() -> None:
    """The same number of normals, into memory that stays in the cache: numpy at its best."""
    generator, block = np.random.default_rng(0), np.empty(100_000)
    for _ in range(TRIALS * STEPS * DIM // block.size):
        generator.standard_normal(out=block)


def complete_by_torch(problem: Completion) -> Callable[[], object]:
    places = torch.tensor(problem.observed[0])
    targets = torch.tensor(problem.matrix[0]).flatten()[places]
    scale = targets.square().mean().sqrt()

    def train() -> None:
        u, v = (torch.tensor(part[0], requires_grad=True) for part in problem.split(problem.initial).values())
        optimizer = torch.optim.SGD([u, v], lr=0.1, weight_decay=0.01)
        for _ in range(COMPLETION_STEPS):
            optimizer.zero_grad()
            a = (u @ v.T).flatten()[places]
            (scale * a / a.square().mean().sqrt() - targets).square().mean().backward()
            optimizer.step()

    return train


def regress(kind: type[Regression], *, together: bool) -> Callable[[], object]:
    problem = kind.generate(range(SEEDS))
    whole = Simulation(problem, problem.initial, rule=SGD(0.5, 2e-4), steps=REGRESSION_STEPS, record=())
    runs = [whole] if together else whole.parts(SEEDS)
    return lambda: [each.run() for each in runs]


def quotient_rows() -> tuple[list[str], bool]:
    names = f"{TRIALS} trials x {STEPS:,} steps, p = {DIM}"
    plain, seen, drawn = alternating(quotient(TRIALS, STEPS), quotient(TRIALS, STEPS, record=LOOK), draw)
    costs = ratio(plain, drawn)
    rows = [
        row(f"noisy Rayleigh quotient, {names}", plain, "drawing the same normals by numpy", costs, "at most 2"),
        row(f"the same, {', '.join(LOOK)} every 20 steps", seen, "the same", ratio(seen, drawn), ""),
    ]
    return rows, costs <= 2


def completion_rows() -> tuple[list[str], bool]:
    problem = Completion.generate([0])
    engine = Simulation(problem, problem.initial, rule=SGD(0.1, 0.01), steps=COMPLETION_STEPS, record=()).run
    mine, theirs = alternating(engine, complete_by_torch(problem), rounds=3)
    gain = ratio(theirs, mine)
    name = f"matrix completion d = 50, N = 800, {COMPLETION_STEPS:,} steps"
    return [row(name, mine, "torch autograd and torch.optim.SGD", 1 / gain, "at most 1/3")], gain >= 3


def regression_rows() -> tuple[list[str], bool]:
    together, apart, numpy_together, numpy_apart = alternating(
        regress(Regression, together=True),
        regress(Regression, together=False),
        regress(NumpyRegression, together=True),
        regress(NumpyRegression, together=False),
        rounds=3,
    )
    name = f"linear regression, {SEEDS} seeds x {REGRESSION_STEPS:,} steps"
    gain = ratio(numpy_apart, together)
    rows = [
        row(f"{name}, compiled, one run", together, "numpy, one seed after the other", 1 / gain, "at most 1/5"),
        row(
            f"{name}, numpy, one run",
            numpy_together,
            "numpy, one seed after the other",
            ratio(numpy_together, numpy_apart),
            "at most 1/5",
        ),
        row(f"{name}, compiled, one run", together, "compiled, one after the other", ratio(together, apart), ""),
        row(f"{name}, compiled, one run", together, "numpy, one run", ratio(together, numpy_together), ""),
    ]
    return rows, gain >= 5 and ratio(numpy_apart, numpy_together) >= 5


def row(name: str, took: list[float], beside: str, costs: float, limit: str) -> str:
    return f"| {name} | {statistics.median(took):.2f} | {beside} | {costs:.3g}x | {limit} |"


def growth_rows() -> list[str]:
    sizes = [(TRIALS, STEPS // 4), (TRIALS, STEPS // 2), (TRIALS, STEPS), (TRIALS // 4, STEPS)]
    sizes += [(TRIALS, STEPS // 10), (10 * TRIALS, STEPS // 10), (100 * TRIALS, STEPS // 10)]
    plain, seen = (alternating(*(quotient(*size, record=record) for size in sizes), rounds=3) for record in ((), LOOK))
    return [
        f"| {trials:,} | {steps:,} | {per_step(bare, trials * steps):.0f} | {per_step(looked, trials * steps):.0f} |"
        for bare, looked, (trials, steps) in zip(plain, seen, sizes, strict=True)
    ]


def per_step(took: list[float], steps: int) -> float:
    """Nanoseconds."""
    return statistics.median(took) / steps * 1e9


def setup() -> float:
    """Microseconds per trial before the first step: what a run of one step costs."""
    (took,) = alternating(quotient(10 * TRIALS, 1))
    return statistics.median(took) / (10 * TRIALS) * 1e6


def main() -> int:
    torch.set_num_threads(1)
    for warm in (quotient(2, 10), regress(Regression, together=True)):
        warm()
    parts = [quotient_rows(), completion_rows(), regression_rows()]
    lines = [
        "# What the engine costs",
        "",
        f"CPU seconds of one thread; numpy {np.__version__}, torch {torch.__version__}, {platform.machine()}. Medians "
        f"of {ROUNDS} rounds (3 for completion and regression), measured alternating; `python benchmarks/problems.py`.",
        "",
        "| work | CPU s | beside | ratio | limit |",
        "|---|---|---|---|---|",
        *(line for rows, _ in parts for line in rows),
        "",
        "The compiled regression gains little from running seeds together, because it loses little on one: a step of "
        "one seed costs less than one call of numpy. Its numpy form, the way of any problem of one's own, gains much.",
        "",
        "The cost per trial and step of the noisy Rayleigh quotient, in nanoseconds of CPU (medians of 3 rounds), "
        f"random numbers included: nothing recorded, and {', '.join(LOOK)} every 20 steps. It grows linearly in steps "
        f"and in trials; the random numbers of a trial take {setup():.0f} microseconds to set up.",
        "",
        "| trials | steps | ns | recorded, ns |",
        "|---|---|---|---|",
        *growth_rows(),
        "",
    ]
    text = "\n".join(lines)
    publish(Path(__file__).with_suffix(".md"), text)
    print(text)
    return 0 if all(good for _, good in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
