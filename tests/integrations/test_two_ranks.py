"""Two processes train together: both measure, one logs, and every step is logged once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from tests.helpers.logged import assert_logged, expected

from equilibria.records import read_record

pytestmark = [
    pytest.mark.slow,  # starting the processes is
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

SECONDS = 240  # for everything; the work itself takes a few


def train_together(kind, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.two_ranks", kind, str(folder), str(rank)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    end, said = time.monotonic() + SECONDS, []
    try:
        for process in processes:
            said.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return said


@pytest.mark.parametrize("kind", ["plain", "lightning", "transformers"])
def test_every_step_is_logged_once(kind, tmp_path):
    from tests.integrations.test_tensorboard import SINGLE, read

    said = train_together(kind, tmp_path)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [{"steps": 5, "world": 2}] * 2  # both measure
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1
    run = read_record(tmp_path / "run")
    assert run.samples()["step"].to_pylist() == [step for step in range(5) for _ in range(3)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]
    found = {tag: values for tag, values in read(tmp_path / "tensorboard").items() if tag.startswith("equilibria/")}
    assert_logged(found, expected(run.samples()), rel=SINGLE)
    assert ["equilibria: " in each for each in said] == [kind != "plain", False]
