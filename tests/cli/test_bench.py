"""`equilibria bench`: a table for people and the same as JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from equilibria.cli import app
from equilibria.errors import EquilibriaError
from equilibria.watching._bench import _overhead

SMALL = ("bench", "--device", "cpu", "--width", "8", "--layers", "1", "--tokens", "4", "--steps", "2")


def run(*line):
    result = CliRunner().invoke(app, line, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_table_and_its_numbers():
    found = json.loads(run(*SMALL, "--json"))
    assert (found["tensors"], found["parameters"]) == (6, 4 * 64 + 2 * 8 * 32)
    assert [row["optimizer"] for row in found["rows"]] == ["SGD, momentum", "AdamW"]
    for row, numbers in zip(found["rows"], (3, 4), strict=True):
        assert row["rate"] * row["sample"] == pytest.approx(4 * numbers * found["parameters"])
        assert row["overhead_every_step"][1] > 0  # six tiny tensors: a sample costs far more than their step
        assert row["kernels"] is None
        assert all(row[key] == sorted(row[key]) and len(row[key]) == 3 for key in row if key.startswith("overhead"))
    assert found["machine"]["device"].startswith("cpu")


def test_the_table_is_made_for_sending():
    lines = run(*SMALL).splitlines()
    assert lines[0].startswith("equilibria: ")
    assert lines[-4].startswith("| optimizer | step, ms | every=auto | every=1 | sample, ms | launches |")
    assert lines[-1].startswith("| AdamW |") and lines[-1].count("|") == 9


def test_an_overhead_of_either_sign_is_no_result():
    assert _overhead((-0.065, 0.01, 0.08)) == "below the scatter [-6.50%, +8.00%]"
    assert _overhead((0.01, 0.02, 0.03)) == "+2.00% [+1.00%, +3.00%]"


@pytest.mark.parametrize(
    "line",
    [("--device", "nonsense"), ("--device", "meta"), ("--width", "10000000"), ("--width", "0"), ("--steps", "0")],
)
def test_bad_input_is_named(line):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        run("bench", *line)
