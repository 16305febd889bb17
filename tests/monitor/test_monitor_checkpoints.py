"""A run that was stopped and resumed gives the samples of one that was not; closing takes everything off."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
from tests.helpers.watched_worlds import column, make_net, train

from equilibria.control._lion import Lion
from equilibria.errors import EquilibriaError
from equilibria.monitor.monitor import Monitor
from equilibria.records.tables import NUMBERS

WORDS = ("step", "param", "state", "note", "law")

OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3, nesterov=True),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.5),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=0.01),
    "Lion": lambda net: Lion(net.parameters(), lr=1e-3, weight_decay=0.5),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-3),
    "two": lambda net: [
        torch.optim.SGD(net[:3].parameters(), lr=0.1, weight_decay=5e-3),
        torch.optim.AdamW(net[3:].parameters(), lr=1e-3),
    ],
}


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def steps(net, optimizers, first, last):
    """Train from one step to another, the learning rate falling at step 7 and rising a little with every step."""
    all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    base = [0.1, 1e-3] if len(all_optimizers) == 2 else [all_optimizers[0].defaults["lr"]]
    for step in range(first, last):
        for optimizer, lr in zip(all_optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * (1 + 0.01 * step) * (0.1 if step >= 7 else 1.0)
        for number, optimizer in enumerate(all_optimizers):
            train(net, optimizer, 1, seed=100 + 2 * step + number)


@functools.cache
def uninterrupted(name, every, granularity):
    net = make_net()
    optimizers = OPTIMIZERS[name](net)
    with Monitor(net, optimizers, every=every, granularity=granularity, steps_per_epoch=5) as monitor:
        steps(net, optimizers, 0, 14)
        return monitor.samples().to_pylist()


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [0, 1, 7, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_as_if_it_had_not_stopped(optimizer, stop, every, granularity):
    make = OPTIMIZERS[optimizer]
    net = make_net()
    optimizers = make(net)
    with Monitor(net, optimizers, every=every, granularity=granularity, steps_per_epoch=5) as first:
        steps(net, optimizers, 0, stop)
        rows = first.samples().to_pylist()
        all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        saved = {
            "model": net.state_dict(),
            "optimizers": [one.state_dict() for one in all_optimizers],
            "monitor": first.state_dict(),
        }
        saved = through_a_file(saved)

    net = make_net(seed=9)
    optimizers = make(net)
    with Monitor(net, optimizers, every=every, granularity=granularity, steps_per_epoch=5) as second:
        net.load_state_dict(saved["model"])
        all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for one, state in zip(all_optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        second.load_state_dict(saved["monitor"])
        assert second.step == stop
        steps(net, optimizers, stop, 14)
        rows += second.samples().to_pylist()
    expected = uninterrupted(optimizer, every, granularity)
    if granularity == "row" or optimizer == "SGD":
        assert [str(row) for row in rows] == [str(row) for row in expected]  # NaN is equal to itself in words
    for a, b in zip(rows, expected, strict=True):  # the first comparison with a copy is made in float64
        assert {name: a[name] for name in WORDS} == {name: b[name] for name in WORDS}
        for name in NUMBERS:
            assert (a[name] is None) == (b[name] is None)
            if b[name] is not None and name != "cosine":
                assert a[name] == pytest.approx(b[name], rel=1e-6, nan_ok=True), name


def test_a_state_is_a_copy():
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        state = monitor.state_dict()
        written = str(state)
        train(net, optimizer, 3)
        assert str(state) == written
        monitor.load_state_dict(state)
        train(net, optimizer, 3)
        assert str(state) == written


def test_rolling_back_inside_a_run():
    """Back to an earlier checkpoint, as after a loss spike: the steps are counted from there again."""
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), monitor.state_dict()))
        train(net, optimizer, 4, seed=5)
        first = column(monitor, "norm_predicted", "0.weight")[3:]
        for part, state in zip((net, optimizer, monitor), saved, strict=True):
            part.load_state_dict(state)
        train(net, optimizer, 4, seed=5)
        assert column(monitor, "step", "0.weight") == [*range(7), *range(3, 7)]
        assert column(monitor, "norm_predicted", "0.weight")[7:] == pytest.approx(first, rel=1e-6)
        assert set(column(monitor, "note")) == {None}


def test_auto_goes_on_after_a_checkpoint():
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net)
    with Monitor(net, optimizer) as monitor:
        train(net, optimizer, 5)
        state = monitor.state_dict()
    with Monitor(net, optimizer) as monitor:
        monitor.load_state_dict(state)
        train(net, optimizer, 5)
        assert column(monitor, "step", "0.weight")[0] == 5


def test_the_state_of_something_else_is_refused_and_changes_nothing():
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net)
    with Monitor(net, optimizer, every=1, select="0.weight") as other:
        train(net, optimizer, 2)
        fewer = other.state_dict()
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        refused = {
            r"watches 1 weights \(0.weight\); expected this one's 3 weights \(0.weight, 4.weight, 7.weight\)": fewer,
            "got a dict with 'state', 'param_groups'": optimizer.state_dict(),
            "got a dict with nothing in it": {},
            "got state of type NoneType": None,
            "got state of type list": [1, 2],
            "watches 0 weights": {"hooks": [], "builders": []},
            "got a damaged state": {**monitor.state_dict(), "hooks": [{"settings": [[]]}]},
        }
        for message, state in refused.items():
            with pytest.raises(EquilibriaError, match=message):
                monitor.load_state_dict(state)
        assert monitor.step == 3
        train(net, optimizer, 2)
        assert column(monitor, "step", "0.weight") == [0, 1, 2, 3, 4]


# ---- closing


def hooks(optimizer):
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def test_close_takes_the_hooks_off_and_keeps_the_samples():
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    own = optimizer.register_step_post_hook(lambda *_: None)
    monitor = Monitor(net, optimizer, every=1)
    assert len(hooks(optimizer)) == 3
    train(net, optimizer, 3)
    monitor.close()
    assert len(hooks(optimizer)) == 1
    monitor.close()
    train(net, optimizer, 2)
    assert monitor.step == 3
    assert monitor.samples().num_rows == 9
    assert monitor.findings() is not None
    assert monitor.state_dict()["hooks"][0]["count"] == 3
    with pytest.raises(EquilibriaError, match="closed"):
        monitor.reattach(optimizer)
    own.remove()
    assert hooks(optimizer) == []


def test_a_context_closes_also_after_an_error():
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    with pytest.raises(KeyError), Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        raise KeyError
    assert hooks(optimizer) == []
    assert monitor.samples().num_rows == 6


def test_two_monitors_do_not_disturb_each_other():
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    with Monitor(net, optimizer, every=1) as first:
        with Monitor(net, optimizer, every=2) as second:
            train(net, optimizer, 4)
        train(net, optimizer, 2)
    assert (first.samples().num_rows, second.samples().num_rows) == (18, 6)
    assert [row for row in first.samples().to_pylist() if row["step"] in (0, 2)][0:3] == second.samples().to_pylist()[
        0:3
    ]


def test_nothing_is_kept_alive_by_a_closed_monitor():
    net = make_net()
    optimizer = OPTIMIZERS["AdamW"](net)
    monitor = Monitor(net, optimizer, every=1)
    train(net, optimizer, 2)
    monitor.close()
    alive = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert alive() is None


def test_a_checkpoint_between_the_steps_of_two_optimizers_keeps_the_numbers_of_their_steps():
    """The second takes one step for three of the first, as a generator does; both steps of a round have one number."""

    def train_round(net, optimizers, number):
        train(net, optimizers[0], 1, seed=number)
        yield
        if number % 3 == 2:
            train(net, optimizers[1], 1, seed=100 + number)

    def numbers(monitor):
        samples = monitor.samples()
        return list(zip(samples["step"].to_pylist(), samples["param"].to_pylist(), strict=True))

    net = make_net()
    optimizers = OPTIMIZERS["two"](net)
    with Monitor(net, optimizers, every=1) as whole:
        for number in range(6):
            list(train_round(net, optimizers, number))
        expected = numbers(whole)

    net = make_net()
    optimizers = OPTIMIZERS["two"](net)
    with Monitor(net, optimizers, every=1) as first:
        for number in range(5):
            list(train_round(net, optimizers, number))
        halves = train_round(net, optimizers, 5)
        next(halves)
        state, before = through_a_file(first.state_dict()), numbers(first)
    with Monitor(net, optimizers, every=1) as second:
        second.load_state_dict(state)
        list(halves)
        assert before + numbers(second) == expected
    assert {step for step, _ in expected} == set(range(6))
