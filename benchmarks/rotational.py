"""What a rotational step costs: the optimizer step alone, 8 M parameters, against torch's foreach step of its kind.

All optimizers take turns, step by step, so that a slow moment of the machine hits all alike; medians are compared.
Writes benchmarks/rotational.md. Run it with `python benchmarks/rotational.py`, on an idle machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from equilibria.control import Lion, Rotational

ROUNDS, WARM_UP = 41, 5
SHAPES = [(1024, 1024)] * 6 + [(512, 256, 3, 3)] + [(512, 512)] * 4 + [(1024,)] * 16  # 8.5 M, as linear and conv layers
BUSY = 0.3  # load of the machine before we begin, above which its numbers are marked


@dataclass(frozen=True)
class Claim:
    """A ratio that must stay below a limit; None where none was promised."""

    kind: str
    granularity: str
    limit: float | None


CLAIMS = [
    Claim("sgd", "tensor", 2.5),
    Claim("sgd", "row", 2.5),
    Claim("adamw", "tensor", 1.6),
    Claim("adamw", "row", 1.6),
    Claim("lion", "tensor", None),
    Claim("lion", "row", None),
]

PLAIN: dict[str, tuple[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": (
        "torch.optim.SGD(momentum=0.9, foreach=True)",
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=True),
    ),
    "adamw": (
        "torch.optim.AdamW(foreach=True)",
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    ),
    "lion": ("equilibria.control.Lion", lambda p: Lion(p, lr=1e-4, weight_decay=1.0)),
}


def build(kind: str, granularity: str | None) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.03) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    plain = PLAIN[kind][1](params)
    if granularity is None:
        return plain
    return Rotational(plain, [param for param in params if param.ndim > 1], granularity=granularity)


def measure() -> dict[tuple[str, str | None], float]:
    """Median seconds of a step for every optimizer."""
    keys = [(kind, granularity) for kind in PLAIN for granularity in (None, "tensor", "row")]
    optimizers = {key: build(*key) for key in keys}
    taken: dict[tuple[str, str | None], list[float]] = {key: [] for key in keys}
    for _ in range(WARM_UP + ROUNDS):
        for key, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            taken[key].append(time.perf_counter() - begin)
    return {key: statistics.median(times[WARM_UP:]) for key, times in taken.items()}


def main() -> None:
    load = os.getloadavg()[0]
    seconds = measure()
    size = sum(torch.Size(shape).numel() for shape in SHAPES) / 1e6
    lines = [
        "# Rotational optimizers: the cost of a step",
        "",
        f"`python benchmarks/rotational.py`: median of {ROUNDS} alternating steps, {size:.1f} M parameters, 1 thread.",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        f"Load of the machine at the beginning: {load:.1f}"
        + (" (**busy: take these numbers as rough**)." if load > BUSY else "."),
        "",
        "| rotational | unit | against | ms | baseline | ratio | limit | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        ours, plain = seconds[claim.kind, claim.granularity], seconds[claim.kind, None]
        verdict = "" if claim.limit is None else "ok" if ours <= claim.limit * plain else "**missed**"
        lines.append(
            f"| {claim.kind} | {claim.granularity} | {PLAIN[claim.kind][0]} | {ours * 1e3:.1f} | {plain * 1e3:.1f} | "
            f"{ours / plain:.2f} | {claim.limit or '-'} | {verdict} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent / "rotational.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
