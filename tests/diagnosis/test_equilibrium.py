"""When a change of the settings explains how far a layer was thrown out of equilibrium."""

from __future__ import annotations

from typing import Any

import pytest

from equilibria.diagnosis.equilibrium import Disturbance


def disturbance(dip: float, *, expected: float) -> Disturbance:
    layer: Any = None  # not read
    return Disturbance(layer, 99, 100, 110, "lr was divided by 10", 10.0, dip, expected, recovered=None)


@pytest.mark.parametrize("expected", [0.316, 3.16])
@pytest.mark.parametrize(("ratio", "explained"), [(1.0, True), (1.95, True), (2.05, False)])
def test_a_dip_is_explained_if_it_is_within_a_factor_of_two_of_the_expected_one(expected, ratio, explained):
    assert disturbance(expected * ratio, expected=expected).as_expected is explained
    assert disturbance(expected / ratio, expected=expected).as_expected is explained
