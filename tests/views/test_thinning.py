"""Short series against a slow loop over the long ones: no extreme is lost, no value is invented."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.views.thinning import stretches

ROWS = st.lists(
    st.tuples(
        st.integers(0, 60),  # step
        st.integers(-1, 2),  # layer
        st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)),
    ),
    max_size=80,
)
BREAKS = st.lists(st.integers(0, 60), max_size=3, unique=True).map(sorted)


def slow_weight(steps, place):
    """Half the way to both neighbours; at an end as far beyond, up to half the mean distance."""
    mean = (steps[-1] - steps[0]) / max(len(steps) - 1, 1)
    gaps = [steps[place] - steps[place - 1]] if place else []
    gaps += [steps[place + 1] - steps[place]] if place + 1 < len(steps) else []
    return max((sum(gaps) + (min(gaps[0], mean) if len(gaps) == 1 else 0)) / 2, 1.0)


def slow(rows, most, breaks):
    """Stretches as lists of (step, value, weight), by layer and number of the stretch, in the order of their steps."""
    steps = [step for step, layer, _ in rows if layer >= 0]
    parts: dict[tuple[int, object], list[tuple[int, float, float]]] = {}
    rows = sorted(rows, key=lambda row: row[0])
    for place, (step, layer, value) in enumerate(rows):
        if layer < 0:
            continue
        if len(set(steps)) <= most:
            number = step
        else:
            length = max(steps) - min(steps) + 1
            number = ((step - min(steps)) * most // length, sum(step >= start for start in breaks))
        own = [at for at, (_, other, _) in enumerate(rows) if other == layer]
        weight = slow_weight([rows[at][0] for at in own], own.index(place))
        parts.setdefault((layer, number), []).append((step, value, weight))
    return [parts[key] for key in sorted(parts)]


@given(rows=ROWS, most=st.integers(1, 12), breaks=BREAKS)
def test_every_number_is_that_of_a_slow_loop(rows, most, breaks):
    steps, layers, values = ([row[i] for row in rows] for i in range(3))
    short = stretches(steps, layers, most=most, breaks=breaks)
    low, high = short.envelope(values)
    rms, line = short.rms(values), short.line(values)
    expected = slow(rows, most, breaks)
    assert len(low) == len(high) == len(rms) == len(expected)
    assert [(int(a), int(b)) for a, b in zip(short.first, short.last, strict=True)] == [
        (part[0][0], part[-1][0]) for part in expected
    ]
    assert len(line) == len(short.line_steps()) == len(expected) * (1 if short.single else 2)
    for place, part in enumerate(expected):
        known = [value for _, value, _ in part if math.isfinite(value)]
        weights = [weight for _, value, weight in part if math.isfinite(value)]
        if not known:
            assert np.isnan([low[place], high[place], rms[place]]).all()
            continue
        assert (low[place], high[place]) == (min(known), max(known))
        squares = math.fsum(weight * value**2 for weight, value in zip(weights, known, strict=True))
        assert rms[place] == pytest.approx(math.sqrt(squares / math.fsum(weights)), rel=1e-12)
        if not short.single:
            in_order = [min(known), max(known)]
            in_order.sort(key=known.index)
            assert line[2 * place : 2 * place + 2].tolist() == in_order


def test_the_number_of_stretches_is_bounded():
    short = stretches(np.arange(100_000) * 7, np.zeros(100_000), most=300, breaks=[5, 1000, 70_001])
    assert 300 <= len(short.starts) <= 303


def test_a_single_spike_is_kept():
    values = np.ones(200_000)
    values[123_457] = 50.0
    short = stretches(np.arange(200_000), np.zeros(200_000), most=500)
    low, high = short.envelope(values)
    assert high.max() == short.line(values).max() == 50.0
    assert np.count_nonzero(high > 1) == 1
    place = np.argmax(high)
    assert short.first[place] <= 123_457 <= short.last[place]
    assert (low == 1).all()


def test_no_stretch_goes_across_a_break():
    steps = np.arange(1000)
    short = stretches(steps, np.zeros(1000), most=7, breaks=[600])
    low, high = short.envelope(np.where(steps < 600, 1.0, 0.1))
    assert (low == high).all()
    assert 600 in short.first


def test_layers_sampled_at_other_steps_share_the_stretches():
    steps, layers = [*range(0, 100, 2), *range(1, 100, 2)], [0] * 50 + [1] * 50
    short = stretches(steps, layers, most=10)
    assert short.stretch.tolist() == [*range(10), *range(10)]
    assert short.layer.tolist() == [0] * 10 + [1] * 10


def test_few_samples_stay_as_they_are():
    short = stretches([5, 0, 9], [0, 0, 0], most=3)
    assert short.single
    assert short.line([1.0, 2.0, 3.0]).tolist() == [2.0, 1.0, 3.0]
    assert short.line_steps().tolist() == [0, 5, 9]


def test_nothing_gives_nothing():
    short = stretches([], [], most=10)
    assert [len(part) for part in (*short.envelope([]), short.rms([]), short.line([]), short.line_steps())] == [0] * 5


def test_a_line_has_the_extremes_of_every_stretch_in_the_order_of_their_steps():
    rising, falling, flat, twice = [2, 1, 5, 3], [9, 4, 0, 4], [7, 7, 7, 7], [3, 6, 3, 6]
    short = stretches(range(16), [0] * 16, most=4)
    assert short.line([*rising, *falling, *flat, *twice]).tolist() == [1, 5, 9, 0, 7, 7, 3, 6]
    assert short.line_steps().tolist() == [0, 3, 4, 7, 8, 11, 12, 15]


def test_the_root_mean_square_weighs_a_value_by_the_steps_it_stands_for():
    steps = np.array([*range(10), *range(10, 110, 10)])  # ten dense samples, ten sparse ones
    values = np.where(steps < 10, 5.0, 1.0)
    (rms,) = stretches(steps, np.zeros(20), most=1).rms(values)
    # The dense ones weigh 1; of the sparse ones the first weighs 5.5, the last
    # 5 and half the mean distance, the others 10.
    weights = np.array([1.0] * 10 + [5.5] + [10.0] * 8 + [5 + 100 / 19 / 2])
    assert rms == pytest.approx(math.sqrt(np.average(values**2, weights=weights)), rel=1e-12)
