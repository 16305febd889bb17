"""Damage of any kind: noted or harmless, never silent, never anything but an `EquilibriaError`."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.helpers.record_helpers import assert_rows, rows

from equilibria.errors import EquilibriaError
from equilibria.records import SAMPLE_SCHEMA, RecordWriter, read_record
from equilibria.records._blocks import END, first_message, seal
from equilibria.records._manifest import _checksum
from equilibria.records._reader import RecordTail
from equilibria.records._segment import _digest
from equilibria.records.tables import FORMAT_KEY

FORMER = Path(__file__).parents[1] / "data" / "record-1.1"


@pytest.fixture
def run(tmp_path):
    """Two closed sessions of five batches each, with a sharpness table and metadata."""
    for session in range(2):
        metadata = {"lr": 0.1, "params": [{"name": "conv1.weight", "shape": [3, 3]}], "seed": session}
        with RecordWriter(tmp_path / "a", metadata=metadata, resume=True, flush_seconds=3600) as writer:
            for step in range(10 * session, 10 * session + 10, 2):
                writer.append(rows([step, step + 1]))
                writer.append({"step": [step], "sharpness": [step / 7], "state": ["stable"]}, table="sharpness")
                writer.flush()
    return tmp_path / "a"


def content(directory):
    record = read_record(directory)
    return {
        "samples": [str(row) for row in record.samples().to_pylist()],
        "sharpness": [str(row) for row in record.sharpness().to_pylist()],
        "metadata": record.metadata,
        "sessions": record.sessions,
        "id": record.id,
    }, record.notes


def assert_not_silent(directory, whole) -> bool:
    """Check that what is read is all of it, or what is missing is noted; whether there was a note."""
    try:
        read, notes = content(directory)
        verification = read_record(directory).verify()
    except EquilibriaError:
        return True
    assert verification.whole == (not notes)
    if not notes:
        assert read == whole
    for table in ("samples", "sharpness"):  # what is left is true
        assert set(read[table]) <= set(whole[table])
    if notes and "changed after it was written" not in notes[0]:
        assert (read["metadata"], read["id"]) == (whole["metadata"], whole["id"])
    return bool(notes)


@pytest.mark.parametrize("flips", [250, pytest.param(2500, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_silent(run, flips):
    whole, notes = content(run)
    assert notes == ()
    files = {path: path.read_bytes() for path in sorted(run.iterdir()) if path.name != "writer.lock"}
    places = [(path, place) for path, data in files.items() for place in range(len(data))]
    chance, noted = random.Random(21), 0
    for path, place in chance.choices(places, k=flips):
        damaged = bytearray(files[path])
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        noted += assert_not_silent(run, whole)
        path.write_bytes(files[path])
    assert noted > 0.95 * flips  # nearly every bit counts: streams have no padding without a checksum


def test_every_bit_of_a_small_batch_and_of_the_schema_counts(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        writer.append({"step": [3], "param": ["a"]})
    path = tmp_path / "samples-000.arrows"
    data = path.read_bytes()
    whole, _ = content(tmp_path)
    for place in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert assert_not_silent(tmp_path, whole), place


def damage(path, *, begin, end):
    """Write noise between two shares of a file."""
    data = bytearray(path.read_bytes())
    first, last = int(begin * len(data)), int(end * len(data))
    data[first:last] = random.Random(3).randbytes(last - first)
    path.write_bytes(data)


def test_a_damaged_batch_is_left_out_and_named_and_reading_goes_on(run):
    path = run / "samples-000.arrows"
    damage(path, begin=0.5, end=0.51)
    record = read_record(run)
    (note,) = record.notes
    assert note.startswith("samples-000.arrows: ") and "damaged bytes are left out, between step 3 and step 6" in note
    assert_rows(record.samples(), [*range(4), *range(6, 20)])
    tail = [batch for appended in RecordTail(run).read() if appended.table == "samples" for batch in [appended.batch]]
    assert sum(batch.num_rows for batch in tail) == 36
    checks = {check.file: check for check in record.verify().tables}
    assert checks["samples-000.arrows"].damage == (note,)
    assert checks["samples-001.arrows"].damage == ()


def test_a_damaged_schema_costs_no_row(run):
    damage(run / "samples-000.arrows", begin=0.0, end=0.02)
    record = read_record(run)
    assert_rows(record.samples(), range(20))
    assert "damaged bytes are left out, before step 0" in record.notes[0]


def test_batches_of_other_columns_are_not_read_by_a_damaged_schema(tmp_path):
    """They might have the same layout under other names."""
    RecordWriter(tmp_path, metadata={}).close()
    names = [*SAMPLE_SCHEMA.names]
    place = names.index("norm")
    names[place : place + 2] = names[place + 1], names[place]
    newer_stream(tmp_path / "samples-000.arrows", pa.schema([SAMPLE_SCHEMA.field(name) for name in names]), rows([0]))
    assert read_record(tmp_path).samples().num_rows == 2
    damage(tmp_path / "samples-000.arrows", begin=0.0, end=0.02)
    assert read_record(tmp_path).samples().num_rows == 0
    assert not read_record(tmp_path).verify().whole


def test_noise_is_never_anything_but_an_error_or_a_note(run):
    whole, _ = content(run)
    files = {path: path.read_bytes() for path in sorted(run.glob("*.arrows"))}
    chance = random.Random(8)
    for _ in range(60):
        path = chance.choice(list(files))
        data = bytearray(files[path])
        first = chance.randrange(len(data))
        kind = chance.choice(["noise", "zeros", "ones", "cut", "insert", "swap"])
        length = min(chance.choice([1, 8, 100, 3000]), len(data) - first)
        if kind == "cut":
            del data[first : first + length]
        elif kind == "insert":
            data[first:first] = chance.randbytes(length)
        elif kind == "swap":
            data = data[first:] + data[:first]
        else:
            noise = {"noise": chance.randbytes(length), "zeros": bytes(length), "ones": b"\xff" * length}[kind]
            data[first : first + length] = noise
        path.write_bytes(data)
        assert_not_silent(run, whole)
        path.write_bytes(files[path])


# ---- run.json


INSERTED = [b"[" * 50_000, b"null", b'"x"', b"\xff", b"-1", b"9" * 5000, b"{}", b"\0"]
REPLACED = [b'"lr"', b"0.1", b"null", b"3", b"[", b'"1.2"']
REPLACEMENTS = [b"0.1", b"true", b"[]", b"{}", b"null", b"1e999", b'"2001-01-01"']


def changed(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place : place + chance.randint(1, 40)]
        elif kind == 2:
            data[place:place] = chance.choice(INSERTED)
        elif kind == 3:
            data[place] = chance.randrange(256)
        else:
            data = bytearray(data.replace(chance.choice(REPLACED), chance.choice(REPLACEMENTS)))
        if not data:
            return b""
    return bytes(data)


@pytest.mark.parametrize("changes", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_changed_description_is_noted_and_costs_nothing(run, changes):
    whole, _ = content(run)
    path = run / "run.json"
    original, chance, read = path.read_bytes(), random.Random(4), 0
    for _ in range(changes):
        path.write_bytes(changed(original, chance))
        try:
            found, notes = content(run)
        except EquilibriaError:
            continue
        read += 1
        assert found == whole
        assert notes or json.loads(path.read_text()) == json.loads(original)
    assert read > 0.98 * changes


def test_a_lost_description_loses_nothing_and_the_run_can_be_resumed(run):
    whole, _ = content(run)
    (run / "run.json").unlink()
    again, notes = content(run)
    assert again == whole
    assert notes == ("run.json is missing; what it said is taken from the segments",)
    assert not read_record(run).verify().whole
    with RecordWriter(run, metadata={}, resume=True) as writer:
        writer.append(rows([20]))
    record = read_record(run)
    assert (record.id, record.notes, len(record.sessions)) == (whole["id"], (), 3)
    assert_rows(record.samples(), range(21))


def test_metadata_known_only_at_the_end_is_in_the_segments_too(tmp_path):
    writer = RecordWriter(tmp_path, metadata={"a": 1})
    writer.close(metadata={"steps": 77})
    (tmp_path / "run.json").unlink()
    record = read_record(tmp_path)
    assert record.metadata == {"a": 1, "steps": 77}
    assert record.sessions[0].ended is not None


# ---- files that are missing, or not what they seem


def test_a_lost_table_of_a_closed_session_is_noted(run):
    (run / "sharpness-001.arrows").unlink()
    assert read_record(run).notes == ("sharpness-001.arrows is missing, with 5 rows",)


def test_a_link_out_of_the_run_is_refused(run, tmp_path):
    shutil.move(run / "samples-001.arrows", tmp_path / "elsewhere")
    (run / "samples-001.arrows").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EquilibriaError, match=r"samples-001.arrows is a link that leads out of the run"):
        read_record(run)
    with pytest.raises(EquilibriaError, match="leads out of the run"):
        list(RecordTail(run).read())
    (run / "samples-001.arrows").unlink()
    shutil.move(tmp_path / "elsewhere", run / "kept")
    (run / "samples-001.arrows").symlink_to("kept")  # inside it is the user's own affair
    assert_rows(read_record(run).samples(), range(20))
    (run / "samples-001.arrows").unlink()
    (run / "samples-001.arrows").symlink_to("samples-001.arrows")
    with pytest.raises(EquilibriaError, match="cannot read"):
        read_record(run)


def test_a_description_that_is_a_link_out_of_the_run_is_not_followed(run, tmp_path):
    shutil.move(run / "run.json", tmp_path / "run.json")
    (run / "run.json").symlink_to(tmp_path / "run.json")
    assert read_record(run).notes[0].startswith("run.json is a link that leads out of the run; what it said is taken")


# ---- other versions


def newer_stream(path, schema, columns):
    """A stream of a later minor version: other columns and metadata, the same checksums."""
    schema = schema.with_metadata({FORMAT_KEY: "1.9", b"equilibria.colour": b"blue"})
    batch = pa.record_batch([pa.array(columns[name]).cast(schema.field(name).type) for name in schema.names], schema)
    encoded = pa.BufferOutputStream()
    with pa.ipc.new_stream(encoded, schema) as stream:
        stream.write_batch(batch, {b"equilibria.fields": _digest(schema), b"equilibria.weather": b"fair"})
    data = encoded.getvalue().to_pybytes()
    begin = first_message(data).end
    path.write_bytes(seal(data[:begin]) + seal(data[begin : -len(END)]) + END)


def test_a_record_of_a_newer_minor_version(tmp_path):
    """With more columns, of kinds that this version does not write, another table, and more in run.json."""
    RecordWriter(tmp_path, metadata={"model": "gpt"}).close()
    kinds = {"noise_scale": pa.float32(), "gains": pa.list_(pa.float64()), "tag": pa.string()}
    more = [pa.field(name, kind) for name, kind in kinds.items()]
    columns = {**rows([4]), "noise_scale": [0.5, 0.25], "gains": [[1.0], [2.0, 3.0]], "tag": ["x", None]}
    newer_stream(tmp_path / "samples-000.arrows", pa.schema([*SAMPLE_SCHEMA, *more]), columns)
    probes = pa.schema([pa.field("step", pa.int64()), pa.field("name", pa.string()), pa.field("value", pa.float64())])
    newer_stream(tmp_path / "probes-000.arrows", probes, {"step": [0, 4], "name": ["loss"] * 2, "value": [2.5, 1.5]})
    described = json.loads((tmp_path / "run.json").read_text())
    del described["crc32"]
    described |= {"format": "1.9", "colour": "blue"}
    described["sessions"][0] |= {"weather": "fair", "rows": {"samples": 2, "probes": 2}}
    (tmp_path / "run.json").write_text(json.dumps({**described, "crc32": _checksum(described)}))

    record = read_record(tmp_path)
    assert record.notes == ()
    assert record.columns == (*SAMPLE_SCHEMA.names, "noise_scale", "gains", "tag")
    assert record.samples(["gains", "step"]).to_pydict() == {"gains": [[1.0], [2.0, 3.0]], "step": [4, 4]}
    assert record.metadata == {"model": "gpt"}
    checks = {check.table: check for check in record.verify().tables}
    assert (checks["probes"].rows, checks["probes"].last_step) == (2, 4)
    assert record.verify().whole
    assert [appended.table for appended in RecordTail(tmp_path).read()] == ["samples"]
    with RecordWriter(tmp_path, metadata={}, resume=True) as writer:
        writer.append(rows([5]))
    assert read_record(tmp_path).samples(["step", "noise_scale"])["noise_scale"].to_pylist() == [0.5, 0.25, None, None]
    damage(tmp_path / "probes-000.arrows", begin=0.8, end=0.9)
    assert not read_record(tmp_path).verify().whole


def test_a_record_of_the_first_edition_opens(tmp_path):
    shutil.copytree(FORMER, tmp_path / "a")
    record = read_record(tmp_path / "a")
    table = record.samples(["step", "param", "norm", "state"])
    assert table["step"].to_pylist() == [step for step in range(8) for _ in range(2)]
    assert table["norm"].to_pylist() == [step + 0.5 for step in range(8) for _ in range(2)]
    assert set(table["state"].to_pylist()) == {"settling", "none"}
    assert record.sharpness()["step"].to_pylist() == [5, 7]
    assert [note for note in record.notes if "went back" not in note] == []
    verification = record.verify()
    assert verification.whole
    assert not any(check.checked for check in verification.tables)
    with RecordWriter(tmp_path / "a", metadata={}, resume=True) as writer:
        writer.append({"step": [8], "param": ["conv1.weight"]})
    assert read_record(tmp_path / "a").samples(["step"])["step"].to_pylist()[-2:] == [7, 8]


def test_a_damaged_description_of_the_first_edition_is_one_clear_error(tmp_path):
    shutil.copytree(FORMER, tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text("{")
    with pytest.raises(EquilibriaError, match=r"run.json: not the description of a run"):
        read_record(tmp_path / "a")


# ---- holes between sessions


def unclosed(directory, steps, **more):
    """A session whose process is gone."""
    writer = RecordWriter(directory, metadata={}, resume=True, **more)
    for step in steps:
        writer.append(rows([step]))
    writer.flush()
    writer._lock.release()


def test_samples_that_a_checkpoint_knows_of_and_the_record_lacks_are_noted(tmp_path):
    unclosed(tmp_path, range(10))
    unclosed(tmp_path, range(20, 25), after=19)
    record = read_record(tmp_path)
    assert record.notes == ("samples-001.arrows: samples of steps 10 to 19, before it, were not written",)
    assert record.verify().holes == record.notes
    assert not record.verify().whole


def test_a_session_that_goes_on_where_the_record_ends_has_no_hole(tmp_path):
    unclosed(tmp_path, [0, 7, 14])  # every seven steps
    unclosed(tmp_path, [21, 28], after=14)
    unclosed(tmp_path, [21, 29], after=14)  # resumed again from the same checkpoint
    assert [note for note in read_record(tmp_path).notes if "went back" not in note] == []


def test_a_wide_gap_after_a_session_that_was_not_closed_is_noted(tmp_path):
    unclosed(tmp_path, [0, 5, 10])
    unclosed(tmp_path, [40, 45])
    (note,) = read_record(tmp_path).notes
    assert note == "samples-001.arrows: samples of steps 11 to 39, before it, were not written"


def test_verify_of_a_run_that_is_being_recorded(tmp_path):
    with RecordWriter(tmp_path, metadata={}, flush_seconds=3600) as writer:
        writer.append(rows([0]))
        writer.flush()
        path = tmp_path / "samples-000.arrows"
        with path.open("ab") as file:
            file.write(np.int32(-1).tobytes() + bytes(6))  # of a batch that is being written
        verification = read_record(tmp_path).verify()
        assert verification.whole
        assert "not closed" in str(verification)
        os.truncate(path, path.stat().st_size - 10)
    assert read_record(tmp_path).verify().whole
