from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from equilibria.control import FoldedWeightDecay, RescaleOnDecay, WeightDecayScheduler
from equilibria.errors import EquilibriaError
from equilibria.optimizers.rules import rule_of_group
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Lion, Muon, settled
from equilibria.theory.requested import holding_weight_decay
from equilibria.theory.schedules import Cosine


def optimizer_of(kind=torch.optim.SGD, **settings):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}, {"params": [torch.nn.Parameter(torch.ones(2))]}]
    groups[1]["weight_decay"] = 0.0
    return kind(groups, **{"lr": 0.1, "weight_decay": 0.04, **settings})


def decays(scheduler, steps):
    """Weight decay of the first group before wrapped optimizer step."""
    values = []
    for _ in range(steps):
        values.append(scheduler.get_last_weight_decay()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return values


def test_a_schedule_sets_the_groups_that_decay_and_leaves_the_others_and_lr():
    optimizer = optimizer_of()
    scheduler = WeightDecayScheduler(optimizer, Cosine(0.4, steps=10, end=0.04))
    assert decays(scheduler, 12) == Cosine(0.4, steps=10, end=0.04).values(12).tolist()
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert scheduler.get_last_lr() == [0.1, 0.1]


@pytest.mark.parametrize(
    "schedule", [0.3, [0.1, 0.2], lambda step: 0.01 * (step + 1)], ids=["number", "list", "function"]
)
def test_anything_that_serves_as_a_schedule(schedule):
    values = decays(WeightDecayScheduler(optimizer_of(), schedule), 3)
    assert values in ([0.3] * 3, [0.1, 0.2, 0.2], [0.01, 0.02, 0.03])


def test_the_scheduler_of_lr_inside_is_stepped_first():
    optimizer, plain = optimizer_of(), optimizer_of()
    scheduler = WeightDecayScheduler(StepLR(optimizer, 2, gamma=0.1), [1.0, 2.0, 3.0])
    reference = StepLR(plain, 2, gamma=0.1)
    for _ in range(5):
        assert scheduler.get_last_lr() == reference.get_last_lr()
        assert scheduler.last_epoch == reference.last_epoch
        for stepped in (scheduler, reference):
            stepped.optimizer.step()
            stepped.step()


def test_two_of_them_for_two_groups():
    optimizer = optimizer_of()
    optimizer.param_groups[1]["weight_decay"] = 0.01
    inner = WeightDecayScheduler(optimizer, [0.1, 0.2], groups=[0])
    outer = WeightDecayScheduler(inner, [0.3, 0.4], groups=[1])
    optimizer.step()
    outer.step()
    assert outer.get_last_weight_decay() == [0.2, 0.4]


KINDS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 5e-4}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}


@pytest.mark.parametrize("hold", ["angle", "time_constant"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_equilibrium_is_held_while_lr_moves(kind, hold):
    optimizer = optimizer_of(KINDS[kind][0], **KINDS[kind][1])
    wanted = getattr(rule_of_group(optimizer, optimizer.param_groups[0]).rule.equilibrium(), hold)
    scheduler = WeightDecayScheduler(CosineAnnealingLR(optimizer, 20, eta_min=1e-5), hold=hold)
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        rule = rule_of_group(optimizer, optimizer.param_groups[0]).rule
        assert getattr(rule.equilibrium(), hold) == pytest.approx(wanted, rel=1e-9)
    assert optimizer.param_groups[1]["weight_decay"] == 0


@pytest.mark.parametrize("hold", ["angle", "time_constant"])
def test_the_equilibrium_is_held_while_momentum_moves(hold):
    optimizer = optimizer_of(momentum=0.9, weight_decay=5e-4)
    cycle = OneCycleLR(optimizer, 0.1, 20, base_momentum=0.85, max_momentum=0.95)
    wanted = getattr(SGD(0.1, 5e-4, momentum=0.85).equilibrium(), hold)  # at the peak
    scheduler = WeightDecayScheduler(cycle, hold=hold)
    for _ in range(19):
        optimizer.step()
        scheduler.step()
        rule = rule_of_group(optimizer, optimizer.param_groups[0]).rule
        assert getattr(rule.equilibrium(), hold) == pytest.approx(wanted, rel=1e-9)


def one_cycle(optimizer, **options):
    return OneCycleLR(optimizer, 0.1, 21, pct_start=11 / 21, **options)


def triangle(optimizer, **options):
    return CyclicLR(optimizer, 0.004, 0.1, step_size_up=10, **options)


@pytest.mark.parametrize("hold", ["angle", "time_constant"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("cycle_momentum", [False, True])
@pytest.mark.parametrize("cycle", [one_cycle, triangle])
def test_a_cycle_holds_the_equilibrium_of_its_peak(cycle, cycle_momentum, wrapped, hold):
    """They replace the learning rate given to the optimizer, here 0.7; at the peak weight decay is what was typed."""
    optimizer = optimizer_of(lr=0.7, momentum=0.9, weight_decay=5e-4)
    inner = cycle(optimizer, cycle_momentum=cycle_momentum)
    if wrapped:
        inner = WeightDecayScheduler(inner, 0.0, groups=[1])
    scheduler = WeightDecayScheduler(inner, hold=hold, groups=[0])
    while optimizer.param_groups[0]["lr"] < 0.1 * (1 - 1e-12):
        assert scheduler.get_last_weight_decay()[0] > 5e-4
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_weight_decay()[0] == pytest.approx(5e-4, rel=1e-9)


@pytest.mark.parametrize("cycle", [one_cycle, triangle])
def test_a_cycle_of_adamw_holds_the_equilibrium_of_its_peak(cycle):
    optimizer = optimizer_of(torch.optim.AdamW, lr=0.7, weight_decay=0.02)
    scheduler = WeightDecayScheduler(cycle(optimizer), hold="time_constant")
    assert decays(scheduler, 20)[10] == pytest.approx(0.02, rel=1e-9)


def test_adam_with_l2_holds_lr_squared_times_decay():
    optimizer = optimizer_of(torch.optim.Adam, lr=1e-3, weight_decay=1e-3)
    scheduler = WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.5), hold="angle")
    assert decays(scheduler, 3) == pytest.approx([1e-3, 4e-3, 16e-3])


def test_a_warm_up_from_0_holds_what_was_typed_in():
    optimizer = optimizer_of(weight_decay=0.01)
    scheduler = WeightDecayScheduler(LambdaLR(optimizer, lambda t: min(t / 4, 1.0)), hold="angle")
    assert decays(scheduler, 6) == pytest.approx([0.01, 0.04, 0.02, 0.04 / 3, 0.01, 0.01])


def test_reduce_on_plateau_gets_its_metric():
    optimizer = optimizer_of(weight_decay=0.01)
    scheduler = WeightDecayScheduler(ReduceLROnPlateau(optimizer, patience=0, factor=0.5), hold="angle")
    optimizer.step()
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert scheduler.get_last_lr()[0] == 0.05
    assert scheduler.get_last_weight_decay()[0] == pytest.approx(0.02)


@pytest.mark.parametrize("through_json", [False, True])
@pytest.mark.parametrize("options", [{"schedule": Cosine(0.4, steps=20)}, {"hold": "angle"}], ids=["schedule", "hold"])
def test_a_resumed_scheduler_goes_on(options, through_json):
    def make():
        optimizer = optimizer_of(momentum=0.9, weight_decay=5e-4)
        return WeightDecayScheduler(MultiStepLR(optimizer, [3, 9], gamma=0.1), **options)

    whole, first = make(), make()
    expected = decays(whole, 12)
    assert decays(first, 6) == expected[:6]
    state = copy.deepcopy(first.state_dict())
    state["scheduler"].pop("milestones")  # a Counter, whose keys JSON would turn into text
    state = json.loads(json.dumps(state)) if through_json else state
    resumed = make()
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.load_state_dict(state)
    assert decays(resumed, 6) == expected[6:]


def test_adamw_resumes_from_json_with_its_betas():
    scheduler = WeightDecayScheduler(StepLR(optimizer_of(torch.optim.AdamW), 1), hold="angle")
    scheduler.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.get_last_weight_decay()[0] == pytest.approx(0.4)


@given(factor=st.floats(1e-3, 10))
def test_lr_times_decay_stays_for_any_drop(factor):
    optimizer = optimizer_of(weight_decay=1e-3)
    scheduler = WeightDecayScheduler(StepLR(optimizer, 1, gamma=factor), hold="time_constant")
    optimizer.step()
    scheduler.step()
    group = optimizer.param_groups[0]
    assert group["lr"] * group["weight_decay"] == pytest.approx(1e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of the two"),
        ({"schedule": 0.1, "hold": "angle"}, "expected one of the two"),
        ({"hold": "speed"}, "expected one of: angle, time_constant, norm"),
        ({"schedule": "cosine"}, "got schedule='cosine'"),
        ({"schedule": -1.0}, "expected 0 <= schedule"),
        ({"schedule": 0.1, "groups": [2]}, "there are 2: 0, 1"),
        ({"schedule": 0.1, "groups": []}, r"got groups=\[\]"),
        ({"hold": "angle", "groups": [1]}, "no equilibrium to hold"),
    ],
)
def test_bad_input_raises_and_changes_nothing(options, message):
    optimizer = optimizer_of()
    schedule = options.pop("schedule", None)
    with pytest.raises(EquilibriaError, match=message):
        WeightDecayScheduler(optimizer, schedule, **options)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.04, 0.0]


def test_groups_at_different_levels_need_a_choice():
    optimizer = optimizer_of()
    optimizer.param_groups[1]["weight_decay"] = 0.01
    with pytest.raises(EquilibriaError, match=r"weight decay \[0.01, 0.04\]; .*groups="):
        WeightDecayScheduler(optimizer, 0.1)
    WeightDecayScheduler(optimizer, hold="angle")


def test_a_bad_value_later_raises_before_any_group_is_changed():
    optimizer = optimizer_of()
    scheduler = WeightDecayScheduler(optimizer, lambda step: math.nan if step else 0.1)
    optimizer.step()
    with pytest.raises(EquilibriaError, match="got nan from the schedule function at step 1"):
        scheduler.step()
    assert scheduler.get_last_weight_decay() == [0.1, 0.0]


def test_an_optimizer_without_a_law_cannot_hold():
    with pytest.raises(EquilibriaError, match=r"without a law to hold \(no law for RMSprop .*\); use a schedule"):
        WeightDecayScheduler(optimizer_of(torch.optim.RMSprop), hold="angle")


def test_groups_that_do_not_exist_raise_with_those_that_do():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)
    with pytest.raises(EquilibriaError, match=r"got groups=\[5\]; expected indices .* there are 1: 0"):
        WeightDecayScheduler(optimizer, 0.1, groups=[5])


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_failing_step_leaves_the_scheduler_inside_and_the_settings_as_they_were(tensor_lr):
    optimizer = optimizer_of(lr=torch.tensor(0.1) if tensor_lr else 0.1, momentum=0.1, weight_decay=0.5)
    inner = OneCycleLR(optimizer, 0.1, 20, base_momentum=0.1, max_momentum=0.99)
    scheduler = WeightDecayScheduler(inner, groups=[0], schedule=lambda step: 0.5 if step < 3 else math.nan)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy(scheduler.state_dict())
    groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    lr = optimizer.param_groups[0]["lr"]
    optimizer.step()
    for _ in range(2):
        with pytest.raises(EquilibriaError, match="got nan"):
            scheduler.step()
        assert scheduler.state_dict() == before
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
        assert optimizer.param_groups[0]["lr"] is lr or not tensor_lr


def test_what_cannot_be_held_leaves_the_learning_rate_where_it_was():
    optimizer = optimizer_of(momentum=0.0, weight_decay=0.5)
    scheduler = WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.1), hold="time_constant")
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.99
    with pytest.raises(EquilibriaError, match="no weight decay does it"):
        scheduler.step()
    assert (scheduler.last_epoch, scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"]) == (0, 0.1, 0.1)


@pytest.mark.parametrize("outer", [RescaleOnDecay, FoldedWeightDecay])
def test_what_acts_on_the_weight_decay_that_is_set_belongs_outside(outer):
    """Inside, it would rescale for the lr alone, and the weights would be out of the equilibrium of lr and decay."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.LayerNorm(4, elementwise_affine=False))

    def drop():
        return StepLR(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.04), 1)

    inside = outer(drop(), model=net, invariant=["0.weight"])
    with pytest.raises(
        EquilibriaError, match=rf"got a {outer.__name__} inside .*{outer.__name__}\(WeightDecayScheduler"
    ):
        WeightDecayScheduler(inside, hold="angle")
    outer(WeightDecayScheduler(drop(), hold="angle"), model=net, invariant=["0.weight"])


# ---- a held norm


@pytest.mark.parametrize(
    "rule",
    [SGD(0.1, 5e-4, momentum=0.9), SGDW(0.1, 5e-3, momentum=0.9), AdamW(1e-3, 0.1), Lion(1e-4, 1.0), Muon(0.02, 0.1)],
    ids=lambda rule: type(rule).__name__,
)
@given(factor=st.floats(1e-3, 3.0))
def test_the_weight_decay_that_holds_the_norm_goes_as_lr(rule, factor):
    current = dataclasses.replace(rule, lr=factor * rule.lr, weight_decay=0.0)
    decay = holding_weight_decay(rule, current, hold="norm")
    held = dataclasses.replace(current, weight_decay=decay)
    assert float(settled(held).norm_sq) == pytest.approx(float(settled(rule).norm_sq), rel=1e-10)
    assert decay == pytest.approx(factor * rule.weight_decay, rel=0.2)  # to first order in lr x wd times the memory


def test_adam_with_l2_holds_its_norm():
    rule = AdamL2(1e-3, 0.01)
    decay = holding_weight_decay(rule, dataclasses.replace(rule, lr=1e-4), hold="norm")
    norms = [one.equilibrium(unit_grad_sq=1.0, dim=1).norm for one in (rule, AdamL2(1e-4, decay))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_decay_falls_with_lr_and_comes_back_after_a_checkpoint():
    def run(steps, state=None):
        optimizer = optimizer_of(torch.optim.AdamW, lr=0.01)
        scheduler = WeightDecayScheduler(CosineAnnealingLR(optimizer, 20), hold="norm")
        if state is not None:
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(json.loads(json.dumps(state[1])))
        values = decays(scheduler, steps)
        return values, (optimizer.state_dict(), scheduler.state_dict())

    whole, _ = run(20)
    first, state = run(8)
    rest, _ = run(12, state)
    assert first + rest == whole
    lrs = [0.005 * (1 + math.cos(math.pi * t / 20)) for t in range(20)]
    assert whole == pytest.approx([0.04 * lr / 0.01 for lr in lrs], rel=0.01)


def test_a_measured_law_is_held_by_its_powers():
    class Quadratic(torch.optim.Optimizer):
        """Signs, and a decay that goes as lr squared."""

        def __init__(self, params, **settings):
            super().__init__(params, settings)

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in (param for param in group["params"] if param.grad is not None):
                    param.mul_(1 - group["lr"] ** 2 * group["weight_decay"]).sub_(param.grad.sign(), alpha=group["lr"])

    optimizer = optimizer_of(Quadratic, lr=0.01, weight_decay=20.0)
    scheduler = WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.5), hold="time_constant")
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_weight_decay()[0] == pytest.approx(80.0)
    optimizer = optimizer_of(Quadratic, lr=0.01, weight_decay=20.0)
    scheduler = WeightDecayScheduler(StepLR(optimizer, 1, gamma=0.5), hold="norm")
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_weight_decay()[0] == pytest.approx(20.0, rel=0.02)  # its norm does not depend on lr
