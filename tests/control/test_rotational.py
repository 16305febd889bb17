"""Rotational weights: the angle that was asked for, the direction and the other parameters of the plain optimizer."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equilibria import theory
from equilibria.control import SGDW, Lion, Rotational, ScalarRMSprop
from equilibria.control._invariance_check import InvarianceCheck
from equilibria.errors import EquilibriaError
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.nets import BasicBlockResNet
from equilibria.optimizers.rules import rule_of_group

PLAIN = {
    "sgd": (lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=5e-4, **k), theory.SGD(0.1, 5e-4)),
    "heavy ball": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=5e-4, momentum=0.9, **k),
        theory.SGD(0.1, 5e-4, momentum=0.9),
    ),
    "dampened": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=5e-4, momentum=0.9, dampening=0.5, **k),
        theory.SGD(0.1, 5e-4, momentum=0.9, dampening=0.5),
    ),
    "nesterov": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=5e-4, momentum=0.9, nesterov=True, **k),
        theory.SGD(0.1, 5e-4, momentum=0.9, nesterov=True),
    ),
    "sgdw": (
        lambda p, **k: SGDW(p, lr=0.1, weight_decay=5e-3, momentum=0.9, **k),
        theory.SGDW(0.1, 5e-3, momentum=0.9),
    ),
    "adamw": (lambda p, **k: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, **k), theory.AdamW(1e-3, 0.1)),
    "lion": (lambda p, **k: Lion(p, lr=1e-3, weight_decay=1.0, **k), theory.Lion(1e-3, 1.0)),
}
KINDS = list(PLAIN)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def noise(weight: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)


def drive(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = noise(weight, step)
        optimizer.step()


def unit_angles(before: torch.Tensor, after: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Radians between units, by the chord in float64."""
    a, b = (x.detach().double() for x in (before, after))
    a, b = (x.reshape(1, -1) if axis is None else x.movedim(axis, 0).flatten(1) for x in (a, b))
    a, b = (x / x.norm(dim=1, keepdim=True) for x in (a, b))
    return 2 * torch.asin((a - b).norm(dim=1) / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_every_step_turns_by_the_equilibrium_angle_and_keeps_the_norm(kind, granularity, dtype, tolerance):
    """Storing a float32 weight of d entries alone costs 3e-8 / (angle sqrt(d)) of the angle: 3e-7 here."""
    weight = tensor(6, 11, 3, 3, dtype=dtype)
    make, rule = PLAIN[kind]
    optimizer = Rotational(make([weight]), invariant=[weight], granularity=granularity)
    axis, angle = (None if granularity == "tensor" else 0), rule.equilibrium().angle
    start = weight.detach().clone()
    for step in range(30):
        before = weight.detach().clone()
        weight.grad = noise(weight, step)
        optimizer.step()
        assert unit_angles(before, weight, axis) / angle == pytest.approx(1.0, rel=tolerance)
    norms = [x.detach().double().flatten(0 if axis is None else 1).norm(dim=-1) for x in (start, weight)]
    assert norms[1] / norms[0] == pytest.approx(1.0, rel=2e-7 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("entries", [9, 100, 2000])
def test_in_float32_the_angle_is_off_by_no_more_than_rounding_the_weights_leaves(lr, entries):
    """Against the exact result in float64, rounded to float32 once; a step rounds twice, which is sqrt(2) of it.

    Independent roundings e_i of w_i, about 0.4 ulp each, change the angle by <e, t>/||w||, t a unit tangent vector:
    2.5e-8 / (angle sqrt(entries)) of it. The two factors of a row are rounded, too, which is 3.4e-8 of the angle. The
    root mean square over so many rows is known to 1/sqrt(2 rows).
    """
    rows = 400
    weight = tensor(rows, entries, dtype=torch.float32)
    before, update = weight.detach().clone(), noise(weight, 0)
    optimizer = Rotational(torch.optim.SGD([weight], lr=lr, weight_decay=5e-3), invariant=[weight], granularity="row")
    angle = theory.SGD(lr, 5e-3).equilibrium().angle
    weight.grad = update
    optimizer.step()
    w, u = before.double(), update.double()
    tangent = u - w * ((u * w).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True))
    lengths = [x.norm(dim=1, keepdim=True) for x in (w, tangent)]
    exact = w * math.cos(angle) - tangent * (math.sin(angle) * lengths[0] / lengths[1])
    error, least = ((unit_angles(before, x, 0) / angle - 1).square().mean().sqrt() for x in (weight, exact.float()))
    assert least == pytest.approx(2.5e-8 / (angle * entries**0.5), rel=0.2)
    assert error < math.hypot(2**0.5 * least, 3.4e-8) * (1 + 4 / (2 * rows) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_direction_is_that_of_the_plain_optimizer_without_decay(kind, maximize):
    """The plain optimizer is fed the same gradients and moved along; what it adds, made tangent, is the direction."""
    weight, twin = tensor(4, 5), tensor(4, 5)
    make, rule = PLAIN[kind]
    optimizer, plain = (
        Rotational(make([weight], maximize=maximize), invariant=[weight]),
        make([twin], maximize=maximize),
    )
    plain.param_groups[0].update(weight_decay=0.0)
    angle = rule.equilibrium().angle
    for step in range(25):
        w = weight.detach().clone()
        with torch.no_grad():
            twin.copy_(w)
        weight.grad, twin.grad = noise(weight, step), noise(weight, step)
        optimizer.step()
        plain.step()
        moved = twin.detach() - w
        moved -= w * ((moved * w).sum() / (w * w).sum())
        expected = w * math.cos(angle) + moved * (math.sin(angle) * w.norm() / moved.norm())
        assert torch.allclose(weight.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_all_other_parameters_are_stepped_by_the_plain_optimizer_to_the_bit(kind):
    make, _ = PLAIN[kind]
    weight, other, twin = tensor(4, 5), tensor(7, seed=1), tensor(7, seed=1)
    optimizer, plain = Rotational(make([weight, other]), invariant=[weight]), make([twin])
    drive(optimizer, 0, 20)
    drive(plain, 0, 20)
    assert torch.equal(other, twin)
    state = {key: value for key, value in optimizer.state[weight].items() if key != "radius"}
    assert set(state) == set(plain.state[twin])  # under torch's names


@given(scale=st.floats(1e-3, 1e3), step_scale=st.floats(1e-6, 1e6))
def test_neither_the_scale_of_the_weight_nor_that_of_the_gradient_matters(scale, step_scale):
    ends = []
    for size, factor in ((1.0, 1.0), (scale, step_scale)):
        weight = nn.Parameter(tensor(3, 5).detach() * size)
        optimizer = Rotational(torch.optim.SGD([weight], lr=0.1, weight_decay=0.1, momentum=0.9), invariant=[weight])
        for step in range(5):
            weight.grad = noise(weight, step) * factor
            optimizer.step()
        ends.append(weight.detach() / size)
    assert torch.allclose(*ends, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parallel", [1e1, 1e3, 1e5])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_an_update_that_is_almost_radial_still_turns_by_the_angle(parallel, granularity, monkeypatch):
    """What is tangent is a small difference, of which float32 would lose 1e-7 parallel^2."""
    monkeypatch.setattr(InvarianceCheck, "check", lambda *_: None)  # later in training momentum may do that
    weight = tensor(4, 50, dtype=torch.float32)
    optimizer = Rotational(PLAIN["sgd"][0]([weight]), invariant=[weight], granularity=granularity)
    before = weight.detach().clone()
    weight.grad = noise(weight, 0) + parallel * before
    optimizer.step()
    axis = None if granularity == "tensor" else 0
    assert unit_angles(before, weight, axis) / math.acos(1 - 5e-5) == pytest.approx(1.0, rel=1e-5)


def test_units_without_a_tangent_update_stay_where_they_are():
    weight = tensor(3, 4)
    start = weight.detach().clone()
    optimizer = Rotational(PLAIN["sgd"][0]([weight]), invariant=[weight], granularity="row")
    weight.grad = torch.stack([torch.zeros(4, dtype=torch.float64), start[1], noise(start[2], 0)])
    optimizer.step()
    assert torch.equal(weight[:2], start[:2])
    assert not torch.equal(weight[2], start[2])


def test_transposed_convolutions_have_their_rows_along_axis_1():
    net = nn.Sequential(nn.ConvTranspose2d(3, 5, 2, bias=False), nn.BatchNorm2d(5)).double()
    optimizer = Rotational(
        PLAIN["heavy ball"][0](net.parameters()), invariant=["0.weight"], model=net, granularity="row"
    )
    before = net[0].weight.detach().clone()
    drive(optimizer, 0, 1)
    angle = PLAIN["heavy ball"][1].equilibrium().angle
    assert unit_angles(before, net[0].weight, 1) / angle == pytest.approx(1.0, rel=1e-11)


@pytest.mark.parametrize("kind", ["heavy ball", "nesterov", "adamw", "lion"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided"])
def test_memory_layout_does_not_matter(kind, granularity, layout):
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        if layout == "channels_last":
            return x.clone(memory_format=torch.channels_last)
        if layout == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.stack([x, x], -1)[..., 0]

    ends = []
    for arrange in (lambda x: x, laid_out):
        weight = nn.Parameter(arrange(tensor(4, 3, 2, 2).detach()))
        optimizer = Rotational(PLAIN[kind][0]([weight]), invariant=[weight], granularity=granularity)
        for step in range(5):
            weight.grad = arrange(noise(weight, step)) if step % 2 else noise(weight, step)
            optimizer.step()
        ends.append(weight.detach())
    assert torch.allclose(*ends, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["heavy ball", "adamw"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_centred_weights_stay_centred_and_turn_by_the_angle(kind, granularity):
    weight = nn.Parameter(tensor(6, 40).detach() + 0.5)
    make, rule = PLAIN[kind]
    optimizer = Rotational(make([weight]), invariant=[weight], granularity=granularity, centred=True)
    axis = None if granularity == "tensor" else 0
    for step in range(20):
        before = weight.detach().clone()
        weight.grad = noise(weight, step) + 0.3
        optimizer.step()
        assert unit_angles(before, weight, axis) / rule.equilibrium().angle == pytest.approx(1.0, rel=1e-11)
        assert weight.mean(None if axis is None else 1).abs().max().item() < 1e-14


def test_a_schedule_moves_the_angle_at_once():
    weight = tensor(5, 5)
    optimizer = Rotational(PLAIN["heavy ball"][0]([weight]), invariant=[weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.25)
    for lr in (0.1, 0.025, 0.00625):
        before = weight.detach().clone()
        weight.grad = noise(weight, 0)
        optimizer.step()
        scheduler.step()
        expected = theory.SGD(lr, 5e-4, momentum=0.9).equilibrium().angle
        assert unit_angles(before, weight, None).item() == pytest.approx(expected, rel=1e-9)


def test_at_learning_rate_zero_nothing_turns_but_the_momentum_gathers():
    weight = tensor(5, 5)
    optimizer = Rotational(PLAIN["heavy ball"][0]([weight]), invariant=[weight])
    optimizer.param_groups[0]["lr"] = 0.0
    start = weight.detach().clone()
    drive(optimizer, 0, 2)
    assert torch.allclose(weight, start, rtol=1e-15)
    assert optimizer.state[weight]["momentum_buffer"].norm() > 0


def test_settings_that_lose_their_equilibrium_raise_before_anything_changes():
    weight, other = tensor(5, 5), tensor(3)
    optimizer = Rotational(PLAIN["adamw"][0]([weight, other]), invariant=[weight])
    drive(optimizer, 0, 3)
    before = copy.deepcopy((weight.detach(), other.detach(), optimizer.state_dict()["state"]))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(EquilibriaError, match="got weight_decay=0; expected weight_decay > 0"):
        optimizer.step()
    assert torch.equal(weight, before[0])
    assert torch.equal(other, before[1])
    assert all(torch.equal(v, before[2][0][k]) for k, v in optimizer.state_dict()["state"][0].items())


def test_groups_and_state_stay_shared_with_the_plain_optimizer():
    weight, other = tensor(5, 5), tensor(3)
    plain = PLAIN["adamw"][0]([weight])
    optimizer = Rotational(plain, invariant=[weight])
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    assert [group["lr"] for group in plain.param_groups] == [1e-3, 0.5]
    drive(optimizer, 0, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    optimizer.param_groups[0]["lr"] = 7e-4
    assert plain.param_groups[0]["lr"] == 7e-4


def test_a_checkpoint_of_a_plain_run_is_taken_over():
    weight, twin = tensor(5, 5), tensor(5, 5)
    plain = PLAIN["adamw"][0]([twin])
    drive(plain, 0, 5)
    optimizer = Rotational(PLAIN["adamw"][0]([weight]), invariant=[weight])
    optimizer.load_state_dict(plain.state_dict())
    drive(optimizer, 5, 6)
    drive(plain, 5, 6)
    assert torch.equal(optimizer.state[weight]["exp_avg"], plain.state[twin]["exp_avg"])
    assert optimizer.state[weight]["step"] == 6


def test_a_checkpoint_of_another_granularity_raises():
    weight = tensor(5, 5)
    rows = Rotational(PLAIN["sgd"][0]([weight]), invariant=[weight], granularity="row")
    drive(rows, 0, 1)
    whole = Rotational(PLAIN["sgd"][0]([weight]), invariant=[weight])
    whole.load_state_dict(rows.state_dict())
    with pytest.raises(EquilibriaError, match=r"got a checkpoint with 5 norms .* expected 1: .* than 'tensor'"):
        drive(whole, 1, 2)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_an_optimizer_of_its_own(clone):
    weight = tensor(5, 5)
    optimizer = Rotational(PLAIN["adamw"][0]([weight]), invariant=[weight], granularity="row")
    drive(optimizer, 0, 3)
    other = clone(optimizer)
    twin = other.param_groups[0]["params"][0]
    drive(optimizer, 3, 6)
    drive(other, 3, 6)
    assert twin is not weight
    assert torch.equal(twin, weight)


def test_a_monitor_reports_that_nothing_settles_here():
    weight, other = tensor(5, 5), tensor(3)
    optimizer = Rotational(torch.optim.AdamW([{"params": [weight]}, {"params": [other]}], lr=1e-3), invariant=[weight])
    first, second = (rule_of_group(optimizer, group) for group in optimizer.param_groups)
    assert first.rule is None
    assert "keep their norm and turn by 0.00103 rad per step" in first.reason
    assert second.rule == theory.AdamW(1e-3, 0.01)


def test_on_a_real_network_every_layer_turns_by_the_angle_and_it_learns():
    torch.manual_seed(0)
    net, digits = BasicBlockResNet(8, (1, 1)), load_digits()
    invariant = [f"{name}.conv.weight" for name, _ in net.normalised()]
    plain = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-3, momentum=0.9)
    optimizer = Rotational(plain, invariant=invariant, model=net, granularity="row")
    angle, weights = optimizer.angle_of(optimizer.param_groups[0]), list(optimizer.axes)
    losses = []
    for step, (images, labels) in enumerate(Batches(digits.train_images, digits.train_labels, batch_size=64)):
        before = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for old, new in zip(before, weights, strict=True):
            # d = 9 entries in the rows of the stem: rounding alone is 3e-8 / (angle 3)
            assert unit_angles(old, new, 0) / angle == pytest.approx(1.0, rel=1e-5)
        if step == 40:
            break
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


class Signum(torch.optim.Optimizer):
    """Sign of an averaged gradient: nobody's rule, so that its law is measured."""

    def __init__(self, params, **settings):
        super().__init__(params, {"momentum": 0.9, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                buffer = self.state[param].setdefault("buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(buffer.sign(), alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.1),
        lambda params: torch.optim.Muon(params, lr=2e-3, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        lambda params: Signum(params, lr=1e-3, weight_decay=1.0),
    ],
    ids=["Muon", "Muon, match_rms", "measured"],
)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_along_the_step_of_muon_and_of_optimizers_with_a_measured_law(make, granularity):
    """By the angle of each shape, in the direction of the plain optimizer, whose other weights move as ever."""
    shapes = [(24, 24), (8, 40)]
    turned, plain = ([tensor(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2))
    others = [tensor(5, 6, seed=7) for _ in range(2)]
    optimizer = Rotational(make([*turned, others[0]]), invariant=turned, granularity=granularity)
    reference = make([*plain, others[1]])
    group = optimizer.param_groups[0]
    for step in range(3):
        with torch.no_grad():
            for weight, copied in zip(turned, plain, strict=True):
                copied.copy_(weight)  # the reference steps from the same weights
        before = [weight.detach().clone() for weight in turned]
        for one, other in zip([*turned, others[0]], [*plain, others[1]], strict=True):
            one.grad, other.grad = noise(one, step), noise(one, step)
            if one.shape != (5, 6):
                radial = (one.grad * one).sum() / one.square().sum()
                one.grad -= radial.detach() * one.detach()
                other.grad.copy_(one.grad)
        optimizer.step()
        reference.step()
        assert torch.equal(others[0], others[1])
        for i, (old, new, stepped) in enumerate(zip(before, turned, plain, strict=True)):
            axis = None if granularity == "tensor" else 0
            angles = unit_angles(old, new.detach(), axis)
            torch.testing.assert_close(
                angles, torch.full_like(angles, optimizer.angle_of(group, new)), rtol=1e-9, atol=0
            )
            assert new.norm().item() == pytest.approx(old.norm().item(), rel=1e-12)
            if granularity == "tensor":
                moved, taken = (
                    (one - old) - ((one - old) * old).sum() / old.square().sum() * old for one in (new, stepped)
                )
                cosine = (moved * taken).sum() / moved.norm() / taken.norm()
                assert cosine.item() == pytest.approx(1, abs=1e-9), i
    if isinstance(optimizer.plain, torch.optim.Muon):
        rule = rule_of_group(optimizer.plain, group).rule
        wanted = [rule.equilibrium(shape=shape).angle for shape in shapes]
        assert [optimizer.angle_of(group, weight) for weight in turned] == wanted
        assert wanted[0] > 1.05 * wanted[1]  # square matrices turn further


def no_law(p):
    return torch.optim.Adam(p, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), {}, r"got a group of RMSprop .*: no law for RMSprop \(no decay\)"),
        (lambda p: p, {}, "got optimizer of type list; expected"),
        (lambda p: ScalarRMSprop(p), {}, r"no law for ScalarRMSprop \(adapts its own settings\).*; expected SGD"),
        (no_law, {}, "cannot be rotational: the angle of Adam with L2 depends on the gradient's size"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {}, "got weight_decay=0; expected weight_decay > 0"),
        (PLAIN["sgd"][0], {"granularity": "filter"}, "got granularity='filter'; expected one of: tensor, row"),
        (PLAIN["sgd"][0], {"granularity": "row", "which": 1}, r"granularity='row' for group0.1 of shape \(4,\)"),
        (PLAIN["sgd"][0], {"which": 2}, "got group0.2 of norm 0; expected a finite norm above 0"),
        (PLAIN["sgd"][0], {"which": 2, "granularity": "row"}, "got group0.2, row 0 of norm 0"),
        (PLAIN["sgd"][0], {"which": 3, "centred": True}, "of norm 0 without its mean"),
        (PLAIN["sgd"][0], {"which": 4}, "got a parameter of torch.bfloat16; Rotational needs float32"),
    ],
)
def test_what_cannot_be_rotational_raises_with_what_to_do(make, settings, message):
    coarse = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    params = [tensor(3, 4), tensor(4), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2)), coarse]
    which = settings.pop("which", 0)
    before = params[3].detach().clone()
    with pytest.raises(EquilibriaError, match=message):
        Rotational(make(params), invariant=[params[which]], **settings)
    assert torch.equal(params[3], before)


def group_norm_step(granularity, invariant):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(1, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    )
    plain = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
    optimizer = Rotational(plain, invariant=invariant, model=net, granularity=granularity)
    images, labels = torch.randn(16, 3, 6, 6), torch.randint(3, (16,))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        before = [param.detach().clone() for param in net.parameters()]
        try:
            optimizer.step()
        except EquilibriaError:
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            raise


def test_rows_that_are_invariant_only_together_raise():
    group_norm_step("tensor", ["0.weight"])
    measured = SimpleNamespace(alone=["0.weight"], rows={"0.weight": SimpleNamespace(block=4, rows=8)})
    with pytest.raises(EquilibriaError, match=r"groups of 4 of its 8 rows.*granularity='tensor'"):
        group_norm_step("row", measured)


def test_a_weight_that_is_not_invariant_raises_before_anything_changes():
    with pytest.raises(EquilibriaError, match=r"got 4\.weight, whose gradient.*invariant=sym"):
        group_norm_step("tensor", ["0.weight", "4.weight"])


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 16), lambda: nn.BatchNorm2d(16)])
@pytest.mark.parametrize("noisy", [False, True])
def test_rows_that_are_invariant_only_together_raise_though_names_do_not_say(norm, noisy):
    """Their radial gradients cancel within groups; noise on gradients, as for privacy, does not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 3))
    plain = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
    optimizer = Rotational(plain, invariant=["0.weight"], model=net, granularity="row")

    def train() -> None:
        for _ in range(25):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(16, 3, 6, 6)), torch.randint(3, (16,))).backward()
            if noisy:
                net[0].weight.grad += 10 * torch.randn_like(net[0].weight) * net[0].weight.grad.std()
            optimizer.step()

    if noisy or isinstance(net[1], nn.BatchNorm2d):
        train()
        return
    with pytest.raises(EquilibriaError, match="use granularity='tensor' where only groups of rows are"):
        train()
