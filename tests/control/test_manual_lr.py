"""Training loops that set the learning rate themselves, ``group["lr"] = lr``, right before the step."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from tests.helpers.bn_worlds import bn_net, deviation, eval_logits, invariant_of, sgd, take_step
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from equilibria.control import AngularSchedule, FoldedWeightDecay, RescaleOnDecay, WeightDecayScheduler
from equilibria.optimizers.controllers import control_log
from equilibria.theory.rules import AdamW
from equilibria.theory.states import rescale_factors

RATES = [0.1, 0.1, 0.05, 0.05, 0.02, 0.04, 0.04]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradients(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 10, dtype=torch.float64, generator=generator)
    nn.functional.cross_entropy(net(inputs), torch.randint(5, (32,), generator=generator)).backward()


OPTIMIZERS = {
    "SGDM": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=5e-3, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=5e-2),
}


@pytest.mark.filterwarnings("ignore:the norm of:equilibria.control.RescaleWarning")  # weights not in equilibrium
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rescaling_before_the_step_equals_rescaling_when_the_scheduler_steps(kind):
    """The same network with the same state: weights, pending gradient and moments are rescaled together."""
    scheduled, manual = bn_net(), bn_net()
    optimizers = OPTIMIZERS[kind](scheduled.parameters()), OPTIMIZERS[kind](manual.parameters())
    schedule = LambdaLR(optimizers[0], lambda t: RATES[min(t, 6)] / 0.1)
    scheduler = RescaleOnDecay(schedule, model=scheduled, invariant=invariant_of(scheduled))
    control = RescaleOnDecay(optimizers[1], model=manual, invariant=invariant_of(manual))
    for step, lr in enumerate(RATES):
        gradients(scheduled, optimizers[0], step)
        optimizers[0].step()
        gradients(manual, optimizers[1], step)
        set_lr(optimizers[1], lr)
        optimizers[1].step()
        for a, b in zip(scheduled.parameters(), manual.parameters(), strict=True):
            assert deviation(a.detach(), b.detach()) < 1e-9
        assert deviation(eval_logits(scheduled), eval_logits(manual)) < 1e-9
        scheduler.step()
    assert control.last_factors["0.weight"] == pytest.approx(2 ** (0.25 if kind == "SGDM" else 0.5), rel=0.02)


def test_the_pending_gradient_is_that_of_the_rescaled_weight():
    net = bn_net()
    optimizer = sgd(net, momentum=0.0)
    RescaleOnDecay(optimizer, model=net, invariant=invariant_of(net))
    gradients(net, optimizer, 0)
    optimizer.step()
    gradients(net, optimizer, 1)
    before = [(weight.detach().clone(), weight.grad.clone()) for weight in invariant_of(net)]
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend((weight.detach().clone(), weight.grad.clone()) for weight in invariant_of(net))
    )
    set_lr(optimizer, optimizer.param_groups[0]["lr"] / 16)
    optimizer.step()
    for (weight, gradient), (rescaled, gradient_then) in zip(before, seen, strict=True):
        assert torch.allclose(rescaled, weight / 2, rtol=1e-3)
        assert torch.allclose(weight * gradient, rescaled * gradient_then, rtol=1e-12)


def test_a_scheduler_that_the_controller_does_not_wrap_is_followed_too():
    net = bn_net()
    optimizer = sgd(net)
    control = RescaleOnDecay(optimizer, model=net, invariant=["0.weight"])
    drop = StepLR(optimizer, 1, gamma=0.1)
    take_step(net, optimizer, 0)
    drop.step()
    assert control.last_factors == {}
    take_step(net, optimizer, 1)
    assert control.last_factors["0.weight"] == pytest.approx(10**-0.25, rel=1e-3)


def test_a_run_resumed_at_a_manual_drop_continues_bit_for_bit():
    def make():
        net = bn_net()
        optimizer = sgd(net)
        return net, optimizer, RescaleOnDecay(optimizer, model=net, invariant=invariant_of(net))

    def run(net, optimizer, steps):
        for step in steps:
            set_lr(optimizer, 0.1 if step < 5 else 0.02)
            take_step(net, optimizer, step)

    whole, first, resumed = make(), make(), make()
    run(*whole[:2], range(10))
    run(*first[:2], range(5))
    resumed[0](torch.randn(8, 10, dtype=torch.float64))  # locates the statistics
    for before, after in zip(first, resumed, strict=True):
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(*resumed[:2], range(5, 10))
    assert whole[2].last_factors and torch.equal(eval_logits(whole[0]), eval_logits(resumed[0]))


@pytest.mark.parametrize("hold", ["time_constant", "angle"])
def test_weight_decay_holds_the_lr_of_the_step_itself(hold):
    """It lagged one step behind: lr x wd was 1e-5, 2e-4, 1.5e-4, 1.33e-4 for 1e-4."""
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
    scheduler = WeightDecayScheduler(optimizer, hold=hold)
    products = []
    for lr in (1e-4, 2e-4, 3e-4, 1e-3):
        set_lr(optimizer, lr)
        weight.grad = torch.ones(3, 3)
        optimizer.step()
        products.append(optimizer.param_groups[0]["lr"] * optimizer.param_groups[0]["weight_decay"])
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == lr  # it is the user's
    assert products == pytest.approx([1e-4] * 4, rel=1e-9)


def test_rescaling_around_a_held_weight_decay_sees_both_settings_of_the_step():
    net = bn_net()
    optimizer = sgd(net)
    control = RescaleOnDecay(WeightDecayScheduler(optimizer, hold="time_constant"), model=net, invariant=["0.weight"])
    take_step(net, optimizer, 0)
    set_lr(optimizer, optimizer.param_groups[0]["lr"] / 2)
    take_step(net, optimizer, 1)
    assert control.last_factors["0.weight"] == pytest.approx(4**-0.25, rel=1e-9)


def folded_and_plain():
    for folds in (False, True):
        net = bn_net()
        optimizer = sgd(net)
        if folds:
            FoldedWeightDecay(optimizer, model=net, invariant=invariant_of(net))
        for step, lr in enumerate(RATES):
            set_lr(optimizer, lr)
            take_step(net, optimizer, step)
        yield net


def test_a_folded_run_follows_a_manual_lr():
    plain, folded = folded_and_plain()
    assert deviation(eval_logits(plain), eval_logits(folded)) < 1e-9


def angular(group_of_its_own: bool, angle: float = 0.01, **options):
    net = bn_net()
    optimizer = sgd(net) if group_of_its_own else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, AngularSchedule(optimizer, angle, invariant=invariant_of(net), model=net, **options)


def test_an_angular_schedule_overrules_an_lr_set_before_the_step_and_says_so_once():
    """The user's lr won, while the warning said that it was overruled."""
    net, optimizer, scheduler = angular(group_of_its_own=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(60):
            set_lr(optimizer, 0.02)
            take_step(net, optimizer, step)
            assert step == 0 or optimizer.param_groups[0]["lr"] != 0.02
            assert optimizer.param_groups[1]["lr"] == 0.02  # not its own
            scheduler.step()
    report = scheduler.report(40)[0]
    assert report.ratio == pytest.approx(1.0, abs=0.03)
    assert ["overruled before every step" in str(warning.message) for warning in seen] == [True]


def test_by_weight_decay_the_lr_is_the_users():
    net, optimizer, scheduler = angular(group_of_its_own=True, angle=0.3, by="weight_decay")
    for step in range(2):
        gradients(net, optimizer, step)
        set_lr(optimizer, 0.05)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        scheduler.step()
    set_lr(optimizer, 0.1)
    gradients(net, optimizer, 2)
    before = optimizer.param_groups[0]["weight_decay"]
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] != before  # that of the lr of this step
    assert math.isfinite(optimizer.param_groups[0]["weight_decay"])


def test_parameters_that_share_a_group_with_invariant_weights_are_named():
    told = r"and with it that of \d+ other parameters in the same group \(1.weight, 1.bias, .*split_decay"
    with pytest.warns(UserWarning, match=told):
        angular(group_of_its_own=False)


def test_controllers_act_in_the_order_of_construction_before_all_other_hooks():
    net = bn_net()
    optimizer = sgd(net)
    optimizer.register_step_pre_hook(lambda *_: None)
    inner = WeightDecayScheduler(optimizer, hold="angle")
    outer = RescaleOnDecay(inner, model=net, invariant=["0.weight"])
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    assert owners == [inner, outer, None]
    assert control_log(optimizer).controllers == [inner, outer]


def test_a_controller_of_the_settings_acts_before_one_that_rescales_whichever_was_made_first():
    """Made first, RescaleOnDecay saw the new lr with the old weight decay, and one step turned 0.31 times as far."""
    factors = []
    for rescaling_first in (True, False):
        net = bn_net()
        optimizer = sgd(net)
        rescaling = control_of(optimizer, net) if rescaling_first else None
        holding = held(optimizer)
        rescaling = rescaling or control_of(optimizer, net)
        take_step(net, optimizer, 0)
        norm = net[0].weight.detach().norm().item()
        set_lr(optimizer, optimizer.param_groups[0]["lr"] / 16)
        seen = []
        optimizer.register_step_pre_hook(
            lambda *_, net=net, seen=seen: seen.append(net[0].weight.detach().norm().item())
        )
        take_step(net, optimizer, 1)
        factors.append(seen[0] / norm)
        take_step(net, optimizer, 2)
        assert seen[1] == pytest.approx(seen[0], rel=0.02)  # not rescaled again
        owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
        assert owners[:2] == [holding, rescaling]
    # lr x wd is held and lr falls 16-fold: ||w||^4 is proportional to lr/wd
    assert factors == pytest.approx([256**-0.25] * 2, rel=0.01)


def control_of(optimizer: torch.optim.Optimizer, net: nn.Module) -> RescaleOnDecay:
    return RescaleOnDecay(optimizer, model=net, invariant=["0.weight"])


def held(optimizer: torch.optim.Optimizer) -> WeightDecayScheduler:
    return WeightDecayScheduler(optimizer, hold="time_constant")


@pytest.mark.filterwarnings("ignore:the norm of:equilibria.control.RescaleWarning")  # weights not in equilibrium
@pytest.mark.parametrize("own_lr", [False, True])
def test_a_small_lr_set_before_the_controller_is_made_is_the_beginning_of_a_warm_up(own_lr):
    """It became the reference, and the norm grew with lr: by sqrt(0.1/1e-4) = 32 under AdamW."""
    net = bn_net()
    groups = [{"params": list(net.parameters()), **({"lr": 0.01} if own_lr else {})}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01)
    if not own_lr:
        set_lr(optimizer, 1e-4)
    control, factors, peak = control_of(optimizer, net), [], 0.01 if own_lr else 0.1
    for step, lr in enumerate([*([] if own_lr else [1e-4, 1e-3, 1e-2]), peak, peak / 4]):
        set_lr(optimizer, lr)
        take_step(net, optimizer, step)
        factors.append(control.last_factors.get("0.weight"))
    expected = rescale_factors(AdamW(peak, 0.01), AdamW(peak / 4, 0.01)).weight
    assert factors == [None] * (len(factors) - 1) + [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize("made_at", [0.1, 0.001])
def test_a_manual_warm_up_leaves_the_norms_alone(made_at):
    """The optimizer is made at its peak lr, and the loop writes a small first lr, as nanoGPT does."""
    net = bn_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=made_at, weight_decay=0.01)
    RescaleOnDecay(optimizer, model=net, invariant=invariant_of(net))
    before = {name: param.detach().norm().item() for name, param in net.named_parameters() if param.ndim >= 2}
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (step + 1)
        take_step(net, optimizer, step)
    for name, param in net.named_parameters():
        if name in before:
            assert param.detach().norm().item() == pytest.approx(before[name], rel=0.02), name
