from __future__ import annotations

import pytest
from tests.helpers.record_helpers import rows

from equilibria.errors import EquilibriaError
from equilibria.records import SAMPLE_SCHEMA, RecordWriter, compare, read_record


def write(directory, steps, params):
    with RecordWriter(directory, metadata={}) as writer:
        for step in steps:
            writer.append(rows([step], params=params))
            writer.flush()
    return directory


@pytest.fixture
def both(tmp_path):
    a = write(tmp_path / "a", [0, 2, 4, 6], ("z", "old", "m"))
    b = write(tmp_path / "b", [2, 3, 4], ("new", "m", "z"))  # the same words under other numbers
    return a, b


def test_common_steps_and_parameters_side_by_side(both):
    comparison = compare(*both)
    assert comparison.table.select(["step", "param"]).to_pydict() == {
        "step": [2, 2, 4, 4],
        "param": ["z", "m", "z", "m"],
    }
    for suffix, path in zip("ab", both, strict=True):
        samples = {(row["step"], row["param"]): row for row in read_record(path).samples().to_pylist()}
        for row in comparison.table.to_pylist():
            original = samples[row["step"], row["param"]]
            assert {name: row[f"{name}_{suffix}"] for name in SAMPLE_SCHEMA.names[2:]} == {
                name: original[name] for name in SAMPLE_SCHEMA.names[2:]
            }
    assert comparison.only_in_a == ("old",)
    assert comparison.only_in_b == ("new",)
    assert comparison.notes == ()


def test_names_and_units_of_the_columns(both):
    schema = compare(*both).table.schema
    rest = SAMPLE_SCHEMA.names[2:]
    assert schema.names == ["step", "param", *(f"{name}_a" for name in rest), *(f"{name}_b" for name in rest)]
    assert schema.field("angle_a").metadata == schema.field("angle_b").metadata == {b"unit": b"rad"}


def test_runs_are_accepted_as_well_as_their_directories(both):
    a, b = map(read_record, both)
    assert compare(a, b).table.equals(compare(*map(str, both)).table)


def test_a_run_with_itself(both):
    comparison = compare(both[0], both[0])
    assert comparison.table.num_rows == 12
    assert comparison.table["norm_a"].to_pylist() == comparison.table["norm_b"].to_pylist()
    assert comparison.only_in_a == comparison.only_in_b == ()


def test_nothing_in_common_is_noted(tmp_path):
    comparison = compare(write(tmp_path / "a", [0], ("x",)), write(tmp_path / "b", [1], ("x",)))
    assert comparison.table.num_rows == 0
    assert comparison.notes == ("the two runs sampled no step and parameter in common",)


def test_the_notes_of_both_runs_are_kept(both):
    with RecordWriter(both[1], metadata={}, resume=True) as writer:
        writer.append(rows([4], params=("m",)))
    comparison = compare(*both)
    assert comparison.notes == ("b: samples-000.arrows: 3 rows left out, the run went back to step 4 after them",)


def test_a_missing_run(both, tmp_path):
    with pytest.raises(EquilibriaError, match="there is no directory"):
        compare(both[0], tmp_path / "none")
