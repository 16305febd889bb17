"""A monitor beside the optimizers of this package: it measures them, and knows their law where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.control import SGDW, Lion, ProjectedGD, Rotational, ScalarRMSprop
from equilibria.errors import EquilibriaError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def samples(net: nn.Sequential, optimizer: torch.optim.Optimizer, *, steps: int = 12) -> list[dict]:
    """The rows of the invariant weight."""
    generator = torch.Generator().manual_seed(1)
    with eq.watch(net, optimizer, every=1) as monitor:
        for _ in range(steps):
            images = torch.randn(16, 6, generator=generator, dtype=torch.float64)
            labels = torch.randint(3, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
        return [row for row in monitor.samples().to_pylist() if row["param"] == "0.weight"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Lion, SGDW])
def test_rotational_weights_are_seen_to_turn_by_the_angle_that_is_promised_with_a_fixed_norm(kind):
    net = network()
    plain = kind(net.named_parameters(), lr=0.01, weight_decay=0.01)
    optimizer = Rotational(plain, invariant=["0.weight"])  # the optimizer knows the names
    angle = optimizer.angle_of(optimizer.param_groups[0])
    rows = samples(net, optimizer)
    assert len(rows) == 12
    assert [row["angle"] for row in rows] == pytest.approx([angle] * 12, rel=1e-9)
    assert [row["norm"] for row in rows] == pytest.approx([rows[0]["norm"]] * 12, rel=1e-12)
    assert [row["angle_predicted"] for row in rows] == [row["angle_equilibrium"] for row in rows] == [angle] * 12
    assert rows[-1]["norm_equilibrium"] is None


def test_sgdw_has_its_equilibrium_in_the_samples():
    net = network()
    optimizer = SGDW(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    expected = eq.theory.SGDW(0.1, 0.01, momentum=0.9).equilibrium().angle
    assert samples(net, optimizer)[-1]["angle_equilibrium"] == pytest.approx(expected)


def test_what_has_no_law_is_measured():
    net = network()
    rows = samples(net, ScalarRMSprop(net.parameters(), lr=0.1))
    assert rows[-1]["angle"] > 0
    assert rows[-1]["angle_equilibrium"] is None
    for param in [*net[1].parameters(), *net[3].parameters()]:
        param.requires_grad_(False)
    rows = samples(net, ProjectedGD([net[0].weight], lr=0.1, weight_decay=0.01))
    assert rows[-1]["angle"] > 0
    assert rows[-1]["norm"] == pytest.approx(rows[0]["norm"], rel=1e-12)


def test_the_optimizer_inside_of_a_rotational_one_is_not_watched_in_its_place():
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    eq.watch(net, plain).close()
    outer = Rotational(plain, invariant=["0.weight"], model=net)
    with pytest.raises(EquilibriaError, match="got the SGD inside of a Rotational; expected the Rotational itself"):
        eq.watch(net, plain)
    eq.watch(net, outer).close()
