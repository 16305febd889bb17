"""Clipped gradients are noticed, others are not taken for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equilibria.control._clipping_check import ClippingCheck
from equilibria.errors import EquilibriaError


def looks(steps, gradient, *, tensors=3, limit=None, dtype=torch.float32):
    """Look at gradients drawn step by step, clipped to a norm if there is a limit; the step at which it was noticed."""
    weights = [nn.Parameter(torch.zeros(50, dtype=dtype)) for _ in range(tensors)]
    optimizer, check = torch.optim.SGD(weights, lr=0.1), ClippingCheck()
    for step in range(steps):
        for weight in weights:
            weight.grad = gradient(step)
        if limit is not None:
            nn.utils.clip_grad_norm_(weights, limit)
        try:
            check.check(optimizer)
        except EquilibriaError as error:
            assert "the same norm" in str(error)
            return step
    return None


def noise(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda step: torch.randn(50, generator=generator)


@pytest.mark.parametrize("limit", [1.0, 0.25, 0.12345, 3.14159])
def test_three_clipped_steps_are_noticed_whatever_the_limit(limit):
    assert looks(3, noise(), limit=limit) == 2


def test_clipping_of_some_steps_is_noticed_later():
    """Norms are 12.2 +- 0.7: half of them are cut at 12.2."""
    assert looks(2000, noise(), limit=12.2) is not None


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_taken_for_clipping(seed):
    assert looks(4000, noise(seed)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_norms_of_16_bit_gradients_do_not_agree_by_chance(dtype, seed):
    """They differ by 0.3 %, which 16 bits hardly resolve."""
    directions, lengths = noise(seed), torch.Generator().manual_seed(seed)

    def gradient(step):
        drawn = directions(step)
        length = 1.234 + 0.004 * torch.randn(1, generator=lengths)
        return (drawn / drawn.norm() * length).to(dtype)

    assert looks(4000, gradient, dtype=dtype) is None


def test_the_same_gradients_again_are_not_taken_for_clipping_unless_their_norm_is_typed():
    fixed = noise()(0)
    assert looks(1000, lambda step: fixed * (1 + 1e-7 * step)) is None
    assert looks(3, lambda step: fixed.clone(), limit=0.5) == 2


def test_a_single_tensor_has_no_shares_to_tell_by():
    assert looks(3, noise(), tensors=1, limit=0.5) == 2
    assert looks(1000, noise(), tensors=1, limit=0.12345) is None


def test_gradients_that_are_missing_or_zero_say_nothing():
    assert looks(10, lambda step: None) is None
    assert looks(10, lambda step: torch.zeros(50)) is None
