from __future__ import annotations

import copy
import json
import math
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from tests.helpers.bn_worlds import bn_net, deviation, eval_logits, invariant_of, sgd, take_step
from tests.helpers.random_walk import SGDW, settled_adam, walk
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import equilibria as eq
from equilibria import errors, theory
from equilibria.control import Lion, RescaleOnDecay, WeightDecayScheduler, start_in_equilibrium
from equilibria.control._rescale_on_decay import RescaleWarning
from equilibria.errors import EquilibriaError
from equilibria.optimizers.rules import rule_of_group

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 5e-4}, -1 / 4),
    "SGDM": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9}, -1 / 4),
    "Nesterov": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": True}, -1 / 4),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 1e-2}, -1 / 2),
    "Adam+L2": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-5}, -1 / 3),
    "Lion": (Lion, {"lr": 1e-4, "weight_decay": 0.1}, -1 / 2),
    "Muon": (torch.optim.Muon, {"lr": 1e-3, "weight_decay": 1e-2}, -1 / 2),
}


class RuledSGDW(SGDW):
    """Says which rule it follows, as an optimizer that is not torch's has to."""

    def equilibria_rule(self, group):
        return theory.SGDW(group["lr"], group["weight_decay"], momentum=group["momentum"])


OPTIMIZERS["SGDW"] = (RuledSGDW, {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9}, -1 / 4)


def trained(kind, *, scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.1), steps=30, **options):
    """A network after some steps, with a scheduler that is rescaled."""
    make, settings, _ = OPTIMIZERS[kind]
    net = bn_net()
    params = invariant_of(net) if kind == "Muon" else net.parameters()
    optimizer = make(params, **settings)
    control = RescaleOnDecay(scheduler(optimizer), model=net, invariant=invariant_of(net), **options)
    for step in range(steps):
        take_step(net, optimizer, step)
    return net, optimizer, control


@pytest.mark.filterwarnings("ignore:the norm of:equilibria.control.RescaleWarning")  # Muon starts out of equilibrium
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_network_is_unchanged_in_train_and_eval_mode_and_everything_is_scaled(kind):
    net, optimizer, control = trained(kind)
    twin = copy.deepcopy(net)
    weights = [weight.detach().clone() for weight in invariant_of(net)]
    state = copy.deepcopy([dict(optimizer.state[weight]) for weight in invariant_of(net)])
    control.step()
    exponent = OPTIMIZERS[kind][2]
    assert deviation(eval_logits(twin), eval_logits(net)) < 1e-12
    inputs = torch.randn(32, 10, dtype=torch.float64)
    assert deviation(copy.deepcopy(twin)(inputs), copy.deepcopy(net)(inputs)) < 1e-12
    for index, weight in enumerate(invariant_of(net)):
        r = control.last_factors[f"{3 * index}.weight"]
        assert r == pytest.approx(10**exponent, rel=0.03)
        assert torch.allclose(weight, r * weights[index], rtol=1e-14)
        for key, value in optimizer.state[weight].items():
            gain = {"momentum_buffer": 1 / r, "exp_avg": 1 / r, "exp_avg_sq": 1 / r**2, "step": 1.0}[key]
            if value is not None:
                assert torch.allclose(value, gain * state[index][key], rtol=1e-13, atol=0.0)


def test_the_factor_is_that_of_the_exact_fixed_points():
    _, _, control = trained("SGDM", steps=1)
    control.step()
    old, new = (theory.SGD(lr, 5e-4, momentum=0.9).equilibrium(unit_grad_sq=1.0).norm for lr in (0.1, 0.01))
    assert list(control.last_factors.values()) == pytest.approx([new / old] * 3, rel=1e-12)


def test_the_next_gradient_is_the_one_of_rescaled_weights():
    net, _, control = trained("SGDM", steps=5)
    old = copy.deepcopy(net)
    before = [weight.grad.clone() for weight in invariant_of(net)]
    control.step()
    for weight, gradient in zip(invariant_of(net), before, strict=True):
        assert torch.allclose(weight.grad, gradient / control.last_factors["0.weight"], rtol=1e-13)
    for twin in (old, net):
        twin.zero_grad()
        torch.manual_seed(0)
        twin(torch.randn(32, 10, dtype=torch.float64)).square().sum().backward()
    for a, b in zip(invariant_of(old), invariant_of(net), strict=True):
        assert deviation(a.grad / control.last_factors["0.weight"], b.grad) < 1e-10


class Holder(nn.Module):
    """The weights of a random walk, as a network."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


WALKS = {
    "SGDM": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=5e-4, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=5e-2),
}
SETTLING, REPLICAS, ENTRIES = 60, 300, 300


def deviation_after_a_drop(kind, k, *, weights_only=False):
    """The largest |angle/prediction - 1| in the first 20 steps after lr / k.

    The root mean square over the replicas scatters by 1/sqrt(2 replicas entries) = 0.24 % per step.
    """
    rule = rule_of_group(optimizer := WALKS[kind]([torch.ones(1)]), optimizer.param_groups[0]).rule
    norm = rule.equilibrium(unit_grad_sq=1.0, dim=ENTRIES).norm
    schedulers = []

    def make(params):
        optimizer = WALKS[kind](params)
        drop = StepLR(optimizer, 1, gamma=1 / k)
        schedulers.append(RescaleOnDecay(drop, model=Holder(params[0]), invariant=["weight"]))
        return settled_adam(optimizer, 1 / norm**2 / ENTRIES) if kind == "AdamW" else optimizer

    @torch.no_grad()
    def before_step(step, weight, optimizer):
        if step < SETTLING:  # momentum builds up; without it the norm would sink meanwhile
            weight.mul_(norm / weight.norm(dim=1, keepdim=True))
        elif step == SETTLING:
            state = copy.deepcopy(optimizer.state[weight])
            schedulers[0].step()
            optimizer.state[weight].update(state if weights_only else {})

    walked = walk(make, SETTLING + 20, norm=norm, replicas=REPLICAS, dim=ENTRIES, before_step=before_step)
    wanted = replace(rule, lr=rule.lr / k).equilibrium().angle
    return max(abs(walked.rms_angle(t, t + 1) / wanted - 1) for t in range(SETTLING, SETTLING + 20))


@pytest.mark.parametrize("k", [2.0, 10.0, 0.1])
@pytest.mark.parametrize("kind", WALKS)
def test_the_angle_is_on_its_new_value_at_once(kind, k):
    assert deviation_after_a_drop(kind, k) < 0.02


class Sign(torch.optim.Optimizer):
    """The gradient over a running mean of its size, with state under names of its own."""

    def __init__(self, params, *, lr=1e-3, weight_decay=1.0, beta=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state, beta, root = self.state[param], group["beta"], param.grad.abs().sqrt()
                state["root"] = beta * state.get("root", torch.zeros_like(param)) + (1 - beta) * root
                state["push"] = beta * state.get("push", 0.0) + param.grad / (state["root"] ** 2 + 1e-12)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * state["push"])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUILIBRIA_CACHE", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", [Sign, lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.1, alpha=0.9)])
def test_a_measured_law_is_rescaled_with_its_state(kind):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(256, 64, dtype=torch.float64))
    optimizer, scale = kind([weight]), {"unit_grad_sq": 100.0, "dim": float(weight.numel())}
    control = RescaleOnDecay(StepLR(optimizer, 1, gamma=0.1), model=Holder(weight), invariant=["weight"])
    rule = rule_of_group(optimizer, optimizer.param_groups[0], measure=True).rule
    norm, after = rule.equilibrium(**scale).norm, replace(rule, lr=rule.lr / 10).equilibrium(**scale)

    def turn(hold):
        noise, before = torch.randn_like(weight), weight.detach().clone()
        noise -= (noise * before).sum() / before.square().sum() * before
        weight.grad = noise * (10.0 / noise.norm() / before.norm())
        optimizer.step()
        turned = (weight / weight.norm() - before / before.norm()).norm().item()
        with torch.no_grad():
            weight.mul_(norm / weight.norm() if hold else 1.0)
        return turned**2

    with torch.no_grad():
        weight.mul_(norm / weight.norm())
    for _ in range(200):
        turn(True)
    control.step()
    assert weight.norm().item() == pytest.approx(after.norm, rel=0.01)
    assert math.sqrt(sum(turn(False) for _ in range(20)) / 20) == pytest.approx(after.angle, rel=0.02)
    kept = json.loads(json.dumps(control.state_dict()))
    control.load_state_dict(kept)
    assert control.state_dict()["equilibria"][0]["lr"] == pytest.approx(rule.lr / 10)


@pytest.mark.parametrize(("kind", "off"), [("SGDM", 0.33), ("AdamW", 1.9)])
def test_weights_alone_as_the_papers_say_leave_the_angle_off(kind, off):
    assert deviation_after_a_drop(kind, 10.0, weights_only=True) == pytest.approx(off, rel=0.05)


# ---- schedules


def test_between_changes_nothing_is_touched():
    net, optimizer, control = trained("SGDM", scheduler=lambda o: MultiStepLR(o, [100], gamma=0.1))
    versions = [tensor._version for tensor in (*net.parameters(), *net.buffers())]
    for _ in range(20):
        control.step()
    assert versions == [tensor._version for tensor in (*net.parameters(), *net.buffers())]
    assert control.last_factors == {}
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_cosine_is_followed_step_by_step():
    net, _, control = trained("SGDM", scheduler=lambda o: CosineAnnealingLR(o, 10, eta_min=1e-3))
    before = invariant_of(net)[0].detach().norm()
    for _ in range(10):
        control.step()
    assert float(invariant_of(net)[0].detach().norm() / before) == pytest.approx(100**-0.25, rel=1e-3)


def norms_along(rates, *, steps=1):
    """||w|| after every scheduler step over ||w|| before; rates are relative to the lr of the optimizer."""
    net, _, control = trained("SGDM", scheduler=lambda o: LambdaLR(o, lambda t: rates[t]), steps=steps)
    before = invariant_of(net)[0].detach().norm()
    factors = []
    for _ in rates[1:]:
        control.step()
        factors.append(float(invariant_of(net)[0].detach().norm() / before))
    return factors


@pytest.mark.parametrize("start", [0.0, 1e-3])
def test_a_warm_up_to_the_lr_of_the_equilibrium_leaves_norms_alone_and_what_follows_is_followed(start):
    """The weights are in the equilibrium of the lr that was typed; falls, and rises beyond it or later, count."""
    factors = norms_along([start, 0.25, 0.25, 0.5, 1.0, 2.0, 0.5, 1.0])
    assert factors == pytest.approx([1, 1, 1, 1, 2**0.25, 0.5**0.25, 1], rel=1e-3)


def test_a_warm_up_that_falls_before_it_arrives_is_followed_from_its_highest_lr_on():
    assert norms_along([0.1, 0.5, 0.25, 0.5]) == pytest.approx([1, 0.5**0.25, 1], rel=1e-3)


def test_a_warm_up_under_one_cycle_ends_at_its_peak():
    net, _, control = trained("SGDM", scheduler=lambda o: OneCycleLR(o, 0.7, 10, cycle_momentum=False), steps=1)
    before = invariant_of(net)[0].detach().norm()
    rates, factors = [], []
    for _ in range(9):
        control.step()
        rates.append(control.get_last_lr()[0])
        factors.append(float(invariant_of(net)[0].detach().norm() / before))
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(0.7, rel=0.05) and 0 < peak < 8
    assert factors[: peak + 1] == pytest.approx([1] * (peak + 1), rel=1e-9)
    assert factors[8] == pytest.approx((rates[8] / rates[peak]) ** 0.25, rel=0.02)


def test_weights_already_trained_are_in_the_equilibrium_of_the_present_lr():
    net, optimizer, _ = trained("SGDM", scheduler=lambda o: LambdaLR(o, lambda t: 0.01), steps=3)
    drop = StepLR(optimizer, 1, gamma=4.0)
    control = RescaleOnDecay(drop, model=net, invariant=["0.weight"], example=torch.randn(8, 10).double())
    control.step()
    assert control.last_factors["0.weight"] == pytest.approx(4**0.25, rel=1e-3)


def test_a_warm_up_is_resumed_as_one():
    def make():
        return trained("SGDM", scheduler=lambda o: LambdaLR(o, lambda t: (t + 1) / 8), steps=1)

    (_, _, first), (net, optimizer, second) = make(), make()
    first.step()
    second.load_state_dict(json.loads(json.dumps({**first.state_dict(), "scheduler": second.scheduler.state_dict()})))
    optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    before = invariant_of(net)[0].detach().norm()
    for _ in range(4):
        second.step()
    assert invariant_of(net)[0].detach().norm() == before


def test_started_in_equilibrium_and_warmed_up_the_norm_and_the_angle_stay_there():
    """The README's script with a warm-up from lr / 1000: its first lr was the reference, and norms grew 29-fold."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    batches = [(inputs, inputs[:, :5].argmax(1)) for inputs in torch.randn(80, 32, 20)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1.0)
    loss = lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    started = start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss, batches=batches[:3])
    warm_up = LambdaLR(optimizer, lambda t: max(1e-3, min(1.0, t / 50)))
    scheduler = RescaleOnDecay(warm_up, model=net, invariant=["0.weight"])
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        before = net[0].weight.detach().clone()
        optimizer.step()
        scheduler.step()
    assert float(net[0].weight.detach().norm()) == pytest.approx(started[0].after, rel=0.25)
    turned = torch.nn.functional.cosine_similarity(before.flatten(), net[0].weight.detach().flatten(), dim=0).acos()
    assert float(turned) == pytest.approx(started[0].angle, rel=0.5)


@pytest.mark.parametrize("resume", [False, True])
def test_a_pause_at_lr_0_is_bridged(resume):
    rates = [1.0, 0.0, 0.0, 0.5]
    schedule = lambda optimizer: LambdaLR(optimizer, lambda t: rates[t])  # noqa: E731
    net, _, control = trained("SGDM", scheduler=schedule, steps=1)
    control.step()
    control.step()
    if resume:
        state = json.loads(json.dumps(control.state_dict()))
        control._settled = {}
        control.load_state_dict(state)
    before = invariant_of(net)[0].detach().norm()
    control.step()
    assert float(invariant_of(net)[0].detach().norm() / before) == pytest.approx(2**-0.25, rel=1e-4)


def test_a_change_of_weight_decay_counts_too():
    def schedule(optimizer):
        return WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.5), hold="time_constant")

    _, optimizer, control = trained("SGDM", scheduler=schedule)
    control.step()
    assert optimizer.param_groups[0]["weight_decay"] == 1e-3
    assert control.last_factors["0.weight"] == pytest.approx(4**-0.25, rel=1e-9)


def test_reduce_lr_on_plateau_may_be_inside():
    _, optimizer, control = trained("SGDM", scheduler=lambda o: ReduceLROnPlateau(o, factor=0.1, patience=0))
    control.step(1.0)
    assert control.last_factors == {}
    control.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert control.last_factors["0.weight"] == pytest.approx(10**-0.25, rel=1e-3)


def test_before_the_first_step_there_is_no_state_to_rescale():
    net = bn_net()
    optimizer = sgd(net)
    control = RescaleOnDecay(
        LambdaLR(optimizer, lambda t: t + 1),
        model=net,
        invariant=invariant_of(net),
        example=torch.randn(8, 10).double(),
    )
    optimizer.step()
    control.step()
    assert control.last_factors["0.weight"] == pytest.approx(2**0.25, rel=1e-3)


def test_a_run_resumed_around_a_drop_continues_bit_for_bit():
    def run(net, optimizer, control, steps):
        for step in steps:
            take_step(net, optimizer, step)
            control.step()

    def make():
        return trained("AdamW", scheduler=lambda o: MultiStepLR(o, [5, 12], gamma=0.1), steps=0)

    whole, first, resumed = make(), make(), make()
    run(*whole, range(20))
    run(*first, range(8))
    for before, after in zip(first, resumed, strict=True):
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(*resumed, range(8, 20))
    assert torch.equal(eval_logits(whole[0]), eval_logits(resumed[0]))


def test_a_norm_behind_a_layer_with_bias_and_groups_that_mix():
    net = bn_net(bias=True)
    optimizer = sgd(net)
    control = RescaleOnDecay(StepLR(optimizer, 1, gamma=0.2), model=net, invariant=["0.weight", "6.weight"])
    for step in range(10):
        take_step(net, optimizer, step)
    twin = copy.deepcopy(net)
    control.step()
    assert set(control.last_factors) == {"0.weight", "6.weight"}
    assert deviation(eval_logits(twin), eval_logits(net)) < 1e-12


def test_two_controllers_may_wait_for_one_model():
    net = bn_net()
    optimizer = sgd(net)
    inner = RescaleOnDecay(StepLR(optimizer, 2, gamma=0.1), model=net, invariant=["0.weight"])
    outer = RescaleOnDecay(inner, model=net, invariant=["3.weight", "6.weight"])
    for step in range(2):
        take_step(net, optimizer, step)
        twin = copy.deepcopy(net)
        outer.step()
    assert set(inner.last_factors) | set(outer.last_factors) == {"0.weight", "3.weight", "6.weight"}
    assert deviation(eval_logits(twin), eval_logits(net)) < 1e-12


def test_a_frozen_weight_stays():
    net, _, control = trained("SGDM", steps=1)
    frozen = invariant_of(net)[1].requires_grad_(False)
    before = frozen.detach().clone()
    control.step()
    assert set(control.last_factors) == {"0.weight", "6.weight"}
    assert torch.equal(frozen, before)


def test_a_network_without_running_statistics_needs_no_example():
    net = nn.Sequential(nn.Linear(10, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    control = RescaleOnDecay(StepLR(optimizer, 1), model=net, invariant=["0.weight"])
    optimizer.step()
    control.step()
    assert control.last_factors["0.weight"] == pytest.approx(10**-0.25, rel=1e-3)


# ---- refusals


def assert_unchanged(change, *, net, optimizer, match):
    before = (
        copy.deepcopy([p.detach() for p in net.parameters()]),
        [dict(g, params=None) for g in optimizer.param_groups],
    )
    with pytest.raises(EquilibriaError, match=match):
        change()
    assert all(torch.equal(a, b) for a, b in zip(before[0], net.parameters(), strict=True))
    assert before[1] == [dict(g, params=None) for g in optimizer.param_groups]


def test_state_of_unknown_meaning_raises_before_anything_is_changed():
    def schedule(optimizer):
        return WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.1), hold="angle")

    net, optimizer, control = trained("SGDM", scheduler=schedule)
    optimizer.state[invariant_of(net)[2]]["mystery"] = torch.zeros_like(invariant_of(net)[2])
    assert_unchanged(control.step, net=net, optimizer=optimizer, match="got optimizer state 'mystery' for '6.weight'")


def test_a_learning_rate_without_an_equilibrium_raises_before_anything_is_changed():
    net, optimizer, control = trained("SGDM", scheduler=lambda o: StepLR(o, 1, gamma=1e9))
    assert_unchanged(control.step, net=net, optimizer=optimizer, match="got lr")


def test_a_change_before_any_forward_pass_raises():
    net, optimizer, control = trained("SGDM", steps=0)
    optimizer.step()
    assert_unchanged(control.step, net=net, optimizer=optimizer, match="call the model itself")


def test_an_optimizer_without_a_law_raises():
    net = bn_net()
    for optimizer, message in (
        (torch.optim.Adagrad(net.parameters(), weight_decay=0.1), "no law for Adagrad .not stationary.: its squared"),
        (torch.optim.SGD(net.parameters(), lr=0.1), "weight_decay=0 in parameter group 0"),
    ):
        with pytest.raises(EquilibriaError, match=message):
            RescaleOnDecay(optimizer, model=net, invariant=invariant_of(net))


@pytest.mark.parametrize(
    ("invariant", "message"),
    [("0.weight", "symmetries"), ([], "names nothing"), (["nope"], "got invariant name 'nope'"), (None, "symmetries")],
)
def test_weights_that_are_not_there_raise_with_what_to_do(invariant, message):
    net = bn_net()
    with pytest.raises(EquilibriaError, match=message):
        RescaleOnDecay(sgd(net), model=net, invariant=invariant)


def test_the_learning_rate_stays_finite_through_the_whole_cosine():
    net, optimizer, control = trained("AdamW", scheduler=lambda o: CosineAnnealingLR(o, 20))
    for step in range(20):
        take_step(net, optimizer, step)
        control.step()
    assert optimizer.param_groups[0]["lr"] == 0
    assert all(math.isfinite(float(weight.detach().norm())) for weight in net.parameters())


def test_a_weight_that_is_not_invariant_raises_before_anything_changes():
    """The last layer: no norm follows it."""
    net = bn_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    RescaleOnDecay(StepLR(optimizer, 1, gamma=0.1), model=net, invariant=["0.weight", "9.weight"])
    net[9].weight.grad = 2 * net[9].weight.detach()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(EquilibriaError, match=r"got 9\.weight, whose gradient has a cosine of 1 .*invariant=sym"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_large_steps_with_closures_are_no_false_alarm():
    """The gradients second_moment when such a step begins belong to the weights before the last one."""
    net = bn_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=5.0, weight_decay=5e-4)
    control = RescaleOnDecay(StepLR(optimizer, 1, gamma=0.9), model=net, invariant=invariant_of(net))
    for step in range(5):
        take_step(net, optimizer, step, closure=True)
        control.step()
    assert control.last_factors


def test_inside_of_a_sequential_scheduler_it_says_to_wrap_that_one():
    net = bn_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
    warm, drop = ConstantLR(optimizer, total_iters=2), StepLR(optimizer, 5)
    with pytest.raises(EquilibriaError, match="wrap the SequentialLR instead"):
        SequentialLR(optimizer, [RescaleOnDecay(warm, model=net, invariant=invariant_of(net)), drop], [2])
    RescaleOnDecay(SequentialLR(optimizer, [warm, drop], [2]), model=net, invariant=invariant_of(net))


def test_swapped_arguments_raise_in_a_line():
    net = bn_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
    with pytest.raises(EquilibriaError, match="got scheduler=an object of type Sequential; expected") as refused:
        RescaleOnDecay(net, model=optimizer, invariant=invariant_of(net))
    assert len(str(refused.value)) < 200


def test_a_cosine_to_zero_leaves_the_network_what_it_is():
    """AdamW's equilibrium norm falls to zero with lr; the eps of a BatchNorm must not become what it divides by."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    inner = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    inputs = torch.randn(64, 6)
    scheduler = RescaleOnDecay(inner, model=net, invariant=[net[0].weight], example=inputs)
    net(inputs).square().mean().backward()
    optimizer.step()
    for _ in range(50):
        net(inputs)  # the running statistics are those of these weights
    net.eval()
    before = net(inputs).detach()
    with pytest.warns(RescaleWarning, match="(was|were) not rescaled by") as warned:
        for _ in range(400):
            scheduler.step()
    assert len(warned) == 1
    after = net(inputs).detach()
    assert (after - before).abs().max() < 5e-3 * before.std()
    assert net[0].weight.norm() > 0


def test_small_factors_are_not_rounded_away_in_bfloat16():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 3)).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / 1000))
    inputs = torch.randn(64, 64).bfloat16()
    scheduler = RescaleOnDecay(inner, model=net, invariant=[net[0].weight], example=inputs)
    net(inputs).square().mean().backward()
    optimizer.step()
    before, var = net[0].weight.detach().float().norm(), net[1].running_var.float().mean()
    for _ in range(1000):
        scheduler.step()
    # lr / 100: the norm by 100^(-1/4), up to what still waits (5 %) and 20 roundings of 0.2 % each
    assert net[0].weight.detach().float().norm() / before == pytest.approx(100**-0.25, rel=0.06)
    assert net[1].running_var.float().mean() / var == pytest.approx(100**-0.5, rel=0.12)


def test_a_step_that_fails_leaves_the_schedule_where_it_was():
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    scheduler = RescaleOnDecay(StepLR(optimizer, 1, 0.5), model=net, invariant=[net[0].weight])
    optimizer.step()
    with pytest.raises(EquilibriaError, match="got no forward pass"):
        scheduler.step()
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch, scheduler.get_last_lr()) == (0.1, 0, [0.1])
    net(torch.randn(16, 6)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_last_factors_are_those_of_the_last_change():
    scheduler = stepping(small_net(), [1.0, 0.5, 0.5, 0.5])
    for _ in range(3):
        scheduler.step()
    assert scheduler.last_factors == pytest.approx({"0.weight": 0.5**0.25}, rel=1e-3)


# ---- when a factor is applied, and when it waits


def small_net(*, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=eps), nn.Linear(8, 3)).to(dtype)


def stepping(net: nn.Module, rates: list[float], *, optimizer: torch.optim.Optimizer | None = None) -> RescaleOnDecay:
    """After one optimizer step; every scheduler step takes the next of the rates."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    inputs = torch.randn(32, 6).to(net[0].weight.dtype)
    drop = LambdaLR(optimizer, lambda t: rates[t])
    scheduler = RescaleOnDecay(drop, model=net, invariant=[net[0].weight], example=inputs)
    net(inputs).square().mean().backward()
    optimizer.step()
    return scheduler


def applied(scheduler: RescaleOnDecay) -> float:
    scheduler.last_factors = {}
    scheduler.step()
    return scheduler.last_factors.get("0.weight", 1.0)


@pytest.mark.parametrize(
    ("dtype", "factors"), [(torch.float32, [0.97, 0.98]), (torch.float16, [1, 0.9506]), (torch.bfloat16, [1, 0.9506])]
)
def test_only_types_of_16_bits_wait_for_5_percent(dtype, factors):
    rates = [1.0, 0.97**4, (0.97 * 0.98) ** 4]
    scheduler = stepping(small_net(dtype=dtype), rates)
    assert [applied(scheduler) for _ in range(2)] == pytest.approx(factors, rel=1e-4)
    assert abs(math.log(0.9506)) > 0.05


def test_what_is_owed_survives_a_checkpoint():
    rates = [1.0, 0.97**4, (0.97 * 0.98) ** 4]
    first, second = (stepping(small_net(dtype=torch.bfloat16), rates) for _ in range(2))
    applied(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert applied(second) == pytest.approx(0.97 * 0.98, rel=1e-4)


@pytest.mark.parametrize(("over_eps", "is_applied"), [(4.4e3, True), (3.6e3, False)])
@pytest.mark.filterwarnings("ignore:.*not rescaled:equilibria.control._rescale_on_decay.RescaleWarning")
def test_a_variance_stays_a_thousand_times_its_eps(over_eps, is_applied):
    """lr / 16 halves the norm, which leaves a quarter of the variance."""
    net = small_net()
    scheduler = stepping(net, [1.0, 1 / 16, 1.0, 2.0])
    net[1].running_var.fill_(over_eps * net[1].eps)
    assert applied(scheduler) == pytest.approx(0.5 if is_applied else 1.0, rel=1e-3)
    assert applied(scheduler) == pytest.approx(2.0 if is_applied else 1.0, rel=1e-3)


def test_a_variance_near_its_eps_may_grow():
    net = small_net()
    scheduler = stepping(net, [1.0, 16.0])
    net[1].running_var.fill_(10 * net[1].eps)
    assert applied(scheduler) == pytest.approx(2.0, rel=1e-3)


def test_adam_with_l2_is_rescaled_by_its_own_gradients():
    """Where decay outweighs the gradient the cube root is off: L is that of the second moment, without its bias."""
    net = small_net(dtype=torch.float64, eps=1e-30)
    weight, settings = net[0].weight, {"lr": 0.1, "weight_decay": 0.5}
    scheduler = stepping(net, [1.0, 0.1], optimizer=torch.optim.Adam(net.parameters(), **settings))
    second_moment = scheduler.optimizer.state[weight]["exp_avg_sq"]
    second_moment.fill_(1e-9)
    unit_grad_sq = 48e-9 / (1 - 0.999) * float(weight.detach().square().sum())
    rules = [theory.AdamL2(lr, 0.5) for lr in (0.1, 0.01)]
    norms = [rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=48).norm for rule in rules]
    assert abs(norms[1] / norms[0] * 10 ** (1 / 3) - 1) > 1e-3
    assert applied(scheduler) == pytest.approx(norms[1] / norms[0], rel=1e-9)


def test_adam_with_l2_without_gradients_is_rescaled_by_the_cube_root():
    net = small_net(dtype=torch.float64, eps=1e-30)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = stepping(net, [1.0, 0.1], optimizer=optimizer)
    optimizer.state[net[0].weight]["exp_avg_sq"].zero_()
    assert applied(scheduler) == pytest.approx(10 ** (-1 / 3), rel=1e-3)


@pytest.mark.parametrize("kind", ["SGDM", "AdamW"])
def test_a_step_that_fails_gives_back_the_momentum_that_the_schedule_moved(kind):
    net, (make, settings, _) = small_net(), OPTIMIZERS[kind]
    optimizer = make(net.parameters(), **settings)
    cycle = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    scheduler = RescaleOnDecay(cycle, model=net, invariant=[net[0].weight])
    optimizer.step()
    for _ in range(2):  # the rise to max_lr, which is left alone
        scheduler.step()
    assert_unchanged(scheduler.step, net=net, optimizer=optimizer, match="got no forward pass")


class Locked(StepLR):
    """Holds what cannot be copied."""

    def __init__(self, optimizer, *, gamma):
        self.lock = threading.Lock()
        super().__init__(optimizer, 1, gamma=gamma)


def test_a_schedule_that_holds_what_cannot_be_copied_is_stepped():
    _, optimizer, scheduler = trained("SGDM", scheduler=lambda optimizer: Locked(optimizer, gamma=0.1), steps=2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(("share", "warns"), [(0.4, True), (0.6, False), (1.7, False), (3.0, True)])
def test_a_norm_twice_or_half_that_of_the_equilibrium_warns_once(share, warns):
    """AdamW's equilibrium norm is known from lr, weight decay and the number of entries."""
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    with torch.no_grad():
        norm = theory.AdamW(1e-3, 0.1).equilibrium(dim=48).norm
        net[0].weight.mul_(share * norm / net[0].weight.norm())
    scheduler = stepping(net, [1.0, 0.9, 0.8, 0.7], optimizer=optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            scheduler.step()
    told = [str(warning.message) for warning in seen]
    assert len(told) == warns
    assert all(
        f"the norm of 0.weight is {share:.2g} times that of the equilibrium of lr=0.001" in text for text in told
    )


@pytest.mark.filterwarnings("error:.*not rescaled:equilibria.control._rescale_on_decay.RescaleWarning")
def test_a_warning_that_is_an_error_does_not_end_the_training(monkeypatch):
    printed = []
    monkeypatch.setattr(errors, "_print_warning", printed.append)
    scheduler = stepping(small_net(), [0.1, 1e-9])
    with warnings.catch_warnings(action="error"):
        scheduler.step()
    assert len(printed) == 1 and "not rescaled" in printed[0]


def test_symmetries_can_be_searched_again_before_the_first_training_step():
    """A cell of a notebook that is run twice: the search calls a copy of the model, with the hook that waits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(2)]
    for _ in range(2):
        sym = eq.symmetries(eq.objective(net, nn.functional.cross_entropy), batches)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
        drop = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scheduler = RescaleOnDecay(drop, model=net, invariant=sym.alone)
    nn.functional.cross_entropy(net(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    scheduler.step()
    assert scheduler.last_factors


@pytest.mark.parametrize("seed", range(5))
def test_a_last_layer_is_refused_before_it_is_rescaled(seed):
    """Its cosine is that of chance: what tells is that no BatchNorm follows, in a network that has one."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    drop = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5], 0.1)
    scheduler = RescaleOnDecay(drop, model=net, invariant=["0.weight", "3.weight"])
    with pytest.raises(EquilibriaError, match=r"got 3\.weight, whose gradient has a cosine"):
        for _ in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(32, 16)
            torch.nn.functional.cross_entropy(net(inputs), inputs[:, :4].argmax(1)).backward()
            optimizer.step()
            scheduler.step()
    assert not scheduler.last_factors
