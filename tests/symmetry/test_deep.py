"""Deep networks without normalisation, whose first layers have hardly any gradient at the usual initial weights."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.scaling import assert_same_space
from torch import nn
from torch.nn import functional

from equilibria.objectives._objective import objective
from equilibria.symmetry import symmetries
from equilibria.symmetry._probes import probing_point


def deep(activation: type[nn.Module], depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4 if index == 0 else 16, 16), activation()) for index in range(depth)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


@pytest.mark.parametrize("depth", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_every_rescaling_of_a_relu_network_is_found(depth):
    """Weight and bias of a layer against the next weight: as many as there are ReLUs."""
    sym = symmetries(objective(deep(nn.ReLU, depth), functional.cross_entropy), [batch()])
    after = [f"{index}.0.weight" for index in range(1, depth)] + [f"{depth}.weight"]
    truth = [{f"{index}.0.weight": 1, f"{index}.0.bias": 1, after[index]: -1} for index in range(depth)]
    assert_same_space(sym.basis, truth, list(sym.elements))
    assert sym.undecided == ()
    assert sym.gap > 1e9


@pytest.mark.parametrize(("activation", "depth"), [(nn.Sigmoid, 24), (nn.GELU, 20)])
def test_a_small_gradient_is_not_no_effect(activation, depth):
    sym = symmetries(objective(deep(activation, depth), functional.cross_entropy), [batch()])
    assert set(sym.how.values()) == {"no"}


def test_an_effect_that_cannot_be_measured_is_undecided():
    """Zeros and ones are all that some activations pass on: here to slopes of 1e-9 each, ten times."""

    class Flat(nn.Module):
        def forward(self, inputs):
            return 1 + 1e-9 * torch.tanh(inputs)

    sym = symmetries(objective(deep(Flat, 10), functional.cross_entropy), [batch()])
    assert sym.no_effect == ()
    assert "0.0.weight" in sym.undecided


def test_larger_matrices_are_taken_only_where_they_are_needed():
    shallow, deeper = (objective(deep(nn.ReLU, depth), functional.cross_entropy).double() for depth in (3, 30))
    for loss, passes in ((shallow, 1), (deeper, 3)):
        point, taken = probing_point(loss, loss.params, batch())
        assert taken == passes
        same = [torch.equal(point[name], param) for name, param in loss.params.items()]
        assert all(same) if loss is shallow else sum(same) == 31  # the biases


def test_a_point_where_the_loss_overflows_is_not_taken():
    """At a gain of 8 this loss is infinite: the gain of sqrt(2) is chosen, and nothing of the overflow is left."""
    net = deep(nn.ReLU, 30)
    loss = objective(net, lambda output, _: output.mul(1e-3).square().exp().mean() + output.mean()).double()
    point, _ = probing_point(loss, loss.params, batch())
    rms = point["5.0.weight"].square().sum(1).mean().sqrt()
    assert float(rms) == pytest.approx(2**0.5)
