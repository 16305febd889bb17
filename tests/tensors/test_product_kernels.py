"""The GPU kernels in triton's interpreter against float64, and compiled for GPUs that are not here."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.test_inner_products import random, slow_move, slow_products, sums
from torch import nn

from equilibria.monitor.reading import add_products
from equilibria.tensors import device_queue, inner_products, subsample
from equilibria.tensors.inner_products import CopyPass, MovesPass, ProductsPass
from equilibria.tensors.parameters import Watched
from equilibria.tensors.subsample import Subsample

pytest.importorskip("triton")  # conftest.py has turned its interpreter on

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels():
    from equilibria.tensors import _product_kernels

    return _product_kernels


@pytest.fixture
def on_device(monkeypatch, kernels):
    """Tensors in main memory take the way of those on a GPU."""
    launches = []
    launch = kernels.launch

    def counted(kernel, items, table):
        launches.append((kernel, len(items)))
        launch(kernel, items, table)

    monkeypatch.setattr(kernels, "launch", counted)
    monkeypatch.setattr(device_queue, "is_on_device", lambda _tensor: True)
    monkeypatch.setattr(inner_products, "kernels_for", lambda _device: kernels)
    return launches


def bound(kernels, first, second):
    """The largest error of sums of products, row by row."""
    return kernels.ERROR * (first.double().abs() * second.double().abs()).sum(1).numpy() + 1e-300


def assert_products(kernels, found, weight, gradient, buffer):
    expected = slow_products(weight, gradient, buffer)
    vectors = [weight, gradient, buffer]
    for column, (i, j) in enumerate([(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)][: 3 if buffer is None else 6]):
        error = np.abs(found[:, column].numpy() - expected[:, column])
        assert (error <= bound(kernels, vectors[i], vectors[j])).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 27, 1024, 16_385, 70_001])
@pytest.mark.parametrize("with_buffer", [True, False])
def test_products_are_within_their_error_bound(on_device, kernels, size, dtype, with_buffer):
    weight, gradient = random(1, size, dtype=dtype), random(1, size, seed=1)
    buffer = random(1, size, seed=2) if with_buffer else None
    table = sums(1)
    one_pass = ProductsPass(table)
    one_pass.add(0, weight, gradient, buffer)
    one_pass.run()
    assert_products(kernels, table, weight, gradient, buffer)
    assert on_device == [("sum_products", 1)]


def test_one_launch_serves_all_tensors_rows_and_types(on_device, kernels):
    shapes = [(3, 5), (1, 20_000), (7, 1), (0, 4), (2, 0), (40, 33)]
    tensors = [
        (random(*shape, seed=k, dtype=TYPES[k % 3]), random(*shape, seed=k + 50), random(*shape, seed=k + 90))
        for k, shape in enumerate(shapes)
    ]
    table = sums(sum(rows for rows, _ in shapes))
    one_pass, begin = ProductsPass(table), 0
    for weight, gradient, buffer in tensors:
        one_pass.add(begin, weight, gradient, buffer)
        begin += len(weight)
    one_pass.run()
    assert on_device == [("sum_products", len(shapes))]
    begin = 0
    for weight, gradient, buffer in tensors:
        assert_products(kernels, table[begin : begin + len(weight)], weight, gradient, buffer)
        begin += len(weight)


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_moves_are_within_their_error_bound(on_device, kernels, dtype, with_gradient, refresh):
    before = random(3, 6000, dtype=dtype)
    after = (before.double() * (1 - 1e-3) + 1e-2 * random(3, 6000, seed=1).double()).to(dtype)
    gradient, table, shrink = random(3, 6000, seed=2) if with_gradient else None, sums(3, 5), 1e-3
    expected = slow_move(before, after, gradient, shrink)
    move = (after.double() - before.double() + shrink * before.double()).abs()
    kept = before.clone()
    one_pass = MovesPass(table)
    one_pass.add(0, before, after, gradient, shrink=shrink, refresh=refresh)
    one_pass.run()
    # e is rounded by 2^-24 of itself, and of what decay removed, twice
    rounding = 2.0**-24 * (move + 3 * shrink * kept.double().abs())
    off = {
        3: bound(kernels, kept, move) + (kept.double().abs() * rounding).sum(1).numpy(),
        4: bound(kernels, move, move) + 2.1 * (move * rounding).sum(1).numpy(),
    }
    for column in (0, 3, 4):
        allowed = off.get(column, bound(kernels, kept, kept))
        assert (np.abs(table[:, column].numpy() - expected[:, column]) <= allowed).all()
    if with_gradient:
        assert (np.abs(table[:, 1].numpy() - expected[:, 1]) <= bound(kernels, kept, gradient)).all()
    else:
        assert not table[:, 1:3].any()
    assert torch.equal(before, after if refresh else kept)


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), min_size=1, max_size=6), seed=st.integers(0))
def test_every_number_is_read_once(kernels, shapes, seed):
    """Blocks and units cover all rows of any tensors without a gap or an overlap."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(device_queue, "is_on_device", lambda _tensor: True)
        patch.setattr(inner_products, "kernels_for", lambda _device: kernels)
        draw = np.random.default_rng(seed % 2**32)
        tensors = [torch.from_numpy(draw.integers(-3, 4, shape).astype(np.float32)) for shape in shapes]
        table = sums(sum(rows for rows, _ in shapes))
        one_pass, begin = ProductsPass(table), 0
        for tensor in tensors:
            one_pass.add(begin, tensor, torch.ones_like(tensor), None)
            begin += len(tensor)
        one_pass.run()
    rows = [row for tensor in tensors for row in tensor.numpy()]
    expected = [[float((row * row).sum()), float(row.sum()), float(row.size)] for row in rows]
    assert table[:, :3].tolist() == expected  # small integers: exact in float32


def test_nan_and_infinity_stay_in_their_tensor(on_device, kernels):
    good, bad = random(1, 100), random(1, 100, seed=1)
    bad[0, 7], bad[0, 9] = torch.inf, torch.nan
    table = sums(2)
    one_pass = ProductsPass(table)
    one_pass.add(0, bad, good, None)
    one_pass.add(1, good, good, None)
    one_pass.run()
    assert table[0, 0].isnan()
    assert table[0, 3:6].tolist() == [0, 0, 0]
    assert_products(kernels, table[1:], good, good, None)


def test_other_types_are_left_to_torch(on_device):
    weight, gradient, table = random(1, 50, dtype=torch.float64), random(1, 50, seed=1), sums(2)
    one_pass = ProductsPass(table)
    one_pass.add(0, weight, gradient.double(), None)
    one_pass.add(1, gradient, gradient, None)
    one_pass.add(2, *[torch.zeros(0, 3, dtype=torch.float64)] * 2, None)  # a process may hold no row
    one_pass.run()
    assert on_device == [("sum_products", 1)]
    assert table[:, :3].numpy() == pytest.approx(
        np.concatenate([slow_products(weight, gradient), slow_products(gradient, gradient)])[:, :3]
    )


def test_copies_are_made_together(on_device):
    sources = [random(5, 7), random(3, 4, dtype=torch.bfloat16), random(6, 2).T, random(8, dtype=torch.float64)]
    copies, one_pass = [torch.empty_like(source) for source in sources], CopyPass()
    for copy, source in zip(copies, sources, strict=True):
        one_pass.add(copy, source)
    one_pass.run()
    assert on_device == [("copy", 3)]
    assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 1],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "repeated": lambda x: x[:1].expand(x.shape),
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_tensors_in_any_layout_and_type_are_within_the_bound(on_device, kernels, axis, scale):
    draw, items, begin = np.random.default_rng(round(-np.log10(scale)) + 100 * (axis or 7)), [], 0
    for k, (layout, shape) in enumerate(itertools.product(LAYOUTS, [(3, 4, 5), (2, 1030), (2, 0)])):
        kinds = [TYPES[draw.integers(3)] if scale == 1 else torch.float32 for _ in range(3)]
        layouts = [layout, *draw.choice(list(LAYOUTS), 2)]
        tensors = [
            LAYOUTS[how](scale * random(*shape, seed=3 * k + place, dtype=kind))
            for place, (how, kind) in enumerate(zip(layouts, kinds, strict=True))
        ]
        if k % 4 == 3 and tensors[1].numel() and layouts[1] not in ("repeated", "negated"):
            tensors[1][0, 0] = torch.inf
        count = 1 if axis is None else shape[axis]
        if axis == 1 and count > 5:
            continue  # the interpreter takes a millisecond for every row
        items.append((begin, Watched("w", (), tensors[0], 0, 0, axis, count, 1, 0), *tensors[1:]))
        begin += count
    table = sums(begin)
    one_pass = ProductsPass(table)
    for row, layer, gradient, buffer in items:
        add_products(one_pass, row, layer, gradient, buffer)
    with np.errstate(invalid="ignore"):  # the interpreter is numpy's
        one_pass.run()
    assert on_device == [("sum_products", len(items))]
    for row, layer, gradient, buffer in items:
        size = layer.units, layer.param.numel() // max(layer.units, 1)
        w, g, v = (np.moveaxis(x.double().numpy(), axis or 0, 0).reshape(size) for x in (layer.param, gradient, buffer))
        for column, pair in enumerate([(w, w), (w, g), (g, g), (w, v), (g, v), (v, v)]):
            found = table[row : row + layer.units, column].numpy()
            with np.errstate(invalid="ignore"):  # inf - inf, 0 inf
                exact, size = (pair[0] * pair[1]).sum(1), np.abs(pair[0] * pair[1]).sum(1)
            finite = np.isfinite(exact)
            assert (np.isfinite(found) == finite).all()
            # a product below 2^-126 is rounded to a multiple of 2^-149
            allowed = kernels.ERROR * size + w.shape[1] * 2.0**-149
            assert (np.abs(found[finite] - exact[finite]) <= allowed[finite]).all()


def watched_units(params, axis):
    counts = [1 if axis is None else len(param) for param in params]
    return [
        Watched(f"w{k}", (), param, 0, 0, axis, count, param.numel() // count, 0)
        for k, (param, count) in enumerate(zip(params, counts, strict=True))
    ]


def coordinates(monkeypatch, kernels, params, axis, *, on_a_gpu):
    monkeypatch.setattr(device_queue, "is_on_device", lambda _tensor: on_a_gpu)
    monkeypatch.setattr(subsample, "kernels_for", lambda _device: kernels if on_a_gpu else None)
    return Subsample(watched_units(params, axis))


@pytest.mark.parametrize("references", [0, 1, 3])
@pytest.mark.parametrize("axis", [None, 0])
def test_one_launch_looks_at_a_few_coordinates_of_all_tensors(monkeypatch, kernels, axis, references):
    params = [nn.Parameter(x) for x in (random(40, 50), random(6, 5).T, random(3, 4, dtype=torch.bfloat16))]
    moments = [random(*param.shape, seed=k).square() for k, param in enumerate(params)]
    moments[0][::2, ::3], moments[1] = 0.0, moments[1].T.contiguous().T  # never a gradient; laid out otherwise
    gradients = [*(random(*param.shape, seed=5 + k) for k, param in enumerate(params[:-1])), None]
    found = []
    for on_a_gpu in (False, True):
        sample = coordinates(monkeypatch, kernels, params, axis, on_a_gpu=on_a_gpu)
        earlier = [sample.weights() * (0.9 - 0.1 * k) for k in range(4)]
        found.append(sample.look(earlier[:references], before=earlier[3], gradients=gradients, second=moments))
    (weights, table), (gathered, by_kernel) = found
    assert isinstance(by_kernel, torch.Tensor)
    assert gathered.tolist() == weights.tolist()
    assert by_kernel.shape == (len(sample.rows), 3 * references + 2)
    np.testing.assert_allclose(by_kernel.numpy(), table, rtol=1e-12, atol=1e-12)
    assert np.isnan(table[-1, -2:]).all() and np.isfinite(table[0]).all()


def test_without_gradients_or_earlier_weights_the_pull_is_unknown(monkeypatch, kernels):
    sample = coordinates(monkeypatch, kernels, [nn.Parameter(random(4, 5))], None, on_a_gpu=True)
    assert sample.look()[1].isnan().all()
    moved, scaled = sample.look(gradients=[random(4, 5)], second=[random(4, 5).square()])[1][0].tolist()
    assert np.isnan(moved) and np.isfinite(scaled)
    moved, scaled = sample.look(gradients=[random(4, 5)], before=sample.weights() - 1.0)[1][0].tolist()
    assert moved == pytest.approx(float(random(4, 5).sum()), rel=1e-6) and np.isnan(scaled)


def test_a_kernel_that_fails_leaves_the_work_to_torch(on_device, kernels, monkeypatch):
    def fail(*_):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(kernels, "launch", fail)
    monkeypatch.setattr(inner_products, "_failures", [])
    weight, table = random(1, 50), sums(1)
    one_pass = ProductsPass(table)
    one_pass.add(0, weight, weight, None)
    with pytest.warns(UserWarning, match="torch measures the weights, with many more launches: RuntimeError: no C"):
        one_pass.run()
    assert table[0, :3].numpy() == pytest.approx(slow_products(weight, weight)[0, :3])


# ---- compiled for GPUs that are not here

GPUS = ("A100", "H100", "MI300")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Bytes of code and spilled registers of every kernel and GPU, from a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.helpers.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kernel", ["sum_products", "sum_moves", "copy", "add_up", "sum_coordinates", "gather"])
def test_the_kernels_compile_without_spilling_registers(compiled, kernel, gpu):
    assert compiled[gpu][kernel]["bytes"] > 1000
    assert compiled[gpu][kernel]["spilled"] == 0
    assert 0 < compiled[gpu][kernel]["registers"] <= 128  # at least two blocks of 256 threads on a processor


def test_items_are_described_alike(kernels):
    tensors = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16), None
    first, second, third, *rest, shrink = kernels._described(tensors, 0.1, refresh=True)
    assert (first, second, third) == (tensors[0].data_ptr(), tensors[1].data_ptr(), 0)
    assert rest == [0, 1, -1, 1]
    assert struct.unpack("d", struct.pack("q", shrink)) == (0.1,)
