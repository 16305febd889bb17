"""Flat vectors and rows keep every number in its place, whatever the strides."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.odd_tensors import LAYOUTS, exact, laid_out
from torch import nn

from equilibria.tensors.layout import (
    as_real,
    copy_of,
    densify,
    first_local_row,
    flat,
    is_dense,
    is_sharded,
    local,
    row_axis_of,
    rows,
    sharded_axes,
)

SHAPES = [(3, 3, 3, 3), (4, 5), (7,), (1, 6), (4, 1, 1, 1), (5, 1, 3, 2), (2, 3, 4, 5, 2)]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_has_every_number_once_and_is_a_view_without_gaps(shape, layout):
    tensor = laid_out(numbered(*shape), layout)
    vector = flat(tensor)
    assert sorted(vector.tolist()) == list(range(tensor.numel()))
    places = [sum(map(math.prod, zip(index, tensor.stride(), strict=True))) for index in np.ndindex(*shape)]
    assert is_dense(tensor) == (sorted(places) == list(range(tensor.numel())))
    if is_dense(tensor):
        vector += 1
        assert torch.equal(tensor, numbered(*shape) + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("own", "model"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_flat_like_another_pairs_the_same_entries(shape, own, model):
    """The hardest pair: a model with gaps whose axes are in another order than a dense copy of it would have."""
    first, second = laid_out(numbered(*shape), own), laid_out(numbered(*shape), model)
    assert torch.equal(flat(first, like=second), flat(second))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_of_a_copy_is_a_view_of_it(shape, layout):
    """What is written into the flat copy must arrive in the copy."""
    tensor = laid_out(numbered(*shape), layout)
    copy = copy_of(tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)
    flat(copy, like=tensor).add_(1)
    assert torch.equal(copy, tensor + 1)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_flat_pairs_entries_for_any_order_of_axes(shape, order, layouts):
    axes = list(range(len(shape)))
    order.shuffle(axes)
    first, second = (laid_out(numbered(*shape), layout).permute(axes) for layout in layouts)
    assert torch.equal(flat(first, like=second), flat(second))


def test_flat_of_a_slice_starts_where_the_slice_does():
    base = numbered(6, 4)
    assert flat(base[2:4]).tolist() == list(range(8, 16))
    assert sorted(flat(base.t()[1:3]).tolist()) == sorted(base[:, 1:3].flatten().tolist())


def test_flat_of_repeated_and_empty_tensors():
    repeated = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    assert flat(repeated).tolist() == [1, 1, 1, 2, 2, 2]
    assert flat(torch.empty(0, 3)).shape == (0,)


def test_flat_of_another_type_keeps_its_type():
    weight, gradient = laid_out(numbered(4, 5), "transposed"), numbered(4, 5).bfloat16()
    assert flat(gradient, like=weight).dtype == torch.bfloat16
    assert torch.equal(flat(gradient, like=weight).float(), flat(weight))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_slices_along_the_axis(layout, axis):
    tensor = laid_out(numbered(3, 4, 2, 5), layout)
    for number, row in enumerate(rows(tensor, axis=axis)):
        assert torch.equal(row, tensor.select(axis, number).reshape(-1))


def test_complex_tensors_become_pairs_also_if_conjugated():
    values = torch.complex(numbered(2, 3), -numbered(2, 3))
    assert as_real(values).shape == (2, 3, 2)
    lazily = values.conj()
    assert lazily.is_conj()
    assert as_real(lazily)[..., 1].tolist() == numbered(2, 3).tolist()
    assert local(lazily.requires_grad_()).requires_grad is False


def test_sparse_gradients_become_dense_and_duplicates_add_up():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), values, (4, 2), check_invariants=True)
    assert densify(sparse).tolist() == [[1, 2], [0, 0], [8, 10], [0, 0]]
    dense = numbered(2, 2)
    assert densify(dense) is dense
    assert exact(sparse).tolist() == [1, 2, 0, 0, 8, 10, 0, 0]


def test_transposed_convolutions_number_their_outputs_along_axis_1():
    assert row_axis_of(nn.ConvTranspose2d(3, 5, 2)) == 1
    assert row_axis_of(nn.ConvTranspose1d(3, 5, 2)) == 1
    assert row_axis_of(nn.Conv2d(3, 5, 2)) == row_axis_of(nn.Linear(3, 5)) == 0


class Placement:
    """Stands in for a DTensor's placement."""

    def __init__(self, dim: int | None) -> None:
        self.dim = dim

    def is_replicate(self) -> bool:
        return self.dim is None

    def is_partial(self) -> bool:
        return False


class Sharded:
    """Stands in for a DTensor."""

    def __init__(self, *dims: int | None) -> None:
        self.placements = [Placement(dim) for dim in dims]

    def to_local(self) -> torch.Tensor:
        return torch.zeros(2, 2)


def test_sharded_tensors_are_known_by_their_methods():
    assert is_sharded(Sharded(0))
    assert not is_sharded(torch.zeros(2))
    assert first_local_row(torch.zeros(2), axis=0) == 0


def test_replicated_axes_of_a_mesh_are_not_sharded():
    """Whatever a placement calls itself: torch's strided shards say that they are none."""
    assert sharded_axes(Sharded(1, None, 0)) == {0: 1, 2: 0}
    assert sharded_axes(torch.zeros(2)) == {}
