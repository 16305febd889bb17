"""Probes and their null space: the points they are taken at, rounding, tensors without gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.small_nets import CASES
from torch import nn
from torch.nn import functional

from equilibria.objectives._objective import Objective, objective
from equilibria.symmetry import symmetries
from equilibria.symmetry._null_space import null_space, rank_of
from equilibria.symmetry._precise import precise
from equilibria.symmetry._probes import Probe, ProbeBatches, Prober, generic, silent_among


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_probe_scales_every_tensor_by_a_new_factor_between_half_and_two():
    """Log-uniform between 1/2 and 2: the standard deviation of log2 is 1/sqrt(3), 0.577."""
    params = {name: torch.randn(5, generator=seeded(0), dtype=torch.float64) for name in "ab"}
    seen: list[list[float]] = []

    def fn(point, row):
        seen.append([float((point[name].detach() / params[name]).log2().mean()) for name in "ab"])
        return sum((point[name] * row).sum() for name in "ab")

    loss = Objective(fn, params)
    batches = ProbeBatches(loss, [torch.randn(5) for _ in range(3)], most=3, samples=5, generator=seeded(1))
    prober = Prober(loss, params, batches=batches, generator=seeded(2))
    for _ in range(300):
        prober.take()
    logs = np.array(seen)
    assert np.abs(logs).max() <= 1
    assert np.abs(logs).max() > 0.95  # of 600: missed once in 1e13
    standard_error = np.sqrt(4 / 5) / 3 / np.sqrt(300)  # of a mean square: E log^4 - (E log^2)^2 = 1/5 - 1/9
    assert np.allclose((logs**2).mean(0), 1 / 3, atol=5 * standard_error)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 5 / 300**0.5


def test_a_generic_point_is_near_and_has_no_zeros_and_no_equal_entries():
    param = torch.tensor([3.0] * 500 + [0.0] * 500, dtype=torch.float64)
    result = generic(param, seeded(0))
    assert len(result.unique()) == 1000
    relative = result[:500] / 3 - 1
    assert float(relative.std()) == pytest.approx(0.1, abs=5 * 0.1 / 1000**0.5)  # a tenth: present signs stay
    assert float(result[500:].std()) == pytest.approx(3.0, abs=5 * 3 / 1000**0.5)  # zeros get the size of the others


def test_equal_entries_hide_nothing():
    """At w = (1, ..., 1) the loss, which sees differences of entries only, has no radial derivative."""
    params = {"w": torch.ones(6, dtype=torch.float64)}

    def fn(point, row):
        return ((point["w"] - point["w"].mean()) * row).sum().tanh()

    result = symmetries(Objective(fn, params), [torch.randn(6, generator=seeded(index)) for index in range(8)])
    assert (result.how, result.notes) == ({"w": "no"}, ())


def probes(radial: np.ndarray, size: np.ndarray | float = 1.0) -> list[Probe]:
    return [Probe(row, np.broadcast_to(size, row.shape).copy(), {}, {}) for row in radial]


def reacting(smallest: float) -> list[Probe]:
    """Two tensors, the loss reacting to the second much less: singular values of about 1 and ``smallest``."""
    waves = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    return probes(np.stack([np.sqrt(2) * np.sin(waves), np.sqrt(2) * smallest * np.cos(waves)], axis=1))


@pytest.mark.parametrize(("smallest", "rank"), [(1e-5, 2), (2e-6, 2), (5e-7, 1), (1e-12, 1)])
def test_a_singular_value_above_a_millionth_counts_whatever_the_gap(smallest, rank):
    """Rounding is 1e-12 at most; what lies between and is a reaction, scaling shows."""
    assert null_space(reacting(smallest)).singular_values == pytest.approx([1, smallest], rel=1e-6)
    assert null_space(reacting(smallest)).rank == rank_of(reacting(smallest)) == rank


def test_a_gradient_of_a_billionth_of_the_largest_is_none():
    result = null_space(probes(np.ones((4, 3)), np.array([1.0, 2e-9, 5e-10])))
    assert result.silent.tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["batch norm", "instance norm", "scale-invariant ResNet-20"])
def test_the_gradient_of_a_bias_before_a_normalisation_is_far_below_that(name):
    """It is rounding. A billionth leaves it three orders of magnitude, and real effects everything above."""
    torch.manual_seed(0)
    loss = objective(CASES[name].make(), functional.cross_entropy).double()
    point = {tensor: generic(param, seeded(1)) for tensor, param in loss.params.items()}
    with precise():
        grads = loss.value_and_grad((torch.randn(16, *CASES[name].shape), torch.arange(16) % 5), params=point)[1]
    shares = {tensor: float(point[tensor].norm() * grad.norm()) for tensor, grad in grads.items()}
    without = [share for tensor, share in shares.items() if tensor.endswith("shortcut.1.bias") or tensor == "0.bias"]
    assert without
    assert max(without) < 1e-12 * max(shares.values())


class Faint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1e-8))

    def forward(self, inputs):
        return inputs + self.scale * torch.tanh(inputs)


def test_an_effect_of_a_hundred_millionth_is_decided():
    torch.manual_seed(0)
    loss = objective(nn.Sequential(Faint(), nn.Linear(4, 3)), functional.cross_entropy)
    result = symmetries(loss, [(torch.randn(16, 4), torch.arange(16) % 3)])
    assert result.how["0.scale"] == "no"


def test_silence_is_relative():
    assert silent_among(np.array([1e-20, 1e-22, 1e-31])).tolist() == [False, False, True]
