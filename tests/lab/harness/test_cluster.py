"""A real Dask cluster of two worker processes on this machine, one of which is killed at work."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.small_experiments import experiment
from tests.helpers.task_cases import Config, run_task, tasks

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import reproduce
from equilibria.lab.harness.task import ProgressPoll
from equilibria.lab.harness.workers import DaskCluster

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def two_workers():
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(**settings, silence_logs=50) as cluster:
        yield cluster


def starts(folder: Path) -> list[tuple[int, int]]:
    """Task and process of every start."""
    return [tuple(map(int, path.name.split("-")[:2])) for path in folder.iterdir()]


def test_a_worker_killed_at_work_costs_nothing_and_counts_nothing_twice(two_workers, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    small = experiment(count=10, slow=0.15, log=str(log))
    counts: list[int] = []
    killed: list[int] = []

    def kill_at_work(done: int, total: int) -> None:
        counts.append(done)
        if done == 3:
            busy = {pid for _, pid in starts(log)}
            killed.append(busy.pop())
            os.kill(killed[0], signal.SIGKILL)

    cluster = DaskCluster(two_workers.scheduler_address, timeout=20)
    try:
        (report,) = reproduce([small], results=tmp_path / "there", workers=cluster, progress=kill_at_work)
    finally:
        cluster.close()
    assert report.failure == "" and killed
    assert counts == list(range(11))  # each task was counted once
    assert {task for task, _ in starts(log)} == set(range(10))
    assert {pid for _, pid in starts(log)} > set(killed)  # others went on
    assert report.result.numbers["count"] == 500
    (here,) = reproduce([experiment(count=10)], results=tmp_path / "here")
    assert report.result.numbers == here.result.numbers
    assert report.result.claims == here.result.claims


def test_a_worker_has_the_folder_of_its_task_and_reports_its_progress(two_workers, tmp_path, monkeypatch):
    monkeypatch.setitem(ProgressPoll.__init__.__kwdefaults__, "seconds", 0.05)
    device = tmp_path / "device"
    config = Config(slow=0.5, device_to=str(device))
    small = replace(experiment(), scales={"desk": config}, functions=(tasks, run_task, *experiment().functions[2:]))
    shares: list[float] = []
    cluster = DaskCluster(two_workers.scheduler_address, timeout=20)
    try:
        (report,) = reproduce([small], results=tmp_path / "r", workers=cluster, device="cuda", running=shares.append)
    finally:
        cluster.close()
    assert report.failure == "" and 0.75 in shares and device.read_text() == "cuda"
    assert list((tmp_path / "r" / "small" / "desk").glob("scratch-*")) == []


def test_a_task_that_raises_is_reported_with_its_traceback(two_workers, tmp_path):
    cluster = DaskCluster(two_workers.scheduler_address, timeout=20)
    try:
        (report,) = reproduce([experiment(count=3, fails="raise 1")], results=tmp_path / "r", workers=cluster)
    finally:
        cluster.close()
    assert "KeyError: 'no such draw'" in report.failure


def test_without_a_scheduler_the_message_says_what_to_type():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        typed = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EquilibriaError, match=r"no Dask scheduler answers within 0\.5 s.*tcp://host:8786"):
        DaskCluster(typed, timeout=0.5)


def test_a_cluster_without_workers_raises():
    settings = {"n_workers": 0, "processes": True, "dashboard_address": ":0", "silence_logs": 50}
    refused = pytest.raises(EquilibriaError, match="which has no worker; start one: dask worker")
    with distributed.LocalCluster(**settings) as empty, refused:
        DaskCluster(empty.scheduler_address, timeout=0.5)
