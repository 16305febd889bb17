"""The report and the forecast of one run name the same failing assumptions, in the same words."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.sample_worlds import World, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.assumptions import failing, predicted_layers
from equilibria.diagnosis.gradient_size import VARIES
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.summary import summarise
from equilibria.forecasting import Forecast, forecast
from equilibria.theory import SGD
from equilibria.theory.schedules import MultiStep
from equilibria.views.forecast.page import forecast_page
from equilibria.views.run.page import report_page

RULE = SGD(0.1, 2e-3, momentum=0.9)
LAYERS = ("conv1.weight", "conv2.weight", "conv3.weight")
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
    judged = predicted_layers(sampled_run(drifting.samples, metadata=drifting.metadata))
    assert {reason for layer in judged.values() for reason in failing(layer)} == {"its gradient drifts", VARIES}
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


def loss(values: np.ndarray) -> pa.Table:
    names = pa.array(["loss"] * len(values)).dictionary_encode()
    return pa.table({"step": np.arange(len(values)), "name": names, "value": values})


def test_the_report_says_itself_that_gradients_vary_widely():
    """Also where the angles are as predicted."""
    bursts = np.where(np.random.default_rng(0).random(1000) < 0.1, 8.0, 0.5)
    planted = world(RULE, 1000, unit_grad_sq=lambda step: float(bursts[step]), dim=64)
    (finding,) = [one for one in diagnose(planted.samples, metadata=planted.metadata) if "varies" in one.subject]
    samples = planted.samples
    late = samples["step"].to_numpy() >= 500
    sizes = [samples["unit_grad_sq"].to_numpy()[late & (samples["param"].to_numpy() == name)] for name in LAYERS]
    widest = max(np.mean(size**2) / np.mean(size) ** 2 for size in sizes)
    assert f"{widest:.2g} times the square of the mean" in finding.evidence
    assert "over steps 500-999" in finding.evidence and "monitor.log(loss=loss)" in finding.remedy


def test_both_say_that_a_run_is_near_interpolation():
    planted, values = world(RULE, 1000, dim=64), np.geomspace(2.0, 0.01, 1000)
    found = diagnose(planted.samples, metadata=planted.metadata, metrics=loss(values))
    (finding,) = [one for one in found if "small against its start" in one.subject]
    run = Run(planted)
    run.metrics = lambda: loss(values)
    assert finding.evidence in shown(forecast(run, schedule=0.1, steps=1500))


def test_another_time_to_settle_than_the_report_gives_is_explained():
    """Far from equilibrium at a constant lr both agree; under a schedule the forecast names both numbers."""
    planted = world(RULE, 300, dim=64, start=3.0, invariant=True)
    report = summarise(planted.samples, metadata=planted.metadata)[0]
    same = forecast(Run(planted), schedule=0.1, steps=3000)
    assert not [finding for finding in same.findings if "another time" in finding.subject], same.findings
    falling = forecast(Run(planted), schedule=MultiStep(0.1, milestones=[350], factor=0.1), steps=5000)
    (finding,) = [finding for finding in falling.findings if "another time" in finding.subject]
    slowest = max(falling.layers, key=lambda layer: layer.steps_out.value)
    assert (
        f"{slowest.steps_out.value:,.0f} (" in finding.evidence and "lr x wd follows the schedule" in finding.evidence
    )
    assert f"needs {report.steps_to_settle:,.0f}" in finding.evidence
