"""What a rotational step costs: the optimizer step alone, 8 M parameters, against torch's foreach step of its kind.

All optimizers take turns, step by step, so that a slow moment of the machine hits all alike; medians of the process's
own time are compared.
Every round has a fresh random gradient, made orthogonal to the rows of each optimizer's weights before its step (not
timed), as gradients of scale-invariant weights are: AdamP and SGDP look for that, and project where they find it.
Writes benchmarks/rotational.md. Run it with `python benchmarks/rotational.py`, on an idle machine. For the peers:

    pip install --no-deps adamp pytorch_optimizer

(without dependencies: both ask for no more than torch and numpy, and torch should stay the one that is there).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from equilibria.control import Lion, Rotational
from publishing import publish

ROUNDS, WARM_UP = 41, 20  # in its first twenty steps Rotational looks whether the weights are scale-invariant
SHAPES = [(1024, 1024)] * 6 + [(512, 256, 3, 3)] + [(512, 512)] * 4 + [(1024,)] * 16  # 8.5 M, as linear and conv layers
BUSY = 0.3  # load of the machine before we begin, above which its numbers are marked


@dataclass(frozen=True)
class Entry:
    """One optimizer of the table.

    Attributes:
        kind: whose torch optimizer is its baseline.
        name: what the table calls it.
        unit: what it turns or projects as a whole.
        build: parameters -> optimizer.
        limit: its ratio must stay below this; None where nothing was promised.
        package: where it comes from, if not from here.
    """

    kind: str
    name: str
    unit: str
    build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    limit: float | None = None
    package: str | None = None

    @property
    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "adamw": {"lr": 1e-3, "weight_decay": 0.1},
    "lion": {"lr": 1e-4, "weight_decay": 1.0},
}
PLAIN = {
    "sgd": Entry("sgd", "torch.optim.SGD(momentum=0.9, foreach=True)", "", lambda p: plain("sgd", p)),
    "adamw": Entry("adamw", "torch.optim.AdamW(foreach=True)", "", lambda p: plain("adamw", p)),
    "lion": Entry("lion", "equilibria.control.Lion", "", lambda p: plain("lion", p)),
}


def plain(kind: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "lion":
        return Lion(params, **SETTINGS[kind])
    if kind == "sgd":
        return torch.optim.SGD(params, **SETTINGS[kind], foreach=True)
    return torch.optim.AdamW(params, **SETTINGS[kind], foreach=True)


def rotational(kind: str, unit: str, limit: float | None = None) -> Entry:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return Rotational(
            plain(kind, params), invariant=[param for param in params if param.ndim > 1], granularity=unit
        )

    return Entry(kind, f"Rotational, {kind}", unit, build, limit)


def peer(kind: str, package: str, name: str, **more: Any) -> Entry:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(import_module(package), name)(params, **SETTINGS[kind], **more)
        return optimizer

    options = ", ".join(f"{key}={value}" for key, value in more.items())
    return Entry(kind, f"{package}.{name}" + (f"({options})" if more else ""), "row", build, package=package)


TABLE = [
    rotational("sgd", "tensor", 2.5),
    rotational("sgd", "row", 2.5),
    peer("sgd", "adamp", "SGDP"),
    peer("sgd", "pytorch_optimizer", "SGDP"),
    peer("sgd", "pytorch_optimizer", "SGDP", foreach=True),
    rotational("adamw", "tensor", 1.6),
    rotational("adamw", "row", 1.6),
    peer("adamw", "adamp", "AdamP"),
    peer("adamw", "pytorch_optimizer", "AdamP"),
    peer("adamw", "pytorch_optimizer", "AdamP", foreach=True),
    rotational("lion", "tensor"),
    rotational("lion", "row"),
]


@dataclass
class Contestant:
    """An optimizer with parameters of its own, and the seconds of its steps."""

    optimizer: torch.optim.Optimizer
    params: list[torch.nn.Parameter]
    taken: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, entry: Entry) -> Contestant:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape) * 0.03) for shape in SHAPES]
        for param in params:
            param.grad = torch.empty_like(param)
        return cls(entry.build(params), params)

    def step(self, gradients: list[torch.Tensor]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            set_tangent_gradient(param, gradient)
        begin = time.process_time()
        self.optimizer.step()
        self.taken.append(time.process_time() - begin)


@torch.no_grad()
def set_tangent_gradient(param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter this gradient, without its part along the rows of a matrix or a kernel."""
    assert param.grad is not None
    param.grad.copy_(gradient)
    if param.ndim > 1:
        rows, tangent = param.flatten(1), param.grad.flatten(1)
        along = (rows * tangent).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        tangent.addcmul_(rows, along, value=-1)


def measure(entries: list[Entry]) -> dict[str, float]:
    """Median seconds of a step for every optimizer."""
    contestants = {key(entry): Contestant.of(entry) for entry in entries}
    for _ in range(WARM_UP + ROUNDS):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for contestant in contestants.values():
            contestant.step(gradients)
    return {name: statistics.median(each.taken[WARM_UP:]) for name, each in contestants.items()}


def key(entry: Entry) -> str:
    return f"{entry.name} {entry.unit}"


def row(entry: Entry, seconds: dict[str, float]) -> str:
    baseline = PLAIN[entry.kind]
    start = f"| {entry.name} | {entry.unit} | {baseline.name} |"
    if not entry.is_installed:
        return f"{start} not installed: `pip install --no-deps {entry.package}` | | | - | |"
    taken, theirs = seconds[key(entry)], seconds[key(baseline)]
    verdict = "" if entry.limit is None else "ok" if taken <= entry.limit * theirs else "**missed**"
    return f"{start} {taken * 1e3:.1f} | {theirs * 1e3:.1f} | {taken / theirs:.2f} | {entry.limit or '-'} | {verdict} |"


def versions() -> str:
    peers = sorted({entry.package for entry in TABLE if entry.package and entry.is_installed})
    return ", ".join([f"torch {torch.__version__}", *(f"{name} {metadata.version(name)}" for name in peers)])


def main() -> None:
    load = os.getloadavg()[0]
    seconds = measure([*PLAIN.values(), *(entry for entry in TABLE if entry.is_installed)])
    size = sum(torch.Size(shape).numel() for shape in SHAPES) / 1e6
    lines = [
        "# Rotational optimizers: the cost of a step",
        "",
        f"`python benchmarks/rotational.py`: median of {ROUNDS} alternating steps, {size:.1f} M parameters, 1 thread.",
        f"Python {platform.python_version()}, {versions()}, {platform.machine()}, {os.cpu_count()} cores.",
        f"Load of the machine at the beginning: {load:.1f}"
        + (" (**busy: take these numbers as rough**)." if load > BUSY else "."),
        "",
        "AdamP and SGDP are the nearest that other packages have: they take the radial part out of a step, row by row",
        "where the gradient is orthogonal to the weights (here always), and leave angle and norm as they come.",
        "",
        "| optimizer | unit | against | ms | baseline | ratio | limit | |",
        "|---|---|---|---|---|---|---|---|",
        *(row(entry, seconds) for entry in TABLE),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    publish(Path(__file__).with_suffix(".md"), text)


if __name__ == "__main__":
    main()
