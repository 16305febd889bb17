"""Numbers that the training logs itself: what is taken, which step it belongs to, and what it costs."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.monitor import metrics as metrics_module
from equilibria.monitor.metrics import LONGEST_NAME, MOST_NAMES, MetricLog
from equilibria.records._metrics import KeptMetrics, metric_series


def watched(**more):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    return net, optimizer, eq.watch(net, optimizer, every=1, **more)


def rows(table):
    return [(row["step"], row["name"], row["value"]) for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1.5, 1.5),
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2.5]), 2.5),
        (torch.tensor(1.25), 1.25),
        (torch.tensor([[0.75]], dtype=torch.bfloat16), 0.75),
        (torch.tensor(4), 4.0),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (math.inf, math.inf),
    ],
)
def test_numbers_of_every_kind_are_taken(value, number):
    log = MetricLog()
    log.log({"loss": value}, taken=0)
    assert rows(log.table()) == [(0, "loss", number)]


def test_nan_is_a_number():
    log = MetricLog()
    log.log({"loss": math.nan}, taken=0)
    assert math.isnan(rows(log.table())[0][2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.1", "got loss='0.1'; expected one number"),
        (None, "got loss=None; expected one number"),
        (10**400, "expected one number"),
        (1j, "got loss=1j; expected one number"),
        (torch.ones(2, 3), r"got loss of shape \(2, 3\); expected one number: take its mean"),
        (np.ones(2), r"got loss of shape \(2,\); expected one number: take its mean"),
        ([1.0], r"got loss=\[1.0\]; expected one number"),
    ],
)
def test_anything_else_is_refused_and_nothing_of_the_call_is_taken(value, message):
    log = MetricLog()
    with pytest.raises(EquilibriaError, match=message) as error:
        log.log({"accuracy": 0.5, "loss": value}, taken=0)
    assert error.value.argument == "loss"
    assert log.table().num_rows == 0


@pytest.mark.parametrize("name", ["", "x" * (LONGEST_NAME + 1), "a\nb", "half \ud800"])
def test_names_have_to_be_short_and_printable(name):
    with pytest.raises(EquilibriaError, match="expected 1 to 100 printable characters"):
        MetricLog().log({name: 1.0}, taken=0)


def test_there_is_a_bound_on_the_number_of_names():
    log = MetricLog()
    log.log({f"metric {number}": 1.0 for number in range(MOST_NAMES)}, taken=0)
    with pytest.raises(EquilibriaError, match="after 100 others; expected at most 100 names"):
        log.log({"one more": 1.0}, taken=0)
    log.log({"metric 7": 2.0}, taken=1)
    assert log.table().num_rows == MOST_NAMES + 1


def test_the_loss_of_a_step_has_its_number_wherever_it_is_logged():
    net, optimizer, monitor = watched()
    with monitor:
        train(
            net,
            optimizer,
            12,
            before_step=lambda step: monitor.log(before=step, **({"rare_before": step} if step % 4 == 0 else {})),
            after_step=lambda step: monitor.log(after=step, **({"rare_after": step} if step % 4 == 3 else {})),
        )
    for name, (steps, values) in metric_series(monitor.metrics()).items():
        assert steps.tolist() == values.tolist(), name
    assert monitor.metrics().num_rows == 12 + 12 + 3 + 3


def test_several_numbers_of_one_step_are_all_kept():
    log = MetricLog()
    for value in (1.0, 2.0):
        log.log({"loss": value}, taken=0)
    log.log({"loss": 3.0}, taken=1)
    assert rows(log.table()) == [(0, "loss", 1.0), (0, "loss", 2.0), (1, "loss", 3.0)]


def test_a_step_can_be_named():
    log = MetricLog()
    log.log({"test accuracy": 0.9}, taken=40, step=30)
    assert rows(log.table()) == [(30, "test accuracy", 0.9)]
    with pytest.raises(EquilibriaError, match="got step=-1"):
        log.log({"test accuracy": 0.9}, taken=40, step=-1)


def test_a_number_for_an_earlier_step_leaves_the_later_ones():
    net, optimizer, monitor = watched()
    for step in range(10):
        train(net, optimizer, 1)
        monitor.log(loss=float(step))
    monitor.log(step=3, loss=30.0)
    assert monitor.metrics()["value"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 30.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


def test_a_step_beyond_64_bits_is_refused():
    *_, monitor = watched()
    with pytest.raises(EquilibriaError, match="expected a step below") as error:
        monitor.log(step=2**63, loss=1.0)
    assert error.value.argument == "step"


def test_training_is_not_changed_by_logging():
    weights = []
    for logs in (False, True):
        net, optimizer, monitor = watched()
        with monitor:
            train(
                net, optimizer, 5, after_step=lambda step, monitor=monitor, logs=logs: logs and monitor.log(loss=step)
            )
        weights.append(torch.cat([param.flatten() for param in net.parameters()]))
    assert torch.equal(*weights)


def test_numbers_on_a_device_are_copied_and_read_many_at_once(monkeypatch):
    class OnDevice(torch.Tensor):
        @property
        def device(self):
            return torch.device("meta")

    reads = []
    plain = metrics_module._read
    monkeypatch.setattr(metrics_module, "_read", lambda tensors: reads.append(len(tensors)) or plain(tensors))
    log = MetricLog()
    running = torch.tensor(0.0).as_subclass(OnDevice)
    for step in range(10):
        running += 1  # in place, as sums of losses are
        log.log({"loss": running, "lr": 0.1}, taken=step + 1)
    assert reads == []
    assert metric_series(log.table())["loss"][1].tolist() == list(range(1, 11))
    assert reads == [10]


def test_a_thread_leaves_numbers_on_devices_to_the_training():
    log, written = MetricLog(), []
    log.record(written.append, can_write=lambda: True)
    log.log({"a": 1.0}, taken=1)
    log._waiting.append((1, "b", torch.tensor(2.0)))
    log.log({"a": 3.0}, taken=2)
    assert log.settle(on_devices=False)
    assert written == [{"step": [0], "name": ["a"], "value": [1.0]}]
    assert not log.settle(on_devices=False)
    assert log.settle()
    assert written[1] == {"step": [1, 1], "name": ["b", "a"], "value": [2.0, 3.0]}


def test_memory_is_bounded_and_the_shorter_series_stay_whole():
    kept = KeptMetrics(most=1000)
    kept.add("rare", list(range(100)), [0.0] * 100)
    for step in range(5000):
        kept.add("loss", [step], [float(step)])
    assert len(kept) <= 1000
    assert kept.count == 5100
    series = metric_series(kept.table())
    steps, values = series["loss"]
    assert len(series["rare"][0]) == 100
    assert 400 < len(steps) <= 900
    assert steps.tolist() == values.tolist()
    assert set(np.diff(steps)) == {8}
    assert steps[0] == 0
    assert steps[-1] > 4990


def test_going_back_to_a_checkpoint_forgets_the_numbers_after_it():
    net, optimizer, monitor = watched()
    with monitor:
        train(net, optimizer, 3, before_step=lambda step: monitor.log(loss=step))
        state = monitor.state_dict()
        train(net, optimizer, 3, before_step=lambda step: monitor.log(loss=100 + step))
        monitor.load_state_dict(state)
        train(net, optimizer, 2, before_step=lambda step: monitor.log(loss=10 + step))
    assert rows(monitor.metrics()) == [(step, "loss", value) for step, value in enumerate([0.0, 1.0, 2.0, 10.0, 11.0])]


def test_after_close_numbers_are_kept_with_one_warning(tmp_path):
    net, optimizer, monitor = watched(log_dir=tmp_path / "run")
    train(net, optimizer, 2)
    monitor.close()
    with pytest.warns(WatchWarning, match="logged after close") as warned:
        monitor.log(accuracy=0.5)
        monitor.log(accuracy=0.6)
    assert len(warned) == 1
    assert monitor.metrics()["value"].to_pylist() == [0.5, 0.6]


def test_logging_a_float_costs_microseconds(tmp_path):
    _, _, monitor = watched(log_dir=tmp_path / "run")
    with monitor:
        best = math.inf
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(2000):
                monitor.log(loss=0.5)
            best = min(best, (time.perf_counter() - begun) / 2000)
    assert best < 20e-6  # about 3 µs on an idle machine
