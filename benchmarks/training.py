"""What the training harness costs: steps of `equilibria.lab.training.train` beside those of a bare torch loop.

Both train the same network on the same batches from the same weights. The harness watches all convolutions at every
fifth step, keeps samples and checkpoints in a folder, and tells its progress; evaluations are left out of both, since
they are work that is asked for. Segments of both alternate in one run. Processor time of this process is what is
judged: in it a busy machine cancels out. Wall time holds the waiting for the disk too, and is shown beside it.

A sample of the watched weights costs a few milliseconds whatever the network: of the two networks the small one shows
it most. All of a training counts, its start and its end too: each network is trained for some seconds, where these
weigh, and five times as long, about as short as trainings of the experiments are. Run it with `make bench`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from equilibria.lab.data import Batches, load_digits
from equilibria.lab.harness.task import progress_reporter, task_context
from equilibria.lab.nets import BasicBlockResNet
from equilibria.lab.training import Recipe, decay_groups, train
from publishing import publish

LIMIT, CHECKPOINT_STEPS = 1.05, 100
SHORT_ROUNDS, LONG_ROUNDS, LONG = 5, 2, 5


@dataclass(frozen=True)
class Case:
    """A network and its images."""

    name: str
    network: Callable[[], BasicBlockResNet]
    batches: Callable[[], Batches]
    steps: int


def noise() -> Batches:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4096, 3, 8, 8, generator=generator)
    return Batches(images, torch.randint(4, (4096,), generator=generator), batch_size=128, classes=4)


def digits() -> Batches:
    found = load_digits()
    return Batches(found.train_images, found.train_labels, batch_size=64)


CASES = (
    Case(
        "ResNet-8 of smd-pseudo-overfitting (308,000 parameters), 8x8 images in batches of 128",
        lambda: BasicBlockResNet(32, (1, 1, 1), in_channels=3, classes=4),
        noise,
        steps=200,
    ),
    Case(
        "ResNet-8 of width 8 (20,000 parameters), digits in batches of 64",
        lambda: BasicBlockResNet(8, (1, 1, 1)),
        digits,
        steps=600,
    ),
)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, BasicBlockResNet)
    names = [f"{name}.conv.weight" for name, _ in model.normalised()]
    return torch.optim.SGD(decay_groups(model, names, lr=0.5, weight_decay=5e-3, other_lr=0.1))


def bare(case: Case) -> None:
    torch.manual_seed(0)
    model = case.network()
    model.train()
    rule = optimizer(model)
    for images, labels in islice(case.batches(), case.steps):
        rule.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        rule.step()


def harness(case: Case) -> None:
    recipe = Recipe(
        model=case.network,
        optimizer=optimizer,
        data=case.batches(),
        steps=case.steps,
        watch_every=5,
        watch_select=["*.conv.weight"],
    )
    with tempfile.TemporaryDirectory() as folder, task_context(Path(folder) / "scratch" / "task"):
        train(
            recipe,
            folder=Path(folder) / "run",
            checkpoint_steps=CHECKPOINT_STEPS,
            progress=progress_reporter(case.steps),
        )


def spent(work: Callable[[Case], None], case: Case) -> tuple[float, float]:
    """Milliseconds per step: of processor time, and of wall time."""
    begin = time.process_time(), time.perf_counter()
    work(case)
    end = time.process_time(), time.perf_counter()
    processor, wall = (1e3 * (late - early) / case.steps for early, late in zip(begin, end, strict=True))
    return processor, wall


def rows(case: Case, rounds: int) -> tuple[list[str], bool]:
    """Lines of the table, and whether the limit is kept."""
    pairs = [(spent(bare, case), spent(harness, case)) for _ in range(rounds)]
    lines, kept = [], True
    for place, clock in enumerate(("processor", "wall")):
        here, there = ([pair[which][place] for pair in pairs] for which in (0, 1))
        ratio = statistics.median(full / base for base, full in zip(here, there, strict=True))
        limit, verdict = "", ""
        if clock == "processor":
            kept = ratio <= LIMIT
            limit, verdict = f"{LIMIT:g}", "ok" if kept else "**missed**"
        base, full = statistics.median(here), statistics.median(there)
        lines.append(
            f"| {case.name} | {case.steps:,} | {clock} | {base:.2f} | {full:.2f} | {ratio:.3f} | {limit} | {verdict} |"
        )
        print(lines[-1], flush=True)
    return lines, kept


def main() -> int:
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        bare(case), harness(case)  # to warm up
        found += [rows(case, SHORT_ROUNDS), rows(replace(case, steps=LONG * case.steps), LONG_ROUNDS)]
    lines = [
        "# What the training harness costs",
        "",
        f"Medians of {SHORT_ROUNDS} rounds, of {LONG_ROUNDS} for the longer trainings; torch {torch.__version__}, one",
        "thread. Watched every fifth step, with samples on",
        f"disk and a checkpoint every {CHECKPOINT_STEPS} steps (in the experiments: every 30 s). A sample of weights",
        "costs a few milliseconds whatever the network, so a small one shows it most. The limit is for processor time;",
        "wall time has the waiting for the disk in it, and what else the machine does. All of a training counts, its",
        "start and its end too, which weigh in the shorter ones. Rounds of one loop differ by a few per cent.",
        "",
        "| network | steps | time | bare loop, ms/step | harness, ms/step | ratio | limit | |",
        "|---|---|---|---|---|---|---|---|",
        *(line for lines, _ in found for line in lines),
    ]
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
