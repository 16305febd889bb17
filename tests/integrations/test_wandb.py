"""What W&B's file of an offline run holds after a watched run.

wandb no longer has a reader of its own for it in Python: the records are taken out of the file here (it is a log in the
format of LevelDB), and understood by wandb's own protocol classes.
"""

from __future__ import annotations

import json
import struct
import time

import pyarrow.compute as pc
import pytest
import wandb
from tests.helpers.logged import assert_logged, expected, sgd, snippet
from tests.helpers.watched_worlds import make_net, train
from wandb.proto import wandb_internal_pb2

import equilibria as eq
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.findings import Finding
from equilibria.integrations.wandb import WandbAlerts, WandbSink

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
SECONDS = 60
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(data):
    """The records of a file, whole: a record that does not fit into a block is in several pieces."""
    at, piece = FILE_HEADER, b""
    while at + RECORD_HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < RECORD_HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + RECORD_HEADER])
        if at + RECORD_HEADER + length > len(data):
            return  # still being written
        piece += data[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(piece)
            piece = b""


def all_records(path):
    """Those of a finished run: W&B's own process may write the last of them a moment after `finish` has returned."""
    end = time.monotonic() + SECONDS
    while True:
        found = list(records(path.read_bytes()))
        if any(each.HasField("exit") for each in found):
            return found
        assert time.monotonic() < end, "the run is not finished"
        time.sleep(0.02)


class Logged:
    """What is in the file of an offline run."""

    def __init__(self, folder):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        everything = all_records(path)
        self.history = [
            {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
            for each in everything
            if each.HasField("history")
        ]
        self.metrics = {
            each.metric.name or each.metric.glob_name: each.metric for each in everything if each.HasField("metric")
        }

    def by_tag(self):
        found = {}
        for row in self.history:
            for tag, value in row.items():
                if tag.startswith("equilibria/") and tag != "equilibria/step":
                    found.setdefault(tag, {})[row["equilibria/step"]] = value
        return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    begun = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(x_disable_stats=True))
    yield begun
    begun.finish()


def watched(*sinks, steps, each_step=None):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=sinks) as monitor:
        train(net, optimizer, steps, after_step=each_step)
    return monitor


def test_samples_join_your_rows_and_your_steps_stay_yours(run, tmp_path):
    def log_twice(step):
        """As people do who pass their own step: the second call is for the same one."""
        run.log({"loss": float(step)}, step=10 * step)
        run.log({"accuracy": 1.0}, step=10 * step)

    monitor = watched(WandbSink(run), steps=6, each_step=log_twice)
    run.finish()
    logged = Logged(tmp_path)
    mine = {row["_step"]: (row["loss"], row["accuracy"]) for row in logged.history if "loss" in row}
    assert mine == {10 * step: (float(step), 1.0) for step in range(6)}  # nothing dropped
    # Whether other optimizers follow is known from the second sample on: the first is sent with it, and overwritten.
    samples = monitor.samples()
    assert_logged(logged.by_tag(), expected(samples.filter(pc.field("step") > 0)))
    assert logged.metrics["equilibria/*"].step_metric == "equilibria/step"
    beside = {row["loss"]: row.get("equilibria/step") for row in logged.history if "loss" in row}
    assert beside == {0.0: 1, 1.0: 2, 2.0: 3, 3.0: 4, 4.0: 5, 5.0: None}  # each joins the row of the call before it


def test_without_steps_of_your_own_a_sample_joins_the_row_of_your_next_call(run, tmp_path):
    watched(WandbSink(run), steps=4, each_step=lambda step: run.log({"loss": float(step)}))
    run.finish()
    beside = {row["loss"]: row.get("equilibria/step") for row in Logged(tmp_path).history}
    assert beside == {0.0: None, 1.0: 1, 2.0: 2, 3.0: 3}


def test_every_sample_has_a_row_of_its_own_if_asked_for(run, tmp_path):
    monitor = watched(WandbSink(commit=True), steps=5)  # the active run
    run.finish()
    assert_logged(Logged(tmp_path).by_tag(), expected(monitor.samples()))


def test_samples_that_were_overwritten_are_told(run, tmp_path):
    with pytest.warns(WatchWarning, match=r"W&B keeps at most 1 of 5 samples: .* WandbSink\(commit=True\) keeps all"):
        watched(WandbSink(run), steps=5)
    run.finish()
    assert {tuple(steps) for steps in Logged(tmp_path).by_tag().values()} == {(4,)}


def test_a_run_that_was_finished_too_early_breaks_nothing(run):
    def finish(step):
        if step == 2:
            run.finish()

    with pytest.warns(WatchWarning, match="WandbSink takes no more samples"):
        monitor = watched(WandbSink(run, commit=True), steps=5, each_step=finish)
    assert monitor.samples().num_rows == 15


def test_without_a_run_there_is_a_warning():
    with pytest.warns(WatchWarning, match=r"no active W&B run; expected one: call wandb.init\(\) before training"):
        watched(WandbSink(), steps=3)


def test_something_else_is_refused():
    with pytest.raises(EquilibriaError, match=r"got run of type str; expected the result of wandb.init\(\)"):
        WandbSink("my run")


def test_the_lines_on_the_page_run(run, tmp_path):
    net = make_net()
    optimizer = sgd(net)
    world = {"model": net, "optimizer": optimizer, "run": run}
    exec(snippet("Weights & Biases"), world)
    with world["monitor"]:
        train(net, optimizer, 1)
    run.finish()
    assert_logged(Logged(tmp_path).by_tag(), expected(world["monitor"].samples()))


class Alerted:
    """A run that remembers its alerts."""

    def __init__(self):
        self.alerts = []

    def alert(self, **more):
        self.alerts.append(more)


def test_a_warning_becomes_an_alert_and_a_note_only_if_asked_for():
    warning, note = (Finding(severity, "s" * 70, "evidence", "remedy", "") for severity in ("warning", "note"))
    run = Alerted()
    for alerts in (WandbAlerts(run), WandbAlerts(run, notes=True)):
        alerts(warning)
        alerts(note)
    levels = [alert["level"] for alert in run.alerts]
    assert levels == [wandb.AlertLevel.WARN, wandb.AlertLevel.WARN, wandb.AlertLevel.INFO]
    assert all(len(alert["title"]) < 64 for alert in run.alerts)
    assert run.alerts[0]["text"] == str(warning)
    with pytest.raises(EquilibriaError, match=r"expected the result of wandb\.init"):
        WandbAlerts("run")


def test_an_alert_of_a_real_run_is_sent(run):
    WandbAlerts()(Finding("warning", "the gradient is not finite", "at step 3", "look at the batch", ""))


def test_logged_numbers_are_not_sent_a_second_time(run, tmp_path):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=[WandbSink(run, commit=True)]) as monitor:
        train(net, optimizer, 4, after_step=lambda step: monitor.log(loss=step))
    run.finish()
    assert not any("loss" in tag for row in Logged(tmp_path).history for tag in row)
