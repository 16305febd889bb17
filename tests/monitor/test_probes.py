"""What the probes say of a step, against float64 arithmetic on the step that torch really takes."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.odd_tensors import LAYOUTS, exact, laid_out, slow_angle, tangent
from torch import Tensor, nn

from equilibria.monitor.reading import CopyProbe, MeasuredStep, add_products, sgd_combination
from equilibria.tensors.inner_products import CopyPass, MovesPass, ProductsPass
from equilibria.tensors.layout import row_axis_of
from equilibria.tensors.parameters import Watched

SMALL, LARGE = (3, 3, 3), (300, 1000)  # 27 entries and 3e5
ANGLES = (1e-2, 1e-3, 1e-4, 1e-5)
CLOSE = 1e-4  # what is promised of an angle

SGD_SETTINGS = {
    "plain": {"lr": 0.1, "weight_decay": 0.01},
    "no decay": {"lr": 0.1},
    "momentum": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9},
    "momentum without decay": {"lr": 0.1, "momentum": 0.9},
    "nesterov": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": True},
    "nesterov without decay": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "dampening": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.5},
    "dampening without momentum": {"lr": 0.1, "weight_decay": 0.01, "dampening": 0.5},
    "maximize": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "maximize": True},
    "maximize with nesterov": {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True},
    "lr as a tensor": {"lr": torch.tensor(0.1), "weight_decay": 0.01, "momentum": 0.9},
}


def watch(param: Tensor, axis: int | None = None) -> Watched:
    units = 1 if axis is None else param.shape[axis]
    return Watched("w", (), param, 0, 0, axis, units, param.numel() // units, 0)


def weight(shape: tuple[int, ...], *, layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return nn.Parameter(laid_out(values.to(dtype), layout))


def combined(numbers, combination) -> MeasuredStep:
    """The step from the products of weight, gradient and buffer."""
    ww, wg, gg, wv, gv, vv = numbers.numpy().T[:6]
    own, kept = combination.gradient, combination.buffer
    we, ee = own * wg + kept * wv, own * own * gg + 2 * own * kept * gv + kept * kept * vv
    return MeasuredStep(ww=ww, wg=wg, gg=gg, we=we, ee=ee, vg=gv, shrink=np.full_like(ww, combination.shrink))


def compared(numbers, shrink: float) -> MeasuredStep:
    """The step from the products of weight, gradient and move."""
    ww, wg, gg, we, ee = numbers.numpy().T[:5]
    return MeasuredStep(ww=ww, wg=wg, gg=gg, we=we, ee=ee, vg=np.full_like(ww, np.nan), shrink=np.full_like(ww, shrink))


def no_products(watched: Watched) -> Tensor:
    return torch.zeros(watched.units, 9, dtype=torch.float64)


def read_products(watched: Watched, gradient: Tensor, buffer: Tensor | None, *, out: Tensor) -> None:
    one_pass = ProductsPass(out)
    add_products(one_pass, 0, watched, gradient, buffer)
    one_pass.run()


def compare(probe: CopyProbe, gradient: Tensor | None, *, shrink: float, refresh: bool) -> Tensor:
    numbers = no_products(probe._watched)
    one_pass = MovesPass(numbers)
    probe.compare(one_pass, 0, gradient, shrink=shrink, refresh=refresh)
    one_pass.run()
    return numbers


def in_float64(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """The weight before and after the step that the optimizer would take in float64."""
    (param,) = optimizer.param_groups[0]["params"]
    wide = torch.complex128 if param.is_complex() else torch.float64
    twin = nn.Parameter(param.detach().to(wide))
    twin.grad = param.grad.detach().to_dense().to(wide)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    other = type(optimizer)([twin], **{**settings, "foreach": False})
    for name, value in optimizer.state.get(param, {}).items():
        other.state[twin][name] = value.detach().to(wide) if isinstance(value, Tensor) else copy.copy(value)
    before = twin.detach().clone()
    other.step()
    return before, twin.detach()


def read(optimizer: torch.optim.SGD, axis: int | None = None) -> MeasuredStep:
    (param,) = optimizer.param_groups[0]["params"]
    buffer = optimizer.state.get(param, {}).get("momentum_buffer")
    watched = watch(param, axis)
    numbers = no_products(watched)
    read_products(watched, param.grad, buffer, out=numbers)
    return combined(numbers, sgd_combination(optimizer.param_groups[0], first=buffer is None))


def assert_is(
    step: MeasuredStep, before: np.ndarray, after: np.ndarray, gradient: np.ndarray, *, rel: float = CLOSE
) -> None:
    """Everything a step says against the vectors."""
    assert step.angle[0] == pytest.approx(slow_angle(before, after), rel=rel)
    assert step.moved[0] == pytest.approx(np.linalg.norm(after - before), rel=rel)
    assert step.norm[0] == pytest.approx(np.linalg.norm(before), rel=1e-6)
    assert np.sqrt(step.norm_sq_after[0]) == pytest.approx(np.linalg.norm(after), rel=1e-6)
    assert np.sqrt(step.gg[0]) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
    lengths = np.linalg.norm(before) * np.linalg.norm(gradient)
    assert step.wg[0] == pytest.approx(before @ gradient, abs=1e-6 * lengths)


# ---- torch's SGD, read before the step


@pytest.mark.parametrize("settings", SGD_SETTINGS.values(), ids=SGD_SETTINGS)
@pytest.mark.parametrize("foreach", [False, True])
def test_every_kind_of_sgd_step_from_the_first(settings, foreach):
    param, generator = weight((5, 4, 3)), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([param], **settings, foreach=foreach)
    for _ in range(4):
        param.grad = 0.1 * torch.randn(param.shape, generator=generator)
        step, (before, after), gradient = read(optimizer), in_float64(optimizer), exact(param.grad)
        assert_is(step, exact(before), exact(after), gradient, rel=1e-6)
        optimizer.step()
        assert slow_angle(exact(before), exact(param)) == pytest.approx(step.angle[0], rel=1e-4)  # torch's own rounding


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize("shrink", [0.0, 1e-3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_angles_of_sgd(shape, angle, shrink, momentum):
    """With momentum and decay the buffer becomes parallel to the weight, and the turn a small part of it."""
    param, lr = weight(shape), 0.1
    settings = {"lr": lr, "momentum": momentum, "weight_decay": shrink / lr * (1 - momentum)}
    optimizer = torch.optim.SGD([param], **settings)
    for at in range(30 if momentum and shrink and shape == SMALL else 3):
        param.grad = (angle / lr * tangent(param.detach(), torch.Generator().manual_seed(at))).float()
        step, (before, after) = read(optimizer), in_float64(optimizer)
        assert_is(step, exact(before), exact(after), exact(param.grad))
        optimizer.step()


@pytest.mark.parametrize(("own", "of_gradient"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_sgd_in_every_layout_of_weight_and_gradient(own, of_gradient):
    param = weight((6, 3, 2, 2), layout=own)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.01)
    for at in range(2):
        values = 1e-3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(at))
        param.grad = laid_out(values, of_gradient)
        step, (before, after) = read(optimizer), in_float64(optimizer)
        assert_is(step, exact(before), exact(after), exact(param.grad), rel=1e-5)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_sgd_of_other_types(dtype):
    param = weight((5, 4), dtype=dtype)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.01)
    for at in range(3):
        param.grad = 1e-3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(at), dtype=dtype)
        param.grad = param.grad.conj() if param.is_complex() and at == 1 else param.grad
        step, (before, after) = read(optimizer), in_float64(optimizer)
        assert_is(step, exact(before), exact(after), exact(param.grad), rel=1e-5)
        optimizer.step()


@pytest.mark.parametrize("axis", [None, 0])
def test_sgd_without_a_buffer_reads_zeros_for_it(axis):
    watched = watch(weight(SMALL), axis)
    numbers = no_products(watched)
    read_products(watched, torch.randn(SMALL), None, out=numbers)
    assert (numbers[:, [0, 2]] > 0).all()
    assert not numbers[:, 3:].any()


# ---- everything else, copied before the step and compared after it


def remember(probe, **factor):
    copies = CopyPass()
    is_same = probe.remember(copies, **factor)
    copies.run()
    return is_same


def probe_step(
    probe: CopyProbe, optimizer: torch.optim.Optimizer, *, shrink: float, refresh: bool = False
) -> MeasuredStep:
    (param,) = optimizer.param_groups[0]["params"]
    remember(probe)
    optimizer.step()
    return compared(compare(probe, param.grad, shrink=shrink, refresh=refresh), shrink)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize("shrink", [0.0, 1e-3])
@pytest.mark.parametrize("known", [True, False], ids=["decay known", "decay unknown"])
def test_small_angles_of_adamw(shape, angle, shrink, known):
    """Entries move by lr each. Also where no law tells how much of the move is decay."""
    param = weight(shape)
    lr = angle * float(param.detach().norm()) / param.numel() ** 0.5
    optimizer, probe = torch.optim.AdamW([param], lr=lr, weight_decay=shrink / lr), CopyProbe(watch(param))
    for at in range(3):
        param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(at))
        before = exact(param).copy()
        step = probe_step(probe, optimizer, shrink=shrink if known else 0.0, refresh=True)
        assert_is(step, before, exact(param), exact(param.grad))


OPTIMIZERS = {
    "AdamW": (lambda param: torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1), 1e-4),
    "AdamW amsgrad": (lambda param: torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, amsgrad=True), 1e-4),
    "Adam": (lambda param: torch.optim.Adam([param], lr=1e-3, weight_decay=0.1), 0.0),
    "RMSprop": (lambda param: torch.optim.RMSprop([param], lr=1e-3, momentum=0.9, weight_decay=0.1), 0.0),
    "SGD": (lambda param: torch.optim.SGD([param], lr=1e-3, momentum=0.9, weight_decay=0.1, nesterov=True), 1.9e-4),
    "Muon": (lambda param: torch.optim.Muon([param], lr=1e-3, weight_decay=0.1), 1e-4),
}


@pytest.mark.parametrize(("make", "shrink"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("refresh", [False, True])
def test_moves_of_every_optimizer_in_every_layout(make, shrink, layout, refresh):
    param = weight((8, 6), layout=layout)
    optimizer, probe = make(param), CopyProbe(watch(param))
    for at, of_gradient in enumerate([*LAYOUTS, layout]):
        param.grad = laid_out(torch.randn(8, 6, generator=torch.Generator().manual_seed(at)), of_gradient)
        before = exact(param).copy()
        step = probe_step(probe, optimizer, shrink=shrink, refresh=refresh)
        assert_is(step, before, exact(param), exact(param.grad), rel=1e-5)
        assert torch.equal(probe._copy, param) == refresh


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_moves_of_other_types(dtype):
    param = weight((20, 15), dtype=dtype)
    optimizer = torch.optim.AdamW([param], lr=0.02, weight_decay=0.1, eps=1e-3)  # float16 has no 1e-8
    probe = CopyProbe(watch(param))
    for at in range(3):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(at), dtype=dtype)
        before = exact(param).copy()
        step = probe_step(probe, optimizer, shrink=2e-3, refresh=at < 2)
        assert_is(step, before, exact(param), exact(param.grad), rel=1e-5)


def test_a_bfloat16_step_too_small_to_be_stored_turns_by_nothing():
    param = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=1e-5, weight_decay=0.1)
    step = probe_step(CopyProbe(watch(param)), optimizer, shrink=1e-6)
    assert step.moved[0] == pytest.approx(0.0, abs=1e-8 * 10)
    assert step.angle[0] == pytest.approx(0.0, abs=1e-8)


def test_sparse_gradients():
    layer = nn.Embedding(50, 8, sparse=True)
    layer(torch.tensor([1, 3, 3, 40])).square().sum().backward()
    param = layer.weight
    gradient, before = exact(param.grad), exact(param).copy()
    probe = CopyProbe(watch(param))
    remember(probe)
    torch.optim.SGD([param], lr=0.1).step()
    step = compared(compare(probe, param.grad, shrink=0.0, refresh=False), 0.0)
    assert_is(step, before, exact(param), gradient, rel=1e-6)


@pytest.mark.parametrize("axis", [None, 0])
def test_without_a_gradient_the_move_is_still_measured(axis):
    param = weight((5, 4))
    probe = CopyProbe(watch(param, axis))
    remember(probe)
    with torch.no_grad():
        param.mul_(0.9)
    step = compared(compare(probe, None, shrink=0.1, refresh=False), 0.1)
    assert not step.gg.any()
    assert step.moved == pytest.approx(0.1 * step.norm, rel=1e-6)


# ---- rows


@given(
    shape=st.lists(st.integers(2, 5), min_size=2, max_size=4),
    axis=st.integers(0, 1),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 50),
)
def test_rows_say_what_slices_would(shape, axis, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = nn.Parameter(laid_out(torch.randn(shape, generator=generator), layout))
    slices = [nn.Parameter(part.detach().clone()) for part in whole.unbind(axis)]
    gradient = torch.randn(shape, generator=generator)
    optimizers = [torch.optim.SGD([each], lr=0.01, momentum=0.9, weight_decay=0.1) for each in (whole, *slices)]
    probes = [CopyProbe(watch(whole, axis)), *(CopyProbe(watch(each)) for each in slices)]
    for turn in range(2):
        for param, part in zip((whole, *slices), (gradient, *gradient.unbind(axis)), strict=True):
            param.grad = part.clone()
        linear = [read(optimizer, axis if at == 0 else None) for at, optimizer in enumerate(optimizers)]
        steps = [probe_step(*pair, shrink=1e-3, refresh=turn == 0) for pair in zip(probes, optimizers, strict=True)]
        for rows, *single in (linear, steps):
            for name in ("norm", "angle", "moved", "cosine", "norm_sq_after"):
                expected = [getattr(each, name)[0] for each in single]
                assert getattr(rows, name) == pytest.approx(expected, rel=1e-4, abs=1e-7), name


def test_rows_of_a_transposed_convolution_are_its_outputs():
    layer = nn.ConvTranspose2d(3, 5, 2)
    layer.weight.grad = torch.randn_like(layer.weight)
    probe = CopyProbe(watch(layer.weight, row_axis_of(layer)))
    remember(probe)
    step = compared(compare(probe, layer.weight.grad, shrink=0.0, refresh=False), 0.0)
    assert step.norm == pytest.approx(layer.weight.detach().double().pow(2).sum((0, 2, 3)).sqrt().numpy(), rel=1e-12)


# ---- whether somebody else changed the weight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_between_two_sampled_steps_are_noticed(layout):
    param = weight((8, 6), layout=layout)
    optimizer, probe = torch.optim.AdamW([param], lr=1e-3), CopyProbe(watch(param))
    param.grad = torch.randn(8, 6)
    assert remember(probe)
    optimizer.step()
    compare(probe, param.grad, shrink=0.0, refresh=True)
    assert remember(probe), "nothing happened in between"
    with torch.no_grad():
        param.mul_(1.5)
    before = exact(param).copy()
    assert not remember(probe)
    optimizer.step()
    assert_is(
        compared(compare(probe, param.grad, shrink=0.0, refresh=True), 0.0), before, exact(param), exact(param.grad)
    )
    param.data.mul_(1.5)  # which no version counts
    assert not remember(probe)


def test_where_the_copy_was_not_kept_nothing_is_claimed():
    param = weight((8, 6))
    probe = CopyProbe(watch(param))
    remember(probe)
    compare(probe, None, shrink=0.0, refresh=False)
    param.data.mul_(1.5)
    assert remember(probe)
    assert torch.equal(probe._copy, param)


def test_a_model_that_is_moved_to_another_layout_or_type_is_followed():
    layer = nn.Conv2d(3, 4, 3)
    param, probe = layer.weight, CopyProbe(watch(layer.weight))
    for change in (lambda: layer.to(memory_format=torch.channels_last), layer.double, layer.bfloat16, layer.float):
        change()
        assert layer.weight is param
        param.grad = torch.randn_like(param)
        assert remember(probe)
        before = exact(param).copy()
        torch.optim.SGD([param], lr=0.1).step()
        step = compared(compare(probe, param.grad, shrink=0.0, refresh=True), 0.0)
        assert_is(step, before, exact(param), exact(param.grad), rel=1e-5)
        assert torch.equal(probe._copy, param)
