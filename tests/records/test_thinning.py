"""A bounded part of a growing run, against the whole run read at once."""

from __future__ import annotations

import base64

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.report_helpers import run
from tests.helpers.served import columns

from equilibria.records import RecordWriter, read_record
from equilibria.records._thinning import ThinnedSamples
from equilibria.views.run.curves import curves


def feed(thinned, samples, *, rows, session=0):
    for begin in range(0, samples.num_rows, rows):
        thinned.add(samples.slice(begin, rows).combine_chunks().to_batches(), session=session)


def sorted_rows(table):
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["param"]))


@given(rows=st.integers(1, 70), layers=st.integers(1, 4))
def test_a_short_run_is_kept_whole(rows, layers):
    samples, _ = run(layers, steps=300, every=10)
    thinned = ThinnedSamples()
    feed(thinned, samples, rows=rows)
    assert thinned.stride == 1
    assert sorted_rows(thinned.table()) == sorted_rows(samples)
    assert (thinned.counts.rows, thinned.counts.steps, thinned.counts.last_step) == (30 * layers, 30, 290)


@given(rows=st.integers(40, 400), most=st.integers(300, 900))
def test_a_long_run_is_thinned_evenly_and_no_angle_is_lost(rows, most):
    samples, _ = run(3, steps=9990, every=10)  # 999 samples a layer: blocks that do not come out even
    thinned = ThinnedSamples(most=most)
    feed(thinned, samples, rows=rows)
    table, drawn = thinned.table(), thinned.chart_table()
    assert table.num_rows <= most
    assert thinned.counts.rows == samples.num_rows
    for name in thinned.layers:
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
    thinned = ThinnedSamples(most=2000)
    feed(thinned, samples, rows=500)
    assert 12_350 not in thinned.table()["step"].to_pylist()
    drawn = curves(thinned.chart_table(), ["conv1.weight"], steps_per_epoch=None)
    whole = curves(samples, ["conv1.weight"], steps_per_epoch=None)
    assert [highest(chart) for chart in (drawn, whole)] == [9.0, 9.0]


def highest(chart):
    encoded = chart["arrays"][chart["layers"][0]["high"]]
    return np.frombuffer(base64.b64decode(encoded), "<f4").max()


@given(back=st.integers(0, 29), later=st.integers(1, 40), new_session=st.booleans())
def test_a_run_that_goes_back_is_the_same_as_when_read_at_once(tmp_path_factory, back, later, new_session):
    directory = tmp_path_factory.mktemp("run")
    first, metadata = run(2, steps=300, every=10)
    again = pa.compute.greater_equal(first["step"], back * 10)
    second = first.filter(again).slice(0, 2 * later)
    thinned = ThinnedSamples()
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
    assert thinned.counts.rows == read_record(directory).samples().num_rows


@given(
    lines=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    rows=st.integers(1, 90),
    most=st.sampled_from([200, 100_000]),  # at least 100 of a layer are kept
)
def test_counts_are_exact_however_often_a_run_goes_back(lines, rows, most):
    """Against a list of all rows, from which every rollback removes the superseded ones."""
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
    thinned = ThinnedSamples(most=most)
    for _ in range(2):
        for number in range(session + 1):
            feed(
                thinned,
                pa.concat_tables([part for own, part in parts if own == number] or [samples[:0]]),
                rows=rows,
                session=number,
            )
        if thinned.is_exact:
            break
        thinned = ThinnedSamples(most=most, rollbacks=thinned.rollbacks)
    assert thinned.is_exact
    noted = [step for step in kept if step % 7 == 0]
    assert (thinned.counts.rows, thinned.counts.steps) == (len(kept), len(set(kept)))
    assert thinned.counts.last_step == kept[-1]
    assert thinned.counts.notes == ({"gradient not finite": (len(noted), noted[-1])} if noted else {})
    assert len(thinned.rollbacks) == went_back
    assert thinned.table()["step"].to_pylist() == kept[:: thinned.stride]


def test_notes_of_samples_that_are_left_out_are_counted():
    samples, _ = run(1, steps=4000, every=1)
    notes = ["gradient not finite" if step in (17, 1234, 2001) else None for step in range(4000)]
    samples = samples.set_column(samples.column_names.index("note"), "note", pa.array(notes).dictionary_encode())
    thinned = ThinnedSamples(most=500)
    feed(thinned, samples, rows=333)
    assert thinned.counts.notes == {"gradient not finite": (3, 2001)}
