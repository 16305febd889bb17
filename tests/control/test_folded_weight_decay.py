from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.bn_worlds import (
    INPUTS,
    LABELS,
    bn_net,
    deviation,
    eval_logits,
    invariant_of,
    largest_deviation,
    others_of,
    sgd,
    take_step,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, MultiStepLR, OneCycleLR, StepLR

import equilibria as eq
from equilibria.control import FoldedWeightDecay, RescaleOnDecay, WeightDecayScheduler
from equilibria.errors import EquilibriaError
from equilibria.theory.folding import fold

STEPS = 500
EXACT = 1e-11  # rounding of 500 steps, amplified by training; 1e-14 to 5e-13 is measured


def folded_net(**settings):
    net = bn_net()
    optimizer = sgd(net, **settings)
    return net, optimizer


def fold_all(scheduler_of, net, optimizer, **options):
    return FoldedWeightDecay(scheduler_of(optimizer), model=net, invariant=invariant_of(net), **options)


SCHEDULES = {
    "constant": lambda optimizer: optimizer,
    "step": lambda optimizer: MultiStepLR(optimizer, [200, 350], gamma=0.1),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "warm-up from 0": lambda optimizer: LambdaLR(optimizer, lambda t: min(t / 50, 1.0)),
    "varying weight decay": lambda optimizer: WeightDecayScheduler(
        CosineAnnealingLR(optimizer, STEPS), lambda t: 5e-3 * (1 + math.sin(t / 17))
    ),
    "varying momentum": lambda optimizer: OneCycleLR(optimizer, 0.1, STEPS, base_momentum=0.6, max_momentum=0.95),
    "two chained": lambda optimizer: chained(optimizer),
}


def chained(optimizer):
    from torch.optim.lr_scheduler import ChainedScheduler

    return ChainedScheduler([ExponentialLR(optimizer, 0.999), MultiStepLR(optimizer, [100], gamma=0.3)])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("constant", "step") else pytest.mark.slow) for kind in SCHEDULES]
)
def test_the_network_is_the_one_of_the_run_with_weight_decay_in_train_and_eval_mode(kind):
    plain, folded = folded_net(), folded_net()
    schedulers = {id(plain[1]): SCHEDULES[kind](plain[1]), id(folded[1]): fold_all(SCHEDULES[kind], *folded)}

    def between(step, optimizer):
        if step:
            scheduler = schedulers[id(optimizer)]
            scheduler.step() if scheduler is not optimizer else None

    assert largest_deviation(plain, folded, steps=range(STEPS), between=between) < EXACT
    apart = deviation(invariant_of(plain[0])[0], invariant_of(folded[0])[0])
    assert apart > 1e-3  # it is another run, not the same one twice


def test_without_the_correction_of_the_statistics_eval_mode_is_another_network():
    plain, folded = folded_net(), folded_net()
    control = fold_all(SCHEDULES["constant"], *folded, renormalise=False)
    control._statistics.rescale = lambda names, factor: None
    deviations = [
        max(deviation(take_step(*plain, t), take_step(*folded, t)) for t in range(300)),
        deviation(eval_logits(plain[0]), eval_logits(folded[0])),
    ]
    assert deviations[0] < EXACT
    assert deviations[1] > 1e-3


def test_the_learning_rates_are_those_of_the_theory():
    net, optimizer = folded_net()
    control = fold_all(SCHEDULES["step"], net, optimizer, renormalise=False)
    rates = torch.optim.lr_scheduler.MultiStepLR(sgd(bn_net()), [200, 350], gamma=0.1)
    schedule, used = [], []
    for t in range(STEPS):
        schedule.append(rates.get_last_lr()[0])
        take_step(net, optimizer, t)
        used.append(control.get_last_lr())
        control.step()
        rates.optimizer.step()
        rates.step()
    expected = fold(schedule, 5e-3, momentum=0.9)
    assert [lr for lr, _ in used] == pytest.approx(expected.lr.tolist(), rel=1e-12)
    assert [lr for _, lr in used] == schedule
    assert math.log(control.scales[0]) == pytest.approx(expected.log_scale[-1], rel=1e-12)


def test_between_steps_the_groups_show_the_schedule():
    net, optimizer = folded_net()
    control = fold_all(lambda o: StepLR(o, 1, gamma=0.5), net, optimizer)
    take_step(net, optimizer, 0)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 5e-3)] * 2
    control.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05] * 2


def test_other_hooks_see_the_settings_of_the_step():
    net, optimizer = folded_net()
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append((o.param_groups[0]["lr"], o.param_groups[0]["weight_decay"]))
    )
    control = fold_all(SCHEDULES["constant"], net, optimizer)
    take_step(net, optimizer, 0)
    assert seen == [(control.get_last_lr()[0], 0.0)]


# ---- renormalisation


@pytest.mark.slow
def test_float32_renormalised_is_bit_identical_to_without_until_that_overflows():
    nets = [bn_net(dtype=torch.float32) for _ in range(2)]
    optimizers = [sgd(net, weight_decay=1.0, momentum=0.0) for net in nets]
    controls = [
        FoldedWeightDecay(optimizer, model=net, invariant=invariant_of(net), renormalise=renormalise)
        for net, optimizer, renormalise in zip(nets, optimizers, (True, False), strict=True)
    ]
    for step in range(400):  # without renormalisation P is 2e18 by then, its square near the end of float32
        renormalised, plain = (take_step(net, o, step) for net, o in zip(nets, optimizers, strict=True))
        assert torch.equal(renormalised, plain)
        if step % 20 == 0:
            assert torch.equal(eval_logits(nets[0]), eval_logits(nets[1]))
    assert controls[1].scales[0] > 1e16
    assert 1 <= controls[0].scales[0] < 2
    with pytest.raises(EquilibriaError, match="use renormalise=True"):
        for step in range(400, 900):
            take_step(nets[1], optimizers[1], step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_times_past_the_overflow_everything_is_finite(dtype):
    net = nn.Sequential(nn.Linear(10, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 5)).to(dtype)
    groups = [{"params": [net[0].weight]}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=5.0)  # P doubles at every step
    control = FoldedWeightDecay(optimizer, model=net, invariant=[net[0].weight])
    horizon = fold(0.1, 5.0, steps=1000).overflow["float32"]
    assert horizon < 70
    for step in range(10 * horizon):
        take_step(net, optimizer, step)
    assert optimizer.param_groups[0]["fold_exponent"] == 10 * horizon
    state = [
        *net.parameters(),
        *net.buffers(),
        *(v for s in optimizer.state.values() for v in s.values() if v is not None),
    ]
    assert all(torch.isfinite(tensor).all() for tensor in state)
    assert math.isfinite(control.get_last_lr()[0])


# ---- switching, skipped steps, momentum 0


def test_folded_in_the_middle_and_back_again():
    plain, switched = folded_net(), folded_net()
    worst = largest_deviation(plain, switched, steps=range(100))
    control = fold_all(SCHEDULES["constant"], *switched)
    worst = max(worst, largest_deviation(plain, switched, steps=range(100, 200)))
    control.unfold()
    worst = max(worst, largest_deviation(plain, switched, steps=range(200, 300)))
    assert worst < EXACT
    assert deviation(invariant_of(plain[0])[0], invariant_of(switched[0])[0]) < EXACT
    mine, theirs = (copy.deepcopy(o.state_dict()["param_groups"]) for o in (plain[1], switched[1]))
    assert [{k: v for k, v in group.items() if k != "initial_lr"} for group in theirs] == mine
    fold_all(SCHEDULES["constant"], *switched)
    assert largest_deviation(plain, switched, steps=range(300, 350)) < EXACT


def test_momentum_that_passes_through_zero_meets_the_stale_buffer_that_torch_keeps():
    plain, folded = folded_net(), folded_net()
    fold_all(SCHEDULES["constant"], *folded)

    def between(step, optimizer):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0 if 40 <= step < 60 else 0.9

    assert largest_deviation(plain, folded, steps=range(150), between=between) < EXACT


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_amp_skips_does_not_advance(fused):
    runs = []
    for fold_it in (False, True):
        net = bn_net(dtype=torch.float32)
        optimizer = sgd(net, fused=fused)
        control = fold_all(SCHEDULES["constant"], net, optimizer) if fold_it else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for step in range(30):
            scaled_step(net, optimizer, scaler, step, infinite=step % 3 == 1)
        runs.append((net, control))
    assert deviation(eval_logits(runs[0][0]), eval_logits(runs[1][0])) < 1e-4  # float32, 20 steps
    assert math.log(runs[1][1].scales[0]) == pytest.approx(fold(0.1, 5e-3, momentum=0.9, steps=20).log_scale[-1])


def scaled_step(net, optimizer, scaler, step, *, infinite):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(INPUTS[step % 20].float()), LABELS[step % 20])
    scaler.scale(loss).backward()
    if infinite:
        invariant_of(net)[0].grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()


def test_a_step_without_gradients_does_not_advance_and_one_at_lr_0_does():
    net, optimizer = folded_net()
    control = fold_all(SCHEDULES["constant"], net, optimizer)
    take_step(net, optimizer, 0)
    take_step(net, optimizer, 1)
    before = (control.scales[0], optimizer.param_groups[0]["fold_q"])
    optimizer.zero_grad()
    optimizer.step()
    assert (control.scales[0], optimizer.param_groups[0]["fold_q"]) == before
    optimizer.param_groups[0]["lr"] = 0.0
    take_step(net, optimizer, 2)
    assert (control.scales[0], optimizer.param_groups[0]["fold_q"]) == (before[0], 5e-3 + 0.9 * before[1])


def test_a_frozen_weight_stays_and_may_not_join_later():
    plain, folded = folded_net(), folded_net()
    for net, _ in (plain, folded):
        invariant_of(net)[1].requires_grad_(False)
    frozen = invariant_of(folded[0])[1]
    before = frozen.detach().clone()
    fold_all(SCHEDULES["constant"], *folded)
    assert largest_deviation(plain, folded, steps=range(300)) < EXACT
    assert folded[1].param_groups[0]["fold_exponent"] > 0
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    state = copy.deepcopy((folded[0].state_dict(), folded[1].state_dict()))
    with pytest.raises(
        EquilibriaError, match=r"for 3 weights of parameter group 0, for 2 .* Give 3.weight a separate group"
    ):
        take_step(*folded, 300)
    assert_same(state[1], folded[1].state_dict())


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


# ---- a good torch citizen


def test_a_closure_gives_the_same_run():
    nets = [folded_net(), folded_net()]
    for run in nets:
        fold_all(SCHEDULES["constant"], *run)
    for step in range(30):
        assert torch.equal(take_step(*nets[0], step), take_step(*nets[1], step, closure=True))


def test_a_closure_that_fails_leaves_everything_as_it_was():
    net, optimizer = folded_net()
    control = fold_all(SCHEDULES["constant"], net, optimizer)
    take_step(net, optimizer, 0)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), control.state_dict()))

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fails)
    assert_same(before, (net.state_dict(), optimizer.state_dict(), control.state_dict()))


def test_settings_return_after_a_step_that_fails_inside_of_torch():
    net, optimizer = folded_net()
    control = fold_all(SCHEDULES["constant"], net, optimizer)
    take_step(net, optimizer, 0)
    scale = control.scales[0]
    optimizer.state[invariant_of(net)[0]]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(RuntimeError):
        take_step(net, optimizer, 1)
    saved = optimizer.state_dict()["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in saved] == [(0.1, 5e-3)] * 2
    control.step()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 5e-3)] * 2
    assert control.scales[0] == scale


@pytest.mark.parametrize("through_json", [False, True])
def test_a_resumed_run_continues_bit_for_bit(through_json):
    def cosine(optimizer):
        return CosineAnnealingLR(optimizer, 200)

    whole, first = folded_net(), folded_net()
    controls = [fold_all(cosine, *run) for run in (whole, first)]
    for control, run in zip(controls, (whole, first), strict=True):
        for step in range(100):
            take_step(*run, step)
            control.step()
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict(), controls[1].state_dict()))
    if through_json:
        groups = json.loads(json.dumps(saved[1]["param_groups"]))
        saved = (saved[0], {**saved[1], "param_groups": groups}, json.loads(json.dumps(saved[2])))
    resumed = (bn_net(seed=9), None)
    resumed = (resumed[0], sgd(resumed[0], lr=7.0, weight_decay=1e-4))
    control = fold_all(cosine, *resumed)
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    control.load_state_dict(saved[2])
    for step in range(100, 200):
        assert torch.equal(take_step(*resumed, step), take_step(*whole, step))
        control.step()
        controls[0].step()
    assert torch.equal(eval_logits(resumed[0]), eval_logits(whole[0]))


def test_a_checkpoint_of_a_plain_run_may_be_loaded():
    plain, folded = folded_net(), folded_net()
    for step in range(30):
        take_step(*plain, step)
        take_step(*folded, step + 1)
    fold_all(SCHEDULES["constant"], *folded)
    for step in range(30):
        take_step(*folded, step + 2)
    folded[0].load_state_dict(plain[0].state_dict())
    folded[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert largest_deviation(plain, folded, steps=range(30, 90)) < EXACT


def test_a_tensor_lr_is_filled_in_place():
    net, optimizer = folded_net(lr=torch.tensor(0.1, dtype=torch.float64))
    plain = folded_net()
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]  # torch hands out one tensor
    control = fold_all(lambda o: ExponentialLR(o, 0.99), net, optimizer)
    reference = ExponentialLR(plain[1], 0.99)
    worst = deviation(take_step(*plain, 0), take_step(net, optimizer, 0))
    tensors = [group["lr"] for group in optimizer.param_groups]
    control.step()
    reference.step()
    for step in range(1, 50):
        worst = max(worst, deviation(take_step(*plain, step), take_step(net, optimizer, step)))
        control.step()
        reference.step()
    assert worst < EXACT
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
    rates = control.get_last_lr()
    rates[0].fill_(7.0)
    assert float(optimizer.param_groups[0]["lr"]) < 0.1


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"maximize": True}], ids=str)
def test_every_implementation_of_sgd(settings):
    plain, folded = folded_net(**settings), folded_net(**settings)
    fold_all(SCHEDULES["constant"], *folded)
    assert largest_deviation(plain, folded, steps=range(10)) < EXACT  # climbing soon amplifies any rounding


def test_groups_with_their_own_settings_fold_on_their_own():
    runs = []
    for _ in range(2):
        net = bn_net()
        first, *rest = invariant_of(net)
        groups = [
            {"params": others_of(net), "weight_decay": 0.0},
            {"params": [first], "lr": 0.05, "momentum": 0.5},
            {"params": rest, "weight_decay": 1e-2},
        ]
        runs.append((net, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-3)))
    control = fold_all(SCHEDULES["constant"], *runs[1])
    assert largest_deviation(*runs, steps=range(300)) < EXACT
    assert set(control.scales) == {1, 2}
    assert control.get_last_lr()[0] == 0.1


def test_a_bias_in_front_of_the_norm_is_allowed_for():
    runs = []
    for _ in range(2):
        net = bn_net(bias=True)
        groups = [{"params": invariant_of(net)}, {"params": others_of(net), "weight_decay": 0.0}]
        runs.append((net, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-3)))
    fold_all(SCHEDULES["constant"], *runs[1])
    assert largest_deviation(*runs, steps=range(200)) < EXACT


def test_names_and_a_result_of_symmetries_say_the_same_as_tensors():
    class Symmetries:
        alone = frozenset({"0.weight", "3.weight", "6.weight"})

    for invariant in (["0.weight", "3.weight", "6.weight"], Symmetries()):
        net, optimizer = folded_net()
        control = FoldedWeightDecay(optimizer, model=net, invariant=invariant)
        assert list(control.scales) == [0]


def test_an_example_in_place_of_the_first_training_batch():
    plain, folded = folded_net(), folded_net()
    folded[0].eval()
    fold_all(SCHEDULES["constant"], *folded, example=INPUTS[0])
    assert not folded[0].training
    folded[0].train()
    assert not folded[0]._forward_pre_hooks
    assert largest_deviation(plain, folded, steps=range(50)) < EXACT


def test_the_search_at_the_first_batch_draws_no_random_numbers_and_leaves_the_statistics():
    net, optimizer = folded_net()
    fold_all(SCHEDULES["constant"], net, optimizer)
    other = bn_net()
    torch.manual_seed(5)
    take_step(net, optimizer, 0)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    take_step(other, sgd(other), 0)
    assert torch.equal(drawn, torch.rand(1))
    assert net[1].num_batches_tracked == 1


@pytest.mark.slow
@settings(max_examples=15)
@given(
    lr=st.floats(1e-3, 0.2),
    decay=st.floats(0, 5e-3),
    momentum=st.floats(0, 0.9),
    jumps=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
)
def test_any_settings_give_the_same_function(lr, decay, momentum, jumps):
    plain, folded = (folded_net(lr=lr, weight_decay=decay, momentum=momentum) for _ in range(2))
    fold_all(SCHEDULES["constant"], *folded)

    def between(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = lr * jumps[step % 4]

    assert largest_deviation(plain, folded, steps=range(12), between=between) < EXACT


@pytest.mark.parametrize("watch_first", [True, False])
def test_a_watched_run_turns_by_the_angles_of_the_run_with_weight_decay(watch_first):
    plain, folded = folded_net(), folded_net()
    if not watch_first:
        fold_all(SCHEDULES["constant"], *folded)
    with eq.watch(*plain, every=1) as expected, eq.watch(*folded, every=1) as measured:
        if watch_first:
            fold_all(SCHEDULES["constant"], *folded)
        for step in range(40):
            take_step(*plain, step)
            take_step(*folded, step)
        angles = [monitor.samples().column("angle").to_pylist() for monitor in (expected, measured)]
    assert angles[1] == pytest.approx(angles[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_a_compiled_step_with_a_tensor_lr():
    plain, folded = folded_net(), folded_net(lr=torch.tensor(0.1, dtype=torch.float64))
    fold_all(SCHEDULES["constant"], *folded)
    compiled = torch.compile(folded[1].step, backend="eager")
    worst = 0.0
    for step in range(6):
        logits = take_step(*plain, step)
        folded[1].zero_grad()
        other = folded[0](INPUTS[step])
        nn.functional.cross_entropy(other, LABELS[step]).backward()
        compiled()
        worst = max(worst, deviation(logits, other))
    assert worst < EXACT
    assert folded[1].param_groups[0]["fold_log_scale"] > 0


# ---- refusals


def test_an_optimizer_is_folded_once():
    net, optimizer = folded_net()
    control = fold_all(SCHEDULES["constant"], net, optimizer)
    with pytest.raises(EquilibriaError, match="already folded"):
        fold_all(SCHEDULES["constant"], net, optimizer)
    control.unfold()
    fold_all(SCHEDULES["constant"], net, optimizer)


def test_unfolding_a_resumed_run_needs_to_know_the_statistics_first():
    first, resumed = folded_net(), folded_net()
    fold_all(SCHEDULES["constant"], *first)
    take_step(*first, 0)
    control = fold_all(SCHEDULES["constant"], *resumed)
    resumed[1].load_state_dict(first[1].state_dict())
    before = copy.deepcopy((resumed[0].state_dict(), resumed[1].state_dict()))
    with pytest.raises(EquilibriaError, match="call the model itself"):
        control.unfold()
    assert_same(before, (resumed[0].state_dict(), resumed[1].state_dict()))


def refused(match, **settings):
    net, optimizer = folded_net(**settings)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(EquilibriaError, match=match):
        FoldedWeightDecay(optimizer, model=net, invariant=invariant_of(net))
    after = optimizer.state_dict()
    for group in after["param_groups"]:
        group.pop("initial_lr")
    assert_same(before, after)


def test_rules_without_an_equivalent_raise():
    refused("nesterov=True in parameter group 0.*look-ahead", nesterov=True)
    refused("dampening=0.1 in parameter group 0", dampening=0.1)
    net = bn_net()
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop):
        with pytest.raises(EquilibriaError, match=rf"got {kind.__name__}; expected torch.optim.SGD"):
            FoldedWeightDecay(kind(net.parameters()), model=net, invariant=invariant_of(net))


def test_a_setting_that_changes_later_raises_before_the_step():
    net, optimizer = folded_net()
    fold_all(SCHEDULES["constant"], net, optimizer)
    take_step(net, optimizer, 0)
    optimizer.param_groups[0]["nesterov"] = True
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(EquilibriaError, match="nesterov"):
        take_step(net, optimizer, 1)
    assert_same(before, optimizer.state_dict())


def test_a_decay_that_would_turn_the_weights_around_raises_before_the_step():
    net, optimizer = folded_net(weight_decay=20.0)
    fold_all(SCHEDULES["constant"], net, optimizer)
    before = copy.deepcopy(net.state_dict()["0.weight"])
    with pytest.raises(EquilibriaError, match=r"parameter group 0: .*would change the sign of the weights"):
        take_step(net, optimizer, 0)
    assert torch.equal(before, net.state_dict()["0.weight"])
    assert optimizer.param_groups[0]["weight_decay"] == 20.0


def test_groups_that_mix_raise_with_what_to_do():
    net = bn_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(EquilibriaError, match=r"group 0 with 3 scale-invariant weights among 11 .*SGD\(\[\{"):
        FoldedWeightDecay(optimizer, model=net, invariant=invariant_of(net))


def test_a_weight_that_is_not_invariant_raises_at_the_first_batch():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.head = nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10), nn.Linear(10, 5)

        def forward(self, inputs):
            return self.head(self.norm(inputs + self.inner(inputs)))

    net = Residual().double()
    groups = [{"params": [net.inner.weight]}, {"params": [*net.norm.parameters(), *net.head.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    FoldedWeightDecay(optimizer, model=net, invariant=["inner.weight"])
    with pytest.raises(EquilibriaError, match=r"in front of 'norm' .* when 'inner.weight' is doubled.*eq.symmetries"):
        take_step(net, optimizer, 0)


def test_a_step_without_any_forward_pass_raises():
    net, optimizer = folded_net()
    fold_all(SCHEDULES["constant"], net, optimizer)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(EquilibriaError, match=r"call the model itself .* example="):
        optimizer.step()


def test_clipped_gradients_are_noticed_and_others_are_not_taken_for_them():
    for clip in (True, False):
        net, optimizer = folded_net()
        fold_all(SCHEDULES["constant"], net, optimizer)
        if clip:
            with pytest.raises(EquilibriaError, match=r"the same norm 0.1 in 3 steps.*clip_grad_norm_"):
                clipped_steps(net, optimizer, 10)
        else:
            for step in range(600):
                take_step(net, optimizer, step)


def clipped_steps(net, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(INPUTS[step]), LABELS[step]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("scheduler", [None, 3, torch.optim.SGD], ids=str)
def test_something_that_is_no_scheduler_raises(scheduler):
    with pytest.raises(EquilibriaError, match=r"expected a torch\.optim.lr_scheduler"):
        FoldedWeightDecay(scheduler, model=bn_net(), invariant=["0.weight"])


def test_a_model_that_is_no_network_raises():
    net, optimizer = folded_net()
    with pytest.raises(EquilibriaError, match="got model of type list; expected the network"):
        FoldedWeightDecay(optimizer, model=invariant_of(net), invariant=["0.weight"])


def test_a_state_of_something_else_raises():
    control = fold_all(SCHEDULES["constant"], *folded_net())
    with pytest.raises(EquilibriaError, match=r"got a state with last_epoch; expected .*FoldedWeightDecay"):
        control.load_state_dict({"last_epoch": 3})


def test_a_weight_that_is_not_invariant_raises_before_anything_changes():
    net = bn_net()
    last, others = net[9].weight, [param for param in net.parameters() if param is not net[9].weight]
    optimizer = torch.optim.SGD([{"params": [last]}, {"params": others}], lr=0.1, weight_decay=5e-3)
    FoldedWeightDecay(optimizer, model=net, invariant=["9.weight"])
    last.grad = last.detach().clone()
    before = last.detach().clone()
    with pytest.raises(EquilibriaError, match=r"got 9\.weight, whose gradient has a cosine of 1 .*invariant=sym"):
        optimizer.step()
    assert torch.equal(last, before)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 5e-3)


def test_rescaling_inside_raises():
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    groups = [{"params": [net[0].weight]}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=1e-3)
    inner = RescaleOnDecay(torch.optim.lr_scheduler.StepLR(optimizer, 1), model=net, invariant=[net[0].weight])
    with pytest.raises(EquilibriaError, match="RescaleOnDecay inside FoldedWeightDecay"):
        FoldedWeightDecay(inner, model=net, invariant=[net[0].weight])
