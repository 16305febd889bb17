from __future__ import annotations

import json
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.record_helpers import PARAMS, answer, assert_rows, rows, start

import equilibria.records._writer as writer_module
from equilibria.errors import EquilibriaError
from equilibria.records import FORMAT, SAMPLE_SCHEMA, RecordWriter, read_record


def batches(path) -> list[int]:
    return [batch.num_rows for batch in pa.ipc.open_stream(pa.memory_map(str(path)))]


def test_appended_rows_are_read_back_in_every_column(tmp_path):
    with RecordWriter(tmp_path / "runs" / "a", metadata={"lr": 0.1}) as writer:
        assert writer.directory == tmp_path / "runs" / "a"
        for step in range(5):
            writer.append(rows([step]))
    run = read_record(tmp_path / "runs" / "a")
    assert_rows(run.samples(), range(5))
    assert run.notes == ()
    assert batches(tmp_path / "runs" / "a" / "samples-000.arrows") == [10, 0]  # the last holds what is known at the end


def test_any_arrow_library_reads_the_stream(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
        writer.flush()
        writer.append(rows([1], params=("other", "conv1.weight")))  # the names differ from batch to batch
    table = pa.ipc.open_stream(pa.memory_map(str(tmp_path / "samples-000.arrows"))).read_all()
    assert table.schema.equals(SAMPLE_SCHEMA.with_metadata(table.schema.metadata), check_metadata=True)
    assert SAMPLE_SCHEMA.metadata.items() <= table.schema.metadata.items()
    assert table["param"].to_pylist() == [*PARAMS, "other", "conv1.weight"]


def test_the_description_is_json(tmp_path):
    with RecordWriter(tmp_path, metadata={"name": "Σ", "betas": (0.9, 0.999)}):
        running = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    ended = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert running["format"] == FORMAT
    assert running["sessions"][0]["file"] == "samples-000.arrows"
    assert running["sessions"][0]["metadata"] == {"name": "Σ", "betas": [0.9, 0.999]}
    assert running["sessions"][0]["ended"] is None
    assert ended["sessions"][0]["ended"] is not None
    assert ended["id"] == running["id"]
    assert len(ended["id"]) == 32


def test_the_description_is_replaced_and_never_changed_in_place(tmp_path):
    writer = RecordWriter(tmp_path, metadata={})
    with (tmp_path / "run.json").open(encoding="utf-8") as file:
        writer.close()
        assert json.load(file)["sessions"][0]["ended"] is None  # a reader that had it open reads the old one, whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "samples-000.arrows", "writer.lock"]


def test_values_are_copied_when_they_are_appended(tmp_path):
    columns = rows([0])
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(columns)
        columns["norm"][:] = -1.0
        columns["step"][:] = 77
        columns["param"][0] = "changed"
    assert_rows(read_record(tmp_path).samples(), [0])


def test_absent_columns_are_null_and_nan_stays_nan(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append({"step": [0], "param": ["a"], "norm": [np.nan], "cosine": [None]})
    table = read_record(tmp_path).samples()
    assert table["norm"].null_count == 0
    assert np.isnan(table["norm"][0].as_py())
    assert table["cosine"].to_pylist() == [None]
    assert table["angle"].to_pylist() == table["state"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"step": [0]}, "got no column param; every sample needs step and param"),
        ({}, "got no column step nor param"),
        ({"step": [0], "param": ["a"], "angel": [1.0]}, r"got unknown columns \['angel'\]; expected some of: step"),
        ({"step": [0, 1], "param": ["a"]}, r"different lengths \{'step': 2, 'param': 1\}"),
        ({"step": [0.5], "param": ["a"]}, r"got step=\[0.5\]; expected a sequence of whole numbers from 0"),
        ({"step": [-1], "param": ["a"]}, "expected a sequence of whole numbers from 0"),
        ({"step": [True], "param": ["a"]}, "expected a sequence of whole numbers from 0"),
        ({"step": np.array([2**63], dtype=np.uint64), "param": ["a"]}, "whole numbers from 0"),
        ({"step": 3, "param": ["a"]}, "got step=3"),
        ({"step": [0], "param": "a"}, "got param='a'; expected a sequence of strings"),
        ({"step": [0], "param": [None]}, "expected a sequence of strings"),
        ({"step": [0], "param": [1]}, "expected a sequence of strings"),
        ({"step": [0], "param": ["\ud800"]}, "expected a sequence of strings"),
        ({"step": [0], "param": ["a"], "norm": ["0.1"]}, r"got norm=\['0.1'\]; expected a sequence of numbers"),
        ({"step": [0], "param": ["a"], "norm": [[1.0]]}, "expected a sequence of numbers"),
        ({"step": [0], "param": ["a"], "norm": [object()]}, "expected a sequence of numbers"),
        ({"step": [0], "param": ["a"], "norm": [1 + 1j]}, "expected a sequence of numbers"),
    ],
)
def test_columns_that_do_not_fit_are_an_error_and_leave_no_trace(tmp_path, columns, message):
    with RecordWriter(tmp_path, metadata={}) as writer:
        with pytest.raises(EquilibriaError, match=message):
            writer.append(columns)
        writer.append(rows([1]))
    assert_rows(read_record(tmp_path).samples(), [1])


def test_a_full_buffer_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "_MOST_ROWS", 6)
    with RecordWriter(tmp_path, metadata={}, flush_seconds=3600) as writer:
        for step in range(4):
            writer.append(rows([step]))
        assert_rows(read_record(tmp_path).samples(), range(3))
    assert batches(tmp_path / "samples-000.arrows") == [6, 2, 0]


def test_flush_with_nothing_to_write_writes_nothing(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append({"step": [], "param": []})
        writer.flush()
        assert (tmp_path / "samples-000.arrows").stat().st_size == 0
    assert read_record(tmp_path).samples().num_rows == 0
    assert read_record(tmp_path).notes == ()


def test_several_threads_may_append(tmp_path):
    with RecordWriter(tmp_path, metadata={}, flush_seconds=0.001) as writer:

        def work(param):
            for _ in range(100):
                writer.append(rows([0], params=(param,)))

        threads = [threading.Thread(target=work, args=(f"p{k}",)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = read_record(tmp_path).samples(["param"])["param"].to_pylist()
    assert {name: names.count(name) for name in set(names)} == {f"p{k}": 100 for k in range(4)}


def test_closing_twice_is_allowed_and_appending_afterwards_is_not(tmp_path):
    writer = RecordWriter(tmp_path, metadata={})
    writer.append(rows([0]))
    writer.close()
    writer.close()
    for call in (writer.flush, lambda: writer.append(rows([1]))):
        with pytest.raises(EquilibriaError, match="is closed; make a new one with resume=True"):
            call()
    assert writer.failure is None


def test_the_thread_ends_with_the_writer(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        assert writer._thread.is_alive()
    writer._thread.join(timeout=10)
    assert not writer._thread.is_alive()


def test_an_exception_in_training_ends_the_session_properly(tmp_path):
    with pytest.raises(ZeroDivisionError), RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
        _ = 1 / 0
    assert_rows(read_record(tmp_path).samples(), [0])


NEVER_CLOSED = """
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter
writer = RecordWriter(sys.argv[1], metadata={}, flush_seconds=3600)
writer.append(rows([0, 1]))
raise SystemExit(3)
"""


def test_a_writer_that_is_never_closed_is_closed_at_exit(tmp_path):
    child = start(NEVER_CLOSED, tmp_path)
    child.communicate()
    assert child.returncode == 3
    run = read_record(tmp_path)
    assert_rows(run.samples(), [0, 1])
    assert run.sessions[0].ended is not None


CLOSED_BY_SIGNAL = """
import itertools, signal
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter
writer = RecordWriter(sys.argv[1], metadata={}, flush_seconds=3600)
def stop(*_):
    writer.close()
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
columns = rows([0])
print("ready", flush=True)
while True:
    writer.append(columns)
    writer.flush()
"""


def test_a_signal_handler_may_close_a_writer_at_work(tmp_path):
    child = start(CLOSED_BY_SIGNAL, tmp_path)
    assert answer(child) == "ready"
    time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 7
    run = read_record(tmp_path)
    assert run.notes == ()
    assert run.sessions[0].ended is not None


def test_a_signal_handler_may_close_while_its_own_thread_holds_the_locks(tmp_path):
    writer = RecordWriter(tmp_path, metadata={}, flush_seconds=3600)
    writer.append(rows([0]))

    def interrupted():
        with writer._write_lock, writer._buffer_lock:
            writer.close()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert_rows(read_record(tmp_path).samples(), [0])


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {"x": {1, 2}}])
def test_metadata_that_json_cannot_hold_are_an_error_before_anything_is_created(tmp_path, metadata):
    with pytest.raises(EquilibriaError, match="got metadata that JSON cannot hold"):
        RecordWriter(tmp_path / "a", metadata=metadata)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "5"])
def test_flush_seconds_must_be_positive(tmp_path, seconds):
    with pytest.raises(EquilibriaError, match="flush_seconds"):
        RecordWriter(tmp_path, metadata={}, flush_seconds=seconds)


def test_a_run_is_not_overwritten(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
    with pytest.raises(EquilibriaError, match="already holds a run; pass resume=True to append to it, or choose"):
        RecordWriter(tmp_path, metadata={})
    assert_rows(read_record(tmp_path).samples(), [0])
    with RecordWriter(tmp_path, metadata={}, resume=True):  # the failed writer left no lock
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_with_other_files_is_left_alone(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(EquilibriaError, match=r"holds other files \(thesis.tex\) and no run; choose a new directory"):
        RecordWriter(tmp_path, metadata={}, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_files_of_a_writer_killed_at_its_start_do_not_block(tmp_path):
    (tmp_path / "writer.lock").write_text("1 elsewhere\n")
    (tmp_path / "run.json.tmp").write_text('{"id"')
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
    assert_rows(read_record(tmp_path).samples(), [0])


def test_metadata_that_utf8_cannot_hold_come_back_unchanged(tmp_path):
    with RecordWriter(tmp_path / "run", metadata={"model": "half \ud800 a pair"}):
        pass
    assert read_record(tmp_path / "run").metadata == {"model": "half \ud800 a pair"}
