"""Settled, on its way or disturbed, against the definition told as a story."""

from __future__ import annotations

import io

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.monitor.sample_rows import StateLabels
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, SETTLING, STATES

EVENTS = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=30)


def story(*events: tuple[bool, bool]) -> list[str]:
    """StateLabels of one weight from (settled, changed) at each sample."""
    labels = StateLabels(1)
    return [
        labels.update(np.array([settled]), changed=np.array([changed]), balanced=np.array([True]))[0]
        for settled, changed in events
    ]


def test_a_weight_that_was_never_settled_approaches_whatever_is_changed():
    assert story((False, False), (False, True), (False, False)) == [SETTLING] * 3


def test_a_change_that_unsettles_disturbs_until_it_has_settled_again():
    events = [(True, False), (False, True), (False, False), (False, True), (True, False), (False, False)]
    assert story(*events) == [SETTLED, DISTURBED, DISTURBED, DISTURBED, SETTLED, SETTLING]


def test_a_change_that_does_not_unsettle_is_none():
    assert story((True, False), (True, True), (True, False)) == [SETTLED] * 3


def test_a_weight_that_wanders_off_by_itself_approaches():
    assert story((True, False), (False, False), (False, True)) == [SETTLED, SETTLING, SETTLING]


@given(events=EVENTS)
def test_the_words_follow_their_definitions(events):
    labels = StateLabels(1)
    disturbed, was_settled = False, False
    for settled, changed, balanced in events:
        (word,) = labels.update(np.array([settled]), changed=np.array([changed]), balanced=np.array([balanced]))
        disturbed = not settled and (disturbed or (changed and was_settled))
        was_settled = settled
        expected = SETTLED if settled else DISTURBED if disturbed else SETTLING
        assert word == (expected if balanced else NO_EQUILIBRIUM)
        assert word in STATES


@given(events=EVENTS)
def test_weights_are_judged_one_by_one(events):
    both, single = StateLabels(2), StateLabels(1)
    for settled, changed, balanced in events:
        flags = [np.array([flag, not flag]) for flag in (settled, changed, balanced)]
        pair = both.update(flags[0], changed=flags[1], balanced=flags[2])
        (alone,) = single.update(flags[0][:1], changed=flags[1][:1], balanced=flags[2][:1])
        assert pair[0] == alone


@given(events=EVENTS, cut=st.integers(0, 30))
def test_a_checkpoint_goes_on_identically(events, cut):
    through, resumed = StateLabels(1), StateLabels(1)
    for at, (settled, changed, balanced) in enumerate(events):
        if at == cut:
            file = io.BytesIO()
            torch.save(through.state_dict(), file)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        flags = [np.array([flag]) for flag in (settled, changed, balanced)]
        words = [each.update(flags[0], changed=flags[1], balanced=flags[2]) for each in (through, resumed)]
        if at >= cut:
            assert words[0] == words[1]
