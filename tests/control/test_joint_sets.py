"""Sets that are scale-invariant only jointly: folded with one scale, rescaled by one factor."""

from __future__ import annotations

import copy
import json
import math
from functools import partial

import pytest
import torch
from tests.helpers.bn_worlds import deviation
from tests.helpers.joint_worlds import (
    DECAY,
    IMAGES,
    LABELS,
    LR,
    NETWORKS,
    SCHEDULES,
    Run,
    convolutional,
    joint_names,
    largest_deviations,
    layer_norms,
    made,
    preresnet,
    symmetries_of,
)
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import equilibria as eq
from equilibria.control import SGDW, AngularSchedule, FoldedWeightDecay, RescaleOnDecay, TaperedExponential
from equilibria.control._invariance_check import InvarianceCheck
from equilibria.errors import EquilibriaError
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.nets import PreActivationResNet
from equilibria.tensors.invariance import invariant_sets
from equilibria.theory.texp import texp

ROUNDINGS = 10  # times the deviation of runs that start one ulp apart
TWINS = 3  # runs one ulp apart; their deviations differ from each other by a factor of up to 25 after 500 steps


def fold(run, make=preresnet, kind=FoldedWeightDecay, **options):
    run.scheduler = kind(run.scheduler, model=run.net, invariant=symmetries_of(make), **options)
    return run


def assert_folded_equals_plain(make, schedule, steps):
    """In train mode at each step and in eval mode at every fifth: within ten times the effect of one ulp."""
    plain, folded = Run.of(make, schedule, steps), fold(Run.of(make, schedule, steps), make)
    twins = [Run.of(make, schedule, steps).one_ulp_apart(seed) for seed in range(TWINS)]
    apart, *rounded = largest_deviations((plain, folded, *twins), range(steps))
    for step, (deviates, *allowed) in enumerate(zip(apart, *rounded, strict=True)):
        assert deviates <= ROUNDINGS * max(allowed), (step, deviates, allowed)
    assert max(max(series) for series in rounded) < 1e-3  # the comparison means something
    scales = folded.scheduler.scales.values()
    assert all(1.0 < scale < 2.0 or folded.optimizer.param_groups[0]["fold_exponent"] for scale in scales)


# ---- folding


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_whole_preresnet_is_the_one_of_the_run_with_weight_decay(schedule):
    assert_folded_equals_plain(preresnet, schedule, 40)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["step", "plateau"])  # the experiment explr-joint has the others
def test_a_whole_preresnet_32_over_500_steps(schedule):
    assert_folded_equals_plain(PRERESNET_32, schedule, 500)


PRERESNET_32 = partial(preresnet, 32, 4)
WITH_BIASES = partial(convolutional, nn.BatchNorm2d, bias=True)


@pytest.mark.parametrize("network", [name for name in NETWORKS if name != "PreResNet"])
def test_every_norm_with_scale_shift_and_biases_folded(network):
    assert joint_names(symmetries_of(NETWORKS[network]))
    assert_folded_equals_plain(NETWORKS[network], "plateau", 40)


def test_the_weights_of_a_whole_network_grow_by_one_scale():
    plain, folded = Run.of(preresnet), fold(Run.of(preresnet), renormalise=False)
    for step in range(30):
        plain.step(step), folded.step(step)
    scale = folded.scheduler.scales[0]
    assert scale > 1.03
    for a, b in zip(plain.net.parameters(), folded.net.parameters(), strict=True):
        assert torch.allclose(scale * a, b, rtol=1e-9, atol=1e-12)


def test_unfolding_gives_back_the_run_with_weight_decay():
    plain, switched = Run.of(preresnet), Run.of(preresnet)
    largest_deviations((plain, switched), range(20))
    fold(switched)
    largest_deviations((plain, switched), range(20, 60))
    switched.scheduler.unfold()
    (apart,) = largest_deviations((plain, switched), range(60, 100))
    assert apart[-1] < 1e-11
    for a, b in zip(plain.net.state_dict().values(), switched.net.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_resumed_run_continues_bit_for_bit():
    whole, resumed = fold(Run.of(preresnet, "cosine")), fold(Run.of(preresnet, "cosine"))
    for step in range(40):
        whole.step(step)
    saved = copy.deepcopy((whole.net.state_dict(), whole.optimizer.state_dict(), whole.scheduler.state_dict()))
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.scheduler.load_state_dict(saved[2])
    for step in range(40, 60):
        assert torch.equal(whole.step(step), resumed.step(step))
    assert torch.equal(whole.evaluated(), resumed.evaluated())


def test_a_copied_run_continues_bit_for_bit():
    run = fold(Run.of(preresnet))
    run.step(0)
    twin = copy.deepcopy(run)
    for step in range(1, 10):
        assert torch.equal(run.step(step), twin.step(step))


def test_a_watched_run_shows_the_run_with_weight_decay():
    plain, folded = Run.of(preresnet), fold(Run.of(preresnet))
    with (
        eq.watch(plain.net, plain.optimizer, every=1) as expected,
        eq.watch(folded.net, folded.optimizer, every=1) as m,
    ):
        for step in range(30):
            plain.step(step), folded.step(step)
        rows = [monitor.samples().to_pylist() for monitor in (expected, m)]
    for a, b in zip(*rows, strict=True):
        if a["norm"] > 1e-6:  # the shift of a shortcut has no effect, and is rounding
            assert [b[key] for key in ("lr", "weight_decay", "norm", "angle")] == pytest.approx(
                [a[key] for key in ("lr", "weight_decay", "norm", "angle")], rel=1e-6
            )


def test_tapered_exponential_folds_a_whole_network():
    run = fold(Run.of(preresnet, "step", 40), kind=TaperedExponential, renormalise=False)
    rates = []
    for step in range(40):
        run.step(step)
        rates.append(run.scheduler.get_last_lr()[0])
    expected = texp([(0, LR), (16, LR / 10), (28, LR / 100)], DECAY, steps=40, momentum=0.9)
    assert rates == pytest.approx(expected.lr.tolist(), rel=1e-9)
    before = run.evaluated()
    run.scheduler.unfold()
    assert deviation(before, run.evaluated()) < 1e-11


def test_names_in_a_list_are_a_joint_set():
    by_symmetries, by_names = fold(Run.of(preresnet)), Run.of(preresnet)
    everything = [name for name, _ in by_names.net.named_parameters()]
    by_names.scheduler = FoldedWeightDecay(by_names.scheduler, model=by_names.net, invariant=[everything])
    for step in range(10):
        assert torch.equal(by_symmetries.step(step), by_names.step(step))
    assert torch.equal(by_symmetries.evaluated(), by_names.evaluated())


def test_frozen_parameters_beside_the_folded_ones_do_not_count():
    """As in the paper: scales, shifts and the last layer are fixed, and one group has everything."""

    def net():
        fixed = made(NETWORKS["BatchNorm"])
        for name, param in fixed.named_parameters():
            param.requires_grad_(name in ("0.weight", "3.weight"))
        return fixed

    runs = []
    for _ in range(2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
        runs.append(Run(model, optimizer, SCHEDULES["constant"](optimizer, 50)))
    sym = eq.symmetries(eq.objective(net(), functional.cross_entropy), [(IMAGES[0], LABELS[0])])
    runs[1].scheduler = FoldedWeightDecay(runs[1].scheduler, model=runs[1].net, invariant=sym)
    (apart,) = largest_deviations(tuple(runs), range(50))
    assert apart[-1] < 1e-11


# ---- what cannot be folded


def refused(groups, match, *, make=preresnet, invariant=None):
    net = made(make)
    named = dict(net.named_parameters())
    optimizer = torch.optim.SGD([{"params": [named[name] for name in names]} for names in groups], lr=LR)
    with pytest.raises(EquilibriaError, match=match) as refusal:
        FoldedWeightDecay(optimizer, model=net, invariant=invariant or symmetries_of(make))
    return refusal.value


def test_a_group_with_parameters_that_are_not_invariant_raises_with_their_names():
    names = [name for name, _ in layer_norms().named_parameters()]
    refusal = refused(
        [names],
        r"group 0 with 5 scale-invariant weights among 9 .*: 5\.weight, 5\.bias and 2 more are not",
        make=layer_norms,
    )
    assert refusal.argument == "scheduler"


def test_a_joint_set_in_two_groups_raises_with_the_tensors_that_are_elsewhere():
    names = [name for name, _ in preresnet().named_parameters()]
    rest = [name for name in names if name != "stem.weight"]
    refused(
        [rest, ["stem.weight"]],
        r"blocks\.0\.conv2\.weight is scale-invariant only jointly with stem\.weight, which this group does not train",
    )


def test_a_joint_set_with_a_tensor_that_the_optimizer_does_not_train_raises():
    names = [name for name, _ in preresnet().named_parameters() if name != "stem.weight"]
    refused([names], r"only jointly with stem\.weight, which this group does not train")


def test_a_frozen_tensor_of_a_joint_set_raises():
    net = made(preresnet)
    net.stem.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    with pytest.raises(EquilibriaError, match=r"only jointly with stem\.weight, which this group does not train"):
        FoldedWeightDecay(optimizer, model=net, invariant=symmetries_of(preresnet))


def test_a_joint_set_beside_others_is_left_alone_where_the_rest_can_be_folded():
    net = made(NETWORKS["BatchNorm"])
    sym = symmetries_of(NETWORKS["BatchNorm"])
    others = [param for name, param in net.named_parameters() if name not in sym.alone]
    alone = [param for name, param in net.named_parameters() if name in sym.alone]
    optimizer = torch.optim.SGD([{"params": alone}, {"params": others}], lr=LR, weight_decay=DECAY)
    assert list(FoldedWeightDecay(optimizer, model=net, invariant=sym).scales) == [0]


def test_a_joint_set_with_gradients_for_a_part_of_it_raises_before_the_step():
    run = fold(Run.of(preresnet))
    run.net.stem.weight.requires_grad_(False)
    before = copy.deepcopy(run.net.stem.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(EquilibriaError, match=r"where 14 were trainable .* but stem\.weight made the difference"):
        run.step(0)
    assert str(before) == str((run.net.stem.state_dict(), run.optimizer.state_dict()))


def test_biases_without_effect_that_decay_with_scale_and_shift_raise_and_those_of_split_decay_do_not():
    """Scaled by P where the rest of the mean is by P^2, for the convolution and the scale and shift before it."""
    make = WITH_BIASES
    run = fold(Run.of(make), make)
    with pytest.raises(EquilibriaError, match=r"got an offset of up to .* in front of '4'.*bias=False"):
        run.step(0)
    plain, folded = (Run.of(make) for _ in range(2))
    for one in (plain, folded):
        split = eq.split_decay(one.net, weight_decay=DECAY, invariant=symmetries_of(make))
        one.optimizer = torch.optim.SGD(split.groups, lr=LR, momentum=0.9)
        one.scheduler = SCHEDULES["constant"](one.optimizer, 40)
    (apart,) = largest_deviations((plain, fold(folded, make)), range(40))
    assert apart[-1] < 1e-11
    assert list(folded.scheduler.scales) == [0, 1]


def test_a_set_that_is_not_invariant_raises_before_anything_changes():
    net = made(layer_norms)
    names = ["1.weight", "1.bias", "7.weight"]
    named = dict(net.named_parameters())
    groups = [{"params": [named[name] for name in names]}]
    groups += [{"params": [param for name, param in named.items() if name not in names]}]
    optimizer = torch.optim.SGD(groups, lr=LR, weight_decay=DECAY)
    FoldedWeightDecay(optimizer, model=net, invariant=[names])
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(EquilibriaError, match=r"the radial parts of its gradients do not cancel.* for 7\.weight"):
        for step in range(20):
            before = copy.deepcopy(net.state_dict())
            optimizer.zero_grad()
            functional.cross_entropy(net(IMAGES[step]), LABELS[step]).backward()
            optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_noise_on_the_gradients_of_a_joint_set_is_allowed():
    """Of the size of the gradients, as for privacy."""
    torch.manual_seed(0)
    run = Run.of(preresnet)
    check = InvarianceCheck(joint_names(symmetries_of(preresnet)))
    weights = {name: param for name, param in run.net.named_parameters() if "shortcut.1.bias" not in name}
    for step in range(20):
        run.step(step)
        for param in run.net.parameters():
            param.grad += torch.randn_like(param) * param.grad.norm() / math.sqrt(param.numel())
        check.check(weights)


def test_sets_that_share_a_tensor_raise():
    net = made(layer_norms)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    with pytest.raises(EquilibriaError, match=r"got 1\.bias in two sets"):
        invariant_sets(["1.bias", ["1.weight", "1.bias"]], optimizer=optimizer, model=net)


def test_controllers_of_single_weights_refuse_joint_sets():
    net = made(layer_norms)
    with pytest.raises(EquilibriaError, match="expected names, tensors or a result of symmetries"):
        AngularSchedule(torch.optim.SGD(net.parameters(), lr=LR), 0.01, model=net, invariant=[["1.weight", "1.bias"]])


# ---- rescaling


def rescaling(make, kind=torch.optim.SGD, *, k=10.0, **settings):
    net = made(make)
    settings = {
        "lr": LR,
        "weight_decay": DECAY,
        **({"momentum": 0.9} if kind is not torch.optim.AdamW else {}),
    } | settings
    optimizer = kind(net.parameters(), **settings)
    scheduler = RescaleOnDecay(StepLR(optimizer, 10, gamma=1 / k), model=net, invariant=symmetries_of(make))
    return Run(net, optimizer, scheduler)


@pytest.mark.parametrize("kind", [torch.optim.SGD, SGDW])
@pytest.mark.parametrize("network", ["PreResNet", "BatchNorm", "InstanceNorm"])
def test_rescaling_joint_sets_leaves_the_network_as_it_was(network, kind):
    run = rescaling(NETWORKS[network], kind)
    for step in range(9):
        run.step(step)
    twin = copy.deepcopy(run.net)
    run.step(9)  # lr / 10 after it
    factors = run.scheduler.last_factors
    assert set(factors) == {name for names in symmetries_of(NETWORKS[network]).uniform_sets() for name in names}
    assert list(factors.values()) == pytest.approx([10**-0.25] * len(factors), rel=2e-3)
    for name, param in run.net.named_parameters():
        unscaled = param.detach() / factors.get(name, 1.0)
        twin.get_parameter(name).data.copy_(unscaled)
    twin(IMAGES[9])  # the statistics of the last step, at weights before it
    assert deviation(twin(IMAGES[0]), run.net(IMAGES[0])) < 1e-10


@pytest.mark.parametrize("network", ["PreResNet", "BatchNorm", "InstanceNorm"])
def test_the_running_statistics_follow_a_rescaled_set(network):
    run = rescaling(NETWORKS[network])
    for step in range(9):
        run.step(step)
    run.scheduler.scheduler.last_epoch = 8
    before = run.evaluated()
    run.optimizer.param_groups[0]["lr"] /= 10
    run.scheduler.step()
    assert run.scheduler.last_factors
    assert deviation(before, run.evaluated()) < 1e-10


def test_a_joint_set_turns_at_its_new_speed_at_once():
    """SGD with a random gradient that is orthogonal to the whole set: the set is one weight in equilibrium."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (4000, 6000))

    torch.manual_seed(0)
    net = Pair()
    rule = eq.theory.SGD(LR, DECAY, momentum=0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, weight_decay=DECAY, momentum=0.9)
    scheduler = RescaleOnDecay(StepLR(optimizer, 400, gamma=0.1), model=net, invariant=[["first", "second"]])
    whole = torch.cat([net.first, net.second]).detach()
    norm = rule.equilibrium(unit_grad_sq=1.0).norm
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(norm / whole.norm())
    angles = []
    for _ in range(440):
        before = torch.cat([net.first, net.second]).detach()
        noise = torch.randn_like(before)
        noise -= before * (noise @ before) / (before @ before)
        gradient = noise / noise.norm() / before.norm()
        net.first.grad, net.second.grad = gradient[:4000].clone(), gradient[4000:].clone()
        optimizer.step()
        after = torch.cat([net.first, net.second]).detach()
        angles.append(2 * math.asin(float((after / after.norm() - before / before.norm()).norm()) / 2))
        scheduler.step()
    assert scheduler.last_factors == {
        "first": pytest.approx(10**-0.25, rel=2e-3),
        "second": pytest.approx(10**-0.25, rel=2e-3),
    }
    expected = [rule.equilibrium().angle, eq.theory.SGD(LR / 10, DECAY, momentum=0.9).equilibrium().angle]
    assert angles[350:400] == pytest.approx([expected[0]] * 50, rel=0.03)
    assert angles[400:440] == pytest.approx([expected[1]] * 40, rel=0.03)


def test_with_other_optimizers_symmetries_stand_for_the_weights_that_are_invariant_alone():
    run = rescaling(preresnet, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    assert set(run.scheduler._weights) == set(symmetries_of(preresnet).alone)
    net = made(preresnet)
    everything = [name for name, _ in net.named_parameters()]
    with pytest.raises(EquilibriaError, match=r"scale-invariant only jointly, with AdamW; expected .* SGD or SGDW"):
        RescaleOnDecay(torch.optim.AdamW(net.parameters()), model=net, invariant=[everything])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([{"weight_decay": 1e-3}, {"weight_decay": 2e-3}], "in parameter groups 0, 1"),
        ([{"weight_decay": 0.0}], "with weight_decay=0"),
    ],
    ids=["two groups", "no decay"],
)
def test_a_joint_set_without_one_factor_raises_if_it_is_named(settings, reason):
    net = made(layer_norms)
    pair = [net[1].weight, net[1].bias]
    others = [param for param in net.parameters() if all(param is not one for one in pair)]
    split = [[param] for param in pair] if len(settings) == 2 else [pair]
    groups = [{"params": params, **chosen} for params, chosen in zip(split, settings, strict=True)]
    optimizer = torch.optim.SGD([*groups, {"params": others}], lr=LR, weight_decay=DECAY)
    with pytest.raises(EquilibriaError, match=reason):
        RescaleOnDecay(optimizer, model=net, invariant=[["1.weight", "1.bias"]])
    by_symmetries = RescaleOnDecay(optimizer, model=net, invariant=symmetries_of(layer_norms))
    assert "1.weight" not in by_symmetries._weights
    assert "4.weight" in by_symmetries._weights


def test_a_resumed_rescaling_goes_on_with_what_a_joint_set_is_owed():
    """In bfloat16 factors wait until they have accumulated to 5 %."""

    def run():
        net = made(NETWORKS["GroupNorm"]).bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
        sym = symmetries_of(NETWORKS["GroupNorm"])
        return optimizer, RescaleOnDecay(StepLR(optimizer, 1, gamma=0.9), model=net, invariant=sym)  # r = 0.974

    (optimizer, scheduler), (resumed, other) = run(), run()
    optimizer.step()
    scheduler.step()
    assert scheduler.last_factors == {}
    resumed.load_state_dict(optimizer.state_dict())
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    for one in (scheduler, other):
        one.step()
        assert one.last_factors["1.weight"] == one.last_factors["1.bias"] == pytest.approx(0.81**0.25, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("invariant", "low", "high"), [("alone", 0.2, 0.5), ("jointly", 0.7, 1.4)])
def test_the_streams_of_a_preresnet_turn_at_their_new_speed_only_if_they_are_rescaled_as_sets(invariant, low, high):
    """The angle of each stream over its equilibrium, in ten steps after lr / 10; 1 / sqrt(10) if nothing is done."""
    digits = load_digits()
    torch.manual_seed(2)
    net = PreActivationResNet(8, 8, scale_invariant=True, in_channels=1)
    some = digits.train_images[:64], digits.train_labels[:64]
    sym = eq.symmetries(eq.objective(net, functional.cross_entropy), [some])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=2e-3)
    scheduler = RescaleOnDecay(
        StepLR(optimizer, 300, gamma=0.1), model=net, invariant=sym if invariant == "jointly" else sym.alone
    )
    batches = Batches(digits.train_images, digits.train_labels, batch_size=64, label_noise=0.3, seed=2)
    angles = torch.zeros(310, 3)
    for step, (images, labels) in zip(range(310), batches, strict=False):
        before = units(net, joint_names(sym))
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        angles[step] = torch.stack([(a - b).norm() for a, b in zip(units(net, joint_names(sym)), before, strict=True)])
        scheduler.step()
    expected = [eq.theory.SGD(lr, 2e-3, momentum=0.9).equilibrium().angle for lr in (0.3, 0.03)]
    assert angles[250:300].square().mean(0).sqrt().tolist() == pytest.approx([expected[0]] * 3, rel=0.1)
    after = angles[300:].square().mean(0).sqrt() / expected[1]
    assert low < float(after.min()) and float(after.max()) < high


def units(net, sets):
    """The vector of all tensors of each set, at length one."""
    vectors = (torch.cat([net.get_parameter(name).detach().flatten() for name in names]).double() for names in sets)
    return [vector / vector.norm() for vector in vectors]
