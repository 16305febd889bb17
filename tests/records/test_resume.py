from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.record_helpers import PARAMS, assert_rows, rows

from equilibria.records import RecordWriter, read_record


def session(directory, steps, **metadata):
    with RecordWriter(directory, metadata=metadata, resume=True) as writer:
        for step in steps:
            writer.append(rows([step]))


def test_a_resumed_run_appends_a_session(tmp_path):
    session(tmp_path, range(3), lr=0.1, seed=1)
    first = read_record(tmp_path)
    session(tmp_path, range(3, 6), lr=0.2, host="b")
    run = read_record(tmp_path)
    assert_rows(run.samples(), range(6))
    assert run.notes == ()
    assert run.id == first.id
    assert run.metadata == {"lr": 0.2, "seed": 1, "host": "b"}
    assert [part.metadata for part in run.sessions] == [{"lr": 0.1, "seed": 1}, {"lr": 0.2, "host": "b"}]
    assert [part.file for part in run.sessions] == ["samples-000.arrows", "samples-001.arrows"]
    assert_rows(first.samples(), range(3))  # a run that was read before does not change


def test_resume_begins_a_run_where_there_is_none(tmp_path):
    session(tmp_path / "new", [0])
    assert_rows(read_record(tmp_path / "new").samples(), [0])


def test_after_a_rollback_the_later_session_wins(tmp_path):
    session(tmp_path, range(10))
    with RecordWriter(tmp_path, metadata={}, resume=True) as writer:
        again = rows([7, 8], params=("conv1.weight", "conv3.weight"))
        writer.append({**again, "norm": np.full(4, -1.0)})
    run = read_record(tmp_path)
    assert run.samples(["step"])["step"].to_pylist() == [s for s in range(7) for _ in range(2)] + [7, 7, 8, 8]
    assert run.samples(["norm"])["norm"].to_pylist()[-4:] == [-1.0] * 4
    # step 9 belongs to the abandoned line, and so does conv2.weight at step 7
    assert run.notes == ("samples-000.arrows: 6 rows left out, the run went back to step 7 after them",)


def test_a_rollback_inside_a_session(tmp_path):
    session(tmp_path, [0, 10, 20, 30, 15, 25])
    run = read_record(tmp_path)
    assert_rows(run.samples(), [0, 10, 15, 25])
    assert run.notes == ("samples-000.arrows: 4 rows left out, the run went back to step 15 after them",)


def test_a_session_that_is_left_out_entirely(tmp_path):
    for steps in ([5, 6], [3, 4], [2]):
        session(tmp_path, steps)
    run = read_record(tmp_path)
    assert_rows(run.samples(), [2])
    assert len(run.notes) == 2
    assert run.params == ("conv1.weight", "conv2.weight")


def test_no_number_is_used_twice_after_a_kill_before_the_first_flush(tmp_path):
    session(tmp_path, [0])
    session(tmp_path, [1])
    (tmp_path / "samples-001.arrows").unlink()  # killed between run.json and the file
    session(tmp_path, [2])
    run = read_record(tmp_path)
    assert [part.file for part in run.sessions] == [f"samples-00{k}.arrows" for k in range(3)]
    assert_rows(run.samples(), [0, 2])


def test_more_sessions_than_three_digits_stay_in_order(tmp_path):
    session(tmp_path, [0])
    (tmp_path / "samples-000.arrows").rename(tmp_path / "samples-999.arrows")
    session(tmp_path, [1])
    assert (tmp_path / "samples-1000.arrows").exists()
    assert_rows(read_record(tmp_path).samples(), [0, 1])


@given(sessions=st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=1, max_size=4))
def test_the_line_of_steps_by_its_definition(sessions):
    with tempfile.TemporaryDirectory() as directory:
        for steps in sessions:
            session(directory, steps)
        steps_read = read_record(directory).samples(["step"])["step"].to_pylist()[:: len(PARAMS)]
    expected = []
    for number, steps in enumerate(sessions):
        later = [step for after in sessions[number + 1 :] for step in after]
        for place, step in enumerate(steps):
            if all(step <= other for other in steps[place:]) and all(step < other for other in later):
                expected.append(step)
    assert steps_read == expected
