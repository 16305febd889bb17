"""When a change of the settings explains how far a layer was thrown out of equilibrium."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.sample_worlds import edited, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.equilibrium import Disturbance
from equilibria.findings import Finding
from equilibria.records.tables import RESCALED
from equilibria.theory import SGD


def disturbance(dip: float, *, expected: float) -> Disturbance:
    layer: Any = None  # not read
    return Disturbance(layer, 99, 100, 110, "lr was divided by 10", 10.0, dip, expected, False, recovered=None)


@pytest.mark.parametrize("expected", [0.316, 3.16])
@pytest.mark.parametrize(("ratio", "explained"), [(1.0, True), (1.95, True), (2.05, False)])
def test_a_dip_is_explained_if_it_is_within_a_factor_of_two_of_the_expected_one(expected, ratio, explained):
    assert disturbance(expected * ratio, expected=expected).as_expected is explained
    assert disturbance(expected / ratio, expected=expected).as_expected is explained


RULE = SGD(0.1, 2e-3, momentum=0.9)


def dropped(*, predicted: float) -> list[Finding]:
    """Findings of a run whose lr fell by 10, a controller rescaled, and the angle is 0.6 of equilibrium since."""
    planted = world(RULE, 1200, lr=lambda step: 0.1 if step < 1000 else 0.01, dim=64, invariant=True)
    after = planted.samples["step"].to_numpy() >= 1000
    at_drop = planted.samples["step"].to_numpy() == 1000
    equilibrium = planted.samples["angle_equilibrium"].to_numpy()
    measured, expected = (
        np.where(after, factor * equilibrium, planted.samples[name].to_numpy())
        for factor, name in ((0.6, "angle"), (predicted, "angle_predicted"))
    )
    note = np.where(at_drop, RESCALED, None)
    table = edited(planted.samples, angle=measured, angle_predicted=expected, note=note)
    return list(diagnose(table, metadata=planted.metadata | {"controllers": [{"name": "RescaleOnDecay"}]}))


def test_a_drop_that_a_controller_made_up_for_disturbs_nothing():
    """Without the rescaling 0.32 of equilibrium would be expected; with it 1."""
    assert not [finding for finding in dropped(predicted=1.0) if "disturbed" in finding.subject]


def test_what_a_rescaling_left_is_expected_by_the_prediction_across_it():
    (finding,) = [finding for finding in dropped(predicted=0.7) if "disturbed" in finding.subject]
    assert "fell to 0.6 of its new equilibrium" in finding.evidence
    assert "(predicted across the controller's rescaling: 0.7)" in finding.evidence
    assert "expected" not in finding.evidence and "RescaleOnDecay(" not in finding.remedy
