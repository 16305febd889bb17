"""Experiments for the tests of the machinery; the processes of a pool or a cluster import this module."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equilibria.lab.harness import registry
from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Experiment, Outcome
from equilibria.lab.harness.figures import panels


@dataclass(frozen=True)
class Config:
    """``log``: a folder in which every start of a task leaves a file; "" for none."""

    count: int = 6
    seed: int = 3
    expected: float = 0.0
    log: str = ""
    slow: float = 0.0
    fails: str = ""


def tasks(config):
    return {f"draw-{index}": index for index in range(config.count)}


def run_task(config, index):
    if config.log:
        mark = Path(config.log) / f"{index}-{os.getpid()}-{time.monotonic_ns()}"
        mark.touch()
    if config.fails == f"raise {index}":
        raise KeyError("no such draw")
    if config.fails == f"die {index}":
        os._exit(9)
    if config.fails == f"interrupt {index}":
        raise KeyboardInterrupt
    time.sleep(config.slow)
    return {"values": np.random.default_rng([config.seed, index]).standard_normal(50)}


def collect(config, found):
    values = np.concatenate([arrays["values"] for arrays in found.values()])
    claim = Source("", "ours").says("the mean").near(config.expected, values.mean(), absolute=0.5)
    return Outcome([claim], {"mean": values.mean(), "keys": list(found), "count": values.size})


def draw(config, found):
    figure, (axes,) = panels(1, 1, width=1.0, height=1.0)
    axes.plot(found["draw-0"]["values"])
    return {"figure": figure}


def replace_registry(monkeypatch, experiments):
    """Put these experiments, by id, in place of the registry's; changes of the dictionary count."""
    monkeypatch.setattr(registry, "MODULES", experiments)
    monkeypatch.setattr(registry, "load", lambda name: experiments[name])


def experiment(name: str = "small", **changes) -> Experiment[Config]:
    config = replace(Config(), **changes)
    return Experiment(name, "Draws", "ours", {"smoke": config, "desk": config}, (tasks, run_task, collect, draw))
