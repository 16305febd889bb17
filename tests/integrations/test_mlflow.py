"""What MLflow's own client finds in the store of a watched run."""

from __future__ import annotations

import mlflow
import pytest
import torch
from tests.helpers.logged import assert_logged, expected, sgd, snippet
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.integrations.mlflow import MLflowSink


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Files: all that the small package has; a database takes all of mlflow."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    uri = (tmp_path / "store").as_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def read(uri, run_id):
    client = mlflow.MlflowClient(tracking_uri=uri)
    tags = client.get_run(run_id).data.metrics
    histories = {tag: client.get_metric_history(run_id, tag) for tag in tags}
    assert all(len({each.step for each in history}) == len(history) for history in histories.values())  # none twice
    return {tag: {each.step: each.value for each in history} for tag, history in histories.items()}


def test_what_is_logged_is_what_was_sampled(store):
    net = make_net()
    optimizer = sgd(net)
    with mlflow.start_run() as run, eq.watch(net, optimizer, every=1, sinks=[MLflowSink()]) as monitor:
        train(net, optimizer, 4)
        mlflow.log_metric("loss", 1.0, step=1000)
    found = read(store, run.info.run_id)
    assert found.pop("loss") == {1000: 1.0}
    assert_logged(found, expected(monitor.samples()))


def test_a_run_need_not_be_the_active_one_nor_in_the_present_store(store, tmp_path):
    other = (tmp_path / "other").as_uri()
    run = mlflow.MlflowClient(tracking_uri=other).create_run("0")
    for given in (run, run.info.run_id):
        net = make_net()
        optimizer = sgd(net)
        sink = MLflowSink(given, tracking_uri=other, metrics=["norm"])
        with eq.watch(net, optimizer, every=1, sinks=[sink]):
            train(net, optimizer, 1)
    history = mlflow.MlflowClient(tracking_uri=other).get_metric_history(run.info.run_id, "equilibria/norm/0.weight")
    assert [each.step for each in history] == [0, 0]  # two trainings of one step each


def test_names_that_mlflow_does_not_take_are_changed(store):
    net = make_net()
    optimizer = sgd(net)
    sink = MLflowSink(metrics=["norm"], layers=100)
    with (
        mlflow.start_run() as run,
        eq.watch(net, optimizer, every=1, granularity="row", select="0.weight", sinks=[sink]),
    ):
        train(net, optimizer, 1)
    assert "equilibria/norm/0.weight_7_" in read(store, run.info.run_id)


class Named(torch.nn.Module):
    """Layers of the given names, one after the other."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6, bias=False) for name in names})

    def forward(self, inputs):
        for layer in self.layers.values():
            inputs = layer(inputs)
        return inputs


def test_every_layer_has_a_name_of_its_own_that_mlflow_takes(store):
    names = ["q[1]", "q(1)", "q_1_", "x" * 250 + "1", "x" * 250 + "2", "a//b", "a/b", "é" * 120]
    net = Named(names)
    optimizer = sgd(net)
    with (
        mlflow.start_run() as run,
        eq.watch(net, optimizer, every=1, sinks=[MLflowSink(metrics=["norm"])]) as monitor,
    ):
        train(net, optimizer, 3)
    found = read(store, run.info.run_id)
    single = {tag: tuple(found[tag][step] for step in range(3)) for tag in found if tag.startswith("equilibria/norm/l")}
    samples = monitor.samples().select(["param", "norm"]).to_pylist()
    wanted = {tuple(row["norm"] for row in samples if row["param"] == f"layers.{name}.weight") for name in names}
    assert set(single.values()) == wanted
    assert len(single) == len(wanted) == len(names)
    assert max(map(len, single)) == 250
    assert "equilibria/norm/layers.q_1_.weight" in single


def test_without_a_run_there_is_a_warning_and_none_is_begun(store):
    net = make_net()
    optimizer = sgd(net)
    monitor = eq.watch(net, optimizer, every=1, sinks=[MLflowSink()])
    with monitor, pytest.warns(WatchWarning, match=r"no active MLflow run; expected one: call mlflow.start_run\(\)"):
        train(net, optimizer, 3)
    assert mlflow.active_run() is None
    assert monitor.samples().num_rows == 9


def test_something_else_is_refused():
    with pytest.raises(EquilibriaError, match="got run of type int; expected an MLflow run or its id"):
        MLflowSink(3)


def test_the_lines_on_the_page_run(store):
    net = make_net()
    optimizer = sgd(net)
    world = {"model": net, "optimizer": optimizer}
    exec(snippet("MLflow"), world)
    with mlflow.start_run() as run, world["monitor"]:
        train(net, optimizer, 1)
    assert_logged(read(store, run.info.run_id), expected(world["monitor"].samples()))
