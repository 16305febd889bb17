"""When to sample, with a clock that the test controls."""

from __future__ import annotations

import numpy as np
import pytest

from equilibria.errors import EquilibriaError
from equilibria.optimizers import budget as module
from equilibria.optimizers.budget import Cadence, TimeBudget

LIMIT = 0.006


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    turned = Clock()
    monkeypatch.setattr(module.time, "perf_counter", turned.perf_counter)
    return turned


def train(cadence: Cadence, clock: Clock, steps, *, step_time, cost, glance=0.0, first: int = 0) -> np.ndarray:
    """Which of the steps were sampled; half of a sample's cost falls before its step, half after.

    As the monitor does it: hooks are timed from outside, the wish is made inside of the second one.
    """
    sampled = np.zeros(steps, dtype=bool)
    for index in range(steps):
        count = first + index
        due = sampled[index] = cadence.is_due(count)
        price = cost(count) if callable(cost) else cost
        clock.now += glance + due * price / 2
        cadence.spent(glance + due * price / 2)
        clock.now += step_time(count) if callable(step_time) else step_time
        clock.now += due * price / 2
        if due:
            cadence.plan_next(count, cadence.wish(count))
        cadence.spent(due * price / 2)
    return sampled


# ---- every so many steps


@pytest.mark.parametrize("every", [1, 2, 7, 50])
def test_a_fixed_number_of_steps(every, clock):
    sampled = train(Cadence(every), clock, 200, step_time=1e-3, cost=1.0)
    assert np.flatnonzero(sampled).tolist() == list(range(0, 200, every))


def test_a_resumed_run_samples_the_same_steps(clock):
    cadence = Cadence(7)
    cadence.resume(100)
    sampled = train(cadence, clock, 100, step_time=1e-3, cost=0.0, first=100)
    assert (100 + np.flatnonzero(sampled)).tolist() == [step for step in range(100, 200) if step % 7 == 0]


@pytest.mark.parametrize("every", ["often", "", 0, -1, 1.5, None, float("nan"), "7"])
def test_a_bad_number_of_steps_raises(every):
    with pytest.raises(EquilibriaError, match="every"):
        Cadence(every)


# ---- as often as it costs little


@pytest.mark.parametrize("step_time", [1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("times", [1e-4, 0.01, 0.1, 1.0, 5.0])
def test_the_share_of_the_time_stays_below_its_limit(clock, step_time, times):
    cadence, cost = Cadence("auto"), times * step_time
    train(cadence, clock, 5000, step_time=step_time, cost=cost)
    sampled = train(cadence, clock, 20_000, step_time=step_time, cost=cost, first=5000)
    share = sampled.sum() * cost / (sampled.sum() * cost + 20_000 * step_time)
    assert share <= 1.02 * LIMIT
    assert share >= 0.7 * LIMIT or cadence.every <= 2, "it may look more often"


def test_the_first_steps_cost_little_too(clock):
    sampled = train(Cadence("auto"), clock, 1000, step_time=1e-2, cost=1e-3)
    assert sampled.sum() * 1e-3 <= 2 * LIMIT * 1000 * 1e-2
    assert sampled[:2].all()


def test_free_samples_are_taken_at_every_step(clock):
    assert train(Cadence("auto"), clock, 100, step_time=1e-2, cost=0.0).all()


def test_steps_that_cost_nothing_do_not_stop_the_sampling(clock):
    cadence = Cadence("auto")
    sampled = train(cadence, clock, 10_000, step_time=0.0, cost=1e-3)
    assert np.diff(np.flatnonzero(sampled)).max() <= 1000


@pytest.mark.parametrize("hiccup", [0.1, 10.0, 1000.0])
def test_a_single_slow_sample_does_not_freeze_it(clock, hiccup):
    """Such as one during which the disk was busy: at most three times as sparse, and not for long."""
    cadence = Cadence("auto")
    train(cadence, clock, 3000, step_time=1e-2, cost=1e-3)
    usual = cadence.every
    assert usual == pytest.approx(16.7, abs=1)
    train(cadence, clock, usual, step_time=1e-2, cost=hiccup, first=3000)
    after = train(cadence, clock, 1000, step_time=1e-2, cost=1e-3, first=3000 + usual)
    assert np.diff(np.flatnonzero(after)).max() <= 3 * usual
    assert cadence.every == pytest.approx(usual, abs=1)


@pytest.mark.parametrize("pause", [1.0, 100.0])
def test_a_single_long_pause_does_not_make_it_sample_all_the_time(clock, pause):
    """Such as a validation between two steps."""
    cadence = Cadence("auto")
    train(cadence, clock, 3000, step_time=1e-2, cost=1e-3)
    clock.now += pause
    after = train(cadence, clock, 1000, step_time=1e-2, cost=1e-3, first=3000)
    assert after.sum() <= 2 * 1000 / 20


def test_samples_that_are_expensive_now_and_then_are_counted(clock):
    """Readings are worked off in batches: the limit is for the mean."""
    cadence, cost = Cadence("auto"), np.where(np.arange(30) % 3 == 0, 5e-3, 1e-3)
    counter = iter(np.tile(cost, 5000))
    train(cadence, clock, 5000, step_time=1e-2, cost=lambda _: next(counter))
    sampled = train(cadence, clock, 20_000, step_time=1e-2, cost=lambda _: next(counter), first=5000)
    assert sampled.sum() * cost.mean() / (20_000 * 1e-2) <= 1.3 * LIMIT


def test_the_interval_adapts_when_steps_become_slower_or_faster(clock):
    cadence = Cadence("auto")
    for first, (step_time, expected) in zip((0, 4000, 8000), ((1e-2, 17), (1e-1, 2), (1e-3, 167)), strict=True):
        train(cadence, clock, 4000, step_time=step_time, cost=1e-3, first=first)
        assert cadence.every == pytest.approx(expected, rel=0.05, abs=1)


def test_bookkeeping_at_every_step_is_part_of_the_cost(clock):
    cadence = Cadence("auto")
    sampled = train(cadence, clock, 20_000, step_time=1e-2, cost=1e-3, glance=1e-5)
    assert (sampled.sum() * 1e-3 + 20_000 * 1e-5) / (20_000 * 1e-2) <= 1.05 * LIMIT


def test_processes_follow_the_wish_they_agreed_on(clock):
    cadence = Cadence("auto")
    cadence.plan_next(0, 99.5)
    assert [step for step in range(120) if cadence.is_due(step)] == list(range(100, 120))
    assert cadence.every == 100


def test_time_between_two_runs_does_not_count_as_a_step(clock):
    cadence = Cadence("auto")
    train(cadence, clock, 3000, step_time=1e-2, cost=1e-3)
    clock.now += 1e6
    cadence.resume(3000)
    train(cadence, clock, 1000, step_time=1e-2, cost=1e-3, first=3000)
    assert cadence.every == pytest.approx(16.7, abs=1)


# ---- the budget that the monitor and the sharpness tracker share


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
