"""Logged numbers on disk: complete after a kill, without duplicates after a resume, absent in older records."""

from __future__ import annotations

import math
import time

import pyarrow as pa
import pytest
import torch
from tests.helpers.record_helpers import answer, finish, rows, start
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria.records import RecordWriter, read_record
from equilibria.records._metrics import metric_series
from equilibria.records._reader import RecordTail
from equilibria.records.tables import METRIC_FIELDS


def watched(place):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    return net, optimizer, eq.watch(net, optimizer, every=2, log_dir=place)


def listed(table):
    return list(zip(*(table[name].to_pylist() for name in ("step", "name", "value")), strict=True))


def numbers(steps, name="loss", shift=0.0):
    return {"step": list(steps), "name": [name] * len(steps), "value": [step + shift for step in steps]}


def test_the_record_has_every_logged_number(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    with monitor:
        train(net, optimizer, 5, after_step=lambda step: monitor.log(loss=step + 0.5, accuracy=math.inf))
        seen = monitor.metrics()
    run = eq.read_run(tmp_path / "run")
    assert listed(run.metrics()) == listed(seen)
    assert run.metrics().schema.remove_metadata() == METRIC_FIELDS.remove_metadata()
    assert metric_series(run.metrics())["loss"][1].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert run.notes == ()
    assert {check.table for check in run.verify().tables} == {"samples", "metrics", "diffusion"}
    assert run.verify().whole
    assert run.sessions[0].rows == {"samples": 9, "metrics": 10, "diffusion": 15}


def test_a_record_without_the_table_has_an_empty_one(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        writer.append(rows([0, 1]))
    table = read_record(tmp_path / "run").metrics()
    assert table.num_rows == 0
    assert table.column_names == ["step", "name", "value"]
    assert [file.name for file in (tmp_path / "run").glob("*.arrows")] == ["samples-000.arrows"]


def test_logging_alone_opens_no_record_beside_another(tmp_path):
    watched(tmp_path / "run")[2].close()
    _, _, monitor = watched(tmp_path / "run")
    for _ in range(1000):
        monitor.log(loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.warns(UserWarning, match="holds a run already"):
        monitor.close()
    assert read_record(tmp_path / "run-2").metrics().num_rows == 1000


def test_numbers_logged_before_a_checkpoint_is_loaded_open_no_record_beside_its_own(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 3, after_step=lambda step: monitor.log(loss=step))
    states = [part.state_dict() for part in (net, optimizer, monitor)]
    monitor.close()
    again = watched(tmp_path / "run")
    again[2].log(validation=1.0)
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    train(*again[:2], 1, after_step=lambda step: again[2].log(loss=3))
    again[2].state_dict()  # step 3 is not sampled, and its number is written all the same
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert metric_series(read_record(tmp_path / "run").metrics())["loss"][0].tolist() == [0, 1, 2, 3]
    again[2].close()


def test_a_resumed_run_has_no_number_twice_and_none_is_missing(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 6, before_step=lambda step: monitor.log(loss=step))
    parts = (net, optimizer, monitor)
    states = [part.state_dict() for part in parts]
    train(
        net,
        optimizer,
        5,
        before_step=lambda step: monitor.log(loss=100 + step),
        after_step=lambda step: monitor.log(late=1.0),
    )
    monitor.close()
    again = watched(tmp_path / "run")
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    with again[2]:
        train(*again[:2], 4, before_step=lambda step: again[2].log(loss=6 + step))
    run = read_record(tmp_path / "run")
    assert len(run.sessions) == 2
    assert listed(run.metrics()) == [(step, "loss", float(step)) for step in range(10)]


def test_numbers_of_earlier_steps_supersede_nothing_in_their_session(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        writer.append(rows([0]))
        writer.append(numbers([0, 5, 10]), table="metrics")
        writer.append(numbers([7], name="validation"), table="metrics")
        writer.append(numbers([5, 6], shift=0.5), table="metrics")
    table = read_record(tmp_path / "run").metrics()
    expected = [(0, "loss", 0.0), (5, "loss", 5.0), (5, "loss", 5.5), (6, "loss", 6.5), (7, "validation", 7.0)]
    expected.append((10, "loss", 10.0))
    assert listed(table) == expected


def test_a_later_session_supersedes_all_names_from_its_first_sample_on(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        writer.append(rows(range(10)))
        writer.append(numbers(range(10)), table="metrics")
        writer.append(numbers([0, 5], name="validation"), table="metrics")
    with RecordWriter(tmp_path / "run", metadata={}, resume=True) as writer:
        writer.append(rows([4, 6]))
        writer.append(numbers([6], shift=0.5), table="metrics")
    table = read_record(tmp_path / "run").metrics()
    assert listed(table) == [
        (0, "loss", 0.0),
        (0, "validation", 0.0),
        *[(step, "loss", float(step)) for step in (1, 2, 3)],
        (6, "loss", 6.5),
    ]


def test_damage_is_noted_and_the_other_numbers_are_read(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        writer.append(rows([0]))
        for step in range(6):
            writer.append(numbers([step]), table="metrics")
            writer.flush()
    path = tmp_path / "run" / "metrics-000.arrows"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    run = read_record(tmp_path / "run")
    assert 3 <= run.metrics().num_rows < 6
    assert any(note.startswith("metrics-000.arrows: ") and "damaged bytes are left out" in note for note in run.notes)
    assert not run.verify().whole
    path.unlink()
    run = read_record(tmp_path / "run")
    assert run.metrics().num_rows == 0
    assert "metrics-000.arrows is missing, with 6 rows" in run.notes


def test_the_tail_gives_numbers_as_they_are_written(tmp_path):
    tail = RecordTail(tmp_path / "run")
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        for step in range(3):
            writer.append(numbers([step]), table="metrics")
            writer.flush()
            batches = [appended for appended in tail.read() if appended.table == "metrics"]
            assert [appended.batch["step"].to_pylist() for appended in batches] == [[step]]


def test_another_name_than_text_is_refused(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={}) as writer, pytest.raises(ValueError, match="expected a sequence"):
        writer.append({"step": [0], "name": [None], "value": [1.0]}, table="metrics")


WAITS = """
import sys, time
import torch
from tests.helpers.watched_worlds import make_net, train
import equilibria as eq
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
monitor = eq.watch(net, optimizer, every=1, log_dir=sys.argv[1])
train(net, optimizer, 3, after_step=lambda step: monitor.log(loss=step))
print("logged", flush=True)
time.sleep(600)
"""


def test_a_kill_while_training_pauses_loses_no_number_older_than_two_seconds(tmp_path):
    process = start(WAITS, tmp_path / "run")
    assert answer(process) == "logged"
    end = time.monotonic() + 30
    while read_record(tmp_path / "run").metrics().num_rows < 3 and time.monotonic() < end:
        time.sleep(0.1)
    finish(process)
    assert listed(read_record(tmp_path / "run").metrics()) == [(step, "loss", float(step)) for step in range(3)]


def test_a_checkpoint_has_all_numbers_before_it(tmp_path):
    net, optimizer, monitor = watched(tmp_path / "run")
    train(net, optimizer, 3, after_step=lambda step: monitor.log(loss=step))
    monitor.state_dict()
    assert read_record(tmp_path / "run").metrics().num_rows == 3  # while the writer is at work
    monitor.close()


def test_thousands_of_names_of_another_writer_are_read(tmp_path):
    names = [f"metric {number} <b>&" for number in range(5000)]
    with RecordWriter(tmp_path / "run", metadata={}) as writer:
        writer.append(rows([0]))
        writer.append({"step": [0] * 5000, "name": names, "value": [1.0] * 5000}, table="metrics")
    table = read_record(tmp_path / "run").metrics()
    assert isinstance(table, pa.Table)
    assert list(metric_series(table)) == names
