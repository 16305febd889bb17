"""Reading the samples that were appended to a run since the last look."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.report_helpers import run
from tests.helpers.served import columns, write_run

from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter, read_record
from equilibria.records._reader import RecordTail
from equilibria.records._segment import segment_paths


def new_rows(tail):
    return sum(appended.batch.num_rows for appended in tail.read())


def test_a_tail_reads_everything_once(tmp_path):
    samples, metadata = run(2, steps=200, every=10)
    tail = RecordTail(tmp_path / "a")
    with RecordWriter(tmp_path / "a", metadata=metadata) as writer:
        assert new_rows(tail) == 0
        for begin in range(0, 40, 8):
            writer.append(columns(samples.slice(begin, 8)))
            writer.flush()
            assert new_rows(tail) == 8
            assert new_rows(tail) == 0
    assert new_rows(tail) == 0
    assert tail.notes == ()


@pytest.mark.parametrize("cut", [1, 7, 300, 3000])
def test_a_tail_waits_for_the_rest_of_a_torn_batch(tmp_path, cut):
    samples = write_run(tmp_path / "a", steps=400)
    path = segment_paths(tmp_path / "a")[0]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    tail = RecordTail(tmp_path / "a")
    before = new_rows(tail)
    path.write_bytes(content)
    assert before + new_rows(tail) == samples.num_rows
    assert tail.notes == ()


def test_a_file_that_grows_by_a_few_bytes_at_a_time(tmp_path):
    """Also where it ends after the schema, or between the dictionaries of a batch and the batch."""
    samples, metadata = run(2, steps=60, every=10)
    with RecordWriter(tmp_path / "a", metadata=metadata) as writer:
        for begin in range(0, 12, 4):
            writer.append(columns(samples.slice(begin, 4)))
            writer.flush()
    path = segment_paths(tmp_path / "a")[0]
    content = path.read_bytes()
    tail, rows = RecordTail(tmp_path / "a"), []
    for size in range(0, len(content) + 8, 8):
        path.write_bytes(content[:size])
        rows.append(new_rows(tail))
    assert [count for count in rows if count] == [4, 4, 4]
    assert tail.notes == ()


def test_bytes_after_the_end_of_a_stream_are_noted(tmp_path):
    samples = write_run(tmp_path / "a", steps=400)
    with segment_paths(tmp_path / "a")[0].open("ab") as file:
        file.write(b"more")
    record = read_record(tmp_path / "a")
    assert record.samples().num_rows == samples.num_rows
    assert "bytes after them left" in record.notes[0]


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    write_run(tmp_path / "a", steps=400)
    path = segment_paths(tmp_path / "a")[0]
    tail = RecordTail(tmp_path / "a")
    list(tail.read())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EquilibriaError, match="became shorter"):
        list(tail.read())


def test_damage_in_the_middle_is_noted(tmp_path):
    samples, metadata = run(2, steps=400, every=10)
    with RecordWriter(tmp_path / "a", metadata=metadata) as writer:
        for begin in (0, 40):
            writer.append(columns(samples.slice(begin, 40)))
            writer.flush()
    path = segment_paths(tmp_path / "a")[0]
    content = bytearray(path.read_bytes())
    steps = np.repeat(np.arange(20, 40) * 10, 2).astype(np.int64).tobytes()
    place = content.index(steps)
    content[place : place + 16] = b"\0" * 16
    path.write_bytes(content)
    tail = RecordTail(tmp_path / "a")
    assert new_rows(tail) == 40
    assert "damaged" in tail.notes[0]


def test_a_tail_leaves_out_a_segment_of_another_run_as_the_reader_does(tmp_path):
    for name in ("a", "b"):
        with RecordWriter(tmp_path / name, metadata={}) as writer:
            writer.append({"step": [0], "param": ["w"], "norm": [1.0]})
    copied = (tmp_path / "b" / "samples-000.arrows").read_bytes()
    (tmp_path / "a" / "samples-001.arrows").write_bytes(copied)
    tail = RecordTail(tmp_path / "a")
    assert (new_rows(tail), new_rows(tail)) == (1, 0)
    assert tail.notes == tail.foreign == read_record(tmp_path / "a").notes
    assert "belongs to another run" in tail.notes[0]
