"""Weights whose norm is held: exact angles, everything else as the wrapped optimizer leaves it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equilibria as eq
from equilibria import theory
from equilibria.control import Hyperball, Lion
from equilibria.errors import EquilibriaError
from equilibria.theory.sphere import sphere_angle


def weight(*shape, seed=0, dtype=torch.float64):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def tangent(w, step):
    g = torch.randn(w.shape, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64).to(w.dtype)
    w = w.detach()
    return (g - (g * w).sum() / w.square().sum() * w) / w.norm()


def angle(old, new):
    chord = (old / old.norm() - new / new.norm()).norm().item()
    return 2 * math.asin(chord / 2)


MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_turns_by_the_triangle_of_weight_and_update(name):
    """The plain optimizer from the same weight and state gives the update, decay included."""
    held = weight(6, 4)
    optimizer = Hyperball(MAKERS[name]([held]), invariant=[held])
    first = held.norm().item()
    for step in range(5):
        free = nn.Parameter(held.detach().clone())
        plain = MAKERS[name]([free])
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = held.detach().clone()
        held.grad = tangent(held, step)
        free.grad = held.grad.clone()
        optimizer.step()
        plain.step()
        taken = before - free.detach()
        ratio = (taken.norm() / before.norm()).item()
        cosine = ((taken * before).sum() / taken.norm() / before.norm()).item()
        assert angle(before, held.detach()) == pytest.approx(float(sphere_angle(ratio, cosine)), rel=1e-7)
        assert held.norm().item() == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_other_parameters_move_to_the_bit_as_under_the_plain_optimizer(name):
    runs = []
    for wrap in (True, False):
        held, other = weight(4, 3, seed=1), weight(4, 3, seed=2)
        optimizer = MAKERS[name]([held, other])
        optimizer = Hyperball(optimizer, invariant=[held]) if wrap else optimizer
        for step in range(4):
            held.grad, other.grad = tangent(held, step), tangent(other, 50 + step)
            optimizer.step()
        runs.append((held.detach(), other.detach()))
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[1][0])


def test_without_a_gradient_of_a_held_weight_nothing_is_changed():
    held, other = weight(4, 3, seed=1), weight(4, 3, seed=2)
    optimizer = Hyperball(torch.optim.AdamW([held, other], lr=0.1), invariant=[held])
    before = held.detach().clone()
    other.grad = tangent(other, 0)
    optimizer.step()
    assert torch.equal(held, before)


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_scale_of_the_weight_and_lr_together_change_nothing(scale, seed):
    """Of AdamW: a weight k times as large at k times the lr takes the same path of directions."""
    ends = []
    for k in (1.0, scale):
        held = nn.Parameter(k * weight(5, 3, seed=seed).detach())
        optimizer = Hyperball(torch.optim.AdamW([held], lr=0.01 * k, weight_decay=0.0, eps=0.0), invariant=[held])
        for step in range(4):
            held.grad = tangent(held, step)
            optimizer.step()
        ends.append(held.detach() / k)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("rule", [theory.AdamW(1e-2, 0.1), theory.Lion(1e-3, 1.0), theory.Muon(0.02, 0.1)], ids=repr)
def test_the_norm_of_the_equilibrium(rule, granularity):
    kinds = {theory.AdamW: torch.optim.AdamW, theory.Lion: Lion, theory.Muon: torch.optim.Muon}
    held = weight(6, 4)
    optimizer = kinds[type(rule)]([held], lr=rule.lr, weight_decay=rule.weight_decay)
    optimizer = Hyperball(optimizer, invariant=[held], norm="equilibrium", granularity=granularity)
    there = rule.equilibrium(shape=(6, 4)) if isinstance(rule, theory.Muon) else rule.equilibrium(dim=24)
    assert held.norm().item() == pytest.approx(there.norm)
    for step in range(3):
        held.grad = tangent(held, step)
        optimizer.step()
    assert held.norm().item() == pytest.approx(there.norm)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_a_network_takes_the_path_of_weight_decay_to_rounding(kind):
    """Closed loop in float64: measured norms, scaled gradients, learning rates of `equilibria.translate`."""
    steps, decay = 60, 4.0 if kind is torch.optim.AdamW else 0.7
    lrs = 0.04 * torch.arange(1, steps + 1).clamp(max=10).double().numpy() / 10
    data = torch.randn(steps, 16, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rule = getattr(theory, kind.__name__)(0.04, decay)
    paths, norms = [], []
    for on_sphere in (False, True):
        net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6, eps=1e-30), nn.Tanh()).double()
        held = net[0].weight
        with torch.no_grad():
            held.copy_(5 * weight(6, 5))
        optimizer = kind([held], lr=1.0, weight_decay=0.0 if on_sphere else decay)
        factors = [1.0] * steps
        settings = lrs
        if on_sphere:
            optimizer = Hyperball(optimizer, invariant=[held])
            there = eq.translate(
                rule, to="sphere", schedule=lrs, steps=steps, norm=norms, scale_gradients=True, shape=(6, 5)
            )
            factors, settings = there.gradient, there.lr
        path = []
        for step in range(steps):
            optimizer.zero_grad()
            net(data[step]).pow(3).sum(1).square().mean().backward()
            if not on_sphere:
                norms.append(held.norm().item())
            held.grad *= float(factors[step])
            optimizer.param_groups[0]["lr"] = float(settings[step])
            optimizer.step()
            path.append(held.detach() / held.norm())
        paths.append(torch.stack(path))
    assert min(norms) < 0.6 * norms[0]
    assert (paths[0] - paths[1]).norm(dim=(1, 2)).max() < 1e-11
    assert (paths[0][-1] - paths[0][0]).norm() > 0.2


def test_the_monitor_knows_it_and_promises_nothing_about_held_weights():
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = Hyperball(torch.optim.AdamW(net.parameters(), lr=1e-2), invariant=["0.weight"], model=net)
    with eq.watch(net, optimizer, every=1) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            net(torch.randn(8, 3)).square().sum().backward()
            optimizer.step()
    rows = [row for row in monitor.samples().to_pylist() if row["param"] == "0.weight"]
    assert len({round(row["norm"], 5) for row in rows}) == 1
    assert all(row["angle"] > 0 for row in rows)
    assert all(row["angle_predicted"] is None or math.isnan(row["angle_predicted"]) for row in rows)
    assert "Hyperball" in str(monitor.metadata["controllers"])
    assert not [one for one in monitor.findings() if "outside" in one.subject or "0.weight" in one.subject]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda p: p, {}, "got optimizer of type list; expected a torch.optim.Optimizer"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"norm": "end"}, "got norm='end'; expected one of: start, equilibrium"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
            {"norm": "equilibrium"},
            "got norm='equilibrium' for .*: the norm of SGD depends on the gradients; expected AdamW, Lion or Muon",
        ),
        (
            lambda p: torch.optim.AdamW(p, weight_decay=0.0),
            {"norm": "equilibrium"},
            "with weight decay, or norm='start'",
        ),
    ],
)
def test_bad_input_raises_with_what_to_do(make, settings, message):
    w = weight(3, 4)
    with pytest.raises(EquilibriaError, match=message):
        Hyperball(make([w]), invariant=[w], **settings)


def test_a_weight_that_is_not_invariant_raises_before_anything_changes():
    w = weight(3, 4)
    optimizer = Hyperball(torch.optim.SGD([w], lr=0.1), invariant=[w])
    before = w.detach().clone()
    w.grad = before.clone()
    with pytest.raises(EquilibriaError, match="scale-invariant"):
        optimizer.step()
    assert torch.equal(w, before)
