"""Inner products against numpy in long double."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.tensors import inner_products
from equilibria.tensors.inner_products import MovesPass, ProductsPass

SIZES = [1, 27, 65_535, 65_536, 65_537, 300_000]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROUNDING = 1e-13  # of a float64 sum in many lanes


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def add_products(weight, gradient, buffer, *, out):
    one_pass = ProductsPass(out)
    one_pass.add(0, weight, gradient, buffer)
    one_pass.run()


def add_move(before, after, gradient, *, shrink, refresh, out):
    one_pass = MovesPass(out)
    one_pass.add(0, before, after, gradient, shrink=shrink, refresh=refresh)
    one_pass.run()


def slow(first, second):
    """Row by row."""
    a, b = (tensor.double().numpy().astype(np.longdouble) for tensor in (first, second))
    return (a * b).sum(1).astype(float)


def slow_products(weight, gradient, buffer=None):
    vectors = [weight, gradient] if buffer is None else [weight, gradient, buffer]
    pairs = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)][: 3 if buffer is None else 6]
    columns = np.zeros((len(weight), 6))
    for column, (i, j) in enumerate(pairs):
        columns[:, column] = slow(vectors[i], vectors[j])
    return columns


def slow_move(before, after, gradient, shrink):
    move = after.double() - before.double() + shrink * before.double()
    columns = np.zeros((len(before), 5))
    columns[:, 0], columns[:, 3], columns[:, 4] = slow(before, before), slow(before, move), slow(move, move)
    if gradient is not None:
        columns[:, 1], columns[:, 2] = slow(before, gradient), slow(gradient, gradient)
    return columns


def sums(rows: int, columns: int = 9) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.float64)


def assert_close(measured, expected, lengths_sq, *, rounding=ROUNDING):
    """Products may cancel: they are as accurate as the lengths of their vectors allow."""
    for column, (i, j) in enumerate(lengths_sq):
        most = np.sqrt(i * j)
        assert (np.abs(measured[:, column].numpy() - expected[:, column]) <= rounding * most).all(), column


def of_products(expected):
    w, g, v = expected[:, 0], expected[:, 2], expected[:, 5]
    return [(w, w), (w, g), (g, g), (w, v), (g, v), (v, v)]


def of_move(expected):
    w, g, e = expected[:, 0], expected[:, 2], expected[:, 4]
    return [(w, w), (w, g), (g, g), (w, e), (e, e)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("with_buffer", [False, True])
def test_products_of_every_length_and_type(size, dtype, with_buffer):
    vectors = [random(1, size, seed=seed, dtype=dtype) for seed in range(3)]
    vectors[2] = vectors[2] if with_buffer else None
    out, expected = sums(1), slow_products(*vectors)
    add_products(*vectors, out=out)
    assert_close(out, expected, of_products(expected))
    assert not out[:, 6:].any()


@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e18, 1e25])
def test_products_of_numbers_whose_squares_float32_cannot_hold(scale):
    vectors = [scale * random(1, 1000, seed=seed) for seed in range(3)]
    out, expected = sums(1), slow_products(*vectors)
    add_products(*vectors, out=out)
    assert_close(out, expected, of_products(expected))
    moved = sums(1, 5)
    add_move(*vectors, shrink=0.1, refresh=False, out=moved)
    assert_close(moved, slow_move(*vectors, 0.1), of_move(slow_move(*vectors, 0.1)))


@pytest.mark.parametrize("size", [27, 300_000])
def test_products_keep_what_cancels(size):
    """||v||^2 - <w,v>^2/||w||^2 of a v that is parallel to w but for 1e-4: 1e-8 of it is left."""
    w = random(1, size)
    v = w + 1e-4 * random(1, size, seed=1)
    out, expected = sums(1), slow_products(w, w, v)[0]
    add_products(w, w, v, out=out)
    ww, _, _, wv, _, vv = out[0, :6].tolist()
    assert vv - wv * wv / ww == pytest.approx(expected[5] - expected[3] ** 2 / expected[0], rel=1e-5)


def test_numbers_that_are_not_finite_stay_what_they_are():
    for bad in (torch.nan, torch.inf):
        gradient = random(2, 40, seed=1)
        gradient[1, 7] = bad
        out = sums(2)
        add_products(random(2, 40).abs(), gradient, random(2, 40, seed=2), out=out)
        assert out[0, :6].isfinite().all()
        assert out[1, [0, 3, 5]].isfinite().all()
        assert not out[1, [1, 2, 4]].isfinite().any()


def test_types_may_be_mixed():
    vectors = [random(2, 70_000, dtype=torch.float64), random(2, 70_000, seed=1), random(2, 70_000, seed=2).bfloat16()]
    out, expected = sums(2), slow_products(*vectors)
    add_products(*vectors, out=out)
    assert_close(out, expected, of_products(expected))
    moved, expected = sums(2), slow_move(*vectors, 0.0)
    add_move(*vectors, shrink=0.0, refresh=True, out=moved)
    assert_close(moved, expected, of_move(expected))
    assert torch.equal(vectors[0], vectors[1].double())


@pytest.mark.parametrize("dtype", TYPES)
def test_products_replace_what_was_there(dtype):
    w, g = random(1, 10, dtype=dtype), random(1, 10, seed=1, dtype=dtype)
    out = torch.full((2, 9), torch.nan, dtype=torch.float64)
    add_products(w, g, None, out=out)
    assert out[0, :6].numpy() == pytest.approx(slow_products(w, g)[0], rel=ROUNDING)
    assert out[1].isnan().all() and out[0, 6:].isnan().all()
    add_move(w, 2 * w, None, shrink=0.0, refresh=False, out=out[1:])
    assert out[1].isnan().tolist() == [False, True, True, False, False, True, True, True, True]  # wg, gg are known


@pytest.mark.parametrize("size", [27, 65_537, 300_000])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_moves(size, dtype, refresh, with_gradient):
    before, gradient = random(1, size, dtype=dtype), random(1, size, seed=1, dtype=dtype)
    gradient = gradient if with_gradient else None
    after = (0.999 * before.double() + 1e-3 * random(1, size, seed=2)).to(dtype)
    kept_before, kept_after = before.clone(), after.clone()
    expected, out = slow_move(before, after, gradient, 1e-3), sums(1)
    add_move(before, after, gradient, shrink=1e-3, refresh=refresh, out=out)
    # The sums of squares of the two terms of e are 1e6 times that of e itself, at most: that many digits may be lost.
    assert_close(out, expected, of_move(expected), rounding=1e-10)
    assert torch.equal(after, kept_after)
    assert torch.equal(before, kept_after if refresh else kept_before)


@given(rows=st.integers(1, 6), columns=st.integers(1, 40), seed=st.integers(0, 100), dtype=st.sampled_from(TYPES))
def test_rows_are_products_of_slices(rows, columns, seed, dtype):
    weight, gradient, buffer = (random(rows, columns, seed=seed + number, dtype=dtype) for number in range(3))
    out = sums(rows)
    add_products(weight, gradient, buffer, out=out)
    expected = slow_products(weight, gradient, buffer)
    assert_close(out, expected, of_products(expected))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("with_third", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_device_would_do_gives_the_same(rows, with_third, dtype):
    """There is no device here: its operations run in main memory."""
    first, second, third = (random(rows, 5000, seed=seed, dtype=dtype) for seed in range(3))
    third = third if with_third else None
    measured, expected = sums(rows), slow_products(first, second, third)
    inner_products._add_products(first, second, third, measured)
    assert_close(measured, expected, of_products(expected), rounding=1e-5)  # float32 sums, here one after the other
    measured, expected = sums(rows), slow_move(first, second, third, 0.01)
    inner_products._add_move(first, second, third, 0.01, measured)
    assert_close(measured, expected, of_move(expected), rounding=1e-5)


def test_one_pass_reads_many_tensors_of_different_shapes_and_types():
    shapes = [(1, 50), (3, 7), (2, 1), (4, 70_000), (1, 0)]
    types = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32]
    places = np.cumsum([1, *(rows for rows, _ in shapes)])  # a row that is nobody's first
    triples = [
        [random(*s, seed=10 * number + k, dtype=t) for k in range(3)]
        for number, (s, t) in enumerate(zip(shapes, types, strict=True))
    ]
    products, moves = sums(places[-1] + 1), sums(places[-1] + 1)
    for place, triple in zip(places, triples, strict=False):
        expected, expected_move = slow_products(*triple), slow_move(*triple, 0.1 * place)
        products.zero_(), moves.zero_()
        one_pass, other = ProductsPass(products), MovesPass(moves)
        for first_row, tensors in zip(places, triples, strict=False):
            one_pass.add(first_row, *tensors)
            other.add(first_row, *tensors, shrink=0.1 * first_row, refresh=False)
        one_pass.run(), other.run()
        here = slice(place, place + len(triple[0]))
        assert_close(products[here], expected, of_products(expected))
        assert_close(moves[here], expected_move, of_move(expected_move))
        assert not products[0].any() and not products[places[-1]].any()


def test_what_does_not_fit_is_refused_before_anything_is_read_or_written():
    """Compiled code would read and write foreign memory."""
    with pytest.raises(ValueError, match=r"shapes \(1, 10\), \(1, 20\)"):
        add_products(random(1, 20), random(1, 10), None, out=sums(1))
    with pytest.raises(ValueError, match="got 3 rows, for 2 of which there is room"):
        add_products(random(3, 4), random(3, 4), None, out=sums(2))
    with pytest.raises(ValueError, match="shapes"):
        add_move(random(2, 3), random(2, 3), random(3, 2), shrink=0.0, refresh=False, out=sums(2))


class Held(torch.Tensor):
    """A tensor whose numbers are elsewhere, as those of quantised weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called: there are no numbers to compute with")


def test_a_tensor_without_memory_of_its_own_is_refused():
    with pytest.raises(TypeError, match="got a tensor of type Held"):
        add_products(Held(random(1, 4)), random(1, 4), None, out=sums(1))
