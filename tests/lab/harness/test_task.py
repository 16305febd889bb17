"""Services for a running task: a folder that is found again after a kill, progress, and a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.helpers.small_experiments import collect, draw, experiment
from tests.helpers.task_cases import Config, run_task, tasks

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import registry, reproduce
from equilibria.lab.harness.experiment import Experiment
from equilibria.lab.harness.task import (
    ProgressPoll,
    device,
    progress_file,
    progress_reporter,
    read_progress,
    scratch,
    task_context,
)
from equilibria.lab.harness.workers import Processes
from equilibria.records._lock import RunLock


def keeping(**settings) -> Experiment[Config]:
    """Its tasks note in their folders how far they are, and go on from there."""
    config = Config(**settings)
    return Experiment("keeping", "Keeps", "ours", {"desk": config}, (tasks, run_task, collect, draw))


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "results" / "keeping" / "desk"
    folder.mkdir(parents=True)
    return folder


def test_the_folder_is_made_when_it_is_asked_for_and_locked(place):
    wanted = place / "scratch-1" / "a"
    with task_context(wanted):
        assert not wanted.exists()
        assert scratch() == wanted == scratch()
        with pytest.raises(EquilibriaError, match="is being recorded"):
            RunLock(wanted)
    RunLock(wanted).release()


def test_a_second_worker_with_the_same_task_gets_a_folder_of_its_own(place):
    wanted = place / "scratch-1" / "a"
    with task_context(wanted):
        first = scratch()
        with task_context(wanted):
            second = scratch()
            (second / "mine").touch()
        assert second != first and not second.exists()


def test_where_there_are_no_results_nothing_is_left(tmp_path):
    with task_context(tmp_path / "elsewhere" / "desk" / "scratch-1" / "a"):
        found = scratch()
        assert found.is_dir()
        progress_reporter(10)(3)
    assert not found.exists() and list(tmp_path.iterdir()) == []


def test_outside_of_a_task_it_is_temporary():
    assert scratch().is_dir() and scratch() != scratch()
    progress_reporter(10)(3)


def test_the_device_is_that_of_the_workplace(place):
    assert device() == "cpu"
    with task_context(place / "scratch-1" / "a", device="cuda:1"):
        assert device() == "cuda:1"
    assert device() == "cpu"


@pytest.mark.parametrize("workers", [None, Processes(1)])
def test_the_device_reaches_the_tasks_and_changes_no_fingerprint(workers, tmp_path):
    shares = tmp_path / "shares"
    (first,) = reproduce([keeping(device_to=str(shares))], results=tmp_path / "a", workers=workers, device="cuda:1")
    assert shares.read_text() == "cuda:1"
    assert first.result.command == "equilibria reproduce keeping --scale desk --device cuda:1"
    (second,) = reproduce([keeping(device_to=str(shares))], results=tmp_path / "b", workers=workers)
    assert shares.read_text() == "cpu" and second.result.command == "equilibria reproduce keeping --scale desk"
    assert first.result.fingerprint == second.result.fingerprint
    (again,) = reproduce([keeping(device_to=str(shares))], results=tmp_path / "a", workers=workers)
    assert again.reused


_SMALL = {"eq-forecast", "eq-diffusion"}  # have loops of their own, on the CPU
_NETWORKS = sorted({name for name, each in registry.experiments().items() if each.kind == "networks"} - _SMALL)


@pytest.mark.parametrize("name", _NETWORKS)
def test_every_training_of_the_experiments_is_on_the_chosen_device(name, place, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(recipe, **options):
        assert recipe.device == "cuda"
        raise StoppedError

    monkeypatch.setattr("equilibria.lab.training.train", stop)
    found = registry.experiments()[name]
    config = found.config("smoke")
    with task_context(place / "scratch-1" / "a", device="cuda"), pytest.raises(StoppedError):
        found.run_task(config, next(iter(found.tasks(config).values())))


def test_progress_is_written_once_per_second_and_read_whole(place, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    wanted = place / "scratch-1" / "a"
    with task_context(wanted):
        report = progress_reporter(8)
        report(2)
        report(3)
        assert read_progress(progress_file(wanted)) == 0.25
        now[0] += 1.5
        report(4)
    assert read_progress(progress_file(wanted)) == 0.5
    assert [path.name for path in wanted.parent.iterdir()] == ["a.progress"]


@pytest.mark.parametrize("content", ["", "3", "three four", "1 0", "\x00"])
def test_progress_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "a.progress").write_text(content)
    assert read_progress(tmp_path / "a.progress") == 0


def test_shares_of_running_tasks_add_up(tmp_path):
    files = {name: tmp_path / name for name in "abc"}
    files["a"].write_text("1 4")
    files["b"].write_text("1 2")
    shares: list[float] = []
    with ProgressPoll(files, shares.append, seconds=0.01) as watched:
        while not shares:
            time.sleep(0.01)
        watched.finished("b")
        while shares[-1] != 0.25:
            time.sleep(0.01)
    assert set(shares) == {0.75, 0.25}


def test_a_task_that_failed_goes_on_from_its_folder_which_goes_when_it_is_done(tmp_path):
    results, small, workers = tmp_path / "results", keeping(fail_once=str(tmp_path / "failed")), Processes(1)
    (report,) = reproduce([small], results=results, workers=workers)
    assert "not yet" in report.failure
    (kept,) = (results / "keeping" / "desk").glob("scratch-*/draw-1")
    assert (kept / "steps").read_text() == "3"
    (report,) = reproduce([small], results=results, workers=workers)
    assert report.good and report.result.numbers["count"] == 150
    assert list((results / "keeping" / "desk").glob("scratch-*")) == []
    assert (tmp_path / "failed").read_text() == "3"  # where the second attempt began


@pytest.mark.slow
def test_a_kill_leaves_the_folder_as_it_was(tmp_path):
    """kill -9 to the whole group while a task is at work."""
    script = (
        "import sys; from tests.lab.harness.test_task import keeping; from equilibria.lab.harness import reproduce\n"
        "reproduce([keeping(slow=60.0)], results=sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "results")]
    process = subprocess.Popen(command, start_new_session=True)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("results/keeping/desk/scratch-*/draw-1/steps")) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (kept,) = tmp_path.glob("results/keeping/desk/scratch-*/draw-1/steps")
    assert kept.read_text() == "3"


def test_folders_of_other_settings_go(tmp_path):
    results = tmp_path / "results"
    reproduce([keeping(fail_once=str(tmp_path / "one"))], results=results)
    assert len(list((results / "keeping" / "desk").glob("scratch-*"))) == 1
    reproduce([keeping()], results=results)
    assert list((results / "keeping" / "desk").glob("scratch-*")) == []


def test_the_runner_reports_the_progress_of_running_tasks(tmp_path, monkeypatch):
    monkeypatch.setitem(ProgressPoll.__init__.__kwdefaults__, "seconds", 0.02)
    shares: list[float] = []
    reproduce([keeping(slow=0.2)], results=tmp_path / "results", running=shares.append)
    assert 0.75 in shares  # draw-1 says 3 of 4 and waits


# ---- what a machine lacks


@dataclass(frozen=True)
class Needy(Config):
    """Settings that need a file."""

    file: str = ""


def needs(config):
    if not Path(config.file).exists():
        raise EquilibriaError(f"{config.file} was not found")


def needy(path: Path) -> Experiment[Needy]:
    config = Needy(file=str(path))
    return Experiment("needy", "Needs", "ours", {"desk": config}, (tasks, run_task, collect, draw), needs=needs)


def test_what_lacks_its_data_is_left_out_and_the_others_run(tmp_path):
    results = tmp_path / "results"
    left, ran = reproduce([needy(tmp_path / "data"), experiment()], results=results)
    assert left.lacks == f"{tmp_path / 'data'} was not found" and left.result is None and left.good
    assert ran.result is not None and not (results / "needy").exists()


def test_a_result_that_is_there_needs_no_data(tmp_path):
    file = tmp_path / "data"
    file.touch()
    assert reproduce([needy(file)], results=tmp_path / "results")[0].lacks == ""
    file.unlink()
    (again,) = reproduce([needy(file)], results=tmp_path / "results")
    assert again.reused and again.lacks == ""


class Images:
    """Says what it is, as a data set does."""

    def __init__(self, contents):
        self.counts, self.digest = f"{len(contents)} images", contents


def read(config):
    return Images(Path(config.file).read_text())


def test_a_result_says_its_data_and_that_of_other_data_is_done_again(tmp_path):
    file = tmp_path / "data"
    file.write_text("abc")
    with_data = replace(needy(file), needs=read)
    results = tmp_path / "results"
    assert reproduce([with_data], results=results)[0].result.data == "3 images (abc)"
    (records,) = (results / "needy" / "desk").glob("records-*")
    assert reproduce([with_data], results=results)[0].reused
    file.write_text("abcd")
    again = reproduce([with_data], results=results)[0].result
    assert again.data == "4 images (abcd)" and not records.exists()
    assert "Data: 4 images (abcd)." in (results / "RESULTS.md").read_text()
