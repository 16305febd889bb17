"""Training under watch gives the same bits as training without."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tests.helpers.watched_worlds import backward, batches, make_net, same_bits, train

from equilibria.monitor.monitor import Monitor

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, **SGD),
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=5e-3),
    "SGD for-loop": lambda params: torch.optim.SGD(params, **SGD, foreach=False),
    "SGD foreach": lambda params: torch.optim.SGD(params, **SGD, foreach=True),
    "SGD foreach Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, **SGD, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAMW),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, **ADAMW, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, **ADAMW, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}
WATCHES = {
    "every step": {"every": 1},
    "auto": {"every": "auto"},
    "rows, every third": {"every": 3, "granularity": "row"},
}


def run(make, steps, *, watch=None, dtype=torch.float32):
    net = make_net(dropout=0.3).to(dtype)
    optimizer = make(net.parameters())
    monitor = None if watch is None else Monitor(net, optimizer, **watch)
    torch.manual_seed(7)  # dropout
    train(net, optimizer, steps)
    if monitor is not None:
        assert monitor.failure is None
        assert monitor.step == steps
        assert monitor.samples().num_rows > 0
        monitor.close()
    return net, optimizer, torch.get_rng_state()


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_same_bits(make, watch):
    plain, watched = run(make, 20), run(make, 20, watch=watch)
    assert same_bits(plain[0], watched[0])
    assert torch.equal(plain[2], watched[2])
    for a, b in zip(plain[1].state.values(), watched[1].state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_same_bits_in_other_types(name, dtype):
    plain, watched = (run(OPTIMIZERS[name], 10, watch=watch, dtype=dtype) for watch in (None, {"every": 1}))
    assert same_bits(plain[0], watched[0])


def test_the_gradients_are_left_alone():
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    Monitor(net, optimizer, every=1)
    for batch in batches(3):
        optimizer.zero_grad()
        backward(net, batch)
        before = [weight.grad for weight in net.parameters()]
        held = copy.deepcopy(before)
        optimizer.step()
        assert all(
            a is weight.grad and torch.equal(a, b) for a, b, weight in zip(before, held, net.parameters(), strict=True)
        )


def test_what_a_user_sees_does_not_change():
    """Hooks show nowhere but in the hooks: state, representation and warnings of schedulers stay the same."""
    net, plain = make_net(), make_net()
    optimizer, other = (torch.optim.SGD(each.parameters(), **SGD) for each in (net, plain))
    Monitor(net, optimizer, every=1)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, other)]  # warnings are errors here
    for (model, each), scheduler in zip(((net, optimizer), (plain, other)), schedulers, strict=True):
        for _ in range(3):
            train(model, each, 1)
            scheduler.step()
    assert repr(optimizer) == repr(other)
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    assert same_bits(net, plain)


def test_a_scheduler_made_before_the_watch_does_not_mind():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Monitor(net, optimizer, every=1) as monitor:
        for _ in itertools.repeat(None, 3):
            train(net, optimizer, 1)
            scheduler.step()
        assert monitor.samples()["lr"].to_pylist()[::3] == [0.1, 0.05, 0.025]
