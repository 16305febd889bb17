"""Derivatives of stacked points are those of single points, also through torch's fused normalisations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.lab.manifold.landscape import Derivatives, Landscape

LAYERS = {
    "batch": lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    "layer": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 4, affine=False),
    "batch with statistics": lambda: nn.BatchNorm1d(4, affine=False),
}


@pytest.mark.parametrize("norm", LAYERS)
def test_stacked_points_have_the_derivatives_of_single_points(norm):
    torch.manual_seed(0)  # some weights make the eps of a group of two matter
    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4, bias=False), LAYERS[norm](), nn.Tanh()).double()
    batch = tuple(torch.randn(6, size, generator=draw, dtype=torch.float64) for size in (3, 4))
    landscape = Landscape(eq.objective(net, nn.functional.mse_loss), batch)
    points, directions = (torch.randn(3, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    points, directions = landscape.onto_sphere(points), landscape.onto_sphere(directions)
    for stacked in (landscape.losses, landscape.gradients, landscape.hessians):
        single = torch.cat([stacked(point[None]) for point in points])
        assert stacked(points).numpy() == pytest.approx(single.numpy(), rel=1e-11, abs=1e-12)
    single = torch.cat(
        [landscape.curvature_gradients(p[None], d[None])[0] for p, d in zip(points, directions, strict=True)]
    )
    assert landscape.curvature_gradients(points, directions)[0].numpy() == pytest.approx(
        single.numpy(), rel=1e-8, abs=1e-9
    )
    step = 1e-4  # the change of v'Hv along a third direction, by central differences: right to 1e-8 of the next order
    ahead, behind = (landscape.hessians(points + sign * step * points.flip(0)) for sign in (1, -1))
    change = torch.einsum("ti,tij,tj->t", directions, (ahead - behind) / (2 * step), directions)
    along = (landscape.curvature_gradients(points, directions)[0] * points.flip(0)).sum(dim=1)
    assert along.numpy() == pytest.approx(change.numpy(), rel=1e-5, abs=1e-5)


def test_points_are_stacked_only_if_that_is_right():
    objective = eq.Objective(lambda params, _: params["w"].sin().sum(), {"w": torch.ones(3, dtype=torch.float64)})
    derivatives = Derivatives(objective)
    points = torch.ones(2, 3, dtype=torch.float64)
    assert derivatives._check_vmap(points)
    right = derivatives._hessians
    derivatives._hessians = lambda rows: 1.4 * right(rows)
    assert not derivatives._check_vmap(points)
