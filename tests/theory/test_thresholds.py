"""Thresholds of stability against torch's optimizers on both sides of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.theory.stability import raw_threshold
from equilibria.theory.thresholds import adam_threshold, momentum_threshold, nesterov_threshold

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
