"""The checks of a run get the numbers that its training logged, wherever it is diagnosed."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.report_helpers import run
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria import diagnosis
from equilibria.diagnosis.run import sampled_run
from equilibria.records._metrics import KeptMetrics
from equilibria.serve.follow import FollowedRun
from equilibria.views.run import page


def test_numbers_are_arrays_by_name_sorted_by_step():
    samples, metadata = run(1, steps=100)
    kept = KeptMetrics()
    kept.add("loss", [0, 2], [3.0, 1.0])
    kept.add("accuracy", [1], [0.5])
    metrics = sampled_run(samples, metadata=metadata, metrics=kept.table()).metrics
    listed = {name: (steps.tolist(), values.tolist()) for name, (steps, values) in metrics.items()}
    assert listed == {"loss": ([0, 2], [3.0, 1.0]), "accuracy": ([1], [0.5])}
    assert sampled_run(samples, metadata=metadata).metrics == {}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-3)
    with eq.watch(net, optimizer, every=1, log_dir=folder) as monitor:
        train(net, optimizer, 5, after_step=lambda step: monitor.log(loss=step))
    return monitor, folder


def served(folder):
    followed = FollowedRun(folder, name="a")
    followed.look()
    followed.read()
    return followed.show()


@pytest.mark.parametrize(
    "look",
    [
        lambda monitor, folder: monitor.findings(),
        lambda monitor, folder: monitor.table(),
        lambda monitor, folder: monitor._repr_html_(),
        lambda monitor, folder: eq.read_run(folder).findings(),
        lambda monitor, folder: eq.read_run(folder).table(),
        lambda monitor, folder: eq.read_run(folder).report(folder.parent / "page.html"),
        lambda monitor, folder: served(folder),
    ],
    ids=["findings", "table", "card", "recorded findings", "recorded table", "report", "served"],
)
def test_every_diagnosis_has_the_loss(recorded, monkeypatch, look):
    seen = []

    def spy(samples, **more):
        result = sampled_run(samples, **more)
        seen.append(result.metrics)
        return result

    monkeypatch.setattr(diagnosis, "sampled_run", spy)
    monkeypatch.setattr(page, "sampled_run", spy)
    look(*recorded)
    assert seen
    assert all(metrics["loss"][1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] for metrics in seen)
