"""Weights that somebody changes between two steps are noticed, and the forecast starts again from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import column, make_net, train

from equilibria.monitor.monitor import Monitor
from equilibria.records.tables import CHANGED_OUTSIDE

OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-4),
}


def in_place(net):
    with torch.no_grad():
        net[4].weight.mul_(0.5)


def data(net):
    net[4].weight.data.mul_(0.5)


def new_data(net):
    net[4].weight.data = net[4].weight.data * 0.5


def load(net):
    state = net.state_dict()
    net.load_state_dict({**state, "4.weight": state["4.weight"] * 0.5})


WAYS = [in_place, data, new_data, load]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("every", "at"), [(1, 7), (5, 7), (5, 4), (5, 5)])
def test_a_change_is_noticed_once(make, way, every, at):
    net = make_net()
    optimizer = make(net)

    def change(number):
        if number == at:
            way(net)

    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 21, after_step=change)
        assert monitor.failure is None
        steps, notes = column(monitor, "step", "4.weight"), column(monitor, "note", "4.weight")
        first_sample_after = min(step for step in steps if step > at)
        assert [step for step, note in zip(steps, notes, strict=True) if note] == [first_sample_after]
        assert set(notes) == {None, CHANGED_OUTSIDE}
        if way is not load:  # loading a state touches every tensor
            assert set(column(monitor, "note", "0.weight")) == {None}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [1, 5])
def test_the_forecast_begins_anew(name, way, every):
    net = make_net()
    optimizer = OPTIMIZERS[name](net)

    def change(number):
        if number == 7:
            way(net)
        if number == 12:
            monitor.flush()  # as happens by itself after a second

    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 31, after_step=change)
        steps, norms, predicted = (np.array(column(monitor, x, "4.weight")) for x in ("step", "norm", "norm_predicted"))
        later = steps > 12
        known = np.array([value is not None for value in predicted])
        assert known[later].all()
        np.testing.assert_allclose(predicted[known].astype(float), norms[known], rtol=0.05)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2, 5, "auto"])
def test_training_alone_raises_no_alarm(make, every):
    """Also with a learning rate that moves by orders of magnitude, and a large first step."""
    net = make_net()
    optimizer = make(net)
    base = optimizer.param_groups[0]["lr"]

    def warm_up(number):
        optimizer.param_groups[0]["lr"] = base * (0.0 if number < 2 else [1e-3, 1.0, 10.0, 0.1][number % 4])

    with Monitor(net, optimizer, every=every) as monitor:
        warm_up(0)
        train(net, optimizer, 60, after_step=warm_up)
        assert set(column(monitor, "note")) == {None}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_pause_after_samples_step_by_step_raises_no_alarm(make, monkeypatch):
    """As when the pace is found: a copy of the weights was kept for a comparison that then did not come."""
    net = make_net()
    optimizer = make(net)
    with Monitor(net, optimizer, every="auto") as monitor:
        for pace in (1.0, 1.0, 4.0, 1.0, 1.0, 3.0):
            monkeypatch.setattr(monitor._sampler._budget, "interval", lambda pace=pace: pace)
            train(net, optimizer, 4)
        assert len(column(monitor, "step", "0.weight")) > 10
        assert max(np.diff(column(monitor, "step", "0.weight"))) >= 3
        assert set(column(monitor, "note")) == {None}


def test_a_change_at_every_step_is_noticed_at_every_step():
    """As a projection back onto the sphere after each step."""
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 6, after_step=lambda _: in_place(net))
        assert column(monitor, "note", "4.weight") == [None] + [CHANGED_OUTSIDE] * 5


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 3])
def test_other_data_of_the_same_norm_is_noticed(make, every):
    net = make_net()
    optimizer = make(net)

    def swap(number):
        if number == 7:
            net[4].weight.data = net[4].weight.data.flip(0).clone()

    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 21, after_step=swap)
        notes = dict(zip(column(monitor, "step", "4.weight"), column(monitor, "note", "4.weight"), strict=True))
        assert [step for step, note in notes.items() if note] == [8 if every == 1 else 9]
        assert set(column(monitor, "note", "0.weight")) == {None}


def test_an_optimizer_that_replaces_the_data_itself_raises_no_alarm():
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data = param.data - group["lr"] * param.grad

    net = make_net()
    optimizer = Replacing(net.parameters(), lr=0.1)
    with Monitor(net, optimizer, every=3) as monitor:
        train(net, optimizer, 21)
        assert set(column(monitor, "note")) == {None}
