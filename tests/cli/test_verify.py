"""`equilibria verify`: exit codes and what is said."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.helpers.record_helpers import rows

from equilibria.cli import app
from equilibria.records import RecordWriter


@pytest.fixture
def run(tmp_path):
    with RecordWriter(tmp_path / "a", metadata={}) as writer:
        for step in range(4):
            writer.append(rows([step]))
            writer.flush()
    return tmp_path / "a"


def verify(*line):
    result = CliRunner().invoke(app, ["verify", *map(str, line)], standalone_mode=False)
    return result, result.return_value


def test_a_whole_run(run):
    result, code = verify(run)
    assert code == 0
    assert result.output == f"{run}: whole\n  samples-000.arrows: 8 rows, steps 0 to 3\n"


def test_a_damaged_run(run):
    path = run / "samples-000.arrows"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result, code = verify(run)
    assert code == 1
    assert result.output.startswith(f"{run}: damaged\n  samples-000.arrows: 6 rows, steps 0 to 3\n  ! samples-000")
    result, code = verify(run, "--json")
    answer = json.loads(result.output)
    assert code == 1
    assert (answer["whole"], answer["holes"], answer["damage"]) == (False, [], [])
    assert answer["tables"][0]["rows"] == 6
    assert "between step" in answer["tables"][0]["damage"][0]


def test_what_is_no_run_is_bad_input(tmp_path):
    result, _ = verify(tmp_path)
    assert "is not a run" in str(result.exception)
