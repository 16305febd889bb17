"""When to sample, with a clock that the test controls."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from equilibria.errors import EquilibriaError
from equilibria.monitor import sampler as module
from equilibria.monitor.sampler import Sampler

LIMIT = 0.005


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    turned = Clock()
    monkeypatch.setattr(module.time, "perf_counter", turned.perf_counter)
    return turned


def finish(sampler: Sampler, clock: Clock, count: int, seconds: float | None) -> None:
    """The second half of a sample, if the step was due."""
    if seconds is not None:
        clock.spend(seconds)
        sampler.plan_next(0, count, sampler.wish(0, count))


def train(sampler: Sampler, clock: Clock, steps, *, step_time, cost, glance=0.0, first: int = 0) -> np.ndarray:
    """Which of the steps were sampled; half of a sample's cost falls before its step, half after.

    As the monitor does it: hooks are timed from outside, the wish is made inside of the second one.
    """
    sampled = np.zeros(steps, dtype=bool)
    for index in range(steps):
        count = first + index
        due = sampled[index] = sampler.is_due(0, count=count, step=count, jumps=False)
        price = cost(count) if callable(cost) else cost
        sampler.attempt(partial(clock.spend, glance + due * price / 2))
        clock.now += step_time(count) if callable(step_time) else step_time
        sampler.attempt(partial(finish, sampler, clock, count, price / 2 if due else None))
    return sampled


# ---- every so many steps


@pytest.mark.parametrize("every", [1, 2, 7, 50])
def test_a_fixed_number_of_steps(every, clock):
    sampled = train(Sampler(every), clock, 200, step_time=1e-3, cost=1.0)
    assert np.flatnonzero(sampled).tolist() == list(range(0, 200, every))


def test_a_resumed_run_samples_the_same_steps(clock):
    sampler = Sampler(7)
    sampler.resume(100)
    sampled = train(sampler, clock, 100, step_time=1e-3, cost=0.0, first=100)
    assert (100 + np.flatnonzero(sampled)).tolist() == [step for step in range(100, 200) if step % 7 == 0]


@pytest.mark.parametrize("every", ["often", "", 0, -1, 1.5, None, float("nan"), "7"])
def test_a_bad_number_of_steps_raises(every):
    with pytest.raises(EquilibriaError, match="every"):
        Sampler(every)


# ---- as often as it costs little


@pytest.mark.parametrize("step_time", [1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("times", [1e-4, 0.01, 0.1, 1.0, 5.0])
def test_the_share_of_the_time_stays_below_its_limit(clock, step_time, times):
    sampler, cost = Sampler("auto"), times * step_time
    train(sampler, clock, 5000, step_time=step_time, cost=cost)
    sampled = train(sampler, clock, 20_000, step_time=step_time, cost=cost, first=5000)
    share = sampled.sum() * cost / (sampled.sum() * cost + 20_000 * step_time)
    assert share <= 1.02 * LIMIT
    assert share >= 0.7 * LIMIT or sampler.every <= 3, (
        "it may sample more often (intervals are whole: 2 or 3 is coarse)"
    )


@pytest.mark.parametrize("load", [0.0, 5.0])
@pytest.mark.parametrize("cost", [1e-3, 1e-2, 0.1, 1.0])
def test_the_start_costs_a_second_more_and_has_the_samples_of_a_prediction(clock, cost, load):
    """Whatever the first sample loads, as compiled code does; the step numbers of samples double at most ten times."""
    sampled = train(Sampler("auto"), clock, 1000, step_time=1e-2, cost=lambda step: cost + load * (step == 0))
    assert sampled[:2].all()
    assert sampled.sum() * cost <= 2 * LIMIT * 1000 * 1e-2 + 1.0 + 10 * cost
    assert sampled[:128].sum() >= 25 or 25 * cost > 1.0


def test_free_samples_are_taken_at_every_step(clock):
    assert train(Sampler("auto"), clock, 100, step_time=1e-2, cost=0.0).all()


def test_steps_that_cost_nothing_do_not_stop_the_sampling(clock):
    sampler = Sampler("auto")
    sampled = train(sampler, clock, 10_000, step_time=0.0, cost=1e-3)
    assert np.diff(np.flatnonzero(sampled)).max() <= 1000


@pytest.mark.parametrize("hiccup", [0.1, 10.0, 1000.0])
def test_a_single_slow_sample_does_not_freeze_it(clock, hiccup):
    """Such as one during which the disk was busy: at most three times as sparse, and not for long."""
    sampler = Sampler("auto")
    train(sampler, clock, 3000, step_time=1e-2, cost=1e-3)
    usual = sampler.every
    assert usual == pytest.approx(20, abs=1)
    train(sampler, clock, usual, step_time=1e-2, cost=hiccup, first=3000)
    after = train(sampler, clock, 1000, step_time=1e-2, cost=1e-3, first=3000 + usual)
    assert np.diff(np.flatnonzero(after)).max() <= 3 * usual
    assert sampler.every == pytest.approx(usual, abs=1)


@pytest.mark.parametrize("pause", [1.0, 100.0])
def test_a_single_long_pause_does_not_make_it_sample_all_the_time(clock, pause):
    """Such as a validation between two steps."""
    sampler = Sampler("auto")
    train(sampler, clock, 3000, step_time=1e-2, cost=1e-3)
    clock.now += pause
    after = train(sampler, clock, 1000, step_time=1e-2, cost=1e-3, first=3000)
    assert after.sum() <= 2 * 1000 / 20


def test_samples_that_are_expensive_now_and_then_are_counted(clock):
    """Readings are worked off in batches: the limit is for the mean."""
    sampler, cost = Sampler("auto"), np.where(np.arange(30) % 3 == 0, 5e-3, 1e-3)
    counter = iter(np.tile(cost, 5000))
    train(sampler, clock, 5000, step_time=1e-2, cost=lambda _: next(counter))
    sampled = train(sampler, clock, 20_000, step_time=1e-2, cost=lambda _: next(counter), first=5000)
    assert sampled.sum() * cost.mean() / (20_000 * 1e-2) <= 1.3 * LIMIT


def test_the_interval_adapts_when_steps_become_slower_or_faster(clock):
    sampler = Sampler("auto")
    for first, (step_time, expected) in zip((0, 4000, 8000), ((1e-2, 20), (1e-1, 2), (1e-3, 200)), strict=True):
        train(sampler, clock, 4000, step_time=step_time, cost=1e-3, first=first)
        assert sampler.every == pytest.approx(expected, rel=0.05, abs=1)


def test_bookkeeping_at_every_step_is_part_of_the_cost(clock):
    sampler = Sampler("auto")
    train(sampler, clock, 5000, step_time=1e-2, cost=1e-3, glance=1e-5)
    sampled = train(sampler, clock, 20_000, step_time=1e-2, cost=1e-3, glance=1e-5, first=5000)
    assert (sampled.sum() * 1e-3 + 20_000 * 1e-5) / (20_000 * 1e-2) <= 1.05 * LIMIT


def test_processes_follow_the_wish_they_agreed_on(clock):
    sampler = Sampler("auto")
    assert sampler.is_due(0, count=500, step=500, jumps=False)
    assert sampler.wish(0, 500) == 1
    sampler.plan_next(0, 500, 99.5)
    due = [step for step in range(501, 620) if sampler.is_due(0, count=step, step=step, jumps=False)]
    assert due == list(range(600, 620))
    assert sampler.every == 100


def test_time_between_two_runs_does_not_count_as_a_step(clock):
    sampler = Sampler("auto")
    train(sampler, clock, 3000, step_time=1e-2, cost=1e-3)
    clock.now += 1e6
    sampler.resume(3000)
    train(sampler, clock, 1000, step_time=1e-2, cost=1e-3, first=3000)
    assert sampler.every == pytest.approx(20, abs=1)


@pytest.mark.parametrize(("step", "latest"), [(0, 0), (1, 0), (100, 99)])
def test_a_resumed_run_goes_on_after_its_latest_step(step, latest):
    sampler = Sampler(1)
    sampler.resume(step)
    assert sampler.latest == latest


def test_the_beginning_of_a_run_is_sampled_whatever_the_first_samples_cost(clock):
    """A run of 300 steps had the samples 0, 1, 102 and 280 on a busy machine."""
    sampler, due = Sampler("auto"), []
    for step in range(300):
        if sampler.is_due(0, count=step, step=step, jumps=False):
            due.append(step)
            sampler.wish(0, step)
            sampler.plan_next(0, step, 1000.0)
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
