"""The report and the forecast of one run name the same failing assumptions, in the same words."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.sample_worlds import World, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.assumptions import failing_by_layer
from equilibria.diagnosis.gradient_size import VARIES
from equilibria.diagnosis.run import sampled_run
from equilibria.forecasting import Forecast, forecast
from equilibria.theory import SGD
from equilibria.views.forecast.page import forecast_page
from equilibria.views.run.page import report_page

RULE = SGD(0.1, 2e-3, momentum=0.9)
NONE_FAILS = "none of the assumptions"


class Run:
    """A planted world as a run."""

    def __init__(self, planted: World) -> None:
        self._samples, self.metadata = planted.samples, planted.metadata

    def samples(self) -> pa.Table:
        return self._samples


def off_by(planted: World, factor: float) -> World:
    """The world with angles off their prediction, so that the report names the assumption it suspects."""
    place = planted.samples.column_names.index("angle_predicted")
    predicted = pa.array(planted.samples["angle_predicted"].to_numpy() / factor)
    return World(planted.samples.set_column(place, planted.samples.field(place), predicted), planted.metadata)


@pytest.fixture(scope="module")
def bursty() -> World:
    bursts = np.where(np.random.default_rng(0).random(1000) < 0.1, 8.0, 0.5)
    return off_by(world(RULE, 1000, unit_grad_sq=lambda step: float(bursts[step]), dim=64), 1.3)


@pytest.fixture(scope="module")
def drifting() -> World:
    return off_by(world(RULE, 1000, unit_grad_sq=lambda step: float(np.exp(step / 250)), dim=64), 1.3)


def suspected(planted: World) -> str:
    """The evidence of the finding about angles that are off."""
    (finding,) = (
        finding for finding in diagnose(planted.samples, metadata=planted.metadata) if finding.law == "transient.evolve"
    )
    return finding.evidence


def shown(result: Forecast) -> str:
    return " ".join(finding.evidence for finding in result.findings)


def test_bursts(bursty):
    result = forecast(Run(bursty), schedule=0.1, steps=1500)
    assert VARIES in suspected(bursty) and NONE_FAILS not in suspected(bursty)
    assert all(any(reason.startswith(VARIES) for reason in layer.validity) for layer in result.layers)
    assert shown(result).count(VARIES) == 1


def test_drift(drifting):
    failing = failing_by_layer(sampled_run(drifting.samples, metadata=drifting.metadata))
    assert {reason for reasons in failing.values() for reason in reasons} == {"its gradient drifts", VARIES}
    assert "its gradient drifts" in suspected(drifting)
    assert "its gradient drifts" in shown(forecast(Run(drifting), schedule=0.1, steps=1500))


def test_neither_page_names_one_where_none_fails():
    planted = off_by(world(RULE, 1000, dim=64), 1.3)
    assert NONE_FAILS in suspected(planted)
    result = forecast(Run(planted), schedule=0.1, steps=1500)
    assert not any(layer.validity for layer in result.layers) and "contradict" not in str(result.findings)


def test_both_pages_have_the_words(bursty):
    report = report_page(bursty.samples, metadata=bursty.metadata).inside()
    page = forecast_page(forecast(Run(bursty), schedule=0.1, steps=1500)).inside()
    assert VARIES in report and VARIES in page and NONE_FAILS not in report
    assert "near interpolation:" not in page
