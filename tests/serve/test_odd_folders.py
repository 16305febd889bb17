"""Folders that no writer leaves behind: each has a state and a message, and other runs are unaffected."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from dataclasses import replace

import pytest

pytest.importorskip("starlette", reason='the server needs pip install "equilibria[serve]"')
pytest.importorskip("httpx", reason="the test client of starlette needs httpx")

from starlette.testclient import TestClient
from tests.helpers.served import columns, events, write_run

from equilibria.cli.serve import build_app
from equilibria.records import RecordWriter
from equilibria.records._lock import process_start
from equilibria.records._manifest import read_manifest, write_manifest
from equilibria.records._segment import segment_paths
from equilibria.serve import hub as hubs
from equilibria.serve.catalogue import Catalogue
from equilibria.serve.follow import DAMAGED, DELETED, FINISHED, INTERRUPTED, TRAINING, FollowedRun


def change_session(directory, **changes):
    """Rewrite the last session in ``run.json``, with a checksum that fits."""
    manifest = read_manifest(directory)
    *before, last = manifest.sessions
    write_manifest(directory, replace(manifest, sessions=(*before, replace(last, **changes))))


def without_end(directory, lock):
    """A run whose writer is gone, with other text in its lock file."""
    write_run(directory, 1, steps=200)
    change_session(directory, ended=None)
    (directory / "writer.lock").write_text(lock)


def odd_lock(words):
    return lambda directory: without_end(directory, words.format(host=socket.gethostname()))


def nested_lists(directory):
    directory.mkdir()
    (directory / "run.json").write_text("[" * 100_000)


def pipe_for_description(directory):
    directory.mkdir()
    os.mkfifo(directory / "run.json")


def pipe_for_lock(directory):
    without_end(directory, "")
    (directory / "writer.lock").unlink()
    os.mkfifo(directory / "writer.lock")


def lost_description(directory):
    write_run(directory, 1, steps=200)
    (directory / "run.json").unlink()


def bytes_for_description(directory):
    write_run(directory, 1, steps=200)
    (directory / "run.json").write_bytes(b'{"format": "1.2", "sessions": [\xff\xfe')


def linked_samples(directory):
    write_run(directory, 1, steps=200)
    (directory / "samples-000.arrows").rename(directory.parent / f"{directory.name}-elsewhere")
    (directory / "samples-000.arrows").symlink_to(directory.parent / f"{directory.name}-elsewhere")


LOCKS = ("abc vm", "99999999999999999999 {host}", "-1 {host}", "0 {host}", "1", "\0")
ODD = {
    **{f"lock {words!r}": (odd_lock(words), INTERRUPTED) for words in LOCKS},
    "lists in lists": (nested_lists, DAMAGED),
    "run.json a pipe": (pipe_for_description, DAMAGED),
    "run.json lost": (lost_description, FINISHED),
    "run.json no text": (bytes_for_description, FINISHED),
    "lock a pipe": (pipe_for_lock, INTERRUPTED),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_folder_has_a_state(tmp_path, kind):
    make, state = ODD[kind]
    make(tmp_path / "odd")
    followed = FollowedRun(tmp_path / "odd", name="odd")
    followed.look()
    assert followed.status.state == state
    assert (followed.status.message != "") == (state != INTERRUPTED)  # a description from the segments has one, too
    followed.read()
    followed.show()


def test_samples_behind_a_link_are_not_shown(tmp_path):
    linked_samples(tmp_path / "a")
    followed = FollowedRun(tmp_path / "a", name="a")
    followed.look()
    followed.read()
    assert (followed.status.state, followed.status.samples) == (DAMAGED, 0)
    assert followed.status.message == "samples-000.arrows is a link that leads out of the run"


def test_odd_folders_do_not_disturb_the_list_or_the_pages(tmp_path):
    for place, (make, _) in enumerate(ODD.values()):
        make(tmp_path / f"odd{place}")
    write_run(tmp_path / "good", 1, steps=200)
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        for _ in range(2):
            runs = {run["name"]: run for run in client.get("/runs").json()["runs"]}
            assert runs["good"]["state"] == "finished"
        for run in runs.values():
            assert client.get(f"/run/{run['id']}/view").status_code == 200
            assert client.get(f"/compare/view?run={run['id']}").status_code == 200


# ---- runs that are gone, and writers


def test_a_deleted_run_leaves_the_list_and_comes_back_with_its_number(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, 1, steps=200)
    catalogue = Catalogue([tmp_path])
    catalogue.scan()
    first = catalogue.loaded(1).show().number
    shutil.rmtree(tmp_path / "a")
    catalogue.scan()
    assert [run.name for run in catalogue.runs.values()] == ["b"]
    assert catalogue.known(1).status.state == DELETED
    write_run(tmp_path / "a", 1, steps=300)
    catalogue.scan()
    assert list(catalogue.runs) == [1, 2]
    again = catalogue.loaded(1)
    assert (again.status.state, again.status.samples) == (FINISHED, 30)
    assert again.show().number > first  # a browser that has the old view does not take it for the new one


def test_a_comparison_says_which_run_was_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs, "SCAN_SECONDS", 0)
    for name in "ab":
        write_run(tmp_path / name, 1, steps=200)
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        assert len(client.get("/compare/view?run=1&run=2").json()["runs"][0]["x"]) > 1
        shutil.rmtree(tmp_path / "a")
        assert [run["name"] for run in client.get("/runs").json()["runs"]] == ["b"]
        gone, there = client.get("/compare/view?run=1&run=2").json()["runs"]
        assert (gone["x"], gone["message"]) == ([], "deleted: Its folder is gone")
        assert len(there["x"]) > 1
        answer = client.get("/run/1")
        assert (answer.status_code, "The run a was deleted" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("pid", "lock", "started", "silent", "state"),
    [
        ("own", "own", "now", False, TRAINING),
        ("own", "own", "now", True, TRAINING),  # a long evaluation
        ("own", "own", "2001-01-01T00:00:00+00:00", True, INTERRUPTED),  # the number went to another process
        ("own", "parent", "now", False, INTERRUPTED),  # not the one that recorded
    ],
)
def test_only_the_process_that_records_counts_as_the_writer(tmp_path, pid, lock, started, silent, state):
    pids = {"own": os.getpid(), "parent": os.getppid()}
    without_end(tmp_path / "a", f"{pids[lock]} {socket.gethostname()}")
    change_session(tmp_path / "a", pid=pids[pid], **({} if started == "now" else {"started": started}))
    if silent:
        for path in segment_paths(tmp_path / "a").values():
            os.utime(path, (1e9, 1e9))
    if silent and process_start(os.getpid()) is None:
        pytest.skip("the system does not say when a process began")
    followed = FollowedRun(tmp_path / "a", name="a")
    followed.look()
    assert followed.status.state == state


def test_a_defect_in_one_run_leaves_the_others_their_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(hubs, "SCAN_SECONDS", 0.02)
    samples = write_run(tmp_path / "b", 1, steps=200)
    write_run(tmp_path / "a", 1, steps=200)
    look = FollowedRun.look

    def broken(run):
        if run.name == "a":
            raise RuntimeError("a defect")
        return look(run)

    async def watch():
        hub = hubs.Hub(Catalogue([tmp_path]))
        await hub.view(2)
        monkeypatch.setattr(FollowedRun, "look", broken)
        stream = hub.run_events(2)
        received = events(await anext(stream))
        with RecordWriter(tmp_path / "b", metadata={}, resume=True) as writer:
            later = columns(samples)
            writer.append(later | {"step": later["step"] + 1000})
            writer.flush()
            while received[-1][1]["samples"] < 40:
                received += events(await anext(stream))
        states = {run["name"]: (run["state"], run["message"]) for run in hub.listing["runs"]}
        hub.close()
        return states

    states = asyncio.run(asyncio.wait_for(watch(), 60))
    assert states["a"] == ("damaged", "A defect")
