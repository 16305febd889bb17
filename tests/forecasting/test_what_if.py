"""Scenarios side by side: their numbers are sums and counts over every single step."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.helpers.planted_walks import Walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import Scenario, forecast, what_if
from equilibria.theory.schedules import MultiStep

RUN = Walk(layers=3).run(np.full(200, 0.1))
DROP = MultiStep(0.1, milestones=[300], factor=0.1)
SCENARIOS = {"as planned": DROP, "rescaled": Scenario(DROP, rescale=True), "more wd": Scenario(DROP, weight_decay=1e-2)}
RESULT = what_if(RUN, SCENARIOS, steps=600)


def test_totals_are_those_of_every_step():
    for name in SCENARIOS:
        for outcome in RESULT.outcomes(name):
            every = RESULT.forecasts[name].full(outcome.layer)
            assert outcome.integrated_angle.value == pytest.approx(every.angle.value.sum(), rel=1e-6)
            out = np.abs(every.angle.value / every.angle_equilibrium - 1) > 0.05
            assert outcome.steps_out.value == pytest.approx(out.sum(), abs=1)  # a step on the very edge
            assert outcome.final_angle.value == every.angle.value[-1]
            assert outcome.final_ratio == pytest.approx(every.angle.value[-1] / every.angle_equilibrium[-1])


def test_the_worst_layer_is_out_the_longest():
    for name in SCENARIOS:
        worst = RESULT.worst(name)
        assert worst.steps_out.value == max(outcome.steps_out.value for outcome in RESULT.outcomes(name))
    assert RESULT.worst("rescaled").steps_out.value < 0.3 * RESULT.worst("as planned").steps_out.value


def test_one_scenario_of_many_is_the_forecast_alone():
    alone = forecast(RUN, schedule=DROP, steps=600)
    np.testing.assert_array_equal(alone["layer1"].angle.high, RESULT.forecasts["as planned"]["layer1"].angle.high)


def test_errors_name_the_scenario():
    with pytest.raises(EquilibriaError, match="expected at least one"):
        what_if(RUN, {}, steps=600)
    with pytest.raises(EquilibriaError, match=r"^short: got schedule with 300 values for a run of 600 steps"):
        what_if(RUN, {"fine": 0.1, "short": [0.1] * 300}, steps=600)
    with pytest.raises(EquilibriaError, match=re.escape("expected one of: as planned, rescaled, more wd")):
        RESULT.worst("other")


def test_the_tables_name_every_layer_and_scenario():
    printed = str(RESULT.table())
    for word in (*SCENARIOS, "layer0", "layer1", "layer2", "steps out", "Assumed"):
        assert word in printed
    assert "layer2" in str(RESULT.forecasts["as planned"].table())
