"""Processes that train together over gloo, started and waited for by one test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def run_two_ranks(module: str, *arguments: object, seconds: float) -> list[str]:
    """Run ``python -m module arguments`` as rank 0 and 1 and return what each printed; `seconds` is for both."""
    return run_ranks(2, module, *arguments, seconds=seconds)


def run_ranks(ranks: int, module: str, *arguments: object, seconds: float) -> list[str]:
    """Run ``python -m module arguments`` so many times and return what each printed; `seconds` is for all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end, outputs = time.monotonic() + seconds, []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    return outputs
