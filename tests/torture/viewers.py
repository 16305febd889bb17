"""Attacks on the server: many live viewers, slow readers, silent sockets, nonsense, while a run grows and breaks."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from equilibria.records import RecordWriter
from tests.torture import Trials

_VIEWERS = 200
_PATHS = (
    "/",
    "/runs",
    "/run/1",
    "/run/1/view",
    "/run/2/view",
    "/compare",
    "/compare/view?run=1",
    "/plan/view?lr=0.1&wd=5e-4&steps=1000",
)
_NONSENSE = (
    b"",
    b"G",
    b"GET ",
    b"\x00" * 50,
    b"GET / HTTP/1.1\r\n",
    b"POST / HTTP/9\r\n\r\n",
    b"GET /run/" + b"9" * 5000 + b" HTTP/1.1\r\n\r\n",
    b"\xff" * 20_000,
)


def viewers(random: random.Random, folder: Path) -> Trials:
    """A server with live viewers and hostile clients: every honest request is answered, none with status 500."""
    with _server(folder) as address, _growing(folder / "runs"), contextlib.ExitStack() as stack:
        streams = [_raw(address, b"GET /run/1/events HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(_VIEWERS)]
        for stream in streams:
            stack.callback(stream.close)
        while True:
            hostile = _raw(address, random.choice(_NONSENSE))
            stack.callback(hostile.close)
            if random.random() < 0.5:
                hostile.close()
            if random.random() < 0.1:  # a reader that asks for much and takes nothing
                stack.callback(_raw(address, b"GET /run/1/view HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20).close)
            yield _answered(address, random.choice(_PATHS))


def _answered(address: tuple[str, int], path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=60) as response:
            return "" if response.status == 200 else f"status {response.status} for {path}"
    except urllib.error.HTTPError as error:
        return "" if error.code < 500 else f"status {error.code} for {path}"
    except OSError as error:
        return f"no answer to {path}: {error}"


def _raw(address: tuple[str, int], data: bytes) -> socket.socket:
    client = socket.create_connection(address, timeout=30)
    with contextlib.suppress(OSError):
        client.sendall(data)
    return client


@contextlib.contextmanager
def _server(folder: Path):
    (folder / "runs").mkdir()
    command = [sys.executable, "-m", "equilibria", "serve", str(folder / "runs"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        address = re.search(r"http://([^:]+):(\d+)/", process.stdout.readline())
        yield address[1], int(address[2])
        assert process.poll() is None, "the server has ended"
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        process.kill()


@contextlib.contextmanager
def _growing(runs: Path):
    """Two runs: one grows, the other becomes damaged, vanishes and comes back."""
    stopped = threading.Event()

    def grow() -> None:
        writer = RecordWriter(runs / "grows", metadata={"params": []}, flush_seconds=0.1)
        for step in range(10_000_000):
            if stopped.is_set():
                break
            values = {"angle": np.full(2, 0.01), "norm": np.full(2, 1.0), "lr": np.full(2, 0.1)}
            writer.append({"step": [step, step], "param": ["a", "b"], **values})
            if step % 50 == 0:
                _disturb(runs / "breaks", step)
            time.sleep(0.01)
        writer.close()

    thread = threading.Thread(target=grow, daemon=True)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _disturb(run: Path, step: int) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.json").write_bytes(os.urandom(step % 300))
    (run / "samples-000.arrows").write_bytes(os.urandom(step % 5000))
    if step % 200 == 150:
        for file in run.iterdir():
            file.unlink()
