"""What `symmetries` costs: ResNet-18 at width 16, beside the plain backward passes that it needs.

Each round times the search and then as many plain float64 backward passes on batches of the same size as it took, back
to back, in CPU seconds of one thread, which other work on the machine changes little; the ratio is the median over the
rounds. Writes benchmarks/symmetries.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional

import equilibria as eq
from equilibria.measure.symmetry import Symmetries
from equilibria.nets import BasicBlockResNet

ROUNDS, SAMPLES, LIMIT_SECONDS = 3, 16, 60.0


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = BasicBlockResNet(16, (2, 2, 2, 2), in_channels=3)
    objective = eq.objective(net, functional.cross_entropy)
    batches = [(torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(4)]
    plain, small = objective.double(), tuple(part[:SAMPLES] for part in batches[0])
    plain.value_and_grad(small)  # the first pass is slower
    took, ratios = [], []
    for _ in range(ROUNDS):
        begin = time.process_time()
        found = eq.symmetries(objective, batches, samples=SAMPLES)
        middle = time.process_time()
        for _ in range(found.probes):
            plain.value_and_grad(small)
        end = time.process_time()
        took.append(middle - begin)
        ratios.append((middle - begin) / (end - middle))
    report(net, found, statistics.median(took), statistics.median(ratios))


def report(net: BasicBlockResNet, found: Symmetries, seconds: float, ratio: float) -> None:
    count = sum(param.numel() for param in net.parameters())
    lines = [
        "# What `symmetries` costs",
        "",
        f"ResNet-18 at width 16 ({len(found.elements)} tensors, {count / 1e6:.1f} M parameters), images of 32x32, "
        f"{SAMPLES} samples per pass, one thread; torch {torch.__version__}, {platform.machine()}. "
        f"Median of {ROUNDS} rounds; `python benchmarks/symmetries.py`.",
        "",
        "| backward passes | symmetries found | gap | CPU seconds | limit | over the plain float64 passes |",
        "|---|---|---|---|---|---|",
        f"| {found.probes} | {len(found.basis)} | {found.gap:.0e} | {seconds:.0f} | {LIMIT_SECONDS:.0f} "
        f"| {ratio:.2f}x |",
        "",
        "The rest is the confirmation: forward passes with every symmetry really scaled, in float64 and as the network "
        "computes.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    assert seconds < LIMIT_SECONDS, f"{seconds:.0f} s"


if __name__ == "__main__":
    main()
