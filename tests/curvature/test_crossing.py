"""The forecast of the step at which R reaches 1, on courses of R whose crossing is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.curvature._crossing import Crossing, Query, _first_root, forecast_crossing, observed_crossing
from equilibria.curvature._edge import EdgeDetector
from equilibria.records.tables import APPROACHING_EDGE, EDGE, PAST, STABLE

LR, DECAY = 0.1, 0.01
GROWTH = -2 * math.log1p(-LR * DECAY)


def course(log_sharpness, log_inverse_norm, *, until, every=20):
    """Queries of ``ln R = ln sharpness - ln |w|^2``."""
    return [
        Query(step, log_sharpness(step) + log_inverse_norm(step), log_sharpness(step))
        for step in range(0, until + 1, every)
    ]


@given(
    st.floats(-0.5, 2.0),
    st.floats(0.05, 0.9),
    st.integers(200, 3000),
    st.floats(1e-4, 2e-2),
    st.sampled_from([1, 7, 50]),
)
def test_a_steady_growth_is_continued_exactly(sharpening, start, until, growth, every):
    """ln sharpness grows at any constant rate, the norm shrinks by weight decay alone."""
    rate = growth * (1 + sharpening)
    until = max(8 * every, min(until, int(0.9 * math.log(1 / start) / rate)))
    queries = course(
        lambda step: sharpening * growth * step, lambda step: math.log(start) + growth * step, until=until, every=every
    )
    forecast = forecast_crossing(queries, decay_growth=growth)
    if queries[-1].log_ratio >= 0:
        assert forecast is None
    else:
        assert forecast is not None
        assert forecast.step == pytest.approx(math.log(1 / start) / rate, rel=1e-6)
        assert forecast.spread >= 0.1 * (forecast.step - queries[-1].step)


@given(st.floats(0.1, 10.0), st.integers(0, 10**6))
def test_neither_the_unit_of_the_loss_nor_the_first_step_matters(factor, shift):
    queries = course(lambda step: 1e-3 * math.sqrt(step), lambda step: GROWTH * step - 3.0, until=900)
    moved = [Query(query.step + shift, query.log_ratio, query.log_sharpness + math.log(factor)) for query in queries]
    one, other = (forecast_crossing(each, decay_growth=GROWTH) for each in (queries, moved))
    assert one is not None and other is not None
    assert other.step - shift == pytest.approx(one.step, rel=1e-7)
    assert other.spread == pytest.approx(one.spread, rel=1e-6)


def test_a_gradient_that_slows_the_norm_ever_more_is_continued():
    """d ln|w|^2/dt = -growth (1 - lack), with a lack that grows as the effective learning rate squared."""
    lack, rate = 0.01, 2 * GROWTH
    inverse_norm = lambda step: GROWTH * (step - lack * math.expm1(rate * step) / rate) - 1.5  # noqa: E731
    crossing = next(step for step in np.arange(0.0, 1000.0, 0.1) if inverse_norm(step) > 0)
    forecast = forecast_crossing(course(lambda _step: 0.0, inverse_norm, until=400), decay_growth=GROWTH)
    assert forecast is not None
    alone = 400 - inverse_norm(400) / GROWTH
    assert abs(forecast.step - crossing) < 0.1 * abs(alone - crossing)


def test_a_varying_growth_widens_the_spread_and_is_shrunk():
    steady = course(lambda step: 2e-4 * step, lambda step: GROWTH * step - 3.0, until=900)
    wavy = course(lambda step: 2e-4 * step + 0.1 * math.sin(step / 60), lambda step: GROWTH * step - 3.0, until=900)
    one, other = (forecast_crossing(queries, decay_growth=GROWTH) for queries in (steady, wavy))
    assert one is not None and other is not None
    assert other.spread > 2 * one.spread
    assert abs(other.step - other.spread) <= one.step <= other.step + other.spread


def test_no_forecast_without_growth_or_queries():
    falling = course(lambda step: -2 * GROWTH * step, lambda step: GROWTH * step - 1.0, until=900)
    assert forecast_crossing(falling, decay_growth=GROWTH) is None
    assert forecast_crossing([], decay_growth=GROWTH) is None
    assert forecast_crossing(falling[:3], decay_growth=GROWTH) is None
    never = course(lambda _step: 0.0, lambda step: -1.0 - math.exp(-step / 300), until=900)  # the norm settles below
    assert forecast_crossing(never, decay_growth=GROWTH) is None


@given(st.floats(-20.0, -1e-6), st.floats(0.01, 5.0), st.floats(0.0, 6.0), st.floats(0.0, 2.0))
def test_the_root_is_the_first_one_or_there_is_none(start, rate, lack, lack_growth):
    """Compared with the values on a fine grid up to where the function has its maximum."""
    time = _first_root(start, rate, lack, lack_growth)
    ends = math.log(rate / lack) / lack_growth if 0 < lack < rate and lack_growth > 1e-6 else -2 * start / rate
    grid = np.linspace(0.0, min(max(ends, 0.0), 1e4), 20_001)
    lacking = lack * grid if lack_growth < 1e-6 else lack * np.expm1(lack_growth * grid) / lack_growth
    above = np.flatnonzero(start + rate * grid - lacking > 1e-6)
    if len(above):
        assert time is not None and time <= grid[above[0]] + 1e-6
        assert len(above) == len(grid) or time >= grid[max(above[0] - 1, 0)] - 1e-6


def test_the_observed_crossing_lies_between_its_queries():
    assert observed_crossing(Query(100, -0.02, 0.0), 150, 0.02) == Crossing(125.0, 25.0)


# ---- in the detector


def taken(detector, steps, *, rate=GROWTH, turned_back=0.0, decay=(LR, DECAY)):
    return [
        detector.take(step, 0.5 * math.exp(rate * step), turned_back=turned_back, sharpness=3.0, decay=decay)
        for step in steps
    ]


def test_the_forecast_stays_until_the_crossing_and_the_observed_one_after_it():
    detector = EdgeDetector()
    states = taken(detector, range(0, 700, 20))
    crossing = math.log(2) / GROWTH
    known = [state for state in states if state.crossing is not None]
    assert states[-len(known) :] == known  # once there, it never vanishes
    assert [state.crossing.step for state in known] == pytest.approx([crossing] * len(known), rel=1e-6)
    assert [state.state for state in known[:-8]].count(APPROACHING_EDGE) >= 8
    assert states[-1].state == PAST and states[-1].crossing.spread <= 20
    at_the_edge = detector.take(700, 0.97, turned_back=1.0, sharpness=3.0, decay=(LR, DECAY))
    assert at_the_edge.state in (EDGE, STABLE, APPROACHING_EDGE)


def test_at_the_edge_the_observed_crossing_stays_below_one_too():
    detector = EdgeDetector()
    observed = taken(detector, range(0, 500, 20))[-1].crossing
    assert detector.take(500, 1.3, turned_back=1.0, sharpness=3.0, decay=(LR, DECAY)).state == EDGE
    swung = detector.take(520, 0.95, turned_back=1.0, sharpness=3.0, decay=(LR, DECAY))
    assert (swung.state, swung.crossing) == (EDGE, observed)
    left = detector.take(540, 0.5, turned_back=0.0, sharpness=3.0, decay=(LR, DECAY))
    assert (left.state, left.crossing) == (STABLE, None)


def test_new_settings_begin_a_new_forecast():
    detector = EdgeDetector()
    assert taken(detector, range(0, 200, 20))[-1].crossing is not None
    changed = taken(detector, range(200, 340, 20), rate=GROWTH / 2, decay=(LR / 2, DECAY))
    assert [state.crossing is None for state in changed[:4]] == [True] * 4
    assert changed[-1].crossing.step == pytest.approx(2 * math.log(2) / GROWTH, rel=1e-3)
    assert taken(detector, [400], decay=None)[0].crossing is None


@pytest.mark.parametrize("split", [100, 300, 420])
def test_a_checkpoint_keeps_the_forecast_and_the_observed_crossing(split):
    whole, first, second = EdgeDetector(), EdgeDetector(), EdgeDetector()
    expected = taken(whole, range(0, 500, 20))
    part = taken(first, range(0, split, 20))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert part + taken(second, range(split, 500, 20)) == expected


def test_a_long_run_remembers_a_bounded_number_of_queries():
    detector = EdgeDetector()
    state = taken(detector, range(330))[-1]
    assert len(detector.state_dict()["queries"]) <= 96
    assert state.crossing.step == pytest.approx(math.log(2) / GROWTH, rel=1e-6)
