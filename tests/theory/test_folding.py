"""Folding against torch.optim.SGD on a batch-normalised network in float64, and against exact rational arithmetic."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equilibria.errors import EquilibriaError
from equilibria.theory.exponential import constant_schedule, decay_roots, power_schedule
from equilibria.theory.folding import FoldState, advance, fold, unfold
from equilibria.theory.norms import norm_residual, window_identity
from equilibria.theory.schedules import Cosine
from equilibria.theory.switching import renormalisation, to_folded, to_weight_decay

STEPS = 200


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(32, 10, generator=source, dtype=torch.float64).to(dtype),
            torch.randint(5, (32,), generator=source),
        )
        for _ in range(20)
    ]


class Run:
    """MLP 10-16-16-16-5 with batch norm after each hidden layer, under torch.optim.SGD; the last layer is fixed."""

    def __init__(self, *, eps: float = 1e-30, dtype: torch.dtype = torch.float64, nesterov: bool = False) -> None:
        torch.manual_seed(3)
        layers: list[nn.Module] = []
        for fan_in in (10, 16, 16):
            layers += [nn.Linear(fan_in, 16, bias=False), nn.BatchNorm1d(16, eps=eps, affine=False), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(16, 5)).double().to(dtype)
        self.weights = [layer.weight for layer in self.net if isinstance(layer, nn.Linear)][:-1]
        self.norms = [layer for layer in self.net if isinstance(layer, nn.BatchNorm1d)]
        self.opt = torch.optim.SGD(self.weights, lr=0.1, momentum=0.9, nesterov=nesterov)
        self.data = batches(dtype)

    def step(self, t: int, lr: float, *, weight_decay: float, momentum: float, skip: bool = False) -> torch.Tensor:
        inputs, targets = self.data[t % len(self.data)]
        logits = self.net(inputs)
        self.opt.zero_grad()
        if not skip:
            nn.functional.cross_entropy(logits, targets).backward()
            self.opt.param_groups[0].update(lr=lr, weight_decay=weight_decay, momentum=momentum)
            self.opt.step()
        return logits.detach()

    def buffers(self) -> list[torch.Tensor]:
        return [self.opt.state[w]["momentum_buffer"] for w in self.weights]

    def drop_buffers(self) -> None:
        for w in self.weights:
            self.opt.state[w].pop("momentum_buffer", None)

    def scale_statistics(self, mean: float, var: float) -> None:
        for norm in self.norms:
            norm.running_mean *= mean
            norm.running_var *= var

    @torch.no_grad()
    def apply(self, change) -> None:
        """A Switch: weights first, then buffers, then batch-norm statistics."""
        for w, buffer in zip(self.weights, self.buffers(), strict=True):
            w.mul_(change.weight)
            buffer.mul_(change.buffer).add_(w, alpha=change.buffer_from_weight)
        self.scale_statistics(change.running_mean, change.running_var)

    @torch.no_grad()
    def renormalise(self, change, *, buffer: float) -> None:
        for w, momentum_buffer in zip(self.weights, self.buffers(), strict=True):
            w.mul_(change.weight)
            momentum_buffer.mul_(buffer)
        self.scale_statistics(change.running_mean, change.running_var)

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        self.net.eval()
        logits = self.net(self.data[0][0])
        self.net.train()
        return logits


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


Schedule = Callable[[int], float]


def worst_deviation(lr: Schedule, wd: Schedule, momentum: Schedule, *, steps: int = STEPS) -> float:
    folded = fold(lr, wd, momentum=momentum, steps=steps)
    plain, free = Run(), Run()
    worst = 0.0
    for t in range(steps):
        a = plain.step(t, lr(t), weight_decay=wd(t), momentum=momentum(t))
        b = free.step(t, float(folded.lr[t]), weight_decay=0.0, momentum=momentum(t))
        worst = max(worst, deviation(a, b))
    scale = [float(b.detach().norm() / a.detach().norm()) for a, b in zip(plain.weights, free.weights, strict=True)]
    np.testing.assert_allclose(scale, math.exp(folded.log_scale[-1]), rtol=1e-9)
    return worst


def constant(value: float) -> Schedule:
    return lambda t: value


def step_decay(t: int) -> float:
    return 0.1 if t < 80 else 0.01 if t < 140 else 0.001


def cosine(t: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * t / STEPS))


def warm_up(t: int) -> float:
    return 0.1 * min(1.0, t / 50)


@pytest.mark.parametrize(
    ("lr", "wd", "momentum", "tolerance"),
    [
        pytest.param(constant(0.1), constant(5e-4), constant(0.9), 1e-13, id="constant"),
        pytest.param(constant(0.1), constant(5e-3), constant(0.9), 1e-13, id="constant, wd 5e-3"),
        pytest.param(constant(0.1), constant(2e-2), constant(0.9), 2e-12, id="constant, wd 2e-2"),
        pytest.param(constant(0.1), constant(5e-3), constant(0.0), 1e-13, id="no momentum"),
        pytest.param(step_decay, constant(5e-3), constant(0.9), 1e-13, id="step"),
        pytest.param(cosine, constant(5e-3), constant(0.9), 1e-13, id="cosine"),
        pytest.param(warm_up, constant(5e-3), constant(0.9), 1e-13, id="warm-up from exactly 0"),
        pytest.param(cosine, lambda t: 5e-3 * (1 + math.sin(t / 17)), constant(0.9), 1e-13, id="varying wd"),
        pytest.param(
            constant(0.1), constant(5e-3), lambda t: 0.5 + 0.45 * math.sin(t / 23) ** 2, 1e-13, id="varying momentum"
        ),
    ],
)
def test_folded_run_is_the_same_network(lr, wd, momentum, tolerance):
    assert worst_deviation(lr, wd, momentum) < tolerance


def test_default_batch_norm_eps_is_not_scale_invariant():
    folded = fold(0.1, 5e-3, momentum=0.9, steps=50)
    plain, free = Run(eps=1e-5), Run(eps=1e-5)
    worst = 0.0
    for t in range(50):
        a = plain.step(t, 0.1, weight_decay=5e-3, momentum=0.9)
        worst = max(worst, deviation(a, free.step(t, float(folded.lr[t]), weight_decay=0.0, momentum=0.9)))
    assert 1e-8 < worst < 1e-2


def test_nesterov_has_no_folded_equivalent():
    folded = fold(0.1, 2e-2, momentum=0.9, steps=STEPS)
    plain, free = Run(nesterov=True), Run(nesterov=True)
    worst = 0.0
    for t in range(STEPS):
        a = plain.step(t, 0.1, weight_decay=2e-2, momentum=0.9)
        worst = max(worst, deviation(a, free.step(t, float(folded.lr[t]), weight_decay=0.0, momentum=0.9)))
    assert worst > 0.1
    with pytest.raises(EquilibriaError, match="nesterov=True"):
        fold(0.1, 2e-2, momentum=0.9, steps=3, nesterov=True)


def live_deviation(*, momentum, skipped=frozenset(), advance_when_skipped=False, keep_q=False, lr=None) -> float:
    """Both runs side by side, the folded one driven by `advance`."""
    plain, free, state, worst = Run(), Run(), FoldState(), 0.0
    lr = lr or constant(0.1)
    for t in range(STEPS):
        skip = t in skipped
        a = plain.step(t, lr(t), weight_decay=2e-2, momentum=momentum(t), skip=skip)
        taken = advance(state, lr(t), weight_decay=2e-2, momentum=momentum(t))
        b = free.step(t, taken.lr, weight_decay=0.0, momentum=momentum(t), skip=skip)
        worst = max(worst, deviation(a, b))
        if not skip or advance_when_skipped:
            q = taken.state.q if momentum(t) or not keep_q else 2e-2 / taken.alpha
            state = FoldState(taken.state.log_scale, q)
        if momentum(t) == 0:
            plain.drop_buffers()
            free.drop_buffers()
    return worst


def momentum_with_a_pause(t: int) -> float:
    return 0.0 if 60 <= t < 80 else 0.9


def test_momentum_of_exactly_zero_empties_the_buffer():
    assert live_deviation(momentum=momentum_with_a_pause) < 2e-12
    assert live_deviation(momentum=momentum_with_a_pause, keep_q=True) > 1e-3


def test_fold_and_advance_agree():
    lrs = [warm_up(t) for t in range(STEPS)]
    momenta = [momentum_with_a_pause(t) for t in range(STEPS)]
    folded = fold(lrs, 2e-2, momentum=momenta)
    state = FoldState()
    for t in range(STEPS):
        assert (state.log_scale, state.q) == pytest.approx((folded.log_scale[t], folded.q[t]), rel=1e-12, abs=1e-300)
        taken = advance(state, lrs[t], weight_decay=2e-2, momentum=momenta[t])
        assert taken.lr == pytest.approx(folded.lr[t], rel=1e-12)
        assert taken.log_lr == pytest.approx(folded.log_lr[t], rel=1e-12)
        assert taken.alpha == folded.alpha[t]
        state = taken.state
    assert folded.state(STEPS) == FoldState(float(folded.log_scale[-1]), float(folded.q[-1]))


def test_skipped_steps_do_not_advance_and_zero_lr_does():
    skipped = frozenset({3, 50, 51, 120})
    assert live_deviation(momentum=constant(0.9), skipped=skipped) < 2e-12
    assert live_deviation(momentum=constant(0.9), skipped=skipped, advance_when_skipped=True) > 1e-2
    paused = live_deviation(momentum=constant(0.9), lr=lambda t: 0.0 if 40 <= t < 50 else 0.1)
    assert paused < 2e-12


def test_switch_to_folded_in_the_middle():
    plain, switched = Run(), Run()
    folded = fold(0.1, 5e-3, momentum=0.9, steps=STEPS // 2)
    assert to_folded().weight == to_folded().buffer == 1
    for t in range(STEPS):
        a = plain.step(t, cosine(t) if t < 100 else 0.1, weight_decay=5e-3, momentum=0.9)
        lr, wd = (cosine(t), 5e-3) if t < 100 else (float(folded.lr[t - 100]), 0.0)
        assert deviation(a, switched.step(t, lr, weight_decay=wd, momentum=0.9)) < 1e-12


def test_switch_back_to_weight_decay_with_renormalisation_on_the_way():
    plain, switched, state = Run(), Run(), FoldState()
    for t in range(100):
        a = plain.step(t, 0.1, weight_decay=2e-2, momentum=0.9)
        taken = advance(state, 0.1, weight_decay=2e-2, momentum=0.9)
        b = switched.step(t, taken.lr, weight_decay=0.0, momentum=0.9)
        assert deviation(a, b) < 2e-12
        switched.scale_statistics(taken.running_mean, taken.running_var)
        state = taken.state
        if t % 30 == 29:
            change = renormalisation([float(w.detach().norm()) for w in switched.weights])
            switched.renormalise(change, buffer=change.buffer)
            state = state.renormalised(change.exponent)
    assert state.exponent != 0
    switched.apply(to_weight_decay(state))
    for ours, theirs in ((switched.weights, plain.weights), (switched.buffers(), plain.buffers())):
        for x, y in zip(ours, theirs, strict=True):
            assert deviation(y.detach(), x.detach()) < 1e-12
    for t in range(100, STEPS):
        a = plain.step(t, 0.1, weight_decay=2e-2, momentum=0.9)
        assert deviation(a, switched.step(t, 0.1, weight_decay=2e-2, momentum=0.9)) < 2e-12
    assert deviation(plain.evaluate(), switched.evaluate()) < 1e-11


@pytest.mark.parametrize(("wd", "least"), [(5e-4, 1e-3), (1e-2, 0.1)])
def test_eval_mode_needs_the_running_statistics_rescaled(wd, least):
    folded = fold(0.1, wd, momentum=0.9, steps=300)
    plain, naive, exact = Run(), Run(), Run()
    state = FoldState()
    for t in range(300):
        plain.step(t, 0.1, weight_decay=wd, momentum=0.9)
        naive.step(t, float(folded.lr[t]), weight_decay=0.0, momentum=0.9)
        taken = advance(state, 0.1, weight_decay=wd, momentum=0.9)
        exact.step(t, taken.lr, weight_decay=0.0, momentum=0.9)
        exact.scale_statistics(taken.running_mean, taken.running_var)
        state = taken.state
    assert deviation(plain.evaluate(), exact.evaluate()) < 1e-10
    assert deviation(plain.evaluate(), naive.evaluate()) > least


def test_power_of_two_renormalisation_is_bit_identical_in_float32():
    plain, renormalised, state, other = (Run(dtype=torch.float32), Run(dtype=torch.float32), FoldState(), FoldState())
    for t in range(150):
        taken = advance(state, 0.1, weight_decay=2e-2, momentum=0.9)
        small = advance(other, 0.1, weight_decay=2e-2, momentum=0.9)
        assert small.lr == math.ldexp(taken.lr, -2 * other.exponent)
        a = plain.step(t, taken.lr, weight_decay=0.0, momentum=0.9)
        b = renormalised.step(t, small.lr, weight_decay=0.0, momentum=0.9)
        assert torch.equal(a, b)
        state, other = taken.state, small.state
        if t % 40 == 39:
            change = renormalisation(max(float(w.detach().norm()) for w in renormalised.weights))
            renormalised.renormalise(change, buffer=change.buffer)
            other = other.renormalised(change.exponent)
    assert other.exponent >= 2
    for a, b in zip(plain.weights, renormalised.weights, strict=True):
        assert torch.equal(a, b * 2.0**other.exponent)


@pytest.mark.slow
def test_float32_outlives_its_range_with_renormalisation():
    run, state = Run(dtype=torch.float32), FoldState()
    for t in range(2400):
        taken = advance(state, 0.1, weight_decay=2e-2, momentum=0.9)
        assert torch.isfinite(run.step(t, taken.lr, weight_decay=0.0, momentum=0.9)).all()
        state = taken.state
        if t % 100 == 99:
            change = renormalisation([float(w.detach().norm()) for w in run.weights])
            run.renormalise(change, buffer=change.buffer)
            state = state.renormalised(change.exponent)
    # P_t -> z1^-t / A with the printed 1/A = 0.6669442
    expected = 0.6669442 / float(decay_roots(0.1, 2e-2, momentum=0.9).z1) ** 2400
    assert math.exp(state.log_scale) == pytest.approx(expected, rel=1e-6)
    assert math.exp(2 * state.log_scale) > torch.finfo(torch.float32).max
    assert max(float(w.detach().norm()) for w in run.weights) < 2


@pytest.mark.slow
def test_norm_identities_on_the_network():
    run = Run()
    norm_sq, step_sq = [], []
    before = [w.detach().clone() for w in run.weights]
    norm_sq.append([float((w**2).sum()) for w in before])
    for t in range(3000):
        run.step(t, 0.1, weight_decay=5e-3, momentum=0.9)
        after = [w.detach().clone() for w in run.weights]
        step_sq.append([float(((b - a) ** 2).sum()) for a, b in zip(before, after, strict=True)])
        norm_sq.append([float((w**2).sum()) for w in after])
        before = after
    residual = norm_residual(norm_sq, step_sq, lr=0.1, weight_decay=5e-3, momentum=0.9)
    assert np.abs(residual).max() < 1e-12 < 1e-2 * np.max(norm_sq) / 0.1
    window = window_identity(norm_sq[1500:], step_sq[1500:], lr=0.1, weight_decay=5e-3, momentum=0.9)
    np.testing.assert_allclose(window.implied_step_sq, window.step_sq, rtol=1e-12)
    np.testing.assert_allclose(np.sqrt(window.step_sq / window.norm_sq), 0.02294, rtol=0.01)


@pytest.mark.parametrize("wrong", [1.0, None])
def test_renormalisation_multiplies_the_buffer(wrong):
    plain, renormalised, state = Run(), Run(), FoldState()
    worst = 0.0
    for t in range(150):
        a = plain.step(t, 0.1, weight_decay=2e-2, momentum=0.9)
        taken = advance(state, 0.1, weight_decay=2e-2, momentum=0.9)
        worst = max(worst, deviation(a, renormalised.step(t, taken.lr, weight_decay=0.0, momentum=0.9)))
        state = taken.state
        if t % 40 == 39:
            change = renormalisation([float(w.detach().norm()) for w in renormalised.weights])
            renormalised.renormalise(change, buffer=change.weight if wrong is None else wrong)
            state = state.renormalised(change.exponent)
    assert worst > 0.05


@pytest.mark.parametrize("root", ["larger", "smaller"])
@pytest.mark.parametrize("wd", [5e-4, 5e-3])
def test_the_power_schedule_is_exact_with_its_start_buffer_only(wd, root):
    power = power_schedule(0.1, wd, step=np.arange(STEPS), momentum=0.9, root=root)
    plain, free, bare = Run(), Run(), Run()
    for w in free.weights:
        free.opt.state[w]["momentum_buffer"] = power.start_buffer * w.detach().clone()
    worst = worst_bare = 0.0
    for t in range(STEPS):
        a = plain.step(t, 0.1, weight_decay=wd, momentum=0.9)
        worst = max(worst, deviation(a, free.step(t, float(power.lr[t]), weight_decay=0.0, momentum=0.9)))
        bare_logits = bare.step(t, float(power.lr[t]), weight_decay=0.0, momentum=0.9)
        worst_bare = max(worst_bare, deviation(a, bare_logits))
    assert worst < 5e-12
    assert worst_bare > 0.05
    if root == "smaller" and wd == 5e-4:
        assert power.lr[-1] == pytest.approx(1.5e17, rel=0.05)


def test_starting_at_the_fixed_point_gives_the_power_schedule():
    z1 = float(decay_roots(0.1, 5e-3, momentum=0.9).z1)
    state = FoldState(q=(1 / z1 - 1) / 0.1)
    power = power_schedule(0.1, 5e-3, step=np.arange(50), momentum=0.9)
    assert to_folded(state).buffer_from_weight == pytest.approx(power.start_buffer, rel=1e-12)
    for t in range(50):
        taken = advance(state, 0.1, weight_decay=5e-3, momentum=0.9)
        assert taken.lr == pytest.approx(power.lr[t], rel=1e-11)
        state = taken.state


def test_scale_is_a_dummy_parameter_without_gradient():
    steps = 500
    wd = [5e-3 * (1 + math.sin(t / 17)) for t in range(steps)]
    lr = [0.05 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]
    folded = fold(lr, wd, momentum=0.9)
    dummy = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([dummy], lr=0.1, momentum=0.9)
    for t in range(steps):
        optimizer.param_groups[0].update(lr=lr[t], weight_decay=wd[t])
        dummy.grad = torch.zeros_like(dummy)
        optimizer.step()
        assert float(dummy.detach()) == pytest.approx(math.exp(-folded.log_scale[t + 1]), rel=2e-14)


def test_against_exact_rational_arithmetic():
    rng = np.random.default_rng(0)
    lr, wd, momentum = rng.uniform(0, 0.3, 40), rng.uniform(0, 0.1, 40), rng.uniform(0.1, 0.8, 40)
    folded = fold(lr, wd, momentum=momentum)
    weight, buffer = Fraction(1), Fraction(0)
    for t in range(40):
        buffer = Fraction(momentum[t]) * buffer + Fraction(wd[t]) * weight
        after = weight - Fraction(lr[t]) * buffer
        assert folded.alpha[t] == pytest.approx(float(after / weight), rel=1e-14)
        assert folded.lr[t] == pytest.approx(float(Fraction(lr[t]) / (weight * after)), rel=1e-13)
        weight = after
        assert folded.log_scale[t + 1] == pytest.approx(-math.log(float(weight)), rel=1e-12)


def test_ratio_form_of_the_paper():
    lr = np.array([step_decay(t) for t in range(STEPS)])
    alpha = fold(lr, 5e-3, momentum=0.9).alpha
    assert alpha[0] == 1 - 0.1 * 5e-3
    expected = 1 - lr[1:] * 5e-3 + 0.9 * lr[1:] / lr[:-1] * (1 - 1 / alpha[:-1])
    np.testing.assert_allclose(alpha[1:], expected, rtol=1e-13)


def test_growth_and_overflow_of_the_published_setting():
    folded = fold(0.1, 5e-4, momentum=0.9, steps=95_000)
    assert folded.growth_per_step == pytest.approx(1.0010053006, abs=5e-11)
    assert folded.growth_per_epoch(391) == pytest.approx(1.4812334, abs=5e-8)
    assert folded.growth_per_epoch(390) == pytest.approx(1.4797, abs=5e-5)
    assert math.sqrt(folded.growth_per_epoch(391)) == pytest.approx(1.21706, abs=5e-6)
    assert folded.overflow["float32"] == 88_309
    assert folded.overflow["bfloat16"] == 88_305
    assert folded.overflow["float16"] == pytest.approx(11_040, abs=10)
    assert folded.overflow["float64"] is None
    lr_overflow = np.argmax(folded.log_lr > math.log(torch.finfo(torch.float32).max))
    assert lr_overflow == 90_600
    closed = constant_schedule(0.1, 5e-4, step=np.arange(95_000), momentum=0.9)
    np.testing.assert_allclose(folded.log_lr, closed.log_lr, atol=1e-11)
    np.testing.assert_allclose(folded.log_scale[:-1], closed.log_scale, atol=1e-11)


def test_growth_of_varying_and_of_oscillating_settings_is_that_of_the_last_step():
    cosine_fold = fold(cosine, 5e-3, momentum=0.9, steps=150)
    assert cosine_fold.growth_per_step == cosine_fold.alpha[-1] ** -2
    doomed = fold(0.1, 0.03, momentum=0.9, steps=100)
    assert doomed.growth_per_step == doomed.alpha[-1] ** -2


def test_sign_change_is_reported_with_step_and_threshold():
    assert fold(0.1, 0.03, momentum=0.9, steps=141).alpha.min() > 0
    with pytest.raises(EquilibriaError, match=r"at step 141; .*alpha > 0.*\(1-sqrt\(momentum\)\)\^2 = 0\.00263"):
        fold(0.1, 0.03, momentum=0.9, steps=200)
    with pytest.raises(EquilibriaError, match="alpha"):
        advance(FoldState(), 1.0, weight_decay=1.0)


def test_a_jump_of_lr_can_flip_the_weights_at_a_constant_product():
    lr = np.r_[np.full(100, 1e-3), 10.0]
    with pytest.raises(EquilibriaError, match=r"at step 100; .*alpha=-\d{3}"):
        fold(lr, 0.002 / lr, momentum=0.9)


def test_learning_rates_beyond_float64():
    folded = fold(0.1, 0.02, momentum=0.9, steps=30_000)
    assert np.isinf(folded.lr[-1]) and 700 < folded.log_lr[-1] < 2000
    assert np.isfinite(folded.log_lr).all()
    back = unfold(folded.log_lr, 0.02, momentum=0.9, log=True)
    np.testing.assert_allclose(back.lr, 0.1, rtol=1e-9)
    np.testing.assert_allclose(back.log_scale, folded.log_scale, rtol=1e-9)


def test_a_hundred_thousand_steps_are_quick():
    fold(0.1, 5e-4, momentum=0.9, steps=10)
    times = []
    for _ in range(5):
        start = time.process_time()
        fold(0.1, 5e-4, momentum=0.9, steps=100_000)
        times.append(time.process_time() - start)
    assert min(times) < 0.15


def test_schedule_objects_callables_and_arrays_agree():
    schedule = Cosine(0.1, steps=60)
    values = schedule.values(60)
    by_object = fold(schedule, 5e-3, momentum=0.9, steps=60)
    by_array = fold(values, 5e-3, momentum=0.9)
    by_call = fold(lambda t: float(values[t]), 5e-3, momentum=0.9, steps=60)
    assert np.array_equal(by_object.lr, by_array.lr) and np.array_equal(by_call.lr, by_array.lr)
    assert by_array.lr.shape == (60,) and by_array.log_scale.shape == by_array.q.shape == (61,)


settings_lists = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.one_of(st.just(0.0), st.floats(1e-4, 0.3)), min_size=n, max_size=n),
        st.lists(st.one_of(st.just(0.0), st.floats(1e-5, 0.05)), min_size=n, max_size=n),
        st.lists(st.one_of(st.just(0.0), st.floats(0.01, 0.9)), min_size=n, max_size=n),
    )
)


@settings(deadline=None, max_examples=100)
@given(settings_lists)
def test_unfold_inverts_fold(drawn):
    lr, wd, momentum = drawn
    folded = fold(lr, wd, momentum=momentum)
    back = unfold(folded.lr, wd, momentum=momentum)
    np.testing.assert_allclose(back.lr, lr, rtol=1e-11, atol=0)
    np.testing.assert_allclose(back.q, folded.q, rtol=1e-11, atol=1e-300)
    logs = unfold(folded.log_lr, wd, momentum=momentum, log=True)
    np.testing.assert_allclose(logs.lr, lr, rtol=1e-11, atol=0)


@settings(deadline=None, max_examples=60)
@given(settings_lists, st.floats(0.05, 20))
def test_scale_shift(drawn, k):
    """lr k² with wd/k² is the same training at k times the weights."""
    lr, wd, momentum = (np.array(values) for values in drawn)
    a, b = fold(lr, wd, momentum=momentum), fold(lr * k**2, wd / k**2, momentum=momentum)
    np.testing.assert_allclose(b.lr, a.lr * k**2, rtol=1e-11)
    np.testing.assert_allclose(b.log_scale, a.log_scale, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(b.q, a.q / k**2, rtol=1e-11, atol=1e-300)


@settings(deadline=None, max_examples=60)
@given(settings_lists, st.floats(1.01, 2.0))
def test_more_decay_grows_faster_and_the_scale_never_shrinks(drawn, factor):
    lr, wd, momentum = (np.array(values) for values in drawn)
    less, more = fold(lr, wd, momentum=momentum), fold(lr, wd * factor, momentum=momentum)
    assert (np.diff(less.log_scale) >= 0).all()
    assert (more.log_scale >= less.log_scale).all()
    assert (less.lr >= lr * (1 - 1e-12)).all()


@settings(deadline=None, max_examples=60)
@given(st.floats(-5, 20), st.floats(-3, 3), st.integers(-10, 10), st.floats(-2, 2), st.floats(-2, 2))
def test_switching_there_and_back_changes_nothing(log_scale, q, exponent, w, buffer):
    state = FoldState(log_scale, q, exponent)
    there, back = to_folded(state), to_weight_decay(state)
    w1 = there.weight * w
    buffer1 = there.buffer * buffer + there.buffer_from_weight * w1
    w2 = back.weight * w1
    buffer2 = back.buffer * buffer1 + back.buffer_from_weight * w2
    assert w2 == pytest.approx(w, rel=1e-12, abs=1e-300)
    assert buffer2 == pytest.approx(buffer, rel=1e-9, abs=1e-9)
    assert there.running_var * back.running_var == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("switch", [to_folded, to_weight_decay])
@pytest.mark.parametrize("sign", [1, -1])
def test_switching_raises_just_before_the_squared_scale_leaves_float64(switch, sign):
    """Every factor that is handed out is a normal number; nearly all of the range of float64 is allowed."""
    largest = math.log(sys.float_info.max) / 2
    for log_scale in np.arange(0.9 * largest, 1.1 * largest, 0.5):
        state = FoldState(log_scale=sign * log_scale, q=1.0)
        try:
            factors = dataclasses.asdict(change := switch(state))
        except EquilibriaError:
            assert log_scale > 0.98 * largest
        else:
            sizes = np.abs([*factors.values(), change.running_mean, change.running_var])
            assert (np.isfinite(sizes) & (sizes >= sys.float_info.min)).all()


@given(st.floats(1e-30, 1e30))
def test_renormalisation_exponent_is_exact(norm):
    change = renormalisation(norm)
    assert 1 <= norm * change.weight < 2
    assert change.weight * change.buffer == 1
    assert change.lr == change.running_var == change.weight**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1, "weight_decay": 0.0, "steps": 3}, "lr=-0.1"),
        ({"lr": float("nan"), "weight_decay": 0.0, "steps": 3}, "lr=nan"),
        ({"lr": [0.1, float("inf")], "weight_decay": 0.0}, "lr=inf"),
        ({"lr": "fast", "weight_decay": 0.0, "steps": 3}, "lr='fast'"),
        ({"lr": 0.1, "weight_decay": -1.0, "steps": 3}, "weight_decay=-1"),
        ({"lr": 0.1, "weight_decay": 0.0, "momentum": 1.0, "steps": 3}, "momentum=1"),
        ({"lr": lambda t: np.ones(2), "weight_decay": 0.0, "steps": 3}, "returns arrays"),
        ({"lr": lambda t: None, "weight_decay": 0.0, "steps": 3}, "lr"),
        ({"lr": 0.1, "weight_decay": 0.0}, "steps=None"),
        ({"lr": 0.1, "weight_decay": 0.0, "steps": 0}, "steps=0"),
        ({"lr": [0.1, 0.1], "weight_decay": 0.0, "steps": 3}, "steps=3"),
        ({"lr": [0.1, 0.1], "weight_decay": [0.0] * 3}, "shape"),
        ({"lr": [], "weight_decay": 0.0}, "at least 1"),
        ({"lr": [[0.1], [0.1, 0.2]], "weight_decay": 0.0}, "ragged"),
        ({"lr": np.ones((2, 2)), "weight_decay": 0.0}, "one-dimensional"),
        ({"lr": 0.1, "weight_decay": 0.0, "steps": 3, "dampening": 0.1}, "dampening=0.1"),
        ({"lr": 0.1, "weight_decay": 0.0, "steps": 3, "decoupled": True}, "decoupled=True"),
        ({"lr": 0.1, "weight_decay": 0.0, "steps": 3, "optimizer": "adamw"}, "optimizer='adamw'"),
    ],
)
def test_fold_raises(arguments, message):
    with pytest.raises(EquilibriaError, match=message) as caught:
        fold(**arguments)
    assert caught.value.argument in arguments or caught.value.argument == "steps"


@pytest.mark.parametrize(
    "call",
    [
        lambda: unfold([math.nan], 0.1),
        lambda: unfold([math.inf], 0.1, log=True),
        lambda: unfold(["x"], 0.1, log=True),
        lambda: unfold([800.0], 0.0, log=True),
        lambda: advance(FoldState(), math.nan, weight_decay=0.1),
        lambda: advance(FoldState(), 0.1, weight_decay=0.1, momentum=1.0),
        lambda: FoldState(log_scale=math.nan),
        lambda: FoldState(q=math.inf),
        lambda: FoldState().renormalised(math.nan),
        lambda: FoldState().renormalised(0.5),
        lambda: to_weight_decay(FoldState(log_scale=1000.0)),
        lambda: renormalisation(0.0),
        lambda: renormalisation([]),
        lambda: renormalisation([1.0, math.inf]),
        lambda: fold(0.1, 0.0, steps=3).state(4),
        lambda: fold(0.1, 0.0, steps=3).growth_per_epoch(0),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(EquilibriaError, match="got "):
        call()


def test_overflow_counts_the_learning_rate_as_well_as_the_weights():
    """At lr 1e30 the folded lr leaves float32 while P^2 is still small."""
    folded = fold(1e30, 1e-33, momentum=0.0, steps=20_000)
    first = next(t for t, log_lr in enumerate(folded.log_lr) if log_lr > math.log(3.4028235e38))
    assert folded.overflow["float32"] == first
    assert 2 * folded.log_scale[first] < math.log(3.4e38)
