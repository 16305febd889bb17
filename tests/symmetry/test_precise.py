"""Exact arithmetic: a negligible eps wherever it is hidden, float64 throughout, and every setting restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from equilibria.symmetry._precise import precise

NORMS = {
    "batch": lambda x: functional.batch_norm(x, None, None, training=True, eps=0.1),
    "batch, by position": lambda x: functional.batch_norm(x, None, None, None, None, True, 0.1, 0.1),
    "layer": lambda x: functional.layer_norm(x, x.shape[1:], eps=0.1),
    "group": lambda x: functional.group_norm(x, 2, eps=0.1),
    "instance": lambda x: functional.instance_norm(x, eps=0.1),
    "rms": lambda x: functional.rms_norm(x, x.shape[1:], eps=0.1),
    "module": nn.BatchNorm1d(4, eps=0.1, affine=False, dtype=torch.float64),
    "torch's own": lambda x: torch.layer_norm(x, x.shape[1:], None, None, 0.1),
    "torch's own batch": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 0.1, False),
    "torch's own instance": lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 0.1, False),
    "torch's own group": lambda x: torch.group_norm(x, 2, None, None, 0.1, False),
    "torch's own rms": lambda x: torch.rms_norm(x, x.shape[1:], None, 0.1),
    "by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "by hand, in float32": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(
        x.dtype
    ),
    "by hand, eps on the left": lambda x: x / (torch.tensor(1e-5) + x.var(-1, keepdim=True)).sqrt(),
    "by hand, one number": lambda x: x * torch.rsqrt(torch.tensor(1e-5) + x.square().mean()),
    "by hand, a standard deviation": lambda x: x / (x.std(-1, keepdim=True) + 1e-4),
    "unit vectors": lambda x: functional.normalize(x, dim=-1, eps=0.1),
    "unit vectors, by position": lambda x: functional.normalize(x, 2.0, 1, 0.1),
    "in place": lambda x: x / x.var(-1, keepdim=True).add_(1e-5).sqrt(),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_normalisation_forgets_the_scale(name):
    torch.manual_seed(0)
    inputs = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    with precise():
        small, large = NORMS[name](1e-3 * inputs), NORMS[name](inputs)
    assert small.dtype == torch.float64
    assert torch.allclose(small, large, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(NORMS[name](1e-3 * inputs), NORMS[name](inputs), rtol=1e-3)  # eps matters without


def test_requested_types_become_float64_and_the_default_type_is_restored():
    single = torch.ones(2)
    with precise():
        assert torch.zeros(2).dtype == torch.float64
        assert torch.softmax(single.double(), 0, dtype=torch.float32).dtype == torch.float64
        assert single.to(torch.bfloat16).dtype == torch.float64
    assert torch.zeros(2).dtype == torch.float32
    with pytest.raises(RuntimeError), precise():
        raise RuntimeError
    assert torch.get_default_dtype() == torch.float32


def batch_norm(inputs):
    return functional.batch_norm(inputs, None, None, training=True)


def by_variance(inputs):
    centred = inputs - inputs.mean(0)
    return centred / (centred.square().mean(0) + 1e-5).sqrt()


def by_deviation(inputs):
    centred = inputs - inputs.mean(0)
    return centred / (centred.square().mean(0).sqrt() + 1e-5)


@pytest.mark.parametrize("norm", [batch_norm, by_variance, by_deviation])
def test_a_constant_channel_stays_constant(norm):
    """Its variance is rounding, which must not be blown up to one; nor in a second normalisation behind the first."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 3, dtype=torch.float64)
    inputs[:, 0] = 0.1
    inputs[::2, 0] = torch.nextafter(inputs[::2, 0], torch.ones(8, dtype=torch.float64))  # rounding, not zero
    with precise():
        once = norm(inputs)
        twice = norm(once)
    assert once[:, 0].abs().max() < 1e-14
    assert twice[:, 0].abs().max() < 1e-14
    assert torch.allclose(once[:, 1:].std(0, correction=0), torch.ones(2, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize(("norm", "small"), [(batch_norm, 1e-25), (by_variance, 1e-7), (by_deviation, 1e-7)])
def test_a_channel_much_smaller_than_others_is_not_constant(norm, small):
    torch.manual_seed(0)
    inputs = torch.randn(16, 3, dtype=torch.float64)
    inputs[:, 0] *= small
    with precise():
        result = norm(inputs)
    assert torch.allclose(result.std(0, correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("mean", [1e3, 1e8])
def test_a_large_mean_does_not_count(mean):
    """What is subtracted has no part in it: a filter whose bias is large is normalised as well."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 3, dtype=torch.float64) + mean
    with precise():
        result = batch_norm(inputs)
    # The mean of 64 numbers of this size is known to a few of their units in the last place.
    assert torch.allclose(result.square().mean(0), torch.ones(3, dtype=torch.float64), rtol=1e-15 * mean + 1e-12)


def test_gradients_are_those_of_a_normalisation_without_eps():
    torch.manual_seed(0)
    inputs = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(5, 6, dtype=torch.float64)

    def exact(x):
        centred = x - x.mean(1, keepdim=True)
        return centred / centred.square().mean(1, keepdim=True).sqrt()

    expected = torch.autograd.grad((probe * exact(inputs)).sum(), inputs)[0]
    with precise():
        result = torch.autograd.grad((probe * functional.layer_norm(inputs, (6,))).sum(), inputs)[0]
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-13)


def test_running_statistics_are_used_as_they_are():
    inputs, mean, var = torch.full((4, 2), 3.0, dtype=torch.float64), torch.ones(2), torch.full((2,), 4.0)
    mean, var = mean.double(), var.double()
    with precise():
        result = functional.batch_norm(inputs, mean, var, training=False, eps=0.0)
    assert torch.allclose(result, torch.ones(4, 2, dtype=torch.float64), rtol=1e-15)


@pytest.mark.parametrize("by_position", [True, False])
def test_running_statistics_are_updated(by_position):
    torch.manual_seed(0)
    inputs = 1e-3 * torch.randn(16, 3, 4, dtype=torch.float64) + 5
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    expected = 0.7 * mean + 0.3 * inputs.mean((0, 2)), 0.7 * var + 0.3 * inputs.var((0, 2))
    with precise():
        if by_position:
            functional.batch_norm(inputs, mean, var, None, None, True, 0.3)
        else:
            torch.batch_norm(inputs, None, None, mean, var, True, 0.3, 1e-5, False)
    assert torch.allclose(mean, expected[0], rtol=1e-13)
    assert torch.allclose(var, expected[1], rtol=1e-13)


def test_a_value_computed_from_parameters_is_no_eps():
    """A penalty of 1e-6 is not a constant, and an eps is one."""
    weight = torch.tensor(1e-3, dtype=torch.float64, requires_grad=True)
    with precise():
        assert (torch.ones((), dtype=torch.float64) + weight.square()).item() == 1 + 1e-6
        assert (torch.ones((), dtype=torch.float64) + torch.tensor(1e-6)).item() == 1.0


def test_larger_constants_are_left_alone():
    with precise():
        assert (torch.ones(2) + 0.5).tolist() == [1.5, 1.5]
