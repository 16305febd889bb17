"""Schedules against torch's own schedulers, step by step, and against their definitions."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers

from equilibria.errors import EquilibriaError
from equilibria.theory import schedules as sc

PEAK = 0.37
STEPS = 150


def driven_by_torch(make, *, steps=STEPS, lr=PEAK, per_epoch=1):
    """The rate torch uses at each optimizer step, with the scheduler stepped every ``per_epoch`` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            scheduler.step()
    return np.array(rates)


def assert_same(ours, theirs):
    # The absolute part is rounding of torch's recursions where the exact value is 0.
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-16)


AGAINST_TORCH = [
    (sc.Step(PEAK, every=7, factor=0.3), lambda o: torch_schedulers.StepLR(o, 7, gamma=0.3)),
    (sc.Step(PEAK, every=1, factor=1.02), lambda o: torch_schedulers.StepLR(o, 1, gamma=1.02)),
    (
        sc.MultiStep(PEAK, milestones=[1, 30, 31, 90], factor=0.2),
        lambda o: torch_schedulers.MultiStepLR(o, [1, 30, 31, 90], gamma=0.2),
    ),
    (
        sc.Linear(0.25 * PEAK, 0.9 * PEAK, steps=40),
        lambda o: torch_schedulers.LinearLR(o, 0.25, 0.9, total_iters=40),
    ),
    (sc.Linear(PEAK, 0.0, steps=100), lambda o: torch_schedulers.LinearLR(o, 1.0, 0.0, total_iters=100)),
    (
        sc.Cosine(PEAK, steps=11, end=0.01, cycles=None),
        lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 11, eta_min=0.01),
    ),
    (
        sc.Cosine(PEAK, steps=5, cycles=None, cycle_growth=2),
        lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 5, T_mult=2),
    ),
    (
        sc.Cosine(PEAK, steps=1, end=0.02, cycles=None, cycle_growth=3),
        lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 1, T_mult=3, eta_min=0.02),
    ),
    (
        sc.Polynomial(PEAK, 0.0, steps=60, power=0.9),
        lambda o: torch_schedulers.PolynomialLR(o, total_iters=60, power=0.9),
    ),
    (
        sc.Polynomial(PEAK, 0.0, steps=60, power=3.0),
        lambda o: torch_schedulers.PolynomialLR(o, total_iters=60, power=3.0),
    ),
    (sc.Exponential(PEAK, gamma=0.97), lambda o: torch_schedulers.ExponentialLR(o, 0.97)),
    (sc.Exponential(PEAK, gamma=1.01), lambda o: torch_schedulers.ExponentialLR(o, 1.01)),
    (
        sc.FromCallable(lambda step: PEAK / math.sqrt(1 + step)),
        lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / math.sqrt(1 + step)),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), AGAINST_TORCH)
def test_every_step_matches_torch(ours, theirs):
    assert_same(ours.values(STEPS), driven_by_torch(theirs))


@pytest.mark.parametrize(("ours", "theirs"), AGAINST_TORCH)
def test_in_epochs_matches_torch_stepped_once_per_epoch(ours, theirs):
    assert_same(sc.in_epochs(ours, steps_per_epoch=9).values(STEPS), driven_by_torch(theirs, per_epoch=9))


@pytest.mark.parametrize(("steps", "end"), [(100, 0.01), (100, 0.0), (7, 0.0), (1, 0.002)])
def test_cosine_matches_torch_up_to_its_end_and_then_stays(steps, end):
    ours = sc.Cosine(PEAK, steps=steps, end=end)
    theirs = driven_by_torch(lambda o: torch_schedulers.CosineAnnealingLR(o, steps, eta_min=end), steps=steps + 1)
    assert_same(ours.values(steps + 1), theirs)
    assert np.all(ours.values(50, start=steps) == end)


def test_warmup_matches_a_torch_sequence():
    body = sc.Cosine(PEAK, steps=60, end=0.01)
    ours = sc.Warmup(body, steps=20, start=0.1 * PEAK)

    def chained(optimizer):
        ramp = torch_schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
        wave = torch_schedulers.CosineAnnealingLR(optimizer, 60, eta_min=0.01)
        return torch_schedulers.SequentialLR(optimizer, [ramp, wave], milestones=[20])

    assert_same(ours.values(81), driven_by_torch(chained, steps=81))


LEVEL = st.floats(0, 10)
COUNT = st.integers(1, 60)
BODIES = st.deferred(lambda: SHAPES | COMBINED)
SHAPES = st.one_of(
    st.builds(sc.Constant, LEVEL),
    st.builds(sc.Step, LEVEL, every=COUNT, factor=st.floats(0.5, 1.1)),
    st.builds(
        sc.MultiStep,
        LEVEL,
        milestones=st.sets(COUNT, min_size=1, max_size=4).map(sorted),
        factor=st.floats(0.01, 2),
    ),
    st.builds(sc.Linear, LEVEL, LEVEL, steps=COUNT),
    st.builds(
        sc.Cosine,
        LEVEL,
        steps=COUNT,
        end=LEVEL,
        cycles=st.none() | st.integers(1, 4),
        cycle_growth=st.integers(1, 3),
    ),
    st.builds(sc.Polynomial, LEVEL, LEVEL, steps=COUNT, power=st.floats(0.1, 4)),
    st.builds(sc.Exponential, LEVEL, gamma=st.floats(0.8, 1.05)),
    st.builds(sc.WarmupStableDecay, LEVEL, warmup=st.integers(0, 9), stable=st.integers(0, 9), decay=COUNT),
    st.builds(sc.FromValues, st.lists(LEVEL, min_size=1, max_size=50)),
    st.builds(lambda k: sc.FromCallable(lambda step: k / (1 + step)), LEVEL),
)
COMBINED = st.one_of(
    st.builds(sc.Warmup, BODIES, steps=COUNT, start=LEVEL),
    st.builds(sc.scaled, BODIES, LEVEL),
    st.builds(lambda body, n: sc.in_epochs(body, steps_per_epoch=n), BODIES, COUNT),
    st.builds(lambda a, n, b: sc.Piecewise([(0, a), (n, b)]), BODIES, COUNT, BODIES),
)


@settings(deadline=None, max_examples=200)
@given(BODIES, st.integers(0, 80), st.integers(0, 200))
def test_one_step_and_many_steps_agree_exactly(schedule, count, start):
    many = schedule.values(count, start=start)
    assert many.dtype == np.float64
    assert many.tolist() == [schedule(step) for step in range(start, start + count)]


@settings(deadline=None, max_examples=100)
@given(BODIES, st.integers(0, 100))
def test_a_window_is_a_slice_of_the_whole(schedule, start):
    assert schedule.values(30, start=start).tolist() == schedule.values(start + 30).tolist()[start:]


@settings(deadline=None, max_examples=100)
@given(BODIES, BODIES, COUNT)
def test_pieces_and_warmup_shift_the_clock(first, second, cut):
    joined = sc.Piecewise([(0, first), (cut, second)]).values(cut + 40)
    assert joined.tolist() == first.values(cut).tolist() + second.values(40).tolist()
    warmed = sc.Warmup(second, steps=cut, start=0.5).values(cut + 40)
    assert warmed[0] == 0.5
    assert warmed[cut:].tolist() == second.values(40).tolist()
    np.testing.assert_allclose(warmed[:cut], np.linspace(0.5, second(0), cut + 1)[:-1], rtol=1e-13, atol=1e-15)


@settings(deadline=None, max_examples=100)
@given(BODIES, LEVEL, COUNT)
def test_scaled_and_in_epochs_by_definition(schedule, k, per_epoch):
    assert sc.scaled(schedule, k).values(50).tolist() == [schedule(step) * k for step in range(50)]
    epochs = sc.in_epochs(schedule, steps_per_epoch=per_epoch).values(100)
    assert epochs.tolist() == [schedule(step // per_epoch) for step in range(100)]


def test_steps_times_epoch_length_is_the_same_as_in_epochs():
    written_in_steps = sc.MultiStep(0.1, milestones=[60 * 391, 120 * 391], factor=0.2)
    written_in_epochs = sc.in_epochs(sc.MultiStep(0.1, milestones=[60, 120], factor=0.2), steps_per_epoch=391)
    assert np.array_equal(written_in_steps.values(200 * 391), written_in_epochs.values(200 * 391))


def test_cosine_cycles_end_exactly_at_end():
    grown = sc.Cosine(1.0, steps=4, end=0.25, cycles=3, cycle_growth=2)  # cycles of 4, 8 and 16 steps
    assert [grown(step) for step in (0, 4, 12)] == [1.0, 1.0, 1.0]
    assert grown(27) > 0.25
    assert grown.values(100, start=28).tolist() == [0.25] * 100
    level = sc.Cosine(1.0, steps=4, end=0.25, cycles=3)
    assert [level(step) for step in (0, 4, 8)] == [1.0, 1.0, 1.0]
    assert level(11) > 0.25
    assert level.values(100, start=12).tolist() == [0.25] * 100


def test_ends_are_exact():
    for start, end in [(0.3, 0.1), (0.1, 0.3), (0.7, 1e-20)]:
        for schedule in (
            sc.Linear(start, end, steps=7),
            sc.Polynomial(start, end, steps=7, power=1.7),
            sc.Cosine(start, steps=7, end=end),
        ):
            assert (schedule(0), schedule(7), schedule(1000)) == (start, end, end)


def test_warmup_stable_decay_by_hand():
    got = sc.WarmupStableDecay(2.0, warmup=4, stable=2, decay=4, end=1.0).values(12)
    assert got.tolist() == [0, 0.5, 1, 1.5, 2, 2, 2, 1.75, 1.5, 1.25, 1, 1]
    assert sc.WarmupStableDecay(2.0, warmup=0, stable=0, decay=2).values(3).tolist() == [2, 1, 0]


def test_as_schedule_accepts_numbers_lists_arrays_and_functions():
    body = sc.Linear(1, 0, steps=3)
    assert sc.as_schedule(body) is body
    assert sc.as_schedule(1) == sc.as_schedule(np.float32(1)) == sc.as_schedule(np.array(1.0)) == sc.Constant(1.0)
    for table in ([0.2, 0.1], (0.2, 0.1), np.array([0.2, 0.1])):
        assert sc.as_schedule(table) == sc.FromValues([0.2, 0.1])
    assert sc.as_schedule(lambda step: 3 * step).values(3).tolist() == [0, 3, 6]


def test_schedules_are_values():
    milestones = [3, 5]
    table = np.array([0.2, 0.1])
    drop, given_table = sc.MultiStep(1.0, milestones=milestones, factor=0.1), sc.FromValues(table)
    milestones.append(7)
    table[:] = 9.0
    assert drop == sc.MultiStep(1.0, milestones=(3, 5), factor=0.1)
    assert given_table.values(3).tolist() == [0.2, 0.1, 0.1]
    assert len({drop, given_table, sc.FromValues([0.2, 0.1]), sc.Warmup(0.1, steps=2)}) == 3
    with pytest.raises(AttributeError):
        drop.peak = 2.0


def test_the_caller_owns_the_values():
    schedule = sc.FromValues([0.2, 0.1])
    schedule.values(2)[:] = 7.0
    assert schedule.values(2).tolist() == [0.2, 0.1]


NAN = float("nan")
BAD = [
    (lambda: sc.Constant(-0.1), r"got value=-0\.1; expected 0 <= value"),
    (lambda: sc.Constant(NAN), "got value=nan"),
    (lambda: sc.Constant(math.inf), "got value=inf"),
    (lambda: sc.Step(0.1, every=0, factor=0.1), "got every=0"),
    (lambda: sc.Step(0.1, every=1.5, factor=0.1), r"got every=1\.5; expected a whole number"),
    (lambda: sc.Step(0.1, every=5, factor=0), "got factor=0"),
    (lambda: sc.Step(NAN, every=5, factor=0.1), "got peak=nan"),
    (lambda: sc.MultiStep(0.1, milestones=[20, 10], factor=0.1), "got milestones 20, 10"),
    (lambda: sc.MultiStep(0.1, milestones=[10, 10], factor=0.1), "got milestones 10, 10"),
    (lambda: sc.MultiStep(0.1, milestones=[-1, 10], factor=0.1), "got milestone=-1; expected 1 <= milestone"),
    (lambda: sc.MultiStep(0.1, milestones=[0, 10], factor=0.1), "got milestone=0; expected 1 <= milestone"),
    (lambda: sc.MultiStep(0.1, milestones=[], factor=0.1), "got no milestones"),
    (lambda: sc.MultiStep(0.1, milestones=10, factor=0.1), "got milestones=10; expected a list"),
    (lambda: sc.MultiStep(0.1, milestones="60,120", factor=0.1), "got milestones='60,120'; expected a list"),
    (lambda: sc.MultiStep(0.1, milestones=[10], factor=-0.1), "got factor=-0.1"),
    (lambda: sc.Linear(0.1, -0.1, steps=5), "got end=-0.1"),
    (lambda: sc.Linear(0.1, 0.0, steps=0), "got steps=0; expected 1 <= steps"),
    (lambda: sc.Linear(0.1, 0.0, steps=1e300), "expected steps <= "),
    (lambda: sc.Cosine(0.1, steps=-3), "got steps=-3"),
    (lambda: sc.Cosine(0.1, steps=3, cycles=0), "got cycles=0"),
    (lambda: sc.Cosine(0.1, steps=3, cycle_growth=0), "got cycle_growth=0"),
    (lambda: sc.Cosine(0.1, steps=3, end=NAN), "got end=nan"),
    (lambda: sc.Polynomial(0.1, 0.0, steps=3, power=0), "got power=0"),
    (lambda: sc.Exponential(0.1, gamma=0), "got gamma=0"),
    (lambda: sc.Exponential(0.1, gamma=None), "got gamma=None"),
    (lambda: sc.Exponential(1.0, gamma=2.0).values(2000), "got inf at step 1024 of Exponential"),
    (lambda: sc.Warmup(-1.0, steps=3), "got after=-1"),
    (lambda: sc.Warmup(0.1, steps=0), "got steps=0"),
    (lambda: sc.WarmupStableDecay(0.1, warmup=-1, stable=0, decay=1), "got warmup=-1"),
    (lambda: sc.WarmupStableDecay(0.1, warmup=0, stable=0, decay=0), "got decay=0"),
    (lambda: sc.Piecewise([]), "got no pieces"),
    (lambda: sc.Piecewise([(1, 0.1)]), "got a first piece at step 1; expected it at step 0"),
    (lambda: sc.Piecewise([(0, 0.1), (5, 0.2), (5, 0.3)]), "got first steps 5, 5"),
    (lambda: sc.Piecewise([0.1, 0.2]), "got piece 0.1"),
    (lambda: sc.Piecewise([(0, "x")]), "got piece='x'"),
    (lambda: sc.FromValues([]), "at least one"),
    (lambda: sc.FromValues([[0.1]]), r"shape \(1, 1\)"),
    (lambda: sc.FromValues([0.1, NAN]), "got nan at step 1"),
    (lambda: sc.FromValues([0.1, -0.2]), "got -0.2 at step 1"),
    (lambda: sc.FromValues(["a"]), r"got points=\['a'\]"),
    (lambda: sc.FromCallable(3), "got function=3"),
    (lambda: sc.FromCallable(lambda step: 5 - step).values(9), "got -1 from the schedule function at step 6"),
    (lambda: sc.FromCallable(lambda step: NAN)(4), "got nan from the schedule function at step 4"),
    (lambda: sc.FromCallable(lambda step: None)(4), "got None from the schedule function at step 4"),
    (lambda: sc.as_schedule("cosine"), "got schedule='cosine'"),
    (lambda: sc.as_schedule(None, name="lr"), "got lr=None"),
    (lambda: sc.as_schedule(-1, name="lr"), "got lr=-1"),
    (lambda: sc.scaled(0.1, -1), "got k=-1"),
    (lambda: sc.in_epochs(0.1, steps_per_epoch=0), "got steps_per_epoch=0"),
    (lambda: sc.Constant(0.1)(-1), "got step=-1"),
    (lambda: sc.Constant(0.1)(0.5), "got step=0.5"),
    (lambda: sc.Constant(0.1)(NAN), "got step=nan"),
    (lambda: sc.Constant(0.1).values(-1), "got steps=-1"),
    (lambda: sc.Constant(0.1).values(1, start=-1), "got start=-1"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(make, message):
    with pytest.raises(EquilibriaError, match=message):
        make()


def test_a_hundred_thousand_values_take_milliseconds():
    slowest = 0.0
    for schedule in (
        sc.Warmup(sc.Cosine(0.1, steps=30, cycles=None, cycle_growth=2), steps=500),
        sc.in_epochs(sc.Polynomial(0.1, 0.0, steps=200, power=0.9), steps_per_epoch=500),
        sc.Piecewise([(500 * k, sc.Exponential(0.1, gamma=0.999)) for k in range(200)]),
        sc.FromValues(np.linspace(1, 0, 100_000)),
    ):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            schedule.values(100_000)
            times.append(time.perf_counter() - begin)
        slowest = max(slowest, min(times))
    assert slowest < 0.05  # a loop over the steps in Python takes longer than this


def test_the_module_needs_numpy_alone():
    code = (
        "import sys, equilibria.theory.schedules as s; s.Cosine(1, steps=9).values(9);"
        "print(sorted({'scipy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
