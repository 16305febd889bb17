"""Running means against sums written out."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.monitor.predictor import RunningMean

VALUES = st.lists(st.sampled_from([0.0, 1.0, -2.0, 1e6, np.nan, np.inf, -np.inf]), min_size=1, max_size=30)


def filled(values, window) -> RunningMean:
    mean = RunningMean(1)
    for value in values:
        mean.add(np.array([value]), window=window)
    return mean


@given(values=VALUES)
def test_it_begins_as_the_plain_mean_of_what_is_finite(values):
    good = [value for value in values if np.isfinite(value)]
    mean = filled(values, 100.0)
    assert mean.count[0] == len(good)
    if good:
        assert mean.value[0] == pytest.approx(np.mean(good), rel=1e-9, abs=1e-9)
    else:
        assert np.isnan(mean.value[0])


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=40), window=st.integers(1, 10))
def test_later_it_forgets_exponentially(values, window):
    slow = 0.0
    for count, value in enumerate(values, start=1):
        share = 1 / min(count, window)
        slow = (1 - share) * slow + share * value
    assert filled(values, float(window)).value[0] == pytest.approx(slow, rel=1e-12, abs=1e-12)


def test_weights_are_independent_and_windows_may_differ():
    mean = RunningMean(3)
    for values in ([1.0, 1.0, np.nan], [3.0, 3.0, np.nan], [5.0, 5.0, 7.0]):
        mean.add(np.array(values), window=np.array([1.0, 10.0, 10.0]))
    assert mean.value.tolist() == [5.0, 3.0, 7.0]
    assert mean.count.tolist() == [3.0, 3.0, 1.0]


def test_a_window_below_one_sample_is_the_last_sample():
    assert filled([1.0, 2.0, 3.0], 0.01).value[0] == 3.0


def test_state_goes_through_a_safe_checkpoint():
    mean, file = filled([1.0, np.nan, 5.0], 2.0), io.BytesIO()
    torch.save(mean.state_dict(), file)
    file.seek(0)
    other = RunningMean(1)
    other.load_state_dict(torch.load(file, weights_only=True))
    for each in (mean, other):
        each.add(np.array([9.0]), window=2.0)
    assert other.value == mean.value == 6.0
    assert other.count == mean.count == 3.0


def test_a_checkpoint_is_no_view_of_the_mean():
    mean = filled([1.0], 2.0)
    state = mean.state_dict()
    mean.add(np.array([9.0]), window=2.0)
    assert state["value"].item() == 1.0
    other = RunningMean(1)
    other.load_state_dict(state)
    other.add(np.array([9.0]), window=2.0)
    assert state["value"].item() == 1.0
