"""Several batches: the meaning of their mean loss, and a loader that is read without side effects."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria.curvature import HessianProducts


def coverage_of_two_batches(loss, targets):
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 3), torch.randn(16, 5)
    objective = eq.objective(net, loss)
    return HessianProducts(objective, [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]).covers


def test_the_full_batch_is_claimed_only_if_every_batch_agrees():
    targets = torch.arange(16) % 3
    assert coverage_of_two_batches(functional.cross_entropy, targets) == "full batch"
    padded = torch.where(torch.arange(16) < 11, targets, -100)
    assert coverage_of_two_batches(functional.cross_entropy, padded) == "ghost batches"
    weights, sorted_targets = torch.tensor([1.0, 5.0, 1.0]), torch.tensor([0] * 8 + [1] * 8)
    weighted = lambda out, wanted: functional.cross_entropy(out, wanted, weight=weights)  # noqa: E731
    assert coverage_of_two_batches(weighted, sorted_targets) == "ghost batches"  # within a batch all weights are equal


def test_reading_a_loader_does_not_move_its_generator():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
    loader, before = DataLoader(data, batch_size=4, shuffle=True, generator=generator), generator.get_state()
    HessianProducts(eq.objective(nn.Linear(5, 3), functional.cross_entropy), loader)
    assert torch.equal(generator.get_state(), before)
