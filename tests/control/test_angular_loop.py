"""The running mean from which an angular schedule learns how far a unit of learning rate turns the weights."""

from __future__ import annotations

import math

import pytest
import torch

from equilibria.control._angular_loop import GroupLoop


def slow_gain(angles: list[float]) -> float:
    """Root of the weighted mean square: every step back weighs three quarters of the next, four steps in all."""
    weights = [0.75**age for age in reversed(range(len(angles)))]
    squares = [weight * angle**2 for weight, angle in zip(weights, angles, strict=True)]
    return math.sqrt(math.fsum(squares) / math.fsum(weights))


def loop_of(norms: list[float]) -> GroupLoop:
    loop = GroupLoop.of(0, [torch.ones(2) for _ in norms])
    loop.norms = [(norm, norm) for norm in norms]
    return loop


def test_the_gain_is_a_mean_over_about_four_steps_from_the_first_on():
    loop, angles = loop_of([1.0]), [0.3, 0.1, 0.4, 0.1, 0.5, 0.9, 0.2]
    assert loop.gain(2) == 0.0
    for count, angle in enumerate(angles, 1):
        loop.average({0: angle}, power=2)
        assert loop.gain(2) == pytest.approx(slow_gain(angles[:count]), rel=1e-12)


@pytest.mark.parametrize("power", [1, 2])
def test_the_gain_follows_the_norm_by_its_power(power):
    loop = loop_of([2.0])
    loop.average({0: 0.3}, power=power)
    assert loop.gain(power) == pytest.approx(0.3, rel=1e-12)
    loop.norms = [(2.0, 3.0)]
    assert loop.gain(power) == pytest.approx(0.3 * (2 / 3) ** power, rel=1e-12)


def test_tensors_without_a_measurement_do_not_count():
    loop = loop_of([1.0, 1.0, 1.0])
    loop.average({0: 0.3, 2: 0.4}, power=2)
    assert loop.gain(2) == pytest.approx(math.sqrt((0.09 + 0.16) / 2), rel=1e-12)
