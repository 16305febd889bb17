"""Where a tracked run is recorded, read back, printed and drawn; and what a kill leaves of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from tests.helpers.watched_worlds import make_net
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.cli import app
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.records import RecordWarning
from equilibria.records.tables import EDGE
from equilibria.views.run.sharpness import edge_stretches, sharpness_curves

BATCH = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


def make(*, decay=5e-3):
    net = make_net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)


def train(net, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(net(BATCH[0]), BATCH[1]).backward()
        optimizer.step()


def track(net, optimizer, **settings):
    return eq.SharpnessTracker(eq.objective(net, functional.cross_entropy), optimizer, BATCH, every=5, **settings)


def test_the_record_is_what_the_tracker_saw(tmp_path):
    net, optimizer = make()
    with track(net, optimizer, log_dir=tmp_path / "run") as tracker:
        train(net, optimizer, 21)
    run = eq.read_run(tmp_path / "run")
    assert run.sharpness().to_pylist() == tracker.samples().to_pylist()
    assert run.metadata == {**tracker.metadata, "steps": 21}
    assert run.findings() == tracker.findings()
    assert run.notes == ()
    assert "sharpness queries" in repr(run)
    assert tracker.log_dir == tmp_path / "run"
    assert str(run.table()) == str(tracker.table())
    assert "threshold" in str(run.table())


def test_the_command_shows_a_recorded_tracker(tmp_path):
    net, optimizer = make()
    with track(net, optimizer, log_dir=tmp_path / "run"):
        train(net, optimizer, 11)
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0
    assert "R is sharpness over threshold" in shown.output
    listed = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"])
    assert json.loads(listed.output)["findings"][-1]["subject"] == eq.read_run(tmp_path / "run").findings()[-1].subject
    assert 'id="sharpness-chart"' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_with_the_monitor_of_a_watched_run_it_shares_directory_and_report(tmp_path):
    net, optimizer = make()
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        tracker = track(net, optimizer, monitor=monitor)
        train(net, optimizer, 12)
        tracker.close()
        train(net, optimizer, 1)  # the recording goes on
        assert set(tracker.findings()) <= set(monitor.findings())
        monitor.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="sharpness-chart"' in page and 'id="layers-heading"' in page
    run = eq.read_run(tmp_path / "run")
    assert run.sharpness().num_rows == tracker.samples().num_rows > 0
    assert run.samples(params=["0.weight"]).num_rows == 13
    assert tracker.log_dir == tmp_path / "run"


def test_a_page_without_a_tracker_has_no_chart_for_it(tmp_path):
    net, optimizer = make()
    with eq.watch(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        page = monitor.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<div id="sharpness-chart"' not in page
    assert '"sharpness":null' in page


def test_a_second_run_goes_beside_the_first(tmp_path):
    net, optimizer = make()
    with track(net, optimizer, log_dir=tmp_path / "run"):
        train(net, optimizer, 1)
    sentence = (
        r"holds a run already; this one is recorded into .*run-2\. To append to the first, load the tracker's state"
    )
    warned = pytest.warns(RecordWarning, match=sentence)
    with track(net, optimizer, log_dir=tmp_path / "run") as tracker, warned:
        train(net, optimizer, 1)
    assert tracker.log_dir == tmp_path / "run-2"


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("more", [0, 5], ids=["killed at once", "killed later"])
def test_a_kill_after_a_checkpoint_loses_no_query_from_before_it(tmp_path, more):
    """A copy of the directory is what a kill would leave; the run that goes on is the uninterrupted one."""
    net, optimizer = make()
    tracker = track(net, optimizer, log_dir=tmp_path / "run")
    train(net, optimizer, 12)
    saved = through_a_file([part.state_dict() for part in (net, optimizer, tracker)])
    if more:
        train(net, optimizer, more)
        tracker.flush()
    killed = shutil.copytree(tmp_path / "run", tmp_path / "killed" / "run")
    assert eq.read_run(killed).sharpness()["step"].to_pylist() == [0, 5, 10, 15][: 4 if more else 3]
    train(net, optimizer, 14 - more)
    tracker.close()

    net, optimizer = make()
    with track(net, optimizer, log_dir=killed) as resumed:
        for part, state in zip((net, optimizer, resumed), saved, strict=True):
            part.load_state_dict(state)
        assert (resumed.step, resumed.state, resumed.log_dir) == (12, tracker.state, killed)
        train(net, optimizer, 14)
    run, whole = eq.read_run(killed).sharpness(), tracker.samples()
    assert run["step"].to_pylist() == whole["step"].to_pylist() == [0, 5, 10, 15, 20, 25]
    assert run["state"].to_pylist() == whole["state"].to_pylist()
    assert run["sharpness"].to_pylist() == pytest.approx(whole["sharpness"].to_pylist(), rel=2e-2)
    assert [path.name for path in killed.parent.iterdir()] == ["run"]


def test_a_checkpoint_hands_over_the_queries_so_far(tmp_path):
    """Without it they wait in memory for up to a second."""
    net, optimizer = make()
    with track(net, optimizer, log_dir=tmp_path / "run") as tracker:
        train(net, optimizer, 12)
        record = tracker.state_dict()["record"]
        on_disk = eq.read_run(tmp_path / "run")
        assert on_disk.sharpness()["step"].to_pylist() == [0, 5, 10]
        assert record["id"] == on_disk.id and "failure" not in record


def test_beside_a_resumed_monitor_the_tracker_goes_on_in_its_record(tmp_path):
    net, optimizer = make()
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        tracker = track(net, optimizer, monitor=monitor)
        train(net, optimizer, 12)
        saved = through_a_file([part.state_dict() for part in (net, optimizer, monitor, tracker)])
        tracker.close()
    net, optimizer = make()
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        tracker = track(net, optimizer, monitor=monitor)
        for part, state in zip((net, optimizer, monitor, tracker), saved, strict=True):
            part.load_state_dict(state)
        train(net, optimizer, 9)
        tracker.close()
    run = eq.read_run(tmp_path / "run")
    assert run.sharpness()["step"].to_pylist() == [0, 5, 10, 15, 20]
    assert run.samples()["step"].to_pylist()[-1] == 20
    assert run.notes == ()


def test_the_state_of_something_else_is_refused():
    net, optimizer = make()
    tracker = track(net, optimizer)
    before = tracker.state_dict()
    for state in ({}, None, optimizer.state_dict(), {**before, "params": ["other"]}):
        with pytest.raises(EquilibriaError, match="state of") as raised:
            tracker.load_state_dict(state)
        assert raised.value.argument == "state"
    assert tracker.state_dict() == before
    tracker.close()


def test_bad_places_are_refused_and_leave_no_hook(tmp_path):
    net, optimizer = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(EquilibriaError, match="is a file"):
        track(net, optimizer, log_dir=tmp_path / "file")
    with pytest.raises(EquilibriaError, match="got monitor of type Linear"):
        track(net, optimizer, monitor=nn.Linear(1, 1))
    with eq.watch(net, optimizer) as monitor, pytest.raises(EquilibriaError, match="got log_dir and monitor"):
        track(net, optimizer, monitor=monitor, log_dir=tmp_path / "run")
    assert not optimizer._optimizer_step_pre_hooks


SCRIPT = """
import sys, time
import torch
from torch.nn import functional
import equilibria as eq

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
batch = torch.randn(32, 6), torch.arange(32) % 3
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
tracker = eq.SharpnessTracker(eq.objective(net, functional.cross_entropy), optimizer, batch, every=2,
                              log_dir=sys.argv[1])
for step in range(100_000):
    optimizer.zero_grad()
    functional.cross_entropy(net(batch[0]), batch[1]).backward()
    optimizer.step()
    if step == 40:
        time.sleep(2)  # twice as long as a row waits
        print(tracker.samples().num_rows, flush=True)
"""


@pytest.mark.slow
def test_a_kill_loses_only_what_was_not_flushed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    promised = int(process.stdout.readline())
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    table = eq.read_run(tmp_path / "run").sharpness()
    assert table.num_rows >= promised == 21
    steps = table["step"].to_pylist()
    assert steps == list(range(0, 2 * len(steps), 2))
    assert table["sharpness"].null_count == 0


def test_stretches_at_the_edge():
    states = ["stable", EDGE, EDGE, "stable", EDGE]
    table = pa.table({"step": [0, 20, 40, 60, 80], "state": states})
    assert edge_stretches(table) == [[20, 60], [80, 80]]


def test_why_tracking_stopped_is_in_the_record(tmp_path):
    net, optimizer = make()
    monitor = eq.watch(net, optimizer, every=1, log_dir=tmp_path / "both")
    alone = track(net, optimizer, log_dir=tmp_path / "alone")
    shared = track(net, optimizer, monitor=monitor)
    train(net, optimizer, 2)
    net[0].weight.requires_grad_(False)
    with pytest.warns(WatchWarning, match="sharpness tracking has stopped"):
        train(net, optimizer, 5)
    for watcher in (alone, shared, monitor):
        watcher.close()
    for name in ("alone", "both"):
        run = eq.read_run(tmp_path / name)
        assert run.metadata["sharpness"]["stopped"]["step"] == 5
        shown = CliRunner().invoke(app, ["report", str(tmp_path / name)])
        assert "! tracking stopped at step 5: EquilibriaError: got parameter" in shown.output
        page = run.report(tmp_path / "page.html").read_text(encoding="utf-8")
        assert "Tracking stopped at step 5" in page
    assert repr(alone).startswith("<SharpnessTracker: 6 steps, 1 query; ")


def test_the_directory_of_a_watched_run_is_shared_by_monitor(tmp_path):
    net, optimizer = make()
    refused = pytest.raises(EquilibriaError, match=r"this one; close that run, .*by monitor=monitor")
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run"), refused:
        track(net, optimizer, log_dir=tmp_path / "run")


def test_adam_is_named_as_preconditioned_everywhere(tmp_path):
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with track(net, optimizer) as tracker:
        train(net, optimizer, 7)
    assert str(tracker.table()).split()[0] == "preconditioned"  # above "sharpness"
    page = tracker.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "preconditioned sharpness, and R = sharpness" in page
    assert "what the edge adds" not in page.split("<script")[0] and "flatter minima" not in page.split("<script")[0]


def test_before_the_edge_every_step_is_drawn_as_it_is():
    numbers = {name: [2.0, 2000.0, 500.0] for name in ("sharpness", "threshold", "ratio", "loss")}
    levels = {"loss_predicted": pa.array([None, 1.0, 1.0], pa.float64())}
    drawn = sharpness_curves(pa.table({"step": [0, 1, 2], **levels, **numbers, "state": ["stable", "diverging", EDGE]}))
    assert drawn["loss"] == [2.0, 2000.0, 500.0]
    assert drawn["loss_predicted"] == [None, None, 3.0]  # above the lowest seen, at the edge alone


def test_of_consecutive_steps_the_mean_is_drawn():
    numbers = {name: [1.0, 2.0, 4.0, 8.0] for name in ("sharpness", "threshold", "ratio", "loss")}
    table = pa.table(
        {
            "step": [0, 20, 21, 40],
            "loss_predicted": pa.array([None] * 4, pa.float64()),
            **numbers,
            "state": ["stable", EDGE, EDGE, EDGE],
        }
    )
    drawn = sharpness_curves(table)
    assert drawn["step"] == [0, 20, 40]
    assert drawn["sharpness"] == [1.0, 3.0, 8.0]
    assert drawn["loss_predicted"] == [None, None, None]
    assert drawn["edge"] == [[20, 40]]
