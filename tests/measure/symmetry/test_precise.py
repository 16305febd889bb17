"""Exact arithmetic: eps gone wherever it is hidden, float64 throughout, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.measure.symmetry.precise import precise

NORMS = {
    "batch": lambda x: functional.batch_norm(x, None, None, training=True, eps=0.1),
    "batch, by position": lambda x: functional.batch_norm(x, None, None, None, None, True, 0.1, 0.1),
    "layer": lambda x: functional.layer_norm(x, x.shape[1:], eps=0.1),
    "group": lambda x: functional.group_norm(x, 2, eps=0.1),
    "instance": lambda x: functional.instance_norm(x, eps=0.1),
    "rms": lambda x: functional.rms_norm(x, x.shape[1:], eps=0.1),
    "module": nn.BatchNorm1d(4, eps=0.1, affine=False, dtype=torch.float64),
    "torch's own": lambda x: torch.layer_norm(x, x.shape[1:], None, None, 0.1),
    "by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "by hand, in float32": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(
        x.dtype
    ),
    "in place": lambda x: x / x.var(-1, keepdim=True).add_(1e-5).sqrt(),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_normalisation_forgets_the_scale(name):
    torch.manual_seed(0)
    inputs = torch.randn(3, 4, 8, dtype=torch.float64)
    with precise():
        small, large = NORMS[name](1e-3 * inputs), NORMS[name](inputs)
    assert small.dtype == torch.float64
    assert torch.allclose(small, large, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(NORMS[name](1e-3 * inputs), NORMS[name](inputs), rtol=1e-3)  # eps matters without


def test_types_asked_for_are_raised_and_the_default_returns():
    single = torch.ones(2)
    with precise():
        assert torch.zeros(2).dtype == torch.float64
        assert torch.softmax(single.double(), 0, dtype=torch.float32).dtype == torch.float64
        assert single.to(torch.bfloat16).dtype == torch.float64
    assert torch.zeros(2).dtype == torch.float32
    with pytest.raises(RuntimeError), precise():
        raise RuntimeError
    assert torch.get_default_dtype() == torch.float32


def test_a_constant_channel_stays_constant():
    """Its variance is rounding, which must not be blown up to one."""
    inputs = torch.randn(16, 3, dtype=torch.float64)
    inputs[:, 0] = 0.1
    with precise():
        normalised = functional.batch_norm(inputs, None, None, training=True)
    assert normalised[:, 0].abs().max() < 1e-7


def test_larger_constants_are_left_alone():
    with precise():
        assert (torch.ones(2) + 0.5).tolist() == [1.5, 1.5]
