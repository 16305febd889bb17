"""Where a schedule is cut: the phases people have in mind, every step in exactly one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.planning._phases import cut, thinned
from equilibria.theory.schedules import (
    Constant,
    Cosine,
    MultiStep,
    Step,
    Warmup,
    WarmupStableDecay,
    as_schedule,
    in_epochs,
)

WD = 5e-4


def spans_of(schedule, steps, weight_decay=WD):
    return cut(as_schedule(schedule).values(steps), as_schedule(weight_decay).values(steps))


def firsts(spans):
    return [span.first for span in spans]


def check_cover(spans, steps):
    assert spans[0].first == 0 and all(span.steps >= 1 for span in spans)
    assert [span.first + span.steps for span in spans] == [*firsts(spans)[1:], steps]


@pytest.mark.parametrize("steps", [1, 2, 3, 1000])
def test_constant(steps):
    spans = spans_of(Constant(0.1), steps)
    check_cover(spans, steps)
    assert len(spans) == 1 and not spans[0].jump
    assert spans[0].flat == (steps > 1)


def test_step_and_multi_step():
    spans = spans_of(Step(0.1, every=300, factor=0.1), 1000)
    assert [(s.first, s.steps, s.flat, s.jump) for s in spans] == [
        (0, 300, True, False),
        (300, 300, True, True),
        (600, 300, True, True),
        (900, 100, True, True),
    ]
    per_epoch = in_epochs(MultiStep(0.1, milestones=[60, 120, 160], factor=0.2), steps_per_epoch=391)
    spans = spans_of(per_epoch, 200 * 391)
    assert [s.first for s in spans] == [0, 60 * 391, 120 * 391, 160 * 391]
    assert all(s.flat for s in spans)


def test_two_different_steps():
    spans = spans_of([0.1, 0.01], 2)
    check_cover(spans, 2)
    assert [s.jump for s in spans] == [False, True]


@pytest.mark.parametrize("per_epoch", [False, True])
def test_cosine_is_a_ramp_in_eight_pieces(per_epoch):
    schedule = in_epochs(Cosine(0.1, steps=200), steps_per_epoch=10) if per_epoch else Cosine(0.1, steps=2000)
    spans = spans_of(schedule, 2000)
    check_cover(spans, 2000)
    assert firsts(spans) == list(range(0, 2000, 250))
    assert not any(s.flat or s.jump for s in spans)


def test_warm_up_is_a_phase_before_the_cosine():
    spans = spans_of(Warmup(Cosine(0.1, steps=950), steps=50), 1000)
    check_cover(spans, 1000)
    assert firsts(spans)[:2] == [0, 50] and len(spans) == 9
    assert not any(s.flat or s.jump for s in spans)


@pytest.mark.parametrize(("growth", "starts"), [(1, [250, 500, 750]), (2, [250, 750])])
def test_every_warm_restart_begins_a_phase_with_a_jump(growth, starts):
    spans = spans_of(Cosine(0.1, steps=250, cycles=None, cycle_growth=growth), 1000)
    check_cover(spans, 1000)
    assert [s.first for s in spans if s.jump] == starts
    assert min(s.steps for s in spans) > 50  # no splinter before a restart


def test_warm_up_stable_decay():
    spans = spans_of(WarmupStableDecay(0.1, warmup=50, stable=750, decay=200), 1100)
    check_cover(spans, 1100)
    flat = [(s.first, s.steps) for s in spans if s.flat]
    assert flat == [(50, 751), (1000, 100)]
    falling = [s for s in spans if 801 <= s.first < 1000]
    assert len(falling) == 3 and not any(s.flat or s.jump for s in falling)  # a fall to zero is cut even when short


def test_a_ramp_that_begins_with_a_jump_is_marked():
    lr = np.concatenate([np.full(500, 0.1), np.linspace(0.01, 0.005, 500)])
    spans = cut(lr, np.full(1000, WD))
    assert [(s.first, s.flat, s.jump) for s in spans[:3]] == [(0, True, False), (500, False, True), (625, False, False)]
    smooth = cut(np.concatenate([np.full(500, 0.1), np.linspace(0.0999, 0.005, 500)]), np.full(1000, WD))
    assert not any(s.jump for s in smooth)


@pytest.mark.parametrize(("change", "jump"), [(0.18, False), (0.22, True)])
def test_a_change_by_more_than_a_fifth_is_a_jump(change, jump):
    """Between two flat stretches, up or down, in lr or wd; within a ramp the fifth is that of the largest lr or wd."""
    down, up = [1.0] * 500 + [1 - change] * 500, [1 - change] * 500 + [1.0] * 500
    for values in (down, up):
        assert [s.jump for s in spans_of(values, 1000)] == [False, jump]
    assert [s.jump for s in spans_of(0.1, 1000, weight_decay=down)] == [False, jump]
    saw = np.concatenate([np.linspace(0.9, 1, 600), np.linspace(1 - change, 0.5, 400)])
    in_lr, in_decay = spans_of(saw, 1000), spans_of(np.linspace(1, 0.9, 1000), 1000, weight_decay=saw)
    assert [s.first for s in in_lr if s.jump] == [s.first for s in in_decay if s.jump] == ([600] if jump else [])


@pytest.mark.parametrize(("turns", "phases"), [(20, 21), (21, 8)])
def test_up_to_twenty_turns_begin_phases_and_more_are_noise(turns, phases):
    """A zigzag is cut where it turns; a noisier one is a ramp like any other, in eight pieces."""
    corners = 1.0 + 0.1 * (np.arange(turns + 2) % 2)
    length = 40 * (turns + 1)
    lr = np.interp(np.arange(length), np.linspace(0, length - 1, turns + 2).round(), corners)
    spans = cut(lr, np.full(length, WD))
    check_cover(spans, length)
    assert len(spans) == phases and not any(s.flat or s.jump for s in spans)


def test_weight_decay_cuts_too():
    spans = spans_of(0.1, 100, weight_decay=[WD] * 60 + [2 * WD] * 40)
    assert [(s.first, s.flat, s.jump) for s in spans] == [(0, True, False), (60, True, True)]
    small = spans_of(0.1, 100, weight_decay=[WD] * 60 + [1.1 * WD] * 40)
    assert [s.jump for s in small] == [False, False]


def test_short_plateaus_belong_to_the_ramp():
    """Under 2 % of the run a constant stretch is not a phase; at 2 % it is."""
    lr = np.linspace(1, 0.5, 1000)
    lr[500:519] = lr[500]
    assert not any(s.flat for s in cut(lr, np.full(1000, WD)))
    lr[500:520] = lr[500]
    flat = [s for s in cut(lr, np.full(1000, WD)) if s.flat]
    assert [(s.first, s.steps) for s in flat] == [(500, 20)]


PIECE = st.tuples(
    st.sampled_from(["flat", "line", "wiggle"]),
    st.integers(1, 80),
    st.floats(0, 1),
    st.floats(0, 1),
)


@settings(max_examples=200)
@given(st.lists(PIECE, min_size=1, max_size=8), st.lists(PIECE, min_size=1, max_size=3))
def test_every_step_is_in_exactly_one_span_and_flat_spans_are_constant(pieces, decays):
    def build(parts):
        rows = []
        for kind, length, a, b in parts:
            if kind == "flat":
                rows.append(np.full(length, a))
            elif kind == "line":
                rows.append(np.linspace(a, b, length))
            else:
                rows.append(a + b * np.sin(np.arange(length)) ** 2)
        return np.concatenate(rows)

    lr = build(pieces)
    wd = np.resize(build(decays), len(lr))
    spans = cut(lr, wd)
    check_cover(spans, len(lr))
    for span in spans:
        inside = slice(span.first, span.first + span.steps)
        if span.flat:
            assert np.ptp(lr[inside]) == 0 and np.ptp(wd[inside]) == 0
            assert span.steps >= max(2, int(0.02 * len(lr)))
        if span.jump:
            at = span.first
            lr_change = abs(lr[at] - lr[at - 1]) / max(lr[at], lr[at - 1], 1e-300)
            wd_change = abs(wd[at] - wd[at - 1]) / max(wd[at - 1], 1e-300)
            assert at > 0 and (lr_change > 0.2 or wd_change > 0.2)


@given(count=st.integers(0, 500), most=st.integers(2, 60), also=st.lists(st.integers(0, 499), max_size=4))
def test_thinned_positions_have_both_ends_and_equal_distances(count, most, also):
    kept = [place for place in also if place < count]
    places = thinned(count, most=most, boundaries=kept)
    assert set(kept) <= set(places.tolist()) <= set(range(count))
    even = thinned(count, most=most)
    assert len(even) == min(count, most)
    if count > 1:
        assert (even[0], even[-1]) == (0, count - 1)
        assert np.ptp(np.diff(even)) <= 1
