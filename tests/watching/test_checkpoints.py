"""A record is as durable as the checkpoint that refers to it: real kills right after real checkpoints."""

from __future__ import annotations

import atexit
import copy
import errno
import os
import random
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
import equilibria.records._at_exit as at_exit
from equilibria import errors
from equilibria.records import RecordWarning, RecordWriter, read_record
from equilibria.records._metrics import metric_series
from equilibria.serve.follow import FollowedRun
from equilibria.watching._recording import Recording

# Resumes from its checkpoint, trains, saves a checkpoint and is killed a few steps later. One process of its own forks
# the trainings: many kills, one import.
TRAININGS = """
import os, signal, sys
import torch
from tests.helpers.watched_worlds import make_net, train
import equilibria as eq
import equilibria.tensors._product_loops, equilibria.watching._watch  # once, for all children

torch.set_num_threads(1)

def work(place, every, steps, more):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    monitor = eq.watch(net, optimizer, every=every, log_dir=place + "/run")
    if os.path.exists(place + "/checkpoint"):
        saved = torch.load(place + "/checkpoint", weights_only=False)
        for part, state in zip((net, optimizer, monitor), saved, strict=True):
            part.load_state_dict(state)
    train(net, optimizer, steps, seed=monitor.step, after_step=lambda _: monitor.log(taken=monitor.step))
    torch.save([part.state_dict() for part in (net, optimizer, monitor)], place + "/checkpoint.tmp")
    os.replace(place + "/checkpoint.tmp", place + "/checkpoint")
    train(net, optimizer, more, after_step=lambda _: monitor.log(taken=-1.0))
    os.kill(os.getpid(), signal.SIGKILL)

for line in sys.stdin:
    place, every, steps, more = line.split()
    child = os.fork()
    if child == 0:
        work(place, int(every), int(steps), int(more))
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), flush=True)
"""


@pytest.mark.parametrize("kills", [8, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [1, 3])
def test_kills_after_checkpoints_lose_no_row_from_before_them(tmp_path, every, kills):
    chance, steps = random.Random(every), 0
    command = [sys.executable, "-c", TRAININGS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as trainings:
        for _ in range(kills):
            count = chance.randint(1, 9)
            trainings.stdin.write(f"{tmp_path} {every} {count} {chance.randint(0, 4)}\n")
            assert int(trainings.stdout.readline()) == signal.SIGKILL
            steps += count
        trainings.stdin.close()
    run = read_record(tmp_path / "run")
    recorded = run.samples(["step"], ["0.weight"])["step"].to_pylist()
    before = [step for step in recorded if step < steps]
    assert run.samples()["step"].to_pylist() == [step for step in recorded for _ in range(3)]
    assert [note for note in run.notes if "went back" not in note and "incomplete" not in note] == []
    assert run.verify().holes == ()
    if every == 1:
        assert before == list(range(steps))
    else:
        assert max(np.diff([*before, steps])) <= every
    logged, taken = metric_series(run.metrics())["taken"]
    assert logged[:steps].tolist() == list(range(steps))
    assert taken[:steps].tolist() == list(range(1, steps + 1))


def watched(place):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    return net, optimizer, eq.watch(net, optimizer, every=1, log_dir=place)


def test_a_state_is_on_disk_before_it_is_returned(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 5)
    state = monitor.state_dict()
    assert read_record(tmp_path / "run").samples(["step"])["step"].to_pylist()[-1] == 4
    assert state["record"]["after"] == 4
    assert "failure" not in state["record"]
    monitor.close()
    assert monitor.state_dict()["record"] == state["record"]  # also of a run that is closed


@pytest.mark.parametrize("action", ["default", "error"])
def test_a_record_that_cannot_be_written_is_noted_in_the_state(tmp_path, monkeypatch, action):
    printed: list[str] = []
    monkeypatch.setattr(errors, "_print_warning", printed.append)
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 2)
    monitor.flush()
    segment = monitor._recording._writer._segments["samples"]

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment, "_drain", fail)
    train(net, optimizer, 3)
    with warnings.catch_warnings(record=action == "default"):
        warnings.simplefilter(action, RecordWarning)
        state = monitor.state_dict()
        assert state["record"]["failure"] == "No space left on device"
        monitor.close()
    assert len(printed) == (action == "error")
    again_net, again_optimizer, again = watched(tmp_path / "run")  # the disk has room again
    for part, saved in zip(
        (again_net, again_optimizer, again), (net.state_dict(), optimizer.state_dict(), state), strict=True
    ):
        part.load_state_dict(saved)
    train(again_net, again_optimizer, 2)
    again.close()
    run = read_record(tmp_path / "run")
    assert run.samples(["step"], ["0.weight"])["step"].to_pylist() == [0, 1, 5, 6]
    assert run.notes == ("samples-001.arrows: samples of steps 2 to 4, before it, were not written",)


def test_a_damaged_run_json_does_not_keep_a_checkpoint_from_its_record(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 2)
    state = monitor.state_dict()
    monitor.close()
    (tmp_path / "run" / "run.json").write_text("{")
    net, optimizer, monitor = watched(tmp_path / "run")
    monitor.load_state_dict(state)
    train(net, optimizer, 2)
    monitor.close()
    run = read_record(tmp_path / "run")
    assert run.samples(["step"], ["0.weight"])["step"].to_pylist() == [0, 1, 2, 3]
    assert run.notes == ()


def test_nothing_is_left_to_do_at_exit_once_runs_are_closed(tmp_path):
    before, already_open = atexit._ncallbacks(), len(at_exit._open)
    first, second = watched(tmp_path / "a")[2], watched(None)[2]
    assert len(at_exit._open) == already_open + 2
    first.close()
    second.close()
    RecordWriter(tmp_path / "b", metadata={}).close()
    assert len(at_exit._open) == already_open
    assert atexit._ncallbacks() == before  # atexit never frees a slot


class Falsifier:
    """A user's sink that changes what it gets, in every way."""

    def __init__(self):
        self.refused = 0

    def append(self, columns):
        attempts = [
            lambda: columns["norm"].__setitem__(0, -1.0),
            lambda: setattr(columns["norm"].flags, "writeable", True),
            lambda: columns["param"].__setitem__(0, "x"),
            lambda: columns["state"].__setitem__(0, "x"),
            lambda: columns.__setitem__("norm", np.zeros(3)),
            lambda: columns.pop("norm"),
            lambda: columns.clear(),
        ]
        for attempt in attempts:
            try:
                attempt()
            except (TypeError, ValueError, AttributeError):
                self.refused += 1

    def close(self):
        pass


def test_a_sink_can_falsify_neither_history_nor_record(tmp_path):
    falsifier = Falsifier()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run", sinks=[falsifier]) as monitor:
        train(net, optimizer, 4)
        honest = watched(None)
        train(honest[0], honest[1], 4)
        expected = honest[2].samples()
        assert monitor.samples().to_pylist() == expected.to_pylist()
    assert falsifier.refused == 7 * 4
    assert read_record(tmp_path / "run").samples().select(expected.column_names).to_pylist() == expected.to_pylist()


def test_a_recording_without_rows_has_no_state(tmp_path):
    recording = Recording(tmp_path / "a", describe=dict, count_steps=lambda: 0)
    assert recording.state_dict()["after"] is None
    recording.close()
    assert Recording(tmp_path / "a", describe=dict, count_steps=lambda: 0).state_dict() == {}


def test_a_resumed_run_shows_what_its_record_has(tmp_path):
    """It showed the samples and findings of its own session only, while read_run showed all."""

    def session(steps, state=None):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
        monitor = eq.watch(net, optimizer, log_dir=tmp_path / "run", every=1)
        if state is not None:
            monitor.load_state_dict(state)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(16, 6)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
        return monitor

    first = session(10)
    state = first.state_dict()
    first.close()
    resumed = session(0, state)
    assert resumed.samples()["step"].to_pylist() == first.samples()["step"].to_pylist()
    resumed.close()
    resumed = session(5, state)
    resumed.flush()
    record = eq.read_run(tmp_path / "run")
    for name in ("samples", "metrics"):
        ours, theirs = (sorted(map(str, getattr(run, name)().to_pylist())) for run in (resumed, record))
        assert ours == theirs
    assert sorted(set(resumed.samples()["step"].to_pylist())) == list(range(15))
    assert str(resumed.table()).splitlines()[0] == str(record.table()).splitlines()[0]
    resumed.close()
    assert [finding.subject for finding in resumed.findings()] == [
        f.subject for f in eq.read_run(record.path).findings()
    ]


def test_a_branch_that_was_given_up_is_left_out_however_rarely_the_next_one_is_sampled(tmp_path):
    """Its rows up to the first sample of the resumed run had stayed."""

    def session(every):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
        return net, optimizer, eq.watch(net, optimizer, log_dir=tmp_path / "run", every=every)

    net, optimizer, monitor = session(1)
    train(net, optimizer, 20, after_step=lambda _: monitor.log(loss=1.0))
    states = net.state_dict(), optimizer.state_dict(), monitor.state_dict()
    states = copy.deepcopy(states)
    train(net, optimizer, 15, after_step=lambda _: monitor.log(loss=1000.0))
    monitor.close()
    net, optimizer, monitor = session(8)
    for part, state in zip((net, optimizer, monitor), states, strict=True):
        part.load_state_dict(state)
    train(net, optimizer, 10, after_step=lambda _: monitor.log(loss=2.0))
    monitor.close()
    record = eq.read_run(tmp_path / "run")
    assert sorted(set(record.samples()["step"].to_pylist())) == [*range(20), 24]
    assert record.metrics()["value"].to_pylist() == [1.0] * 20 + [2.0] * 10
    assert any("the run went back to step 20 after them" in note for note in record.notes)
    followed = FollowedRun(tmp_path / "run", name="run")
    followed.look()
    followed.read()
    assert sorted(set(followed.snapshot().samples()["step"].to_pylist())) == [*range(20), 24]
    assert followed.metrics()["value"].to_pylist() == [1.0] * 20 + [2.0] * 10
