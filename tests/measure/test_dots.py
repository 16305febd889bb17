"""Inner products against numpy in long double."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.measure.dots import dots, moved_dots, row_dots

ALL = [(0, 0), (0, 1), (1, 1)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow(vectors, products):
    held = [vector.double().numpy().astype(np.longdouble) for vector in vectors]
    return [float((held[i] * held[j]).sum()) for i, j in products]


@pytest.mark.parametrize("size", [1, 27, 65_535, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_of_every_length_and_type(size, dtype):
    vectors = [random(size, seed=seed, dtype=dtype) for seed in (0, 1)]
    found, expected = dots(vectors, products=ALL), slow(vectors, ALL)
    # A float32 sum in many lanes is right to a few units in its last place; coarser types are summed in float64.
    scale = [expected[0], np.sqrt(expected[0] * expected[2]), expected[2]]
    for value, right, most in zip(found, expected, scale, strict=True):
        assert abs(value - right) <= (1e-6 if dtype == torch.float32 else 1e-13) * most


@pytest.mark.parametrize("size", [27, 300_000])
def test_exact_products_keep_what_cancels(size):
    """||v||^2 - <w,v>^2/||w||^2 of a v that is parallel to w but for 1e-4: 1e-8 of it is left."""
    w = random(size)
    v = w + 1e-4 * random(size, seed=1)
    (ww, wv, vv), (ww_right, wv_right, vv_right) = dots([w, v], products=ALL, exact=True), slow([w, v], ALL)
    assert vv - wv * wv / ww == pytest.approx(vv_right - wv_right**2 / ww_right, rel=1e-5)


def test_types_may_be_mixed():
    vectors = [random(100, dtype=torch.float64), random(100, seed=1), random(100, seed=2, dtype=torch.bfloat16)]
    pairs = [(0, 1), (1, 2), (0, 2)]
    assert dots(vectors, products=pairs) == pytest.approx(slow(vectors, pairs), rel=1e-12)
    moved = moved_dots(vectors[0], vectors[1], [vectors[2]], shrink=0.0, products=[(1, 2)], refresh=False)
    expected = float(vectors[2].double() @ (vectors[1].double() - vectors[0]))
    assert moved == pytest.approx([expected], rel=1e-12)


def test_vectors_of_different_length_are_refused():
    with pytest.raises((ValueError, RuntimeError), match=r"zip|same size|inconsistent"):
        dots([random(70_000), random(200_000)], products=ALL)


@pytest.mark.parametrize("size", [27, 65_537, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_moved_dots(size, dtype, refresh, exact):
    before, gradient = random(size, dtype=dtype), random(size, seed=1, dtype=dtype)
    after = (0.999 * before.double() + 1e-3 * random(size, seed=2)).to(dtype)
    kept_before, kept_after = before.clone(), after.clone()
    move = after.double() - before.double() + 1e-3 * before.double()
    products = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
    expected = slow([before, gradient, move], products)
    found = moved_dots(before, after, [gradient], shrink=1e-3, products=products, refresh=refresh, exact=exact)
    lengths = np.sqrt([expected[0], expected[2], expected[5]])
    # The move itself is formed in float32, from weights 1000 times larger than it: only its own rounding counts.
    for value, right, (i, j) in zip(found, expected, products, strict=True):
        assert abs(value - right) <= 1e-6 * lengths[i] * lengths[j]
    assert torch.equal(after, kept_after)
    assert torch.equal(before, kept_after if refresh else kept_before)


def test_moved_dots_refreshes_through_a_view_of_the_copy():
    copy, weight = random(4, 5), random(4, 5, seed=1)
    moved_dots(copy.view(-1), weight.view(-1), [], shrink=0.0, products=[(1, 1)], refresh=True)
    assert torch.equal(copy, weight)


@given(rows=st.integers(1, 6), columns=st.integers(1, 40), seed=st.integers(0, 100))
def test_rows_are_dots_of_slices(rows, columns, seed):
    matrices = [random(rows, columns, seed=seed), random(rows, columns, seed=seed + 1)]
    by_row = row_dots(matrices, products=ALL)
    for row in range(rows):
        expected = slow([matrix[row] for matrix in matrices], ALL)
        assert [float(column[row]) for column in by_row] == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_row_dots_take_mixed_types():
    found = row_dots([random(3, 4), random(3, 4, seed=1, dtype=torch.bfloat16)], products=[(0, 1)])
    expected = (random(3, 4).double() * random(3, 4, seed=1, dtype=torch.bfloat16).double()).sum(1)
    assert torch.allclose(found[0], expected, rtol=1e-13)
