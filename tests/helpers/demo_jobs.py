"""Jobs for the tests of processes; a new process imports this module to find them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def count(upto, progress):
    for step in range(1, upto + 1):
        progress(step)
    return upto, os.getpid()


def fail(progress):
    progress(1)
    raise KeyError("no such digit")


def die(progress):
    progress(1)
    os._exit(9)


def hang(folder, progress):
    """Works without end; tells its process id in a file."""
    (Path(folder) / f"{os.getpid()}.pid").touch()
    while True:
        progress(1)
        time.sleep(0.01)


def overlap(folder, name, progress):
    """When it started and when it ended."""
    start = time.monotonic()
    time.sleep(0.3)
    return start, time.monotonic()
