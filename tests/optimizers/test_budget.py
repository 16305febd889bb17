"""The budget that the monitor and the sharpness tracker share."""

from __future__ import annotations

import pytest

from equilibria.optimizers.budget import TimeBudget


def test_the_interval_spends_the_share_and_grows_with_the_measurements_in_a_group():
    budget = TimeBudget("auto", share=0.01)
    assert budget.interval() == 1.0  # nothing was timed yet
    budget.add_cost(0.02)
    budget.add_step(0.1)
    assert budget.interval() == pytest.approx(20)
    assert budget.interval(measurements=2) == pytest.approx(40)


def test_the_interval_is_at_least_one_step_and_at_most_the_longest():
    budget = TimeBudget("auto", share=0.5, longest=7)
    budget.add_step(1.0)
    assert budget.interval() == 1.0
    budget.add_cost(1e6)
    assert budget.interval() == 7


@pytest.mark.parametrize("every", [1, 20])
def test_a_fixed_interval_ignores_the_measured_times(every):
    budget = TimeBudget(every, share=0.01)
    budget.add_cost(1e6)
    budget.add_step(1.0)
    assert not budget.automatic
    assert budget.interval(measurements=2) == every
