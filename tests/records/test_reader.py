from __future__ import annotations

import csv
import json
import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.record_helpers import FLOATS, PARAMS, assert_rows, rows

from equilibria.errors import EquilibriaError
from equilibria.records import SAMPLE_SCHEMA, RecordWriter, read_record


@pytest.fixture
def run(tmp_path):
    """Two sessions with different words, several batches, and one rollback."""
    with RecordWriter(tmp_path / "a", metadata={"model": "vgg"}) as writer:
        for step in range(4):
            writer.append(rows([step]))
            writer.flush()
    with RecordWriter(tmp_path / "a", metadata={}, resume=True) as writer:
        writer.append(rows([3, 4], params=("fc", "conv1.weight")))
    return read_record(tmp_path / "a")


def test_columns_and_parameters_can_be_chosen(run):
    table = run.samples(["norm", "step"], ["fc", "conv2.weight"])
    assert table.column_names == ["norm", "step"]
    assert table["step"].to_pylist() == [0, 1, 2, 3, 4]
    norm = FLOATS.index("norm") / 64
    assert table["norm"].to_pylist() == [1 + norm, 1001 + norm, 2001 + norm, 3000 + norm, 4000 + norm]
    assert run.samples("step", "fc")["step"].to_pylist() == [3, 4]
    assert run.samples(["step"], [])["step"].to_pylist() == []
    assert run.params == (*PARAMS, "fc")
    assert run.columns == tuple(SAMPLE_SCHEMA.names)


def test_text_can_be_grouped_although_the_sessions_number_it_differently(run):
    table = run.samples(["param", "norm"])
    counts = dict(zip(*table.group_by("param").aggregate([("norm", "count")]).to_pydict().values(), strict=True))
    assert counts == {"conv1.weight": 5, "conv2.weight": 3, "fc": 2}


def test_the_samples_carry_units_and_version(run):
    schema = run.samples().schema
    assert schema.field("angle").metadata == {b"unit": b"rad"}
    assert schema.metadata == SAMPLE_SCHEMA.metadata


def test_unknown_names(run):
    with pytest.raises(EquilibriaError, match="got column 'angel'; this run has 30, such as: angle"):
        run.samples(["angel"])
    with pytest.raises(EquilibriaError, match=r"got param 'conv2.bias'; this run has 3, such as: conv2.weight"):
        run.samples(params=["conv2.bias"])


def test_a_record_is_frozen(run):
    with pytest.raises(AttributeError):
        run.metadata = {}


def test_only_the_requested_columns_come_into_memory(tmp_path):
    count = 50_000
    columns = {name: np.arange(count, dtype=float) for name in FLOATS}
    for _ in range(2):  # the second session begins again, so that rows must be left out
        with RecordWriter(tmp_path, metadata={}, resume=True) as writer:
            for first in (0, count):
                writer.append({"step": np.arange(first, first + count), "param": ["a"] * count, **columns})
    before = pa.total_allocated_bytes()
    run = read_record(tmp_path)
    assert pa.total_allocated_bytes() - before < 100_000  # of 50 MB on disk
    table = run.samples(["norm"])
    assert table.num_rows == 2 * count
    assert pa.total_allocated_bytes() - before < 1.3 * 8 * 2 * count + 400_000  # one column, and the mask


def test_parquet(run, tmp_path):
    run.to_parquet(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.to_pydict() == run.samples().to_pydict()
    assert table.schema.field("angle").metadata[b"unit"] == b"rad"


def test_csv(tmp_path):
    with RecordWriter(tmp_path / "a", metadata={}) as writer:
        writer.append({"step": [0, 0], "param": ['a,"b"\n', "ü"], "norm": [0.1, np.nan], "angle": [np.inf, 1e-300]})
    read_record(tmp_path / "a").to_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == SAMPLE_SCHEMA.names
    assert [row["param"] for row in lines] == ['a,"b"\n', "ü"]
    assert [float(row["norm"]) for row in lines] == pytest.approx([0.1, np.nan], nan_ok=True, rel=0)
    assert [float(row["angle"]) for row in lines] == [np.inf, 1e-300]
    assert lines[0]["state"] == lines[0]["lr"] == ""


@pytest.mark.parametrize("export", ["to_parquet", "to_csv"])
def test_an_export_that_cannot_be_written(run, tmp_path, export):
    with pytest.raises(EquilibriaError, match=r"cannot write .*nowhere"):
        getattr(run, export)(tmp_path / "nowhere" / "a")


@pytest.mark.parametrize("export", ["to_parquet", "to_csv"])
@pytest.mark.parametrize("name", ["run.json", "samples-000.arrows", "new.csv"])
def test_an_export_never_goes_into_a_run(tmp_path, export, name):
    with RecordWriter(tmp_path / "a", metadata={}) as writer:
        writer.append({"step": [0], "param": ["w"], "norm": [1.0]})
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(EquilibriaError, match="inside the run"):
        getattr(read_record(tmp_path / "a"), export)(tmp_path / "a" / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_segment_of_another_run_is_left_out(tmp_path):
    for name, norm in (("a", 1.0), ("b", 2.0)):
        with RecordWriter(tmp_path / name, metadata={}) as writer:
            writer.append({"step": [0], "param": ["w"], "norm": [norm]})
    (tmp_path / "a" / "samples-000.arrows").write_bytes((tmp_path / "b" / "samples-000.arrows").read_bytes())
    record = read_record(tmp_path / "a")
    assert record.samples().num_rows == 0
    assert f"samples-000.arrows: left out, it belongs to another run ({read_record(tmp_path / 'b').id})" in record.notes
    assert not record.verify().whole


def test_pandas(run):
    pytest.importorskip("pandas", reason="pandas is optional")
    frame = run.to_pandas()
    assert list(frame.columns) == SAMPLE_SCHEMA.names
    assert frame["norm"].tolist() == run.samples()["norm"].to_pylist()
    assert frame["param"].dtype == "category"


def test_without_pandas_the_message_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EquilibriaError, match="needs pandas: pip install pandas"):
        run.to_pandas()


def test_a_path_that_is_not_a_run(tmp_path, run):
    with pytest.raises(EquilibriaError, match=f"there is no directory {tmp_path}/none"):
        read_record(tmp_path / "none")
    with pytest.raises(EquilibriaError, match=r"is not a run: it has no run.json; it holds the runs a$"):
        read_record(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(EquilibriaError, match=r"is not a run: it has no run.json$"):
        read_record(tmp_path / "b")
    (tmp_path / "c").write_text("")
    with pytest.raises(EquilibriaError, match="c: Not a directory"):
        read_record(tmp_path / "c")


DAMAGED = ["", "[]", "3", "{", '{"format": "1.0"}', '{"format": "1.0", "sessions": [{}]}', "[" * 100_000, "1" * 5000]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_description_is_taken_from_the_segments(run, text):
    (run.path / "run.json").write_text(text)
    again = read_record(run.path)
    assert (again.id, again.metadata, again.sessions) == (run.id, run.metadata, run.sessions)
    assert again.samples().equals(run.samples())
    assert again.notes[0].startswith("run.json: not the description of a run")
    assert again.notes[0].endswith("; what it said is taken from the segments")
    assert again.notes[1:] == run.notes


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_description_of_a_run_without_segments_is_an_error(run, text):
    (run.path / "run.json").write_text(text)
    for path in run.path.glob("*.arrows"):
        path.unlink()
    with pytest.raises(EquilibriaError, match=r"run.json: not the description of a run"):
        read_record(run.path)


def test_a_description_of_another_kind_of_file(run):
    (run.path / "run.json").write_text(json.dumps({"format": "tar", "sessions": []}))
    with pytest.raises(EquilibriaError, match=r"run.json: got format 'tar'; expected a version such as 1.4"):
        read_record(run.path)


APPENDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**63 - 1), st.text(max_size=8), st.floats()), max_size=6), st.booleans()
    ),
    max_size=5,
)


@given(appends=APPENDS)
def test_every_value_survives_bit_by_bit(appends):
    ordered = sorted(step for part, _ in appends for step, _, _ in part)  # a run is one line of steps
    steps = iter(ordered)
    names = [name for part, _ in appends for _, name, _ in part]
    values = [value for part, _ in appends for _, _, value in part]
    with tempfile.TemporaryDirectory() as directory:
        with RecordWriter(directory, metadata={}) as writer:
            for part, flush in appends:
                step = np.array([next(steps) for _ in part], dtype=np.int64)
                words = [name for _, name, _ in part]
                writer.append({"step": step, "param": words, "cosine": [v for *_, v in part], "state": words})
                if flush:
                    writer.flush()
        table = read_record(directory).samples()
    assert table["step"].to_pylist() == ordered
    assert table["param"].to_pylist() == table["state"].to_pylist() == names
    assert table["cosine"].to_numpy().tobytes() == np.array(values, dtype=float).tobytes()


def test_a_run_without_samples(tmp_path):
    RecordWriter(tmp_path, metadata={}).close()
    run = read_record(tmp_path)
    assert_rows(run.samples(), [])
    assert run.params == ()
    with pytest.raises(EquilibriaError, match="got param 'conv1'; this run has none yet"):
        run.samples(params=["conv1"])
