"""Weights in 16 bits: masters are measured where there are any, intended updates estimated where there are none."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.watched_worlds import column
from torch import nn

from equilibria.monitor import hooks
from equilibria.monitor.monitor import Monitor

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=3e-6, momentum=0.9, weight_decay=1e-3),
    "Nesterov": lambda params: torch.optim.SGD(params, lr=3e-6, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-6, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=3e-6, weight_decay=1e-3),
}


def half_net(*shapes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])


def draw_gradients(net, step):
    generator = torch.Generator().manual_seed(step)
    for param in net:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def in_float64(net, optimizer, make):
    """The lengths of the updates of a float64 twin with the same weights, gradients and state."""
    twin = nn.ParameterList([nn.Parameter(param.detach().double()) for param in net])
    other = make(twin.parameters())
    for mine, theirs in zip(twin, net, strict=True):
        mine.grad = theirs.grad.double()
        for name, value in optimizer.state.get(theirs, {}).items():
            wide = isinstance(value, torch.Tensor) and value.shape == theirs.shape
            other.state[mine][name] = value.double() if wide else copy.deepcopy(value)
    before = [param.detach().clone() for param in twin]
    other.step()
    return [float((new.detach().double() - old.double()).norm()) for new, old in zip(twin, before, strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_intended_update_is_that_without_rounding(name):
    net = half_net((20, 30), (300, 200))
    optimizer = OPTIMIZERS[name](net.parameters())
    expected = []
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(4):
            draw_gradients(net, step)
            expected.append(in_float64(net, optimizer, OPTIMIZERS[name]))
            optimizer.step()
        assert monitor.failure is None
        small, large = (column(monitor, "update_intended", key) for key in ("0", "1"))
        happened = column(monitor, "update_norm", "0")
    assert small == pytest.approx([of_step[0] for of_step in expected], rel=1e-5)  # all of its coordinates are read
    # 1,024 of 60,000 coordinates: sqrt(2/k)/2 of the length, 2.2 %, for Gaussian entries; four standard errors
    assert large == pytest.approx([of_step[1] for of_step in expected], rel=0.09)
    if name == "AdamW":
        assert max(was / meant for was, meant in zip(happened, small, strict=True)) < 0.2  # why anybody asks


class Stochastic(torch.optim.AdamW):
    """AdamW that rounds new bfloat16 weights at random, up or down, so that they are right in the mean."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                state, gradient = self.state[param], param.grad.float()
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param, dtype=torch.float32))
                count = state["step"] = state.get("step", 0) + 1
                first = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1) / (1 - beta1**count)
                second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (second / (1 - beta2**count)).sqrt() + group["eps"]
                new = param.float() * (1 - lr * group["weight_decay"]) - lr * first / root
                if param.dtype is torch.bfloat16:
                    bits = new.view(torch.int32) + torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
                    new = (bits & -65536).view(torch.float32)
                param.copy_(new)


def test_rounding_at_random_makes_the_update_longer_not_the_intended_one():
    net = half_net((25, 40))
    optimizer = Stochastic(net.parameters(), lr=1e-4, weight_decay=0.1)
    expected = []
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(4):
            draw_gradients(net, step)
            expected += in_float64(net, optimizer, lambda params: Stochastic(params, lr=1e-4, weight_decay=0.1))
            optimizer.step()
        assert monitor.failure is None
        meant, happened = column(monitor, "update_intended"), column(monitor, "update_norm")
    assert meant == pytest.approx(expected, rel=1e-5)
    # entries move by an ulp, 0.004 in the mean, with probability 1e-4/ulp: sqrt(0.004/1e-4) times as far
    assert min(was / wanted for was, wanted in zip(happened, meant, strict=True)) > 3


class Normalised(torch.optim.SGD):
    """A step of one length, whatever the gradient: entries depend on one another."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


def test_a_rule_whose_entries_depend_on_one_another_is_not_estimated():
    net = half_net((25, 40))
    optimizer = Normalised(net.parameters(), lr=1.0)
    with Monitor(net, optimizer, every=1) as monitor:
        draw_gradients(net, 0)
        optimizer.step()
        assert monitor.failure is None
        assert column(monitor, "update_intended") == [None]


class Clipped(torch.optim.SGD):
    """Entries depend on one another at some steps only."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / max(1.0, float(param.grad.norm()) / 5), alpha=group["lr"])


def test_a_rule_whose_entries_depend_on_one_another_at_times_is_found_out_then():
    net = half_net((25, 40))
    optimizer = Clipped(net.parameters(), lr=1.0)
    with Monitor(net, optimizer, every=1) as monitor:
        for size in (0.01, 1.0, 0.01):
            draw_gradients(net, 0)
            net[0].grad *= size
            optimizer.step()
        first, *later = column(monitor, "update_intended")
    assert first > 0 and later == [None, None]


def test_tensors_in_different_states_are_estimated_each_from_its_own():
    net = half_net((20, 30), (7, 8), (5, 6))
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(4):
            draw_gradients(net, step)
            if step < 2:
                net[1].grad = None
            expected = in_float64(net, optimizer, OPTIMIZERS["AdamW"]) if step == 3 else None
            optimizer.step()
        assert monitor.failure is None
        assert [column(monitor, "update_intended", key)[-1] for key in "012"] == pytest.approx(expected, rel=1e-5)


def test_a_state_is_searched_for_a_master_once(monkeypatch):
    net, searched = half_net((20, 30)), []
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    monkeypatch.setattr(hooks, "master_in", lambda state, _param: searched.append(list(state)))
    with Monitor(net, optimizer, every=1):
        for step in range(4):
            draw_gradients(net, step)
            optimizer.step()
    assert searched == [["step", "exp_avg", "exp_avg_sq"]]


def test_a_master_that_loading_replaces_is_found_again():
    net = half_net((20, 30))
    optimizer = Mastered(net.parameters(), lr=1e-2, weight_decay=0.1)
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(5):
            draw_gradients(net, step)
            if step == 3:
                state = optimizer.state[net[0]]
                state["any name"] = nn.Parameter(state["any name"].detach().clone())
                optimizer._inner = torch.optim.AdamW([state["any name"]], lr=1e-2)
            optimizer.step()
        assert monitor.failure is None
        assert min(column(monitor, "update_norm")) > 0


def test_training_goes_on_as_if_nobody_estimated():
    trained = []
    for watch in (False, True):
        net = half_net((20, 30))
        optimizer = OPTIMIZERS["AdamW"](net.parameters())
        monitor = Monitor(net, optimizer, every=1) if watch else None
        for step in range(5):
            draw_gradients(net, step)
            optimizer.step()
        trained.append([net[0].detach(), *optimizer.state[net[0]].values(), torch.rand(1)])
        if monitor is not None:
            monitor.close()
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_other_weights_have_no_intended_update():
    net = half_net((6, 5), dtype=torch.float32)
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    with Monitor(net, optimizer, every=1) as monitor:
        draw_gradients(net, 0)
        optimizer.step()
        assert column(monitor, "update_intended") == [None]


class Mastered(torch.optim.AdamW):
    """AdamW that keeps a float32 master of every 16-bit weight in its state, made at its first step."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self._inner = None

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        if self._inner is None:
            for param in params:
                self.state[param]["any name"] = nn.Parameter(param.detach().float())
            group = {key: value for key, value in self.param_groups[0].items() if key in ("lr", "weight_decay")}
            self._inner = torch.optim.AdamW([self.state[param]["any name"] for param in params], **group)
        for param in params:
            self.state[param]["any name"].grad = param.grad.float()
        self._inner.step()
        for param in params:
            param.copy_(self.state[param]["any name"].detach())


def test_the_master_in_the_state_is_what_is_measured():
    net = half_net((20, 30))
    optimizer = Mastered(net.parameters(), lr=3e-6, weight_decay=0.1)
    truth = []
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(5):
            draw_gradients(net, step)
            before = optimizer.state[net[0]]["any name"].detach().clone() if step else None
            optimizer.step()
            master = optimizer.state[net[0]]["any name"].detach()
            truth.append(None if before is None else float((master.double() - before.double()).norm()))
        assert monitor.failure is None
        assert monitor.metadata["params"][0]["dtype"] == "float32"
        moved, noted = column(monitor, "update_norm"), column(monitor, "note")
    assert moved[1:] == pytest.approx(truth[1:], rel=1e-6)
    assert noted == [None] * 5


def test_masters_in_the_optimizers_groups_have_the_names_of_the_model():
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 5), nn.Conv1d(3, 4, 2)).bfloat16()
    masters = [nn.Parameter(param.detach().float()) for param in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-6, weight_decay=0.1)
    with Monitor(net, optimizer, every=1) as monitor:
        for step in range(3):
            draw_gradients(masters, step)
            before = masters[2].detach().clone()
            optimizer.step()
            for param, master in zip(net.parameters(), masters, strict=True):
                param.data.copy_(master.detach())
        assert monitor.failure is None
        assert [param["name"] for param in monitor.metadata["params"]] == ["0.weight", "1.weight", "2.weight"]
        truth = float((masters[2].detach().double() - before.double()).norm())
        assert column(monitor, "update_norm", "1.weight")[-1] == pytest.approx(truth, rel=1e-6)
