"""When will a run reach the edge of stability? The tracker's forecasts beside the step at which R crossed 1.

Full-batch gradient descent with weight decay on losses that are scale-invariant in all weights: matrix completion with
BatchNorm, and networks with BatchNorm behind every layer on handwritten digits. `RUNS` was written down before any of
them was trained; the method was chosen on `CHOSEN_ON`, other networks, seeds and settings.

Two earlier judgements, on seeds lower by 200 and by 100, each found the two runs of matrix completion within the goal
and none of the six networks. After the first a forecast whose growth varies stays, with its wide spread (one had
vanished), after the second the lack of growth is dated to now instead of to the middle of its window; so the seeds are
new again.

The goal: every forecast from half-way to the crossing on is within 2 % of the step of the crossing, on at least six of
`RUNS`. The crossing is the first step at which ln R, interpolated between queries, is 0.

Writes benchmarks/crossing.md. Run it with `python benchmarks/crossing.py`; `--chosen-on` prints the other runs' table.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.lab.data.image_set import load_digits
from equilibria.lab.problems import Completion
from publishing import publish

PARTS = (0.5, 0.625, 0.75, 0.9)  # of the way to the crossing
GOAL, RUNS_WITHIN_GOAL = 0.02, 6
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Run:
    """One training: everything that decides it."""

    name: str
    kind: str  # "completion", "mlp" or "conv"
    seed: int
    lr: float
    weight_decay: float
    widths: tuple[int, ...] = ()
    samples: int = 256
    activation: str = "SiLU"
    mse: bool = False
    every: int = 50
    most: int = 20_000  # steps: a run that has not crossed by then is reported as such


RUNS = (
    Run("matrix completion, seed 201", "completion", 201, 0.1, 0.005),
    Run("matrix completion, seed 202", "completion", 202, 0.05, 0.02),
    Run("MLP 64-32-10, SiLU", "mlp", 210, 0.005, 0.04, (32,)),
    Run("MLP 64-48-24-10, tanh", "mlp", 211, 0.01, 0.02, (48, 24), samples=512, activation="Tanh"),
    Run("MLP 64-40-10, ReLU, squared error", "mlp", 212, 0.005, 0.04, (40,), activation="ReLU", mse=True),
    Run("conv 6-12, SiLU", "conv", 213, 0.005, 0.04, (6, 12), samples=128),
    Run("conv 8-8-16, GELU", "conv", 214, 0.002, 0.1, (8, 8, 16), samples=128, activation="GELU"),
    Run("conv 8-16, tanh, squared error", "conv", 215, 0.005, 0.04, (8, 16), samples=192, activation="Tanh", mse=True),
)

CHOSEN_ON = (
    Run("matrix completion, seed 0", "completion", 0, 0.1, 0.01, every=20),
    Run("MLP 64-32-10, docs/sharpness.md", "mlp", 0, 0.05, 0.02, (32,), every=10),
    Run("MLP 64-32-32-10, SiLU", "mlp", 20, 0.05, 0.005, (32, 32), samples=128),
    Run("MLP 64-32-32-10, SiLU, lr 0.005", "mlp", 20, 0.005, 0.05, (32, 32), samples=128),
    Run("MLP 64-32-10, GELU, squared error", "mlp", 21, 0.005, 0.06, (32,), activation="GELU", mse=True),
    Run("conv 8-12, ReLU", "conv", 22, 0.002, 0.1, (8, 12), samples=96, activation="ReLU"),
)


def network(run: Run) -> nn.Sequential:
    """BatchNorm without scale and shift behind every layer: the loss is scale-invariant in all weights."""
    layers: list[nn.Module] = []
    before = 1 if run.kind == "conv" else 64
    for width in run.widths:
        if run.kind == "conv":
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, affine=False)]
        else:
            layers += [nn.Linear(before, width, bias=False), nn.BatchNorm1d(width, affine=False)]
        layers.append(getattr(nn, run.activation)())
        before = width
    layers += [nn.AvgPool2d(4), nn.Flatten()] if run.kind == "conv" else []
    before *= 4 if run.kind == "conv" else 1
    return nn.Sequential(*layers, nn.Linear(before, 10, bias=False), nn.BatchNorm1d(10, affine=False))


def prepared(run: Run) -> tuple[eq.Objective, list[nn.Parameter], Any, Loss]:
    """The objective, its parameters, its batch and the loss in training."""
    torch.manual_seed(run.seed)
    if run.kind == "completion":
        problem = Completion.generate([run.seed])
        start = torch.tensor(problem.initial[0]).reshape(2, 50, 50)
        params = {name: nn.Parameter(start[index].clone()) for index, name in enumerate(("U", "V"))}
        objective = eq.Objective(lambda at, _batch: problem.torch_loss(at), params)
        return objective, list(params.values()), None, lambda: problem.torch_loss(params)
    digits, net = load_digits(), network(run)
    images, labels = digits.train_images[: run.samples], digits.train_labels[: run.samples]
    images = images.reshape(-1, 1, 8, 8) if run.kind == "conv" else images.flatten(1)
    targets = functional.one_hot(labels, 10).float() * 3 - 0.3 if run.mse else labels  # as BatchNorm's: mean 0
    measure = functional.mse_loss if run.mse else functional.cross_entropy
    batch = images, targets
    return eq.objective(net, measure), list(net.parameters()), batch, lambda: measure(net(images), targets)


def tracked(run: Run) -> eq.SharpnessTracker:
    """Train until two queries beyond R = 1."""
    objective, params, batch, loss = prepared(run)
    optimizer = torch.optim.SGD(params, lr=run.lr, weight_decay=run.weight_decay)
    with eq.SharpnessTracker(objective, optimizer, batch, every=run.every) as tracker:
        for step in range(run.most):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            if step % run.every == 1 and tracker.samples()["ratio"][-1].as_py() > 1.03:
                break
    assert tracker.failure is None, tracker.failure
    return tracker


@dataclass(frozen=True)
class Judged:
    """The forecasts of a run beside its crossing."""

    run: Run
    crossing: float | None  # None: no crossing within `most` steps
    errors: dict[float, float | None]  # part of the way -> error of the forecast of the nearest query; None without one
    worst: float  # largest error from half-way on; infinite if a query has no forecast
    covered: float  # share of the queries from half-way on whose spread holds the crossing
    decay_alone: float  # error half-way of ln(1/R) / (-2 ln c), the law of a vanished gradient

    def text(self) -> str:
        if self.crossing is None:
            return f"| {self.run.name} | none in {self.run.most:,} steps |" + " |" * (len(PARTS) + 3)
        cells = [f"{error:+.1%}" if error is not None else "none" for error in self.errors.values()]
        cells += [f"{self.worst:.1%}", f"{self.covered:.0%}", f"{self.decay_alone:+.1%}"]
        return f"| {self.run.name} | {self.crossing:,.0f} | {' | '.join(cells)} |"


def judged(run: Run) -> Judged:
    table = tracked(run).samples()
    step, ratio, left, spread, lr, decay = (
        np.array(table[name].to_pylist(), dtype=float)
        for name in ("step", "ratio", "steps_to_crossing", "crossing_spread", "lr", "weight_decay")
    )
    above = np.flatnonzero((ratio[1:] > 1) & (ratio[:-1] <= 1))
    if not len(above):
        return Judged(run, None, {}, np.inf, 0.0, np.inf)
    ends = slice(above[0], above[0] + 2)
    crossing = float(np.interp(0.0, np.log(ratio[ends]), step[ends]))
    error = (step + left) / crossing - 1
    late = (step >= crossing / 2) & (step < crossing)
    nearest = {part: int(np.argmin(np.abs(step - part * crossing))) for part in PARTS}
    half = nearest[0.5]
    alone = step[half] + np.log(ratio[half]) / (2 * np.log1p(-lr[half] * decay[half]))
    return Judged(
        run,
        crossing,
        {part: float(error[row]) if np.isfinite(error[row]) else None for part, row in nearest.items()},
        float(np.max(np.abs(np.nan_to_num(error[late], nan=np.inf)))),
        float(np.mean(np.abs(step + left - crossing)[late] <= spread[late])),
        float(alone / crossing - 1),
    )


def report(rows: list[Judged]) -> str:
    within = sum(row.worst <= GOAL for row in rows)
    columns = [
        "run",
        "crossing",
        *(f"at {part:.1%}" for part in PARTS),
        "worst",
        "within spread",
        "decay alone at 50 %",
    ]
    lines = [
        "# When a run reaches the edge of stability",
        "",
        "Forecasts of `SharpnessTracker` beside the step at which R crossed 1: full-batch gradient descent with weight "
        f"decay, scale-invariant losses; torch {torch.__version__}, {platform.machine()}; "
        "`python benchmarks/crossing.py`. The runs were fixed before any was trained, the method was chosen on others.",
        "",
        "## The forecast on the way to the crossing",
        "",
        "Errors relative to the step of the crossing: at parts of the way, the largest from half-way on, the share of "
        "the queries from half-way on whose spread holds the crossing, and what weight decay alone would forecast.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *(row.text() for row in rows),
        "",
        f"Every forecast from half-way on is within {GOAL:.0%} on {within} of {len(rows)} runs; the goal was "
        f"{RUNS_WITHIN_GOAL}. Two earlier judgements, on seeds lower by 200 and 100, found 2 of 8 each; the method "
        "changed after both, so the seeds are new.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    chosen_on = "--chosen-on" in sys.argv
    rows = [judged(run) for run in (CHOSEN_ON if chosen_on else RUNS)]
    text = report(rows)
    print(text)
    if chosen_on:
        return 0
    publish(Path(__file__).with_suffix(".md"), text)
    met = sum(row.worst <= GOAL for row in rows) >= RUNS_WITHIN_GOAL
    print(f"{'met' if met else 'MISSED'}: every forecast from half-way on within {GOAL:.0%} on {RUNS_WITHIN_GOAL} runs")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
