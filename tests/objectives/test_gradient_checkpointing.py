"""Gradient checkpointing must not change any answer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint  # as models import it: before anything is replaced

from equilibria.curvature import HessianProducts
from equilibria.objectives._isolation import without_gradient_checkpointing
from equilibria.objectives._objective import Objective, objective
from equilibria.symmetry import symmetries


class Checkpointed(nn.Module):
    """Hidden layers that may be checkpointed; ``how`` is the argument ``use_reentrant``, None for a plain call."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 3)
        self.call = (lambda inner, x: inner(x)) if how is None else partial(checkpoint, use_reentrant=how)

    def forward(self, inputs):
        return self.last(torch.relu(self.call(self.inner, inputs)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)


def loss_of(how: bool | None):
    return objective(Checkpointed(how), functional.cross_entropy)


@pytest.mark.parametrize("how", [False, True])
def test_gradients_at_another_point_are_those_without_checkpointing(how):
    plain, loss = loss_of(None), loss_of(how)
    there = {name: 1.5 * param for name, param in plain.params.items()}
    value, grads = loss.value_and_grad(batch(), params=there)
    expected, truth = plain.value_and_grad(batch(), params=there)
    assert value == expected
    assert all(torch.equal(grads[name], truth[name]) for name in truth)


@pytest.mark.parametrize("how", [False, True])
def test_hessian_products_at_another_point_are_those_without_checkpointing(how):
    plain, loss = loss_of(None), loss_of(how)
    there = {name: 1.5 * param for name, param in plain.params.items()}
    operators = [HessianProducts(objective, batch(), params=there) for objective in (plain, loss)]
    vector = torch.randn(operators[0].size, generator=torch.Generator().manual_seed(2))
    truth, result = (operator(vector) for operator in operators)
    assert torch.equal(result, truth)


@pytest.mark.parametrize("how", [False, True])
def test_symmetries_are_those_without_checkpointing(how):
    plain, result = (symmetries(loss_of(mode), [batch()]) for mode in (None, how))
    assert result.how == plain.how
    assert (result.basis, result.notes) == (plain.basis, plain.notes)


def test_a_function_that_checkpoints_inside():
    """It puts parameters into a module by itself."""
    net = Checkpointed(False)
    params = {name: param.detach() for name, param in net.named_parameters()}
    loss = Objective(
        lambda point, pair: functional.cross_entropy(functional_call(net, point, pair[0]), pair[1]), params
    )
    there = {name: 1.5 * param for name, param in params.items()}
    grads = loss.value_and_grad(batch(), params=there)[1]
    truth = loss_of(None).value_and_grad(batch(), params=there)[1]
    assert all(torch.equal(grads[name], truth[name]) for name in truth)


def test_torch_is_restored_even_after_an_exception():
    before = dict(vars(torch_checkpoint))
    with pytest.raises(ZeroDivisionError), without_gradient_checkpointing(), without_gradient_checkpointing():
        assert vars(torch_checkpoint) != before
        raise ZeroDivisionError
    assert vars(torch_checkpoint) == before
