"""A few coordinates of many tensors: always the same, of any layout, and nobody's random numbers are drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from equilibria.tensors.parameters import find_watched
from equilibria.tensors.subsample import Subsample


class Holder(nn.Module):
    def __init__(self, *params):
        super().__init__()
        for index, param in enumerate(params):
            self.register_parameter(f"p{index}", nn.Parameter(param, requires_grad=True))


def subsample(*params, granularity="tensor"):
    model = Holder(*params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = find_watched(model, [optimizer], select=lambda name, tensor: True, granularity=granularity)
    return Subsample(watched), model


LAYOUTS = {
    "contiguous": lambda: torch.randn(40, 50),
    "small": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(50, 40).t(),
    "channels last": lambda: torch.randn(8, 16, 5, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(40, 100)[:, ::2],
    "vector": lambda: torch.randn(3000),
    "number": lambda: torch.randn(()),
    "half": lambda: torch.randn(40, 50).half(),
    "bfloat16": lambda: torch.randn(40, 50).bfloat16(),
    "double": lambda: torch.randn(40, 50).double(),
    "complex": lambda: torch.randn(30, 30, dtype=torch.complex64),
}


def slow_units(sample, model, by_row):
    """The sorted coordinates of every unit, picked one by one through their logical place."""
    for index, param in enumerate(model.parameters()):
        real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        places = sample._entries[index]._coordinates
        values = [float(real[tuple(int(axis[k]) for axis in places)]) for k in range(len(places[0]) if places else 1)]
        yield from np.array(values).reshape(param.shape[0] if by_row and param.ndim > 1 else 1, -1)


@pytest.mark.parametrize("by_numpy", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_the_coordinates_of_any_layout(layout, by_numpy):
    torch.manual_seed(0)
    sample, model = subsample(LAYOUTS[layout](), torch.randn(7, 9))
    sample._by_numpy = by_numpy  # what follows is the way on a device, here in main memory
    expected = np.concatenate(list(slow_units(sample, model, False)))
    weights = np.asarray(sample.weights())
    assert weights.tolist() == expected.tolist()
    sizes = [param.numel() * (2 if param.is_complex() else 1) for param in model.parameters()]
    assert sample.scale.tolist() == [max(1.0, size / 1024) for size in sizes]
    sums = np.asarray(sample.sums(sample.weights()))
    assert sums == pytest.approx([unit.sum() for unit in slow_units(sample, model, False)])


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
def test_reads_every_row(layout):
    torch.manual_seed(0)
    sample, model = subsample(LAYOUTS[layout](), granularity="row")
    rows = list(slow_units(sample, model, True))
    assert len(rows) == len(sample.rows) == len(next(model.parameters()))
    assert len(rows[0]) == min(max(64, 1024 // len(rows)), next(model.parameters())[0].numel())
    assert np.asarray(sample.weights()).tolist() == np.concatenate(rows).tolist()
    matrix = next(model.parameters()).detach().flatten(1)
    assert all(set(row.tolist()) <= set(own.tolist()) for row, own in zip(rows, matrix, strict=True))


@pytest.mark.parametrize("by_numpy", [True, False])
def test_gradients_of_another_layout_are_read_at_the_same_coordinates(by_numpy):
    weight = torch.randn(8, 16, 5, 5)
    sample, _ = subsample(weight)
    sample._by_numpy = by_numpy
    other = weight.clone(memory_format=torch.channels_last)
    assert np.array_equal(np.asarray(sample.of([other])), np.asarray(sample.weights()))
    assert np.isnan(np.asarray(sample.of([None]))).all()


def test_follows_a_weight_that_moves_in_memory():
    sample, model = subsample(torch.randn(40, 50))
    before = sample.weights().copy()
    next(model.parameters()).data = torch.ones(40, 50)
    assert not np.array_equal(before, sample.weights())
    assert (sample.weights() == 1).all()


def test_the_coordinates_are_fixed_by_the_name():
    first, second = (subsample(torch.randn(64, 64), torch.randn(64, 64))[0] for _ in range(2))
    places = [
        [axis.tolist() for axis in sample._entries[index]._coordinates]
        for sample in (first, second)
        for index in (0, 1)
    ]
    assert places[0] == places[2]
    assert places[0] != places[1]
    flat = np.ravel_multi_index(first._entries[0]._coordinates, (64, 64))
    assert len(set(flat.tolist())) == 1024


def test_no_random_numbers_of_others_are_drawn():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    subsample(torch.zeros(100, 100))[0].weights()
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_sum_estimates_that_of_the_whole():
    torch.manual_seed(0)
    weight = torch.randn(300, 300)
    sample, _ = subsample(weight)
    squares = sample.sums(sample.weights() ** 2) * sample.scale
    # k = 1024 of Gaussian squares: sqrt(2/k) = 4.4 %; four standard errors
    assert squares[0] == pytest.approx(float((weight**2).sum()), rel=4 * (2 / 1024) ** 0.5)


def test_a_vector_of_a_checkpoint_comes_back():
    sample, _ = subsample(torch.randn(40, 50), torch.randn(7, 9))
    saved = torch.from_numpy(sample.weights().copy())
    assert np.array_equal(sample.restored(saved), sample.weights())
    assert np.isnan(sample.restored(saved[:-1])).all()
