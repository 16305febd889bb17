"""Apparent symmetries near the present weights: clipping far away, faint penalties."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.objectives._objective import Objective, objective
from equilibria.symmetry import symmetries
from equilibria.symmetry._confirmation import Confirmer


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)


def found_in(net: nn.Module):
    return symmetries(objective(net, functional.cross_entropy), [batch()])


@pytest.mark.parametrize("clip", [10.0, 1000.0, 10000.0])
def test_a_clip_far_from_the_data_is_noticed(clip):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Hardtanh(-clip, clip), nn.Linear(8, 3, bias=False))
    assert found_in(net).basis == ()


def test_a_clip_before_a_normalisation_far_from_the_data_is_noticed():
    """Without it the scale would be invariant alone, and the shift without effect."""
    torch.manual_seed(0)
    first = [nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)]
    last = [nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    sym = found_in(nn.Sequential(*first, nn.Hardtanh(-1000, 1000), *last))
    assert (sym.how["1.weight"], sym.how["1.bias"]) == ("no", "no")
    sym = found_in(nn.Sequential(*first, *last))
    assert (sym.how["1.weight"], sym.how["1.bias"]) == ("alone", "no effect")


def test_a_weight_much_smaller_than_its_bias_is_confirmed():
    """Scaled down by 65536 it would be lost in the rounding of the sum."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        net[0].weight.mul_(1e-7)
    sym = found_in(net)
    assert (sym.alone, sym.notes) == (("0.weight",), ())


def test_a_faint_penalty_counts_when_scaling_as_it_does_in_gradients():
    """1e-5 |w|^2 in a loss of directions, as a number without axes: no eps."""
    params = {"w": torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}

    def fn(point, row):
        return functional.normalize(point["w"], dim=0) @ row + 1e-5 * point["w"].square().sum()

    rows = [torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64) for index in range(8)]
    loss = Objective(fn, params)
    assert Confirmer(loss, params, rows, exact=True).change({"w": 1}) > 1e-6
    assert symmetries(loss, rows).alone == ()
