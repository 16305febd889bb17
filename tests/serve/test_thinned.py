"""Reading what grows, and keeping a bounded part of it: against reading the whole run at once."""

from __future__ import annotations

import base64
import shutil

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.report_helpers import run
from tests.helpers.served import columns, write_run

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.summary import summarise
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter, read_record
from equilibria.records._segment import segment_paths
from equilibria.serve.follow import DAMAGED, DELETED, FINISHED, TRAINING, Followed
from equilibria.serve.tail import RunTail
from equilibria.serve.thinned import Thinned
from equilibria.views.run.curves import curves


def feed(thinned, samples, *, rows, session=0):
    for begin in range(0, samples.num_rows, rows):
        thinned.add(samples.slice(begin, rows).combine_chunks().to_batches(), session=session)


def sorted_rows(table):
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["param"]))


@given(rows=st.integers(1, 70), layers=st.integers(1, 4))
def test_a_short_run_is_kept_whole(rows, layers):
    samples, _ = run(layers, steps=300, every=10)
    thinned = Thinned()
    feed(thinned, samples, rows=rows)
    assert thinned.stride == 1
    assert sorted_rows(thinned.table()) == sorted_rows(samples)
    assert (thinned.totals.rows, thinned.totals.steps, thinned.totals.last_step) == (30 * layers, 30, 290)


@given(rows=st.integers(40, 400), most=st.integers(300, 900))
def test_a_long_run_is_thinned_evenly_and_no_angle_is_lost(rows, most):
    samples, _ = run(3, steps=9990, every=10)  # 999 samples a layer: blocks that do not come out even
    thinned = Thinned(most=most)
    feed(thinned, samples, rows=rows)
    table, drawn = thinned.table(), thinned.drawn()
    assert table.num_rows <= most
    assert thinned.totals.rows == samples.num_rows
    for name in thinned.names:
        whole = samples.filter(pa.compute.equal(samples["param"].cast(pa.string()), name))
        own = pa.compute.equal(table["param"].cast(pa.string()), name)
        kept, shown = table.filter(own), drawn.filter(own)
        blocks = [slice(begin, begin + thinned.stride) for begin in range(0, 999, thinned.stride)]
        angle = whole["angle"].to_numpy()
        assert kept["step"].to_pylist() == whole["step"].to_numpy()[:: thinned.stride].tolist()
        np.testing.assert_array_equal(kept["angle"], angle[:: thinned.stride])
        np.testing.assert_allclose(shown["angle"], [np.sqrt(np.mean(angle[b] ** 2)) for b in blocks], rtol=1e-12)
        np.testing.assert_array_equal(shown["angle_low"], [angle[b].min() for b in blocks])
        np.testing.assert_array_equal(shown["angle_high"], [angle[b].max() for b in blocks])


def test_the_curves_of_a_thinned_run_have_all_extremes():
    samples, _ = run(2, steps=60_000, every=10)
    steps = samples["step"].to_numpy()
    angle = samples["angle"].to_numpy().copy()
    spike = np.flatnonzero(steps == 12_350)[0]
    angle[spike] = 9.0  # at a sample that is not kept
    samples = samples.set_column(samples.column_names.index("angle"), "angle", pa.array(angle))
    thinned = Thinned(most=2000)
    feed(thinned, samples, rows=500)
    assert 12_350 not in thinned.table()["step"].to_pylist()
    drawn = curves(thinned.drawn(), ["conv1.weight"], steps_per_epoch=None)
    whole = curves(samples, ["conv1.weight"], steps_per_epoch=None)
    assert [highest(each) for each in (drawn, whole)] == [9.0, 9.0]


def highest(found):
    encoded = found["arrays"][found["layers"][0]["high"]]
    return np.frombuffer(base64.b64decode(encoded), "<f4").max()


@given(back=st.integers(0, 29), later=st.integers(1, 40), new_session=st.booleans())
def test_where_a_run_goes_back_it_is_as_when_read_at_once(tmp_path_factory, back, later, new_session):
    directory = tmp_path_factory.mktemp("run")
    first, metadata = run(2, steps=300, every=10)
    again = pa.compute.greater_equal(first["step"], back * 10)
    second = first.filter(again).slice(0, 2 * later)
    thinned = Thinned()
    writer = RecordWriter(directory, metadata=metadata)
    writer.append(columns(first))
    thinned.add(first.combine_chunks().to_batches(), session=0)
    if new_session:
        writer.close()
        writer = RecordWriter(directory, metadata=metadata, resume=True)
    writer.append(columns(second))
    thinned.add(second.combine_chunks().to_batches(), session=int(new_session))
    writer.close()
    assert sorted_rows(thinned.table()) == sorted_rows(read_record(directory).samples())
    assert thinned.totals.rows == read_record(directory).samples().num_rows


@given(
    lines=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    rows=st.integers(1, 90),
    most=st.sampled_from([200, 100_000]),  # at least 100 of a layer are kept
)
def test_counts_are_exact_however_often_a_run_goes_back(lines, rows, most):
    """Against a list of all rows, from which every going back removes what it goes over."""
    samples, _ = run(1, steps=700, every=1)
    notes = ["gradient not finite" if step % 7 == 0 else None for step in range(700)]
    samples = samples.set_column(samples.column_names.index("note"), "note", pa.array(notes).dictionary_encode())
    parts, whole, session, went_back = [(0, samples.slice(0, 500))], [(0, step) for step in range(500)], 0, 0
    for begin, length, new_session in lines:
        session, back = session + new_session, begin * 8
        went_back += back < whole[-1][1] + new_session
        whole = [(own, step) for own, step in whole if step < back + (own == session)]
        whole += [(session, step) for step in range(back, back + length)]
        parts.append((session, samples.slice(back, length)))
    kept = [step for _, step in whole]
    thinned = Thinned(most=most)
    for _ in range(2):
        for number in range(session + 1):
            feed(
                thinned,
                pa.concat_tables([part for own, part in parts if own == number] or [samples[:0]]),
                rows=rows,
                session=number,
            )
        if thinned.exact:
            break
        thinned = Thinned(most=most, returns=thinned.returns)
    assert thinned.exact
    noted = [step for step in kept if step % 7 == 0]
    assert (thinned.totals.rows, thinned.totals.steps) == (len(kept), len(set(kept)))
    assert thinned.totals.last_step == kept[-1]
    assert thinned.totals.notes == ({"gradient not finite": (len(noted), noted[-1])} if noted else {})
    assert len(thinned.returns) == went_back
    assert thinned.table()["step"].to_pylist() == kept[:: thinned.stride]


def test_a_long_run_that_was_resumed_is_counted_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(Thinned.__init__, "__kwdefaults__", {"most": 500, "returns": ()})
    samples, metadata = run(2, steps=1000, every=1)
    again = columns(samples.filter(pa.compute.greater_equal(samples["step"], 601)))
    followed = Followed(tmp_path / "a", name="a")
    for session in range(3):
        with RecordWriter(tmp_path / "a", metadata=metadata, resume=session > 0) as writer:
            writer.append(columns(samples) if session == 0 else again)
        followed.look()
        followed.read()
        assert followed.status.samples == 2000
    anew = Followed(tmp_path / "a", name="a")
    anew.look()
    anew.read()
    assert anew.status == followed.status
    said = followed.show().payload.decode()
    assert said.count("went back to step 601, 2 times") == 1


def test_notes_are_counted_also_where_their_samples_are_left_out():
    samples, _ = run(1, steps=4000, every=1)
    notes = ["gradient not finite" if step in (17, 1234, 2001) else None for step in range(4000)]
    samples = samples.set_column(samples.column_names.index("note"), "note", pa.array(notes).dictionary_encode())
    thinned = Thinned(most=500)
    feed(thinned, samples, rows=333)
    assert thinned.totals.notes == {"gradient not finite": (3, 2001)}


# ---- tails


def rows_of(tail):
    return sum(found.batch.num_rows for found in tail.read())


def test_a_tail_reads_everything_once(tmp_path):
    samples, metadata = run(2, steps=200, every=10)
    tail = RunTail(tmp_path / "a")
    with RecordWriter(tmp_path / "a", metadata=metadata) as writer:
        assert rows_of(tail) == 0
        for begin in range(0, 40, 8):
            writer.append(columns(samples.slice(begin, 8)))
            writer.flush()
            assert rows_of(tail) == 8
            assert rows_of(tail) == 0
    assert rows_of(tail) == 0
    assert tail.notes == ()


@pytest.mark.parametrize("cut", [1, 7, 300, 3000])
def test_a_tail_waits_for_the_rest_of_a_torn_batch(tmp_path, cut):
    samples = write_run(tmp_path / "a", steps=400)
    path = segment_paths(tmp_path / "a")[0]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    tail = RunTail(tmp_path / "a")
    before = rows_of(tail)
    path.write_bytes(content)
    assert before + rows_of(tail) == samples.num_rows
    assert tail.notes == ()


def test_a_file_that_became_shorter_is_refused(tmp_path):
    write_run(tmp_path / "a", steps=400)
    path = segment_paths(tmp_path / "a")[0]
    tail = RunTail(tmp_path / "a")
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
    at = content.index(steps)
    content[at : at + 16] = b"\0" * 16
    path.write_bytes(content)
    tail = RunTail(tmp_path / "a")
    assert rows_of(tail) == 40
    assert "damaged" in tail.notes[0]


# ---- a run that is followed


def test_a_followed_run_says_what_the_report_says(tmp_path):
    samples = write_run(tmp_path / "a", 4, steps=6000, outlier=2)
    followed = Followed(tmp_path / "a", name="a")
    assert followed.look()
    followed.read()
    recorded = read_record(tmp_path / "a")
    view = followed.show()
    findings = diagnose(recorded.samples(), metadata=recorded.metadata)
    assert followed.status.state == FINISHED
    assert (followed.status.steps, followed.status.samples) == (5991, samples.num_rows)
    assert view.worst == findings[0]
    both = (summarise(table, metadata=recorded.metadata) for table in (followed.seen().samples(), recorded.samples()))
    assert next(both) == next(both)
    assert followed.show() is view  # nothing is new
    assert not followed.look()


def test_the_state_follows_the_writer(tmp_path):
    samples, metadata = run(1, steps=300, every=10)
    followed = Followed(tmp_path / "a", name="a")
    writer = RecordWriter(tmp_path / "a", metadata=metadata)
    writer.append(columns(samples.slice(0, 10)))
    writer.flush()
    followed.look()
    followed.read()
    assert (followed.status.state, followed.status.steps) == (TRAINING, 91)
    writer.append(columns(samples.slice(10)))
    writer.close()
    assert followed.look()
    followed.read()
    assert (followed.status.state, followed.status.steps) == (FINISHED, 291)
    (tmp_path / "a" / "run.json").write_text("no run")
    assert followed.look()
    assert followed.status.state == DAMAGED
    assert "not the description of a run" in followed.show().payload.decode()
    assert str(tmp_path) not in followed.show().payload.decode()


def test_a_run_that_takes_the_place_of_another_is_read_anew(tmp_path):
    write_run(tmp_path / "a", 2, steps=1000)
    followed = Followed(tmp_path / "a", name="a")
    followed.look()
    followed.read()
    shutil.rmtree(tmp_path / "a")
    assert followed.look()
    assert (followed.status.state, followed.status.message) == (DELETED, "Its folder is gone")
    write_run(tmp_path / "a", 1, steps=500)
    assert followed.look()
    followed.read()
    assert (followed.status.state, followed.status.samples) == (FINISHED, 50)


def test_a_file_that_cannot_be_read_stays_told(tmp_path):
    write_run(tmp_path / "a", 1, steps=500)
    followed = Followed(tmp_path / "a", name="a")
    followed.look()
    followed.read()
    path = segment_paths(tmp_path / "a")[0]
    path.write_bytes(path.read_bytes()[:100])
    for _ in range(2):
        followed.look()
        followed.read()
        assert followed.status.state == DAMAGED
        assert "became shorter" in followed.status.message
    followed.show()
    assert not followed.look()
    assert not followed.is_due()
