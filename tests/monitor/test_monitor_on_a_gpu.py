"""Tensors in main memory take the way of those on a GPU: the same samples, from few launches."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import equilibria.monitor.monitor as monitor_module
from equilibria.errors import WatchWarning
from equilibria.monitor import half_precision, hooks, reading
from equilibria.monitor.monitor import Monitor
from equilibria.tensors import device_queue, inner_products, subsample

pytest.importorskip("triton")

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
}
STEPS = 7


def sent_to_host(tensor):
    """In memory of its own, as from a GPU."""
    with _disable_current_modes():
        return tensor.clone()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A function that sends tensors the way of those on a GPU; returns the launches since then."""
    from equilibria.tensors import _product_kernels as kernels

    launched = []

    def counting(function, launches):
        def run(*args):
            launched.extend(launches(*args))
            with _disable_current_modes():
                function(*args)

        return run

    def send():
        monkeypatch.setattr(device_queue, "is_on_device", lambda _tensor: True)
        for module in (hooks, half_precision):
            monkeypatch.setattr(module, "is_on_device", lambda _tensor: True)
        monkeypatch.setattr(device_queue, "sent_to_host", sent_to_host)
        monkeypatch.setattr(inner_products, "kernels_for", lambda _device: kernels)
        monkeypatch.setattr(subsample, "kernels_for", lambda _device: kernels)
        monkeypatch.setattr(monitor_module, "_in_main_memory", lambda _products: False)
        both = counting(kernels.launch, lambda name, _, sums: [name] if sums is None else [name, "add_up"])
        monkeypatch.setattr(kernels, "launch", both)
        monkeypatch.setattr(kernels, "look", counting(kernels.look, lambda *_: ["look"]))
        monkeypatch.setattr(kernels, "collect", counting(kernels.collect, lambda *_: ["collect"]))
        return launched

    return send


def samples(make, every, trouble, launched=None):
    """Samples of a few steps in which something happens to the first weight at the fourth; launches of every step."""
    torch.manual_seed(0)
    shapes, types = [(6, 5), (3, 40), (2, 3, 4)], [torch.float32, torch.bfloat16, torch.float32]
    net = nn.ParameterList([nn.Parameter(torch.randn(s).to(t)) for s, t in zip(shapes, types, strict=True)])
    optimizer, counts = make(net.parameters()), []
    with Monitor(net, optimizer, every=every) as monitor:
        for step in range(STEPS):
            for param in net:
                param.grad = torch.randn(param.shape).to(param.dtype)
            if step == 3:
                trouble(net[0])
            before = len(launched or ())
            optimizer.step()
            counts.append(len(launched or ()) - before)
        assert monitor.failure is None
        return monitor.samples().to_pylist(), counts


def no_gradient(param):
    param.grad = None


def not_a_number(param):
    param.grad[0, 0] = math.nan


def other_memory(param):
    param.data = 2 * param.data.t().contiguous().t()


def other_layout(param):
    param.grad = param.grad.t().contiguous().t()


@pytest.mark.parametrize("trouble", [no_gradient, not_a_number, other_memory, other_layout])
@pytest.mark.parametrize(("name", "every"), [("SGD", 1), ("Nesterov", 1), ("AdamW", 1), ("AdamW", 3)])
def test_the_samples_are_those_of_main_memory(as_on_a_gpu, name, every, trouble):
    expected, _ = samples(OPTIMIZERS[name], every, trouble)
    found, launches = samples(OPTIMIZERS[name], every, trouble, as_on_a_gpu())
    # 3, and 1 for the intended update of the bfloat16 weight; 2 where predictions start again; 2 because SGD's bfloat16
    # weights are compared and its others are not
    assert max(launches[1:]) <= (6 if name == "AdamW" else 8)
    for row, slow in zip(found, expected, strict=True):
        assert [row[key] for key in ("step", "param", "note")] == [slow[key] for key in ("step", "param", "note")]
        for key in ("norm", "grad_norm", "update_norm", "angle", "pull", "scaled_grad_sq", "update_intended"):
            assert row[key] == (None if slow[key] is None else pytest.approx(slow[key], rel=3e-6, nan_ok=True)), key


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_16_bit_weights_ask_for_one_launch_more_whatever_their_number(as_on_a_gpu, name):
    launched, intended = as_on_a_gpu(), []
    torch.manual_seed(0)
    net = nn.ParameterList([nn.Parameter(torch.randn(5, 4 + k).bfloat16()) for k in range(5)])
    optimizer = OPTIMIZERS[name](net.parameters())
    with Monitor(net, optimizer, every=2) as monitor:
        for _ in range(5):
            for param in net:
                param.grad = torch.randn(param.shape).bfloat16()
            launched.clear()
            optimizer.step()
            intended.append(launched.count("collect"))
        assert monitor.failure is None
        assert sorted(launched) == ["add_up", "collect", "look", "sum_moves"]
        assert all((row["update_intended"] > 0) for row in monitor.samples().to_pylist())
    assert intended == [1, 0, 1, 0, 1]


def test_a_weight_without_a_gradient_for_a_step_is_not_noted_as_changed():
    rows, _ = samples(OPTIMIZERS["SGD"], 1, no_gradient)
    assert [row["note"] for row in rows if row["param"] == "0"] == [*[None] * 3, "no gradient", *[None] * 3]


class NoWaits(TorchDispatchMode):
    """Allows no operation that hands a device's numbers to the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert str(function).split(".")[1] not in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device(as_on_a_gpu, monkeypatch, name, kind, with_kernels):
    as_on_a_gpu()
    monkeypatch.setattr(monitor_module, "_LONGEST_WAIT", math.inf)  # the samples are read at the end, by the host
    if not with_kernels:
        for module in (inner_products, subsample):
            monkeypatch.setattr(module, "kernels_for", lambda _device: None)
    net = nn.ParameterList([nn.Parameter(torch.randn(6, 5, dtype=kind)) for _ in range(2)])
    optimizer = OPTIMIZERS[name](net.parameters())

    def without_waits(hook):
        def run(*args):
            with NoWaits(), monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "cpu", None)
                patch.setattr(torch.Tensor, "tolist", None)
                hook(*args)

        return run

    with Monitor(net, optimizer, every=1) as monitor:
        for of_step in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            of_step.update({key: without_waits(hook) for key, hook in of_step.items()})
        for step in range(6):
            for param in net:
                param.grad = torch.randn(6, 5, dtype=kind)
            if step == 3:
                monitor._hooks[0].restart_predictions()  # from the optimizer's state
            optimizer.step()
        assert monitor.failure is None
        assert len(monitor.samples()) == 12


class Names(TorchDispatchMode):
    """Remembers operations; views are none."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen += [] if function.is_view else [str(function).split(".")[1]]
        return result


def test_weights_that_something_touches_are_compared_with_one_wait(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    monkeypatch.setattr(reading, "is_on_device", lambda _tensor: True)
    monkeypatch.setattr(reading, "_numpy_view", lambda _tensor: None)
    net = nn.ParameterList([nn.Parameter(torch.randn(6, 5)) for _ in range(3)])
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    for param in net:
        param.grad = torch.randn(6, 5)
    names = []

    def counting(hook):
        def run(*args):
            with names[-1]:
                hook(*args)

        return run

    with Monitor(net, optimizer, every=4) as monitor:
        for of_step in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            of_step.update({key: counting(hook) for key, hook in of_step.items()})
        for step in range(13):
            if step in (5, 6, 11):
                with torch.no_grad():
                    for param in net:
                        param.mul_(2.0).mul_(0.5 if step == 6 else 1.0)  # the first touch counts as a change
            names.append(Names())
            optimizer.step()
        assert monitor.failure is None
        notes = [row["note"] for row in monitor.samples().to_pylist() if row["param"] == "0"]
    changed = [note is not None and "changed" in note for note in notes]
    assert changed == [False, False, True, True]  # samples at 0, 4, 8 and 12
    # whether each is what it was, in one tensor that the host reads
    assert [of_step.seen.count("stack") for of_step in names[5:]] == [0, 1, 0, 0, 0, 0, 1, 0]
    assert not any("_local_scalar_dense" in of_step.seen for of_step in names)
    assert names[7].seen == names[9].seen == ["cat"]


class Nothing(TorchDispatchMode):
    """Allows no operation."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} in a hook")


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_steps_between_samples_ask_for_one_launch_and_no_memory(as_on_a_gpu, name):
    launched, counts, step = as_on_a_gpu(), [], 0
    net = nn.ParameterList([nn.Parameter(torch.randn(6, 5)) for _ in range(2)])
    optimizer = OPTIMIZERS[name](net.parameters())
    for param in net:
        param.grad = torch.randn(6, 5)

    def without_torch(hook):
        def run(*args):
            with contextlib.nullcontext() if step < 40 or step % 5 == 0 else Nothing():
                hook(*args)

        return run

    with Monitor(net, optimizer, every=5) as monitor:
        for of_step in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            of_step.update({key: without_torch(hook) for key, hook in of_step.items()})
        while step < 70:
            launched.clear()
            optimizer.step()
            counts.append(len(launched))
            step += 1
        assert monitor.failure is None
    between = [count for step, count in enumerate(counts) if step > 40 and step % 5]
    assert max(between) == 1 and sum(between) == (
        1 if name == "SGD" else 6
    )  # D(n) at step 64; AdamW's pull at 44, ..., 64, 69


def test_a_step_that_a_graph_records_is_left_alone(as_on_a_gpu, monkeypatch):
    launched = as_on_a_gpu()
    net = nn.ParameterList([nn.Parameter(torch.randn(6, 5))])
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    net[0].grad = torch.randn(6, 5)

    def forbidden(*_args, **_kwargs):
        raise AssertionError("an event during a capture")

    with Monitor(net, optimizer, every=1) as monitor:
        for is_captured in (False, False, True, True, False, True, False):
            if not is_captured:
                optimizer.step()
                continue
            before, pre, post = len(launched), optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "is_initialized", lambda: True)
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                patch.setattr(device_queue, "has_queue", lambda _device: True)
                patch.setattr(torch.cuda, "Event", forbidden)
                patch.setattr(torch.cuda, "current_stream", forbidden)
                with Nothing():  # the hooks alone: a capture records the step, it does not take it
                    if not monitor._hooks[0]._has_seen_graph:
                        with pytest.warns(WatchWarning, match="AdamW that a CUDA graph replays run no hooks"):
                            next(iter(pre.values()))(optimizer, (), {})
                    else:
                        next(iter(pre.values()))(optimizer, (), {})
                    next(iter(post.values()))(optimizer, (), {})
            assert len(launched) == before
        assert monitor.failure is None
        rows = monitor.samples().to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["note"] for row in rows] == [None] * 4
