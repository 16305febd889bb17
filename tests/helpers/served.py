"""Runs on disk, and a server for them in another process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from equilibria.records import RecordWriter
from equilibria.records._reader import without_dictionaries
from tests.helpers.report_helpers import run

TRAINING = """
import sys, time
import torch
import equilibria as eq
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
with eq.watch(model, optimizer, log_dir=sys.argv[1], every=1):
    for step in range(100_000):
        optimizer.zero_grad()
        inputs = torch.randn(32, 8)
        torch.nn.functional.cross_entropy(model(inputs), torch.randint(0, 2, (32,))).backward()
        optimizer.step()
        time.sleep(0.005)
"""


def columns(samples: pa.Table) -> dict[str, Any]:
    """The samples as `RecordWriter.append` takes them."""
    plain = without_dictionaries(samples)
    return {name: plain[name].to_pylist() for name in plain.column_names if name != "step"} | {
        "step": plain["step"].to_numpy()
    }


def write_run(directory: Path, count: int = 3, *, steps: int = 3000, every: int = 10, **more: Any) -> pa.Table:
    """Write a finished run; returns its samples."""
    samples, metadata = run(count, steps=steps, every=every, **more)
    with RecordWriter(directory, metadata=metadata) as writer:
        writer.append(columns(samples))
    return samples


def write_hostile_run(directory: Path) -> None:
    """Write a finished run whose layers, optimizer and metadata have names that a page could take for HTML."""
    samples, metadata = run(3, steps=3000, every=10, outlier=1)
    evil = directory.name.replace("_", "/")
    names = {layer["name"]: f"{layer['name']}{evil}" for layer in metadata["params"]}
    text = json.dumps(metadata)
    for name, longer in names.items():
        text = text.replace(json.dumps(name), json.dumps(longer))
    hostile = {**json.loads(text), evil: evil, "every": evil}
    with RecordWriter(directory, metadata=hostile) as writer:
        writer.append(columns(samples) | {"param": [names[name] for name in columns(samples)["param"]]})


def write_damaged(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "run.json").write_text('{"format": "1.1"')


@contextmanager
def serving(*roots: Path, results: Path | None = None) -> Iterator[str]:
    """The address of a server in another process, which is stopped as by Ctrl-C."""
    more = [] if results is None else ["--results", str(results)]
    command = [sys.executable, "-m", "equilibria", "serve", *map(str, roots), "--port", "0", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        address = re.search(r"http://[^ ]+/", process.stdout.readline())
        assert address is not None
        yield address[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


@contextmanager
def training(directory: Path) -> Iterator[None]:
    """Train and watch a real network in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def events(text: bytes) -> list[tuple[str, Any]]:
    """The events of a stream: kinds and data."""
    received = []
    for part in text.decode().split("\n\n"):
        if part.startswith("event: "):
            kind, data = part.split("\n")
            received.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return received


def wait_for(condition: Any, *, seconds: float = 60) -> Any:
    """Wait until a condition returns a true value, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"the condition was not true within {seconds} s")
