"""Effective learning rate, schedulers and the edge of stability against torch.optim and brute-force iteration."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.hamiltonian import orbit, period_steps
from equilibria.theory.stability import (
    ScalarRmsprop,
    SchedulerParameters,
    crossing_time,
    descent_bound,
    edge_of_stability,
    effective_lr,
    eos_delay,
    gwsi_moment_step,
    gwsi_parameters,
    gwsi_step,
    norm_step,
    projected_step,
    quasi_rmsprop_parameters,
    ratio_crossings,
    raw_threshold,
    rmsprop_scheduler_step,
    scalar_rmsprop_step,
    secant_sharpness,
    stability_ratio,
    stationarity_guarantee,
    step_angle,
    two_step_mean,
)


def rotation(dim, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def three_d_loss(w):
    """The paper's example, torch."""
    x, y, _ = w
    return 2 - (x + y) / torch.sqrt(x * x - x * y + y * y)


def three_d_gradient(w):
    x, y, _ = w
    q = x * x - x * y + y * y
    pull = (x + y) / (2 * q)
    return np.array([pull * (2 * x - y) - 1, pull * (2 * y - x) - 1, 0 * x]) / np.sqrt(q)


def tanh_loss(w, seed=3):
    """A scale-invariant loss without symmetry in 7 dimensions, torch."""
    data = torch.from_numpy(np.random.default_rng(seed).standard_normal((5, 7)))
    target = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64)
    return ((torch.tanh(data @ (w / w.norm())) - target) ** 2).mean()


def gradient_at(loss, point):
    leaf = torch.tensor(np.asarray(point), dtype=torch.float64, requires_grad=True)
    value = loss(leaf)
    value.backward()
    return float(value.detach()), leaf.grad.numpy()


def hessian_at(loss, point):
    return torch.autograd.functional.hessian(loss, torch.tensor(np.asarray(point), dtype=torch.float64)).numpy()


def rotated_run(intrinsic, steps, *, z0, ratio, push, seed=0, dtype=np.float64, lr=0.5):
    """GD with weight decay on the rotated 3-D loss. Rows: displacement, z, |w|^2, in the loss's own coordinates.

    Without the rotation the displacement underflows to exactly 0 and the edge of stability never begins.
    """
    turn = rotation(3, seed).astype(dtype)
    radius = math.sqrt((1 - z0**2) / 2)
    start = np.array([radius + push, radius - push, z0])
    norm_sq = lr * 3 / (1 - z0**2) / ((1 - intrinsic) * ratio)
    w = (turn.T @ (start / np.linalg.norm(start) * math.sqrt(norm_sq))).astype(dtype)
    c, rate, path = dtype(1 - intrinsic), dtype(lr), np.empty((steps, 3))
    for t in range(steps):
        v = turn @ w
        norm = np.sqrt(v @ v)
        path[t] = (v[0] - v[1]) / (math.sqrt(2) * norm), v[2] / norm, norm * norm
        w = c * w - rate * (turn.T @ three_d_gradient(v))
    return path


# --- projected gradient descent -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "dim", "lr", "wd"), [(three_d_loss, 3, 0.3, 0.05), (tanh_loss, 7, 0.5, 0.1), (tanh_loss, 7, 2.0, 0.4)]
)
def test_torch_sgd_is_projected_descent(loss, dim, lr, wd):
    """torch.optim.SGD step by step: direction, norm and angle all follow the exact laws."""
    w = torch.tensor(np.random.default_rng(1).uniform(0.2, 1.5, dim), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=lr, weight_decay=wd)
    for _ in range(60):
        before = w.detach().numpy().copy()
        norm = np.linalg.norm(before)
        theta = before / norm
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
        after = w.detach().numpy()
        unit_gradient = gradient_at(loss, theta)[1]
        eta = effective_lr(lr, wd, norm_sq=norm**2)
        direction = after / np.linalg.norm(after)
        assert projected_step(theta, unit_gradient, effective_lr=eta) == pytest.approx(direction, abs=2e-15)
        predicted = norm_step(norm**2, unit_gradient @ unit_gradient, lr=lr, weight_decay=wd)
        assert float(predicted) == pytest.approx(after @ after, rel=1e-13)
        angle = 2 * math.asin(min(1.0, np.linalg.norm(direction - theta) / 2))
        assert float(step_angle(norm, np.linalg.norm(after), lr=lr, weight_decay=wd)) == pytest.approx(angle, abs=1e-7)


def test_norm_law_holds_per_block():
    """A loss invariant in u and v separately: each block obeys the recursion with its own gradient."""
    matrix = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 3)))
    u = torch.tensor([1.0, 0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([0.4, -1.2, 0.9], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([u, v], lr=0.2, weight_decay=0.3)
    for _ in range(20):
        norms = np.array([float(p.detach() @ p.detach()) for p in (u, v)])
        optimizer.zero_grad()
        (u @ matrix @ v / (u.norm() * v.norm())).backward()
        unit = np.array([float(p.grad @ p.grad) for p in (u, v)]) * norms
        predicted = norm_step(norms, unit, lr=0.2, weight_decay=0.3)
        optimizer.step()
        assert predicted == pytest.approx([float(p.detach() @ p.detach()) for p in (u, v)], rel=1e-14)


def test_batched_projected_step():
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((5, 4))
    theta /= np.linalg.norm(theta, axis=1, keepdims=True)
    gradient, eta = rng.standard_normal((5, 4)), rng.uniform(0.1, 1, 5)
    batch = projected_step(theta, gradient, effective_lr=eta)
    for i in range(5):
        assert batch[i] == pytest.approx(projected_step(theta[i], gradient[i], effective_lr=eta[i]), abs=1e-16)


def test_small_angle_keeps_its_digits():
    """A stationary norm at lr*wd = 1e-9: sqrt(2e-9) to 9 digits (plain arccos would keep about 7)."""
    angle = float(step_angle(1.0, 1.0, lr=1e-3, weight_decay=1e-6))
    assert angle == pytest.approx(math.sqrt(2e-9) * (1 + 1e-9 / 12), rel=1e-7)
    assert float(edge_of_stability(1e-3, 1e-6, sharpness=1.0).angular_step) == pytest.approx(math.sqrt(2e-9), rel=1e-9)


def test_raw_threshold_is_where_the_multiplier_is_minus_one():
    """At raw sharpness 2c/lr the step of the direction, linearised by differences, has eigenvalue exactly -1."""
    lr, wd = 0.5, 0.3
    phi = np.array([0.6, 0.6, math.sqrt(1 - 0.72)])
    unit_hessian = hessian_at(three_d_loss, phi)
    top = np.linalg.eigvalsh(unit_hessian)[-1]
    assert top == pytest.approx(6 / 0.72, rel=1e-12)
    norm_sq = top / float(raw_threshold(lr, wd))
    assert np.linalg.eigvalsh(hessian_at(three_d_loss, phi * math.sqrt(norm_sq)))[-1] == pytest.approx(top / norm_sq)
    assert float(stability_ratio(effective_lr(lr, wd, norm_sq=norm_sq), top)) == pytest.approx(1, rel=1e-14)

    def direction_step(theta):
        w = theta * math.sqrt(norm_sq)
        moved = (1 - lr * wd) * w - lr * three_d_gradient(w)
        return moved / np.linalg.norm(moved)

    v1 = np.array([1, -1, 0]) / math.sqrt(2)
    slope = (direction_step(phi + 1e-6 * v1) - direction_step(phi - 1e-6 * v1)) / 2e-6
    assert slope @ v1 == pytest.approx(-1, abs=1e-9)


positive_floats = st.floats(1e-3, 1e3)


@settings(deadline=None, max_examples=100)
@given(
    lr=st.floats(1e-3, 1.0),
    wd=st.floats(1e-4, 0.9),
    norm_sq=positive_floats,
    sharpness=positive_floats,
    grad_sq=positive_floats,
    k=st.floats(0.1, 10),
)
def test_rescaling_the_weight(lr, wd, norm_sq, sharpness, grad_sq, k):
    """w -> k w, lr -> k^2 lr, wd -> wd/k^2 changes nothing on the sphere."""
    there = {"lr": k**2 * lr, "weight_decay": wd / k**2}
    eta, moved = effective_lr(lr, wd, norm_sq=norm_sq), effective_lr(k**2 * lr, wd / k**2, norm_sq=k**2 * norm_sq)
    assert moved == pytest.approx(eta, rel=1e-9)
    assert stability_ratio(moved, sharpness) == pytest.approx(stability_ratio(eta, sharpness), rel=1e-9)
    after = norm_step(norm_sq, grad_sq, lr=lr, weight_decay=wd)
    assert norm_step(k**2 * norm_sq, grad_sq, **there) == pytest.approx(k**2 * after, rel=1e-9)
    here, far = edge_of_stability(lr, wd, sharpness=sharpness), edge_of_stability(**there, sharpness=sharpness)
    assert far.loss_above_minimum == pytest.approx(here.loss_above_minimum, rel=1e-9)
    assert far.norm_sq == pytest.approx(k**2 * here.norm_sq, rel=1e-9)
    assert raw_threshold(**there) == pytest.approx(raw_threshold(lr, wd) / k**2, rel=1e-9)
    # The norm recursion and the scheduler are the same law.
    assert effective_lr(lr, wd, norm_sq=after) == pytest.approx(gwsi_step(eta, grad_sq, intrinsic_lr=lr * wd), rel=1e-9)


# --- schedulers ---------------------------------------------------------------------------------------------------


def test_gwsi_lock_step():
    """Weights, perfect square and Definition B.6, all fed the gradients of one run through the edge of stability."""
    lr, intrinsic = 0.5, 2e-3
    turn, c = rotation(3), 1 - intrinsic
    w = turn.T @ np.array([0.3, 1.3, 1.2])
    eta = float(effective_lr(lr, intrinsic / lr, norm_sq=w @ w))
    parameters = gwsi_parameters(intrinsic)
    moment = c**2 * (w @ w) ** 2 / lr**2
    worst = 0.0
    for _ in range(2000):
        gradient = turn.T @ three_d_gradient(turn @ w)
        unit_grad_sq = float(gradient @ gradient * (w @ w))
        w = c * w - lr * gradient
        eta = float(gwsi_step(eta, unit_grad_sq, intrinsic_lr=intrinsic))
        moment = float(gwsi_moment_step(moment, unit_grad_sq, parameters=parameters))
        exact = lr / (c * float(w @ w))
        worst = max(worst, abs(eta / exact - 1), abs(moment**-0.5 / exact - 1))
    assert worst < 1e-13


def test_gwsi_parameter_expansions():
    """base_lr = sqrt(2e)(1 + 5/4 e + 55/32 e^2 + ...): 1.2517e-3 above sqrt(2e) at e = 1e-3; in exact arithmetic."""
    with localcontext() as context:
        context.prec = 40
        decay = (1 - Decimal("0.001")) ** 4
        excess = ((1 / decay - 1) / 2).sqrt() / Decimal("0.002").sqrt() - 1
    parameters = gwsi_parameters(1e-3)
    assert parameters.base_lr / math.sqrt(2e-3) - 1 == pytest.approx(float(excess), abs=1e-15)
    assert parameters.base_lr / math.sqrt(2e-3) - 1 == pytest.approx(1.2517e-3, abs=5e-8)
    assert parameters.decay == pytest.approx(float(decay), rel=1e-15)
    assert parameters.decay == pytest.approx(1 - 4e-3 + 6e-6, abs=5e-9)


@pytest.mark.parametrize("normalised", [0.2, 1.0, 3.0])
def test_quasi_rmsprop_residual(normalised):
    """Exact minus imitated moment over (1-decay)^2 tends to (6v - 16G + 4G^2/v)/16."""
    moment, intrinsic = 1.7, 1e-5
    parameters = quasi_rmsprop_parameters(intrinsic)
    grad_sq = normalised * parameters.base_lr**2
    exact = gwsi_step(moment**-0.5, grad_sq, intrinsic_lr=intrinsic) ** -2
    gap = (exact - rmsprop_scheduler_step(moment, grad_sq, parameters=parameters)) / (1 - parameters.decay) ** 2
    expected = (6 * moment - 16 * normalised + 4 * normalised**2 / moment) / 16
    assert float(gap) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("intrinsic", [1e-2, 1e-3, 1e-4])
def test_quasi_rmsprop_imitates_the_exact_scheduler(intrinsic):
    """A common gradient stream over flow time 3: the moments differ by a relative O(lr*wd)."""
    parameters = quasi_rmsprop_parameters(intrinsic)
    eta, moment, worst = 1.0, 1.0, 0.0
    for t in range(int(3 / intrinsic)):
        grad_sq = parameters.base_lr**2 * (1 + math.cos(t * math.sqrt(8 * intrinsic)))
        eta = float(gwsi_step(eta, grad_sq, intrinsic_lr=intrinsic))
        moment = float(rmsprop_scheduler_step(moment, grad_sq, parameters=parameters))
        worst = max(worst, abs(moment * eta**2 - 1))
    assert 0.9 * intrinsic < worst < 1.3 * intrinsic


def test_scalar_rmsprop_is_descent_with_the_scheduler():
    parameters = SchedulerParameters(base_lr=0.05, decay=1 - 2 * 0.05**2)
    state = ScalarRmsprop(np.array([0.1, 1.5]), np.array(0.02))
    point, moment = state.point.copy(), 0.02 / 0.05**2
    for _ in range(500):
        x, y = state.point
        state = scalar_rmsprop_step(state, [(1 + y * y) * x, y * x * x], parameters=parameters)
        gradient = np.array([(1 + point[1] ** 2) * point[0], point[1] * point[0] ** 2])
        point = point - gradient / math.sqrt(moment)
        moment = float(rmsprop_scheduler_step(moment, gradient @ gradient, parameters=parameters))
    assert state.point == pytest.approx(point, rel=1e-9)
    assert float(state.second_moment) == pytest.approx(moment * 0.05**2, rel=1e-9)


# --- stable regime ------------------------------------------------------------------------------------------------


def test_descent_lemma():
    """Random points and learning rates; the sharpness is the largest over a grid of the unprojected segment."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        theta = rng.standard_normal(7)
        theta /= np.linalg.norm(theta)
        loss, gradient = gradient_at(tanh_loss, theta)
        eta = 10 ** rng.uniform(-2, 0.7)
        segment = [hessian_at(tanh_loss, theta - a * gradient) for a in np.linspace(0, eta, 7)]
        top = max(np.linalg.eigvalsh(h)[-1] for h in segment)
        after = gradient_at(tanh_loss, projected_step(theta, gradient, effective_lr=eta))[0]
        bound = descent_bound(loss, gradient @ gradient, effective_lr=eta, max_sharpness=top)
        assert after <= float(bound) + 1e-9


def test_descent_lemma_is_sharp_along_the_top_eigenvector():
    phi, v1 = np.array([0.6, 0.6, math.sqrt(0.28)]), np.array([1, -1, 0]) / math.sqrt(2)
    theta = phi + 1e-4 * v1
    theta /= np.linalg.norm(theta)
    gradient = three_d_gradient(theta)
    loss = gradient_at(three_d_loss, theta)[0]
    after = gradient_at(three_d_loss, projected_step(theta, gradient, effective_lr=0.2))[0]
    bound = float(descent_bound(loss, gradient @ gradient, effective_lr=0.2, max_sharpness=6 / 0.72))
    assert after == pytest.approx(bound, rel=1e-4)
    assert loss > 2 * after


def rayleigh_hessian(matrix, theta):
    pull, value = matrix @ theta, theta @ matrix @ theta
    cross = np.outer(pull, theta)
    return matrix - 2 * (cross + cross.T) - value * np.eye(len(theta)) + 4 * value * np.outer(theta, theta)


def test_stationarity_guarantee():
    """Half the Rayleigh quotient: within the promised steps both bounds hold at one of them."""
    rng = np.random.default_rng(0)
    half = rng.standard_normal((6, 6))
    matrix = half @ half.T
    samples = rng.standard_normal((2000, 6))
    samples /= np.linalg.norm(samples, axis=1, keepdims=True)
    smoothness = max(np.abs(np.linalg.eigvalsh(rayleigh_hessian(matrix, t))).max() for t in samples)
    lr, wd = 0.01, 0.5
    for seed in range(5):
        direction = np.random.default_rng(seed).standard_normal(6)
        norm_sq = 3 * math.pi**2 * smoothness * lr
        w = direction / np.linalg.norm(direction) * math.sqrt(norm_sq)
        promise = stationarity_guarantee(lr, wd, norm_sq=norm_sq, smoothness=smoothness)
        met = False
        for _ in range(promise.steps + 1):
            size = w @ w
            gradient = matrix @ w / size - (w @ matrix @ w) * w / size**2
            rate = float(effective_lr(lr, wd, norm_sq=size))
            met = met or (gradient @ gradient * size <= promise.unit_grad_sq and rate <= promise.effective_lr)
            w = (1 - lr * wd) * w - lr * gradient
        assert met
    assert promise.steps == math.ceil(math.log(3) / (2 * lr * wd))
    assert promise.unit_grad_sq == pytest.approx(8 * math.pi**4 * smoothness**2 * lr * wd)
    assert promise.effective_lr == pytest.approx(2 / (math.pi**2 * smoothness * (1 - lr * wd)))
    # Equivalent to |w|^2 >= pi^2 rho lr / 2.
    assert float(effective_lr(lr, wd, norm_sq=math.pi**2 * smoothness * lr / 2)) == pytest.approx(promise.effective_lr)


# --- entering the edge of stability -------------------------------------------------------------------------------

# dtype, lr*wd, crossing simulated and predicted, delay simulated and predicted, greatest R, peak of h/sqrt(2 lr wd).
# Between rotations the first peak scatters from 2.5 to 3.2: the burst lasts only a few steps at lr*wd = 0.01.
ENTRY = [
    ("float64", 1e-2, 35, 34.5, 46, 41.3, 2.47, 2.87),
    ("float64", 1e-3, 347, 346.4, 136, 128.5, 1.305, 3.00),
    ("float32", 1e-2, 35, 34.5, 28, 25.2, 1.615, 1.84),
    ("float32", 1e-3, 347, 346.4, 82, 76.4, 1.173, 1.95),
]


@pytest.mark.parametrize(("dtype", "intrinsic", "crossed", "crossing", "burst", "delay", "top", "peak"), ENTRY)
def test_entry_table(dtype, intrinsic, crossed, crossing, burst, delay, top, peak):
    """Start at R = 1/2. Rounding noise decides the exact step of the burst, hence the median of five rotations."""
    delays, peaks, tops = [], [], []
    for seed in range(5):
        run = rotated_run(
            intrinsic, crossed + 2 * burst, z0=0.6, ratio=0.5, push=0.01, seed=seed, dtype=getattr(np, dtype)
        )
        h, z, norm_sq = run.T
        ratio = stability_ratio(0.5 / ((1 - intrinsic) * norm_sq), 6 / (1 - z**2))
        first = int(np.argmax(ratio >= 1))
        assert first == crossed
        predicted = crossing_time(0.5 / ((1 - intrinsic) * norm_sq[0]), 6 / 0.64, intrinsic_lr=intrinsic)
        assert float(predicted) == pytest.approx(crossing, abs=0.06)
        delays.append(int(np.argmax(np.abs(h[first:]) > math.sqrt(intrinsic / 2))))
        peaks.append(np.abs(h[first:]).max() / math.sqrt(2 * intrinsic))
        tops.append(ratio.max())
    predicted = float(eos_delay(intrinsic, dtype=dtype))
    assert predicted == pytest.approx(delay, abs=0.25)
    assert np.median(delays) == pytest.approx(burst, rel=0.06)
    assert 1 < np.median(delays) / predicted < 1.16
    assert np.median(tops) == pytest.approx(top, rel=0.08)
    assert np.median(tops) == pytest.approx(math.exp(2 * intrinsic * np.median(delays)), rel=0.03)
    assert np.median(peaks) == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize("intrinsic", [1e-3, 1e-4, 1e-5])
def test_delay_against_the_linear_growth(intrinsic):
    """|h| is multiplied by 2R - 1 per step with R = c^(-2s): the sum of logarithms reaches the threshold."""
    floor = 1e-12
    s = np.arange(1, int(100 / math.sqrt(intrinsic)))
    growth = np.cumsum(np.log(2 * np.exp(-2 * s * math.log1p(-intrinsic)) - 1))
    reached = int(np.argmax(floor * np.exp(np.minimum(growth, 600)) > math.sqrt(intrinsic / 2))) + 1
    predicted = float(eos_delay(intrinsic, displacement=floor))
    # The first correction is of the relative order of the overshoot, 2 lr wd s.
    assert 0 < reached / predicted - 1 < 2 * intrinsic * predicted


def test_delay_is_zero_when_visible():
    assert float(eos_delay(1e-3, displacement=0.5)) == 0


def test_crossing_time_shifts_with_its_start():
    """Growing without gradient from any later step gives the same crossing."""
    eta, intrinsic = 0.01, 3e-3
    later = eta / (1 - intrinsic) ** (2 * 40)
    expected = float(crossing_time(eta, 7.0, intrinsic_lr=intrinsic))
    assert float(crossing_time(later, 7.0, intrinsic_lr=intrinsic, start=40)) == pytest.approx(expected, rel=1e-12)
    assert float(crossing_time(1.0, 7.0, intrinsic_lr=intrinsic)) < 0


# --- at the edge of stability -------------------------------------------------------------------------------------


def settled_run(intrinsic=1e-3, steps=6000):
    return rotated_run(intrinsic, steps, z0=0.0, ratio=1.0, push=0.5 * math.sqrt(intrinsic / 2))


def test_observables():
    """After the oscillation has damped out, at g = 0; leading order, so compare to a few lr*wd."""
    intrinsic = 1e-3
    h, _, norm_sq = settled_run(intrinsic)[-2000:].T
    state = edge_of_stability(0.5, intrinsic / 0.5, sharpness=6.0)
    directions = np.column_stack(
        [np.sqrt((1 - h**2) / 2) + h / math.sqrt(2), np.sqrt((1 - h**2) / 2) - h / math.sqrt(2), 0 * h]
    )
    gradients = np.array([three_d_gradient(t) for t in directions])
    losses = [float(three_d_loss(torch.from_numpy(t))) for t in directions[:10]]
    assert np.mean(h**2) == pytest.approx(float(state.displacement_sq), rel=1e-6)  # sin^2 = lr*wd/2 is exact here
    assert np.mean(losses) == pytest.approx(float(state.loss_above_minimum), rel=5 * intrinsic)
    assert np.mean(gradients**2) * 3 == pytest.approx(float(state.unit_grad_sq), rel=10 * intrinsic)
    assert norm_sq.mean() == pytest.approx(float(state.norm_sq), rel=5 * intrinsic)
    assert float(stability_ratio(effective_lr(0.5, intrinsic / 0.5, norm_sq=state.norm_sq), 6.0)) == pytest.approx(
        1, rel=1e-14
    )
    turn = np.arccos(np.clip((directions[1:] * directions[:-1]).sum(1), -1, 1))
    assert turn.mean() == pytest.approx(float(state.angular_step), rel=1e-6)
    assert float(state.period) == pytest.approx(float(period_steps(intrinsic)), rel=1e-14)


def ratios_at_theta(path, intrinsic):
    """Stability ratio with the sharpness taken at theta itself, which brings in the period-2 component."""
    h, z, norm_sq = path.T
    side = np.sqrt((1 - z**2 - h**2) / 2)
    points = np.column_stack([side + h / math.sqrt(2), side - h / math.sqrt(2), z])
    top = np.array([np.linalg.eigvalsh(hessian_at(three_d_loss, point))[-1] for point in points])
    return stability_ratio(0.5 / ((1 - intrinsic) * norm_sq), top)


def test_crossings_of_a_real_run():
    """Periods from the detector lie between the small-amplitude limit and the orbit of the starting energy."""
    intrinsic = 1e-4
    path = rotated_run(intrinsic, 2500, z0=0.0, ratio=1.0, push=0.02 * math.sqrt(intrinsic / 2))
    h, _, norm_sq = path.T
    ratio = stability_ratio(0.5 / ((1 - intrinsic) * norm_sq), 6.0)
    periods = np.diff(ratio_crossings(ratio).downward)
    small = float(period_steps(intrinsic))
    eta = math.sqrt(2 * intrinsic)
    start = np.abs(h[0]) / eta
    excess = 4 * start**2 - 2 * math.log(start) - (1 + math.log(4))
    longest = float(orbit(excess).period) / eta
    assert len(periods) >= 5
    assert np.all(np.diff(periods) <= 1)
    assert small - 4 < periods[-1] < periods[0] < longest + 4
    assert periods[0] > 1.15 * small


def test_period_two_component_is_removed():
    rng = np.random.default_rng(0)
    steps = np.arange(1200)
    smooth = 1 + 0.03 * np.sin(2 * np.pi * steps / 200)
    noisy = smooth + 0.04 * (-1.0) ** steps + 1e-4 * rng.standard_normal(len(steps))
    raw = np.flatnonzero((noisy[:-1] >= 1) & (noisy[1:] < 1))
    assert np.median(np.diff(raw)) == 2  # what the naive detector sees
    found = ratio_crossings(noisy)
    assert found.downward == pytest.approx(np.arange(100, 1200, 200), abs=3)
    assert found.upward == pytest.approx(np.arange(200, 1200, 200), abs=3)


def test_two_step_mean_of_an_asymmetric_valley():
    """In a lop-sided valley the sharpness at theta alternates; its two-step mean is steady."""
    intrinsic = 1e-3
    angle, log_eta, ratio = math.sqrt(intrinsic / 2), math.log(2.0), []
    for _ in range(8000):
        slope, curvature = angle + angle**2, 1 + 2 * angle
        ratio.append(math.exp(log_eta) * curvature / 2)
        push = math.exp(log_eta) * slope
        angle, log_eta = angle - math.atan(push), log_eta - 2 * math.log1p(-intrinsic) - math.log1p(push * push)
    tail = np.array(ratio[-100:])
    assert tail.std() > 0.03
    assert two_step_mean(tail).std() < 1e-3 * tail.std()


def test_crossing_dates_and_hysteresis():
    series = np.array([0.9, 0.9, 1.0004, 0.9, 0.9, 1.1, 1.1, 1.1, 0.9, 0.9, 0.9])
    found = ratio_crossings(series)
    mean = two_step_mean(series)
    assert found.upward.tolist() == [6]
    assert mean[5] > 1 >= mean[4]
    assert found.downward.tolist() == [9]
    assert ratio_crossings(series, band=0.2).upward.size == 0
    # A slow ramp is dated to the level, not to the edge of the band that confirms it.
    ramp = np.concatenate([np.linspace(0.9, 1.1, 201), np.linspace(1.1, 0.9, 201)])
    slow = ratio_crossings(ramp, band=0.02)
    assert slow.upward == pytest.approx([101], abs=1)
    assert slow.downward == pytest.approx([302], abs=1)
    assert ratio_crossings(np.full(5, 1.0)).downward.size == 0


def test_secant_estimates_sharpness_only_at_the_edge():
    intrinsic = 1e-3
    path = settled_run(intrinsic, 3000)
    h, z, _ = path.T
    side = np.sqrt((1 - z**2 - h**2) / 2)
    theta = np.column_stack([side + h / math.sqrt(2), side - h / math.sqrt(2), z])
    gradient = np.array([three_d_gradient(t) for t in theta])
    estimate = secant_sharpness(theta[:-1], theta[1:], grad=gradient[:-1], next_grad=gradient[1:])
    assert estimate.shape == (2999,)
    assert np.median(np.abs(estimate / 6 - 1)) < 0.03
    ratio = ratios_at_theta(path[-20:], intrinsic)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    # A step along a flat direction of a quadratic says nothing about the top eigenvalue.
    flat = secant_sharpness([0.0, 0.0], [0.0, 1.0], grad=[0.0, 0.0], next_grad=[0.0, 0.1])
    assert float(flat) == pytest.approx(0.1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), dim=st.integers(1, 6))
def test_secant_is_a_rayleigh_quotient_on_quadratics(seed, dim):
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((dim, dim))
    hessian = half @ half.T
    a, b = rng.standard_normal((2, dim))
    spectrum = np.linalg.eigvalsh(hessian)
    estimate = float(secant_sharpness(a, b, grad=hessian @ a, next_grad=hessian @ b))
    assert spectrum[0] - 1e-9 <= estimate <= spectrum[-1] * (1 + 1e-9) + 1e-9


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: effective_lr(-0.1, 0.1, norm_sq=1.0),
        lambda: effective_lr(0.1, -0.1, norm_sq=1.0),
        lambda: effective_lr(2.0, 0.5, norm_sq=1.0),
        lambda: effective_lr(0.1, 0.1, norm_sq=[1.0, 0.0]),
        lambda: effective_lr(math.nan, 0.1, norm_sq=1.0),
        lambda: effective_lr("fast", 0.1, norm_sq=1.0),
        lambda: effective_lr(None, 0.1, norm_sq=1.0),
        lambda: effective_lr(1j, 0.1, norm_sq=1.0),
        lambda: projected_step([1.0, 0.0], [1.0, 0.0], effective_lr=1.0),
        lambda: norm_step(1.0, -1.0, lr=0.1, weight_decay=0.1),
        lambda: step_angle(1.0, 0.5, lr=0.1, weight_decay=0.1),
        lambda: stability_ratio(1.0, -1.0),
        lambda: raw_threshold(math.inf, 0.0),
        lambda: gwsi_step(1.0, 1.0, intrinsic_lr=1.0),
        lambda: gwsi_parameters(0.0),
        lambda: quasi_rmsprop_parameters(0.25),
        lambda: gwsi_moment_step(0.0, 1.0, parameters=gwsi_parameters(0.1)),
        lambda: rmsprop_scheduler_step(1.0, math.nan, parameters=gwsi_parameters(0.1)),
        lambda: scalar_rmsprop_step(ScalarRmsprop(np.ones(2), np.array(0.0)), [1, 1], parameters=gwsi_parameters(0.1)),
        lambda: descent_bound(1.0, 1.0, effective_lr=0.0, max_sharpness=1.0),
        lambda: stationarity_guarantee(0.1, 6.0, norm_sq=100.0, smoothness=1.0),
        lambda: stationarity_guarantee(0.1, 0.1, norm_sq=0.5, smoothness=1.0),
        lambda: crossing_time(1.0, 0.0, intrinsic_lr=0.1),
        lambda: eos_delay(1e-3, dtype="float8"),
        lambda: eos_delay(1e-3, displacement=0.0),
        lambda: edge_of_stability(0.1, 0.0, sharpness=1.0),
        lambda: edge_of_stability(0.1, 0.1, sharpness=1.0, grad_norm=-1.0),
        lambda: two_step_mean([1.0]),
        lambda: two_step_mean([[1.0, 2.0]]),
        lambda: ratio_crossings([1.0, math.nan]),
        lambda: ratio_crossings([1.0, 2.0], band=-1.0),
        lambda: secant_sharpness([1.0], [1.0], grad=[0.0], next_grad=[1.0]),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()


def test_error_names_the_offender():
    with pytest.raises(EquilibriaError, match=r"got norm_sq=-2; expected 0 < norm_sq"):
        effective_lr(0.1, 0.1, norm_sq=[1.0, -2.0])
