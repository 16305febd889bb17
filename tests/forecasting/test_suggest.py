"""The suggested plan: really the closest of those tried, and closer only for more changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.helpers.planted_walks import Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import Scenario, forecast, suggest
from equilibria.theory.schedules import FromValues, MultiStep

RUN = Walk(layers=2).run(np.full(150, 0.1))
DROP, STEPS = MultiStep(0.1, milestones=[200], factor=0.1), 340  # 190 steps left: each of them is compared


def off_by_hand(scenario: Scenario, wanted: np.ndarray) -> float:
    result = forecast(RUN, schedule=scenario, steps=STEPS)
    distances = [np.log(result.full(layer.name).angle.value / wanted) for layer in result.layers]
    weights = np.ones(len(wanted))
    return max(math.exp(math.sqrt(np.average(distance**2, weights=weights))) for distance in distances)


@pytest.fixture(scope="module")
def constant():
    return suggest(RUN, schedule=DROP, steps=STEPS, target=0.02)


def test_closeness_follows_from_the_forecasts_of_the_proposals(constant):
    for proposal in constant.proposals:
        assert proposal.off == pytest.approx(off_by_hand(proposal.scenario, np.full(190, 0.02)), rel=1e-6)


def test_no_other_plan_of_the_space_is_closer(constant):
    for rescale in (False, True):
        for factor in (1.0, 4.0, 10.0):
            decay = np.where(np.arange(STEPS) < 200, 5e-3, 5e-3 * factor)
            other = Scenario(DROP, weight_decay=FromValues(decay), rescale=rescale)
            assert constant.best.off <= off_by_hand(other, np.full(190, 0.02)) * (1 + 1e-6)


def test_more_changes_come_closer(constant):
    assert constant.proposals[0].changes == ()
    changes = [len(proposal.changes) for proposal in constant.proposals]
    assert changes == sorted(set(changes))
    off = [proposal.off for proposal in constant.proposals]
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.5 * (off[0] - 1) + 1


def test_the_planted_change_is_found():
    decay = np.where(np.arange(STEPS) < 200, 5e-3, 2e-2)
    planted = forecast(RUN, schedule=Scenario(DROP, weight_decay=FromValues(decay)), steps=STEPS)
    angle = np.concatenate([np.ones(150), planted.full("layer0").angle.value])
    result = suggest(RUN, schedule=DROP, steps=STEPS, target=FromValues(angle))
    assert ("wd x4 from step 200",) in [proposal.changes for proposal in result.proposals]


def test_in_equilibrium_as_given_by_rescaling():
    result = suggest(RUN, schedule=DROP, steps=STEPS, target="equilibrium")
    assert result.proposals[1].changes == ("rescale as lr or wd changes",)


def test_the_same_answer_every_time(constant):
    again = suggest(RUN, schedule=DROP, steps=STEPS, target=0.02)
    assert [proposal.changes for proposal in again.proposals] == [proposal.changes for proposal in constant.proposals]
    assert again.searched == constant.searched == 2 * 5 * 7**2
    assert any("490 plans" in line for line in constant.assumptions)


def test_a_constant_plan_has_no_drop_to_move():
    result = suggest(RUN, schedule=0.1, steps=STEPS, target="as now")
    assert result.searched == 2 * 7
    assert not any("drops" in line for line in result.assumptions)


def test_a_bad_target_raises():
    for target, reason in (
        ("fast", "'as now' or 'equilibrium'"),
        (0.0, "0 < target"),
        (FromValues([0.0] * STEPS), "of 0"),
    ):
        with pytest.raises(EquilibriaError, match=reason):
            suggest(RUN, schedule=DROP, steps=STEPS, target=target)
    with pytest.raises(EquilibriaError, match="more than 150"):
        suggest(RUN, schedule=DROP, steps=150, target=0.02)
