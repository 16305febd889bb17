"""Attacks on trainings: any network, any optimizer, any interval; many watches one after another; a million steps."""

from __future__ import annotations

import gc
import random
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equilibria as eq
from tests.torture import Trials

_STEPS_PER_TRIAL = 2000
_FLAT_BYTES = 30e6  # that Python and torch take and give back whatever is watched


def bit_identity(random: random.Random, folder: Path) -> Trials:
    """Random small networks trained twice, unwatched and watched: equal to the last bit."""
    number = 0
    while True:
        number += 1
        seed, optimizer, watch = random.getrandbits(32), *_settings(random)
        if random.random() < 0.3:
            watch["log_dir"] = folder / str(number)
        with warnings.catch_warnings(action="ignore"):
            plain, watched = _trained(seed, optimizer, None), _trained(seed, optimizer, watch)
        same = all(torch.equal(plain[name], watched[name]) for name in plain)
        yield "" if same else f"training changed: seed {seed}, {optimizer}, {watch}"


def _settings(random: random.Random) -> tuple[tuple[str, dict[str, Any]], dict[str, Any]]:
    lr, decay = 10 ** random.uniform(-4, -0.5), random.choice((0.0, 10 ** random.uniform(-5, -1)))
    momentum = random.choice((0.0, 0.9))
    optimizers = {
        "SGD": {"momentum": momentum, "nesterov": momentum > 0 and random.random() < 0.5},
        "AdamW": {"foreach": random.random() < 0.5, "amsgrad": random.random() < 0.2},
        "Adam": {"betas": (0.8, 0.99)},
        "RMSprop": {"momentum": momentum},
        "NAdam": {},
        "Adagrad": {},
    }
    name = random.choice(list(optimizers))
    watch = {"every": random.choice((1, 2, 7, "auto")), "granularity": random.choice(("tensor", "row"))}
    return (name, {"lr": lr, "weight_decay": decay, **optimizers[name]}), watch


def _trained(seed: int, optimizer: tuple[str, dict[str, Any]], watch: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    width = chosen.randint(2, 9)
    norm = chosen.choice((nn.BatchNorm1d, nn.LayerNorm, nn.Identity))(width)
    model = nn.Sequential(nn.Linear(6, width, bias=chosen.random() < 0.5), norm, nn.ReLU(), nn.Linear(width, 3))
    name, settings = optimizer
    trained = getattr(torch.optim, name)(model.parameters(), **settings)
    monitor = None if watch is None else eq.watch(model, trained, **watch)
    for step in range(20):
        trained.zero_grad(set_to_none=chosen.random() < 0.5)
        nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,))).backward()
        if chosen.random() < 0.2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if chosen.random() < 0.1:
            trained.param_groups[0]["lr"] *= chosen.choice((0.1, 2.0))
        trained.step()
        if monitor is not None and step % 9 == 8:
            monitor.table(), monitor.findings(), monitor.state_dict()
    if monitor is not None:
        monitor.close()
    return model.state_dict()


def cycles(random: random.Random, folder: Path) -> Trials:
    """Watch, train, close, again and again: memory, descriptors and threads stay."""
    model, inputs = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)), torch.randn(8, 6)
    baseline: tuple[float, int] | None = None
    number = 0
    while True:
        number += 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        monitor = eq.watch(model, optimizer, log_dir=folder / str(number), every=1)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        monitor.close()
        del monitor, optimizer
        gc.collect()
        present = _resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
        if number == 20:  # what is imported and compiled at first use is there by now
            baseline = present
        yield _grown(baseline, present, f"after {number} cycles")


def long_run(random: random.Random, folder: Path) -> Trials:
    """One watched training of many steps, recorded: memory and descriptors stay."""
    torch.manual_seed(random.getrandbits(32))
    model, gradient = nn.Linear(4, 4, bias=False), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.01)
    monitor = eq.watch(model, optimizer, log_dir=folder / "run", every="auto")
    baseline: tuple[float, int] | None = None
    number = 0
    try:
        while True:
            number += 1
            for _ in range(_STEPS_PER_TRIAL):
                model.weight.grad = gradient
                optimizer.step()
            if number == 10:
                monitor.flush()  # opens the files of all tables
            present = _resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
            if number == 10:
                baseline = present
            yield _grown(baseline, present, f"after {number * _STEPS_PER_TRIAL:,} steps")
    finally:
        monitor.close()


def _resident_bytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _grown(baseline: tuple[float, int] | None, present: tuple[float, int], when: str) -> str:
    if baseline is None:
        return ""
    more, descriptors = present[0] - baseline[0], present[1] - baseline[1]
    if more > _FLAT_BYTES or descriptors > 0:
        return f"{more / 1e6:.0f} MB and {descriptors} descriptors more {when}"
    return ""
