"""Scalar RMSprop against its definition, written out in Python floats, and against the numpy law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.control import ScalarRMSprop
from equilibria.errors import EquilibriaError
from equilibria.theory.effective_schedulers import ScalarRmsprop, SchedulerParameters, scalar_rmsprop_step


def valley(x: torch.Tensor) -> torch.Tensor:
    """L = (1 + y^2) x^2 / 2 over the last axis: minimisers on x = 0, sharpness 1 + y^2."""
    return 0.5 * (1 + x[1] ** 2) * x[0] ** 2


def slow_run(point, *, lr, decay, moment, steps):
    """Definition B.1 in Python floats; the gradient of the valley by hand."""
    x, y = point
    for _ in range(steps):
        g = ((1 + y * y) * x, y * x * x)
        x, y = x - lr * g[0] / math.sqrt(moment), y - lr * g[1] / math.sqrt(moment)
        moment = decay * moment + (1 - decay) * (g[0] ** 2 + g[1] ** 2)
    return [x, y], moment


@given(lr=st.floats(0.01, 0.3), decay=st.floats(0.1, 0.99), moment=st.floats(0.5, 10.0))
def test_it_follows_its_definition_to_rounding(lr, decay, moment):
    weight = torch.nn.Parameter(torch.tensor([0.3, 1.5], dtype=torch.float64))
    optimizer = ScalarRMSprop([weight], lr, decay=decay, second_moment=moment)
    for _ in range(15):  # few: at the edge of stability rounding is amplified from step to step
        optimizer.zero_grad()
        valley(weight).backward()
        optimizer.step()
    expected, last = slow_run([0.3, 1.5], lr=lr, decay=decay, moment=moment, steps=15)
    assert weight.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert optimizer.param_groups[0]["second_moment"] == pytest.approx(last, rel=1e-11)


def test_each_step_is_that_of_the_numpy_law():
    """Lock-step: both are fed the same gradients, over tensors of several shapes that share the moment."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((3, 2), (4,))]
    together = lambda tensors: torch.cat([t.detach().flatten() for t in tensors]).numpy()  # noqa: E731
    optimizer = ScalarRMSprop(weights, 0.05, decay=0.9, second_moment=2.0)
    state, parameters = ScalarRmsprop(together(weights), np.array(2.0)), SchedulerParameters(0.05, 0.9)
    for _ in range(200):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        state = scalar_rmsprop_step(state, together([w.grad for w in weights]), parameters=parameters)
        optimizer.step()
    assert together(weights) == pytest.approx(state.point, rel=1e-12, abs=1e-13)
    assert optimizer.param_groups[0]["second_moment"] == pytest.approx(float(state.second_moment), rel=1e-13)


@given(scale=st.floats(1e-6, 1e6))
def test_without_a_given_moment_the_scale_of_the_loss_does_not_matter(scale):
    runs = []
    for factor in (1.0, scale):
        weight = torch.nn.Parameter(torch.tensor([0.3, 1.5], dtype=torch.float64))
        optimizer = ScalarRMSprop([weight], 0.01)
        for _ in range(5):
            optimizer.zero_grad()
            (factor * valley(weight)).backward()
            optimizer.step()
        runs.append(weight.tolist())
    assert runs[0] == pytest.approx(runs[1], rel=1e-12)
    assert runs[0] != [0.3, 1.5]


def test_without_a_given_moment_the_first_step_is_lr_long():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = torch.tensor([30.0, 40.0], dtype=torch.float64)
    ScalarRMSprop([weight], 0.5).step()
    assert weight.tolist() == pytest.approx([-0.3, -0.4])


def test_a_gradient_of_zeros_changes_nothing_but_the_moment():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    optimizer = ScalarRMSprop([weight], 0.5, decay=0.5)
    optimizer.step()  # no moment yet
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.7, 0.6])
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.7, 0.6])
    assert optimizer.param_groups[0]["second_moment"] == 12.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "got lr=-0.1"),
        ({"decay": 1.0}, "got decay=1; expected 0 <= decay < 1"),
        ({"second_moment": 0.0}, "got second_moment=0; expected 0 < second_moment"),
    ],
)
def test_bad_settings_raise_for_the_optimizer_and_for_a_group(settings, message):
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(EquilibriaError, match=message):
        ScalarRMSprop([weight], **settings)
    optimizer = ScalarRMSprop([weight], 0.1)
    with pytest.raises(EquilibriaError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **settings})
    assert len(optimizer.param_groups) == 1
