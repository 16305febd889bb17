from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.record_helpers import rows

from equilibria.errors import EquilibriaError
from equilibria.records import FORMAT, SAMPLE_SCHEMA, RecordWriter, read_record
from equilibria.records._blocks import END, first_message, seal
from equilibria.records._manifest import _checksum
from equilibria.records._reader import RecordTail
from equilibria.records._segment import Segment, _digest
from equilibria.records.tables import FORMAT_KEY, TABLES, check_format, unit

WORDS = pa.dictionary(pa.int32(), pa.string())


def test_the_columns_other_code_relies_on():
    promised = {
        *("step", "param", "lr", "weight_decay", "norm", "grad_norm", "cosine", "update_norm", "angle"),
        *("relative_update", "effective_lr", "unit_grad_sq", "angle_equilibrium", "norm_equilibrium"),
        *("angle_predicted", "norm_predicted", "state"),
    }
    assert promised <= set(SAMPLE_SCHEMA.names)
    kinds = {name: SAMPLE_SCHEMA.field(name).type for name in SAMPLE_SCHEMA.names}
    assert kinds.pop("step") == pa.int64()
    assert kinds.pop("param") == kinds.pop("state") == kinds.pop("note") == kinds.pop("law") == WORDS
    assert set(kinds.values()) == {pa.float64()}


def test_units_follow_from_the_laws_that_relate_the_columns():
    # lr * weight_decay is a pure number; effective_lr = lr / norm^2; unit_grad_sq = (grad_norm * norm)^2
    assert (unit("lr"), unit("weight_decay")) == ("w/g", "g/w")
    assert (unit("norm"), unit("grad_norm"), unit("effective_lr")) == ("w", "g", "1/(g w)")
    assert unit("unit_grad_sq") == "(g w)^2"
    assert {unit(name) for name in SAMPLE_SCHEMA.names if name.startswith("angle")} == {"rad"}
    assert {unit(name) for name in SAMPLE_SCHEMA.names if name.startswith("norm")} == {"w"}
    with pytest.raises(EquilibriaError, match=r"got column 'angel'; expected one of: step, param"):
        unit("angel")


@pytest.mark.parametrize("version", ["1.0", "1.99", "0.3"])
def test_readable_versions(version):
    check_format(version, where="here")


@pytest.mark.parametrize("version", [None, "", "1", "one", 1.0, "1.0.0", "-1.0"])
def test_malformed_versions(version):
    with pytest.raises(EquilibriaError, match="here: got format"):
        check_format(version, where="here")


def rewrite(directory, *, schema: pa.Schema, columns: dict[str, list[object]], table: str = "samples") -> None:
    """Replace a run's samples by a stream of another schema, with checksums."""
    batch = pa.record_batch([pa.array(columns[name]).cast(schema.field(name).type) for name in schema.names], schema)
    encoded = io.BytesIO()
    with pa.ipc.new_stream(encoded, schema) as stream:
        stream.write_batch(batch, {b"equilibria.fields": _digest(schema)})
    content = encoded.getvalue()
    begin = first_message(content).end
    sealed = seal(content[:begin]) + seal(content[begin : -len(END)]) + END
    (directory / f"{table}-000.arrows").write_bytes(sealed)


@pytest.fixture
def run(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
    return tmp_path


def test_a_later_minor_version_with_one_more_column(run):
    schema = pa.schema([*SAMPLE_SCHEMA, pa.field("curl", pa.float64())], metadata={FORMAT_KEY: "1.8"})
    columns = {name: list(values) for name, values in rows([4]).items()}
    rewrite(run, schema=schema, columns={**columns, "curl": [0.5, 0.25]})
    described = json.loads((run / "run.json").read_text())
    described.update(format="1.8", colour="blue")
    described["sessions"][0]["weather"] = "fair"
    (run / "run.json").write_text(json.dumps(described))

    record = read_record(run)
    assert record.columns == (*SAMPLE_SCHEMA.names, "curl")
    assert record.samples(["curl", "step"]).to_pydict() == {"curl": [0.5, 0.25], "step": [4, 4]}


def test_an_older_version_with_fewer_columns(run):
    schema = pa.schema([SAMPLE_SCHEMA.field(name) for name in ("norm", "param", "step")], metadata={FORMAT_KEY: "1.0"})
    rewrite(run, schema=schema, columns={"norm": [1.5], "param": ["a"], "step": [3]})
    record = read_record(run)
    assert record.columns == tuple(SAMPLE_SCHEMA.names)
    assert record.samples().to_pylist() == [dict.fromkeys(SAMPLE_SCHEMA.names) | {"step": 3, "param": "a", "norm": 1.5}]


def write_former_states(path, *, table="samples"):
    """A stream as an earlier version wrote it, through Arrow alone; its second batch has dictionaries of its own."""
    states = [["approaching", "settled", None, "no equilibrium"], ["settling", "disturbed", "none", "approaching"]]
    schema = TABLES[table].with_metadata({FORMAT_KEY: "1.1"})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number, words in enumerate(states):
            columns = {name: pa.nulls(4, schema.field(name).type) for name in schema.names}
            columns["step"] = pa.array(range(4 * number, 4 * number + 4))
            columns["param"] = pa.array(["a"] * 4).dictionary_encode()
            columns["state"] = pa.array(words).dictionary_encode()
            stream.write_batch(pa.record_batch([columns[name] for name in schema.names], schema))
    return states


def test_states_of_earlier_versions_have_their_present_names(run):
    write_former_states(run / "samples-000.arrows")
    expected = ["settling", "settled", None, "none", "settling", "disturbed", "none", "settling"]
    assert read_record(run).samples()["state"].to_pylist() == expected
    tail = pa.concat_arrays([appended.batch["state"].cast(pa.string()) for appended in RecordTail(run).read()])
    assert tail.to_pylist() == expected


def test_states_of_the_sharpness_table_keep_their_names(run):
    """There, "approaching" is a present name."""
    first, second = write_former_states(run / "sharpness-000.arrows", table="sharpness")
    assert read_record(run).sharpness()["state"].to_pylist() == [*first, *second]


def test_mapped_columns_stay_on_disk_also_where_states_are_renamed(run):
    rows = 200_000
    schema = SAMPLE_SCHEMA.with_metadata({FORMAT_KEY: "1.1"})
    columns = {name: pa.nulls(rows, schema.field(name).type) for name in schema.names}
    columns |= {"step": pa.array(np.arange(rows)), "param": pa.array(["a"] * rows).dictionary_encode()}
    columns |= {"state": pa.array(["approaching"] * rows).dictionary_encode(), "norm": pa.array(np.ones(rows))}
    batch = pa.record_batch([columns.pop(name) for name in schema.names], schema)
    with pa.OSFile(str(run / "samples-000.arrows"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_batch(batch)
    del batch, stream
    before = pa.total_allocated_bytes()
    segment = Segment(run / "samples-000.arrows")
    assert segment.table["state"][rows - 1].as_py() == "settling"
    assert pa.total_allocated_bytes() - before < 10_000  # one column alone has a million bytes


def test_sessions_of_different_versions_make_one_table(run):
    with RecordWriter(run, metadata={}, resume=True) as writer:
        writer.append(rows([1]))
    schema = pa.schema([*SAMPLE_SCHEMA, pa.field("curl", pa.float64())], metadata={FORMAT_KEY: "1.8"})
    columns = {name: list(values) for name, values in rows([0]).items()}
    rewrite(run, schema=schema, columns={**columns, "curl": [0.5, 0.25]})
    assert read_record(run).samples(["step", "curl"])["curl"].to_pylist() == [0.5, 0.25, None, None]


def test_a_newer_major_version_of_the_samples_is_an_error(run):
    rewrite(run, schema=SAMPLE_SCHEMA.with_metadata({FORMAT_KEY: "2.0"}), columns=rows([0]))
    with pytest.raises(EquilibriaError, match=r"samples-000.arrows: written in format 2.0 by a newer equilibria"):
        read_record(run)


def test_a_newer_major_version_of_the_run_is_an_error_for_reader_and_writer(run):
    described = json.loads((run / "run.json").read_text())
    del described["crc32"]
    described["format"] = "2.1"
    (run / "run.json").write_text(json.dumps({**described, "crc32": _checksum(described)}))
    with pytest.raises(EquilibriaError, match=r"run.json: written in format 2.1 .* this one reads 1.x: pip install"):
        read_record(run)
    with pytest.raises(EquilibriaError, match=r"format 2.1"):
        RecordWriter(run, metadata={}, resume=True)


def test_a_stream_of_another_table_is_an_error(run):
    rewrite(run, schema=pa.schema([pa.field("x", pa.int64())]), columns={"x": [1]})
    with pytest.raises(EquilibriaError, match="got format None"):
        read_record(run)
    rewrite(run, schema=pa.schema([pa.field("x", pa.int64())], metadata={FORMAT_KEY: FORMAT}), columns={"x": [1]})
    with pytest.raises(EquilibriaError, match="got column step of type none; expected int64"):
        read_record(run)


def test_sessions_that_disagree_about_a_column_are_an_error(run):
    with RecordWriter(run, metadata={}, resume=True) as writer:
        writer.append(rows([1]))
    fields = [field.with_type(pa.string()) if field.name == "norm" else field for field in SAMPLE_SCHEMA]
    columns = {name: list(values) for name, values in rows([0]).items()}
    rewrite(run, schema=pa.schema(fields, metadata=SAMPLE_SCHEMA.metadata), columns={**columns, "norm": ["1", "2"]})
    with pytest.raises(EquilibriaError, match=r"disagree about a column: .*norm"):
        read_record(run)


def test_recording_needs_neither_torch_nor_the_theory():
    code = (
        "import sys, equilibria.records\n"
        "loaded = [name for name in sys.modules if name == 'torch' or name.startswith('equilibria.theory')]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_record_without_a_diffusion_table_has_an_empty_one(run):
    table = read_record(run).diffusion()
    assert table.num_rows == 0
    assert table.column_names == ["step", "param", "distance", "turned"]


def test_comparisons_that_were_made_again_are_superseded(tmp_path):
    def compared(steps, distances):
        return {
            "step": steps,
            "param": ["a"] * len(steps),
            "distance": distances,
            "turned": [0.5, None, 0.25][: len(steps)],
        }

    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append({"step": [0, 9], "param": ["a", "a"]})
        writer.append(compared([0, 0, 0], [2, 4, 8]), table="diffusion")
    with RecordWriter(tmp_path, metadata={}, resume=True) as writer:  # from a checkpoint before step 5
        writer.append({"step": [5], "param": ["a"]})
        writer.append(compared([0], [8]), table="diffusion")
    assert read_record(tmp_path).diffusion().select(["distance", "turned"]).to_pylist() == [
        {"distance": 2, "turned": 0.5},
        {"distance": 4, "turned": None},
        {"distance": 8, "turned": 0.5},
    ]
