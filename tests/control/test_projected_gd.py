"""Projected gradient descent against GD with weight decay by torch, and its schedulers against the theory."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.control import ProjectedGD
from equilibria.errors import EquilibriaError
from equilibria.theory.effective_schedulers import gwsi_step, quasi_rmsprop_parameters, rmsprop_scheduler_step

TARGET = torch.randn(7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
MIX = torch.randn(9, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def invariant_loss(w: torch.Tensor) -> torch.Tensor:
    """Smooth and scale-invariant, with a curved valley; in the stable regime for the settings used here."""
    theta = w.flatten() / w.norm()
    return (torch.tanh(MIX @ theta) ** 2).mean() + 0.3 * (theta @ TARGET) / TARGET.norm()


def start(norm: float = 1.0, seed: int = 0) -> torch.nn.Parameter:
    w = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.Parameter(w * (norm / w.norm()))


def gradient_step(optimizer: torch.optim.Optimizer, w: torch.Tensor, loss=invariant_loss) -> None:
    optimizer.zero_grad()
    loss(w).backward()
    optimizer.step()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a / a.norm() - b / b.norm()).detach().norm())


@given(
    lr=st.floats(0.01, 0.5),
    intrinsic=st.floats(1e-4, 0.2),
    norm=st.floats(0.7, 3.0),
    scale=st.sampled_from([0.1, 1, 7]),
)
def test_gwsi_is_gradient_descent_with_weight_decay_lock_step(lr, intrinsic, norm, scale):
    """Every step from the same point: the directions agree to 1e-12, on a sphere of any radius."""
    plain, sphere = start(norm), start(norm * scale)
    wd = intrinsic / lr
    torchs = torch.optim.SGD([plain], lr=lr, weight_decay=wd)
    first = lr / ((1 - lr * wd) * norm**2)
    ours = ProjectedGD([sphere], lr, weight_decay=wd, effective_lr=first)
    for _ in range(20):
        gradient_step(torchs, plain)
        gradient_step(ours, sphere)
        assert apart(plain, sphere) < 1e-12
        assert sphere.norm().item() == pytest.approx(norm * scale, rel=1e-14)
        assert ours.state[sphere]["norm_sq"] == pytest.approx(plain.norm().item() ** 2, rel=1e-12)
        with torch.no_grad():  # lock-step: rounding must not be amplified by the dynamics
            sphere.copy_(plain * (norm * scale / plain.norm()))


def test_gwsi_running_freely_stays_with_gradient_descent_in_the_stable_regime():
    plain, sphere = start(2.0), start(2.0)
    torchs = torch.optim.SGD([plain], lr=0.1, weight_decay=0.05)
    ours = ProjectedGD([sphere], 0.1, weight_decay=0.05)
    for _ in range(300):
        gradient_step(torchs, plain)
        gradient_step(ours, sphere)
    assert apart(plain, sphere) < 1e-12
    assert apart(plain, start(2.0)) > 0.1  # it went somewhere


def test_gwsi_follows_a_schedule_of_the_learning_rate_as_gradient_descent_does():
    plain, sphere = start(2.0), start(2.0)
    optimizers = (torch.optim.SGD([plain], lr=0.2, weight_decay=0.05), ProjectedGD([sphere], 0.2, weight_decay=0.05))
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.3) for optimizer in optimizers]
    for _ in range(100):
        for optimizer, w, schedule in zip(optimizers, (plain, sphere), schedules, strict=True):
            gradient_step(optimizer, w)
            schedule.step()
    assert apart(plain, sphere) < 1e-12


def test_gwsi_on_one_sphere_for_all_tensors_needs_only_joint_invariance():
    """L(u, v) depends on the ratio of the norms: not invariant in u alone."""

    def loss(pair):
        joint = torch.cat(pair)
        return invariant_loss(joint) + 0.1 * (pair[0].norm() / joint.norm()) ** 2

    whole = start(1.5)
    plain = [torch.nn.Parameter(part.detach().clone()) for part in whole.split([3, 4])]
    sphere = [torch.nn.Parameter(part.detach().clone()) for part in whole.split([3, 4])]
    torchs = torch.optim.SGD(plain, lr=0.1, weight_decay=0.1)
    ours = ProjectedGD(sphere, 0.1, weight_decay=0.1, sphere="group")
    for _ in range(100):
        for optimizer, pair in ((torchs, plain), (ours, sphere)):
            optimizer.zero_grad()
            loss(pair).backward()
            optimizer.step()
    assert apart(torch.cat(plain), torch.cat(sphere)) < 1e-12
    assert list(ours.state) == [sphere[0]]


def test_its_effective_learning_rate_is_that_of_the_law():
    w = start(1.3)
    optimizer, eta = ProjectedGD([w], 0.1, weight_decay=0.2), 0.1 / ((1 - 0.02) * 1.3**2)
    for _ in range(100):
        gradient_step(optimizer, w)
        assert optimizer.state[w]["effective_lr"] == pytest.approx(eta, rel=1e-12)
        assert w.grad is not None
        # the loss gradient at the point before the step, on the unit sphere
        eta = float(gwsi_step(eta, (w.grad.norm() * 1.3).item() ** 2, intrinsic_lr=0.02))


@pytest.mark.parametrize("scheduler", ["rmsprop", "quasi_rmsprop"])
def test_the_moment_schedulers_follow_the_law(scheduler):
    """Projection and recursion written out beside it."""
    w, lr, wd = start(), 0.1, 0.2
    settings = {"weight_decay": wd} if scheduler == "quasi_rmsprop" else {"decay": 0.95, "effective_lr": 0.3}
    optimizer = ProjectedGD([w], lr, scheduler=scheduler, **settings)
    parameters = quasi_rmsprop_parameters(lr * wd)
    if scheduler == "rmsprop":
        parameters = type(parameters)(base_lr=lr, decay=0.95)
    eta = 0.3 if scheduler == "rmsprop" else lr / (1 - lr * wd)
    theta, moment = w.detach().clone(), eta**-2
    for _ in range(20):
        gradient_step(optimizer, w)
        point = theta.clone().requires_grad_()
        (g,) = torch.autograd.grad(invariant_loss(point), point)
        theta = theta - moment**-0.5 * g
        theta = theta / theta.norm()
        moment = float(rmsprop_scheduler_step(moment, float(g @ g), parameters=parameters))
        assert torch.allclose(w.detach(), theta, rtol=1e-11, atol=1e-12)


def test_quasi_rmsprop_imitates_gradient_descent_ever_better_as_lr_wd_shrinks():
    """Theorem B.9: over a fixed flow time the squared effective rate differs by O(lr wd) (1.3 lr wd in the sheet)."""

    def deviation(intrinsic: float) -> float:
        exact, imitation = start(1.0), start(1.0)
        pair = [
            (ProjectedGD([w], 0.1, weight_decay=intrinsic / 0.1, scheduler=scheduler), w)
            for w, scheduler in ((exact, "gwsi"), (imitation, "quasi_rmsprop"))
        ]
        g = torch.tensor([1.0, -1.0, 0.5, 0, 0, 0.3, 0], dtype=torch.float64)
        for step in range(round(1 / intrinsic)):
            for optimizer, w in pair:  # a common stream of gradient sizes
                w.grad = g * math.sin(step * intrinsic * 7) * math.sqrt(intrinsic)
                optimizer.step()
        rates = [optimizer.state[w]["effective_lr"] for optimizer, w in pair]
        return abs(rates[1] / rates[0] - 1)

    coarse, fine = deviation(1e-2), deviation(1e-3)
    assert coarse < 0.03
    assert fine == pytest.approx(coarse / 10, rel=0.3)


def test_a_zero_weight_and_a_sphere_with_a_missing_gradient_raise_before_anything_changes():
    good, zero = start(), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = ProjectedGD([good, zero], 0.1)
    good.grad, zero.grad = torch.ones_like(good), torch.ones_like(zero)
    with pytest.raises(EquilibriaError, match="zero weight of shape"):
        optimizer.step()
    assert torch.equal(good, start())
    together = ProjectedGD([good, start(seed=1)], 0.1, sphere="group")
    with pytest.raises(EquilibriaError, match="gradients for 1 of the 2 tensors of one sphere"):
        together.step()
    assert torch.equal(good, start())


def test_resuming_through_a_checkpoint_keeps_float32_runs_to_the_bit():
    """Norms and rates are numbers: loading must not round them to the weights' type."""
    weights = [torch.nn.Parameter(start(1.7).float().detach()) for _ in range(2)]
    whole, first = (ProjectedGD([w], 0.1, weight_decay=0.05) for w in weights)
    loss = lambda w: invariant_loss(w.double()).float()  # noqa: E731
    for _ in range(20):
        gradient_step(whole, weights[0], loss)
    for _ in range(10):
        gradient_step(first, weights[1], loss)
    resumed = torch.nn.Parameter(weights[1].detach().clone())
    optimizer = ProjectedGD([resumed], 0.1, weight_decay=0.05)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(10):
        gradient_step(optimizer, resumed, loss)
    assert torch.equal(resumed, weights[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "got lr=-0.1"),
        ({"scheduler": "adam"}, "got scheduler='adam'; expected one of: gwsi, quasi_rmsprop, rmsprop"),
        ({"sphere": "row"}, "got sphere='row'; expected one of: tensor, group"),
        ({"lr": 1.0, "weight_decay": 1.0}, r"got lr\*weight_decay=1"),
        ({"scheduler": "quasi_rmsprop"}, r"got lr\*weight_decay=0; expected 0 < lr\*weight_decay < 0.25"),
        ({"scheduler": "rmsprop"}, "expected decay and effective_lr"),
        ({"scheduler": "rmsprop", "decay": 0.9, "effective_lr": 0.1, "weight_decay": 0.1}, "and no weight_decay"),
        ({"decay": 0.9}, "got decay=0.9 with scheduler='gwsi'"),
        ({"effective_lr": 0}, "got effective_lr=0"),
    ],
)
def test_bad_settings_raise_for_the_optimizer_and_for_a_group(settings, message):
    with pytest.raises(EquilibriaError, match=message):
        ProjectedGD([start()], **settings)
    optimizer = ProjectedGD([start()], 0.1)
    with pytest.raises(EquilibriaError, match=message):
        optimizer.add_param_group({"params": [start()], **settings})
    assert len(optimizer.param_groups) == 1


def test_coarse_weights_raise_with_what_to_do():
    coarse = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(EquilibriaError, match=r"torch.bfloat16; ProjectedGD needs float32 or float64.*autocast"):
        ProjectedGD([coarse], 0.1)
    optimizer = ProjectedGD([start()], 0.1)
    with pytest.raises(EquilibriaError, match=r"torch.bfloat16"):
        optimizer.add_param_group({"params": (p for p in [coarse])})
    assert len(optimizer.param_groups) == 1
