"""What the controllers cost in real training steps: folded weight decay, and rescaling between learning-rate changes.

Each ratio is the time of a training step over the same without what the controller took, measured inside that very
step, so that a slow moment of the machine cancels out: step-level ratios of separate runs scatter by 10 % here. Plain
and controlled segments alternate all the same, and their ratio is shown beside it. Times are the process's own: what
others take of the machine does not count, only what they leave of its caches. Run it on an idle machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from equilibria.control import FoldedWeightDecay, RescaleOnDecay
from equilibria.lab.nets import BasicBlockResNet
from publishing import publish

ROUNDS, STEPS = 5, 8
WARM_UP = 3  # rounds: in their first twenty steps controllers look whether the weights are scale-invariant
LIMIT = {"folded weight decay": 1.01, "rescale, no change": 1.001}
BUSY = 0.3  # load of the machine before we begin, above which its numbers are marked


@dataclass
class Run:
    """A BN ResNet in training, with or without a controller."""

    control: Callable[[Run], Any] | None
    hooks: float = 0.0
    stamps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.net = BasicBlockResNet(16, (2, 2, 2, 2), in_channels=3)
        self.images = torch.randn(64, 3, 32, 32)
        self.weights = [layer.conv.weight for _, layer in self.net.normalised()]
        inside = {id(weight) for weight in self.weights}
        others = [param for param in self.net.parameters() if id(param) not in inside]
        groups = [{"params": self.weights}, {"params": others}]
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.scheduler: Any = MultiStepLR(self.optimizer, [10**9])
        self.optimizer.register_step_post_hook(lambda *_: self.stamp())  # before the controller's
        if self.control is not None:
            self.scheduler = self.control(self)
        self.optimizer.register_step_pre_hook(lambda *_: self.stamp())  # behind the controller's

    def stamp(self) -> None:
        self.stamps.append(time.process_time())

    def step(self) -> None:
        self.optimizer.zero_grad()
        labels = torch.randint(0, 10, (len(self.images),))
        functional.cross_entropy(self.net(self.images), labels).backward()
        self.stamps.clear()
        handles = [
            register_optimizer_step_pre_hook(lambda *_: self.stamp()),
            register_optimizer_step_post_hook(lambda *_: self.stamp()),
        ]
        self.optimizer.step()
        for handle in handles:
            handle.remove()
        self.stamp()
        self.scheduler.step()
        self.stamp()
        before, inside, done, after, outside, end = self.stamps
        self.hooks += (inside - before) + (after - done) + (end - outside)

    def segment(self) -> tuple[float, float]:
        """Seconds per step, and of these what hooks and scheduler took."""
        self.hooks = 0.0
        begin = time.process_time()
        for _ in range(STEPS):
            self.step()
        return (time.process_time() - begin) / STEPS, self.hooks / STEPS


def measure(control: Callable[[Run], Any]) -> tuple[float, float, float, float]:
    """Medians: seconds per step, seconds of the controller, its ratio, and the ratio of the alternating segments."""
    plain, other = Run(None), Run(control)
    rounds = []
    for _ in range(WARM_UP + ROUNDS):
        base, base_hooks = plain.segment()
        took, hooks = other.segment()
        own = hooks - base_hooks  # the plain scheduler and the stamps cost something, too
        rounds.append((took, own, took / (took - own), took / base))
    columns = zip(*rounds[WARM_UP:], strict=True)
    return tuple(statistics.median(column) for column in columns)  # type: ignore[return-value]


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cost_of_a_change() -> tuple[float, float]:
    """Seconds of one rescaling, and of the search for the statistics at the first batch."""

    def control(run: Run) -> RescaleOnDecay:
        return RescaleOnDecay(MultiStepLR(run.optimizer, [3, 6, 9], gamma=0.5), model=run.net, invariant=run.weights)

    run = Run(control)
    first, *later = (seconds(lambda: run.net(run.images)) for _ in range(4))
    took = []
    for _ in range(9):
        run.optimizer.step()
        took.append(seconds(run.scheduler.step))
    return statistics.median(took[2::3]), first - statistics.median(later)


def main() -> int:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    controls = {
        "folded weight decay": lambda run: FoldedWeightDecay(run.scheduler, model=run.net, invariant=run.weights),
        "rescale, no change": lambda run: RescaleOnDecay(run.scheduler, model=run.net, invariant=run.weights),
    }
    lines = [
        "# What the controllers cost",
        "",
        "ResNet-18 of width 16 with BatchNorm, batch 64 of 32x32, SGD with momentum; one thread, median of",
        f"{ROUNDS} rounds of {STEPS} steps.",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        f"Load of the machine at the beginning: {load:.1f}"
        + (" (**busy: take these numbers as rough**)." if load > BUSY else "."),
        "",
        "| what | ms per step | ms of it | ratio | limit | | ratio of alternating segments |",
        "|---|---|---|---|---|---|---|",
    ]
    missed = 0
    for name, control in controls.items():
        step, own, ratio, noisy = measure(control)
        missed += ratio > LIMIT[name]
        verdict = "ok" if ratio <= LIMIT[name] else "**missed**"
        numbers = f"{1e3 * step:.0f} | {1e3 * own:.3f} | {ratio:.5f} | {LIMIT[name]:g}"
        lines.append(f"| {name} | {numbers} | {verdict} | {noisy:.3f} |")
        print(lines[-1], flush=True)
    change, search = cost_of_a_change()
    lines += ["", f"One rescaling takes {1e3 * change:.1f} ms, the search at the first batch {search:.1f} s, once."]
    print(lines[-1])
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
