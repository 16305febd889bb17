"""What watching costs on this machine: a small transformer's matrices trained with and without it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equilibria._version import __version__
from equilibria.monitor.monitor import Monitor
from equilibria.tensors.inner_products import kernels_for

_WARM_UP, _ROUNDS = 3, 5
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1),
}
_NUMBERS = {"SGD, momentum": 3, "AdamW": 4}  # that a sample reads or writes per parameter when every step is sampled


@dataclass(frozen=True)
class BenchRow:
    """One optimizer.

    Attributes:
        optimizer: its name.
        step: seconds of a step without watching, median of the rounds.
        overhead_auto: time of the steps with every="auto" over that without watching in the same round, minus 1: least,
            median and largest of the rounds; of N steps after the first N of a run, when samples are more frequent than
            later.
        overhead_every_step: the same with every=1.
        sample: seconds inside the hooks of a sampled step, the device's work included.
        rate: bytes that a sample reads and writes, per second.
        kernels: launches of a sampled step, of whatever kernels; None in main memory, where there are none.
    """

    optimizer: str
    step: float
    overhead_auto: tuple[float, float, float]
    overhead_every_step: tuple[float, float, float]
    sample: float
    rate: float
    kernels: int | None


@dataclass(frozen=True)
class Bench:
    """What watching costs on a machine.

    Attributes:
        machine: versions and device, by name.
        parameters: in the watched tensors.
        tensors: how many of them there are.
        tokens: in a batch.
        steps: in every round.
        copy_rate: bytes per second, read and written, of a plain copy of as many numbers.
        rows: one for each optimizer.
    """

    machine: dict[str, str]
    parameters: int
    tensors: int
    tokens: int
    steps: int
    copy_rate: float
    rows: tuple[BenchRow, ...]

    def __str__(self) -> str:
        lines = [
            *(f"{name}: {value}" for name, value in self.machine.items()),
            f"watched: {self.parameters:,} parameters in {self.tensors} tensors, float32; {self.tokens} tokens a batch",
            f"overheads: median [least, largest] of {_ROUNDS} rounds of {self.steps} steps, the median only where all "
            "have one sign (more steps scatter less); those of every=auto follow "
            f"{self.steps} steps at the start of a run, where samples are more frequent than later",
            f"plain copy: {self.copy_rate / 1e9:.3g} GB/s read and written",
            "",
            "| optimizer | step, ms | every=auto | every=1 | sample, ms | launches | GB/s | of a plain copy |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            cells = (
                row.optimizer,
                f"{1e3 * row.step:.3g}",
                *map(_overhead, (row.overhead_auto, row.overhead_every_step)),
                f"{1e3 * row.sample:.3g}",
                "-" if row.kernels is None else row.kernels,
                f"{row.rate / 1e9:.3g}",
                f"{row.rate / self.copy_rate:.0%}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)


def _overhead(rounds: tuple[float, float, float]) -> str:
    """The median of the rounds with their ends, or only these where rounds disagree about its sign."""
    least, median, largest = rounds
    shown = "below the scatter" if least <= 0 <= largest else f"{median:+.2%}"
    return f"{shown} [{least:+.2%}, {largest:+.2%}]"


def bench(device: torch.device, *, width: int, layers: int, tokens: int, steps: int) -> Bench:
    """Measure; see `BenchRow`.

    Args:
        device: where to train.
        width: of the matrices: every layer has four of width x width and two of width x 4 width.
        layers: how many there are.
        tokens: in a batch.
        steps: in every round of every way of watching.
    """
    machine = _machine(device)  # the load is that of others
    trainings = {name: _Training(make, device, width, layers, tokens) for name, make in _OPTIMIZERS.items()}
    rows = tuple(_row(name, training, steps) for name, training in trainings.items())
    weights = next(iter(trainings.values())).weights
    numbers = torch.randn(sum(weight.numel() for weight in weights), device=device)
    to = torch.empty_like(numbers)
    seconds = statistics.median(_seconds(device, lambda: to.copy_(numbers)) for _ in range(4 * _ROUNDS))
    copy_rate = 8 * numbers.numel() / seconds
    return Bench(machine, numbers.numel(), len(weights), tokens, steps, copy_rate, rows)


class _Training:
    """Matrices with LayerNorm and ReLU between them, under one optimizer."""

    def __init__(self, make: Any, device: torch.device, width: int, layers: int, tokens: int) -> None:
        torch.manual_seed(0)
        sizes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
        blocks = [
            nn.Sequential(nn.LayerNorm(before), nn.Linear(before, after, bias=False), nn.ReLU())
            for _ in range(layers)
            for before, after in sizes
        ]
        self.device, self.model = device, nn.Sequential(*blocks).to(device)
        self.weights = [param for param in self.model.parameters() if param.ndim == 2]
        self.optimizer = make(self.model.parameters())
        self._inputs = torch.randn(tokens, width, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        """Of a step, with all that waits on the device."""

        def take_steps() -> None:
            for _ in range(steps):
                self.step()

        return _seconds(self.device, take_steps) / steps


def _row(name: str, training: _Training, steps: int) -> BenchRow:
    """Rounds of each way of watching take turns, so that all of them see the machine alike."""
    ways: dict[Any, list[float]] = {None: [], "auto": [], 1: []}
    for every in ways:  # warm-up, in which kernels are compiled
        with _watched(training, every):
            training.seconds(_WARM_UP)
    for _ in range(_ROUNDS):
        for every, spent in ways.items():
            with _watched(training, every):
                training.seconds(steps if every == "auto" else _WARM_UP)
                spent.append(training.seconds(steps))
    unwatched = ways[None]
    auto, always = (_spread([x / y - 1 for x, y in zip(ways[every], unwatched, strict=True)]) for every in ("auto", 1))
    sample, kernels = _sample(training)
    size = 4 * _NUMBERS[name] * sum(weight.numel() for weight in training.weights)
    return BenchRow(name, statistics.median(unwatched), auto, always, sample, size / sample, kernels)


def _spread(ratios: list[float]) -> tuple[float, float, float]:
    return min(ratios), statistics.median(ratios), max(ratios)


@contextmanager
def _watched(training: _Training, every: Any) -> Iterator[None]:
    if every is None:
        yield
        return
    with Monitor(training.model, training.optimizer, every=every) as monitor:
        yield
        if monitor.failure is not None:
            raise RuntimeError(monitor.failure)


def _sample(training: _Training) -> tuple[float, int | None]:
    """Seconds inside the hooks of a sampled step, and the kernels in it: medians."""
    spent, launched = [], []
    with _watched(training, 1):
        training.seconds(_WARM_UP)
        hooks = training.optimizer._optimizer_step_pre_hooks, training.optimizer._optimizer_step_post_hooks
        seconds: list[float] = []
        for of_step in hooks:
            of_step.update({key: _timed(hook, training.device, seconds) for key, hook in of_step.items()})
        for _ in range(4 * _ROUNDS):
            seconds.clear()
            training.step()
            spent.append(sum(seconds))
    if training.device.type == "cuda":
        with _watched(training, 1):
            training.seconds(_WARM_UP)
            counts: list[int] = []
            for of_step in hooks:
                of_step.update({key: _profiled(hook, training.device, counts) for key, hook in of_step.items()})
            for _ in range(4):
                counts.clear()
                training.step()
                launched.append(sum(counts))
    return statistics.median(spent), int(max(launched)) if launched else None


def _timed(hook: Callable[..., None], device: torch.device, seconds: list[float]) -> Callable[..., None]:
    return lambda *args: seconds.append(_seconds(device, lambda: hook(*args)))


def _profiled(hook: Callable[..., None], device: torch.device, counts: list[int]) -> Callable[..., None]:
    """The hook, counting the kernels that run on the device in it; copies are none."""

    def run(*args: Any) -> None:
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            hook(*args)
            torch.cuda.synchronize(device)
        on_device = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
        counts.append(sum(not event.name.startswith("Mem") for event in on_device))

    return run


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    _finish(device)
    begin = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _machine(device: torch.device) -> dict[str, str]:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    in_use = "triton" if kernels_for(device) is not None else "torch"
    return {
        "equilibria": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "load": f"{os.getloadavg()[0]:.2g} of {os.cpu_count()} cores" if hasattr(os, "getloadavg") else "unknown",
        "products formed by": in_use if device.type != "cpu" else "numba" if _has_numba() else "torch",
    }


def _has_numba() -> bool:
    from equilibria.tensors.inner_products import _compiled_loops

    return _compiled_loops() is not None
