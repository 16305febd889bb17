"""Jobs in processes: results, progress, failures of every kind, and nothing left running."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers import demo_jobs

from equilibria.lab.processes import JobError, run_jobs


def silent(*_: object) -> None:
    """No progress."""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def pids(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def test_results_and_progress_come_back_by_name_in_order():
    told: list[tuple[str, int]] = []
    jobs = {"b": functools.partial(demo_jobs.count, 3), "a": functools.partial(demo_jobs.count, 2)}
    results = run_jobs(jobs, at_once=2, progress=lambda name, steps: told.append((name, steps)))
    assert [(name, upto) for name, (upto, _) in results.items()] == [("b", 3), ("a", 2)]
    assert len({os.getpid(), *(pid for _, pid in results.values())}) == 3
    assert [steps for name, steps in told if name == "b"] == [1, 2, 3]
    assert [steps for name, steps in told if name == "a"] == [1, 2]


def test_with_one_at_a_time_the_next_starts_when_the_one_before_has_ended(tmp_path):
    jobs = {name: functools.partial(demo_jobs.overlap, tmp_path, name) for name in "ab"}
    results = run_jobs(jobs, at_once=1, progress=silent)
    assert results["a"][1] <= results["b"][0]


def test_a_failure_is_raised_with_its_traceback_and_ends_the_other_job(tmp_path):
    jobs = {"good": functools.partial(demo_jobs.hang, tmp_path), "bad": demo_jobs.fail}
    with pytest.raises(JobError, match=r"(?s)bad: Traceback.*demo_jobs\.py.*KeyError: 'no such digit'"):
        run_jobs(jobs, at_once=2, progress=silent)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_process_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(JobError, match="bad: its process ended with exit code 9"):
        run_jobs({"bad": demo_jobs.die}, at_once=2, progress=silent)


def test_an_error_while_showing_progress_leaves_no_process_behind(tmp_path):
    def broken(*_: object) -> None:
        raise RuntimeError("terminal gone")

    with pytest.raises(RuntimeError, match="terminal gone"):
        run_jobs({"a": functools.partial(demo_jobs.hang, tmp_path)}, at_once=1, progress=broken)
    assert len(pids(tmp_path)) == 1
    assert not alive(pids(tmp_path)[0])


def start_script(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.interrupted", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives one to a command
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see whether a process is alive")
@pytest.mark.parametrize("when", ["at once", "when both work"])
def test_ctrl_c_ends_everything_without_a_traceback(tmp_path, when):
    script = start_script(tmp_path)
    if when == "when both work":
        assert until(lambda: len(pids(tmp_path)) == 2)
    else:
        assert until(lambda: children(script.pid))  # started, and still importing
    os.killpg(script.pid, signal.SIGINT)  # what a terminal does
    out, err = script.communicate(timeout=30)
    assert (out, err, script.returncode) == ("interrupted\n", "", 0)
    assert not any(alive(pid) for pid in pids(tmp_path))


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see whether a process is alive")
def test_children_of_a_killed_parent_end_by_themselves(tmp_path):
    script = start_script(tmp_path)
    assert until(lambda: len(pids(tmp_path)) == 2)
    script.kill()
    _, err = script.communicate(timeout=30)
    assert until(lambda: not any(alive(pid) for pid in pids(tmp_path)))
    assert "Traceback" not in err
