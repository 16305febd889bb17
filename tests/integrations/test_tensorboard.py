"""What TensorBoard's own reader finds in the files of a watched run."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.helpers.logged import assert_logged, expected, sgd, snippet
from tests.helpers.watched_worlds import make_net, train
from torch.utils.tensorboard import SummaryWriter

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.integrations.tensorboard import TensorBoardSink

SINGLE = 1e-6  # TensorBoard keeps float32: half a unit in the last place is 6e-8


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_what_is_logged_is_what_was_sampled(tmp_path):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=2, sinks=[TensorBoardSink(tmp_path / "tb")]) as monitor:
        train(net, optimizer, 9)
    assert monitor.samples().num_rows == 15
    assert_logged(read(tmp_path / "tb"), expected(monitor.samples()), rel=SINGLE)


def test_a_writer_of_yours_is_left_open_and_its_steps_alone(tmp_path):
    net, writer = make_net(), SummaryWriter(str(tmp_path))
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=[TensorBoardSink(writer)]) as monitor:
        for epoch in (100, 200):
            train(net, optimizer, 3)
            writer.add_scalar("loss", 1.0, epoch)
    writer.add_scalar("loss", 1.0, 300)
    writer.close()
    found = read(tmp_path)
    assert found.pop("loss") == {100: 1.0, 200: 1.0, 300: 1.0}
    assert_logged(found, expected(monitor.samples()), rel=SINGLE)


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path):
    net, sink = make_net(), TensorBoardSink(str(tmp_path))
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=[sink]) as monitor:
        train(net, optimizer, 3)
        state = monitor.state_dict()
    with eq.watch(net, optimizer, every=1, sinks=[sink]) as monitor:
        monitor.load_state_dict(state)
        train(net, optimizer, 2)
    assert list(read(tmp_path)["equilibria/norm/0.weight"]) == [0, 1, 2, 3, 4]


def test_without_a_sample_no_file_is_made(tmp_path):
    net = make_net()
    eq.watch(net, sgd(net), sinks=[TensorBoardSink(tmp_path / "tb")]).close()
    assert not (tmp_path / "tb").exists()


def test_something_else_is_refused():
    with pytest.raises(EquilibriaError, match="got where of type int; expected a folder or a SummaryWriter"):
        TensorBoardSink(3)


def test_the_lines_on_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = make_net()
    optimizer = sgd(net)
    world = {"model": net, "optimizer": optimizer}
    exec(snippet("TensorBoard"), world)
    with world["monitor"]:
        train(net, optimizer, 1)
    assert_logged(read("runs/tensorboard"), expected(world["monitor"].samples()), rel=SINGLE)
