"""A floor and a ceiling on the relative update, per tensor and per row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equilibria as eq
from equilibria.control import RelativeUpdateLimits
from equilibria.errors import EquilibriaError

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
}


def pair(seed=0, dtype=torch.float64):
    """Two equal lists of a matrix, a stack of matrices and a vector."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((6, 4), (3, 2, 2), (5,))]
    return ([nn.Parameter(tensor.clone()) for tensor in tensors] for _ in range(2))


def with_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        rows = torch.logspace(-3, 1, len(param), dtype=param.dtype).view(-1, *(1,) * (param.ndim - 1))
        param.grad = rows * torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def sizes(tensor, granularity):
    return tensor.flatten(1).norm(dim=1) if granularity == "row" else tensor.norm().reshape(1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@given(low=st.floats(0.0, 0.05), width=st.floats(1.0, 10.0), seed=st.integers(0, 100))
def test_every_relative_update_is_inside_and_in_the_direction_of_the_plain_step(kind, granularity, low, width, seed):
    params, plain = pair(seed)
    high = max(low * width, 1e-3)
    optimizer = RelativeUpdateLimits(OPTIMIZERS[kind](params), low=low, high=high, granularity=granularity)
    reference = OPTIMIZERS[kind](plain)
    before = [param.detach().clone() for param in params]
    with_gradients(params, seed)
    with_gradients(plain, seed)
    optimizer.step()
    reference.step()
    outside = 0
    for old, new, free in list(zip(before, params, plain, strict=True))[:2]:
        taken, wanted = new.detach() - old, free.detach() - old
        ratio = sizes(taken, granularity) / sizes(old, granularity)
        assert (ratio > low * (1 - 1e-9)).all() and (ratio < high * (1 + 1e-9)).all()
        rows, others = (one.flatten(1) if granularity == "row" else one.reshape(1, -1) for one in (taken, wanted))
        torch.testing.assert_close(
            nn.functional.cosine_similarity(rows, others, eps=0.0), torch.ones(len(rows)).double()
        )
        free_ratio = sizes(wanted, granularity) / sizes(old, granularity)
        inside = (free_ratio > low) & (free_ratio < high)
        outside += int((~inside).sum())
        units = (new, free) if granularity == "row" else (new.reshape(1, -1), free.reshape(1, -1))
        assert torch.equal(units[0][inside], units[1][inside])
    assert optimizer.limited == outside
    assert torch.equal(params[2], plain[2])  # vectors are not limited


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inside_the_limits_training_is_identical_to_the_bit(kind, dtype):
    params, plain = pair(dtype=dtype)
    optimizer = RelativeUpdateLimits(OPTIMIZERS[kind](params), low=1e-12, high=1e6)
    reference = OPTIMIZERS[kind](plain)
    for step in range(5):
        with_gradients(params, step)
        with_gradients(plain, step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(params, plain, strict=True))
    assert optimizer.limited == 0


def test_a_step_of_length_zero_and_a_weight_of_norm_zero_stay():
    still, zero = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = RelativeUpdateLimits(torch.optim.SGD([still, zero], lr=0.1), low=0.1, high=0.2)
    still.grad, zero.grad = torch.zeros(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(still, torch.ones(2, 2)) and torch.equal(zero, torch.full((2, 2), -0.1))


def test_chosen_parameters_by_name():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = RelativeUpdateLimits(
        torch.optim.SGD(net.parameters(), lr=10.0), high=1e-3, params=["1.weight"], model=net
    )
    before = [layer.weight.detach().clone() for layer in net]
    net(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    ratios = [((layer.weight - old).norm() / old.norm()).item() for layer, old in zip(net, before, strict=True)]
    assert ratios[1] == pytest.approx(1e-3, rel=1e-4) and ratios[0] > 0.1
    assert optimizer.promise == "keeps the relative update of 1 weight at most 0.001"


@pytest.mark.parametrize(
    "limits", [{}, {"low": 0.2, "high": 0.1}, {"low": 0.0}, {"low": -1.0}, {"high": 0.0}, {"high": 0.1, "params": []}]
)
def test_bad_limits_raise(limits):
    with pytest.raises(EquilibriaError, match="expected"):
        RelativeUpdateLimits(torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1), **limits)


def test_a_run_names_the_limits_where_the_angle_is_not_the_predicted_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 3))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = RelativeUpdateLimits(adamw, high=1e-3, params=["0.weight"], model=net)
    with eq.watch(net, optimizer, every=4, invariant={"0.weight": True}) as monitor:
        for _ in range(400):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(8, 8)), torch.randint(3, (8,))).backward()
            optimizer.step()
    (found,) = [one for one in monitor.findings() if "slower than predicted" in one.subject]
    assert "RelativeUpdateLimits keeps the relative update of 1 weight at most 0.001" in found.evidence
    assert "gradients" not in found.evidence
