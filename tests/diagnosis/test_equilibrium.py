"""When a change of the settings explains how far a layer was thrown out of equilibrium."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.helpers.sample_worlds import edited, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.equilibrium import Disturbance
from equilibria.findings import Finding
from equilibria.records.tables import RESCALED, SETTLING
from equilibria.theory import SGD


def disturbance(dip: float, *, expected: float) -> Disturbance:
    layer: Any = None  # not read
    return Disturbance(layer, 99, 100, 110, "lr was divided by 10", 10.0, dip, expected, False, False, recovered=None)


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


# ---- two drops


def dropped_twice(*, rescaled: tuple[str, ...] = (), state: str | None = None) -> list[Finding]:
    """Findings of a run whose lr fell by 10 at steps 1,000 and 1,100; other layers may have been rescaled then."""
    planted = world(
        RULE, 1300, lr=lambda step: 0.1 / 10 ** ((step >= 1000) + (step >= 1100)), dim=64, invariant=True, every=2
    )
    samples = planted.samples
    names, steps = np.array(samples["param"].to_pylist()), samples["step"].to_numpy()
    columns: dict[str, Any] = {"note": np.where(np.isin(names, rescaled) & (steps == 1100), RESCALED, None)}
    if state is not None:
        columns["state"] = [state] * len(samples)
    return list(diagnose(edited(samples, **columns), metadata=planted.metadata))


def test_after_two_drops_the_expected_dip_is_that_of_both():
    """One drop by 10 leaves 1/sqrt(10) of equilibrium, two leave about a tenth."""
    (finding,) = [finding for finding in dropped_twice() if "disturbed" in finding.subject]
    found = re.search(r"expected after this change and those before it: ([\d.]+)\)", finding.evidence)
    assert found is not None and float(found[1]) == pytest.approx(0.1, rel=0.15)
    assert "comes back by itself" in finding.remedy and "explains only a part" not in finding.remedy
    assert "weight_decay" not in finding.remedy  # after the second drop alone it would not keep the angle


def test_a_layer_that_a_controller_left_out_is_named():
    (finding,) = [finding for finding in dropped_twice(rescaled=("conv2.weight",)) if "disturbed" in finding.subject]
    assert re.search(r"rescaled 1 other layer at this change, but not conv[13].weight", finding.evidence)


def test_a_small_lr_that_is_held_is_not_the_end_of_a_schedule():
    """At 1 % of the peak, but constant: layers far from equilibrium are named, settled before or not."""
    (finding,) = [finding for finding in dropped_twice(state=SETTLING) if "out of equilibrium" in finding.subject]
    assert finding.subject.startswith("all 3 layers")
