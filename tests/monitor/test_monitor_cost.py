"""What watching takes: no copy of the weights for SGD, one for others, and nothing at all on steps between samples."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.watched_worlds import make_net, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria.monitor.monitor as monitor_module
from equilibria.monitor.monitor import Monitor
from equilibria.monitor.reading import PRODUCTS


class Operations(TorchDispatchMode):
    """Keeps the names of all operations, and how many bytes those results have that are as large as a weight."""

    def __init__(self, large):
        super().__init__()
        self.names, self.large, self.bytes = [], large, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if isinstance(result, torch.Tensor) and result.numel() >= self.large and is_new(result, args):
            self.bytes += result.numel() * result.element_size()
        return result


def is_new(result, args):
    held = [each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)]
    return result.untyped_storage().data_ptr() not in held


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-3, nesterov=True)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)


def operations(make, steps, *, watch=None, granularity="tensor", size=512, skip=0):
    """What the steps do on given gradients; the first ones are not looked at."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
    optimizer = make(net)
    monitor = None if watch is None else Monitor(net, optimizer, every=watch, granularity=granularity)
    for weight in net.parameters():
        weight.grad = torch.randn(size, size)
    for _ in range(skip):
        optimizer.step()
    with Operations(size * size) as seen:
        for _ in range(steps):
            optimizer.step()
    assert monitor is None or monitor.failure is None
    return seen, monitor


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_steps_between_samples_run_no_operation_of_ours(make, granularity):
    plain, _ = operations(make, 5, skip=1)
    watched, monitor = operations(make, 5, watch=1000, granularity=granularity, skip=1)
    assert watched.names == plain.names
    assert monitor.step == 6


def test_sgd_is_watched_without_a_copy():
    plain, _ = operations(sgd, 5, skip=1)
    watched, monitor = operations(sgd, 5, watch=1, skip=1)
    assert len(watched.names) > len(plain.names)
    assert watched.bytes == plain.bytes  # nothing as large as a weight was made
    assert all(probe._copy is None for hooks in monitor._hooks for probe in hooks._probes)


def test_adamw_needs_one_copy_of_the_weights_once():
    weights = 2 * 512 * 512 * 4
    plain, _ = operations(adamw, 5)
    watched, monitor = operations(adamw, 5, watch=1)
    copies = [probe._copy for hooks in monitor._hooks for probe in hooks._probes]
    assert sum(copy.numel() * copy.element_size() for copy in copies) == weights
    assert watched.bytes - plain.bytes == weights  # the move itself is formed in short stretches
    assert len(watched.names) > len(plain.names)


def test_a_closed_monitor_holds_no_copy():
    net = make_net()
    optimizer = adamw(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
    assert all(probe._copy is None for hooks in monitor._hooks for probe in hooks._probes)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Readings wait, so that a device is asked less often."""
    monkeypatch.setattr(monitor_module, "_in_main_memory", lambda _products: False)


@pytest.mark.usefixtures("as_on_a_device")
def test_readings_hold_no_tensors_of_the_model():
    """What waits is numbers: gradients must be free to go."""
    net = make_net()
    optimizer = sgd(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 5)
        assert len(monitor._pending) == 5
        for _, reading in monitor._pending:
            assert reading.products.numel() == 3 * PRODUCTS
            assert reading.found_inf is None


@pytest.mark.usefixtures("as_on_a_device")
def test_waiting_samples_are_worked_off_in_time(monkeypatch):
    net = make_net()
    optimizer = sgd(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 40)
        assert len(monitor._pending) < 16
        monitor.flush()
        train(net, optimizer, 2)
        assert len(monitor._pending) == 2
        monkeypatch.setattr(monitor, "_flushed", monitor._flushed - 2.0)  # two seconds ago
        train(net, optimizer, 1)
        assert monitor._pending == []


def test_settings_are_not_piled_up():
    """Under a schedule that changes at every step, with a law and without, watched groups and others."""
    for make in (sgd, lambda net: torch.optim.RMSprop([{"params": net[:3].parameters()}, {"params": net[7].bias}])):
        net = make_net()
        optimizer = make(net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        with Monitor(net, optimizer, every=2) as monitor:
            for _ in range(50):
                train(net, optimizer, 1)
                scheduler.step()
            monitor.flush()
            assert all(len(log._changes) <= 3 for hooks in monitor._hooks for log in hooks.settings)
