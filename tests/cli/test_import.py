"""`equilibria import`: what it prints, and errors in the names of its flags."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from equilibria.cli import app
from equilibria.records import read_record


@pytest.fixture
def table(tmp_path):
    lines = [f"{step},{5 + step * 1e-4!r},{0.01 + step * 1e-6!r},0.002" for step in range(30)]
    (tmp_path / "log.csv").write_text("\n".join(["step,norm/a,update_norm/a,lr", *lines]))
    return tmp_path / "log.csv"


def run(*arguments):
    return CliRunner().invoke(app, ["import", *map(str, arguments)])


def test_it_prints_what_was_imported_and_what_the_source_cannot_tell(table, tmp_path):
    result = run(table, tmp_path / "run", "--optimizer", "adamw", "--wd", "0.1", "--betas", "0.9,0.95")
    assert result.exit_code == 0, result.output
    assert "run: 1 parameter, steps 0 to 29, 30 samples, 30 of them with an angle" in result.output
    assert "- imported from log.csv (table): no gradients were logged" in result.output
    assert read_record(tmp_path / "run").metadata["params"][0]["rule"]["betas"] == [0.9, 0.95]


def test_json(table, tmp_path):
    result = run(table, tmp_path / "run", "--select", "a", "--column", "norm=norm/{param}", "--json")
    printed = json.loads(result.output)
    assert printed["params"] == ["a"]
    assert (printed["first_step"], printed["last_step"], printed["samples"], printed["angles"]) == (0, 29, 30, 30)
    assert printed["kind"] == "table"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adamw"], "without --wd, which the source does not log; expected --wd="),
        (["--optimizer", "adamw", "--wd", "decay"], "expected a number or a logged metric"),
        (["--betas", "0.9,0.95"], "got --betas without --optimizer; expected both"),
        (["--optimizer", "lion", "--wd", "0.1", "--momentum", "0.9"], "got --momentum with --optimizer lion"),
        (["--column", "norm"], "got --column 'norm'; expected a number and a pattern"),
        (["--lr", "nan"], "expected a finite number"),
    ],
)
def test_errors_name_flags_and_write_nothing(arguments, message, table, tmp_path):
    result = run(table, tmp_path / "run", *arguments)
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"
    assert not (tmp_path / "run").exists()
