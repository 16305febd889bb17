"""Where a watched run is recorded, and what happens when that goes wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from tests.helpers.watched_worlds import column, make_net, same_bits, train

import equilibria as eq
import equilibria.watching._recording as recording_module
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWarning, RecordWriter, read_record
from equilibria.records.tables import SAMPLE_FIELDS


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)


def watched(place, **more):
    net = make_net()
    optimizer = sgd(net)
    return net, optimizer, eq.watch(net, optimizer, every=1, log_dir=place, **more)


def test_the_record_is_what_the_monitor_saw(tmp_path):
    net, optimizer, monitor = watched(str(tmp_path / "deep" / "run"), steps_per_epoch=5)
    with monitor:
        train(net, optimizer, 50)
        seen = monitor.samples()
    run = read_record(tmp_path / "deep" / "run")
    assert run.metadata == {**monitor.metadata, "steps": 50}
    recorded = run.samples().select(SAMPLE_FIELDS.names)
    assert [str(row) for row in recorded.to_pylist()] == [str(row) for row in seen.to_pylist()]
    assert monitor.log_dir == tmp_path / "deep" / "run"


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, optimizer, monitor = watched(None)
    train(net, optimizer, 3)
    monitor.close()
    assert monitor.log_dir is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_goes_beside_the_first_with_a_warning(tmp_path):
    for number in (1, 2, 3):
        net, optimizer, monitor = watched(tmp_path / "run")
        place = tmp_path / ("run" if number == 1 else f"run-{number}")
        assert monitor.log_dir == place
        if number == 1:
            train(net, optimizer, number)
        else:
            with pytest.warns(
                RecordWarning, match=f"holds a run already; this one is recorded into {place}. To append"
            ):
                train(net, optimizer, number)
        monitor.close()
        assert monitor.log_dir == place
        assert read_record(place).samples().num_rows == 3 * number


def test_a_run_without_a_single_step_leaves_nothing_beside(tmp_path):
    watched(tmp_path / "run")[2].close()
    watched(tmp_path / "run")[2].close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_runs_started_at_the_same_time_find_different_places(tmp_path, monkeypatch):
    watched(tmp_path / "run")[2].close()
    plain = recording_module._next_free

    def overtaken(directory):
        free = plain(directory)
        if free.name == "run-2":  # another process takes it between the look and the leap
            RecordWriter(free, metadata={}).close()
        return free

    monkeypatch.setattr(recording_module, "_next_free", overtaken)
    net, optimizer, monitor = watched(tmp_path / "run")
    with pytest.warns(RecordWarning, match="recorded into .*run-3"):
        train(net, optimizer, 2)
    monitor.close()
    assert read_record(tmp_path / "run-3").samples().num_rows == 6


def test_a_resumed_run_is_appended_to(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 4)
    saved = net.state_dict(), optimizer.state_dict(), monitor.state_dict()
    train(net, optimizer, 2)  # lost: the run is resumed from before
    monitor.close()
    net, optimizer, monitor = watched(tmp_path / "run")
    for part, state in zip((net, optimizer, monitor), saved, strict=True):
        part.load_state_dict(state)
    assert monitor.log_dir == tmp_path / "run"
    train(net, optimizer, 3, seed=7)
    monitor.close()
    run = read_record(tmp_path / "run")
    assert len(run.sessions) == 2
    assert run.samples(params=["0.weight"])["step"].to_pylist() == list(range(7))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_another_run_appends_to_neither(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "mine")
    train(net, optimizer, 2)
    mine = monitor.state_dict()
    monitor.close()
    for directory in ("a", "a"):  # the second goes beside the first, which is another run
        net, optimizer, monitor = watched(tmp_path / directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)
            train(net, optimizer, 2)
        second = monitor.state_dict()
        monitor.close()
    net, optimizer, monitor = watched(tmp_path / "a")
    monitor.load_state_dict(second)
    assert monitor.log_dir == tmp_path / "a-2"  # its own, although "a" was asked for
    train(net, optimizer, 1)
    monitor.close()
    for state, whose in ((mine, "is of the run in .*mine"), ({**mine, "record": {}}, "of a run that was not recorded")):
        net, optimizer, monitor = watched(tmp_path / "a")
        monitor.load_state_dict(state)
        with pytest.warns(RecordWarning, match=f"a holds a run already; .*recorded into .*a-.*{whose}"):
            train(net, optimizer, 1)
        monitor.close()
    steps = {path.name: read_record(path).samples(params=["0.weight"]).num_rows for path in tmp_path.iterdir()}
    assert steps == {"mine": 2, "a": 2, "a-2": 3, "a-3": 1, "a-4": 1}


def test_a_directory_in_use_is_refused_at_once(tmp_path):
    _, _, first = watched(tmp_path / "run")
    net = make_net()
    optimizer = sgd(net)
    with pytest.raises(EquilibriaError, match=f"is being recorded by process {os.getpid()}.*close that run, or choose"):
        eq.watch(net, optimizer, log_dir=tmp_path / "run")
    assert not optimizer._optimizer_step_pre_hooks
    first.close()
    with eq.watch(net, optimizer, log_dir=tmp_path / "run"):
        pass


def test_places_that_cannot_be_written_are_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    net = make_net()
    optimizer = sgd(net)
    for name, message in {
        "file": "file",
        "file/below": "file/below",
        "full": r"holds other files \(notes.txt\) and no run",
    }.items():
        with pytest.raises(EquilibriaError, match=message):
            eq.watch(net, optimizer, log_dir=tmp_path / name)
    watched(tmp_path / "run")[2].close()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(recording_module, "RunLock", refuse)
    with pytest.raises(EquilibriaError, match=r"cannot record into .*run: Permission denied"):
        eq.watch(net, optimizer, log_dir=tmp_path / "run")
    assert not optimizer._optimizer_step_pre_hooks


def test_a_disk_that_fails_in_the_middle_is_one_warning_and_training_goes_on(tmp_path):
    plain = make_net()
    train(plain, sgd(plain), 60)
    net, optimizer, monitor = watched(tmp_path / "run")

    def fail(number):
        if number == 20:
            monitor.flush()
            monitor._recording.flush()
            file = monitor._recording._writer._segments["samples"]._file

            class Full:
                def write(self, _):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                def __getattr__(self, name):
                    return getattr(file, name)

            monitor._recording._writer._segments["samples"]._file = Full()
        if number == 40:
            monitor._recording.flush()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(net, optimizer, 60, after_step=fail)
        monitor.close()
    assert [each.category for each in caught] == [RecordWarning]
    assert "has stopped: No space left on device; training goes on" in str(caught[0].message)
    assert same_bits(net, plain)
    assert column(monitor, "step", "0.weight") == list(range(60))  # watching itself goes on
    assert read_record(tmp_path / "run").samples(params=["0.weight"])["step"].to_pylist() == list(range(21))


def test_a_directory_removed_in_the_middle(tmp_path):
    import shutil

    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 2)
    monitor.flush()
    monitor._recording.flush()
    shutil.rmtree(tmp_path / "run")
    train(net, optimizer, 2)
    with pytest.warns(RecordWarning, match="has stopped: the file was removed"):
        monitor.close()
    assert monitor.samples().num_rows == 12


TRAINING = """
import sys, time
import torch, equilibria as eq
from tests.helpers.watched_worlds import make_net, train
torch.set_num_threads(1)
net = make_net()
optimizer = torch.optim.AdamW(net.parameters())
eq.watch(net, optimizer, log_dir=sys.argv[1], every=1)

def tell(number):
    print(number, time.monotonic(), flush=True)
    time.sleep(0.002)

train(net, optimizer, 100_000, after_step=tell)
"""


def test_a_kill_loses_no_more_than_the_last_seconds(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    taken = {}
    try:
        begun = None
        for line in process.stdout:
            number, when = line.split()
            taken[int(number)] = float(when)
            begun = begun or float(when)
            if float(when) - begun > 3.0:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    killed = time.monotonic()
    steps = read_record(tmp_path / "run").samples(params=["0.weight"])["step"].to_pylist()
    assert steps == list(range(len(steps)))
    assert killed - taken[steps[-1]] < 3.0  # one second in each of two buffers, and a busy machine


def test_a_log_dir_that_is_no_path_is_refused():
    net = make_net()
    with pytest.raises(EquilibriaError, match="got log_dir=3; expected the path of a directory"):
        eq.watch(net, torch.optim.SGD(net.parameters(), lr=0.1), log_dir=3)
