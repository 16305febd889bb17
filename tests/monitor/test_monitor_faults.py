"""An error while watching is told once and never reaches the training."""

from __future__ import annotations

import contextvars
import gc
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.tracked_worlds import completion
from tests.helpers.watched_worlds import column, make_net, same_bits, train

import equilibria as eq
import equilibria.monitor.hooks as hooks_module
import equilibria.monitor.monitor as monitor_module
from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.monitor.monitor import Monitor
from equilibria.monitor.sample_rows import SampleBuilder

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}


def plainly_trained(steps):
    net = make_net()
    train(net, torch.optim.SGD(net.parameters(), **SGD), steps)
    return net


def fail(*_, **__):
    raise ZeroDivisionError("oops")


PLACES = {
    "before the step": (hooks_module.OptimizerHooks, "_look_before"),
    "reading": (hooks_module.OptimizerHooks, "_read_before"),
    "after the step": (hooks_module.OptimizerHooks, "_look_after"),
    "a law": (hooks_module, "rule_of_group"),
    "taking": (monitor_module, "_in_main_memory"),
    "building": (SampleBuilder, "build"),
    "keeping": (monitor_module.History, "append"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("others", [False, True])
def test_an_error_inside_is_one_warning_and_training_goes_on(monkeypatch, place, others):
    """Also where there are further hooks: taking ours off while torch walks through them would raise."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    calls = []
    if others:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    monitor = Monitor(net, optimizer, every=1)
    if others:
        optimizer.register_step_pre_hook(lambda *_: calls.append("later pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("later post"))

    def spoil(number):
        if number == 3:
            monkeypatch.setattr(*place, fail)

    with pytest.warns(WatchWarning, match="watching has stopped: ZeroDivisionError: oops; training goes on") as caught:
        train(net, optimizer, 30, before_step=spoil)
    monkeypatch.undo()
    assert len([each for each in caught if each.category is WatchWarning]) == 1
    assert monitor.failure == "ZeroDivisionError: oops"
    assert same_bits(net, plainly_trained(30))
    assert len(calls) == (120 if others else 0)
    if place[1] in ("_look_before", "_read_before", "_look_after", "rule_of_group"):
        assert column(monitor, "step", "0.weight") == [0, 1, 2]  # what was measured before is there
    assert monitor.findings() is not None
    monitor.close()
    assert len(optimizer._optimizer_step_post_hooks) == (2 if others else 0)


def test_an_error_while_looking_at_the_samples_is_a_warning_too(monkeypatch):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    monkeypatch.setattr(
        monitor_module, "_in_main_memory", lambda _products: False
    )  # so that there is something to do yet
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        monkeypatch.setattr(SampleBuilder, "build", fail)
        with pytest.warns(WatchWarning, match="oops"):
            assert monitor.samples().num_rows == 0


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through_and_watching_can_go_on(monkeypatch, interrupt):
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())

    def stop(*_, **__):
        raise interrupt

    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        with monkeypatch.context() as patch, pytest.raises(interrupt):
            patch.setattr(hooks_module.OptimizerHooks, "_look_after", stop)
            train(net, optimizer, 1)
        train(net, optimizer, 2)
        assert monitor.failure is None
        assert column(monitor, "step", "0.weight") == [0, 1, 3, 4]


class Sink:
    def __init__(self, fails_at=None, error=RuntimeError):
        self.steps, self.closed, self.fails_at, self.error = [], 0, fails_at, error

    def append(self, columns):
        if len(self.steps) == self.fails_at:
            raise self.error("disk on fire")
        self.steps.append(int(columns["step"][0]))

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (
            [print],
            r"got a sink of type builtin_function_or_method without append\(\) and close\(\); expected",
        ),
        ([[]], r"of type list without close\(\)"),
        (7, "got sinks of type int; expected a list of sinks"),
    ],
)
def test_what_cannot_take_samples_is_refused_at_once(sinks, message):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(EquilibriaError, match=message):
        Monitor(net, optimizer, sinks=sinks)
    assert not optimizer._optimizer_step_pre_hooks


def test_sinks_get_every_sample_once_and_are_closed_once():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    first, second = Sink(), Sink()
    monitor = Monitor(net, optimizer, every=2, sinks=(each for each in [first]))
    train(net, optimizer, 5)
    monitor.flush()
    monitor.add_sink(second)
    train(net, optimizer, 5)
    monitor.remove_sink(second)
    assert second.closed == 0
    monitor.close()
    monitor.close()
    assert (first.steps, first.closed) == ([0, 2, 4, 6, 8], 1)


def test_a_failing_sink_is_told_once_and_the_others_go_on():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    bad, good = Sink(fails_at=2), Sink()
    with (
        pytest.warns(
            WatchWarning, match="Sink takes no more samples: RuntimeError: disk on fire; watching goes on"
        ) as c,
        Monitor(net, optimizer, every=1, sinks=[bad, good]) as monitor,
    ):
        train(net, optimizer, 20)
    assert len(c) == 1
    assert good.steps == column(monitor, "step", "0.weight") == list(range(20))
    assert monitor.failure is None
    assert (good.closed, bad.closed) == (1, 0)
    assert same_bits(net, plainly_trained(20))


def test_a_sink_whose_error_has_no_text_costs_nothing_but_itself():
    class MuteError(Exception):
        def __str__(self):
            raise ValueError("no text")

    class Silent(Sink):
        def append(self, columns):
            raise MuteError

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    with (
        pytest.warns(WatchWarning, match="Silent takes no more samples: MuteError; watching goes on"),
        Monitor(net, optimizer, every=1, sinks=[Silent()]) as monitor,
    ):
        train(net, optimizer, 5)
    assert monitor.failure is None and column(monitor, "step", "0.weight") == list(range(5))


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    class Stuck(Sink):
        def close(self):
            raise OSError("stuck")

    net = make_net()
    good = Sink()
    monitor = Monitor(net, torch.optim.SGD(net.parameters(), **SGD), sinks=[Stuck(), good])
    with pytest.warns(WatchWarning, match="OSError: stuck"):
        monitor.close()
    assert good.closed == 1


def test_a_sink_may_close_the_monitor():
    """From inside a hook, that is: torch is walking through its list of hooks."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    later = []
    monitor = Monitor(net, optimizer, every=1)
    optimizer.register_step_post_hook(lambda *_: later.append(1))

    class Closes(Sink):
        def append(self, columns):
            monitor.close()

    monitor.add_sink(Closes())
    train(net, optimizer, 40)
    assert len(later) == 40
    assert same_bits(net, plainly_trained(40))


def test_warnings_point_at_the_training_and_are_not_repeated(monkeypatch):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    monitor = Monitor(net, optimizer, every=1)
    monkeypatch.setattr(hooks_module.OptimizerHooks, "_read_before", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(net, optimizer, 5)
        monitor.close()
    assert [each.category for each in caught] == [WatchWarning]
    assert caught[0].filename.endswith("watched_worlds.py")


@pytest.mark.parametrize(("changes", "said"), [(4, False), (5, True)])
def test_a_few_changes_without_a_step_are_a_checkpoint_and_more_a_lost_optimizer(changes, said):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        for _ in range(changes):
            net.load_state_dict(net.state_dict())
        assert any("does not step" in finding.subject for finding in monitor.findings()) == said


@pytest.mark.parametrize(("pause", "rows"), [(0.8, 0), (1.2, 6)])
def test_readings_on_a_device_wait_for_a_second_at_most(monkeypatch, pause, rows):
    """So that a log, or the live line, is never much older."""
    clock = [0.0]
    monkeypatch.setattr(monitor_module, "_in_main_memory", lambda _: False)
    monkeypatch.setattr(
        monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter)
    )
    sink = Rows()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(net, optimizer, every=1, sinks=[sink]):
        train(net, optimizer, 1)
        clock[0] += pause
        train(net, optimizer, 1)
        assert sink.count == rows


class Rows:
    """Counts them."""

    count = 0

    def append(self, columns):
        self.count += len(columns["param"])

    def close(self):
        pass


def test_groups_that_the_program_removes_take_nothing_with_them(tmp_path):
    """Some programs clear the groups to free memory; the samples can still be looked at."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    monitor = eq.watch(net, optimizer, every=1)
    train(net, optimizer, 5)
    rows = monitor.samples().num_rows
    before = monitor.metadata
    optimizer.param_groups.clear()
    optimizer.step()
    assert monitor.metadata == before
    assert monitor.samples().num_rows >= rows
    for look in (monitor.findings, monitor.table, monitor.state_dict, lambda: monitor.report(tmp_path / "page.html")):
        look()
    assert monitor.failure is None
    monitor.close()


def forgotten_monitor(sink):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    Monitor(net, optimizer, every=1, sinks=[sink])
    train(net, optimizer, 2)


def forgotten_tracker(sink):
    world, _ = completion()
    SharpnessMonitor(world.objective, world.optimizer, None, every=1, sinks=[sink])
    for _ in world.train(2):
        pass


@pytest.mark.parametrize("forgotten", [forgotten_monitor, forgotten_tracker])
def test_the_garbage_collector_closes_in_a_context_of_its_own(forgotten):
    """Python up to 3.11 crashes where a collected object sets a context variable while another one is being set."""
    variable = contextvars.ContextVar("variable", default="before")
    closed = []

    class Sets(Sink):
        def append(self, columns):
            pass

        def close(self):
            variable.set("in close")
            closed.append(True)

    forgotten(Sets())
    gc.collect()
    assert closed
    assert variable.get() == "before"
