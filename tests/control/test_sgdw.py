"""SGDW against a slow implementation, against torch's SGD where the two agree, and against the theory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.random_walk import walk

from equilibria import theory
from equilibria.control import SGDW
from equilibria.errors import EquilibriaError
from equilibria.optimizers.rules import rule_of_group


def parameter(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def noise(weight: torch.Tensor, step: int) -> torch.Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 + step), dtype=weight.dtype)


def drive(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = noise(weight, step)
        optimizer.step()


def slow_sgdw(entries, gradients, *, lr, wd, momentum, sign=1):
    """One entry at a time, in Python floats."""
    entries, buffer = list(entries), [0.0] * len(entries)
    for gradient in gradients:
        for i, g in enumerate(gradient):
            buffer[i] = momentum * buffer[i] + sign * g
            entries[i] = (1 - lr * wd) * entries[i] - lr * buffer[i]
    return entries


@given(
    lr=st.floats(1e-4, 1.0),
    wd=st.floats(0.0, 0.5),
    momentum=st.floats(0.0, 0.99),
    maximize=st.booleans(),
    tensor_lr=st.booleans(),
)
def test_each_entry_moves_as_in_the_slow_implementation(lr, wd, momentum, maximize, tensor_lr):
    weight = parameter(3, 5)
    start = weight.detach().flatten().tolist()
    given_lr = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
    drive(SGDW([weight], given_lr, momentum=momentum, weight_decay=wd, maximize=maximize), 30)
    gradients = [noise(weight, step).flatten().tolist() for step in range(30)]
    expected = slow_sgdw(start, gradients, lr=lr, wd=wd, momentum=momentum, sign=-1 if maximize else 1)
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_decay_it_is_torch_sgd_to_the_bit(momentum):
    ours, torchs = parameter(4, 3), parameter(4, 3)
    drive(SGDW([ours], 0.1, momentum=momentum), 20)
    drive(torch.optim.SGD([torchs], lr=0.1, momentum=momentum), 20)
    assert torch.equal(ours, torchs)


@pytest.mark.slow
def test_it_settles_where_the_theory_says():
    """Random-walk model: the mean over replicas within four standard errors."""
    rule = theory.SGDW(0.1, 0.02, momentum=0.5)
    predicted, replicas = rule.equilibrium(unit_grad_sq=1.0), 16
    make = lambda p: SGDW(p, rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)  # noqa: E731
    walked = walk(make, 3000, norm=float(predicted.norm), replicas=replicas, dim=200)
    for squares, expected in (
        (walked.norm_sq[1000:], predicted.norm**2),
        (walked.angle[1000:] ** 2, predicted.angle**2),
    ):
        per_replica = squares.mean(0) / expected
        error = per_replica.std(ddof=1) / replicas**0.5
        # mean field: the angle of one step scatters, by 1/d of its square
        finite = 1 / 200
        assert per_replica.mean() == pytest.approx(1.0, abs=4 * error + finite)
        assert 4 * error + finite < 0.03  # so that the test can fail


def test_a_huge_gradient_whose_norm_overflows_is_still_a_gradient():
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), 1e30)
    SGDW([weight], 1e-30).step()
    assert weight.tolist() == pytest.approx([-1.0] * 3)


def test_a_monitor_finds_its_law():
    optimizer = SGDW([parameter(3)], torch.tensor(0.5), momentum=0.9, weight_decay=0.01)
    law = rule_of_group(optimizer, optimizer.param_groups[0])
    assert law.rule == theory.SGDW(0.5, 0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "got lr=-0.1"),
        ({"lr": torch.ones(2)}, r"got lr of shape \(2,\)"),
        ({"weight_decay": -1}, "got weight_decay=-1"),
        ({"momentum": 1.0}, "got momentum=1; expected 0 <= momentum < 1"),
    ],
)
def test_bad_settings_raise_for_the_optimizer_and_for_a_group(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        SGDW([parameter(2)], **settings)
    optimizer = SGDW([parameter(2)], 0.1)
    with pytest.raises(EquilibriaError, match=message):
        optimizer.add_param_group({"params": [parameter(3)], **settings})
    assert len(optimizer.param_groups) == 1
