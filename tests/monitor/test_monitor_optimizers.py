"""Wrapped, copied and several optimizers."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import Account, assert_account, backward, batches, column, make_net, train
from torch import nn

from equilibria.errors import EquilibriaError
from equilibria.monitor.monitor import Monitor

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}
LAYERS = ("0.weight", "4.weight", "7.weight")


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: never initialised as an optimizer, and a step only every so often."""

    def __init__(self, optimizer, every=1):
        self.optimizer, self.every, self.calls = optimizer, every, 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        if self.calls % self.every == 0:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step(closure)


class Parallel(nn.Module):
    """As DistributedDataParallel: the model is called ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def test_wrapped_optimizers_and_models():
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), **SGD)
    wrapped, model, account = Wrapper(Wrapper(inner), every=2), Parallel(Parallel(net)), Account(net)
    with pytest.raises(AttributeError):
        wrapped.register_step_post_hook(print)  # this is why it has to be unwrapped
    with Monitor(model, wrapped, every=1) as monitor:
        for number, batch in enumerate(batches(6)):
            wrapped.zero_grad()
            backward(model, batch)
            account.before(number // 2)
            wrapped.step()
            if number % 2:
                account.after(number // 2)
        assert monitor.step == 3
        assert tuple(column(monitor, "param")[:3]) == LAYERS
        assert_account(monitor, account, rtol=1e-4)


@pytest.mark.parametrize("copied", [copy.copy, lambda optimizer: type(optimizer)(optimizer.param_groups, lr=0.1)])
def test_a_copied_optimizer_is_noticed_and_can_be_put_in_place(copied):
    net = make_net()
    first = torch.optim.SGD(net.parameters(), **SGD)
    with Monitor(net, first, every=1) as monitor:
        train(net, first, 3)
        assert not [each for each in monitor.findings() if "does not step" in each.subject]
        second = copied(first)
        train(net, second, 5)
        assert monitor.step == 3
        (finding,) = (each for each in monitor.findings() if "does not step" in each.subject)
        assert finding.severity == "warning"
        assert "number 3" in finding.evidence
        assert "monitor.reattach(optimizer)" in finding.remedy
        monitor.reattach(second)
        train(net, second, 2)
        assert monitor.step == 5
        assert len(column(monitor, "angle", "0.weight")) == 5
        assert not first._optimizer_step_pre_hooks
        assert not first._optimizer_step_post_hooks
        assert not [each for each in monitor.findings() if "does not step" in each.subject]


def test_a_copy_of_model_and_optimizer_needs_a_watch_of_its_own():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    with Monitor(net, optimizer, every=1) as monitor:
        _, other = copy.deepcopy((net, optimizer))
        assert not other._optimizer_step_post_hooks
        with pytest.raises(EquilibriaError, match=r"does not train the watched tensors.*call equilibria.watch on it"):
            monitor.reattach(other)
        with pytest.raises(EquilibriaError, match="got optimizer of type int"):
            monitor.reattach(3)


def test_a_loaded_checkpoint_is_not_taken_for_a_copied_optimizer():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        net.load_state_dict(make_net(seed=1).state_dict())
        assert not [each for each in monitor.findings() if "does not step" in each.subject]


def step_and_clear(optimizer):
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("every", [1, 3, "auto"])
@pytest.mark.parametrize("kind", [list, tuple, lambda pairs: {str(number): each for number, each in enumerate(pairs)}])
def test_optimizers_in_backward(kind, every):
    """One optimizer per tensor, stepping as soon as its gradient is there."""
    net = make_net()
    optimizers = {weight: torch.optim.AdamW([weight], lr=3e-3, weight_decay=0.1) for weight in net.parameters()}
    for weight, optimizer in optimizers.items():
        weight.register_post_accumulate_grad_hook(lambda _, each=optimizer: step_and_clear(each))
    with Monitor(net, kind(optimizers.values()), every=every) as monitor:
        for batch in batches(12):
            backward(net, batch)
        assert monitor.step == 12
        steps = column(monitor, "step")
        assert steps == sorted(steps)
        seen = {name: column(monitor, "step", name) for name in LAYERS}
        assert seen["0.weight"] == seen["4.weight"] == seen["7.weight"]
        if every != "auto":
            assert seen["0.weight"] == list(range(0, 12, every))
        assert seen["0.weight"][0] == 0
        assert set(column(monitor, "note")) == {None}
        assert [entry["optimizer"] for entry in monitor.metadata["params"]] == [0, 3, 6]


def two(net):
    return [torch.optim.SGD(net[:3].parameters(), **SGD), torch.optim.AdamW(net[3:].parameters(), lr=1e-3)]


@pytest.mark.parametrize("every", [1, "auto"])
def test_two_optimizers_at_different_rates(every):
    """As generator and critic: steps never go back in the record, and no tensor has two samples of one step."""
    net = make_net()
    often, seldom = two(net)
    with Monitor(net, {"critic": often, "generator": seldom}, every=every) as monitor:
        for number, batch in enumerate(batches(40)):
            often.zero_grad()
            seldom.zero_grad()
            backward(net, batch)
            often.step()
            if number % 5 == 4:
                seldom.step()
        steps = column(monitor, "step")
        assert monitor.step == 40
        assert steps == sorted(steps)
        for name in LAYERS:
            own = column(monitor, "step", name)
            assert len(own) == len(set(own)) > 0
        if every == 1:
            assert column(monitor, "step", "0.weight") == list(range(40))
            assert column(monitor, "step", "7.weight") == list(range(4, 40, 5))
        assert monitor.failure is None


def test_two_optimizers_in_phases():
    net = make_net()
    first, second = two(net)
    with Monitor(net, [first, second], every=1) as monitor:
        train(net, first, 6)
        train(net, second, 6)
        train(net, first, 2)
        steps = column(monitor, "step")
        assert steps == sorted(steps)
        assert column(monitor, "step", "7.weight") == list(range(5, 11))
        assert column(monitor, "step", "0.weight") == [*range(6), 10, 11]


def test_auto_samples_whichever_optimizer_steps():
    net = make_net()
    first, second = two(net)
    with Monitor(net, [first, second], every="auto") as monitor:
        for optimizer in (first, second):
            train(net, optimizer, 30)
        assert column(monitor, "step", "0.weight")
        assert column(monitor, "step", "7.weight")


def test_three_optimizers_out_of_step_never_go_back():
    net = make_net()
    optimizers = [torch.optim.SGD(net[at].parameters(), lr=0.01) for at in (0, 4, 7)]
    with Monitor(net, optimizers, every=1) as monitor:
        for number, batch in zip(itertools.count(), batches(30), strict=False):
            backward(net, batch)
            for at, optimizer in enumerate(optimizers):
                if number % (at + 1) == 0 or number % 7 == at:
                    optimizer.step()
        steps = column(monitor, "step")
        assert steps == sorted(steps)
        for name in LAYERS:
            own = column(monitor, "step", name)
            assert len(own) == len(set(own))


def test_an_optimizer_named_twice_is_watched_once():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    with Monitor(net, [optimizer, Wrapper(optimizer)], every=1) as monitor:
        train(net, optimizer, 2)
        assert monitor.samples().num_rows == 6


def test_loading_an_optimizer_keeps_the_watch():
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 5e-4
        train(net, optimizer, 2)
        assert monitor.failure is None
        assert column(monitor, "lr", "0.weight") == [1e-3, 1e-3, 5e-4, 5e-4]


def test_a_weight_without_a_gradient_now_and_then_restarts_alone():
    """As an expert that is not asked at every step: the others' predictions must stay what they were."""
    torch.manual_seed(0)
    inside = torch.randn(64, 6)
    always, sometimes = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    model = nn.ModuleList([always, sometimes])

    def predicted(asked):
        torch.manual_seed(1)
        for layer in model:
            nn.init.normal_(layer.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        monitor = Monitor(model, optimizer, every=1)
        for step in range(30):
            optimizer.zero_grad()
            loss = nn.functional.batch_norm(always(inside), None, None, training=True).pow(3).mean()
            if asked(step):
                loss = loss + nn.functional.batch_norm(sometimes(inside), None, None, training=True).pow(3).mean()
            loss.backward()
            optimizer.step()
        monitor.close()
        rows = monitor.samples().to_pylist()
        return [row["norm_predicted"] for row in rows if row["param"] == "0.weight"]

    np.testing.assert_array_equal(predicted(lambda step: step % 3 == 0), predicted(lambda step: True))


def test_settings_that_no_rule_accepts_cost_the_forecast_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
    monitor = Monitor(model, optimizer, every=2)
    for step in range(12):
        optimizer.param_groups[0]["momentum"] = 0.0 if step == 5 else 0.9  # torch steps, the theory has no such rule
        optimizer.zero_grad()
        model(torch.randn(32, 6)).pow(3).mean().backward()
        optimizer.step()
    monitor.close()
    assert monitor.failure is None
    rows = [row for row in monitor.samples().to_pylist() if row["param"] == "0.weight"]
    assert [row["step"] for row in rows if row["norm_predicted"] is None] == [6]


def test_adam_is_settled_once_its_angle_is_there_though_its_norm_is_not():
    """Where the second moment remembers longer than the norm needs, angle and norm do not arrive together."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(2000, 1, generator=generator))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.AdamW([weight], lr=3e-3, weight_decay=2.0, betas=(0.9, 0.999))
    with Monitor(model, optimizer, every=4) as monitor:
        for _ in range(1400):
            noise, w = torch.randn(weight.shape, generator=generator), weight.detach()
            weight.grad = (noise - (noise * w).sum() / w.square().sum() * w) / w.norm()
            optimizer.step()
    rows = monitor.samples().slice(300).to_pydict()
    ratio = np.sqrt(np.mean(np.square(rows["angle"]) / np.square(rows["angle_equilibrium"])))
    assert ratio == pytest.approx(1.0, abs=0.05)
    assert set(rows["state"]) == {"settled"}
    assert set(rows["steps_to_settle"]) == {0.0}
