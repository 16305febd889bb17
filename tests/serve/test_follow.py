"""One run, followed while it grows: its state, its counts and its page."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.compute as pc
from tests.helpers.report_helpers import run
from tests.helpers.served import columns, write_run

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.summary import summarise
from equilibria.records import SAMPLE_SCHEMA, RecordWriter, read_record
from equilibria.records._segment import segment_paths
from equilibria.records._thinning import ThinnedSamples
from equilibria.records.tables import FORMAT_KEY
from equilibria.serve.follow import DAMAGED, DELETED, FINISHED, TRAINING, FollowedRun


def test_a_followed_run_has_the_findings_of_the_report(tmp_path):
    samples = write_run(tmp_path / "a", 4, steps=6000, outlier=2)
    followed = FollowedRun(tmp_path / "a", name="a")
    assert followed.look()
    followed.read()
    recorded = read_record(tmp_path / "a")
    view = followed.show()
    findings = diagnose(recorded.samples(), metadata=recorded.metadata)
    assert followed.status.state == FINISHED
    assert (followed.status.steps, followed.status.samples) == (5991, samples.num_rows)
    assert view.worst == findings[0]
    live = summarise(followed.snapshot().samples(), metadata=recorded.metadata)
    assert live == summarise(recorded.samples(), metadata=recorded.metadata)
    assert followed.show() is view  # nothing is new
    assert not followed.look()


def test_states_of_earlier_versions_are_served_under_their_present_names(tmp_path):
    former = {"settling": "approaching", "none": "no equilibrium"}
    samples = write_run(tmp_path / "a", 2, steps=300)
    path = segment_paths(tmp_path / "a")[0]
    present = read_record(tmp_path / "a").samples()["state"].to_pylist()
    assert set(former) & set(present)
    states = pa.array([former.get(state, state) for state in present]).dictionary_encode()
    table = samples.set_column(samples.column_names.index("state"), samples.schema.field("state"), states)
    earlier = SAMPLE_SCHEMA.with_metadata({FORMAT_KEY: "1.1"})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, earlier) as stream:
        stream.write_table(table.cast(earlier))
    followed = FollowedRun(tmp_path / "a", name="a")
    followed.look()
    followed.read()
    rows = zip(samples["step"].to_pylist(), samples["param"].to_pylist(), present, strict=True)
    live = followed.snapshot().samples()
    assert sorted(zip(*(live[name].to_pylist() for name in ("step", "param", "state")), strict=True)) == sorted(rows)
    assert "approaching" not in followed.show().payload.decode()


def test_logged_numbers_are_followed_like_samples(tmp_path):
    samples, metadata = run(2, steps=300, every=10)
    followed = FollowedRun(tmp_path / "a", name="a")

    def read():
        followed.look()
        followed.read()
        table = followed.metrics()
        return list(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))

    def numbers(steps, shift):
        return {"step": list(steps), "name": ["loss"] * len(steps), "value": [step + shift for step in steps]}

    with RecordWriter(tmp_path / "a", metadata=metadata) as writer:
        writer.append(columns(samples))
        writer.append(numbers(range(0, 300, 50), 0.0), table="metrics")
        writer.flush()
        assert read() == [(step, float(step)) for step in range(0, 300, 50)]
        version, data = followed.version, json.loads(followed.show().payload)["data"]
        assert [panel["name"] for panel in data["metrics"]] == ["loss"]
        writer.append(numbers([300], 0.5), table="metrics")  # a number alone is news
        writer.flush()
        assert read()[-1] == (300, 300.5)
        assert followed.version > version
    with RecordWriter(tmp_path / "a", metadata=metadata, resume=True) as writer:
        later = samples.filter(pc.greater_equal(samples["step"], 120))
        writer.append(columns(later))
        writer.append(numbers([150], 0.25), table="metrics")
    expected = [(0, 0.0), (50, 50.0), (100, 100.0), (150, 150.25)]
    assert read() == expected
    recorded = read_record(tmp_path / "a").metrics()
    assert list(zip(recorded["step"].to_pylist(), recorded["value"].to_pylist(), strict=True)) == expected
    assert followed.snapshot().metrics().num_rows == 4


def test_the_state_follows_the_writer(tmp_path):
    samples, metadata = run(1, steps=300, every=10)
    followed = FollowedRun(tmp_path / "a", name="a")
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
    assert (followed.status.state, followed.status.steps) == (FINISHED, 291)  # the segments say the same as run.json
    assert "taken from the segments" in followed.status.message
    assert "not the description of a run" in followed.show().payload.decode()
    assert str(tmp_path) not in followed.show().payload.decode()
    (tmp_path / "a" / "run.json").unlink()
    assert followed.look()
    assert (followed.status.state, followed.status.steps) == (FINISHED, 291)
    assert "run.json is missing" in followed.show().payload.decode()
    segment_paths(tmp_path / "a")[0].unlink()
    (tmp_path / "a" / "run.json").write_text("no run")
    assert followed.look()
    assert followed.status.state == DAMAGED


def test_a_run_that_replaces_another_is_read_from_its_start(tmp_path):
    write_run(tmp_path / "a", 2, steps=1000)
    followed = FollowedRun(tmp_path / "a", name="a")
    followed.look()
    followed.read()
    shutil.rmtree(tmp_path / "a")
    assert followed.look()
    assert (followed.status.state, followed.status.message) == (DELETED, "Its folder is gone")
    write_run(tmp_path / "a", 1, steps=500)
    assert followed.look()
    followed.read()
    assert (followed.status.state, followed.status.samples) == (FINISHED, 50)


def test_a_file_that_cannot_be_read_stays_damaged(tmp_path):
    write_run(tmp_path / "a", 1, steps=500)
    followed = FollowedRun(tmp_path / "a", name="a")
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


def test_a_long_run_that_was_resumed_is_counted_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(ThinnedSamples.__init__, "__kwdefaults__", {"most": 500, "rollbacks": ()})
    samples, metadata = run(2, steps=1000, every=1)
    again = columns(samples.filter(pa.compute.greater_equal(samples["step"], 601)))
    followed = FollowedRun(tmp_path / "a", name="a")
    for session in range(3):
        with RecordWriter(tmp_path / "a", metadata=metadata, resume=session > 0) as writer:
            writer.append(columns(samples) if session == 0 else again)
        followed.look()
        followed.read()
        assert followed.status.samples == 2000
    fresh = FollowedRun(tmp_path / "a", name="a")
    fresh.look()
    fresh.read()
    assert fresh.status == followed.status
    page = followed.show().payload.decode()
    assert page.count("went back to step 601, 2 times") == 1
