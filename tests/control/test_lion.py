"""Lion against a slow implementation entry by entry, against the theory, and as a citizen of torch."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.random_walk import walk

from equilibria import theory
from equilibria.control import Lion
from equilibria.errors import EquilibriaError


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def noise(weight: torch.Tensor, step: int) -> torch.Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 + step), dtype=weight.dtype)


def drive(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = noise(weight, step)
        optimizer.step()


def slow_lion(entries, gradients, *, lr, wd, betas, sign=1):
    """Lion as its paper prints it, one entry at a time, in Python floats."""
    beta1, beta2 = betas
    entries, momentum = list(entries), [0.0] * len(entries)
    for gradient in gradients:
        for i, g in enumerate(gradient):
            mixed = beta1 * momentum[i] + (1 - beta1) * sign * g
            update = (mixed > 0) - (mixed < 0)
            entries[i] = (1 - lr * wd) * entries[i] - lr * update
            momentum[i] = beta2 * momentum[i] + (1 - beta2) * sign * g
    return entries, momentum


@given(
    lr=st.floats(1e-4, 1.0),
    wd=st.floats(0.0, 0.5),
    betas=st.tuples(st.floats(0.0, 0.999), st.floats(0.0, 0.999)),
    maximize=st.booleans(),
    tensor_lr=st.booleans(),
)
def test_each_entry_moves_as_in_the_slow_implementation(lr, wd, betas, maximize, tensor_lr):
    weight = parameter(3, 5)
    start = weight.detach().flatten().tolist()
    given_lr = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
    optimizer = Lion([weight], given_lr, betas=betas, weight_decay=wd, maximize=maximize)
    drive(optimizer, 0, 30)
    gradients = [noise(weight, step).flatten().tolist() for step in range(30)]
    entries, momentum = slow_lion(start, gradients, lr=lr, wd=wd, betas=betas, sign=-1 if maximize else 1)
    assert weight.flatten().tolist() == pytest.approx(entries, rel=1e-12, abs=1e-13)
    assert optimizer.state[weight]["exp_avg"].flatten().tolist() == pytest.approx(momentum, rel=1e-12, abs=1e-14)


def test_an_entry_without_gradient_only_decays():
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = Lion([weight], 0.1, weight_decay=0.5)
    weight.grad = torch.tensor([0.0, 2.0], dtype=torch.float64)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.95, 0.85], rel=1e-15)


@pytest.mark.slow
def test_it_settles_where_the_theory_says():
    """Random-walk model: within four standard errors of the mean over replicas, plus the stated 1.1/d and 0.7/d."""
    rule = theory.Lion(0.01, 0.2)
    dim, replicas = 400, 16
    predicted = rule.equilibrium(dim=dim)
    walked = walk(lambda p: Lion(p, rule.lr, weight_decay=rule.weight_decay), 6000, norm=float(predicted.norm), dim=dim)
    norm_sq, angle_sq = (walked.norm_sq[2000:].mean(0), (walked.angle[2000:] ** 2).mean(0))
    for squares, expected, finite in (
        (norm_sq, predicted.norm**2, 1.1 / dim),
        (angle_sq, predicted.angle**2, 1.4 / dim),
    ):
        error = squares.std(ddof=1) / replicas**0.5 / expected
        assert squares.mean() / expected == pytest.approx(1.0, abs=4 * error + finite)
        assert 4 * error + finite < 0.02  # so that the test can fail


@pytest.mark.slow
def test_it_approaches_that_equilibrium_from_elsewhere():
    rule = theory.Lion(0.01, 0.5)
    predicted = rule.equilibrium(dim=300)
    walked = walk(
        lambda p: Lion(p, rule.lr, weight_decay=rule.weight_decay), 2500, norm=3 * float(predicted.norm), dim=300
    )
    assert walked.mean_norm_sq(-500) / predicted.norm**2 == pytest.approx(1.0, abs=0.02)


def test_the_rule_is_that_of_the_group_as_it_is_now():
    optimizer = Lion([{"params": [parameter(3)]}, {"params": [parameter(4)], "weight_decay": 0.3}], 0.01)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    optimizer.param_groups[1]["betas"] = [0.95, 0.98]  # what a checkpoint through JSON leaves
    rules = [optimizer.equilibria_rule(group) for group in optimizer.param_groups]
    assert rules == [theory.Lion(0.5, 0.0), theory.Lion(0.01, 0.3, betas=(0.95, 0.98))]


def test_groups_keep_their_own_settings():
    fast, slow = parameter(3), parameter(3)
    drive(Lion([{"params": [fast], "lr": 0.1}, {"params": [slow]}], 0.001), 0, 1)
    moved = (parameter(3) - torch.stack([fast, slow])).abs().detach()
    assert moved.tolist() == [pytest.approx([0.1] * 3), pytest.approx([0.001] * 3)]


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    weight = parameter(4)
    before = weight.detach().clone()
    optimizer = Lion([weight], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx((before**2).sum().item())
    assert torch.allclose(weight, before - 0.1 * before.sign())


def test_parameters_without_gradient_stay_without_state():
    used, unused = parameter(2), parameter(2, seed=1)
    before = unused.detach().clone()
    optimizer = Lion([used, unused], 0.1, weight_decay=0.1)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert torch.equal(unused, before)
    assert list(optimizer.state) == [used]


def test_a_resumed_training_continues_bit_for_bit():
    whole, first = parameter(3, 4), parameter(3, 4)
    drive(Lion([whole], 0.01, weight_decay=0.1), 0, 20)
    interrupted = Lion([first], 0.01, weight_decay=0.1)
    drive(interrupted, 0, 10)
    resumed = torch.nn.Parameter(first.detach().clone())
    optimizer = Lion([resumed], 9.9)
    optimizer.load_state_dict(copy.deepcopy(interrupted.state_dict()))
    drive(optimizer, 10, 20)
    assert torch.equal(resumed, whole)


def test_settings_survive_json():
    optimizer = Lion([parameter(3)], 0.01)
    state = json.loads(json.dumps(optimizer.state_dict()))
    optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": state["param_groups"]})
    drive(optimizer, 0, 2)
    assert optimizer.equilibria_rule(optimizer.param_groups[0]).betas == (0.9, 0.99)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scheduler_may_drive_a_tensor_lr(shape):
    weight, scalar = parameter(3), torch.nn.Parameter(torch.tensor(2.0))
    optimizer = Lion([weight, scalar], torch.full(shape, 0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = weight.detach().clone()
    for _ in range(2):
        weight.grad, scalar.grad = torch.ones_like(weight), torch.ones_like(scalar)
        optimizer.step()
        scheduler.step()
    assert torch.allclose(before - weight.detach(), torch.tensor(0.15, dtype=torch.float64))
    assert scalar.item() == pytest.approx(1.85)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_has_the_dtype_and_layout_of_the_weight(dtype):
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(dtype).to(memory_format=torch.channels_last))
    optimizer = Lion([weight], 0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    momentum = optimizer.state[weight]["exp_avg"]
    assert momentum.dtype == dtype
    assert momentum.is_contiguous(memory_format=torch.channels_last)


def test_the_gradient_is_left_as_it_was():
    weight = parameter(5)
    optimizer = Lion([weight], 0.1, maximize=True)
    weight.grad = noise(weight, 0)
    optimizer.step()
    assert torch.equal(weight.grad, noise(weight, 0))


def test_a_sparse_gradient_raises_with_what_to_do():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(EquilibriaError, match=r"sparse gradient for a parameter of shape \(4, 3\).*sparse=False"):
        Lion(embedding.parameters(), 0.1).step()


def test_a_complex_parameter_raises_with_what_to_do():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(EquilibriaError, match=r"complex parameter of shape \(2,\).*view_as_real"):
        Lion([weight], 0.1).step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "got lr=-0.1"),
        ({"lr": "0.1"}, "got lr='0.1'"),
        ({"lr": torch.ones(2)}, r"got lr of shape \(2,\)"),
        ({"weight_decay": -1}, "got weight_decay=-1"),
        ({"weight_decay": float("nan")}, "got weight_decay=nan"),
        ({"betas": (0.9, 1.0)}, "got beta2=1"),
        ({"betas": 0.9}, "got betas=0.9"),
    ],
)
def test_bad_settings_raise_for_the_optimizer_and_for_a_group(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        Lion([parameter(2)], **settings)
    optimizer = Lion([parameter(2)], 0.1)
    with pytest.raises(EquilibriaError, match=message):
        optimizer.add_param_group({"params": [parameter(3)], **settings})
    assert len(optimizer.param_groups) == 1
