"""Effective learning rate, stable phase and entry to the edge of stability against torch.optim and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.edge_runs import hessian_at, rotated_run, settled_run, three_d_gradient, three_d_loss

from equilibria.errors import EquilibriaError
from equilibria.theory.effective_schedulers import gwsi_step
from equilibria.theory.hamiltonian import period_steps
from equilibria.theory.stability import (
    adam_threshold,
    angle_from_norms,
    crossing_time,
    descent_bound,
    edge_of_stability,
    effective_lr,
    eos_delay,
    momentum_threshold,
    nesterov_threshold,
    norm_step,
    projected_step,
    raw_threshold,
    stability_ratio,
    stationarity_guarantee,
)


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


# --- projected gradient descent -------------------------------------------------------------------------------------


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
        assert float(angle_from_norms(norm, np.linalg.norm(after), lr=lr, weight_decay=wd)) == pytest.approx(
            angle, abs=1e-7
        )


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
    angle = float(angle_from_norms(1.0, 1.0, lr=1e-3, weight_decay=1e-6))
    assert angle == pytest.approx(math.sqrt(2e-9) * (1 + 1e-9 / 12), rel=1e-7)
    assert float(edge_of_stability(1e-3, 1e-6, sharpness=1.0).angular_step) == pytest.approx(math.sqrt(2e-9), rel=1e-9)


def test_norms_measured_in_float32_may_undercut_a_pure_shrink():
    """Without gradient the weight only shrinks: float32 norms are accepted whatever their rounding, less is not."""
    weights = np.random.default_rng(4).standard_normal((300, 1000)).astype(np.float32)
    shrunk = weights * np.float32(1 - 0.01)
    before, after = (np.linalg.norm(w, axis=1) for w in (weights, shrunk))
    assert before.dtype == np.float32
    ratio = after.astype(np.float64) / (0.99 * before.astype(np.float64))
    assert ratio.min() < 1 - 5e-8
    angle = angle_from_norms(before, after, lr=0.1, weight_decay=0.1)
    assert (angle[ratio <= 1] == 0).all() and (angle < 3e-3).all()
    with pytest.raises(EquilibriaError, match="next_norm"):
        angle_from_norms(1.0, 0.99 * (1 - 2e-6), lr=0.1, weight_decay=0.1)


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


# --- stable regime --------------------------------------------------------------------------------------------------


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
# Between rotations the first peak scatters from 2.5 to 3.2: the burst lasts only a few steps at lr*wd = 0.01. The
# greatest R is exp(2 lr*wd delay): 1.75 in the third row, for which a single run had 1.615.
ENTRY = [
    ("float64", 1e-2, 35, 34.5, 46, 41.3, 2.47, 2.87),
    ("float64", 1e-3, 347, 346.4, 136, 128.5, 1.305, 3.00),
    ("float32", 1e-2, 35, 34.5, 28, 25.2, 1.75, 1.84),
    ("float32", 1e-3, 347, 346.4, 82, 76.4, 1.173, 1.95),
]


@pytest.mark.parametrize(("dtype", "intrinsic", "crossed", "crossing", "burst", "delay", "top", "peak"), ENTRY)
def test_entry_table(dtype, intrinsic, crossed, crossing, burst, delay, top, peak):
    """Start at R = 1/2. Rounding noise decides the exact step of the burst, hence the median of 15 rotations."""
    delays, peaks, tops = [], [], []
    for seed in range(1000, 1015):
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


# --- at the edge of stability ---------------------------------------------------------------------------------------


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


# --- errors ---------------------------------------------------------------------------------------------------------


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
        lambda: angle_from_norms(1.0, 0.5, lr=0.1, weight_decay=0.1),
        lambda: stability_ratio(1.0, -1.0),
        lambda: raw_threshold(math.inf, 0.0),
        lambda: descent_bound(1.0, 1.0, effective_lr=0.0, max_sharpness=1.0),
        lambda: stationarity_guarantee(0.1, 6.0, norm_sq=100.0, smoothness=1.0),
        lambda: stationarity_guarantee(0.1, 0.1, norm_sq=0.5, smoothness=1.0),
        lambda: crossing_time(1.0, 0.0, intrinsic_lr=0.1),
        lambda: eos_delay(1e-3, dtype="float8"),
        lambda: eos_delay(1e-3, displacement=0.0),
        lambda: edge_of_stability(0.1, 0.0, sharpness=1.0),
        lambda: edge_of_stability(0.1, 0.1, sharpness=1.0, grad_norm=-1.0),
    ],
)
def test_bad_input(call):
    with pytest.raises(EquilibriaError, match="got"):
        call()


def test_error_names_the_offender():
    with pytest.raises(EquilibriaError, match=r"got norm_sq=-2; expected 0 < norm_sq"):
        effective_lr(0.1, 0.1, norm_sq=[1.0, -2.0])


# ---- momentum, Nesterov and Adam


STEPS = 1200
ASIDE = 5e-3  # relative distance from the threshold: enough for a trend to show in this many steps


def growth(curvature: float, make) -> tuple[float, float]:
    """How a displacement across a valley, and the weights along it, change from the middle of a run to its end."""
    # So small that an instability does not reach the second moments of Adam.
    across, along = (torch.full((1,), 1e-100, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer, seen = make([across, along]), []
    for step in range(STEPS):
        across.grad, along.grad = curvature * across.detach(), torch.zeros_like(along)
        optimizer.step()
        if step >= STEPS // 2:
            seen.append((abs(float(across.detach())), abs(float(along.detach()))))
    size = np.array(seen)
    half = len(size) // 2  # the envelope of an oscillation: the largest in each half
    return size[half:, 0].max() / size[:half, 0].max(), size[-1, 1] / size[half - 1, 1]


SGDS = [
    {"momentum": 0.0},
    {"momentum": 0.5},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.9, "nesterov": True},
]


def sgd_threshold(settings: dict, *, lr: float, wd: float, scale_invariant: bool) -> float:
    given = {key: value for key, value in settings.items() if key != "nesterov"}
    law = nesterov_threshold if settings.get("nesterov") else momentum_threshold
    return float(law(lr, wd, scale_invariant=scale_invariant, **given))


@pytest.mark.parametrize("settings", SGDS, ids=str)
@pytest.mark.parametrize("scale_invariant", [True, False])
def test_sgd_is_stable_below_and_unstable_above(settings, scale_invariant):
    lr, wd = 0.1, 0.02
    edge = sgd_threshold(settings, lr=lr, wd=wd, scale_invariant=scale_invariant)

    def outcome(curvature: float) -> float:
        across, along = growth(curvature, lambda params: torch.optim.SGD(params, lr=lr, weight_decay=wd, **settings))
        return across / along if scale_invariant else across

    assert outcome(edge * (1 - ASIDE)) < 1 < outcome(edge * (1 + ASIDE))


def test_weight_decay_shifts_the_threshold_as_documented():
    """The two kinds differ by wd (heavy ball), which the simulation above would not resolve at this size."""
    plain, invariant = (float(momentum_threshold(0.1, 0.02, momentum=0.5, scale_invariant=it)) for it in (False, True))
    assert plain - invariant == pytest.approx(0.02, rel=1e-9)
    assert float(momentum_threshold(0.3, 0.2, momentum=0.0)) == pytest.approx(float(raw_threshold(0.3, 0.2)), rel=1e-14)
    assert float(nesterov_threshold(0.3, 0.2, momentum=0.0)) == pytest.approx(float(raw_threshold(0.3, 0.2)), rel=1e-14)


@pytest.mark.parametrize("settings", SGDS, ids=str)
def test_the_shift_by_strong_weight_decay_is_seen(settings):
    """With lr*wd of 5 % (where momentum still lets the weights shrink smoothly) the two kinds are far apart."""
    lr, wd = 0.1, 0.02 if settings["momentum"] == 0.9 else 0.5
    edges = [sgd_threshold(settings, lr=lr, wd=wd, scale_invariant=it) for it in (True, False)]
    assert edges[0] < edges[1]
    middle = sum(edges) / 2  # unstable for the direction, stable for the weights
    across, along = growth(middle, lambda params: torch.optim.SGD(params, lr=lr, weight_decay=wd, **settings))
    assert across < 1 < across / along


@pytest.mark.parametrize(("beta1", "wd"), [(0.9, 0.0), (0.5, 0.0), (0.9, 0.5), (0.0, 1.0)])
def test_adamw_with_a_still_preconditioner(beta1, wd):
    """A beta2 of almost 1 keeps the second moment where it is put; P then is its square root."""
    lr, scale = 0.01, 3.0

    def make(params):
        optimizer = torch.optim.AdamW(params, lr=lr, betas=(beta1, 1 - 1e-14), weight_decay=wd, eps=0.0)
        for param in params:
            step = torch.tensor(1e18)  # long past every bias correction
            optimizer.state[param] = {
                "step": step,
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.full_like(param, scale**2),
            }
        return optimizer

    edge = float(adam_threshold(lr, wd, beta1=beta1))
    assert growth(scale * edge * (1 - ASIDE), make)[0] < 1 < growth(scale * edge * (1 + ASIDE), make)[0]


def test_values_of_the_literature():
    assert float(adam_threshold(1e-3)) == pytest.approx(38 / 1e-3)
    assert float(momentum_threshold(0.1, 0.0, momentum=0.9)) == pytest.approx(38.0)
    assert float(nesterov_threshold(0.1, 0.0, momentum=0.9)) == pytest.approx(3.8 / 2.8 / 0.1)


def test_thresholds_broadcast_and_raise():
    assert momentum_threshold([0.1, 0.2], 0.0, momentum=[[0.0], [0.9]]).shape == (2, 2)
    for call, match in [
        (lambda: momentum_threshold(0.1, 0.0, momentum=1.0), "momentum=1"),
        (lambda: momentum_threshold(0.0, 0.0, momentum=0.5), "lr=0"),
        (lambda: nesterov_threshold(1.0, 0.5, momentum=0.9), r"- momentum=-"),
        (lambda: adam_threshold(1.0, 1.0), r"lr\*weight_decay=1"),
    ]:
        with pytest.raises(EquilibriaError, match=match):
            call()
