"""Tasks that keep something in their folders; the processes of a pool import this module."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equilibria.lab.harness.task import device, progress_reporter, scratch


@dataclass(frozen=True)
class Config:
    """``fail_once``: a file; while it is not there, task 1 makes it and fails. ``slow``: seconds that task 1 waits.

    ``device_to``: a file in which the tasks note where they are to train.
    """

    fail_once: str = ""
    slow: float = 0.0
    seed: int = 3
    expected: float = 0.0
    device_to: str = ""


def tasks(config):
    return {f"draw-{index}": index for index in range(3)}


def run_task(config, index):
    if config.device_to:
        Path(config.device_to).write_text(device())
    if index == 1:
        steps = scratch() / "steps"
        begun = steps.read_text() if steps.exists() else "0"
        steps.write_text("3")
        progress_reporter(4)(3)
        time.sleep(config.slow)
        if config.fail_once:
            failed = Path(config.fail_once)
            first = not failed.exists()
            failed.write_text(begun)
            if first:
                raise RuntimeError("not yet")
    return {"values": np.random.default_rng([config.seed, index]).standard_normal(50)}
