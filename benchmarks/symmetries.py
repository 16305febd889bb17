"""What `symmetries` costs: ResNet-18 at width 16, beside the plain backward passes that it needs.

Each round times the search and then as many plain float64 backward passes on batches of the same size as it took, back
to back: in CPU seconds, which other work on the machine changes little, and by the clock. The ratio is that of CPU
seconds, the median over the rounds. The target is one minute by the clock on two cores; one thread has to do, for two
of them wait for each other where other work runs. Writes benchmarks/symmetries.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

import equilibria as eq
from equilibria.lab.nets import BasicBlockResNet
from equilibria.symmetry import Symmetries
from publishing import publish

ROUNDS, SAMPLES, LIMIT_SECONDS = 3, 16, 60.0
BUSY = 0.3  # load of the machine before we begin, above which its numbers are marked


@dataclass(frozen=True)
class Timed:
    """Seconds of one round.

    Attributes:
        wall: of the search, by the clock.
        cpu: of the search, of all threads.
        plain: CPU seconds of as many plain backward passes.
    """

    wall: float
    cpu: float
    plain: float


def main() -> None:
    load = os.getloadavg()[0]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = BasicBlockResNet(16, (2, 2, 2, 2), in_channels=3)
    objective = eq.objective(net, functional.cross_entropy)
    batches = [(torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(4)]
    plain, small = objective.double(), tuple(part[:SAMPLES] for part in batches[0])
    plain.value_and_grad(small)  # the first pass is slower
    rounds = []
    for _ in range(ROUNDS):
        begin, clock = time.process_time(), time.perf_counter()
        found = eq.symmetries(objective, batches, samples=SAMPLES)
        middle, wall = time.process_time(), time.perf_counter() - clock
        for _ in range(found.probes):
            plain.value_and_grad(small)
        rounds.append(Timed(wall, middle - begin, time.process_time() - middle))
    met = report(net, found, rounds, load)
    sys.exit(0 if met else 1)


def report(net: BasicBlockResNet, found: Symmetries, rounds: list[Timed], load: float) -> bool:
    """Print and write the page; whether the target is met."""
    count = sum(param.numel() for param in net.parameters())
    wall, cpu = (statistics.median(getattr(each, name) for each in rounds) for name in ("wall", "cpu"))
    ratio = statistics.median(each.cpu / each.plain for each in rounds)
    met = (cpu if load > BUSY else wall) < LIMIT_SECONDS
    lines = [
        "# What `symmetries` costs",
        "",
        f"ResNet-18 at width 16 ({len(found.elements)} tensors, {count / 1e6:.1f} M parameters), images of 32x32, "
        f"{SAMPLES} samples per pass, one thread; torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores. Median of {ROUNDS} rounds; `python benchmarks/symmetries.py`. "
        f"Load of the machine at the beginning: {load:.1f}"
        + (
            " (**busy: the clock shows the others' work too, so CPU seconds, of one thread, are judged**)."
            if load > BUSY
            else "."
        ),
        "",
        "| backward passes | symmetries found | gap | seconds | CPU seconds | target | | over the plain passes |",
        "|---|---|---|---|---|---|---|---|",
        f"| {found.probes} | {len(found.basis)} | {found.gap:.0e} | {wall:.0f} | {cpu:.0f} "
        f"| < {LIMIT_SECONDS:.0f} s on 2 cores | {'ok' if met else '**missed**'} | {ratio:.2f}x |",
        "",
        "What it takes beyond the plain passes is the confirmation (forward passes with every symmetry and every row "
        "really scaled, in float64 and as the network computes), and normalisations without eps. The ratio is of CPU "
        "seconds, to plain float64 passes.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    publish(Path(__file__).with_suffix(".md"), text)
    return met


if __name__ == "__main__":
    main()
