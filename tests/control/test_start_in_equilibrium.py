"""Starting in equilibrium: settled from the first steps, whatever the scale of the initialisation."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.random_walk import angles
from torch import nn

from equilibria import theory
from equilibria.control import SGDW, Lion, start_in_equilibrium
from equilibria.control._start_in_equilibrium import StartWarning
from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import objective
from equilibria.symmetry import symmetries

DIM, ROWS = 300, 12


class NoiseWorld(nn.Module):
    """``loss(noise) = sum over rows of <w/||w||, noise>``: a random walk on spheres, L = 299 scale^2 for every row."""

    def __init__(self, norm: float, seed: int = 0, rows: int = ROWS) -> None:
        super().__init__()
        w = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.weight = nn.Parameter(w * (norm / w.norm(dim=1, keepdim=True)))

    def loss(self, noise: torch.Tensor) -> torch.Tensor:
        return (self.weight / self.weight.norm(dim=1, keepdim=True) * noise).sum()


def noises(count: int, seed: int = 1, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, DIM, generator=generator, dtype=torch.float64) for _ in range(count)]


RULES = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02), theory.SGD(0.1, 0.02)),
    "heavy ball": (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.005, momentum=0.9),
        theory.SGD(0.1, 0.005, momentum=0.9),
    ),
    "sgdw": (
        lambda p: SGDW(p, lr=0.1, weight_decay=0.02, momentum=0.5),
        theory.SGDW(0.1, 0.02, momentum=0.5),
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), theory.AdamW(0.01, 0.1)),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1), theory.AdamL2(0.01, 0.1)),
    "lion": (
        lambda p: Lion(p, lr=0.01, weight_decay=0.02, betas=(0.9, 0.9)),
        theory.Lion(0.01, 0.02, betas=(0.9, 0.9)),
    ),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_it_turns_by_the_equilibrium_angle_once_the_momentum_has_filled(kind, granularity):
    """From 10 times the norm; a tensor of equal rows is settled as a whole when its rows are."""
    make, rule = RULES[kind]
    world, pool = NoiseWorld(10.0), noises(5)
    optimizer = make([world.weight])
    done = start_in_equilibrium(
        world, optimizer, invariant=["weight"], loss=world.loss, batches=pool, granularity=granularity
    )
    turned = []
    for noise in noises(160, seed=2):
        before = world.weight.detach().clone()
        optimizer.zero_grad()
        world.loss(noise).backward()
        optimizer.step()
        turned.append(angles(before, world.weight.detach()).numpy())
    settled = (np.array(turned[60:]) ** 2).mean(0)
    # rows of one tensor are started alike, so the mean over rows is what the law is about
    scatter = settled.std(ddof=1) / ROWS**0.5 / done[0].angle ** 2
    assert settled.mean() / done[0].angle ** 2 == pytest.approx(1.0, abs=4 * scatter + 0.03)
    assert 4 * scatter + 0.03 < 0.1
    assert done[0].before == pytest.approx(10.0 * ROWS**0.5)
    # every row has one part in ROWS of the entries and about so much of L: exact but for the scatter of L over rows,
    # 2/(DIM batches) squared, of which the norm feels 1/8
    parts = ROWS if granularity == "row" else 1
    whole = rule.equilibrium(unit_grad_sq=done[0].unit_grad_sq / parts, dim=ROWS * DIM / parts)
    assert done[0].after == pytest.approx(whole.norm * parts**0.5, rel=1e-9 if parts == 1 else 1e-3)


@given(scale=st.floats(1e-3, 1e3), kind=st.sampled_from(["sgd", "adamw"]))
def test_the_scale_of_the_initialisation_does_not_matter(scale, kind):
    ends = []
    for norm in (1.0, scale):
        world = NoiseWorld(norm)
        optimizer = RULES[kind][0]([world.weight])
        start_in_equilibrium(world, optimizer, invariant=["weight"], loss=world.loss, batches=noises(2))
        ends.append(world.weight.detach())
    assert torch.allclose(*ends, rtol=1e-10)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 3))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)) for _ in range(3)]


def loss_of(net: nn.Module):
    return lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1])


def test_nothing_but_the_weight_changes_and_the_network_computes_what_it_did():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    net[4].bias.grad = torch.full((3,), 7.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    first = nn.functional.relu(net[1](net[0](data()[0][0])))
    net.load_state_dict(before)
    torch.manual_seed(5)
    start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss_of(net), batches=data())
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))  # dropout drew its numbers elsewhere
    after = net.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"0.weight"}
    assert net[4].bias.grad.tolist() == [7.0] * 3
    assert net[0].weight.grad is None
    assert net.training
    # BatchNorm's eps of 1e-5 against variances of a few tenths
    assert torch.allclose(nn.functional.relu(net[1](net[0](data()[0][0]))), first, atol=1e-3)


def trained_before() -> nn.Module:
    """Running statistics that hold something, a bias in front of them, no dropout, and eps out of the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20, eps=1e-20), nn.ReLU(), nn.Linear(20, 3)).double()
    for images, _ in data() * 5:
        net(images.double())
    return net


def double_loss(net: nn.Module):
    return lambda batch: nn.functional.cross_entropy(net(batch[0].double()), batch[1])


def test_statistics_that_are_in_use_follow_so_that_eval_mode_stays():
    net, images = trained_before(), data()[0][0].double()
    before, weight = net.eval()(images).detach(), net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.1, weight_decay=1e-2)
    done = start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=double_loss(net), batches=data())
    assert torch.allclose(net[0].weight, weight * (done[0].after / done[0].before), rtol=1e-12)
    assert abs(done[0].after / done[0].before - 1) > 0.1
    assert torch.allclose(net.eval()(images), before, rtol=1e-10, atol=1e-12)
    assert not net[0]._forward_pre_hooks
    assert not net._forward_pre_hooks


def test_rows_in_front_of_statistics_in_use_raise_before_anything_changes():
    net = trained_before()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(EquilibriaError, match=r"statistics in 1 that are in use.*reset_running_stats\(\)"):
        start_in_equilibrium(
            net, optimizer, invariant=["0.weight"], loss=double_loss(net), batches=data(), granularity="row"
        )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_frozen_weights_stay_and_are_not_reported():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    net.append(nn.Linear(8, 3))
    frozen = net[0].weight.requires_grad_(False)
    before = frozen.clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    common = {"loss": loss_of(net), "batches": data()}
    done = start_in_equilibrium(net, optimizer, invariant=["0.weight", "2.weight"], **common)
    assert [change.name for change in done] == ["2.weight"]
    assert torch.equal(frozen, before)
    with pytest.raises(EquilibriaError, match=r"got 0\.weight, all frozen; expected weights that are trained"):
        start_in_equilibrium(net, optimizer, invariant=["0.weight"], **common)


def test_a_weight_that_the_loss_does_not_depend_on_raises():
    net = network()
    unused = nn.Parameter(torch.randn(3, 3))
    optimizer = torch.optim.SGD([*net.parameters(), unused], lr=0.1, weight_decay=1e-3)
    with pytest.raises(EquilibriaError, match=r"got gradients of zero for group0\.5 on all batches"):
        start_in_equilibrium(net, optimizer, invariant=[unused], loss=loss_of(net), batches=data())


def test_the_learning_rate_of_the_first_phase_may_be_given_during_warm_up():
    norms, dropout_seed = [], 5
    for lr, given_lr in ((0.1, None), (0.0, 0.1)):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=1e-3)
        torch.manual_seed(dropout_seed)
        done = start_in_equilibrium(
            net, optimizer, invariant=[net[0].weight], loss=loss_of(net), batches=data(), lr=given_lr
        )
        norms.append(done[0].after)
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    "warm_up",
    [
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.01, total_iters=5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, div_factor=100, total_steps=10),
    ],
)
def test_the_first_lr_of_a_warm_up_raises_unless_it_is_meant(warm_up):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    warm_up(optimizer)
    common = {"invariant": ["0.weight"], "loss": loss_of(net), "batches": data()}
    before = net[0].weight.detach().clone()
    with pytest.raises(
        EquilibriaError, match=r"got lr=0\.001 for 0\.weight, which a scheduler has changed from 0\.1;.* lr=0\.1"
    ):
        start_in_equilibrium(net, optimizer, **common)
    assert torch.equal(net[0].weight, before)
    assert start_in_equilibrium(net, optimizer, lr=0.1, **common)[0].after > 0


def test_the_objective_of_the_symmetries_may_be_the_loss():
    """It has no dropout, so the network here has none either."""
    ends = []
    for as_objective in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
        loss = objective(net, nn.functional.cross_entropy) if as_objective else loss_of(net)
        sym = symmetries(objective(net, nn.functional.cross_entropy), data())
        ends.append(start_in_equilibrium(net, optimizer, invariant=sym, loss=loss, batches=data()))
    assert ends[0] == ends[1]


def test_a_scheduler_that_begins_at_the_lr_typed_is_no_warm_up():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss_of(net), batches=data())


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(20), lambda: nn.LayerNorm(20)])
def test_a_norm_at_which_eps_matters_warns_with_the_change_of_the_outputs(norm):
    """Entries of sqrt(1e-5/20) against an eps of 1e-5 and inputs of variance 1: outputs shrink visibly."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20, bias=False), norm(), nn.Dropout(0.5), nn.Linear(20, 3))
    images = data()[0][0]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=10.0)

    def outputs() -> torch.Tensor:
        torch.manual_seed(5)
        return net(images).detach()

    before = outputs()
    torch.manual_seed(5)
    with pytest.warns(StartWarning, match=r"outputs moved by \S+ of their standard deviation") as warned:
        start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss_of(net), batches=data())
    moved = float((outputs() - before).square().mean().sqrt() / before.std(correction=0))
    assert moved > 0.2
    assert float(re.search(r"moved by (\S+)", str(warned[0].message))[1]) == pytest.approx(
        moved, rel=0.05
    )  # two digits


def test_a_row_without_gradient_keeps_its_norm():
    world = NoiseWorld(2.0)
    pool = noises(2)
    for noise in pool:
        noise[3] = 0
    optimizer = RULES["sgd"][0]([world.weight])
    start_in_equilibrium(world, optimizer, invariant=["weight"], loss=world.loss, batches=pool, granularity="row")
    norms = world.weight.detach().norm(dim=1)
    assert norms[3].item() == pytest.approx(2.0)
    assert (norms[:3] - 2.0).abs().min() > 0.1


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon_starts_at_the_norm_of_its_law():
    world = NoiseWorld(2.0)
    optimizer = torch.optim.Muon([world.weight], lr=0.01, weight_decay=0.1)
    done = start_in_equilibrium(world, optimizer, invariant=["weight"], loss=world.loss, batches=noises(1))
    assert done[0].after == pytest.approx(theory.Muon(0.01, 0.1).equilibrium(shape=(ROWS, DIM)).norm)
    with pytest.raises(EquilibriaError, match="got granularity='row' with Muon"):
        start_in_equilibrium(
            world, optimizer, invariant=["weight"], loss=world.loss, batches=noises(1), granularity="row"
        )


def test_bad_input_raises_before_anything_changes():
    net, sgd = network(), {"lr": 0.1, "weight_decay": 1e-3}
    optimizer = torch.optim.SGD(net.parameters(), **sgd)
    common = {"invariant": ["0.weight"], "loss": loss_of(net), "batches": data()}
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def refused(message: str, *, by: torch.optim.Optimizer = optimizer, **settings) -> None:
        with pytest.raises(EquilibriaError, match=message):
            start_in_equilibrium(net, by, **{**common, **settings})
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    refused("got no batches", batches=iter(()))
    refused(r"got batches=tuple, which is a single batch; expected a few of them: batches=\[batch\]", batches=data()[0])
    refused("got batches=Tensor, which looks like a single batch", batches=data()[0][0])
    with pytest.raises(EquilibriaError, match="got model of type SGD; expected the network"):
        start_in_equilibrium(optimizer, net, **common)
    refused("got granularity='filter'", granularity="filter")
    refused("got lr=0; expected 0 < lr", lr=0)
    refused("got weight_decay=0", by=torch.optim.SGD(net.parameters(), lr=0.1))
    refused("without an equilibrium for 0.weight: no law for Adagrad", by=torch.optim.Adagrad(net.parameters()))
    refused("got 4.weight, whose gradient has a cosine of .* training mode", invariant=["4.weight"])
    refused("granularity='row' for 1.weight of shape", invariant=["1.weight"], granularity="row")
    refused("got gradients of zero for 0.weight", loss=lambda batch: net(batch[0]).sum() * 0)
    refused("gradient of 0.weight that is not finite", loss=lambda batch: net(batch[0]).sum() * float("nan"))
    net.eval()
    refused("training mode")
    net.train()
    begun = torch.optim.SGD(net.parameters(), momentum=0.9, **sgd)
    begun.state[net[0].weight] = {"momentum_buffer": torch.zeros_like(net[0].weight)}
    refused("has already stepped 0.weight", by=begun)


def group_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(1, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    )


def image_batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 3, 6, 6, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("source", ["names", "symmetries"])
def test_rows_that_are_invariant_only_together_raise_and_whole_tensors_are_not(source):
    net, batches = group_norm_net(), image_batches()
    sym = symmetries(objective(net, nn.functional.cross_entropy), batches)
    invariant = sym if source == "symmetries" else ["0.weight"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
    before = net[0].weight.detach().clone()

    def start(granularity):
        def loss(batch):
            return nn.functional.cross_entropy(net(batch[0]), batch[1])

        return start_in_equilibrium(
            net, optimizer, invariant=invariant, loss=loss, batches=batches, granularity=granularity
        )

    with pytest.raises(EquilibriaError, match=r"use granularity='tensor' where|granularity='tensor' is the one to use"):
        start("row")
    assert torch.equal(net[0].weight, before)
    assert [done.name for done in start("tensor")] == ["0.weight"]


def test_a_row_of_zeros_along_the_first_axis_is_called_a_row():
    world = NoiseWorld(1.0)
    with torch.no_grad():
        world.weight[3] = 0
    with pytest.raises(EquilibriaError, match="got weight, row 3 of norm 0; expected a finite norm above 0"):
        start_in_equilibrium(
            world,
            torch.optim.SGD([world.weight], lr=0.1, weight_decay=0.02),
            invariant=["weight"],
            loss=world.loss,
            batches=noises(1),
            granularity="row",
        )


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_a_loss_of_outputs_and_targets_raises_with_what_to_write(loss):
    net = group_norm_net()
    with pytest.raises(EquilibriaError, match=r"got loss=(cross_entropy|CrossEntropyLoss), .*loss=lambda batch: F\."):
        start_in_equilibrium(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4),
            invariant=["0.weight"],
            loss=loss,
            batches=image_batches(),
        )
