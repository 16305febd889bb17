"""What the training harness costs: steps of `equilibria.training.train` beside those of a bare torch loop.

Both train the same network on the same batches from the same weights. The harness watches all convolutions at every
fifth step, keeps checkpoints and samples in a folder, and tells its progress; evaluations are left out of both, since
they are work that is asked for. Segments of both alternate in one run, in processor time of this process, all its
threads: a busy machine cancels out. Run it with `make bench`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from equilibria.data import Batches
from equilibria.experiments.task import tell_progress, workplace
from equilibria.nets import BasicBlockResNet
from equilibria.training import Recipe, train, two_groups

STEPS, ROUNDS, LIMIT = 200, 5, 1.05


def network() -> nn.Module:
    """The network of smd-pseudo-overfitting at desk scale."""
    return BasicBlockResNet(32, (1, 1, 1), in_channels=3, classes=4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, BasicBlockResNet)
    names = [f"{name}.conv.weight" for name, _ in model.normalised()]
    return torch.optim.SGD(two_groups(model, names, lr=0.5, weight_decay=5e-3, other_lr=0.1))


def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4096, 3, 8, 8, generator=generator)
    return Batches(images, torch.randint(4, (4096,), generator=generator), batch_size=128, classes=4)


def bare() -> None:
    torch.manual_seed(0)
    model = network()
    model.train()
    rule = optimizer(model)
    for images, labels in islice(batches(), STEPS):
        rule.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        rule.step()


def harness() -> None:
    recipe = Recipe(
        model=network,
        optimizer=optimizer,
        data=batches(),
        steps=STEPS,
        watch_every=5,
        watch_select=["*.conv.weight"],
    )
    with tempfile.TemporaryDirectory() as folder, workplace(Path(folder) / "scratch" / "task"):
        train(recipe, folder=Path(folder) / "run", progress=tell_progress(STEPS))


def seconds(work: object) -> float:
    begin = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - begin


def main() -> int:
    torch.set_num_threads(1)
    pairs = [(seconds(bare), seconds(harness)) for _ in range(ROUNDS + 1)][1:]  # the first round only warms up
    base, full = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(there / here for here, there in pairs)
    verdict = "ok" if ratio <= LIMIT else "**missed**"
    lines = [
        "# What the training harness costs",
        "",
        f"Median of {ROUNDS} rounds of {STEPS} steps, processor time; torch {torch.__version__}, one thread. ResNet-8",
        "of 308,000 parameters on 8x8 images, batches of 128; watched every fifth step, with samples and a checkpoint",
        "on disk.",
        "",
        "| bare loop, ms/step | harness, ms/step | ratio | limit | |",
        "|---|---|---|---|---|",
        f"| {1e3 * base / STEPS:.2f} | {1e3 * full / STEPS:.2f} | {ratio:.3f} | {LIMIT:g} | {verdict} |",
    ]
    print(lines[-1], flush=True)
    Path(__file__).with_name("training.md").write_text("\n".join(lines) + "\n")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
